"""What one training step holds in memory, named apart."""

import warnings

import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from rehead.model import LanguageModel

NAMES = {
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
}


def step_memory(model: LanguageModel, optimizer: Optimizer, ids: Tensor) -> dict[str, int]:
    """Bytes of tensors at the fullest moment of a training step on `ids` (B, L + 1): `peak`, and of what.

    `weights`, `gradients`, `optimizer` (its moments), `activations` (kept for the backward pass) and
    `temporary`, everything else; they add up to `peak`. The numbers are those of the allocated tensors
    on any device, without the interpreter's and torch's own. The step is taken, the weights change.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    inputs, targets = ids[:, :-1].to(model.device), ids[:, 1:].to(model.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    model.train()
    step()  # so that the optimizer has its moments
    tracker = MemTracker()
    tracker.track_external(model, optimizer, inputs, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracker:
            step()
    snapshot = tracker.get_tracker_snapshot("peak")[model.device]
    found = {str(getattr(key, "value", key)): size for key, size in snapshot.items()}
    sizes = {ours: found.pop(theirs, 0) for theirs, ours in NAMES.items()}
    peak = found.pop("Total")
    return {**sizes, "temporary": sum(found.values()), "peak": peak}
