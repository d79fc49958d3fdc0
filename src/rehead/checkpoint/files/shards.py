"""Reads safetensors files: headers are checked before memory is allocated, tensors are read one at a time.

Holes, duplicates and absurd sizes are refused: the format allows them, but no writer produces them.
"""

import math
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import Deferred
from rehead.checkpoint.files.opened import OpenedFiles
from rehead.checkpoint.files.strict import natural, parse_json, require_regular, strict_json
from rehead.errors import IntegrityError, InvalidInput
from rehead.stages import staged

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"[A-Za-z0-9._-]{1,200}\.safetensors")
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
OTHERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
"""Dtypes of buffers, which are not read; any other dtype is quantised."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LARGEST_HEADER = 16 * 2**20
MOST_TENSORS, MOST_AXES = 100_000, 8
PICKLES = (".bin", ".pt", ".pth")
LARGEST_INDEX = 16 * 2**20
LONG = 2**28
"""Bytes whose check takes some tenths of a second, and is shown."""
BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer: run `git lfs pull`, or download the file itself",
    b"<!doctype html": "a web page: download the file itself",
    b"<html": "a web page: download the file itself",
    b"PK\x03\x04": "a zip archive or a pickle: convert it to safetensors where it was created",
    b"\x80": "a pickle: convert it to safetensors where it was created",
    b"\x1f\x8b": "compressed: unpack it first",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor, as its header describes it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Position of the first byte in the file."""

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Shards:
    """The tensors of a model folder: one file, or the files that an index names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._files = OpenedFiles()
        try:
            self._open()
        except OSError as error:  # such as a checkpoint that its run has just deleted
            raise InvalidInput(f"{folder}: {error.strerror}: expected the model's weights there.") from error

    def deferred(self, name: str) -> Deferred:
        """Return one tensor that stays in the file until it is used."""
        entry = self._readable(name)
        return Deferred(lambda: self.read(name), entry.shape, entry.dtype, origins=frozenset([self]))

    def read(self, name: str) -> Tensor:
        """Return one tensor in new memory. Raises IntegrityError if its file has changed since it was opened."""
        entry = self._readable(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self._files.read(entry.file, bytes_of(tensor), entry.offset)
        return tensor

    def digests(self) -> dict[Path, str]:
        """Return the sha256 of every file, of the bytes that `read` reads."""
        files: Collection[Path] = {entry.file for entry in self.entries.values()}
        shown: Iterable[Path] = sorted(files)
        if sum(entry.n_bytes for entry in self.entries.values()) >= LONG:
            shown = staged(shown, f"checking {self.folder}", len(files), "files")
        return {file: self._files.sha256(file) for file in shown}

    def _readable(self, name: str) -> Entry:
        entry = self.entries[name]
        if not entry.dtype.is_floating_point:
            kind = next(key for key, value in OTHERS.items() if value == entry.dtype)
            raise InvalidInput(
                f"{entry.file}: {name} holds {kind!r}: rehead reads {', '.join(DTYPES)}, nothing quantised."
            )
        return entry

    def _open(self) -> None:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if single.exists() or single.is_symlink():  # before the index, as in transformers
            self.entries = self._header(single)
        elif index.is_file():
            self._read_index(index)
        else:
            pickles = sorted(file.name for file in self.folder.iterdir() if file.suffix in PICKLES)
            hint = (
                f" {pickles[0]} is a pickle, which can run code: convert it to safetensors first."
                if pickles
                else ""
            )
            raise InvalidInput(f"{self.folder}: expected {SINGLE} or {INDEX}.{hint}")

    def _header(self, path: Path) -> dict[str, Entry]:
        require_regular(path)
        with self._files.add(path) as file:
            return dict(_entries(path, file))

    def _read_index(self, index: Path) -> None:
        table = strict_json(index, LARGEST_INDEX)
        places = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(places, dict) or not places:
            raise InvalidInput(f"{index}: expected a weight_map of tensors to files.")
        for name, file in places.items():
            if not isinstance(file, str) or not SHARD.fullmatch(file):
                raise InvalidInput(
                    f"{index}: {name!r:.100} is in {file!r:.100}: expected a file of this folder."
                )
        for file in sorted(set(places.values())):
            path = index.parent / file
            if not path.exists():
                raise InvalidInput(f"{index} names {file}, which does not exist: download it.")
            for name, entry in self._header(path).items():
                if places.get(name) != file:
                    raise InvalidInput(f"{path}: {name} is not listed there in {index.name}, or elsewhere.")
                self.entries[name] = entry
        for name, file in places.items():
            if name not in self.entries:
                raise InvalidInput(f"{index}: {name!r:.100} is not in {file}.")
        metadata = table.get("metadata")
        declared = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(entry.n_bytes for entry in self.entries.values())
        if declared is not None and declared != actual:
            warnings.warn(
                f"{index}: total_size={declared!r:.40}, its files hold {actual:,} bytes of weights. They are read.",
                stacklevel=2,
            )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(array)


def read_header(path: Path) -> Iterator[tuple[str, Entry]]:
    """Yield names and entries of a file's tensors. Raises before yielding any."""
    require_regular(path)
    with path.open("rb") as file:
        yield from _entries(path, file)


