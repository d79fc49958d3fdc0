"""A self-contained HTML page: no network, no other file; light, dark, for print and for phones."""

from html import escape
from pathlib import Path

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""Lets a page run its own scripts and styles, and load nothing."""

MARK = '<meta name="generator" content="rehead">'
"""Marks a page as written by rehead."""


def is_page(file: Path) -> bool:
    """Return True if rehead wrote the page, so that it may be replaced."""
    with file.open("rb") as text:
        return MARK.encode() in text.read(1000)


def page(title: str, body: str, head: str = "") -> str:
    """Return a whole page; `title` is escaped, `body` and `head` (styles and scripts) are HTML."""
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{MARK}
<title>{escape(title)}</title>
<style>{STYLE}</style>
{head}</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1f2328; --soft: #59616b; --line: #c9ced4; --page: #ffffff; --card: #f4f6f8; --grid: #e6e9ec;
  --warn: #b35900; --weak: #eaf1f8; --middle: #4e95c9; --strong: #08284f;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e8ea; --soft: #a3abb4; --line: #434a52; --page: #14171a; --card: #1d2125; --grid: #2b3036;
    --warn: #f0b13c; --weak: #1c2733; --middle: #3a83b8; --strong: #eaf6ff;
  }
}
@media print { :root { color-scheme: light; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; }
select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 4px; }
select { padding: .2em .4em; max-width: 100%; }
"""
