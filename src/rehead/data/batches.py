"""Batches of blocks: at random places to train on, one after another to evaluate on."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from rehead.data.tokens import Ids, require_block
from rehead.errors import ConfigError, IntegrityError, InvalidInput
from rehead.stages import staged

IGNORE = -100  # the target that counts for nothing, as in torch's cross entropy
Batch = tuple[Int64[Tensor, "B L"], Int64[Tensor, "B L"]]
Pair = tuple[Tensor, Tensor]
"""A batch of several that differ in shape."""


class BatchSampler:
    """Windows at random places of a text, with replacement, from a generator of its own."""

    def __init__(self, ids: Ids, block_size: int, batch_size: int, seed: int) -> None:
        require_block(ids, block_size, "training")
        self._ids, self._block_size, self._batch_size = ids, block_size, batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Batch:
        """Inputs (B, L) and targets (B, L), which are the inputs one token on."""
        n_start = len(self._ids) - self._block_size
        starts = torch.randint(n_start, (self._batch_size, 1), generator=self._generator).numpy()
        windows = torch.from_numpy(self._ids[starts + np.arange(self._block_size + 1)].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state(self) -> UInt8[Tensor, "bytes"]:
        """Where the generator is, for `restore`: the batches that follow are then the same to the bit."""
        return self._generator.get_state()

    def restore(self, state: UInt8[Tensor, "bytes"]) -> None:
        """Continues from a `state`. IntegrityError when it is none."""
        try:
            self._generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise IntegrityError(
                f"a sampler state of {len(state)} bytes is damaged: resume an older step."
            ) from error


def shown(blocks: Iterable[Pair], title: str, total: int | None = None) -> Iterator[Pair]:
    """Pass `blocks` on as a stage, measured in the targets that count; `total` is needed where they are no list."""
    if total is None:
        blocks = list(blocks)
        total = sum(map(_targets, blocks))
    return staged(blocks, title, total, "tokens", _targets)


def _targets(batch: Pair) -> int:
    return int((batch[1] != IGNORE).sum())


def evaluation_blocks(
    ids: Ids, block_size: int, batch_size: int, limit: int | None = None
) -> Iterator[Batch]:
    """Inputs and targets (B, L) over consecutive blocks: every token but the first is a target once.

    The last block is filled up with inputs 0 and targets IGNORE, the last batch may have fewer rows.
    `limit` takes that many blocks, evenly spread over the text. InvalidInput below two tokens.
    """
    if len(ids) < 2:
        raise InvalidInput(f"a text of {len(ids)} tokens has nothing to predict: use a longer one.")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} blocks: evaluate 1 or more, or give no limit.")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}. Use 1 or more.")
    starts = np.arange(0, len(ids) - 1, block_size)
    if limit is not None and limit < len(starts):
        starts = starts[np.arange(limit) * len(starts) // limit]
    for first in range(0, len(starts), batch_size):
        at = starts[first : first + batch_size, None] + np.arange(block_size + 1)
        windows = torch.from_numpy(ids[np.minimum(at, len(ids) - 1)].astype(np.int64))
        beyond = torch.from_numpy(at >= len(ids))
        yield (
            windows[:, :-1].masked_fill(beyond[:, :-1], 0),
            windows[:, 1:].masked_fill(beyond[:, 1:], IGNORE),
        )
