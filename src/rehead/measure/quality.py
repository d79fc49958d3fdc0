"""Measures how well a model predicts a text."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rehead.data import IGNORE, Batch, Ids, evaluation_blocks, require_vocabulary, shown
from rehead.errors import InvalidInput, NumericError
from rehead.measure.forecast import batch_of
from rehead.measure.kv_dtype import KVDtype, kv_dtypes, rounded_caches
from rehead.measure.length import text_length
from rehead.measure.logits import cross_entropy, in_parts
from rehead.model import LanguageModel, evaluating
from rehead.model.base import require_model
from rehead.system.device import free_memory
from rehead.system.memory import require_memory


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The mean `loss` in nats over `tokens` predicted tokens, read in blocks of `length` that move by `stride`."""

    loss: float
    tokens: int
    length: int
    stride: int


def evaluate_text(
    model: LanguageModel,
    ids: Any,
    *,
    length: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    kv_dtype: str | None = None,
    bos: int | None = None,
) -> TextLoss:
    """Return how well a model predicts token ids (N,): each but the first, once.

    The text is read in blocks of `length` tokens, by default as in `text_length`. Blocks follow one another, or, with a
    `stride` below `length`, overlap: each begins `stride` tokens after the one before, and only tokens that none
    before it had are predicted. With `bos`, the id that a tokenizer puts before a text (`Tokenizer.bos`), each begins
    with that in place of its first token. Without a `batch_size`, as many blocks are read at once as suit the memory.

    With a `kv_dtype`, a name of `kv_dtypes`, every query reads keys and values, or latents, rounded to that format, as
    from an engine's cache.

    Raises ConfigError for a length beyond the model's or a format that its cache cannot have, InvalidInput for ids that
    are not the model's or fewer than two, ResourceError for blocks that do not fit the memory.
    """
    require_model(model)
    text = np.asarray(ids)
    if text.size and text.dtype.kind not in "iu":
        raise InvalidInput(
            f"token ids of dtype {text.dtype}: expected whole numbers, as a tokenizer gives them."
        )
    require_vocabulary(text, model.config.vocab_size, bos)
    length = text_length(model.config, length)
    blocks = blocks_of_text(model, text, length, stride, batch_size, bos, use_cache=kv_dtype is not None)
    kind = None if kv_dtype is None else kv_dtypes[kv_dtype]()
    if kind is not None:
        kind.require(model.config)
    loss, count = evaluate(model, shown(blocks, "eval", len(text) - 1), kind)
    return TextLoss(loss=loss, tokens=count, length=length, stride=length if stride is None else stride)


def blocks_of_text(
    model: LanguageModel,
    text: Ids,
    length: int,
    stride: int | None = None,
    batch_size: int | None = None,
    bos: int | None = None,
    *,
    use_cache: bool = False,
    n_model: int = 1,
) -> Iterator[Batch]:
    """Return the blocks of `evaluate_text`, which `n_model` models read; a text below `length` is one, not padded.

    Raises ResourceError where those that are read at once do not fit the memory.
    """
    block, step = length, length if stride is None else stride
    if len(text) <= length and 1 <= step <= length:
        block = step = max(1, len(text) - 1)
    if batch_size is not None:
        batch_size = min(batch_size, 1 + max(0, math.ceil((len(text) - 1 - block) / max(1, step))))
    dtype, device = model.head.weight.dtype, model.device
    many, parts = batch_of(model.config, block, dtype, free_memory(device), batch_size, use_cache=use_cache)
    way_out = "Use a smaller --length." if many == 1 else "Use a smaller --batch-size or --length."
    parts["logits"] *= n_model
    require_memory(f"reading {many} x {block:,} tokens at once", parts, way_out, device)
    return evaluation_blocks(text, block, many, None, step, bos)


def evaluate(
    model: LanguageModel, blocks: Iterable[tuple[Tensor, Tensor]], kv_dtype: KVDtype | None = None
) -> tuple[float, int]:
    """Return the mean negative log-likelihood in nats per token over (inputs, targets), and the token count.

    The model runs in eval mode and keeps the mode it had. Targets of -100 are ignored. Sums are float64,
    so the batching of the blocks changes the mean only through the model's own rounding. `kv_dtype` is as in
    `evaluate_text`.
    """
    return mean_loss(*sums(model, blocks, kv_dtype))


@torch.no_grad()
def sums(
    model: LanguageModel, blocks: Iterable[tuple[Tensor, Tensor]], kv_dtype: KVDtype | None = None
) -> tuple[float, int]:
    """Return what `evaluate` divides: the sum of the losses in nats, and the token count."""
    model.require_generates()
    total, count = 0.0, 0
    with evaluating(model):
        for inputs, targets in blocks:
            ids = inputs.to(model.device)
            caches = None if kv_dtype is None else rounded_caches(model, kv_dtype, ids)
            hidden = model.hidden(ids, None, caches).flatten(0, 1)
            wanted = targets.to(model.device).flatten()
            counts = wanted != IGNORE
            if not counts.all():
                hidden, wanted = hidden[counts], wanted[counts]
            for some, their in in_parts(model.head.out_features, hidden, wanted):
                total += float(cross_entropy(model.logits, some, their).double().sum())
            count += len(wanted)
    return total, count


def mean_loss(total: float, count: int) -> tuple[float, int]:
    """Return the mean of `sums`, and the count. Raises InvalidInput for no tokens, NumericError if it is not finite."""
    if count == 0:
        raise InvalidInput("0 tokens to evaluate: the text needs at least two.")
    if not math.isfinite(total):
        raise NumericError(f"the loss is {total}: the model's weights are damaged, or it has diverged.")
    return total / count, count


def scores(loss: float, n_token: int, n_byte: int) -> dict[str, float | int]:
    """Return `loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens` of a text of `n_byte` bytes."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * n_token / math.log(2) / n_byte,
        "tokens": n_token,
    }
