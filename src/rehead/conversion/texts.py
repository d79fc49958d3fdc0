"""The texts a conversion is fitted to: token ids that are given, or text sampled from the model itself."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from numbers import Integral
from typing import Any

import numpy as np
import torch

from rehead.checkpoint.files.deferred import Deferred, map_weights, materialise
from rehead.data import Ids, require_vocabulary
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.generation import stream
from rehead.measure.forecast import generation_bytes
from rehead.model import LanguageModel, assembled
from rehead.stages import staged
from rehead.system.allocator import keeping_freed_memory
from rehead.system.memory import require_memory

SELF = "self"
"""Given in place of a text: sample one from the model itself."""
PIECE = 2**20
"""Tokens hashed at once."""
TOGETHER = 16_384
"""Tokens sampled in one batch."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Token ids (N,) and what a certificate calls them; `bos` is the token that each window of them begins with."""

    name: str
    ids: Ids
    bos: int | None = None

    @cached_property
    def sha256(self) -> str:
        """The hex digest of the ids as int64, whatever their dtype."""
        digest = hashlib.sha256()
        for at in range(0, len(self.ids), PIECE):  # of a file that may be larger than the memory
            digest.update(np.asarray(self.ids[at : at + PIECE], dtype=np.int64).tobytes())
        return digest.hexdigest()


def passages(
    texts: Any, model: LanguageModel, tokens: int, length: int, seed: int, bos: int | None = None
) -> list[Passage]:
    """What `rehead.convert` is given for `calibration`: None, ids, "self", or several of the last two."""
    if texts is None:
        return []
    one = not isinstance(texts, list | tuple) or all(isinstance(text, Integral) for text in texts)
    several = [texts] if one else texts
    return [
        sampled(model, tokens // len(several), length, seed, bos)
        if isinstance(text, str) and text == SELF
        else passage(text, model, bos)
        for text in several
    ]


def passage(ids: Any, model: LanguageModel, bos: int | None = None) -> Passage:
    """Return ids given in Python as a passage. Raises UsageError or InvalidInput for anything but token ids."""
    if isinstance(ids, str):
        raise UsageError(
            f"the text {ids!r:.80}: give token ids, or calibration='self' to sample from the model."
        )
    found = np.asarray(ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise InvalidInput(
            f"a text of {found.dtype} and shape {found.shape}: token ids are whole numbers, (N,). Encode it with the "
            "model's tokenizer."
        )
    require_vocabulary(found, model.config.vocab_size, bos)
    return Passage(name="ids", ids=found, bos=bos)


def sampled(
    model: LanguageModel,
    tokens: int,
    length: int,
    seed: int,
    bos: int | None = None,
    begins: Ids | None = None,
) -> Passage:
    """Sample `tokens` tokens from the model, at least one window of `length`.

    Each window starts with `bos` or, without one, with a random token, one of `begins` if they are given; the rest is
    drawn at temperature 1. The same seed gives the same text.
    """
    if length < 2:
        raise ConfigError(
            f"length={length}: nothing is sampled in a window of one token. Use 2 or more with self."
        )
    count = max(1, tokens // length)
    random = np.random.default_rng(seed)
    starts = random.integers(model.config.vocab_size, size=count)
    if begins is not None and len(begins):  # a model does not learn the rows of ids without a token
        unlearnt = ~np.isin(starts, begins)
        starts[unlearnt] = random.choice(begins, size=unlearnt.sum())
    if bos is not None:
        starts[:] = bos
    seeds = np.random.SeedSequence(seed).generate_state(2 * count, np.uint32)[::2].tolist()
    unread = sum(weight.nbytes for weight in model.parameters() if isinstance(weight, Deferred))
    way_out = "Give a text instead of self" + (
        "." if model.device.type == "cpu" else ", or use --device cpu."
    )
    together = max(1, TOGETHER // length)
    dtype = model.head.weight.dtype
    parts = {
        "weights": unread,
        **generation_bytes(model.config, min(count, together), 1, length - 1, dtype),
    }
    require_memory("sampling a text from the model", parts, way_out, model.device)
    state = map_weights(model, lambda _, weight: materialise(weight))
    model = assembled(model.config, state)  # in memory: every decoded token reads all of it
    groups = [slice(at, at + together) for at in range(0, count, together)]
    # One array: tokens kept one by one would pin freed memory between them.
    ids = torch.zeros(count, length, dtype=torch.long)
    ids[:, 0] = first = torch.from_numpy(starts)
    streams = (stream(model, list(first[at, None]), length - 1, seed=seeds[at]) for at in groups)
    drawn = staged(
        chain.from_iterable(streams), "sampling a text from the model", count * (length - 1), "tokens", len
    )
    with keeping_freed_memory():
        for at in groups:
            for place, token in enumerate(islice(drawn, length - 1), start=1):
                ids[at, place] = token.cpu()
    return Passage(name=SELF, ids=ids.flatten().numpy(), bos=bos)
