"""The targets of the Makefile: each is known to make, and those that documents and the hosted CI name exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", ".ci/run", ".github/workflows/ci.yml")
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()


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


def test_the_audit_accepts_what_security_md_explains() -> None:
    accepted = re.findall(r"^ACCEPTED := (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    rows = [row.split("|") for row in (ROOT / "SECURITY.md").read_text().splitlines() if row.startswith("|")]
    explained = [
        name for _, _, advisory, *_ in rows for name in re.findall(r"\b(?:CVE|PYSEC)-[\d-]+", advisory)
    ]
    assert accepted == explained
    pinned = re.findall(r"^([a-z-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {package.split()[0] for _, package, *_ in rows[2:]} <= {*pinned}
