"""What a study is told to do: a common run, what each variant changes in it, and what is asked."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from rehead.config import RunOptions
from rehead.config.strict_yaml import parse
from rehead.conversion import Wish
from rehead.errors import InvalidInput
from rehead.registry import nearest

Flags = dict[str, Any]
"""Values by dotted key; a list, where the key itself takes none, means one run per entry."""
KEYS = asdict(RunOptions())
GROUPS = tuple(KEYS)
PANELS = ("loss", "frontier", "memory", "speed")
"""What a question can be answered with."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one variant changes in the common run.

    With `start`, the name of another variant, it goes on from that one's model: trained further with
    `flags` in place of those it was trained with, or turned into another attention by `convert`, or,
    being such a conversion, healed by its source.
    """

    flags: Flags = field(default_factory=dict)
    start: str | None = None
    convert: Flags | None = None
    heal: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """A part of the report: the variants `of` which it tells, the first of them the one compared with."""

    ask: str
    of: tuple[str, ...]
    show: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A study as its file says it; `docs/study.md` has the form."""

    name: str
    file: str
    about: str
    run: Flags
    variants: dict[str, Variant]
    questions: tuple[Question, ...]
    prompt: str | None = None
    new_tokens: int = 120

    @classmethod
    def read(cls, name: str) -> "Preset":
        """A preset that comes with rehead, by name, or a YAML file of the same form."""
        shipped = {entry.name.removesuffix(".yaml"): entry for entry in files("rehead.presets").iterdir()}
        shipped = {key: entry for key, entry in shipped.items() if entry.name.endswith(".yaml")}
        file = shipped.get(name, Path(name))
        if not file.is_file():
            raise InvalidInput(f"no preset and no file {name!r}.{nearest(name, sorted(shipped))}")
        try:
            table = parse(file.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            raise InvalidInput(f"{name} is no preset: {' '.join(str(error).split()):.200}") from error
        return cls.of(name, table)

    @classmethod
    def of(cls, name: str, table: Any) -> "Preset":
        """From the table that the file called `name` holds. Raises InvalidInput for what the form does not have."""
        form = {
            "about": str,
            "run": dict,
            "variants": dict,
            "questions": list,
            "prompt": str,
            "new_tokens": int,
        }
        read = _table(name, table, form, required=("about",))
        run = _options(f"{name}: run", read.get("run", {}))
        changes = read.get("variants", {"": {}})
        variants = {str(key): _variant(f"{name}: {key}", changes[key] or {}) for key in changes}
        for key, variant in variants.items():
            before = list(variants)[: list(variants).index(key)]
            if variant.start is not None and variant.start not in before:
                hint = nearest(variant.start, before)
                raise InvalidInput(
                    f"{name}: {key}: from: {variant.start!r:.80} is no variant above it.{hint}"
                )
        asked = read.get(
            "questions",
            [
                {
                    "ask": "What does each cost, and what does it reach?",
                    "of": list(variants),
                    "show": list(PANELS),
                }
            ],
        )
        return cls(
            name=Path(name).stem,
            file=name,
            about=" ".join(read["about"].split()),
            run=_flat(run),
            variants=variants,
            questions=tuple(_question(f"{name}: questions", one, variants) for one in asked),
            **{key: read[key] for key in ("prompt", "new_tokens") if key in read},
        )


def _table(
    where: str, value: Any, form: Mapping[str, type], required: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`value` as a table whose keys and kinds are those of `form`."""
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected a table with {', '.join(form)}, got {value!r:.80}.")
    for key, item in value.items():
        if key not in form:
            raise InvalidInput(f"{where}: unknown key {str(key)!r:.80}.{nearest(str(key), list(form))}")
        if not isinstance(item, form[key]):
            raise InvalidInput(f"{where}: {key}={item!r:.80}: expected {form[key].__name__}.")
    for key in required:
        if key not in value:
            raise InvalidInput(f"{where}: {key} is missing.")
    return value


def _options(where: str, value: Any) -> dict[str, Any]:
    """`value` as groups of options, each key one that the group has; what it is set to is read later."""
    for group, keys in _table(where, value, dict.fromkeys(GROUPS, dict)).items():
        _table(f"{where}: {group}", keys, dict.fromkeys(KEYS[group], object))
    return dict(value)


def _variant(where: str, changes: Any) -> Variant:
    table = _table(
        where, changes, {**dict.fromkeys(GROUPS, dict), "from": str, "convert": dict, "heal": bool}
    )
    _options(where, {group: table[group] for group in GROUPS if group in table})
    convert = table.get("convert")
    if convert is not None:
        wishes = {**{one.name: object for one in fields(Wish)}, "method": str}
        _table(f"{where}: convert", convert, wishes)
    made = Variant(
        flags=_flat({group: table[group] for group in GROUPS if group in table}),
        start=table.get("from"),
        convert=convert,
        heal=table.get("heal", False),
    )
    if (made.convert is not None or made.heal) and made.start is None:
        raise InvalidInput(f"{where}: what is converted or healed? Write from: and a variant above.")
    if made.convert is not None and (made.heal or made.flags):
        raise InvalidInput(f"{where}: a conversion is not trained: heal it in a variant of its own.")
    return made


def _question(where: str, value: Any, variants: Mapping[str, Variant]) -> Question:
    table = _table(where, value, {"ask": str, "of": list, "show": list}, required=("ask",))
    of, show = table.get("of", list(variants)), table.get("show", ["loss"])
    for key, words, known in (("of", of, list(variants)), ("show", show, list(PANELS))):
        for word in words:
            if word in known:
                continue
            if known == [""]:
                raise InvalidInput(f"{where}: of: {word!r:.80}: the file names no variants. Leave of: out.")
            raise InvalidInput(f"{where}: {key}: unknown {word!r:.80}.{nearest(str(word), known)}")
    return Question(ask=" ".join(table["ask"].split()), of=tuple(of), show=tuple(show))


def _flat(table: Any) -> Flags:
    """`{model: {rope: true}}` as `{"model.rope": True}`."""
    return {f"{group}.{key}": value for group, keys in table.items() for key, value in keys.items()}
