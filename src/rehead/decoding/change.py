"""Notices when a model was changed after its decoder was made."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rehead.decoding.lowering import hooks
from rehead.model import LanguageModel
from rehead.model.base import Decode, require_one_dtype


class Decoder:
    """Decodes with the engine that `make` returns, and makes another one after the model was changed.

    It notices weights that were converted or moved (`model.double()`), hooks, and autocast. Other changes of weights
    and parts need a new decoder.
    """

    def __init__(self, model: LanguageModel, make: Callable[[], Decode]) -> None:
        self._model, self._make = model, make
        self._made = Made(model, make())

    def __call__(self, ids: Tensor, caches: Sequence[Any]) -> Tensor:
        """Return the logits after `ids` (B,), (B, vocab), and append the tokens to the caches."""
        made = self._made  # one thread may replace it while another uses it
        if not made.is_current():
            made = self._made = Made(self._model, self._make())
        try:
            return made.decode(ids, caches)
        except RuntimeError:
            require_one_dtype(self._model)
            raise


class Made:
    """An engine with the state of the model that it was made for."""

    def __init__(self, model: LanguageModel, decode: Decode) -> None:
        self.decode, self._model, self._head = decode, model, model.head.weight
        self._weights = list(model.parameters())
        self._memory = [weight.detach() for weight in self._weights]  # kept, so that no address is used again
        self._places = list(map(Tensor.data_ptr, self._weights))
        self._hooks = hooks(model)
        self._called = self._forward_is_called()

    def is_current(self) -> bool:
        """Whether the model is still in that state; runs for every token."""
        return (
            self._model.head.weight is self._head
            and list(map(Tensor.data_ptr, self._weights)) == self._places
            and self._forward_is_called() == self._called
        )

    def _forward_is_called(self) -> tuple[bool, bool]:
        """Whether hooks or autocast need the model's own `forward`."""
        return any(self._hooks), torch.is_autocast_enabled(self._head.device.type)
