"""The blocks of tokens that a conversion is fitted to and measured on."""

from numbers import Integral

import numpy as np

from rehead.config import GPTConfig, ModelConfig
from rehead.data import Batch, Ids, evaluation_blocks, require_vocabulary
from rehead.errors import ConfigError
from rehead.model import LanguageModel

CALIBRATION_TOKENS = 49_152
TEST_TOKENS = 65_536
"""Tokens read of all texts together, at most; windows are spread evenly over each."""
WINDOW = 1024
"""Tokens per window where no length is given and the model reads more."""
BATCH_TOKENS, BATCH_LOGITS = 4096, 2**27
RANDOM_BLOCKS = 4


def blocks_of(
    model: LanguageModel, ids: Ids, limit: int = CALIBRATION_TOKENS, length: int | None = None
) -> list[Batch]:
    """Return blocks of `length`, by default as in `block_length`, at most `limit` tokens spread over a text."""
    require_vocabulary(ids, model.config.vocab_size)
    length = block_length(model.config, length)
    most = min(BATCH_TOKENS, BATCH_LOGITS // model.config.vocab_size)
    return list(evaluation_blocks(ids, length, max(1, most // length), max(1, limit // length)))


def block_length(config: ModelConfig, length: int | None = None) -> int:
    """Return the tokens per block. Raises ConfigError for more than the model reads."""
    if length is None:
        return min(config.block_size, WINDOW)
    if not isinstance(length, Integral) or not 1 <= length <= config.block_size:
        raise ConfigError(
            f"length={length!r:.40}: tokens of a window, of which the model reads {config.block_size} at most. "
            f"Use 1 to {config.block_size}."
        )
    return length


def random_blocks(config: GPTConfig, seed: int, length: int | None = None) -> list[Batch]:
    """Return blocks of random tokens, for a model without a text."""
    length = block_length(config, length)
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=RANDOM_BLOCKS * length + 1)
    return list(evaluation_blocks(ids, length, 1 if length >= WINDOW else RANDOM_BLOCKS))
