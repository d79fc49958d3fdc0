"""Checks what one decoding step is given, before any cache counts the token."""

from collections.abc import Sequence
from operator import call, is_
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from rehead.attention import LayerCache
from rehead.errors import UsageError
from rehead.model import LanguageModel
from rehead.model.caches import require_next
from rehead.model.ids import require_device, require_ids, require_range


class Check:
    """Refuses ids and caches that do not fit a model; remembers those that did: rows and dtype cannot change."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._fitting: list[ref[LayerCache]] = []

    def __call__(self, ids: Tensor | np.ndarray, caches: Sequence[LayerCache]) -> Tensor:
        """Return `ids` (B,) as an int64 tensor. Refuse a step that could not be computed; the caches are unchanged."""
        if not self._is_known(caches):
            self._model.require_caches(caches, caches[0].batch_size if _has_batch(caches) else len(ids))
            self._fitting = [ref(cache) for cache in caches]
        if not isinstance(ids, Tensor):
            ids = require_ids(ids, dims=(1,)).to(self._model.device)
        elif ids.dtype != torch.int64:
            ids = require_ids(ids, dims=(1,))
        if ids.dim() != 1 or len(ids) != caches[0].batch_size:
            raise UsageError(
                f"ids has shape {tuple(ids.shape)} and the caches hold {caches[0].batch_size} sequences. Give one id "
                "each."
            )
        length = caches[0].n_token + 1
        self._model.require_room(length)
        require_next(caches, len(ids), length)
        if ids.device.type == "cpu":  # elsewhere the numbers would have to be waited for
            require_device(ids, self._model.device)
            numbers, n_id = ids.tolist(), self._model.config.vocab_size
            if numbers and not 0 <= min(numbers) <= max(numbers) < n_id:
                require_range(ids, n_id)
        elif self._model.device.type == "cpu":
            raise UsageError(f"ids are on {ids.device} and the model is on the CPU. Use ids.cpu().")
        return ids

    def _is_known(self, caches: object) -> bool:
        return (
            bool(self._fitting)
            and isinstance(caches, list | tuple)
            and len(caches) == len(self._fitting)
            and all(map(is_, map(call, self._fitting), caches))
        )


def _has_batch(caches: object) -> bool:
    return isinstance(caches, list | tuple) and bool(caches) and isinstance(caches[0], LayerCache)
