"""Rotary embeddings in config.json, in the words of transformers 5 and of earlier releases."""

import math
import sys
import warnings
from inspect import signature
from typing import NamedTuple

from rehead.attention import RopeConfig, scalings
from rehead.attention.rope import Layout
from rehead.attention.rope_scaling import LongRopeScaling, RopeScaling
from rehead.checkpoint.huggingface.base import Fields, Table
from rehead.config import decode
from rehead.errors import InvalidInput

MSCALES = ("short_mscale", "long_mscale")
"""vLLM's names for longrope's factor of cosines; it does not read `attention_factor`."""

FORMULAS: dict[str, tuple[str, ...]] = {
    "default": (),
    **{name: tuple(signature(scalings[name]).parameters) for name in scalings},
    "longrope": (
        "short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor", *MSCALES
    ),
}  # fmt: skip
"""The keys that the formula of each rope_type reads, beside theta and a partial factor."""
NONE_OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of yarn for which null or zero mean the same as no key."""


class RopeKeys(NamedTuple):
    """How a class names and defaults what it reads: `partial` is None where all of a head always rotates."""

    theta: float = 10_000.0
    partial: float | None = None
    layout: Layout = "half-split"
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"


def read_rope(fields: Fields, length: int, keys: RopeKeys, reach: int | None = None) -> RopeConfig:
    """Read the rotary embedding of a model of `length` positions; longrope's first list is for `reach` of them.

    The keys are `rope_parameters`, and `rope_theta` (and a partial factor) with `rope_scaling`. If both are given, they
    must agree.
    """
    new, old = fields.take("rope_parameters", dict, {}), fields.take("rope_scaling", dict, {})
    table = merged(fields, new, keys, old)
    if reach is not None and table.get("rope_type") == "longrope":
        table["original_max_position_embeddings"] = reach
    return rope_of(table, length, keys, fields.where, "rope_parameters" if new else "rope_scaling")


def merged(fields: Fields, table: Table, keys: RopeKeys, old: Table) -> Table:
    """Return `rope_parameters` with the keys of earlier releases, which must agree."""
    table, outside = _renamed(table), _renamed(old)
    flat = {"rope_theta": (keys.theta_key, keys.theta)}
    if keys.partial is not None:
        flat["partial_rotary_factor"] = (keys.partial_key, keys.partial)
    for name, (key, default) in flat.items():
        said = name in table or name in outside
        if (value := fields.take(key, float, None if said else default)) is not None:
            outside[name] = value
    for name, value in outside.items():
        if table.setdefault(name, value) != value:
            raise InvalidInput(
                f"{fields.where}: {name} is {table[name]!r:.40} in rope_parameters and {value!r:.40} outside it: "
                "remove one."
            )
    return table


def rope_of(
    table: Table, length: int, keys: RopeKeys, where: str, inside: str = "rope_parameters"
) -> RopeConfig:
    """Return the rotary embedding that the keys of `rope_parameters` describe; in config.json they are `inside`."""
    table = dict(table)
    theta = table.pop("rope_theta", keys.theta)
    partial = table.pop("partial_rotary_factor", 1.0 if keys.partial is None else keys.partial)
    if keys.partial is None and partial != 1:
        raise InvalidInput(
            f"{where}: partial_rotary_factor={partial!r:.40} in {inside}: this class rotates all of a head. Remove it."
        )
    said, scaling = "rope_type" in table, None
    kind = table.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in FORMULAS:
        raise InvalidInput(f"{where}: rope_type={kind!r:.40}: rehead knows default, {', '.join(scalings)}.")
    if table and not said:
        raise InvalidInput(
            f"{where}: rope_type default with {', '.join(table)}: the default takes no other keys. Say a rope_type, or "
            "remove them."
        )
    table = _read_keys(table, kind, where, inside)
    if kind != "default":
        if kind != "linear":
            table.setdefault("original_max_position_embeddings", length)
        if kind == "longrope":
            table = _one_list(table, length, where, inside)
        scaling = decode(RopeScaling, {"rope_type": kind, **table}, f"{where}: rope")
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            raise InvalidInput(f"{where}: {name}={value!r:.40}: expected a positive number.")
    return RopeConfig(
        theta=float(theta), scaling=scaling, layout=keys.layout, partial_rotary_factor=float(partial)
    )


def _renamed(table: Table) -> Table:
    """Return the table with `rope_type` for its former name, `type`."""
    table = dict(table)
    if "type" in table:
        table.setdefault("rope_type", table.pop("type"))
        table.pop("type", None)
    return table


def _read_keys(table: Table, kind: str, where: str, inside: str) -> Table:
    """Return the keys that the formula of a type reads and that say something; warn of the others."""
    if kind == "yarn" and (truncate := table.pop("truncate", True)) is not True:
        raise InvalidInput(
            f"{where}: truncate={truncate!r:.40} in {inside}: rehead knows True here, which rounds the ends of "
            "yarn's ramp."
        )
    known = FORMULAS[kind]
    if unread := [name for name, value in table.items() if name not in known and value is not None]:
        warnings.warn(
            f"{where}: ignored {', '.join(unread):.300} in {inside}, which transformers does not read for rope_type "
            f"{kind}.",
            stacklevel=2,
        )
    return {
        name: value
        for name, value in table.items()
        if name in known and not (name in NONE_OR_ZERO and value in (None, 0))
    }


def _one_list(table: Table, length: int, where: str, inside: str) -> Table:
    """Merge longrope's lists for short and long texts, and compute its magnitude as transformers does."""
    short, long = table.get("short_factor"), table.get("long_factor")
    reach, stretch = table["original_max_position_embeddings"], table.get("factor")
    lists = isinstance(short, list) and isinstance(long, list)
    if not lists or type(reach) is not int or reach < 2:
        raise InvalidInput(
            f"{where}: longrope with {', '.join(table)}: expected lists short_factor and long_factor, and "
            "original_max_position_embeddings of 2 or more."
        )
    factor = length / reach if stretch is None else stretch
    if not isinstance(factor, int | float):
        raise InvalidInput(f"{where}: longrope factor={factor!r:.40}: expected a number.")
    magnitude = table.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(reach)) if factor > 1 else 1.0
    for name in MSCALES:
        if table.get(name) not in (None, magnitude):
            raise InvalidInput(
                f"{where}: longrope {name}={table[name]!r:.40}, and the factor of its cosines is {magnitude}: set "
                f"both to what the model was trained with, as {name} and attention_factor in {inside}."
            )
    if short != long and length > reach:
        raise InvalidInput(
            f"{where}: longrope with other factors beyond {reach} of {length} positions: the angles would change "
            f"within a text. Set max_position_embeddings={reach} to use the model up to there, and "
            f"attention_factor={magnitude} in {inside}."
        )
    return {"factors": short, "attention_factor": magnitude}


