"""Presets of studies: a common run, what each variant changes in it, and questions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from rehead.config import RunOptions
from rehead.config.flags import expanded
from rehead.config.strict_yaml import first_line, parse
from rehead.conversion import Target
from rehead.errors import InvalidInput, UsageError
from rehead.generation import MOST_TOKENS
from rehead.measure.kv_dtype import kv_dtypes
from rehead.registry import nearest
from rehead.sampling import require_valid

Kind = Literal["given", "trained", "converted", "healed", "exported"]
Flags = dict[str, Any]
"""Values by dotted key; a list makes one run per entry, unless the key takes a list."""
Form = Mapping[str, Any]
"""The keys a table may have, with the type of each value."""
KEYS = asdict(RunOptions())
GROUPS = tuple(KEYS)
PANELS = ("loss", "frontier", "kv_dtype", "memory", "speed")
"""Panels that can answer a question."""
CONVERT = {
    **{option.name: object for option in fields(Target)},
    "method": str,
    "calibration": str | list,
    "test": str,
    "length": int,
    "measured_ranks": bool,
    "teach": int,
}
EXPORT = {"format": str, "for": str}
"""Options of `rehead convert` and `rehead export` that a variant may set."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one variant changes in the common run; `about` describes it in a sentence.

    With `source` it is the model in that folder, unchanged. With `start`, the name of another variant, it
    starts from that variant's model. It is then trained further with `flags` over the earlier ones, converted
    by `convert`, healed by its source with `heal`, or written as a Hugging Face folder by `export`.
    """

    about: str = ""
    flags: Flags = field(default_factory=dict)
    source: str | None = None
    start: str | None = None
    convert: Flags | None = None
    heal: bool = False
    export: Flags | None = None

    @property
    def kind(self) -> Kind:
        """Return in a word how the model is made."""
        if self.heal:
            return "healed"
        if self.convert is not None:
            return "converted"
        if self.export is not None:
            return "exported"
        return "trained" if self.source is None else "given"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A section of the report about the variants `of`, which are compared with the first of them."""

    ask: str
    of: tuple[str, ...]
    show: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A study as described by its file; docs/study.md has the form.

    `kv_dtype` has the number formats of the KV cache in which the variants of its panel are measured.
    """

    name: str
    file: str
    about: str
    run: Flags
    variants: dict[str, Variant]
    questions: tuple[Question, ...] = ()
    prompt: str | None = None
    new_tokens: int = 120
    temperature: float | int = 0.8
    kv_dtype: tuple[str, ...] = ()

    @classmethod
    def read(cls, name: str) -> "Preset":
        """Read a preset that comes with rehead, by name, or from a YAML file of the same form."""
        shipped = {entry.name.removesuffix(".yaml"): entry for entry in files("rehead.presets").iterdir()}
        shipped = {key: entry for key, entry in shipped.items() if entry.name.endswith(".yaml")}
        file = shipped.get(name, Path(name))
        if not file.is_file():
            raise InvalidInput(f"{name!r} is neither a preset nor a file.{nearest(name, sorted(shipped))}")
        try:
            table = parse(file.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            raise InvalidInput(
                f"{name} is not YAML: {first_line(error)}. docs/study.md has the form of a preset."
            ) from error
        return cls.of(name, table)

    @classmethod
    def of(cls, name: str, table: Any) -> "Preset":
        """Return the preset in the table of the file `name`. Raises InvalidInput for anything outside the form."""
        form = {
            "about": str,
            "run": dict,
            "variants": dict,
            "questions": list,
            "prompt": str,
            "new_tokens": int,
            "temperature": int | float,
            "kv_dtype": object,
        }
        read = _table(name, table, form, required=("about",))
        run = _options(f"{name}: run", read.get("run", {}))
        changes = read.get("variants", {"": {}})
        variants = {str(key): _variant(f"{name}: {key}", changes[key] or {}) for key in changes}
        for key, variant in variants.items():
            before = list(variants)[: list(variants).index(key)]
            before = [name for name in before if variants[name].export is None]
            if variant.start is not None and variant.start not in before:
                hint = nearest(variant.start, before)
                raise InvalidInput(
                    f"{name}: {key}: from: {variant.start!r:.80} is not a variant above it.{hint}"
                )
        if not variants:
            raise InvalidInput(f"{name}: variants is empty: write one or more, or leave it out.")
        if read.get("prompt") == "":
            raise InvalidInput(f"{name}: prompt is empty: give a text, or leave it out.")
        _require_samples(name, read)
        compared = {key: variant for key, variant in variants.items() if variant.export is None}
        questions = tuple(
            _question(f"{name}: questions", each, compared) for each in read.get("questions", [])
        )
        return cls(
            name=Path(name).stem,
            file=name,
            about=" ".join(read["about"].split()),
            run=_flat(run),
            variants=variants,
            questions=questions,
            kv_dtype=_formats(name, read.get("kv_dtype", []), questions),
            **{key: read[key] for key in ("prompt", "new_tokens", "temperature") if key in read},
        )


def _require_samples(name: str, read: Mapping[str, Any]) -> None:
    """Refuse what `generate` would refuse after training."""
    new_tokens = read.get("new_tokens", 0)
    if isinstance(new_tokens, bool) or not 0 <= new_tokens <= MOST_TOKENS:
        raise InvalidInput(f"{name}: new_tokens={new_tokens}. Use 0 to {MOST_TOKENS:,}.")
    try:
        require_valid(read.get("temperature", 0), None, None)
    except UsageError as error:
        raise InvalidInput(f"{name}: {error}") from error


def _table(where: str, value: Any, form: Form, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `value`, checked to be a table with keys and types of `form`."""
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected a table with {', '.join(form)}, got {value!r:.80}.")
    for key, item in value.items():
        if key not in form:
            raise InvalidInput(f"{where}: unknown key {str(key)!r:.80}.{nearest(str(key), list(form))}")
        if not isinstance(item, form[key]):
            kinds = get_args(form[key]) or (form[key],)
            names = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidInput(f"{where}: {key}={item!r:.80}: expected {names}.")
    for key in required:
        if key not in value:
            raise InvalidInput(f"{where}: {key} is missing.")
    return value


