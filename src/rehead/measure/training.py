"""Memory of one training step, by what holds it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from rehead.model import LanguageModel

AT_PEAK = {"weights": "Parameter", "gradients": "Gradient", "optimizer": "Optstate", "peak": "Total"}


def step_memory(
    model: LanguageModel,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizer: Optimizer,
    ids: Tensor,
    *,
    accumulates: bool = False,
) -> dict[str, int]:
    """Return the bytes of tensors at the `peak` of a training step on `ids` (B, L + 1), and their parts.

    The step minimises `loss_of` inputs and targets, both (B, L), in the mode of the model, whose weights it changes.
    `weights`, also those of a teacher, `gradients` and `optimizer` (its moments) are those at the peak; `activations`
    is what the forward pass has saved when it ends, of which the backward pass may free a part before the peak. Only
    allocated tensors count, not the memory of Python and torch. A step that `accumulates` has the gradients of another
    batch already.
    """
    inputs, targets = ids[:, :-1].to(model.device), ids[:, 1:].to(model.device)

    def step(forward_ends: Callable[[], None]) -> None:
        if not accumulates:
            optimizer.zero_grad(set_to_none=True)
        loss = loss_of(inputs, targets)
        forward_ends()
        loss.backward()
        optimizer.step()

    tracker = _tracker()
    activations: list[int] = []

    def snapshot(moment: str) -> dict[str, int]:
        sizes = tracker.get_tracker_snapshot(moment)[model.device]
        return {str(getattr(key, "value", key)): size for key, size in sizes.items()}

    step(lambda: None)  # so that the optimizer has its moments
    tracker.track_external(model, optimizer, inputs, targets)
    with warnings.catch_warnings(), tracker:
        warnings.simplefilter("ignore")
        step(lambda: activations.append(snapshot("current")["Activation"]))
    peak = snapshot("peak")
    return {ours: peak.get(theirs, 0) for ours, theirs in AT_PEAK.items()} | {"activations": activations[0]}


def _tracker() -> Any:
    """Return torch's memory tracker, which learns what weights there are as their modules are called.

    It would also follow the calls of modules, which it cannot if a part of the gradient is computed in the forward
    pass, as that of many logits is.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        def __init__(self) -> None:
            super().__init__()
            self._mod_tracker: Any = _Calls(self._called)

        def _called(self, module: nn.Module, _: Any) -> None:
            trained = all(weight.requires_grad for weight in module.parameters())
            self._track_module_params_and_buffers(module, install_grad_hooks=trained)

    return Tracker()


class _Calls:
    """What the memory tracker asks of torch's ModTracker."""

    def __init__(self, called: Callable[[nn.Module, Any], None]) -> None:
        self._called = called

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, *hooks: Any) -> None:
        """None is called: they follow the modules."""

    def clear_user_hooks(self) -> None:
        """There are none."""

    def __enter__(self) -> "_Calls":
        self._hook = register_module_forward_pre_hook(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
