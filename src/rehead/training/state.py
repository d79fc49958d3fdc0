"""Everything beside the weights that decides how training goes on, as tensors and numbers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rehead.errors import IntegrityError

TENSORS, NUMBERS = "state.safetensors", "state.json"


def write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, draws: Tensor, numbers: dict[str, Any]
) -> None:
    """Optimizer moments by weight name, random states, the batch sampler's `draws`, and `numbers`."""
    tensors = {"rng.torch": torch.get_rng_state(), "rng.batches": draws}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, weight in model.named_parameters():
        for key, value in optimizer.state[weight].items():
            tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
    save_file(tensors, folder / TENSORS)
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=1), encoding="utf-8")


def read_numbers(folder: Path) -> dict[str, Any]:
    """What `write` was given as `numbers`."""
    try:
        numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"{folder / NUMBERS} is missing or damaged: this checkpoint cannot go on."
        ) from error
    return dict(numbers)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Set optimizer and random states as they were; return the batch sampler's.

    Raises IntegrityError where the state is of another model.
    """
    tensors = load_file(folder / TENSORS)
    draws = tensors.pop("rng.batches")
    torch.set_rng_state(tensors.pop("rng.torch"))
    cuda = tensors.pop("rng.cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    weights = dict(model.named_parameters())
    for name, value in tensors.items():
        _, key, weight_name = name.split(".", 2)
        weight = weights.get(weight_name)
        if weight is None or (value.dim() and value.shape != weight.shape):
            raise IntegrityError(f"{folder / TENSORS}: {name} fits no weight of this model.")
        at = torch.device("cpu") if key == "step" and weight.device.type == "cpu" else weight.device
        optimizer.state[weight][key] = value.to(at)
    return draws
