"""Tensors of unfinished work, each set in a folder of its own that outlives the process: whole, or not there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rehead.checkpoint.files.publish import settle
from rehead.checkpoint.files.shards import Shards
from rehead.checkpoint.files.writing import write_weights
from rehead.system.aside import aside

FIGURES = "figures.json"


def keep(place: Path, tensors: Mapping[str, Tensor], figures: object = None) -> None:
    """Write tensors and figures, JSON, to the new folder `place`."""
    with aside(place.parent, place.name) as folder:
        written = folder / place.name
        written.mkdir()
        write_weights(written, tensors)
        (written / FIGURES).write_text(json.dumps(figures))
        settle(written, place)


def kept(place: Path) -> dict[str, Tensor]:
    """Return the tensors in `place`, deferred."""
    shards = Shards(place)
    return {name: shards.deferred(name) for name in shards.entries}


def kept_figures(place: Path) -> Any:
    """Return the figures in `place`."""
    return json.loads((place / FIGURES).read_text())
