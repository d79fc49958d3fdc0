"""Reads dotted flags and YAML over the defaults: `data.block_size=64 --model.rope=True --config FILE`."""

import os
import re
from collections.abc import Iterator
from dataclasses import Field, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml

from rehead.config.options import RunOptions
from rehead.config.strict_yaml import OddNumber, dump, first_line, parse
from rehead.config.typed import checked, example
from rehead.errors import ConfigError, InvalidInput
from rehead.registry import nearest

FLAG = re.compile(r"(?:--)?([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
GROUPS: dict[str, Any] = {group.name: group.type for group in fields(RunOptions)}
OPTIONS: dict[str, dict[str, Field]] = {
    group: {option.name: option for option in fields(kind)} for group, kind in GROUPS.items()
}
PATHS = ("data.path", "model.folder", "model.pretrained_folder", "trainer.teacher", "system.work_dir")
"""Options in which ~ is the home folder."""
LARGEST = 64 * 2**10
"""Bytes of a --config file, at most."""
Tables = dict[str, dict[str, Any]]
"""Values by group and name."""


def read(
    flags: list[str],
    files: tuple[Path, ...] = (),
    tables: tuple[dict[str, Any], ...] = (),
    source: str = "preset",
) -> RunOptions:
    """Return the defaults, overridden by `tables` of `source`, the YAML `files` and `flags`, in this order.

    A flag is `group.key=value`. Raises ConfigError with the flag, the rule and the nearest known name.
    """
    merged: Tables = {group: {} for group in GROUPS}
    for table in tables:
        _merge(merged, table, source)
    for path in files:
        _merge(merged, _yaml(path), str(path))
    for flag, key, text in _split(flags):
        _set(merged, key, _value(flag, key, text), f"{flag:.100}", f"{flag:.100}")
    return RunOptions(**{group: kind(**merged[group]) for group, kind in GROUPS.items()})


def values(flags: list[str]) -> dict[str, Any]:
    """Return the value of each of `flags` by its key; [a, b] is a list for any key."""
    by_key: dict[str, Any] = {}
    for flag, key, text in _split(flags):
        try:
            value = parse(text) if text.strip().startswith("[") else _value(flag, key, text)
            by_key[key] = expanded(key, value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{flag}: {first_line(error)}") from error
        if by_key[key] == []:
            raise ConfigError(f"{flag}: the list is empty. Give one value or more.")
    return by_key


def expanded(key: str, value: Any) -> Any:
    """Return the value of an option, with ~ replaced by the home folder in a path, also in a list of them."""
    if isinstance(value, list):
        return [expanded(key, each) for each in value]
    return os.path.expanduser(value) if key in PATHS and isinstance(value, str) else value


def write(options: RunOptions) -> str:
    """Return the options as YAML that `read` accepts."""
    return dump(asdict(options))


def _split(flags: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield every flag with its key and its text."""
    seen: set[str] = set()
    for flag, after in zip(flags, [*flags[1:], ""], strict=False):
        match = FLAG.fullmatch(flag)
        if match is None:
            raise ConfigError(_not_a_flag(flag, after))
        key, value = match.groups()
        if key in seen:
            raise ConfigError(f"{key} is given twice. Leave one out.")
        seen.add(key)
        yield flag, key, value


def _not_a_flag(word: str, after: str) -> str:
    group, _, name = word.removeprefix("--").partition(".")
    if name in OPTIONS.get(group, {}):
        value = after if after and "=" not in after else example(OPTIONS[group][name])
        return f"{word} has no value: write {group}.{name}={value}, with a = and no space."
    return f"{word!r} is not a flag: write group.key=value, for example model.n_kv_head=3."


def _merge(merged: Tables, table: Any, where: str) -> None:
    """Set every value of a table of groups."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{where}: expected groups with keys ({', '.join(GROUPS)}).")
    for group, keys in table.items():
        if group in GROUPS and isinstance(keys, dict):
            for name, value in keys.items():
                key = f"{group}.{name}"
                _set(merged, key, value, where, f"{where}: {key}={value!r:.80}")
        elif group not in GROUPS or keys is not None:
            raise ConfigError(_unknown_option(str(group), where))


def _set(merged: Tables, key: str, value: Any, where: str, whole: str) -> None:
    """Set one value; an entry of a table is added to the entries set before.

    `where` names the flag or the file for messages; `whole` also has the value.
    """
    group, _, rest = key.partition(".")
    name, _, entry = rest.partition(".")
    if name not in OPTIONS.get(group, {}):
        raise ConfigError(_unknown_option(key, where))
    _require_literal(value, where)
    value = {entry: value} if entry else expanded(key, value)
    value = checked(OPTIONS[group][name], value, f"{group}.{name}", whole)
    before = merged[group].get(name)
    merged[group][name] = {**before, **value} if entry and isinstance(before, dict) else value


def _unknown_option(key: str, where: str) -> str:
    """Return the message for an unknown key, with the likeliest option that was meant."""
    group, _, rest = key.partition(".")
    if group in GROUPS and not rest:
        return f"{where}: {group} is a group of options. Give one of them, {_like(group)}."
    if group not in GROUPS and rest:
        return f"{where}: unknown group {group!r:.80}.{nearest(group, list(GROUPS))}"
    if rest.partition(".")[0] in OPTIONS.get(group, ()):
        nested = f"{{{rest.replace('.', ': {')}: ...}}" + "}" * rest.count(".")
        return f"{where}: in a file, write {group}: {nested}, not {key}."
    word = (rest or group).partition(".")[0]
    everywhere = {name for names in OPTIONS.values() for name in names}
    mine = OPTIONS.get(group, everywhere)
    near = (
        get_close_matches(word, mine, n=1, cutoff=0.9)
        or get_close_matches(word, everywhere, n=1, cutoff=0.9)
        or get_close_matches(word, mine, n=2)
    )
    places = [f"{home}.{name}" for name in near for home, names in OPTIONS.items() if name in names]
    own = [place for place in places if place.startswith(f"{group}.")]
    hint = f" Did you mean {' or '.join(own or places)}?" if places else ""
    return f"{where}: unknown option {key!r:.80}.{hint} `rehead train --help` lists all."


def of_a_run(word: str) -> str:
    """Return the option of a run that has this name, or the first of the group that has it; empty for neither."""
    if word in GROUPS:
        return f"{word}.{next(iter(OPTIONS[word]))}"
    return next((f"{group}.{word}" for group, names in OPTIONS.items() if word in names), "")


def _like(group: str) -> str:
    name, option = next(iter(OPTIONS[group].items()))
    return f"like {group}.{name}={example(option)}"


def _require_literal(value: Any, where: str) -> None:
    """Refuse references, which other YAML readers would replace, and numbers beyond 64 bits."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_literal(item, where)
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ConfigError(f"{where}: {value!r:.80} is a reference. Write the value itself.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{where}: {value!s:.40} has more than 64 bits: no size or seed is that large.")


def _yaml(path: Path) -> Any:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InvalidInput(f"{path} is not a regular file: --config takes a YAML file.")
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise InvalidInput(
                f"{path} has more than {LARGEST:,} bytes: --config takes a YAML file of options."
            )
        return parse(text.decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}. --config takes a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is not YAML: {first_line(error)}.") from error


def _value(flag: str, key: str, text: str) -> Any:
    """Parse a flag's text: unchanged if the option is a text, otherwise as YAML.

    Numbers that YAML reads in another base (010 is 8 there, 1:30 is 90) are refused.
    """
    group, _, name = key.partition(".")
    option = OPTIONS.get(group, {}).get(name)
    if not text.strip():
        advice = "write null for none"
        if option is not None and NoneType not in get_args(option.type):
            advice = f"write {key}={example(option)}, for example"
        raise ConfigError(f"{flag!r} has no value: {advice}.")
    if text != "null" and option is not None and str in (option.type, *get_args(option.type)):
        return text
    try:
        value = parse(text)
    except OddNumber as error:
        raise ConfigError(f"{flag!r}: write the number in plain digits.") from error
    except yaml.YAMLError:
        return text
    number = isinstance(value, int | float) and not isinstance(value, bool)
    odd = number and re.search(r"[:xb]|^[+-]?0\d", text.strip().lower())
    foreign = re.fullmatch(r"[\d_+\-.eE]+", text.strip()) and ("_" in text or not text.isascii())
    if odd or foreign:
        raise ConfigError(f"{flag!r}: write the number in plain digits.")
    return value
