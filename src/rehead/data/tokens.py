"""The ids of a text in a memory-mapped file, with the text's checksum and sizes."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from rehead.data.files import resource, write_whole
from rehead.errors import ConfigError, IntegrityError, InvalidInput
from rehead.stages import staged
from rehead.tokenizer import Tokenizer

TOKENS = "tokens.bin"
"""In a run folder, the ids of its text."""
Ids = Integer[np.ndarray, "_"]  # "_" instead of a letter: a call may take two texts of different lengths


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The `ids` (N,) of a text, memory-mapped, with the text's checksum and sizes.

    `sha256` and `n_bytes` are of the text in UTF-8 (for a file without a byte order mark, those of the file).
    """

    ids: Ids
    sha256: str
    n_bytes: int
    n_characters: int


def tokenize(source: Iterable[str], tokenizer: Tokenizer, store: Path) -> Tokens:
    """Write the ids of a text to the file `store`, as raw uint16 (uint32 for a vocabulary above 65,536).

    The chunks of `source` are encoded one at a time, as plain text. Warns if the text has unknown tokens.
    Raises InvalidInput for a text without tokens, and ResourceError if `store` cannot be written; nothing
    is left there then.
    """
    dtype = _dtype(tokenizer)
    digest, n_bytes, n_characters, n_unknown = hashlib.sha256(), 0, 0, 0
    unknown = tokenizer.unknown_id

    def blocks() -> Iterator[bytes]:
        nonlocal n_bytes, n_characters, n_unknown
        last, n_token = "", 0
        for chunk in staged(source, "tokenizing a text", None, "characters", len):
            digest.update(text := chunk.encode())
            n_bytes += len(text)
            n_characters += len(chunk)
            ids = tokenizer.encode(chunk, after=last)
            n_token += len(ids)
            n_unknown += 0 if unknown is None else int((ids == unknown).sum())
            yield ids.astype(dtype).tobytes()
            last = chunk[-1:]
        if not n_token:
            raise InvalidInput("the text has 0 tokens: give a longer one.")

    with resource(f"cannot write the tokens to {str(store)!r}", "free some space, or choose another place"):
        write_whole(store, blocks())
    ids = np.memmap(store, dtype=dtype, mode="r")
    if n_unknown:
        warnings.warn(
            f"{n_unknown} of {len(ids)} tokens are {tokenizer.token(unknown)!r}, the token for everything "
            "outside the vocabulary: losses count all of them as the same token",
            stacklevel=2,
        )
    return Tokens(ids=ids, sha256=digest.hexdigest(), n_bytes=n_bytes, n_characters=n_characters)


def read_ids(store: Path, tokenizer: Tokenizer) -> Ids:
    """Return the ids (N,) that `tokenize` wrote, memory-mapped. Raises InvalidInput if they do not fit `tokenizer`."""
    try:
        ids = np.memmap(store, dtype=_dtype(tokenizer), mode="r")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{store} cannot be read as tokens ({error}): give a text.") from error
    require_vocabulary(ids, tokenizer.vocab_size)
    return ids


def taken(ids: Ids, places: Integer[np.ndarray, "..."]) -> Int64[Tensor, "..."]:
    """Return the ids at `places`. Raises IntegrityError if the file they are read from has been cut short.

    The system would end the process when it reads a page of memory beyond the end of its file.
    """
    if isinstance(ids, np.memmap) and (file := ids._mmap) is not None and file.size() < len(file):  # type: ignore[attr-defined]
        raise IntegrityError(
            f"{ids.filename} was cut from {len(file):,} to {file.size():,} bytes while it was read: start again."
        )
    return torch.from_numpy(ids[places].astype(np.int64))


def _dtype(tokenizer: Tokenizer) -> type[np.uint16 | np.uint32]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def require_vocabulary(ids: Ids, vocab_size: int, bos: int | None = None) -> None:
    """Raise InvalidInput unless every id, and `bos` if given, is at least 0 and below a model's `vocab_size`."""
    if bos is not None and (not isinstance(bos, int | np.integer) or not 0 <= bos < vocab_size):
        raise InvalidInput(f"bos={bos!r:.40}: expected the id of a token, 0 to {vocab_size - 1}, or None.")
    if ids.ndim != 1 or (len(ids) and int(ids.min()) < 0):
        raise InvalidInput(f"token ids of shape {ids.shape}: expected (N,), with no id below 0.")
    if len(ids) and (largest := int(ids.max())) >= vocab_size:
        rule = f"the text has token id {largest}, but the model has vocab_size={vocab_size}"
        raise InvalidInput(f"{rule}: use the model's own tokenizer.json.")


class Split(NamedTuple):
    """The first tokens of a text for training, the rest (possibly none) for validation."""

    train: Ids
    val: Ids


def split(ids: Ids, block_size: int, val_fraction: float = 0.1) -> Split:
    """Split off the last `val_fraction` of the tokens. Raises InvalidInput for a part of less than one block."""
    if not 0 <= val_fraction < 1:
        raise ConfigError(
            f"data.val_fraction={val_fraction} is not in 0 <= f < 1: use 0.1, or 0 for no validation."
        )
    at = int(len(ids) * (1 - val_fraction))
    parts = Split(ids[:at], ids[at:])
    least = min(len(part) for part in parts[: 2 if val_fraction else 1])
    require_block(parts.train, block_size, "training", least)
    if val_fraction:
        require_block(parts.val, block_size, "validation", least)
    return parts


def require_block(ids: Ids, block_size: int, name: str, least: int | None = None) -> None:
    """Raise InvalidInput unless the split called `name` holds one block and the token after it.

    `least` are the tokens of the shortest split, if that is another.
    """
    if len(ids) <= block_size:
        rule = (
            f"the {name} split has {len(ids)} tokens, but one block needs "
            f"data.block_size + 1 = {block_size + 1}"
        )
        least = len(ids) if least is None else least
        smaller = f", or data.block_size={least - 1} or less" if least > 1 else ""
        raise InvalidInput(f"{rule}: use a longer text{smaller}.")
