"""In which fields two model configs differ."""

import dataclasses
from collections.abc import Collection
from typing import Any

from rehead.config.model import GPTConfig, ModelConfig

DROPOUT = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
"""Fields that only training reads: models that differ in these are the same function."""


def differing(one: ModelConfig, other: ModelConfig, free: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return the values of both by the name of the field, of an attention's in the last layer where they differ.

    Fields of the names in `free` do not count.
    """
    if type(one) is not type(other):
        return {"model.type": (one.model_type, other.model_type)}
    found = _fields(one, other, {*free, "attention"})
    if isinstance(one, GPTConfig) and isinstance(other, GPTConfig):
        if one.n_layer != other.n_layer:
            found["n_layer"] = (one.n_layer, other.n_layer)
        for ours, theirs in zip(one.attention, other.attention, strict=False):
            if type(ours) is not type(theirs):
                found["attention"] = (ours.name, theirs.name)
            else:
                found |= _fields(ours, theirs, free)
        if found.get("rope") in ((True, False), (False, True)):
            found.pop("learned_positions", None)  # they follow from rope or none
    return found


def _fields(one: Any, other: Any, free: Collection[str]) -> dict[str, tuple[Any, Any]]:
    names = (field.name for field in dataclasses.fields(one) if field.name not in free)
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if "rope" in found and None in found["rope"]:  # as the flag has it
        found["rope"] = (found["rope"][0] is not None, found["rope"][1] is not None)
    return found
