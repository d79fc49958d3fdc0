"""An engine's own environment: made once per machine, in the user's cache folder.

`python tests/serving/environment.py` makes vLLM's where it is missing and prints its Python, `... llama-cpp` that of
llama.cpp, `... mlx` that of mlx-lm. Only the standard library is needed. A change of the requirements or of Python
makes another one beside it.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = {
    engine: Path(__file__).with_name(f"requirements-{engine}.txt") for engine in ("vllm", "llama-cpp", "mlx")
}
SIZES = {"vllm": "2 to 6 GB", "llama-cpp": "0.2 GB", "mlx": "0.3 GB"}
TRIED = {
    "vllm": "import torch, vllm.version",
    "llama-cpp": "import xllamacpp",
    "mlx": "import mlx_lm.convert, mlx_lm.generate",
}
"""What shows that an environment is whole."""


def place(engine: str = "vllm") -> Path:
    """The environment's folder, named after everything that decides what is in it."""
    decides = (REQUIREMENTS[engine].read_text(), *platform.python_version_tuple()[:2], platform.machine())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rehead" / f"serving-{hashlib.sha256(repr(decides).encode()).hexdigest()[:12]}"


def make(engine: str = "vllm") -> Path:
    """The environment's Python. One that was not finished is never used: it is made anew."""
    folder = place(engine)
    python, finished = folder / "bin" / "python", folder / "finished"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (finished.exists() and python.exists()):
            print(f"making {folder} ({engine}, {SIZES[engine]})", file=sys.stderr, flush=True)
            venv.create(folder, clear=True, with_pip=True)
            if engine == "vllm":
                install(
                    python, "--constraint", str(REQUIREMENTS[engine]), "torch"
                )  # brings what its wheel asks for
            install(python, "--no-deps", "--requirement", str(REQUIREMENTS[engine]))
            subprocess.run([str(python), "-c", TRIED[engine]], check=True)
            finished.touch()
    return python


def install(python: Path, *what: str) -> None:
    """With pip, from wherever this machine's pip is set to look."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, *what], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    try:
        print(make(*sys.argv[1:2]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"no environment for the engine: {shlex.join(error.cmd)} failed, see above.")