def write_rope(rope: RopeConfig | None, length: int, keys: RopeKeys) -> Table:
    """Return the keys of a rotary embedding over `length` positions, for transformers 5 and for earlier releases.

    Earlier releases and other engines read `rope_theta` and `rope_scaling`, and take 10000 for a missing theta.
    """
    assert rope is not None
    scaling = scaling_table(rope, length)
    partial = {} if keys.partial is None else {"partial_rotary_factor": rope.partial_rotary_factor}
    flat = {keys.theta_key: rope.theta}
    if partial:
        flat[keys.partial_key] = rope.partial_rotary_factor
    return {
        "rope_parameters": {"rope_theta": rope.theta, **partial, **scaling},
        **flat,
        "rope_scaling": None if rope.scaling is None else scaling,
    }


def scaling_table(rope: RopeConfig, length: int) -> Table:
    """Return `rope_type` and the fields of the scaling."""
    table: Table = {"rope_type": "default"}
    if isinstance(rope.scaling, LongRopeScaling):
        factors, magnitude = list(rope.scaling.factors), rope.scaling.attention_factor
        table = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
        table |= {"original_max_position_embeddings": length, "attention_factor": magnitude}
        table |= dict.fromkeys(MSCALES, magnitude) if magnitude != 1 else {}
    elif rope.scaling is not None:
        table = {"rope_type": scalings.name_of(type(rope.scaling))}
        table |= {name: value for name, value in vars(rope.scaling).items() if value is not None}
    return table
