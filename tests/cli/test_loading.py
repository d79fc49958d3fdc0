"""The seconds in which PyTorch is imported, on a terminal and in a pipe."""

import json
import os
import pty
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from rehead.cli import main

pytestmark = pytest.mark.process
WORDS = [sys.executable, "-m", "rehead"]
END = "\x1e"
EACH = """
import json, sys
from rehead.cli import main
for line in json.loads(sys.argv[1]):
    status = main(line)
    for stream in (sys.stdout, sys.stderr):
        print(end=f"\\x1e{status}\\x1e", file=stream, flush=True)
"""


def on_a_terminal(*lines, stream="stderr"):
    """Of each line exit status, what a terminal showed of stderr, or stdout, and the other one; in one process."""
    here, there = pty.openpty()
    with tempfile.TemporaryFile() as file:
        streams = {"stdout": file, "stderr": file, stream: there}
        command = [sys.executable, "-c", EACH, json.dumps(lines)]
        with subprocess.Popen(command, env=os.environ | {"TERM": "xterm"}, **streams) as process:
            os.close(there)
            shown = b""
            with suppress(OSError):  # Linux: nobody writes any more
                while part := os.read(here, 4096):
                    shown += part
        os.close(here)
        file.seek(0)
        texts, others = (whole.decode(errors="replace").split(END) for whole in (shown, file.read()))
    assert process.returncode == 0, (texts, others)
    return list(zip(map(int, texts[1::2]), texts[:-1:2], others[:-1:2], strict=True))


def test_a_terminal_says_what_it_waits_for(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {n_layer: 2}\n")
    [(status, shown, printed)] = on_a_terminal(["plan", str(tmp_path / "config.yaml"), "--json"])
    assert status == 0
    assert "loading PyTorch" in shown
    assert json.loads(printed)["rows"]


def test_what_needs_no_pytorch_does_not_wait():
    for _, shown, _ in on_a_terminal(["--help"], ["plan", "--help"], ["plan", "--nosuch"], ["nosuch"]):
        assert "loading" not in shown


def test_a_pipe_is_told_nothing(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {n_layer: 2}\n")
    done = subprocess.run([*WORDS, "plan", tmp_path / "config.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


ESCAPES = "\x1b]0;mine\x07\x1b[2J\u202e\x9b31m"


def test_nothing_that_a_file_or_a_prompt_says_commands_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(f"an emoji 👩‍👧 and é\n{ESCAPES}" * 200)
    small = ["model.n_layer=1", "model.n_embd=8", "model.n_query_head=2", "data.block_size=64"]
    run = ["data.path=input.txt", "trainer.max_iters=0", "trainer.eval_batches=1", "trainer.device=cpu"]
    assert main(["train", *small, *run, "system.work_dir=run"]) == 0
    words = ["generate", "run", "--prompt", f"an 👩‍👧{ESCAPES}", "--max-new-tokens", "90"]
    (status, shown, _), (_, other, _) = on_a_terminal(words, [*words, "--prompt", "a"], stream="stdout")
    assert status == 0
    assert shown.startswith(r"an 👩‍👧\u001b]0;mine\u0007\u001b[2J\u202e\u009b31m")
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown + other)
    piped = subprocess.run([*WORDS, *words], stdout=subprocess.PIPE, check=True).stdout.decode()
    assert piped.startswith(f"an 👩‍👧{ESCAPES}"), "elsewhere the text is as it is"
    for status, shown, _ in on_a_terminal(
        ["inspect", f"no{ESCAPES}such", "--text", "a"], ["plan", f"no{ESCAPES}"], ["train", f"a{ESCAPES}=3"]
    ):
        assert status in (2, 3)
        assert "1b]0;mine" in shown, shown
        for part in ("\x1b]", "\x07", "\x1b[2J", "\u202e", "\x9b"):
            assert part not in shown


def test_a_name_in_brackets_is_a_name(tmp_path, monkeypatch):
    """The library that draws tables and progress reads [red] as a colour, and stops at [/bold]."""
    monkeypatch.chdir(tmp_path)
    Path("text [b].txt").write_text("to be or not to be\n" * 200)
    name, small = "a[red]b[/bold]", ["model.n_layer=1", "model.n_embd=8", "model.n_query_head=2"]
    run = ["data.path=text [b].txt", "data.block_size=8", "trainer.max_iters=1", "trainer.eval_batches=1"]
    lines = [
        ["train", *small, *run, "trainer.device=cpu", f"system.work_dir={name}"],
        ["plan", name],
        ["eval", name, "--data", "text [b].txt"],
        ["inspect", name, "--text", "to be"],
        ["bench", name, "--prompt-lengths", "4", "--rounds", "1"],
        ["convert", name, f"{name}-mqa", "--to", "mqa", "--allow-loss"],
        ["export", name, f"{name}-out"],
    ]
    results = on_a_terminal(*lines)
    assert results[0][0] == 0, results[0]
    assert f"{name}/checkpoints/step-000001" in results[0][1]
    for words, (status, shown, printed) in zip(lines, results, strict=True):
        assert status == 0, (words, shown, printed)
        assert "a bug" not in shown
        if words[0] in ("eval", "bench", "convert"):
            assert name in "".join((shown + printed).split("\n")), (words, shown, printed)
