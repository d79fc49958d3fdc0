"""The state that resuming needs besides the weights, as tensors and numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rehead.checkpoint.files.shards import read_header
from rehead.checkpoint.files.strict import strict_json
from rehead.checkpoint.files.writing import write_file
from rehead.errors import IntegrityError, InvalidInput

TENSORS, NUMBERS = "state.safetensors", "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of one weight."""
LARGEST = 2**20
"""Bytes of state.json, at most."""

WITHOUT = "Remove its folder, and the run resumes from the checkpoint before it."


def tensors_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    draws: Tensor,
    random: dict[str, Tensor],
    deferred: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return optimizer moments by weight name, random states, and the batch sampler's `draws`, as `write` wants them.

    `deferred` returns a moment, which may be sharded, as one that can be written.
    """
    tensors = {**random, "rng.batches": draws}
    for name, weight in model.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            tensors[f"optimizer.{key}.{name}"] = deferred(value.detach())
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write `tensors_of` a run, and `numbers`."""
    write_file(folder / TENSORS, tensors)
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=1), encoding="utf-8")


def random_states() -> dict[str, Tensor]:
    """Return the random states of torch, of GPUs that of the current one."""
    states = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random(states: dict[str, Tensor]) -> None:
    """Restore `random_states`; those of a GPU where there is one. Raises KeyError if the CPU's is missing."""
    torch.set_rng_state(states["rng.torch"])
    if "rng.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["rng.cuda"])


def read_numbers(folder: Path) -> dict[str, Any]:
    """Return the `numbers` given to `write`. Raises IntegrityError if they are missing or damaged."""
    try:
        numbers = strict_json(folder / NUMBERS, LARGEST)
        # By type, since true is an int.
        kinds = {"step": (int,), "text_sha256": (str,), "best_val_loss": (float, type(None))}
        if all(type(numbers[name]) in kind for name, kind in kinds.items()) and numbers["step"] >= 0:
            return dict(numbers)
    except (InvalidInput, KeyError, TypeError) as error:
        raise _damaged(folder / NUMBERS) from error
    raise _damaged(folder / NUMBERS)


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    random: Callable[[dict[str, Tensor]], None] = restore_random,
    like: Callable[[Tensor, Tensor], Tensor] = lambda weight, value: value.to(weight.device),
) -> Tensor:
    """Restore the optimizer and the random states; return the state of the batch sampler.

    `random` restores the random states, and `like` puts whole moments where a weight is.

    Raises IntegrityError if the state is damaged or belongs to another model.
    """
    path = folder / TENSORS
    try:
        kinds = {name: (entry.shape, entry.dtype) for name, entry in read_header(path)}
        tensors = load_file(path)
        draws = tensors.pop("rng.batches")
        random({name: tensors.pop(name) for name in sorted(tensors) if name.startswith("rng.")})
    except (InvalidInput, OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(path) from error
    _require_moments(path, {name: kinds[name] for name in tensors}, model, read_numbers(folder)["step"])
    for name, weight in model.named_parameters():
        for key in MOMENTS:
            if f"optimizer.{key}.{name}" in tensors:
                value = tensors[f"optimizer.{key}.{name}"]
                optimizer.state[weight][key] = (
                    value.to(weight.device) if key == "step" else like(weight, value)
                )
    return draws


Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


def _require_moments(path: Path, kinds: dict[str, Kind], model: nn.Module, step: int) -> None:
    """Raise IntegrityError for moments of unknown weights, of wrong shapes or dtypes, or missing ones."""
    left = dict(kinds)
    for name, weight in model.named_parameters():
        found = {key: left.pop(f"optimizer.{key}.{name}", None) for key in MOMENTS}
        if any(found.values()) and not all(_fits(kind, key, weight) for key, kind in found.items()):
            raise IntegrityError(
                f"{path}: {name} has moments {found}, expected those of {tuple(weight.shape)} in {weight.dtype}. "
                f"{WITHOUT}"
            )
    if left:
        raise IntegrityError(f"{path}: {min(left):.200} does not belong to a weight of this model. {WITHOUT}")
    if step and not kinds:
        raise IntegrityError(f"{path} has no optimizer state although step {step} was reached. {WITHOUT}")


def _fits(kind: Kind | None, key: str, weight: Tensor) -> bool:
    """Whether a moment is what AdamW keeps for a weight; it counts steps in float32 or in the default dtype."""
    if key == "step":
        return kind in (((), torch.float32), ((), torch.get_default_dtype()))
    return kind == (tuple(weight.shape), weight.dtype)


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(f"{path} is missing or damaged: this checkpoint cannot be resumed. {WITHOUT}")
