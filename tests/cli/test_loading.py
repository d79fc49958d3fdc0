"""The seconds in which PyTorch is imported, on a terminal and in a pipe."""

import json
import os
import pty
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process
WORDS = [sys.executable, "-m", "rehead"]


def on_a_terminal(*words):
    """Exit status and what a terminal showed on stderr."""
    here, there = pty.openpty()
    done = subprocess.run(
        [*WORDS, *words], stderr=there, stdout=subprocess.PIPE, env=os.environ | {"TERM": "xterm"}
    )
    os.close(there)
    shown = b""
    try:
        while part := os.read(here, 4096):
            shown += part
    except OSError:  # Linux: nobody writes any more
        pass
    os.close(here)
    return done.returncode, shown.decode(errors="replace"), done.stdout


def test_a_terminal_says_what_it_waits_for(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {n_layer: 2}\n")
    status, shown, printed = on_a_terminal("plan", str(tmp_path / "config.yaml"), "--json")
    assert status == 0
    assert "loading PyTorch" in shown
    assert json.loads(printed)["rows"]


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["plan", "--nosuch"], ["nosuch"]])
def test_what_needs_no_pytorch_does_not_wait(words):
    assert "loading" not in on_a_terminal(*words)[1]


def test_a_pipe_is_told_nothing(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {n_layer: 2}\n")
    done = subprocess.run([*WORDS, "plan", tmp_path / "config.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
