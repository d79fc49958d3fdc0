"""The C++ files of this folder, each built once per machine by a compiler with PyTorch's OpenMP (GCC), and loaded."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
HEADER = HERE / "vectors.h"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-fopenmp")
LINK = ("-shared",)
"""Apart from compiling: linking with -ffast-math would make the whole process flush small numbers to zero, and with
-fopenmp would bring a second OpenMP; PyTorch's own threads are used, so that no others wait for the same cores."""
TIMEOUT_SECONDS = 300


class NoKernel(Exception):
    """Why there is no kernel in C++ here; nothing a user has to act on."""


@cache
def library(name: str) -> ctypes.CDLL | NoKernel:
    """The loaded kernels of `name`.cpp, or why there are none. The first call on a machine takes some seconds."""
    try:
        return ctypes.CDLL(str(_built(name)))
    except (NoKernel, OSError) as problem:
        return NoKernel(str(problem))


def _built(name: str) -> Path:
    """Where the library is: in the user's cache folder, under the digest of all that it depends on."""
    problem = NoKernel(f"no C++ compiler ({', '.join(COMPILERS)}) on this machine")
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        try:
            return _built_by(compiler, name)
        except NoKernel as found:
            problem = found
    raise problem


def _built_by(compiler: str, name: str) -> Path:
    source = HERE / f"{name}.cpp"
    words = " ".join((compiler, *FLAGS, *LINK))
    made_of = [source.read_bytes(), HEADER.read_bytes(), words.encode(), _processor().encode()]
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    folder = Path.home() / ".cache" / "rehead"
    place = folder / f"{name}-{digest}.so"
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    print(f"rehead: building {name}.cpp for this machine, once ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        parts, made = str(Path(scratch) / "made.o"), Path(scratch) / "made.so"
        for command in (
            [compiler, *FLAGS, "-c", str(source), "-o", parts],
            [compiler, *LINK, parts, "-o", str(made)],
        ):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                raise NoKernel(f"{compiler} took longer than {TIMEOUT_SECONDS} s") from None
            if done.returncode:
                raise NoKernel(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
        os.replace(made, place)  # whole or not at all, whoever else builds it
    return place


def _processor() -> str:
    """What `-march=native` means here."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
