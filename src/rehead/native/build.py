"""The C++ files of this folder, each built once per machine by a compiler with PyTorch's OpenMP (GCC), and loaded.

What is built, and why nothing is, the logger "rehead" says at level INFO: the command line shows that, a program that
uses the library may.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from rehead.native import switch
from rehead.system.folders import cache_folder
from rehead.system.machine import instruction_sets

HERE = Path(__file__).parent
HEADER = HERE / "vectors.h"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-fopenmp")
LINK = ("-shared",)
"""Apart from compiling: linking with -ffast-math would make the whole process flush small numbers to zero, and with
-fopenmp would bring a second OpenMP; PyTorch's own threads are used, so that no others wait for the same cores."""
TIMEOUT_SECONDS = 300


class NoKernel(Exception):
    """Why there is no kernel in C++ here, and what would help; nothing a user has to act on."""

    def __init__(self, why: str, way_out: str = "Install g++.") -> None:
        super().__init__(why)
        self.way_out = way_out


def library(name: str) -> ctypes.CDLL | NoKernel:
    """The loaded kernels of `name`.cpp, or why there are none. The first call on a machine takes some seconds."""
    return NoKernel("compiled code is switched off") if switch.mode() == "0" else _loaded(name)


@cache
def _loaded(name: str) -> ctypes.CDLL | NoKernel:
    try:
        return ctypes.CDLL(str(_built(name)))
    except NoKernel as problem:
        missing = problem
    except OSError as problem:
        missing = NoKernel(f"C++ cannot be built or loaded ({problem})", "Make ~/.cache/rehead writable.")
    _say(f"{missing}: PyTorch computes instead, slower. {missing.way_out}")
    return missing


@cache
def _say(message: str) -> None:
    """Each once a process."""
    logging.getLogger("rehead").info(message)


def _built(name: str) -> Path:
    """Where the library is: in the user's cache folder, under the digest of all that it depends on."""
    problem = NoKernel(f"no C++ compiler ({', '.join(COMPILERS)})")
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        try:
            return _built_by(compiler, name)
        except NoKernel as found:
            problem = found
    raise problem


def _built_by(compiler: str, name: str) -> Path:
    source = HERE / f"{name}.cpp"
    words = " ".join((compiler, *FLAGS, *LINK))
    made_of = [source.read_bytes(), HEADER.read_bytes(), words.encode(), instruction_sets().encode()]
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    folder = cache_folder()
    place = folder / f"{name}-{digest}.so"
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _say(f"building {name}.cpp for this machine, once ...")
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
