"""Reads a GGUF file: its metadata, and its tensors in float32, one at a time.

The header is not read by the package `gguf`, whose reader trusts every count and offset; the package only dequantises.
The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

import math
import os
import re
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import Deferred
from rehead.checkpoint.files.opened import OpenedFiles
from rehead.checkpoint.files.shards import BEGINNINGS, MOST_TENSORS, NAME
from rehead.errors import IntegrityError, InvalidInput, UsageError

MAGIC, VERSIONS = b"GGUF", (2, 3)
LARGEST_HEADER = 64 * 2**20
MOST_KEYS, MOST_ITEMS, MOST_AXES = 4096, 4 * 2**20, 4
KEY = re.compile(r"[!-~]{1,256}")
PIECE = 2**20
"""Approximate number of elements that are dequantised at once."""
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Codes in `struct` of the types of values, by the type's number in GGUF; 7 is a bool."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor, as the header describes it."""

    type: str
    """The type's name in ggml, such as Q4_1."""
    shape: tuple[int, ...]
    """As in PyTorch, with the last axis contiguous."""
    offset: int
    """Position of the first byte in the file."""
    n_bytes: int
    block: int
    """Number of elements that are quantised together, in `n_byte` bytes."""
    n_byte: int


class File:
    """An open GGUF file: `facts`, its metadata, and `entries`, its tensors.

    Raises IntegrityError for a file that is damaged, cut short or changed since it was opened, InvalidInput for one
    that is not GGUF and for types that cannot be dequantised, UsageError without the package `gguf`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise InvalidInput(f"{path} {what}: give a .gguf file.")
        try:
            self._files = OpenedFiles()
            with self._files.add(path) as file:
                self.facts, self.entries = _Header(path, file).read()
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}: expected a GGUF file.") from error

    def deferred(self, name: str) -> Deferred:
        """Return one tensor in float32, which stays in the file until it is used."""
        return Deferred(lambda: self.read(name), self.entries[name].shape, torch.float32)

    def read(self, name: str) -> Tensor:
        """Return one tensor, dequantised to float32. Raises InvalidInput if it holds NaN or infinity."""
        from gguf import GGMLQuantizationType, dequantize

        entry = self.entries[name]
        numbers = np.empty(entry.n_bytes // entry.n_byte * entry.block, np.float32)
        step = -(-PIECE // entry.block)  # blocks at once
        for begin in range(0, entry.n_bytes // entry.n_byte, step):
            part = numbers[begin * entry.block : (begin + step) * entry.block]
            n_byte = part.size // entry.block * entry.n_byte
            data: Any = np.empty(n_byte, np.uint8)
            self._files.read(self.path, memoryview(data), entry.offset + begin * entry.n_byte)
            with np.errstate(all="ignore"):
                part[:] = dequantize(data[None], GGMLQuantizationType[entry.type])[0]
        if not np.isfinite(numbers).all():
            raise InvalidInput(
                f"{self.path}: {name} holds NaN or infinity: it is damaged. Download it again."
            )
        return torch.from_numpy(numbers.reshape(entry.shape))


class _Header:
    """Reads forward through the header, never past the file's end or the limits above."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.n_item = 0
        """Items of all arrays so far."""

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        """Read the metadata and the entries of the tensors."""
        self._begin()
        n_tensor = self._count("tensors", MOST_TENSORS)
        n_key = self._count("keys", MOST_KEYS)
        facts: dict[str, Any] = {}
        for _ in range(n_key):
            key = self._name("key", KEY, facts)
            facts[key] = self._value(key)
        tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(n_tensor):
            name = self._name("tensor", NAME, tensors)
            tensors[name] = self._tensor(name)
        return facts, self._place(tensors, facts.get("general.alignment", 32))

    def _begin(self) -> None:
        begin = self.file.read(4)
        for sign, what in BEGINNINGS.items():
            if (begin + self.file.peek(24)[:24]).lower().startswith(sign.lower()):
                self._refuse(f"it is {what}")
        if begin != MAGIC:
            self._refuse(
                f"it begins with {begin!r}, a GGUF file with {MAGIC!r}. Give a .gguf file of a model"
            )
        version = self._number("I")
        if version not in VERSIONS:
            what = "big-endian" if not version & 0xFFFF else f"of version {version}"
            self._refuse(
                f"it is {what}: rehead reads 2 and 3, little-endian. Convert it with llama.cpp's tools"
            )

    def _tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        n_axis = self._number("I")
        if not 1 <= n_axis <= MOST_AXES:
            self._refuse(f"{name} has {n_axis} axes: a tensor has 1 to {MOST_AXES}")
        shape = tuple(self._number("Q") for _ in range(n_axis))
        if not all(0 < n < 2**40 for n in shape):
            self._refuse(f"{name} has shape {list(shape)}: expected numbers from 1")
        return shape[::-1], self._number("I"), self._number("Q")

    def _place(
        self, tensors: dict[str, tuple[tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, Entry]:
        """Return the entries of tensors, which must fill the file, each at a multiple of `alignment`."""
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            self._refuse(f"general.alignment={alignment!r:.40}: expected a power of two")
        sizes = _sizes()
        begin = -(-self.file.tell() // alignment) * alignment
        entries, expected = {}, 0
        for name, (shape, number, offset) in tensors.items():
            if number not in sizes:
                self._refuse(f"{name} holds type {number} of ggml, which the package gguf cannot dequantise")
            kind, block, n_byte = sizes[number]
            if shape[-1] % block:
                self._refuse(f"{name} has rows of {shape[-1]}: {kind} has blocks of {block}")
            if offset != expected:
                self._refuse(f"{name} begins at byte {offset:,}, expected {expected:,}: a hole or an overlap")
            n_bytes = math.prod(shape) // block * n_byte
            entries[name] = Entry(
                type=kind, shape=shape, offset=begin + offset, n_bytes=n_bytes, block=block, n_byte=n_byte
            )
            expected = -(-(offset + n_bytes) // alignment) * alignment
            if entries[name].offset + n_bytes > self.size:
                raise IntegrityError(
                    f"{self.path} has {self.size:,} bytes, {name} ends at {begin + offset + n_bytes:,}: it was "
                    "cut short. Download it again."
                )
        if self.size > begin + expected:
            self._refuse(f"{self.size - begin - expected:,} bytes follow the last tensor. Download it again")
        return entries

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind != ARRAY:
            return self._scalar(key, kind)
        inner, length = self._number("I"), self._number("Q")
        self.n_item += length
        if self.n_item > MOST_ITEMS:
            self._refuse(
                f"{key} has {length:,} items: all arrays of a file have {MOST_ITEMS:,} together at most"
            )
        if inner in NUMBERS:
            code = struct.Struct(f"<{length}{NUMBERS[inner]}")
            numbers = list(code.unpack(self._take(code.size)))
            if inner != 7:
                return numbers
            if set(numbers) - {0, 1}:
                self._refuse(f"{key} has a bool of {max(numbers)}: expected 0 or 1")
            return list(map(bool, numbers))
        return [self._scalar(key, inner) for _ in range(length)]

    def _scalar(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(key)
        if kind not in NUMBERS:
            self._refuse(f"{key} has a value of type {kind}, which rehead does not read")
        value = self._number(NUMBERS[kind])
        if kind == 7 and value > 1:
            self._refuse(f"{key} is a bool of {value}: expected 0 or 1")
        if kind == 6 and math.isfinite(value):
            return float(str(np.float32(value)))  # the shortest decimal: 1e-5, not 9.999999747378752e-06
        return bool(value) if kind == 7 else value

    def _name(self, what: str, rule: re.Pattern[str], taken: dict[str, Any]) -> str:
        name = self._text(f"the name of a {what}")
        if not rule.fullmatch(name):
            self._refuse(f"{name!r:.100} is not a name for a {what}")
        if name in taken:
            self._refuse(f"the {what} {name} appears twice")
        return name

    def _text(self, what: str) -> str:
        data = self._take(self._number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"{what} is not UTF-8 at byte {error.start}")

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            self._refuse(f"its header says {count:,} {what}: a file has {most:,} at most")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, n_byte: int) -> bytes:
        here = self.file.tell()
        if n_byte > self.size - here:
            raise IntegrityError(
                f"{self.path} has {self.size:,} bytes, but its header asks for {n_byte:,} at byte {here:,}: it was "
                "cut short or is damaged. Download it again."
            )
        if here + n_byte > LARGEST_HEADER:
            self._refuse(f"its header has more than {LARGEST_HEADER:,} bytes")
        return self.file.read(n_byte)

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidInput(f"{self.path}: {why}.")


def package() -> Any:
    """Return the package `gguf`. Raises UsageError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UsageError('GGUF files need the package gguf: pip install "rehead[gguf]".') from None
    return gguf


def _sizes() -> dict[int, tuple[str, int, int]]:
    """Return name, elements per block and bytes per block of every type that can be dequantised, by its number."""
    gguf, sizes = package(), {}
    for kind, (block, n_byte) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, n_byte), np.uint8), kind)
        except NotImplementedError:  # how the package says that it cannot dequantise this kind
            continue
        sizes[int(kind)] = (kind.name, block, n_byte)
    return sizes