def _entries(path: Path, file: BufferedReader) -> Iterator[tuple[str, Entry]]:
    size = os.fstat(file.fileno()).st_size
    begin = file.read(8)
    rest = file.read(24)
    if not rest.startswith(b"{"):
        _refuse_others(path, begin + rest)
    length = int.from_bytes(begin, "little")
    if size < 8 or not 2 <= length <= min(LARGEST_HEADER, size - 8):
        raise IntegrityError(
            f"{path} is not a safetensors file, or is cut short: {size:,} bytes with a header of {length:,}."
        )
    file.seek(8)
    try:
        header = parse_json(file.read(length).decode("utf-8"), natural)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{path}: its header is not JSON: {error!s:.200}. Put a whole copy of it there."
        ) from error
    if not isinstance(header, dict) or len(header) > MOST_TENSORS:
        raise InvalidInput(f"{path}: its header describes no tensors, or more than {MOST_TENSORS:,}.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidInput(f"{path}: __metadata__ holds something other than text.")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _require_gapless(path, entries, 8 + length, size)
    yield from entries.items()


def require_names(where: object, held: Set[str], wanted: Set[str], what: str, by: str) -> None:
    """Refuse missing tensors, and others than the `wanted` ones, which the config or metadata (`by`) describes."""
    for problem, names in (
        ("lacks", wanted - held),
        (f"holds, beyond what its {by} describes,", held - wanted),
    ):
        if names:
            listed = ", ".join(sorted(names)[:10])
            raise InvalidInput(f"{where} {problem} {len(names)} {what}: {listed:.300}.")


def _refuse_others(path: Path, begin: bytes) -> None:
    for sign, what in BEGINNINGS.items():
        if begin.lower().startswith(sign.lower()):
            raise InvalidInput(f"{path} is {what}.")


def _entry(path: Path, name: str, value: Any, begin: int) -> Entry:
    where = f"{path}: {name!r:.100}"
    if not NAME.fullmatch(name):
        raise InvalidInput(f"{where}: expected a name of letters, digits, dots, - and _.")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidInput(f"{where}: expected dtype, shape and data_offsets.")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES | OTHERS:
        raise InvalidInput(
            f"{where} holds {value['dtype']!r:.40}: rehead reads {', '.join(DTYPES)}, nothing quantised."
        )
    if isinstance(shape, list) and len(shape) > MOST_AXES:
        raise InvalidInput(f"{where} has {len(shape):,} axes: a tensor has at most {MOST_AXES}.")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise InvalidInput(
                f"{where}: shape {shape!r:.80} and offsets {offsets!r:.80}: expected whole numbers."
            )
    if len(offsets) != 2:
        raise InvalidInput(f"{where}: data_offsets {offsets!r:.80}: expected a beginning and an end.")
    dtype = (DTYPES | OTHERS)[value["dtype"]]
    entry = Entry(file=path, dtype=dtype, shape=tuple(shape), offset=begin + offsets[0])
    if offsets[1] - offsets[0] != entry.n_bytes:
        raise InvalidInput(f"{where}: shape {shape!r:.80} does not fill the bytes {offsets!r:.80}.")
    return entry


def _require_gapless(path: Path, entries: dict[str, Entry], begin: int, size: int) -> None:
    """Refuse holes, overlaps, and bytes after the last tensor."""
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].n_bytes)):
        if entry.offset != end:
            raise InvalidInput(
                f"{path}: {name} begins at byte {entry.offset - begin:,}, expected {end - begin:,}: a hole or an "
                "overlap."
            )
        end += entry.n_bytes
    if end != size:
        raise IntegrityError(
            f"{path} has {size - begin:,} bytes of weights, its header describes {end - begin:,}: download it again."
        )
