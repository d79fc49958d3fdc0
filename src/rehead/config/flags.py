"""Dotted flags and YAML over the defaults: `data.block_size=64 --model.rope=True --config FILE`."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from rehead.config.options import RunOptions
from rehead.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from omegaconf import DictConfig

FLAG = re.compile(r"(?:--)?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def read(
    flags: list[str], files: tuple[Path, ...] = (), tables: tuple[dict[str, Any], ...] = ()
) -> RunOptions:
    """Defaults, then `tables`, then the YAML `files`, then `flags` (`group.key=value`), as one RunOptions.

    Raises ConfigError with the flag, the rule and the nearest known name.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged: Any = OmegaConf.structured(RunOptions)
    for table in tables:
        merged = _merge(merged, table, "preset")
    for path in files:
        merged = _merge(merged, _yaml(path), str(path))
    for flag, key, value in _split(flags):
        merged = _merge(merged, _nest(key, _value(flag, key, value)), flag)
    try:
        options = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    assert isinstance(options, RunOptions)
    return options


def values(flags: list[str]) -> dict[str, Any]:
    """What each of `flags` says, by its key; [a, b] is a list whatever the key."""
    found: dict[str, Any] = {}
    for flag, key, text in _split(flags):
        try:
            found[key] = parse(text) if text.strip().startswith("[") else _value(flag, key, text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{flag}: {_first_line(error)}") from error
        if found[key] == []:
            raise ConfigError(f"{flag}: an empty list names no value. Give one or more.")
    return found


def write(options: RunOptions) -> str:
    """The options as YAML that `read` takes back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(options))


def _split(flags: list[str]) -> Iterator[tuple[str, str, str]]:
    """Every flag with its key and its text."""
    seen: set[str] = set()
    for flag in flags:
        match = FLAG.fullmatch(flag)
        if match is None:
            raise ConfigError(f"{flag!r} is no flag: write group.key=value, for example model.n_kv_head=3.")
        key, value = match.groups()
        if key in seen:
            raise ConfigError(f"{key} is given twice. Leave one out.")
        seen.add(key)
        yield flag, key, value


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                problem="a reference; write the value itself", problem_mark=mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise yaml.constructor.ConstructorError(
                problem="a key stands twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """YAML without code, references or keys that stand twice. Raises yaml.YAMLError for all that is wrong."""
    try:
        return _Loader(text).get_single_data()
    except (ValueError, RecursionError) as error:  # no such day, too many digits, too deep
        raise yaml.YAMLError(str(error)) from error


def _merge(options: "DictConfig", changes: Any, where: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _require_literal(changes, where)
    try:
        return OmegaConf.merge(options, changes)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {_first_line(error)}{_group_of(changes)}") from error


def _require_literal(value: Any, where: str) -> None:
    """Refuse what OmegaConf would replace (references, its mark for "no value"), and numbers beyond 64 bits."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_literal(item, where)
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ConfigError(f"{where}: {value!r:.80} stands for something else. Write the value itself.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{where}: {value!s:.40} has more than 64 bits. Use 0 up to {2**63 - 1} at most.")


def _group_of(changes: Any) -> str:
    """The remedy where a key was given without its group."""
    for key in changes if isinstance(changes, dict) else ():
        for group in fields(RunOptions):
            if key in _kinds(group.type):
                return f". Did you mean {group.name}.{key}?"
    return ""


def _kinds(group: Any) -> dict[str, Any]:
    """Keys of one group and their types."""
    return {field.name: field.type for field in fields(group)}


def _yaml(path: Path) -> Any:
    try:
        table = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}. --config takes a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is not YAML: {_first_line(error)}.") from error
    if not isinstance(table, dict):
        raise InvalidInput(f"{path}: expected groups with keys (system, data, model, trainer).")
    return table


def _value(flag: str, key: str, text: str) -> Any:
    """What a flag's text says: itself where the key is a text, otherwise as YAML reads it.

    YAML's other numbers (010 is 8 there, 1:30 is 90) are refused.
    """
    if not text.strip():
        raise ConfigError(f"{flag!r} has no value: write null for none.")
    groups = {group.name: group.type for group in fields(RunOptions)}
    group, _, name = key.partition(".")
    kind = _kinds(groups[group]).get(name) if group in groups else None
    if text != "null" and (kind is str or str in get_args(kind)):
        return text
    try:
        value = parse(text)
    except yaml.YAMLError:
        return text
    number = isinstance(value, int | float) and not isinstance(value, bool)
    odd = number and re.search(r"[:xb]|^[+-]?0\d", text.strip().lower())
    foreign = re.fullmatch(r"[\d_+\-.eE]+", text.strip()) and ("_" in text or not text.isascii())
    if odd or foreign:
        raise ConfigError(f"{flag!r}: write the number in plain digits.")
    return value


def _nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _first_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
