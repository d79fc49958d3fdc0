"""One HTML page that needs nothing but itself: no network, no other file, dark and light, print and phone."""

from html import escape

from rehead.errors import UsageError

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""What a browser lets the page do: run what stands in it, load nothing."""


def page(title: str, body: str) -> str:
    """A whole page; `title` is escaped, `body` is HTML."""
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def plotly() -> str:
    """Plotly's script, 5 MB; once a page."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError('interactive pages need plotly: pip install "rehead[report]".') from error
    return f"<script>{get_plotlyjs()}</script>\n"


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; color: CanvasText; background: Canvas; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; }
"""
