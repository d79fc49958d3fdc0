"""Attention maps to look through in a browser: one layer and head at a time, and all heads at a glance.

`fragment` is one figure, for any page that has `script()` in it once. Weights travel as
the bytes round(255 sqrt(weight)), deflated: small weights keep their order, and 0 is only what is exactly
0, which a mask makes it.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.errors import UsageError
from rehead.measure.attention_maps import spread
from rehead.report.labels import labels

MOST_CELLS = 64_000_000
"""Weights of one figure; a browser draws no more, and the page would not be small."""


def fragment(
    title: str,
    tokens: Sequence[str],
    maps: Sequence[Float[Tensor, "_ L L"]],
    windows: Sequence[int | None],
    *,
    layer: int = 0,
    head: int = 0,
) -> str:
    """One figure of HTML: the maps of a text's `tokens`, (H, L, L) and a window for each layer.

    `layer` and `head` are shown first. Title and tokens are untrusted text. Raises UsageError for more
    weights than a browser draws.
    """
    n_cell = sum(weights.numel() for weights in maps)
    if n_cell > MOST_CELLS:
        raise UsageError(
            f"{len(tokens)} tokens make {n_cell:,} weights, more than the {MOST_CELLS:,} of a page: use a "
            f"text of {int(len(tokens) * (MOST_CELLS / n_cell) ** 0.5)} tokens or fewer."
        )
    about = {
        "tokens": labels(tokens),
        "layers": [asdict(spread(one, window)) for one, window in zip(maps, windows, strict=True)],
        "layer": layer,
        "head": head,
    }
    options = "".join(f"<option>{index}</option>" for index in range(len(maps)))
    return f"""\
<figure class="attention-maps" data-about="{escape(json.dumps(about))}" data-weights="{_packed(maps)}">
<figcaption>{escape(title)}</figcaption>
<p><label>Layer <select name="layer">{options}</select></label>
<label>Head <select name="head"></select></label></p>
<p class="note">Each row is a token, its cells the tokens it looks back on; what a mask hides is blank.
{_windows(windows, len(tokens))}</p>
<svg class="map" role="img"></svg>
<p class="scale"><span></span><span class="of-map"></span><output></output></p>
<p><label>All heads by <select name="kind"><option value="distance">distance</option>
<option value="entropy">entropy</option></select></label>
<span class="note">a row per layer; choose one to see its map</span></p>
<div class="heads"><table><tbody class="overview"></tbody></table></div>
<p class="scale"><span></span><span class="of-heads"></span></p>
<noscript>The maps are drawn by JavaScript, which is off.</noscript>
</figure>
"""


def script() -> str:
    """What draws the figures, and their style; once a page."""
    style, code = ((files("rehead.report") / f"maps.{kind}").read_text() for kind in ("css", "js"))
    return f"<style>{style}</style>\n<script>{code}</script>\n"


def _windows(windows: Sequence[int | None], n_token: int) -> str:
    """What is to be said of layers that see a window only."""
    some = sorted({window for window in windows if window is not None})
    if not some:
        return ""
    names = ", ".join(map(str, some))
    everywhere = "" if None not in windows else " in some layers"
    hides = "" if some[0] < n_token else f"; over these {n_token} tokens it hides nothing"
    return f"A token sees no more than the last {names} tokens{everywhere}{hides}."


def _packed(maps: Sequence[Tensor]) -> str:
    """All weights as bytes, zero only where they are exactly zero; deflated, in base64."""
    cells = b"".join(
        torch.where(weights > 0, (255 * weights.sqrt()).round().clamp(min=1), 0).byte().numpy().tobytes()
        for weights in maps
    )
    return base64.b64encode(zlib.compress(cells, 9)).decode()
