"""Builds each C++ file of this folder once per machine, with a compiler that uses PyTorch's OpenMP (GCC), and loads it.

Builds and failures are logged to "rehead" at level INFO. The command line shows this log; a program that uses the
library may.
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
"""Flags of the separate link step. Linking with -ffast-math would flush subnormal numbers to zero in the whole process.
Linking with -fopenmp would load a second OpenMP, whose threads would compete with PyTorch's for the cores."""
TIMEOUT_SECONDS = 300


class KernelUnavailable(Exception):
    """The reason why a kernel in C++ is not available, and a remedy. PyTorch then computes instead."""

    def __init__(self, reason: str, remedy: str = "Install g++.") -> None:
        super().__init__(reason)
        self.remedy = remedy


def library(name: str) -> ctypes.CDLL | KernelUnavailable:
    """Return the library of `name`.cpp, or the reason why it is not available.

    The first call on a machine compiles it, which takes some seconds.
    """
    return KernelUnavailable("compiled code is switched off") if switch.mode() == "0" else _loaded(name)


@cache
def _loaded(name: str) -> ctypes.CDLL | KernelUnavailable:
    try:
        return ctypes.CDLL(str(_built(name)))
    except KernelUnavailable as problem:
        missing = problem
    except OSError as problem:
        missing = KernelUnavailable(
            f"C++ cannot be built or loaded ({problem})", "Make ~/.cache/rehead writable."
        )
    _log_once(f"{missing}: PyTorch computes instead, slower. {missing.remedy}")
    return missing


@cache
def _log_once(message: str) -> None:
    """Log each message once per process."""
    logging.getLogger("rehead").info(message)


def _built(name: str) -> Path:
    """Return the path of the library in the user's cache folder, built by the first compiler that succeeds."""
    failure = KernelUnavailable(f"no C++ compiler ({', '.join(COMPILERS)})")
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        try:
            return _built_by(compiler, name)
        except KernelUnavailable as problem:
            failure = problem
    raise failure


def _built_by(compiler: str, name: str) -> Path:
    source = HERE / f"{name}.cpp"
    command_line = " ".join((compiler, *FLAGS, *LINK))
    inputs = [source.read_bytes(), HEADER.read_bytes(), command_line.encode(), instruction_sets().encode()]
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    folder = cache_folder()
    path = folder / f"{name}-{digest}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _log_once(f"building {name}.cpp for this machine, once ...")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = str(Path(scratch) / "made.o"), Path(scratch) / "made.so"
        for command in (
            [compiler, *FLAGS, "-c", str(source), "-o", compiled],
            [compiler, *LINK, compiled, "-o", str(linked)],
        ):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                raise KernelUnavailable(f"{compiler} took longer than {TIMEOUT_SECONDS} s") from None
            if done.returncode:
                raise KernelUnavailable(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
        os.replace(linked, path)  # atomic, also if another process builds it at the same time
    return path
