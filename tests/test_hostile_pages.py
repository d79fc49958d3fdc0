"""Strings of files in tables and Markdown: shown, and nothing else."""

import csv
import html
import io
import re
from itertools import product

import pytest
from markdown_it import MarkdownIt

from rehead.conversion.page import escaped
from rehead.study.results import _csv


@pytest.mark.parametrize("text", ["=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(text):
    table = _csv([{"variant": text, "loss": -1.5}])
    cell = next(csv.DictReader(io.StringIO(table, newline="")))
    assert cell == {"variant": f"'{text}".replace("\r", "\n"), "loss": "-1.5"}


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "[a](javascript:b)", "a | b\n\n# c", "**x**", "`y`", "&lt;", "![i](u)"],
)
def test_markdown_of_a_file_is_one_plain_line(text):
    shown = escaped(text)
    assert not re.search(r"[<>|`*\[\]\n!]", shown)
    assert not re.search("#(?![0-9]+;)", shown)


def test_underscores_within_words_are_readable_and_none_is_markup():
    """A renderer of Markdown shows every text as it was; names such as x86_64 are so in the file itself, too."""
    assert escaped("x86_64, head_dim") == "x86_64, head_dim"
    render = MarkdownIt().renderInline
    for letters in product("_a*. ", repeat=6):
        text = " ".join("".join(letters).split())
        assert html.unescape(render(escaped(text))) == text
