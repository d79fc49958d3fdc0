"""The default number of tokens of a text that a model reads at once."""

from numbers import Integral
from pathlib import Path

from rehead.checkpoint.find import run_data
from rehead.config import ModelConfig
from rehead.errors import ConfigError

USUAL = 2048
"""Tokens at most, where no length is given: time and memory of a text grow with the length of its blocks."""


def text_length(config: ModelConfig, length: int | None = None, folder: Path | None = None) -> int:
    """Return the tokens of a block: `length` or, if it is None, the length that a run in `folder` trained with.

    Without a run, it is the smaller of the model's length and 2,048. Raises ConfigError for a length beyond the
    model's.
    """
    if length is None:
        run = None if folder is None else run_data(folder)
        length = min(config.block_size, USUAL if run is None else run.block_size)
    if isinstance(length, bool) or not isinstance(length, Integral) or not 1 <= length <= config.block_size:
        raise ConfigError(
            f"length={length!r:.40}: the model reads at most block_size={config.block_size} tokens at once. "
            f"Use 1 to {config.block_size}."
        )
    return length
