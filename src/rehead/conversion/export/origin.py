"""Where a model comes from and under what licence, as its folder says."""

import re
from pathlib import Path
from typing import Any

import yaml

from rehead.checkpoint.hub import pinned
from rehead.config.strict_yaml import parse

FRONT = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
HUB = "https://huggingface.co/"
MOST = 64 << 10
"""Characters of a card that are read."""


def origin(source: Path, folder: Path) -> dict[str, Any]:
    """Return the keys `general.*` of a GGUF file for the licence and the base models of `source`, read from `folder`.

    They are those of the card, README.md; a model of the Hub is its own base model.
    """
    card = _card(folder / "README.md")
    licence, named = card.get("license"), card.get("base_model")
    bases = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    commit = ""
    if pinned(str(source)):
        name, _, commit = str(source).partition("@")
        bases = [name]
    facts: dict[str, Any] = {"general.license": licence} if isinstance(licence, str) else {}
    if bases:
        facts["general.base_model.count"] = len(bases)
    for index, base in enumerate(bases):
        facts[f"general.base_model.{index}.name"] = base
        if re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            facts[f"general.base_model.{index}.repo_url"] = HUB + base
        if commit:
            facts[f"general.base_model.{index}.version"] = commit
    return facts


def _card(file: Path) -> dict[str, Any]:
    """Return the table at the head of a model's card; empty if there is none that can be read."""
    try:
        with file.open(encoding="utf-8") as text:
            front = FRONT.match(text.read(MOST))
        table = parse(front[1]) if front else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return table if isinstance(table, dict) else {}
