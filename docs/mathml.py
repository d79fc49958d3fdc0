"""Formulas of the site as MathML, which browsers draw without a script."""

import re
from html import unescape

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html, page, **_):
    """Called by MkDocs with the HTML of each page. Ends the build where a displayed formula was not found."""
    html = FORMULA.sub(
        lambda found: convert(unescape(found[2]), display="block" if found[1] == "div" else "inline"), html
    )
    written, drawn = page.markdown.count("```math"), html.count('display="block"')
    if written != drawn:
        raise PluginError(f"{page.file.src_path}: {written} displayed formulas, {drawn} drawn.")
    return html
