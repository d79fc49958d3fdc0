"""Programs in processes forked from one that has imported PyTorch already: saves a second or two of each."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.tensor",
        "rehead.cli.entry",
        "rehead.conversion.variants",
        "rehead.training",
        "rehead.report.progress",
    ]
)


SCRIPT = "import sys; from rehead.cli import main; sys.exit(main())"
"""What pip installs as `rehead`."""


def python(code, *words, cwd=None, env=None, timeout=None):
    """What `subprocess.run` of `python -c` gives, with output captured as text; on one thread, as in tests.

    Environment variables that PyTorch reads when it is imported are those of the tests.
    """
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        given = (code, words, cwd, dict(os.environ if env is None else env), str(out), str(err))
        child = CONTEXT.Process(target=_run, args=given)
        child.start()
        try:
            child.join(timeout)
            if child.is_alive():
                raise subprocess.TimeoutExpired(words, timeout)
        finally:  # also when the test is out of time
            child.kill()
            child.join()
        return subprocess.CompletedProcess(words, child.exitcode, out.read_text(), err.read_text())


def _run(code, words, cwd, environment, out, err):
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv[:] = ["rehead", *words]
    exec(code, {"__name__": "__main__"})
