"""How to sample: generation_config.json as the keys `general.sampling.*`, which llama.cpp takes as its defaults."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rehead.checkpoint.huggingface.base import Table

PREFIX = "general.sampling."
LARGEST = float(np.finfo(np.float32).max)
KEYS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("temp", lambda one: one > 0),
    "top_k": ("top_k", lambda one: type(one) is int and 0 <= one < 2**31),
    "top_p": ("top_p", lambda one: 0 < one <= 1),
    "min_p": ("min_p", lambda one: 0 <= one <= 1),
    "repetition_penalty": ("penalty_repeat", lambda one: one > 0),
}
"""By name in generation_config.json: the name in a GGUF file, and which numbers transformers accepts."""


def facts_of(generation: Table) -> dict[str, Any]:
    """Return the keys of a file: those of `KEYS` that are given, and a temperature of 0 for no sampling."""
    samples = generation.get("do_sample")
    told = ({"temperature": 1.0} if samples else {}) | generation
    facts = {
        PREFIX + theirs: told[ours] if ours == "top_k" else float(told[ours])
        for ours, (theirs, valid) in KEYS.items()
        if _is(told.get(ours), valid)
    }
    return facts | ({f"{PREFIX}temp": 0.0} if samples is False else {})


def generation_of(facts: Mapping[str, Any]) -> Table:
    """Return what generation_config.json says of sampling; empty if the file says nothing of it."""
    read = {ours: _short(facts.get(PREFIX + theirs)) for ours, (theirs, _) in KEYS.items()}
    known = {ours: one for ours, one in read.items() if _is(one, KEYS[ours][1])}
    greedy = _is(read["temperature"], lambda one: one <= 0)
    return {"do_sample": not greedy} | known if known or greedy else {}


def _is(value: Any, valid: Callable[[float], bool]) -> bool:
    """Whether a value is a number that float32 holds, and a valid one."""
    return type(value) in (int, float) and abs(value) <= LARGEST and valid(value)


def _short(value: Any) -> Any:
    """Return the shortest number that rounds to a float32."""
    return float(str(np.float32(value))) if type(value) is float and abs(value) <= LARGEST else value
