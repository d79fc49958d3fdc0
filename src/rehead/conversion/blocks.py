"""The blocks of tokens that a conversion is fitted to and measured on."""

import numpy as np

from rehead.config import GPTConfig
from rehead.conversion.texts import SELF, Passage
from rehead.data import IGNORE, Batch, Ids, evaluation_blocks, require_vocabulary
from rehead.measure.forecast import forward_bytes, loss_bytes
from rehead.measure.length import text_length
from rehead.model import LanguageModel
from rehead.system.memory import require_memory

CALIBRATION_TOKENS = 49_152
TEST_TOKENS = 65_536
"""Tokens read of all texts together, at most; windows are spread evenly over each."""
BATCH_TOKENS = 4096
RANDOM_BLOCKS, RANDOM_TOKENS = 4, 4096


def require_windows(model: LanguageModel, length: int) -> None:
    """Raise ResourceError where the windows that are read at once do not fit the memory."""
    many, dtype = _at_once(length), model.head.weight.dtype
    parts = {
        "activations": forward_bytes(model.config, many, length, dtype),
        "logits": 2 * loss_bytes(model.config, many * length, dtype),
    }
    require_memory(
        f"reading {many} x {length:,} tokens at once", parts, "Use a smaller --length.", model.device
    )


def blocks_of(
    model: LanguageModel,
    ids: Ids,
    limit: int = CALIBRATION_TOKENS,
    length: int | None = None,
    bos: int | None = None,
) -> list[Batch]:
    """Return blocks of `length`, by default as in `text_length`, at most `limit` tokens spread over a text.

    `bos` is as in `evaluation_blocks`.
    """
    require_vocabulary(ids, model.config.vocab_size)
    length = text_length(model.config, length)
    many = max(1, limit // length)
    return list(evaluation_blocks(ids, length, _at_once(length), many, bos=bos))


def measured_blocks(
    model: LanguageModel, text: Passage, length: int, limit: int = TEST_TOKENS
) -> list[Batch]:
    """Return the blocks that a conversion is measured on, at most `limit` tokens.

    A text sampled from a model is one window after another: the token after a window does not follow from it.
    """
    blocks = blocks_of(model, text.ids, limit, length, text.bos)
    for _, targets in blocks if text.name == SELF else ():
        targets[:, -1] = IGNORE
    return blocks


def _at_once(length: int) -> int:
    """Return the number of blocks in a batch; logits are computed for a part of their tokens at a time."""
    return max(1, BATCH_TOKENS // length)


def random_blocks(config: GPTConfig, seed: int, length: int | None = None) -> list[Batch]:
    """Return blocks of random tokens, for a model without a text."""
    length = text_length(config, length)
    many = max(1, min(RANDOM_BLOCKS, RANDOM_TOKENS // length))
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=many * length + 1)
    return list(evaluation_blocks(ids, length, 1 if many * length >= RANDOM_TOKENS else many))
