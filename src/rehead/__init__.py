"""Change how a language model's attention heads share keys and values; measure what that costs and saves.

    import rehead

    model = rehead.load("out/gqa")  # a model folder, a run folder, a Hugging Face folder
    tokenizer = rehead.load_tokenizer("out/gqa")
    ids = tokenizer.encode("O God, O God!")
    print(tokenizer.decode(rehead.generate(model, ids, max_new_tokens=100)))
    smaller, certificate = rehead.convert(model, "mla", kv_fraction=0.5, calibration=ids)
    rehead.save(smaller, "out/latent", files={"tokenizer.json": tokenizer.to_json()})

A model is a `torch.nn.Module`: `model(ids)` maps ids (B, L) to logits (B, L, vocabulary). The attentions
themselves are in `rehead.attention`; `rehead.native.disable()` switches compiled kernels off. Names are loaded
when first used: `import rehead` imports no torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # as in `typing`, whose import would take most of the time until signals are handled
__version__ = "0.1.0"

if TYPE_CHECKING:
    from rehead import attention as attention
    from rehead import native as native
    from rehead.checkpoint import load, save
    from rehead.conversion.converter import convert
    from rehead.generation import generate
    from rehead.tokenizer import load_tokenizer

_HOMES = {
    "convert": "rehead.conversion",
    "generate": "rehead.generation",
    "load": "rehead.checkpoint",
    "load_tokenizer": "rehead.tokenizer",
    "save": "rehead.checkpoint",
}
_ROOMS = ("attention", "native")


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"rehead.{name}")
    raise AttributeError(f"module 'rehead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, *(name for name in globals() if name.startswith("__"))})


__all__ = ["__version__", "convert", "generate", "load", "load_tokenizer", "save"]
