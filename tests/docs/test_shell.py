"""Every command that README and the pages show is one that the command line takes; test_readme.py runs README's."""

import re
import shlex
from pathlib import Path

import pytest

from rehead.cli.entry import app
from rehead.config import flags

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = "log.md"
OPERATORS = {"|", "&&", ">", ";"}


def typed():
    """Page and words of every command, up to what a shell would do with its output; README's consoles show errors."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8") if page.name != HISTORY else ""
        kinds = {"", "sh"} if page.name == "README.md" else {"", "sh", "console"}
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            joined = block.replace("\\\n", " ") if kind in kinds else ""
            for line in re.findall(r"^(?:\$ )?(rehead .*)$", joined, re.MULTILINE):
                words = shlex.split(line, comments=True)
                end = next((at for at, word in enumerate(words) if word in OPERATORS), len(words))
                yield page.name, words[1:end]


TYPED = list(typed())


@pytest.mark.parametrize(("page", "words"), TYPED, ids=[f"{page} {' '.join(words)}" for page, words in TYPED])
def test_every_command_is_understood(page, words):
    command, _, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    assert command.__module__.startswith("rehead.cli") or "--help" in words
    if words[0] in ("train", "heal"):
        flags.read([word for word in words if "=" in word and not word.startswith("--")])


def test_every_page_with_commands_is_read():
    assert {"README.md", "serving.md", "gguf.md", "tasks.md", "scale.md"} <= {page for page, _ in TYPED}
