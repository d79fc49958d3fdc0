"""Configs of models that `plan` counts and nothing else reads."""

import warnings

from rehead.checkpoint.huggingface.base import Table
from rehead.checkpoint.huggingface.stock import is_known, quantised

ALONE = "Only `plan` reads such a model."


def for_sizes(table: Table, where: str) -> Table:
    """Return a config.json that `stock.read_config` reads, of a model of the same sizes; warn of what differs.

    Its weights may be quantised, the text model may be a part of another (`text_config`), and longrope may change its
    angles within a text.
    """
    text = table.get("text_config")
    if not is_known(table.get("model_type")) and isinstance(text, dict) and is_known(text.get("model_type")):
        warnings.warn(f"{where}: only the text model is counted, the text_config. {ALONE}", stacklevel=3)
        table = {key: table[key] for key in ("quantization_config",) if key in table} | text
    if not is_known(table.get("model_type")):
        return table
    if found := quantised(table):
        warnings.warn(
            f"{where}: {found}: its weights are counted as if they were not quantised. {ALONE}", stacklevel=3
        )
        table = {name: value for name, value in table.items() if name != "quantization_config"}
    for key in ("rope_scaling", "rope_parameters"):
        rope = table.get(key)
        if isinstance(rope, dict) and _changes(rope) and _is_long(table | rope):
            warnings.warn(
                f"{where}: longrope changes its angles within a text: other commands ask for a shorter "
                "max_position_embeddings.",
                stacklevel=3,
            )
            table = table | {key: rope | {"long_factor": rope.get("short_factor")}}
    return table


def _changes(rope: Table) -> bool:
    """Return True if longrope has two lists, alike but for their numbers."""
    short, long = rope.get("short_factor"), rope.get("long_factor")
    if not isinstance(short, list) or not isinstance(long, list) or len(short) != len(long):
        return False  # refused as it is
    return short != long and all(type(factor) in (int, float) for factor in long)


def _is_long(table: Table) -> bool:
    """Return True if a text may be longer than longrope's first list is for."""
    length, reach = (table.get(f"{name}max_position_embeddings") for name in ("", "original_"))
    return not (isinstance(length, int) and isinstance(reach, int)) or length > reach
