"""Converts configs to plain dicts and back. Unknown keys, missing keys and values of another type are refused."""

import sys
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from operator import itemgetter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rehead.attention import AttentionConfig, scalings, scores, variants
from rehead.attention.rope_scaling import RopeScaling
from rehead.attention.score import ScoreConfig
from rehead.config.model import ModelConfig, model_types
from rehead.config.typed import WORDS
from rehead.errors import ConfigError, InvalidInput
from rehead.fields import annotations
from rehead.registry import Registry, nearest

TAGS: dict[type, tuple[str, Registry[Any]]] = {
    ModelConfig: ("model_type", model_types),
    AttentionConfig: ("variant", variants),
    RopeScaling: ("rope_type", scalings),
    ScoreConfig: ("name", scores),
}
"""Families of configs: the key that names a member, and the registry that has it."""


def encode(value: Any) -> Any:
    """Return a config as dicts, lists and numbers, ready for JSON; equal layers are written once."""
    if isinstance(value, tuple) and value and isinstance(value[0], AttentionConfig):
        return [
            {"layers": [i for i, layer in enumerate(value) if layer == kind], **encode(kind)}
            for kind in dict.fromkeys(value)
        ]
    if is_dataclass(value):
        return _tag(value) | {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    return value


def decode(kind: Any, value: Any, where: str = "config") -> Any:
    """Return the config that `encode` wrote, checked against the annotations of `kind`.

    Raises InvalidInput with the key, the value and the rule.
    """
    for family, (key, registry) in TAGS.items():
        if kind is family:
            if not isinstance(value, dict) or not isinstance(value.get(key), str):
                raise InvalidInput(f"{where}: expected a table with a {key!r}, one of {', '.join(registry)}.")
            tag = value[key]
            if tag not in registry:
                raise InvalidInput(f"{where}: unknown {registry.kind} {tag!r}.{nearest(tag, registry)}")
            decoded = _decode_fields(registry[tag], {k: v for k, v in value.items() if k != key}, where)
            if _tag(decoded)[key] != tag:
                raise InvalidInput(
                    f"{where}: {key}={tag!r} contradicts its sizes, which make it {_tag(decoded)[key]!r}."
                )
            return decoded
    return _decode_fields(kind, value, where) if is_dataclass(kind) else _decode_plain(kind, value, where)


def _tag(value: Any) -> dict[str, str]:
    for family, (key, registry) in TAGS.items():
        if isinstance(value, family):
            return {
                key: _variant(value) if isinstance(value, AttentionConfig) else registry.name_of(type(value))
            }
    return {}


def _variant(config: AttentionConfig) -> str:
    """Return the name of an attention, by which it is read back; raise ConfigError if that is another class's."""
    kind = type(config)
    if config.name not in variants or variants[config.name] is not kind:
        raise ConfigError(
            f"{kind.__name__} calls itself {config.name!r}, and a model with that name would be read as another "
            "attention. Let `name` return what `variants.add` was given; build a model whose class was defined again "
            "anew."
        )
    return config.name


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected a table, got {value!r:.80}.")
    known, kinds = {field.name: field for field in fields(kind)}, annotations(kind)
    for key in value:
        if key not in known:
            raise InvalidInput(f"{where}: unknown key {key!r:.80}.{nearest(str(key), list(known))}")
    for name, field in known.items():
        if name not in value and field.default is MISSING:
            raise InvalidInput(f"{where}: {name} is missing.")
    decoded = {name: decode(kinds[name], item, f"{where}.{name}") for name, item in value.items()}
    try:
        return kind(**decoded)
    except ConfigError as error:
        raise InvalidInput(f"{where}: {error}") from error


def _decode_plain(kind: Any, value: Any, where: str) -> Any:
    """Decode a number, a name, an optional value, a tuple or the list of layers."""
    if get_origin(kind) in (Union, UnionType):
        *others, last = [option for option in get_args(kind) if option is not NoneType]
        if value is None:
            return None
        for option in others:
            with suppress(InvalidInput):
                return decode(option, value, where)
        return decode(last, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InvalidInput(f"{where}={value!r:.80}. Use one of {', '.join(map(repr, get_args(kind)))}.")
        return value
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return _decode_layers(value, where) if item is AttentionConfig else _decode_items(item, value, where)
    if kind not in (bool, int, float, str):
        raise InvalidInput(
            f"{where}: a field of {kind} cannot be read back. Use a number, a text, True or False, a tuple, or None."
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is int and type(value) is int and abs(value) >= 2**63:
        raise InvalidInput(f"{where}={value!s:.40} has more than 64 bits: no size or seed is that large.")
    if kind is not float and type(value) is kind:
        return value
    raise InvalidInput(f"{where}={value!r:.80}: expected {WORDS[kind]}.")


def _decode_items(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        what = "numbers" if kind in (float, int) else "values"
        raise InvalidInput(f"{where}={value!r:.80}: expected a list of {what}.")
    return tuple(decode(kind, item, where) for item in value)


def _decode_layers(value: Any, where: str) -> tuple[AttentionConfig, ...]:
    """Return the attention of each layer from groups of equal layers."""
    layers: list[tuple[int, AttentionConfig]] = []
    for group in value if isinstance(value, list) else []:
        indices = group.get("layers") if isinstance(group, dict) else None
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            raise InvalidInput(f"{where}: every entry needs 'layers', a list of layer indices.")
        kind = decode(AttentionConfig, {k: v for k, v in group.items() if k != "layers"}, where)
        layers += [(index, kind) for index in indices]
    layers.sort(key=itemgetter(0))
    order = [index for index, _ in layers]
    if not layers or order != list(range(len(layers))):
        raise InvalidInput(f"{where}: layers {order!s:.80}: expected 0, 1, 2, ... each once.")
    return tuple(kind for _, kind in layers)
