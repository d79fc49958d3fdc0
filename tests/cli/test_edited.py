"""Folders whose files somebody edited: what is wrong is named with its place and a way out, and nothing changes."""

import json
from pathlib import Path

import pytest
import torch

from rehead.cli import main

FLAGS = [
    "data.path=input.txt",
    "data.block_size=8",
    "model.n_layer=1",
    "model.n_embd=12",
    "trainer.batch_size=2",
    "trainer.eval_batches=1",
    "trainer.device=cpu",
    "system.work_dir=run",
]
MORE = ["system.work_dir=run", "trainer.max_iters=3", "trainer.resume=True"]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """A run of two steps."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text("O God, O God! How weary, stale, flat and unprofitable\n" * 20)
    assert main(["train", *FLAGS, "trainer.max_iters=2"]) == 0
    capfd.readouterr()
    return Path("run")


def files(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "17",
        "oops",
        '{"loss": 2.5}',
        '{"step": "2"}',
        '{"step": 1.5}',
        '{"step": true}',
        "\udcff",
        "[" * 10**5,
        '{"step": 2, "seconds": "a while"}',
        "",
    ],
    ids=lambda line: line[:12].encode(errors="replace").decode(),
)
def test_a_line_of_metrics_that_is_no_record(run, line, capfd):
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    lines.insert(2, line.encode(errors="surrogateescape"))
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    before = files(run)
    assert main(["train", *MORE]) == 3
    error = capfd.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("rehead: run/metrics.jsonl: line 3 (")
    assert "is not a record of a run: each is a JSON object with a whole number as its step." in error
    assert error.endswith("Correct that line, or delete it.\n")
    assert files(run) == before
    del lines[2]
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert main(["train", *MORE]) == 0


@pytest.mark.filterwarnings("always")
def test_a_last_line_that_a_power_cut_left(run, capfd):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert main(["train", *MORE]) == 0
    said = "the last line of run/metrics.jsonl was cut while it was written, and is left out"
    assert capfd.readouterr().err.count(said) == 1
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 3
