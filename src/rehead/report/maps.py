"""Attention maps for a browser: one layer and head at a time, and an overview of all heads.

`fragment` returns one figure, for a page that contains `script()` once. Weights are stored as the bytes
round(255 sqrt(weight)), deflated: small weights keep their order, and only a masked weight, exactly 0, becomes 0.
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
from rehead.measure.attention_maps import head_spread
from rehead.report.text import token_labels

MOST_CELLS = 64_000_000
"""Weights of one figure; more would be too slow to draw and too large to store."""


def fragment(
    title: str,
    tokens: Sequence[str],
    maps: Sequence[Float[Tensor, "_ L L"]],
    windows: Sequence[int | None],
    *,
    layer: int = 0,
    head: int = 0,
) -> str:
    """Return one figure as HTML: the maps of a text's `tokens`, (H, L, L) and a window for each layer.

    `layer` and `head` are shown first. Title and tokens may be untrusted text. Raises UsageError for more
    weights than fit a page.
    """
    n_cell = sum(weights.numel() for weights in maps)
    if n_cell > MOST_CELLS:
        raise UsageError(
            f"{len(tokens)} tokens make {n_cell:,} weights, a page has room for {MOST_CELLS:,}: use a "
            f"text of {int(len(tokens) * (MOST_CELLS / n_cell) ** 0.5)} tokens or fewer."
        )
    about = {
        "tokens": token_labels(tokens),
        "layers": [
            {**asdict(head_spread(weights, window)), "window": window}
            for weights, window in zip(maps, windows, strict=True)
        ],
        "layer": layer,
        "head": head,
    }
    options = "".join(f"<option>{index}</option>" for index in range(len(maps)))
    return f"""\
<figure class="attention-maps" data-about="{escape(json.dumps(about))}" data-weights="{_packed(maps)}">
<figcaption>{escape(title)}</figcaption>
<p><label>Layer <select name="layer" autocomplete="off">{options}</select></label>
<label>Head <select name="head" autocomplete="off"></select></label></p>
<p class="note">Each row is a token, its cells are the tokens it attends to; masked cells are blank.
<span class="of-window"></span></p>
<svg class="map" role="img"></svg>
<p class="scale"><span></span><span class="of-map"></span><output></output></p>
<p><label>All heads by <select name="kind" autocomplete="off"><option value="distance">distance</option>
<option value="entropy">entropy</option></select></label>
<span class="note">one row per layer; select a cell to see its map</span></p>
<div class="heads"><table><tbody class="overview"></tbody></table></div>
<p class="scale"><span></span><span class="of-heads"></span></p>
<noscript>The maps need JavaScript, which is off.</noscript>
</figure>
"""


def script() -> str:
    """Return the script and style of the figures, which a page needs once."""
    style, code = ((files("rehead.report") / f"maps.{kind}").read_text() for kind in ("css", "js"))
    return f"<style>{style}</style>\n<script>{code}</script>\n"


def _packed(maps: Sequence[Tensor]) -> str:
    """Return all weights as deflated bytes in base64; only a weight of exactly zero becomes 0."""
    cells = b"".join(
        torch.where(weights > 0, (255 * weights.sqrt()).round().clamp(min=1), 0).byte().numpy().tobytes()
        for weights in maps
    )
    return base64.b64encode(zlib.compress(cells, 9)).decode()
