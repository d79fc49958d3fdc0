"""Writes weights to safetensors files, one tensor at a time, so that only one has to be in memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rehead.checkpoint.files.deferred import materialise
from rehead.checkpoint.files.shards import DTYPES, INDEX, OTHERS, SINGLE, bytes_of

MOST_BYTES = 5 * 10**9
"""Maximum size of a file in bytes; a larger model gets several files and an index."""
NAMES = {dtype: name for name, dtype in (DTYPES | OTHERS).items()}


def json_text(table: Mapping[str, Any]) -> str:
    """Return the text of a JSON file of a model folder."""
    return json.dumps(table, indent=2, allow_nan=False) + "\n"


def write_weights(folder: Path, weights: Mapping[str, Tensor], most_bytes: int = MOST_BYTES) -> None:
    """Write `weights` as model.safetensors, or as several files with an index.

    The files are identical to those of safetensors' `save_file`. Deferred weights are read as they are written.
    """
    shards = _split(weights, most_bytes)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / name, shard)
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(map(_n_bytes, weights.values()))}, "weight_map": places}
    (folder / INDEX).write_text(json_text(index), encoding="utf-8")


def write_file(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write one safetensors file: widest dtype first, so that every tensor is aligned, then by name."""
    names = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        weight, start = weights[name], end
        end += _n_bytes(weight)
        header[name] = {
            "dtype": NAMES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(_bytes(name, weights[name]))


def _bytes(name: str, weight: Tensor) -> memoryview:
    tensor = materialise(weight).detach().cpu().contiguous()
    assert (tensor.shape, tensor.dtype) == (weight.shape, weight.dtype), name
    return bytes_of(tensor)


def _split(weights: Mapping[str, Tensor], most_bytes: int) -> list[dict[str, Tensor]]:
    """Split weights into files, in the given order; a new file starts when one is full."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in weights.items():
        if shards[-1] and size + _n_bytes(weight) > most_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size += _n_bytes(weight)
    return shards


def _n_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.dtype.itemsize