def _options(where: str, value: Any) -> dict[str, Any]:
    """Return `value`, checked to be groups of known options; their values are checked later."""
    for group, keys in _table(where, value, dict.fromkeys(GROUPS, dict)).items():
        for key, each in _table(f"{where}: {group}", keys, dict.fromkeys(KEYS[group], object)).items():
            if each == []:
                raise InvalidInput(f"{where}: {group}: {key}: the list is empty. Give one value or more.")
    return dict(value)


def _variant(where: str, changes: Any) -> Variant:
    form = {"about": str, "source": str, "from": str, "convert": dict, "heal": bool, "export": dict}
    table = _table(where, changes, {**dict.fromkeys(GROUPS, dict), **form})
    for key, keys in (("convert", CONVERT), ("export", EXPORT)):
        if key in table:
            _table(f"{where}: {key}", table[key], keys)
    texts = table.get("convert", {}).get("calibration", "")
    for text in texts if isinstance(texts, list) else ():
        if not isinstance(text, str):
            raise InvalidInput(
                f"{where}: convert: calibration: {text!r:.80}: expected a text. Write it in quotes."
            )
    _options(where, {group: table[group] for group in GROUPS if group in table})
    variant = Variant(
        about=" ".join(table.get("about", "").split()),
        flags=_flat({group: table[group] for group in GROUPS if group in table}),
        source=table.get("source"),
        start=table.get("from"),
        convert=table.get("convert"),
        heal=table.get("heal", False),
        export=table.get("export"),
    )
    ways = [key for key in ("source", "convert", "heal", "export") if table.get(key, False) is not False]
    if len(ways) > 1:
        raise InvalidInput(f"{where}: {' and '.join(ways)} are separate steps: write a variant for each.")
    if variant.start is None and ways and variant.source is None:
        raise InvalidInput(
            f"{where}: {ways[0]} needs a model to start from. Write from: and a variant above."
        )
    if variant.start is not None and variant.source is not None:
        raise InvalidInput(f"{where}: source: and from: both name what it starts from. Leave one out.")
    if variant.flags and ways and not variant.heal:
        raise InvalidInput(
            f"{where}: {ways[0]} does not train, so {next(iter(variant.flags))} has no effect. Leave it out, or heal "
            "the result in another variant."
        )
    return variant


def _question(where: str, value: Any, variants: Mapping[str, Variant]) -> Question:
    table = _table(where, value, {"ask": str, "of": list, "show": list}, required=("ask",))
    of, show = table.get("of", list(variants)), table.get("show", ["loss"])
    for key, words, known in (("of", of, list(variants)), ("show", show, list(PANELS))):
        for word in words:
            if word in known:
                continue
            if known == [""]:
                raise InvalidInput(f"{where}: of: {word!r:.80}: the file has no variants. Leave of: out.")
            raise InvalidInput(f"{where}: {key}: unknown {word!r:.80}.{nearest(str(word), known)}")
    return Question(ask=" ".join(table["ask"].split()), of=tuple(of), show=tuple(show))


def _formats(name: str, value: Any, questions: Sequence[Question]) -> tuple[str, ...]:
    """Return the names of cache formats, checked to be known and shown, if any question is asked."""
    known = list(kv_dtypes)
    if not isinstance(value, list):
        wrote = " ".join(yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").split())
        raise InvalidInput(
            f"{name}: kv_dtype: {wrote:.80}: expected a list of formats. Write kv_dtype: [bf16, fp8], for example."
        )
    for each in value:
        if each not in known:
            raise InvalidInput(f"{name}: kv_dtype: unknown {each!r:.80}.{nearest(str(each), known)}")
    if len(set(value)) < len(value):
        raise InvalidInput(f"{name}: kv_dtype: [{', '.join(value)}] names one twice. Leave it out.")
    shown = any("kv_dtype" in question.show for question in questions)
    if shown and not value:
        raise InvalidInput(
            f"{name}: a question shows kv_dtype, but there are no formats. Add kv_dtype: [bf16, fp8, int8]."
        )
    if value and questions and not shown:
        raise InvalidInput(
            f"{name}: kv_dtype={value!r:.80} is in no answer. Add kv_dtype to what a question shows (show:)."
        )
    return tuple(value)


def _flat(table: Any) -> Flags:
    """Return `{model: {rope: true}}` as `{"model.rope": True}`."""
    flat = {f"{group}.{key}": value for group, keys in table.items() for key, value in keys.items()}
    return {key: expanded(key, value) for key, value in flat.items()}
