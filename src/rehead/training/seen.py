"""Checks whether a text contains training text of a run: its loss then says little about other texts."""

import warnings
from pathlib import Path

import numpy as np

from rehead.checkpoint.files.strict import require_regular
from rehead.checkpoint.find import run_data, run_of
from rehead.data import TOKENS, Ids, read_ids, split
from rehead.errors import ReheadError
from rehead.tokenizer import Tokenizer

WINDOW, PLACES = 256, 16
"""Tokens of a part of the training text, and how many parts are searched for."""


def contains_training_text(folder: Path, ids: Ids, tokenizer: Tokenizer) -> bool | None:
    """Return whether `ids` contain a part of the training text; None if no run folder has that text.

    Warns if the run's options or tokens are there and cannot be read.
    """
    try:
        run, data = run_of(folder), run_data(folder)
        if run is None or data is None or not (run / TOKENS).is_file():
            return None
        require_regular(run / TOKENS)
        trained = split(read_ids(run / TOKENS, tokenizer), data.block_size, data.val_fraction).train
    except ReheadError as error:
        warnings.warn(f"whether the text was trained on is unknown: {error}", stacklevel=2)
        return None
    size = min(WINDOW, len(trained))
    text = ids.astype(trained.dtype).tobytes()
    starts = np.linspace(0, len(trained) - size, PLACES, dtype=np.int64)
    return any(_holds(text, trained[start : start + size]) for start in starts)


def _holds(text: bytes, part: Ids) -> bool:
    """Return whether `text`, the bytes of tokens of the same dtype, contains the tokens of `part` in a row."""
    wanted, at = part.tobytes(), -1
    while (at := text.find(wanted, at + 1)) >= 0:
        if at % part.itemsize == 0:
            return True
    return False
