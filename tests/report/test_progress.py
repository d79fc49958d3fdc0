"""What long work says where stderr is no terminal."""

import io
import json
import re
import sys
import time
from functools import partial
from threading import Semaphore

import pytest
from rich.console import Console

from rehead.cli import main
from rehead.report import lines, progress, table
from rehead.stages import listening, staged

TEXT = "O God, O God! How weary, stale, flat and unprofitable\n"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when they are told to."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def talkative(monkeypatch):
    """Nothing is too short to be told of."""
    monkeypatch.setattr(lines, "SOON", 0.0)


def test_a_line_per_evaluation_says_how_long_the_rest_will_take(clock, capfd):
    with progress.Board() as board:
        for step, seconds in (
            (20, 0),
            (30, 10),
            (80, 50),
        ):  # resumed at 20; the first ten steps took a second each
            clock[0] += seconds
            board.show({"step": step, "train_loss": 2.0, "val_loss": 2.5}, 80, "train")
    assert capfd.readouterr().err.splitlines() == [
        "train  step 20/80  train loss 2.0000  val loss 2.5000",
        "train  step 30/80  train loss 2.0000  val loss 2.5000  0:00:50 left",
        "train  step 80/80  train loss 2.0000  val loss 2.5000",
    ]


NAMES = ("run[/bold]", "[red]x", "[link=file:///etc]y[/link]", "\\[z")


@pytest.mark.parametrize("name", NAMES)
def test_brackets_of_names_are_shown_as_they_are(name, monkeypatch, capsys):
    """Live, as on a terminal, and in tables; they mean markup to rich."""
    stream = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", partial(Console, file=stream, force_terminal=True, color_system=None, width=199)
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Board(f"converting {name}") as board, listening(board.stage):
        board.say(f"said {name}")
        board.show({"event": "save", "step": 1, "path": name}, 3, f"run {name}")
        for _ in staged(range(3), f"stage {name}", 3, "steps"):
            board._lines._live.refresh()
    shown = stream.getvalue()
    for where in ("converting", "said", "saved step 1 in", "run", "stage"):
        assert f"{where} {name}" in shown
    monkeypatch.setenv("COLUMNS", "200")
    table.show(f"title {name}", ["variant", f"head {name}"], [[f"cell {name}", f"of {name}"]], f"note {name}")
    printed = capsys.readouterr().out
    for where in ("title", "head", "cell", "of", "note"):
        assert f"{where} {name}" in printed


def run(folder, capfd):
    """A tiny run, with its text beside it."""
    (folder / "text.txt").write_text(TEXT * 30)
    flags = ["model.n_layer=2", "model.n_embd=12", "trainer.batch_size=2", "trainer.eval_batches=1"]
    where = ["data.path=text.txt", "data.block_size=16", "system.work_dir=run", "trainer.max_iters=2"]
    assert main(["train", *where, *flags]) == 0
    capfd.readouterr()


def test_a_conversion_names_its_stages(tmp_path, monkeypatch, capfd, talkative):
    """As typed, into a log: each stage as it begins, and how much it is; stdout is JSON alone."""
    monkeypatch.chdir(tmp_path)
    run(tmp_path, capfd)
    words = ["--to", "mla", "--allow-loss", "--calibration", "text.txt", "--json"]
    assert main(["convert", "run", "new", *words, "--kv-fraction", "0.25", "--calibration", "self"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["layers"]
    said = printed.err.splitlines()
    assert said[0] == "converting run"
    whole = re.compile(
        r"(tokenizing a text|[a-z ]+  [1-9][\d,]* (tokens|tensors|batches|layers|conversions))"
    )
    assert all(whole.fullmatch(line) for line in said[1:]), said
    stages = [line.split("  ")[0] for line in said[1:]]
    assert stages == [
        "reading the weights",
        "looking over the weights",
        "tokenizing a text",
        "sampling a text from the model",
        "looking over the weights",
        "reading what to fit to",
        "converting",
        "comparing with the source",
    ]
    assert main(["convert", "run", "other", *words, "--max-loss", "0.1"]) == 0
    said = capfd.readouterr().err
    assert re.search(
        r"^measuring each layer at each rank  \d+ conversions\nsearching for the smallest cache  7 sizes$",
        said,
        re.MULTILINE,
    )


def test_an_evaluation_and_texts_name_what_they_do(tmp_path, monkeypatch, capfd, talkative):
    monkeypatch.chdir(tmp_path)
    run(tmp_path, capfd)
    for words, stages in (
        (
            ["eval", "run", "--data", "text.txt"],
            ["tokenizing a text", f"eval  {30 * len(TEXT) - 1:,} tokens"],
        ),
        (["generate", "run", "--prompt", "O", "--max-new-tokens", "3"], ["generate  3 tokens"]),
        (
            ["bench", "run", "--rounds", "1", "--prompt-lengths", "4"],
            ["timing prompts of 4 tokens, batch 1  1 rounds"],
        ),
    ):
        assert main([*words, "--json"]) == 0
        printed = capfd.readouterr()
        json.loads(printed.out)
        assert [line for line in printed.err.splitlines() if "warning" not in line][-len(stages) :] == stages


def test_a_silence_is_broken(monkeypatch, capfd, clock):
    """Even within one item of a stage, whose time left counts down: 60 seconds each."""
    for name, seconds in (("TICK", 0.001), ("SOON", 2.0), ("EVERY", 30.0)):
        monkeypatch.setattr(lines, name, seconds)
    turns, print_due = Semaphore(0), lines.PlainLines._print_due
    monkeypatch.setattr(lines.PlainLines, "_print_due", lambda self: (print_due(self), turns.release()))
    with progress.Board("converting x"):
        for _ in staged(range(4), "reading", 4096, "tokens", lambda _: 1024):
            for _ in range(4):
                clock[0] += 15
                while turns.acquire(blocking=False):
                    pass
                assert all(turns.acquire(timeout=60) for _ in range(2))  # the first may have begun before
    assert capfd.readouterr().err.splitlines() == [
        "converting x",
        "reading  4,096 tokens",
        "reading  4,096 tokens",
        "reading  1,024/4,096 tokens  0:02:45 left",
        "reading  1,024/4,096 tokens  0:02:15 left",
        "reading  2,048/4,096 tokens  0:01:45 left",
        "reading  2,048/4,096 tokens  0:01:15 left",
        "reading  3,072/4,096 tokens  0:00:45 left",
        "reading  3,072/4,096 tokens  0:00:15 left",
    ]


def test_short_work_says_nothing(capfd):
    with progress.Board("converting x"):
        for _ in staged(range(4), "reading", 4, "tokens"):
            pass
    assert capfd.readouterr().err == ""


def test_a_stage_within_a_stage_is_a_part_of_it():
    told = []
    with listening(told.append):
        for _ in staged(range(2), "outer", 2, "rounds"):
            assert list(staged("ab", "inner", 2, "letters")) == ["a", "b"]
    assert [(stage.title, stage.done, stage.state) for stage in told] == [
        ("outer", 0, "begun"),
        ("outer", 1, "going"),
        ("outer", 2, "going"),
        ("outer", 2, "ended"),
    ]
