"""Attention maps of a text, and whether a longer text changes the rows of its beginning."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rehead.errors import InvalidInput, UsageError
from rehead.measure.attention_maps import HeadSpread, attention_maps, head_spread, prefix_change
from rehead.measure.forecast import forward_bytes, map_bytes
from rehead.model import GPT, LanguageModel
from rehead.system.memory import require_memory
from rehead.tokenizer import Tokenizer

UNCHANGED = 1e-5
"""Largest difference of weights that counts as rounding: two kernels may differ by this in float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inspection:
    """The maps of one text: its `tokens`, and per layer the weights (H, L, L), the variant and the window.

    The first token is `bos`, if it is not None: the id that the tokenizer puts before a text.
    """

    text: str
    ids: list[int]
    bos: int | None
    tokens: list[str]
    maps: list[Float[Tensor, "_ L L"]]
    variants: list[str]
    windows: list[int | None]

    @property
    def spreads(self) -> list[HeadSpread]:
        """Return entropy and distance of every head, per layer."""
        return [head_spread(weights, window) for weights, window in zip(self.maps, self.windows, strict=True)]

    def head(self, layer: int, head: int) -> Float[Tensor, "L L"]:
        """Return one map. Raises UsageError if the layer or head does not exist."""
        if not 0 <= layer < len(self.maps):
            raise UsageError(f"layer={layer}: the model has layers 0 to {len(self.maps) - 1}.")
        if not 0 <= head < len(self.maps[layer]):
            raise UsageError(f"head={head}: layer {layer} has heads 0 to {len(self.maps[layer]) - 1}.")
        return self.maps[layer][head]

    def figures(self, layer: int, head: int) -> dict[str, Any]:
        """Return all figures, and the weights of one head."""
        per_layer = zip(self.variants, self.windows, self.spreads, strict=True)
        return {
            "text": self.text,
            "tokens": self.tokens,
            "layers": [
                {"attention": name, "window": window} | asdict(figures) for name, window, figures in per_layer
            ],
            "map": {"layer": layer, "head": head, "weights": self.head(layer, head).tolist()},
        }


@dataclass(frozen=True, kw_only=True)
class PrefixChange:
    """The largest difference per layer in the rows of the first `n_token` tokens, which two texts share."""

    n_token: int
    layers: list[float]

    @property
    def largest(self) -> float:
        """Return the largest difference over all layers."""
        return max(self.layers)

    @property
    def unchanged(self) -> bool:
        """Return True if no row differs by more than rounding."""
        return self.largest <= UNCHANGED


def inspect(model: LanguageModel, tokenizer: Tokenizer, text: str, length: int = 256) -> Inspection:
    """Return the maps of a text's first `length` tokens, or of as many as fit the model's context.

    The tokens are those of `rehead generate`, with what the tokenizer puts before a text.
    Warns if tokens are left out. Raises InvalidInput for an empty text, UsageError for a model without
    attention.
    """
    if length < 1:
        raise UsageError(f"length={length}. Use 1 or more.")
    if not len(tokenizer.encode(text)):
        raise InvalidInput("the text is empty: attention needs at least one token.")
    ids = tokenizer.encode(text, special_tokens=True)
    context = model.config.context_limit
    n_token = min(len(ids), length, context or len(ids))
    if n_token < len(ids):
        limit = f"the model's context is {context}" if n_token == context else f"length={length}"
        message = f"the text has {len(ids):,} tokens, the first {n_token:,} are inspected: {limit}."
        warnings.warn(message, stacklevel=2)
    if isinstance(model, GPT):
        parts = {
            "maps": map_bytes(model.config, n_token),
            "activations": forward_bytes(model.config, 1, n_token, model.head.weight.dtype),
        }
        require_memory(f"a text of {n_token:,} tokens", parts, "Use a smaller --length.", model.device)
    maps = attention_maps(model, torch.from_numpy(ids[:n_token]))
    assert isinstance(model, GPT)
    return Inspection(
        text=text,
        ids=ids[:n_token].tolist(),
        bos=tokenizer.bos,
        tokens=tokenizer.pieces(ids[:n_token]),
        maps=maps,
        variants=[attention.name for attention in model.config.attention],
        windows=[attention.window for attention in model.config.attention],
    )


def compare(first: Inspection, second: Inspection) -> PrefixChange:
    """Compare the rows of the tokens that two texts share. Raises InvalidInput if they share none of their own."""
    same = [ours == theirs for ours, theirs in zip(first.ids, second.ids, strict=False)]
    n_token = same.index(False) if False in same else len(same)
    begin = int(first.bos is not None)
    if n_token <= begin:
        ours, theirs = ("".join(one.tokens[begin : begin + 1]) for one in (first, second))
        raise InvalidInput(
            f"the texts begin with {ours!r:.40} and {theirs!r:.40}: nothing to compare. Use texts that share their "
            "first tokens."
        )
    return PrefixChange(n_token=n_token, layers=prefix_change(first.maps, second.maps, n_token))


def equal_rows(first: Inspection, second: Inspection, n_token: int, layer: int, head: int) -> list[bool]:
    """Return for each of the first `n_token` tokens whether its row is the same in both texts up to rounding."""
    maps = [inspection.head(layer, head)[:n_token] for inspection in (first, second)]
    width = max(rows.shape[1] for rows in maps)
    ours, theirs = (F.pad(rows, (0, width - rows.shape[1])) for rows in maps)
    same: list[bool] = ((ours - theirs).abs().amax(dim=1) <= UNCHANGED).tolist()
    return same


def document(
    inspections: Sequence[Inspection], change: PrefixChange | None, layer: int, head: int
) -> dict[str, Any]:
    """Return the figures of a text, and under `compared` those of a second text and of their shared tokens."""
    first, *others = (inspection.figures(layer, head) for inspection in inspections)
    if change is None:
        return first
    outcome = {
        "shared_tokens": change.n_token,
        "largest_change_per_layer": change.layers,
        "unchanged": change.unchanged,
    }
    return first | {"compared": others[0] | outcome}
