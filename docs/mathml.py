"""Formulas of the site as MathML, which browsers draw without a script."""

import re
from html import unescape

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html, **_):
    """Called by MkDocs with the HTML of each page."""
    return FORMULA.sub(
        lambda found: convert(unescape(found[2]), display="block" if found[1] == "div" else "inline"), html
    )
