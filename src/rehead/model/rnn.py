"""The Elman network (Elman, 1990): a state of constant size instead of a KV cache."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.config import RNNConfig
from rehead.errors import UsageError
from rehead.model.base import LanguageModel, models
from rehead.model.ids import require_places
from rehead.model.state import StateCache


def slide(a: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """min(1, max(0, a)), the clamp of CMU 10-423's first homework."""
    return a.clamp(0, 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "slide": slide,
    "none": lambda a: a,
}


class ElmanLayer(nn.Module):
    """h_t = f(W_hh h_{t-1} + W_hx x_t + b_h), h_0 = 0; `x_proj` is W_hx and b_h, `h_proj` W_hh."""

    def __init__(self, n_input: int, n_hidden: int, activation: str) -> None:
        super().__init__()
        self.x_proj = nn.Linear(n_input, n_hidden)
        self.h_proj = nn.Linear(n_hidden, n_hidden, bias=False)
        self.activation = ACTIVATIONS[activation]
        for weight in (self.x_proj.weight, self.h_proj.weight):
            nn.init.uniform_(weight, -1 / math.sqrt(n_hidden), 1 / math.sqrt(n_hidden))
        nn.init.zeros_(self.x_proj.bias)

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        state: Float[Tensor, "B N"] | None = None,
        padding: Tensor | None = None,
    ) -> Float[Tensor, "B L N"]:
        """Return all states; the state does not change where `padding`, (B, L), is True."""
        inputs = self.x_proj(x)
        state = inputs.new_zeros(len(x), self.h_proj.in_features) if state is None else state
        states = []
        for t in range(x.shape[1]):
            next_state = self.activation(inputs[:, t] + self.h_proj(state))
            state = next_state if padding is None else torch.where(padding[:, t, None], state, next_state)
            states.append(state)
        return torch.stack(states, dim=1)


@models.add("rnn")
class RNN(LanguageModel):
    """An Elman language model: p(x_t | h_{t-1}). Bidirectional ones show why they cannot be language models."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        self.config: RNNConfig = config
        widths = [config.n_embd] + [config.n_hidden] * config.n_layer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.embd_dropout = nn.Dropout(config.embd_pdrop)
        self.layers = nn.ModuleList(
            ElmanLayer(n_input, config.n_hidden, config.activation) for n_input in widths[:-1]
        )
        both_ways = config.direction != "forward"
        self.backward_layers = nn.ModuleList(
            ElmanLayer(n_input, config.n_hidden, config.activation) for n_input in widths[:-1] * both_ways
        )
        self.merge = nn.Linear(2 * config.n_hidden, config.n_hidden) if both_ways else None
        self.head = nn.Linear(config.n_hidden, config.n_output)
        self.output = ACTIVATIONS[config.output_activation]

    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... N"]:
        """Return y_t of each state; in a language model, the logits of the next token."""
        return self.output(self.head(hidden))

    def hidden(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: Sequence[StateCache] | None = None,
    ) -> Float[Tensor, "B L N"]:
        """Return h_t of the last layer. Of positions only padding (below 0) is read: it leaves the state as it is."""
        if cache is not None:
            self.require_caches(cache, len(ids))
        if positions is not None:
            require_places(positions, ids)
        padding = None if positions is None else (positions < 0).expand(len(ids), -1)
        x = self.embd_dropout(self.embed_tokens(ids))
        if self.merge is None:
            return self._run(x, padding, cache)
        if cache is not None or padding is not None:
            raise UsageError(
                f"direction={self.config.direction} reads whole sequences: it takes no cache and no padding. "
                "Generate with use_cache=False, and prompts of one length."
            )
        if self.config.direction == "bidirectional":
            return self._both_ways(x)
        prefixes = [self._both_ways(x[:, : t + 1])[:, -1] for t in range(x.shape[1])]
        return torch.stack(prefixes, dim=1)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> list[StateCache]:
        """Return a zero state per layer; a state has no limit on the number of tokens."""
        weight = self.head.weight
        return [StateCache(weight.new_zeros(batch_size, self.config.n_hidden)) for _ in self.layers]

    def require_caches(self, caches: object, batch_size: int) -> None:
        """Refuse anything but the state of `batch_size` sequences for each layer."""
        shape = batch_size, self.config.n_hidden
        states = caches if isinstance(caches, list | tuple) else ()
        if len(states) != len(self.layers) or not all(
            isinstance(one, StateCache) and one.state.shape == shape for one in states
        ):
            raise UsageError(
                f"cache is not one StateCache of {batch_size} sequences for each of the {len(self.layers)} layers. Use "
                f"model.new_cache({batch_size})."
            )

    def require_generates(self) -> None:
        """Refuse a bidirectional network and one whose outputs are not a vocabulary."""
        if self.config.direction == "bidirectional":
            raise UsageError(
                "a bidirectional RNN is not a language model: its state at t-1 has read the tokens from t on, so "
                "the product of p(x_t | h_{t-1}) is not a distribution. Use direction=forward (or prefix)."
            )
        if self.config.n_output != self.config.vocab_size:
            raise UsageError(
                f"n_output={self.config.n_output} does not match vocab_size={self.config.vocab_size}: this network "
                "cannot generate text. Set n_output to vocab_size."
            )

    def _run(
        self, x: Tensor, padding: Tensor | None = None, cache: Sequence[StateCache] | None = None
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, None if cache is None else cache[index].state, padding)
            if cache is not None:
                cache[index].state = x[:, -1].clone()  # not a view, which would keep all states
        return x

    def _both_ways(self, x: Tensor) -> Tensor:
        """Run both directions and merge their states."""
        assert self.merge is not None
        forward, backward = self._run(x), x.flip(1)
        for layer in self.backward_layers:
            backward = layer(backward)
        return ACTIVATIONS[self.config.activation](self.merge(torch.cat([forward, backward.flip(1)], dim=-1)))


def both_seen() -> RNN:
    """Build the detector of CMU 10-423's first homework (B1 in docs/sources.md): y_t = 1 once both bits have been 1.

    Token 2 a + b represents the input (a, b); W_hh = W_hx = I, b_h = 0, W_yh = [1 1], b_y = -1.
    """
    config = RNNConfig(
        vocab_size=4,
        block_size=16,
        n_embd=2,
        n_layer=1,
        n_hidden=2,
        n_output=1,
        activation="slide",
        output_activation="slide",
    )
    network = RNN(config)
    layer = network.layers[0]
    assert isinstance(layer, ElmanLayer)
    with torch.no_grad():
        network.embed_tokens.weight.copy_(torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))
        layer.h_proj.weight.copy_(torch.eye(2))
        layer.x_proj.weight.copy_(torch.eye(2))
        network.head.weight.fill_(1)
        network.head.bias.fill_(-1)
    return network
