"""Where a model comes from and under what licence: read from the card of its folder, README.md, and written to others.

The keys are those of a Hugging Face model card (https://huggingface.co/docs/hub/model-cards).
"""

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rehead.checkpoint.files.strict import require_regular
from rehead.checkpoint.hub import CARD, COMMIT, HUB, pinned
from rehead.config.strict_yaml import dump, parse
from rehead.conversion.page import escaped
from rehead.errors import InvalidInput

FRONT = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})")
"""The end of a folder's path in the Hub's cache."""
UNKNOWN = "unknown"
"""The Hub's word for a licence that is not known."""
LONGEST = 200
"""Length of a value in characters, at most; a longer one is left out."""
LARGEST = 4 << 20
"""Characters of a card that are kept, at most."""
MOST = 64 << 10
"""Characters of a card that are read, at most."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The licence of a model, empty where none is known, and the models it was made from.

    `named` are `license_name` and `license_link`, which belong to the licence `other`; `commit` is that of the only
    base model.
    """

    licence: str = ""
    named: tuple[tuple[str, str], ...] = ()
    bases: tuple[str, ...] = ()
    commit: str = ""

    @classmethod
    def read(cls, source: Path, folder: Path) -> "Origin":
        """Return the origin of what is made from `source`, whose files are in `folder`.

        It is what the card there says; a model of the Hub is its own base model, at its commit.
        """
        card = _table(folder / CARD)
        licence = _line(card.get("license"))
        licence = "" if licence == UNKNOWN else licence
        named = [(key, _line(card.get(key))) for key in ("license_name", "license_link")]
        bases = card.get("base_model")
        bases = [_line(name) for name in (bases if isinstance(bases, list) else [bases])]
        bases = [name for name in bases if name]
        commit = _line(card.get("base_model_commit"))
        if pinned(str(source)):
            name, _, commit = str(source).partition("@")
            bases = [name]
        elif cached := CACHED.fullmatch("/".join(folder.absolute().parts[-3:])):
            bases, commit = [f"{cached[1]}/{cached[2]}"], cached[3]
        return cls(
            licence=licence,
            named=tuple((key, value) for key, value in named if value and licence),
            bases=tuple(bases),
            commit=commit if len(bases) == 1 and COMMIT.fullmatch(commit) else "",
        )

    def keys(self) -> dict[str, Any]:
        """Return the keys of a card. A model that is made from another is its finetune to the Hub."""
        facts: dict[str, Any] = {"license": self.licence or UNKNOWN, **dict(self.named)}
        if self.bases:
            facts["base_model"] = self.bases[0] if len(self.bases) == 1 else list(self.bases)
            facts["base_model_relation"] = "finetune"
        if self.commit:
            facts["base_model_commit"] = self.commit
        return facts

    def sentences(self) -> str:
        """Return the same in Markdown."""
        made = ", ".join(
            f"[{name}]({HUB}{name})" if REPOSITORY.fullmatch(name) else escaped(name) for name in self.bases
        )
        at = f" at commit `{self.commit}`" if self.commit else ""
        base = f"Made from {made}{at}." if made else "No base model is recorded."
        if not self.licence:
            return (
                f"{base} **Its licence is unknown**: the source names none. Name one if the model is yours; otherwise "
                "ask what its authors allow before you use it or pass it on."
            )
        words = "".join(f", {escaped(value)}" for _, value in self.named)
        return f"{base} Licence, as its source names it: {escaped(self.licence)}{words}."


def carried(source: Path, folder: Path) -> str:
    """Return the card of a folder in rehead's own format, so that a later export knows where it comes from."""
    origin = Origin.read(source, folder)
    return (
        front({"library_name": "rehead", **origin.keys(), "tags": ["rehead"]})
        + f"\n# A model written by rehead\n\n{origin.sentences()}\n\nIf there is a CONVERSION.md, it says what was "
        "changed and what that cost. `rehead export` writes the model for other software.\n"
    )


def kept_card(folder: Path) -> dict[str, str]:
    """Return the card of a checkpoint as it is, as a file by name, if it has one."""
    text = _text(folder / CARD, LARGEST)
    return {CARD: text} if text else {}


def front(facts: dict[str, Any]) -> str:
    """Return the head of a card: YAML between two lines of dashes."""
    return f"---\n{dump(facts)}---\n"


def _line(value: Any) -> str:
    """Return a string of a card as one line; empty for anything else, and for what is too long to be a name."""
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return line if len(line) <= LONGEST and line.isprintable() else ""


def _table(file: Path) -> dict[str, Any]:
    """Return the table at the head of a model's card; empty if there is none that can be read."""
    try:
        head = FRONT.match(_text(file, MOST))
        table = parse(head[1], plain=False) if head else {}
    except yaml.YAMLError:
        return {}
    return table if isinstance(table, dict) else {}


def _text(file: Path, most: int) -> str:
    """Return the beginning of a card; empty if there is none that can be read.

    Warns of a pipe or a link out of the folder, which no manifest refuses.
    """
    if not os.path.lexists(file):
        return ""
    try:
        require_regular(file)
        with file.open(encoding="utf-8") as text:
            return text.read(most)
    except InvalidInput as error:
        warnings.warn(f"licence and base model are not passed on: {error}", stacklevel=2)
    except (OSError, UnicodeDecodeError):
        pass
    return ""
