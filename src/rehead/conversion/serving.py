"""Warns of a conversion that engines cannot serve, or serve with a larger cache."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

from rehead.attention import AttentionConfig, LatentConfig
from rehead.config import GPTConfig
from rehead.conversion.export.engines import ENGINES
from rehead.conversion.export.fit import Asked, lacks_class
from rehead.conversion.target import Target


def tell_classless(config: GPTConfig, target: Target) -> None:
    """Warn of an MLA with a rotary part, which is made to be exported, that no stock class can hold."""
    if target.target in ("uneven", "canonical"):
        layers = tuple(target.attention(layer, config.n_embd) for layer in config.attention)
        if why := lacks_class(replace(config, attention=layers)):
            warnings.warn(
                f"no stock class can hold the result, so `export` will refuse it; rehead runs it: {why}",
                stacklevel=3,
            )
        elif target.target == "canonical" and (
            why := lacks_class(replace(config, attention=layers), Asked.of("auto", "vllm"))
        ):
            warnings.warn(f"vLLM and SGLang cannot serve the result: {why}", stacklevel=3)
        elif target.target == "canonical":
            _tell_padded(config, layers)


def _tell_padded(config: GPTConfig, layers: Sequence[AttentionConfig]) -> None:
    """Warn of a cache that exports for vLLM pad to what its kernels know."""
    known = ENGINES["vllm"].rows
    sizes = f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
    before = sum(layer.kv_numbers() for layer in config.attention)
    rows = [layer.kv_numbers() for layer in layers if isinstance(layer, LatentConfig)]
    padded = [next((row for row in known if row >= numbers), numbers) for numbers in rows]
    if padded != rows:
        others = sum(layer.kv_numbers() for layer in layers) - sum(rows)
        share = (sum(padded) + others) / before
        warnings.warn(
            f"vLLM's kernels know caches of {sizes} numbers per token and layer: an export for vLLM pads the {rows[0]} "
            f"of this one to {padded[0]}, {100 * share:.4g} % of the source's",
            stacklevel=4,
        )
