"""The tutorials and the page of sources, run from top to bottom; what they print is what they show."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "sources.md"]
BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:\n*^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def test_there_are_tutorials():
    assert len(PAGES) > 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page, capsys):
    torch.set_default_dtype(torch.float32)
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCKS.finditer(text))
    assert len(blocks) == text.count("```python")
    assert sum(block[2] is not None for block in blocks) == text.count("```text")
    names: dict[str, object] = {}
    for block in blocks:
        lines_above = "\n" * (text.count("\n", 0, block.start(1)))  # so that a traceback has the page's line
        exec(compile(lines_above + block[1], str(page), "exec"), names)
        assert capsys.readouterr().out == (block[2] or ""), (
            f"printed by this block of {page.name}:\n{block[1]}"
        )
