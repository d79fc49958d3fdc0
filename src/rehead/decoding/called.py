"""Decoding by the model's own calls, for models without a program."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rehead.model import LanguageModel
from rehead.model.base import Decode
from rehead.model.caches import counted


def called_decoder(model: LanguageModel) -> Decode:
    """Return a decoder that calls the model."""

    @torch.no_grad()
    def decode(ids: Tensor | np.ndarray, caches: Sequence[Any]) -> Tensor:
        with counted(caches):
            logits: Tensor = model(ids[:, None], cache=caches)[:, -1]
        return logits

    return decode
