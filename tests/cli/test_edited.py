"""Folders whose files somebody edited: what is wrong is named with its place and a way out, and nothing changes."""

import json
import shutil
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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two steps, and its model in a folder of its own."""
    place = tmp_path_factory.mktemp("edited")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("input.txt").write_text("O God, O God! How weary, stale, flat and unprofitable\n" * 20)
        assert main(["train", *FLAGS, "trainer.max_iters=2"]) == 0
        assert main(["convert", "run", "model", "--to", "mqa", "--allow-loss"]) == 0
    return place


@pytest.fixture
def run(made, tmp_path, monkeypatch, capfd):
    torch.set_default_dtype(torch.float32)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    return Path("run")


def files(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


NO_RECORDS = [
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
]


def test_a_line_of_metrics_that_is_no_record(run, capfd):
    """The way out, without that line, leads out."""
    whole = (run / "metrics.jsonl").read_bytes()
    for line in NO_RECORDS:
        lines = whole.splitlines()
        lines.insert(2, line.encode(errors="surrogateescape"))
        (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        before = files(run)
        assert main(["train", *MORE]) == 3, line
        error = capfd.readouterr().err
        assert len(error.splitlines()) == 1
        assert error.startswith("rehead: run/metrics.jsonl: line 3 (")
        assert "is not a record of a run: each is a JSON object with a whole number as its step." in error
        assert error.endswith("Correct the line, or delete it.\n")
        assert files(run) == before
    (run / "metrics.jsonl").write_bytes(whole)
    assert main(["train", *MORE]) == 0


@pytest.mark.filterwarnings("always")
def test_a_last_line_that_a_power_cut_left(run, capfd):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert main(["train", *MORE]) == 0
    said = "the last line of run/metrics.jsonl is incomplete and is ignored"
    assert capfd.readouterr().err.count(said) == 1
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 3


@pytest.fixture
def model(run):
    return Path("model")


AGAIN = "Copy the folder again from an intact copy, or create it again.\n"
COPY = "Put a whole copy of it there.\n"


@pytest.mark.parametrize(
    ("file", "text", "status", "said", "way"),
    [
        (
            "MANIFEST.json",
            "{",
            4,
            "model/MANIFEST.json is missing or unreadable: the folder is incomplete. ",
            AGAIN,
        ),
        ("MANIFEST.json", '{"format": 1}', 4, "model/MANIFEST.json is missing or unreadable: ", AGAIN),
        (
            "MANIFEST.json",
            '{"format": 2, "files": {}}',
            4,
            "model/MANIFEST.json has format=2, ",
            "knows 1: upgrade rehead.\n",
        ),
        (
            "config.json",
            "{",
            4,
            "model/config.json is damaged: its bytes are not those that MANIFEST.json ",
            AGAIN,
        ),
        ("tokenizer.json", None, 4, "model/tokenizer.json is missing: MANIFEST.json lists it. ", AGAIN),
        (None, "{", 3, "model/config.json is not JSON: ", COPY),
        (None, "[]", 3, "model/config.json does not say format='rehead-1': expected a table. ", COPY),
        (
            None,
            "{}",
            3,
            "model/config.json does not say format='rehead-1': ",
            "copy of it there, or give another folder.\n",
        ),
        (
            None,
            '{"format": "rehead-9"}',
            3,
            "model/config.json has format='rehead-9', ",
            "or use the version that wrote it.\n",
        ),
    ],
)
def test_a_damaged_model_folder(model, file, text, status, said, way, capfd):
    """Without a file, that of config.json in a folder without a manifest."""
    if file is None:
        (model / "MANIFEST.json").unlink()
    place = model / (file or "config.json")
    if text is None:
        place.unlink()
    else:
        place.write_text(text)
    capfd.readouterr()
    assert main(["generate", "model", "--prompt", "O"]) == status
    error = capfd.readouterr().err
    assert error.startswith(f"rehead: {said}")
    assert error.endswith(way)
    assert len(error.splitlines()) == 1


def test_a_state_that_cannot_go_on(run, capfd):
    """Its way out leads out."""
    assert main(["train", *MORE, "trainer.keep=2"]) == 0
    newest = run / "checkpoints" / "step-000003"
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    del manifest["files"]["state.json"]
    (newest / "state.json").unlink()
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    capfd.readouterr()
    again = ["system.work_dir=run", "trainer.max_iters=4", "trainer.resume=True"]
    assert main(["train", *again]) == 4
    assert "Remove its folder, and the run resumes from the checkpoint before it." in capfd.readouterr().err
    shutil.rmtree(newest)
    assert main(["train", *again]) == 0


def test_a_flag_without_effect_is_refused_in_a_resumed_run_too(run, capfd):
    assert main(["train", *MORE, "trainer.min_learning_rate=1e-4"]) == 2
    assert (
        "trainer.min_learning_rate=0.0001 has no effect with trainer.schedule=constant"
        in capfd.readouterr().err
    )
