"""The contract of a language model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rehead.attention.program import Program
from rehead.config import ModelConfig
from rehead.errors import UsageError
from rehead.model.caches import counted
from rehead.model.ids import require_device, require_ids, require_range
from rehead.registry import Registry

Decode = Callable[[Tensor | np.ndarray, Sequence[Any]], Tensor]
"""Maps token ids (B,) and the caches to the next logits, (B, vocab), and appends the tokens to the caches."""

models: Registry[type["LanguageModel"]] = Registry("model type")


class LanguageModel(nn.Module, ABC):
    """Maps token ids to the logits of the next tokens."""

    config: ModelConfig
    head: nn.Linear

    @abstractmethod
    def hidden(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: Sequence[Any] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Return the input of `head`. Positions and cache are as in `rehead.attention.Attention.forward`."""

    @abstractmethod
    def new_cache(self, batch_size: int, capacity: int | None = None) -> list[Any]:
        """Return an empty cache per layer, in the weights' dtype and on their device."""

    def forward(
        self,
        ids: Int[Tensor, "B L"] | np.ndarray,
        positions: Int[Tensor, "#B L"] | None = None,
        cache: Sequence[Any] | None = None,
    ) -> Float[Tensor, "B L N"]:
        """Return the logits of the token after each of `ids`, (B, L, vocab). Raises UsageError for invalid ids.

        A call that fails leaves the caches as they were. If it has overwritten what they still need (several rows of a
        full ring, or rows whose positions it was given again), they take no more tokens.
        """
        whole = require_ids(ids, dims=(2,))
        ids = whole if isinstance(ids, Tensor) else whole.to(self.device)
        if not ids.shape[1]:
            raise UsageError(
                f"ids has shape {tuple(ids.shape)}: it has no tokens. Give at least one token per row."
            )
        try:
            with counted(cache, positions):
                return self.logits(self.hidden(ids, positions, cache))
        except IndexError:
            require_range(ids, self.config.vocab_size)
            raise
        except RuntimeError:
            require_device(ids, self.device)
            require_one_dtype(self)
            raise

    if TYPE_CHECKING:
        __call__ = forward

    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... N"]:
        """Return the logits for the result of `hidden`."""
        return self.head(hidden)

    def lower(self) -> Program | None:
        """Return the operations of one new token (`rehead.decoding`); None if only `forward` can compute it."""
        return None

    def require_room(self, n_token: int) -> None:
        """Refuse more tokens than the model has positions."""

    def require_caches(self, caches: object, batch_size: int) -> None:
        """Refuse anything but caches as `new_cache(batch_size)` returns them."""

    def require_generates(self) -> None:
        """Refuse a model that is not autoregressive; by default none is refused."""

    def tie(self) -> None:
        """Tie shared weights again after they were replaced."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.weight.device


def build(config: ModelConfig) -> LanguageModel:
    """Build a model of `config`, initialised with torch's global generator."""
    from rehead.config import model_types

    return models[model_types.name_of(type(config))](config)


def require_model(model: object) -> None:
    """Refuse an object that is not a model, such as the path of one."""
    if not isinstance(model, LanguageModel):
        if isinstance(getattr(model, "_orig_mod", None), LanguageModel):
            raise UsageError(
                "model is a compiled copy: give the model itself, which model.compile() compiles."
            )
        what = f"{str(model)!r:.80}" if isinstance(model, str | Path) else f"a {type(model).__name__}"
        raise UsageError(f"model is {what}: expected a rehead model. Use rehead.load(path) first.")


def skeleton(config: ModelConfig) -> LanguageModel:
    """Build a model of `config` with all weights on the meta device."""
    with torch.device("meta"), _NoInit():
        return build(config)


def assembled(config: ModelConfig, state: Mapping[str, Tensor]) -> LanguageModel:
    """Return a model of `config` in eval mode, whose weights are the tensors of `state`."""
    model = skeleton(config)
    model.load_state_dict(state, assign=True)
    model.tie()
    return model.eval()


class _NoInit(TorchFunctionMode):
    """Skips `nn.init.normal_`, which has no effect on the meta device but imports torch's compiler."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call any function except `nn.init.normal_`."""
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def keeps_dtype(name: str) -> bool:
    """Return True for a weight that has its own dtype beside the others: a router's correction bias."""
    return name.endswith(".e_score_correction_bias")


def require_one_dtype(model: LanguageModel) -> None:
    """Refuse a model whose weights differ in dtype, where torch could not compute with it."""
    first: dict[torch.dtype, str] = {}
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not keeps_dtype(name):
            first.setdefault(weight.dtype, name)
    if len(first) > 1:
        kinds = " and ".join(f"{dtype} ({name})" for dtype, name in first.items())
        raise UsageError(
            f"the model's weights are {kinds}: they must match. Use model.to({next(iter(first))}), or "
            "torch.autocast."
        )


def require_length(n_token: int, limit: int) -> None:
    """Refuse more tokens than a position table of `limit` rows has."""
    if n_token > limit:
        raise UsageError(
            f"{n_token} tokens exceed block_size={limit}, the length of this model's position table: feed at "
            f"most {limit}, or extend it with model.pretrained_folder and a larger data.block_size."
        )
