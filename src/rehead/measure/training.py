"""Memory of one training step, by what holds it."""

import warnings
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from rehead.model import LanguageModel, modes_kept

AT_PEAK = {"weights": "Parameter", "gradients": "Gradient", "optimizer": "Optstate", "peak": "Total"}


def step_memory(model: LanguageModel, optimizer: Optimizer, ids: Tensor) -> dict[str, int]:
    """Return the bytes of tensors at the `peak` of a training step on `ids` (B, L + 1), and their parts.

    `weights`, `gradients` and `optimizer` (its moments) are those at the peak; `activations` is what the forward
    pass has saved when it ends, of which the backward pass may free a part before the peak. Only allocated
    tensors count, not the memory of Python and torch. The step is taken, so the weights change; the mode does not.
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
    activations: list[int] = []

    def snapshot(moment: str) -> dict[str, int]:
        sizes = tracker.get_tracker_snapshot(moment)[model.device]
        return {str(getattr(key, "value", key)): size for key, size in sizes.items()}

    with modes_kept(model), warnings.catch_warnings():
        model.train()
        step(lambda: None)  # so that the optimizer has its moments
        tracker.track_external(model, optimizer, inputs, targets)
        warnings.simplefilter("ignore")
        with tracker:
            step(lambda: activations.append(snapshot("current")["Activation"]))
    peak = snapshot("peak")
    return {ours: peak.get(theirs, 0) for ours, theirs in AT_PEAK.items()} | {"activations": activations[0]}
