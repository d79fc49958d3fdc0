"""Checks whether a text contains what a model was trained on or fitted to: its loss says little about other texts."""

import warnings
from pathlib import Path

import numpy as np

from rehead.checkpoint import read_at
from rehead.checkpoint.files.strict import require_regular
from rehead.checkpoint.find import run_data, run_of
from rehead.conversion.certificate import Certificate, Text
from rehead.conversion.history import conversion_of
from rehead.conversion.texts import Passage
from rehead.data import TOKENS, Ids, read_ids, split
from rehead.errors import ReheadError
from rehead.tokenizer import Tokenizer

WINDOW, PLACES = 256, 16
"""Tokens of a part of the training text, and how many parts are searched for."""


def contains_training_text(folder: Path, ids: Ids, tokenizer: Tokenizer) -> bool | None:
    """Return whether `ids` contain a part of a run's training text, or begin with what a conversion was fitted to.

    None if no run folder has that text, and no certificate names this one. Warns if the run's options or tokens cannot
    be read.
    """
    try:
        if fitted_tokens(read_at(folder, conversion_of), ids):
            return True
        run, data = run_of(folder), run_data(folder)
        if run is None or data is None or not (run / TOKENS).is_file():
            return None
        require_regular(run / TOKENS)
        trained = split(read_ids(run / TOKENS, tokenizer), data.block_size, data.val_fraction).train
    except ReheadError as error:
        warnings.warn(f"it is unknown whether the model was trained on this text: {error}", stacklevel=2)
        return None
    size = min(WINDOW, len(trained))
    text = ids.astype(trained.dtype).tobytes()
    starts = np.linspace(0, len(trained) - size, PLACES, dtype=np.int64)
    return any(_holds(text, trained[start : start + size]) for start in starts)


def fitted_tokens(certificate: Certificate | None, ids: Ids) -> int:
    """Return how many of the first `ids` the conversion was fitted to: a whole text, or all of it but what it held out.

    It is 0 where `ids` begin with no text that the certificate names.
    """
    texts = () if certificate is None else certificate.calibration
    return max((text.tokens for text in texts if _begins(ids, text)), default=0)


def already_seen(certificate: Certificate, ids: Ids, part: Ids) -> str:
    """Return "the conversion was fitted to" or "the model was healed on" where some of `part`, the end of `ids`, was.

    It is empty where neither is so. A text that it was fitted to is found as the beginning of `ids` or, if nothing of
    it was held out, as their end, as where several files are one text; not in between. One that it was healed on last
    is found by its validation part, which is the test text then: what comes before these tokens was trained on.
    """
    test, healed = certificate.test, bool(certificate.healing)
    ends = (healed or not certificate.held_out) and any(
        0 < text.tokens < len(ids) and _begins(ids[-text.tokens :], text) for text in certificate.calibration
    )
    if ends or fitted_tokens(certificate, ids) > len(ids) - len(part):
        return "the conversion was fitted to"
    if healed and test is not None and test.tokens < len(part) and _begins(part[-test.tokens :], test):
        return "the model was healed on"
    return ""


def warn_unless_held_out(certificate: Certificate, ids: Ids, part: Ids) -> None:
    """Warn before a healing whose validation `part`, the end of `ids`, the model has seen."""
    seen = already_seen(certificate, ids, part)
    if seen:
        warnings.warn(
            f"{seen} a part of this validation text, so the loss on it is too optimistic: name another text with "
            "data.path, or convert without --test and leave data.val_fraction out",
            stacklevel=3,
        )


def _begins(ids: Ids, text: Text) -> bool:
    """Return whether `ids` begin with the tokens of a text."""
    first = Passage(name=text.name, ids=ids[: text.tokens])
    return len(first.ids) == text.tokens and first.sha256 == text.sha256


def _holds(text: bytes, part: Ids) -> bool:
    """Return whether `text`, the bytes of tokens of the same dtype, contains the tokens of `part` in a row."""
    wanted, at = part.tobytes(), -1
    while (at := text.find(wanted, at + 1)) >= 0:
        if at % part.itemsize == 0:
            return True
    return False
