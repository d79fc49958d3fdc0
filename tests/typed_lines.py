"""Command lines as a user types them, several in one process: none of the shape checks or float64 of tests."""

import json
import os
import shlex
import subprocess
import sys

import forked

PROGRAM = """
import contextlib, io, json, sys
from rehead.cli import main
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def typed(*lines, cwd=None, before=(), **env):
    """Exit status, stdout and stderr of each line, a list of words or a text; `before` it another program."""
    words = [shlex.split(line) if isinstance(line, str) else [*map(str, line)] for line in lines]
    given, there = json.dumps(words), {"cwd": cwd, "env": os.environ | env}
    if before:
        program = [*before, sys.executable, "-c", PROGRAM, given]
        done = subprocess.run(program, **there, capture_output=True, text=True, check=False)
    else:
        done = forked.python(PROGRAM, given, **there)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def documents(*lines, **more):
    """What each line, a text, prints with --json; none may fail."""
    results = typed(*(f"{line} --json" for line in lines), **more)
    assert not any(code for code, _, _ in results), results
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]
