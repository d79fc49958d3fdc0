"""Notices when a model was changed after its decoder was made."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rehead.decoding.lowering import has_other_forward, hooks
from rehead.model import LanguageModel
from rehead.model.base import Decode, require_one_dtype


class Decoder:
    """Decodes with the engine that `make` returns, and makes another one after the model was changed.

    It notices weights and parts that were changed, converted, moved or replaced, hooks, replaced `forward`s, and
    autocast. A change through `weight.data`, which PyTorch does not count, or another `rotary`, needs a new decoder.
    """

    def __init__(self, model: LanguageModel, make: Callable[[], Decode]) -> None:
        self._model, self._make = model, make
        self._made = Made(model, make())

    def __call__(self, ids: Tensor | np.ndarray, caches: Sequence[Any]) -> Tensor:
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
        self.decode, self._device = decode, model.device.type
        self._parts = list(map(vars, model.modules()))
        tables = [part[table] for part in self._parts for table in ("_parameters", "_modules")]
        self._tables = [table for table in tables if table]
        self._members = list(map(dict, self._tables))
        self._weights = list(filter(_has_an_address, model.parameters()))
        self._memory = [weight.untyped_storage() for weight in self._weights]  # so no address is used again
        self._places = list(map(Tensor.data_ptr, self._weights))
        self._counted = [weight for weight in model.parameters() if not weight.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._hooks = hooks(model)
        self._called = self._forward_is_called()

    def is_current(self) -> bool:
        """Whether the model is still in that state; runs for every token."""
        return (
            self._has_its_members()
            and list(map(Tensor.data_ptr, self._weights)) == self._places
            and list(map(_version, self._counted)) == self._versions
            and self._forward_is_called() == self._called
        )

    def _has_its_members(self) -> bool:
        """Whether every part still has the same weights and parts."""
        try:
            return self._tables == self._members  # the same objects are equal without a look at their numbers
        except RuntimeError:  # two weights, compared number by number
            return False

    def _forward_is_called(self) -> tuple[bool, bool]:
        """Whether hooks, a replaced `forward` or autocast need the model's own calls."""
        return any(self._hooks) or has_other_forward(self._parts), torch.is_autocast_enabled(self._device)


def _has_an_address(weight: Tensor) -> bool:
    """Whether the numbers are in the memory of a device: a deferred weight's are in a file."""
    return type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and not weight.is_meta


_version = attrgetter("_version")
"""How often a tensor was changed in place."""
