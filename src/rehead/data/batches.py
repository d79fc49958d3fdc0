"""Batches of blocks: at random positions for training, consecutive for evaluation."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from rehead.data.tokens import Ids, require_block, taken
from rehead.errors import ConfigError, IntegrityError, InvalidInput
from rehead.stages import staged

IGNORE = -100  # a target that is ignored, as in torch's cross entropy
Batch = tuple[Int64[Tensor, "B L"], Int64[Tensor, "B L"]]
Pair = tuple[Tensor, Tensor]
"""Inputs and targets of one batch; batches may differ in shape."""


class BatchSampler:
    """Draws windows at random positions of a text, with replacement, from its own generator.

    `bos` is as in `evaluation_blocks`.
    """

    def __init__(
        self, ids: Ids, block_size: int, batch_size: int, seed: int, *, bos: int | None = None
    ) -> None:
        require_block(ids, block_size, "training")
        self._ids, self._block_size, self._batch_size, self._bos = ids, block_size, batch_size, bos
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Batch:
        """Return inputs (B, L) and targets (B, L), the inputs shifted by one token."""
        n_start = len(self._ids) - self._block_size
        starts = torch.randint(n_start, (self._batch_size, 1), generator=self._generator).numpy()
        windows = taken(self._ids, starts + np.arange(self._block_size + 1))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return _begun(inputs, self._bos), targets

    def state(self) -> UInt8[Tensor, "bytes"]:
        """Return the generator's state; after `restore` the same batches follow, bit for bit."""
        return self._generator.get_state()

    def restore(self, state: UInt8[Tensor, "bytes"]) -> None:
        """Continue from a `state`. Raises IntegrityError for a damaged one."""
        try:
            self._generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise IntegrityError(
                f"a sampler state of {len(state)} bytes is damaged: resume an older step."
            ) from error


def shown(blocks: Iterable[Pair], title: str, total: int | None = None) -> Iterator[Pair]:
    """Yield `blocks` as a stage, counted in targets that are not ignored; a generator needs their `total`."""
    if total is None:
        blocks = list(blocks)
        total = sum(map(_targets, blocks))
    return staged(blocks, title, total, "tokens", _targets)


def _targets(batch: Pair) -> int:
    return int((batch[1] != IGNORE).sum())


def evaluation_blocks(
    ids: Ids,
    block_size: int,
    batch_size: int,
    limit: int | None = None,
    stride: int | None = None,
    bos: int | None = None,
) -> Iterator[Batch]:
    """Yield inputs and targets (B, L) of consecutive blocks: every token but the first is a target once.

    The last block is padded with inputs 0 and targets IGNORE; the last batch may have fewer rows. `limit`
    selects that many blocks, evenly spread over the text. With a `stride` below `block_size` blocks overlap: each
    begins `stride` tokens after the one before, and only its last `stride` tokens are targets (in
    the first block, all are), so that every later target has at least `block_size - stride` tokens before it. With
    `bos`, that token replaces the first one of every block, as in a text given to a model. Raises InvalidInput for
    fewer than two tokens.
    """
    if len(ids) < 2:
        raise InvalidInput(
            f"a text of {len(ids)} token{'s' * (len(ids) != 1)} leaves nothing to predict: use a longer one."
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} blocks: evaluate 1 or more, or give no limit.")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}. Use 1 or more.")
    stride = block_size if stride is None else stride
    if not 1 <= stride <= block_size:
        raise ConfigError(
            f"stride={stride}: blocks of {block_size} tokens would leave some out. Use 1 to {block_size}."
        )
    starts = np.arange(0, max(1, len(ids) - 1 - (block_size - stride)), stride)
    if limit is not None and limit < len(starts):
        starts = starts[np.arange(limit) * len(starts) // limit]
    for first in range(0, len(starts), batch_size):
        at = starts[first : first + batch_size, None] + np.arange(block_size + 1)
        windows = taken(ids, np.minimum(at, len(ids) - 1))
        beyond = torch.from_numpy(at >= len(ids))
        seen = torch.from_numpy((at[:, :1] > 0) & (np.arange(block_size) < block_size - stride))
        yield (
            _begun(windows[:, :-1].masked_fill(beyond[:, :-1], 0), bos),
            windows[:, 1:].masked_fill(beyond[:, 1:] | seen, IGNORE),
        )


def _begun(inputs: Int64[Tensor, "B L"], bos: int | None) -> Int64[Tensor, "B L"]:
    """Put `bos`, if there is one, in place of the first token of every row."""
    if bos is not None:
        inputs[:, 0] = bos
    return inputs
