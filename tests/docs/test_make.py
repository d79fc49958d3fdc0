"""The targets of the Makefile: each is known to make, and those that documents and the hosted CI name exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", ".ci/run", ".github/workflows/ci.yml")
TARGETS = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_what_to_do(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_named_targets_exist() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMED}
    named = {
        (name, target)
        for name, text in texts.items()
        for target in re.findall(r"(?:^|`|- run: |&& )make ((?!-)[a-z][a-z-]*)", text, re.MULTILINE)
    }
    assert {name for name, _ in named} == {*NAMED}
    assert {target for _, target in named} - {*TARGETS} == set()
