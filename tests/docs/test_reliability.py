"""The page that says what holds names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text())
    assert len(set(named)) > 20
    assert [name for name in named if not (TESTS / name).is_file()] == []
