"""Folders that go away, fill up, or have strange times, under commands as typed."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from rehead.checkpoint import resolve
from rehead.cli import main
from rehead.config.flags import read
from rehead.errors import ResourceError
from rehead.training import folder as folders
from rehead.training import train
from rehead.training.folder import RunFolder
from test_phases import TINY, wait_for

RUN = [
    *TINY[:-4],
    "trainer.sample_every=0",
    "trainer.device=cpu",
    "trainer.eval_every=10",
    "trainer.save_every=20",
]

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text("Whether 'tis nobler in the mind to suffer\n" * 50)


def saved(run="run"):
    return sorted(Path(run, "checkpoints").glob("step-*"))


@pytest.fixture
def training(start):
    """A training in `run` that has saved twice, and has a long way to go."""
    process = start("train", *RUN, "trainer.max_iters=1000000", "system.work_dir=run")
    wait_for(lambda: len(saved()) == 2, process)
    return process


def moved():
    Path("run").rename("elsewhere")


def deleted():
    moved()  # at once: it may be saving now
    shutil.rmtree("elsewhere", ignore_errors=True)


def replaced():
    moved()
    Path("run").mkdir()


def by_a_file():
    moved()
    Path("run").write_text("mine")


def taken():
    """By a second training, once the lock file was removed by hand."""
    Path("run/.lock").unlink()
    Path("run/.lock").write_text("another")


GONE = {
    "deleted": deleted,
    "moved": moved,
    "replaced": replaced,
    "a file": by_a_file,
    "taken": taken,
}


SAID = (
    "run was deleted, moved or replaced while this run trained. If it was moved, move it back and continue with "
    "trainer.resume=True; otherwise start again."
)


def train_while(happens):
    """Train 80 steps here; something `happens` after step 25, once the first checkpoint is there."""
    for record in train(read([*RUN, "trainer.max_iters=80", "system.work_dir=run"])):
        if record["step"] == 25:
            while not saved():
                time.sleep(0.01)
            happens()


def standing():
    """What is in `run`, if it is a folder, or whether it is a file."""
    return Path("run").exists() and (Path("run").is_file() or sorted(os.listdir("run")))


@pytest.mark.parametrize("how", GONE)
def test_a_run_whose_folder_goes_away_ends_at_its_next_line(how):
    """And leaves alone what stands there instead."""
    stands = []
    with pytest.raises(ResourceError) as ended:
        train_while(lambda: (GONE[how](), stands.append(standing())))
    assert str(ended.value) == SAID
    assert stands == [standing()]


def test_a_run_that_goes_away_as_it_writes_says_so():
    """Between the look at it and the write."""
    folder = RunFolder(Path("away"))
    with folder.open(resume=False):
        held, answers = folder._held, iter([True, False])
        Path("away").rename("elsewhere")
        folder._held = type("Held", (), {"is_valid": property(lambda _: next(answers))})()
        with pytest.raises(ResourceError, match=r"away was deleted, moved or replaced"):
            folder.log({"step": 1})
        folder._held = held
        Path("elsewhere").rename("away")


def test_a_run_moved_as_it_saves_is_not_made_anew(monkeypatch):
    """Between the look at it and the creation of folders; it could not be moved back."""
    real = folders.publish

    def move_first(*given, **more):
        Path("away").rename("elsewhere")
        return real(*given, **more)

    monkeypatch.setattr(folders, "publish", move_first)
    folder = RunFolder(Path("away"))
    with folder.open(resume=False):
        with pytest.raises(ResourceError, match=r"away was deleted, moved or replaced"):
            folder.save(1, lambda aside: (aside / "file").write_text("text"), 1)
        assert not Path("away").exists()
        Path("elsewhere").rename("away")


def test_a_run_that_was_moved_and_moved_back_goes_on(training, capfd):
    moved()
    assert training.wait(60) == 5, training.said.read_text()
    said = training.said.read_text()
    assert said.splitlines()[-1] == f"rehead: {SAID}"
    assert "Traceback" not in said
    Path("elsewhere").rename("run")
    last = int(saved()[-1].name[5:])
    resumed = ["train", *RUN, "system.work_dir=run", "trainer.resume=True", f"trainer.max_iters={last + 10}"]
    assert main(resumed) == 0
    steps = {json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()}
    assert steps == set(range(last + 11))


@pytest.mark.parametrize("part", [".lock", "checkpoints", "metrics.jsonl"])
def test_a_part_of_a_run_that_goes_away_ends_nothing(part):
    place = Path("run", part)
    train_while(lambda: shutil.rmtree(place) if place.is_dir() else place.unlink())
    assert [folder.name for folder in saved()] == ["step-000060", "step-000080"]
    assert resolve(Path("run")) == saved()[-1]


def small_disk():
    """A program that runs another on a disk of 1 MiB, in `run`, without rights; or None where that is not allowed."""
    script = 'mount -t tmpfs -o size=1m none run && "$@"; status=$?; cp -r run/. kept; exit $status'
    program = ["unshare", "-Urm", "sh", "-c", script, "sh"]
    with_mount = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "run"]
    Path("run").mkdir()
    allowed = (
        shutil.which("unshare")
        and not subprocess.run(with_mount, check=False, capture_output=True).returncode
    )
    return program if allowed else None


def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(start):
    program = small_disk()
    if program is None:
        pytest.skip("no disk can be mounted here")
    endless = ["trainer.keep=1000", "trainer.max_iters=1000000", "system.work_dir=run"]
    process = start("train", *RUN, *endless, before=program)
    assert process.wait(120) == 5, process.said.read_text()
    last = process.said.read_text().splitlines()[-1]
    assert last.startswith("rehead: ")
    assert "No space left on device" in last
    assert "trainer.resume=True" in last
    steps = [place.name for place in saved("kept")]
    assert steps == [f"step-{20 * n:06}" for n in range(1, len(steps) + 1)]
    assert resolve(Path("kept")) == Path("kept/checkpoints", steps[-1])
    resumed = [
        *RUN,
        "system.work_dir=kept",
        "trainer.resume=True",
        f"trainer.max_iters={20 * len(steps) + 20}",
    ]
    process = start("train", *resumed)  # which warns where the disk has cut a line of the metrics
    assert process.wait(120) == 0, process.said.read_text()
    assert resolve(Path("kept")).name == f"step-{20 * len(steps) + 20:06}"


def test_times_of_files_decide_nothing(capfd):
    """The newest checkpoint is the one of the last step, whatever a clock said."""
    words = ["train", *RUN, "system.work_dir=run"]
    assert main([*words, "trainer.max_iters=40"]) == 0
    first, last = saved()
    os.utime(first, (4e9, 4e9))
    os.utime(first / "MANIFEST.json", (4e9, 4e9))
    os.utime(last, (0, 0))
    os.utime(last / "MANIFEST.json", (0, 0))
    assert resolve(Path("run")) == last
    assert main([*words, "trainer.max_iters=60", "trainer.resume=True"]) == 0
    assert [place.name for place in saved()] == ["step-000040", "step-000060"]
