"""What every language model offers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rehead.attention.program import Program
from rehead.config import ModelConfig
from rehead.errors import UsageError
from rehead.model.ids import require_ids, require_range
from rehead.registry import Registry

Decode = Callable[[Tensor, Sequence[Any]], Tensor]
"""Token ids (B,) and the caches, which have one token more then: logits of the tokens after them, (B, vocab)."""

models: Registry[type["LanguageModel"]] = Registry("model type")


class LayerState(Protocol):
    """A layer's cache, as generation sees it."""

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        ...

    def select_batch(self, rows: Int[Tensor, " B"]) -> None:
        """Sequence i becomes what sequence `rows[i]` was."""


class LanguageModel(nn.Module, ABC):
    """Token ids in, the next token's logits out."""

    config: ModelConfig
    head: nn.Linear

    @abstractmethod
    def hidden(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: Sequence[Any] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """What `head` reads. Positions and cache as in `rehead.attention.Attention.forward`."""

    @abstractmethod
    def new_cache(self, batch_size: int, capacity: int | None = None) -> list[Any]:
        """An empty cache per layer, in the weights' dtype and on their device."""

    def forward(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: Sequence[Any] | None = None,
    ) -> Float[Tensor, "B L N"]:
        """Logits of the token after each of `ids`, (B, L, vocab). UsageError for what are not ids."""
        require_ids(ids, dims=(2,))
        if not ids.shape[1]:
            raise UsageError(
                f"ids has shape {tuple(ids.shape)}: it has no tokens. Give at least one token per row."
            )
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.long()
        try:
            return self.logits(self.hidden(ids, positions, cache))
        except IndexError:
            require_range(ids, self.config.vocab_size)
            raise

    if TYPE_CHECKING:

        def __call__(
            self,
            ids: Tensor,
            positions: Tensor | None = None,
            cache: Sequence[Any] | None = None,
        ) -> Tensor:
            """See `forward`."""

    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... N"]:
        """What `forward` gives for the tokens whose `hidden` these are."""
        return self.head(hidden)

    def lower(self) -> Program | None:
        """One new token of every sequence as operations (`rehead.decoding`); None: only as `forward` computes it."""
        return None

    def require_room(self, n_token: int) -> None:
        """Refuse more tokens than the model has positions for."""

    def require_generates(self) -> None:
        """Refuse what is no autoregressive model; most are."""

    def tie(self) -> None:
        """Make weights that are one share one tensor again, after they were replaced."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device


def build(config: ModelConfig) -> LanguageModel:
    """A freshly initialised model of `config`, drawn from torch's global generator."""
    from rehead.config import model_types

    return models[model_types.name_of(type(config))](config)


def require_model(model: object) -> None:
    """Refuse what is not a model, such as the path of one."""
    if not isinstance(model, LanguageModel):
        what = f"{str(model)!r:.80}" if isinstance(model, str | Path) else f"a {type(model).__name__}"
        raise UsageError(f"model is {what}: expected a rehead model. Use rehead.load(path) first.")


def skeleton(config: ModelConfig) -> LanguageModel:
    """A model of `config` without numbers: every weight is on the meta device."""
    with torch.device("meta"), _Undrawn():
        return build(config)


class _Undrawn(TorchFunctionMode):
    """Without `nn.init.normal_`, which on the meta device draws nothing but imports torch's compiler."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """All but that one."""
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def require_length(n_token: int, limit: int) -> None:
    """Refuse positions that a table of `limit` rows does not have."""
    if n_token > limit:
        raise UsageError(
            f"{n_token} tokens exceed block_size={limit}, the length of this model's position table: feed at "
            f"most {limit}, or extend it with model.pretrained_folder and a larger data.block_size."
        )
