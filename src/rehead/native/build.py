"""Builds each C++ file of this folder once per machine, with a compiler that uses PyTorch's OpenMP (GCC), and loads it.

Builds and failures are logged to "rehead" at level INFO. The command line shows this log; a program that uses the
library may.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from rehead.errors import ResourceError
from rehead.native import switch
from rehead.system.aside import aside
from rehead.system.folders import cache_folder, require_own, require_private
from rehead.system.machine import instruction_sets

HERE = Path(__file__).parent
HEADER = HERE / "vectors.h"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-fopenmp")
LINK = ("-shared",)
"""Flags of the separate link step. Linking with -ffast-math would flush subnormal numbers to zero in the whole process.
Linking with -fopenmp would load a second OpenMP, whose threads would compete with PyTorch's for the cores."""
TIMEOUT_SECONDS = 180
"""Time after which the build of a file is given up, over all compilers tried."""


class KernelUnavailable(Exception):
    """The reason why a kernel in C++ is not available, and a remedy. PyTorch then computes instead."""

    def __init__(self, reason: str, remedy: str = "Install g++.") -> None:
        super().__init__(reason)
        self.remedy = remedy


def out_of_memory(work: str) -> ResourceError:
    """Return the error of a kernel whose threads had no memory for their buffers."""
    return ResourceError(f"no memory for the buffers of {work} in C++: use fewer threads or shorter texts.")


def library(name: str) -> ctypes.CDLL | KernelUnavailable:
    """Return the library of `name`.cpp, or the reason why it is not available.

    The first call on a machine compiles it, which takes some seconds.
    """
    return KernelUnavailable("compiled code is switched off") if switch.mode() == "0" else _loaded(name)


@cache
def _loaded(name: str) -> ctypes.CDLL | KernelUnavailable:
    try:
        loaded = ctypes.CDLL(str(_built(name)))
        _one_thread_after_a_fork()
        return loaded
    except KernelUnavailable as problem:
        missing = problem
    except OSError as problem:
        missing = KernelUnavailable(
            f"C++ cannot be built or loaded ({problem})",
            f"Make {cache_folder()} your own and writable, or set XDG_CACHE_HOME.",
        )
    _log_once(f"{missing}: PyTorch computes instead, slower. {missing.remedy}")
    return missing


@cache
def _one_thread_after_a_fork() -> None:
    """Let forked processes use one thread: OpenMP would wait for its other threads, which do not exist there."""
    import torch

    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


@cache
def _log_once(message: str) -> None:
    """Log each message once per process."""
    logging.getLogger("rehead").info(message)


def _built(name: str) -> Path:
    """Return the path of the library in the user's cache folder, built by the first compiler that succeeds."""
    failure = KernelUnavailable(f"no C++ compiler ({', '.join(COMPILERS)})")
    end = time.monotonic() + TIMEOUT_SECONDS
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        try:
            path = _built_by(compiler, name, end)
            _require_loads(path, compiler)
            return path
        except KernelUnavailable as problem:
            failure = problem
    raise failure


def _require_loads(path: Path, compiler: str) -> None:
    """Delete and refuse a library that cannot be loaded, so that it is not taken for a good one next time."""
    try:
        ctypes.CDLL(str(path))
    except OSError as problem:
        reason = f"{compiler} made a library that cannot be loaded ({problem})"
        if "failed to map" in str(problem):  # from a disk on which nothing may be executed
            raise OSError(reason) from None
        path.unlink(missing_ok=True)
        raise KernelUnavailable(reason) from None


def _built_by(compiler: str, name: str, end: float) -> Path:
    """Return the path of the library, built by `compiler` before the time `end`, or in an earlier process.

    The file name has two hashes: one of the inputs of the build, the processor included, and one of the file's bytes,
    so that a damaged file is noticed and built again.
    """
    source = HERE / f"{name}.cpp"
    command_line = " ".join((compiler, *FLAGS, *LINK))
    inputs = [source.read_bytes(), HEADER.read_bytes(), command_line.encode(), instruction_sets().encode()]
    made_of = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    folder = cache_folder() / "native"
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    require_own(folder.parent.resolve())  # its owner could put another in the place of `folder`
    require_private(folder)
    for path in folder.glob(f"{name}-{made_of}-*.so"):
        require_private(path)
        if path.name == _named(name, made_of, path):
            return path
        path.unlink()
    _log_once(f"building {name}.cpp for this machine, once ...")
    with aside(folder, name) as scratch:
        compiled, linked = scratch / "made.o", scratch / "made.so"
        _call(end, compiler, *FLAGS, "-c", str(source), "-o", str(compiled))
        _call(end, compiler, *LINK, str(compiled), "-o", str(linked))
        linked.chmod(0o700)
        with linked.open("rb") as file:
            os.fsync(file.fileno())
        path = folder / _named(name, made_of, linked)
        os.replace(linked, path)  # atomic, also if another process builds it at the same time
    return path


def _named(name: str, made_of: str, library: Path) -> str:
    """Return the file name of a library with these bytes."""
    return f"{name}-{made_of}-{hashlib.sha256(library.read_bytes()).hexdigest()}.so"


def _call(end: float, *command: str) -> None:
    """Run a compiler. It and the processes it starts are killed at `end`, or if this process is interrupted."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=max(0, end - time.monotonic()))
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise KernelUnavailable(f"{command[0]} took longer than {TIMEOUT_SECONDS} s") from None
            raise
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise KernelUnavailable(f"{command[0]} failed: {last}")
