"""What one training step holds in memory, named apart."""

import warnings
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from rehead.model import LanguageModel, modes_kept

AT_PEAK = {"weights": "Parameter", "gradients": "Gradient", "optimizer": "Optstate", "peak": "Total"}


def step_memory(model: LanguageModel, optimizer: Optimizer, ids: Tensor) -> dict[str, int]:
    """Bytes of tensors in a training step on `ids` (B, L + 1): `peak`, at its fullest moment, and what of.

    `weights`, `gradients` and `optimizer` (its moments) as they are then; `activations`, what the forward pass
    has kept when it ends, of which the backward pass may have freed a part before that moment. The numbers are
    those of the allocated tensors on any device, without the interpreter's and torch's own. The step is taken,
    the weights change; the mode does not.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    inputs, targets = ids[:, :-1].to(model.device), ids[:, 1:].to(model.device)

    def step(forward_ends: Callable[[], None]) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        forward_ends()
        loss.backward()
        optimizer.step()

    tracker = MemTracker()
    kept: list[int] = []

    def snapshot(of: str) -> dict[str, int]:
        found = tracker.get_tracker_snapshot(of)[model.device]
        return {str(getattr(key, "value", key)): size for key, size in found.items()}

    with modes_kept(model), warnings.catch_warnings():
        model.train()
        step(lambda: None)  # so that the optimizer has its moments
        tracker.track_external(model, optimizer, inputs, targets)
        warnings.simplefilter("ignore")
        with tracker:
            step(lambda: kept.append(snapshot("current")["Activation"]))
    peak = snapshot("peak")
    return {ours: peak.get(theirs, 0) for ours, theirs in AT_PEAK.items()} | {"activations": kept[0]}
