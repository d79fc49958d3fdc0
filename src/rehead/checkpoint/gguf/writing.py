"""Writes GGUF files, one tensor at a time, so that only one has to be in memory."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import materialise
from rehead.checkpoint.gguf.file import package
from rehead.errors import NumericError
from rehead.stages import staged

Type = Literal["F32", "F16", "BF16", "Q8_0"]
FILE_TYPES: dict[Type, int] = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
"""llama.cpp's numbers for the type of most of a file's matrices."""
LARGEST: dict[Type, float] = {
    "F16": 65_504.0,
    "Q8_0": 65_504.0 * 127,
    "BF16": torch.finfo(torch.bfloat16).max,
}
"""Largest number that a type holds, where it is less than float32's."""
BLOCK = 32
"""Numbers of a row that share a scale in Q8_0."""
EXACT = ("_norm.weight", "position_embd.weight", ".bias", "rope_freqs.weight")
"""Ends of the names of tensors that are always F32."""


def type_of(name: str, shape: tuple[int, ...], asked: Type, exact: Collection[str] = ()) -> Type:
    """Return the type of a tensor, as llama.cpp's converter chooses it; those named in `exact` are F32."""
    if len(shape) < 2 or name.endswith(EXACT) or name in exact:
        return "F32"
    return "F16" if asked == "Q8_0" and shape[-1] % BLOCK else asked


def write_file(
    path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], types: Mapping[str, Type]
) -> None:
    """Write a file of these facts and tensors. Raises NumericError for a number that its type cannot hold."""
    gguf = package()
    writer = gguf.GGUFWriter(path, facts["general.architecture"])
    for key, value in facts.items():
        if key != "general.architecture":  # written already
            _add(writer, key, value)
    for name, weight in tensors.items():
        kind = gguf.GGMLQuantizationType[types[name]]
        shape, dtype = tuple(weight.shape), np.dtype(np.float16 if types[name] == "F16" else np.float32)
        if types[name] in ("BF16", "Q8_0"):
            shape, dtype = gguf.quant_shape_to_byte_shape(shape, kind), np.dtype(np.uint8)
        n_byte = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(name, shape, dtype, n_byte, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, weight in staged(list(tensors.items()), f"writing {path.name}", len(tensors), "tensors"):
            numbers = materialise(weight).detach().to("cpu", torch.float32).contiguous().numpy()
            _require_held(name, numbers, types[name])
            kind = gguf.GGMLQuantizationType[types[name]]
            writer.write_tensor_data(np.ascontiguousarray(gguf.quants.quantize(numbers, kind)))
    finally:
        writer.close()


def _require_held(name: str, numbers: np.ndarray, kind: Type) -> None:
    """Refuse a tensor of which a number would become infinite."""
    if numbers.size and not np.abs(numbers).max() <= LARGEST.get(kind, np.finfo(np.float32).max):
        wider = "fp32" if kind == "BF16" else "bf16 or fp32"
        raise NumericError(f"{name} has numbers beyond {kind}: use --dtype {wider}.")


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a fact as the type that llama.cpp expects: whole numbers as uint32, top_k as int32, other ones as float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int) and key.startswith("general.sampling."):
        writer.add_int32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
