"""A decoder-only transformer: GPT-2's shape or Llama's, by config."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import AttentionConfig, LayerCache
from rehead.attention.mask import reach
from rehead.attention.program import Embed, Norm, Program, Scale, SoftCap, describes
from rehead.config import GPTConfig
from rehead.errors import UsageError
from rehead.model.base import LanguageModel, models, require_length
from rehead.model.caches import require_caches, require_next
from rehead.model.ids import require_places
from rehead.model.init import initialise
from rehead.model.layers import Block
from rehead.nn.dropout import Dropout
from rehead.nn.linear import WideLinear
from rehead.nn.norm import NORMS


@models.add("gpt")
class GPT(LanguageModel):
    """A decoder-only transformer: `embed_tokens` (+ `embed_positions`), `layers`, `norm`, `head`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config: GPTConfig = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.embed_positions = (
            nn.Embedding(config.block_size, config.n_embd) if config.learned_positions else None
        )
        self.embd_dropout = Dropout(config.embd_pdrop)
        mixed = () if config.experts is None else config.experts.layers
        self.layers = nn.ModuleList(
            [
                Block(config, attention, has_experts=index in mixed)
                for index, attention in enumerate(config.attention)
            ]
        )
        self.norm = NORMS[config.norm](config.n_embd, config.norm_eps)
        self.head = WideLinear(config.n_embd, config.vocab_size, bias=False)
        initialise(self, config.n_layer)
        self.tie()

    def hidden(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Return the normed output of the last layer, the input of the head."""
        start = 0
        if positions is not None:
            require_places(positions, ids)
        if cache is not None:
            self.require_caches(cache, len(ids))
            start, held = cache[0].length, cache[0].n_token
            needed = held + ids.shape[1] if positions is None else max(held, reach(positions))
            require_next(cache, len(ids), needed, positions)
            positions = cache[0].next(ids.shape[1]) if positions is None else positions
        if self.embed_positions is not None:
            self.require_room(start + ids.shape[1] if positions is None else reach(positions))
        x = self.embed(ids, positions, start)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, None if cache is None else cache[index])
        return self.finish(x)

    def embed(
        self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "#B L"] | None = None, start: int = 0
    ) -> Float[Tensor, "B L D"]:
        """Return the input of the first layer. Without positions, tokens follow `start` others."""
        x = self.embed_tokens(ids)
        if self.config.embed_scale != 1:
            x = x * self._embed_scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(self._table_rows(ids, positions, start))
        return self.embd_dropout(x)

    def finish(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return the input of the head from the output of the last layer."""
        x = self.norm(x)
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def lower(self) -> Program | None:
        """Return the operations of one new token; None if a layer does not describe its `forward`."""
        if next(self.undescribed(), None) is not None:
            return None
        program, config = Program(), self.config
        x = program.add(Embed(self.embed_tokens, self.embed_positions, self._embed_scale))
        for index, layer in enumerate(self.layers):
            x = program.call(layer, x, config.n_embd, index)
        x = program.add(Norm(x, self.norm))
        if config.logit_scale != 1:
            x = program.add(Scale(x, config.logit_scale))
        (logits,) = program.linear(x, (self.head, config.vocab_size))
        if config.logit_softcap is not None:
            program.add(SoftCap(logits, config.logit_softcap))
        return program

    def undescribed(self) -> Iterator[nn.Module]:
        """Yield the model, layers and dropouts that may compute something else than `lower` says."""
        if "lower" not in vars(type(self)):
            yield self
        yield from (layer for layer in self.layers if not describes(layer))
        for dropout in (self.embd_dropout, *(layer.resid_dropout for layer in self.layers)):
            if type(dropout) is not Dropout or "forward" in vars(dropout):
                yield dropout  # type: ignore[misc]  # torch types attributes as tensors or modules

    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... N"]:
        """Return the logits for the result of `hidden`, capped if the config says so."""
        logits, cap = self.head(hidden), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def require_room(self, n_token: int) -> None:
        """Refuse more tokens than the position table has rows, if there is one."""
        if self.embed_positions is not None:
            require_length(n_token, self.config.block_size)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> list[LayerCache]:
        """Return an empty cache per layer, of `capacity` tokens or growing."""
        dtype, device = self.head.weight.dtype, self.device
        return [kind.cache(batch_size, capacity, dtype, device) for kind in self._kinds()]

    def require_caches(self, caches: object, batch_size: int) -> None:
        """Refuse anything but one cache of `batch_size` sequences for each layer, in its dtype and on its device."""
        x = torch.empty(batch_size, 0, 0, dtype=self.head.weight.dtype, device=self.device)
        require_caches(caches, self._kinds(), x)

    def _kinds(self) -> tuple[AttentionConfig, ...]:
        """Return the attention config of each layer. Refuse a model with more layers than its config describes."""
        n_layer, kinds = len(self.layers), self.config.attention
        if n_layer > len(kinds):
            raise UsageError(
                f"the model has {n_layer} layers and its config describes {len(kinds)}: caches are built from the "
                "config. Set model.config to dataclasses.replace(model.config, attention=...) with one for each layer."
            )
        return kinds[:n_layer]

    def tie(self) -> None:
        """Share one tensor between the embedding and the head, if the config ties them."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed_tokens.weight

    @property
    def _embed_scale(self) -> float:
        """The scale of the embeddings, rounded to their dtype as in Hugging Face's Gemma."""
        return float(
            torch.tensor(self.config.embed_scale, dtype=self.embed_tokens.weight.dtype, device="cpu")
        )

    def _table_rows(self, ids: Tensor, positions: Tensor | None, start: int) -> Tensor:
        """Rows of the position table; padding uses row 0, since its output is never read."""
        if positions is None:
            return torch.arange(start, start + ids.shape[1], device=ids.device)
        return positions.long().clamp(min=0)
