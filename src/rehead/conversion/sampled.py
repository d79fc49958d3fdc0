"""Text sampled from a model, kept in the user's cache folder: sampling takes minutes, and gives the same every time."""

import hashlib
import io
import json
import logging
import time
from contextlib import suppress

import numpy as np

from rehead.checkpoint.files.deferred import materialise
from rehead.checkpoint.files.shards import bytes_of
from rehead.config import encode
from rehead.conversion.texts import SELF, Passage, sampled
from rehead.data import Ids, require_vocabulary
from rehead.data.files import write_whole
from rehead.measure.environment import environment
from rehead.model import LanguageModel
from rehead.system.folders import cache_folder

log = logging.getLogger("rehead")
LONG = 5.0
"""Seconds after which a text is worth keeping."""


def sampled_once(
    model: LanguageModel,
    tokens: int,
    length: int,
    seed: int,
    bos: int | None = None,
    begins: Ids | None = None,
) -> Passage:
    """Return the text of `sampled`, from an earlier time if the same model, arguments and machine gave one."""
    machine = environment(model.device)
    made_of = [_digest(model), tokens, length, seed, machine, *([] if bos is None else [bos])]
    made_of += [] if begins is None else [hashlib.sha256(begins.tobytes()).hexdigest()]
    name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
    file = cache_folder() / "sampled" / f"{name}.npy"
    with suppress(OSError, ValueError, EOFError):  # none yet, or damaged
        ids = np.load(file)
        require_vocabulary(ids, model.config.vocab_size)
        log.info("self: the text sampled from this model before, %s", file)
        return Passage(name=SELF, ids=ids, bos=bos)
    begin = time.monotonic()
    text = sampled(model, tokens, length, seed, bos, begins)
    if time.monotonic() - begin > LONG:
        with suppress(OSError):  # a home that cannot be written to: sampled again next time
            written = io.BytesIO()
            np.save(written, text.ids)
            write_whole(file, [written.getvalue()])
    return text


def _digest(model: LanguageModel) -> str:
    """Return the sha256 of a model's config and weights."""
    digest = hashlib.sha256(json.dumps(encode(model.config)).encode())
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(bytes_of(materialise(weight).cpu().contiguous()))
    return digest.hexdigest()
