"""Checks of the token ids that a caller passes."""

import numpy as np
import torch
from torch import Tensor

from rehead.attention.call import require_positions
from rehead.errors import UsageError

SHAPES = {1: "(L,)", 2: "(B, L)"}
WAYS = {
    0: "ids[None, None] is a batch of one token",
    1: "ids[None] is a batch of one text",
    2: "ids[0] is one text",
}


def require_ids(ids: object, name: str = "ids", dims: tuple[int, ...] = (1, 2)) -> Tensor:
    """Return integers in a tensor or a NumPy array whose number of dimensions is in `dims`, as an int64 tensor.

    Raises UsageError otherwise. `require_range` checks the range.
    """
    rule = f"token ids are a tensor or an array of whole numbers, {' or '.join(SHAPES[n] for n in dims)}"
    if not isinstance(ids, Tensor | np.ndarray):
        what = f"{ids!r:.40}, text" if isinstance(ids, str) else f"a {type(ids).__name__}"
        way = "Encode text with rehead.load_tokenizer(path).encode(text); wrap a list in torch.tensor(ids)"
        raise UsageError(f"{name} is {what}: {rule}. {way}.")
    kind = str(ids.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        convert = "ids.long()" if isinstance(ids, Tensor) else 'ids.astype("int64")'
        raise UsageError(f"{name} has dtype {kind}: {rule}. Convert with {convert} if they are whole.")
    if ids.ndim not in dims:
        raise UsageError(f"{name} has shape {tuple(ids.shape)}: {rule}. {WAYS.get(ids.ndim, WAYS[2])}.")
    return ids.long() if isinstance(ids, Tensor) else torch.from_numpy(ids.astype(np.int64))


def require_range(ids: Tensor, vocab_size: int, name: str = "ids") -> None:
    """Refuse ids outside the vocabulary."""
    if not ids.numel():
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if not 0 <= smallest <= largest < vocab_size:
        raise UsageError(
            f"{name} holds {smallest} to {largest}: tokens are 0 to {vocab_size - 1} here. Encode the text with the "
            "model's own tokenizer."
        )


def require_places(positions: object, ids: Tensor) -> None:
    """Refuse anything but the positions of `ids`, (B, L) or (1, L)."""
    if not isinstance(positions, Tensor):
        what = type(positions).__name__
        raise UsageError(f"positions is a {what}: expected a tensor, (B, L). Use torch.tensor(positions).")
    require_positions("positions", positions, ids)


def require_device(ids: Tensor, device: torch.device) -> None:
    """Refuse ids that are not where the model is."""
    if ids.device != device:
        raise UsageError(
            f"ids is on {ids.device}, the model on {device}: they must match. Use ids.to(model.device)."
        )
