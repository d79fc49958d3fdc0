"""What a power cut, a flipped bit, a reader beside a writer and a second start do to checkpoints."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from numbered import filled, save_step

import rehead
from rehead.errors import IntegrityError
from rehead.system.aside import ASIDE

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*step-:UserWarning")


def content(place):
    """The number that every weight of a model has, as one call of `load` reads it."""
    weights = [weight.detach() for weight in rehead.load(place).parameters()]
    numbers = {float(number) for weight in weights for number in (weight.min(), weight.max())}
    assert len(numbers) == 1, "weights of two steps"
    return numbers.pop()


class Trace:
    """What a save has asked of the disk, in order: the files beside the final name, and what is flushed for certain."""

    def __init__(self, monkeypatch, checkpoints):
        self.states, self.checkpoints = [], checkpoints
        self.files, self.flushed, self.entries, self.renamed, self.published = {}, set(), set(), False, False
        fsync, rename = os.fsync, Path.rename

        def flushes(handle):
            fsync(handle)
            place = Path(os.readlink(f"/proc/self/fd/{handle}"))
            self.note(lambda: self.flush(place))

        def renames(one, other):
            self.note(lambda: None)
            result = rename(one, other)
            if other.parent == checkpoints:
                self.renamed = True
                self.note(lambda: None)
            return result

        monkeypatch.setattr(os, "fsync", flushes)
        monkeypatch.setattr(Path, "rename", renames)

    def flush(self, place):
        if place.name.startswith(ASIDE):
            self.entries |= {file.name for file in place.iterdir()}
        elif place == self.checkpoints:
            self.published = self.renamed
        else:
            self.flushed.add(place.name)

    def note(self, flush):
        """Remember the state before and after a flush."""
        for folder in self.checkpoints.glob(f"{ASIDE}*"):
            self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        for change in (lambda: None, flush):
            change()
            known = dict(self.files), set(self.flushed), set(self.entries), self.renamed, self.published
            self.states.append(known)


LOST = {
    "kept": lambda data: data,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
}
"""What the disk has of a file that was not flushed."""


def test_a_power_cut_at_any_moment_leaves_what_was_saved(tmp_path, monkeypatch):
    """Every state of the disk that may follow, with flushes that are not done and a rename that is not kept."""
    run = tmp_path / "run"
    save_step(run, 1)
    with monkeypatch.context() as patch:
        trace = Trace(patch, run / "checkpoints")
        save_step(run, 2)
    first = shutil.copytree(run / "checkpoints" / "step-000001", tmp_path / "first")
    seen, states = {1: 0, 2: 0}, 0
    for state, lost, entries_kept, rename_kept in product(trace.states, LOST, (True, False), (True, False)):
        files, flushed, entries, renamed, published = state
        shutil.rmtree(run)
        shutil.copytree(first, run / "checkpoints" / "step-000001")
        kept = published or (renamed and rename_kept)
        place = run / "checkpoints" / ("step-000002" if kept else f"{ASIDE}step-000002-x")
        place.mkdir()
        for name, data in files.items():
            if entries_kept or name in entries:
                (place / name).write_bytes(data if name in flushed else LOST[lost](data))
        found = content(run)
        assert found == 2 if published else found in (1, 2)
        seen[found] += 1
        states += 1
    assert states >= 200
    assert min(seen.values()) > 10, seen
    assert published, "the last state is that of a save that has returned"


def test_a_save_that_does_not_flush_is_caught(tmp_path, monkeypatch):
    """Or the test above would see nothing."""
    run = tmp_path / "run"
    save_step(run, 1)
    with monkeypatch.context() as patch:
        trace = Trace(patch, run / "checkpoints")
        save_step(run, 2)
    files, flushed, *_ = trace.states[-1]
    assert set(files) == flushed > {"MANIFEST.json", "model.safetensors"}


@pytest.mark.parametrize("flips", [40, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.reliability])])
def test_every_flipped_bit_is_found(flips, tmp_path, nightly):
    save_step(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-000001"
    files = sorted(file for file in folder.iterdir())
    rng = random.Random(0)
    for _ in range(flips * (20 if nightly else 1)):
        file = rng.choice(files)
        whole = file.read_bytes()
        spoiled = bytearray(whole)
        spoiled[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(spoiled)
        with pytest.raises(IntegrityError):
            rehead.load(folder)
        file.write_bytes(whole)
    assert content(folder) == 1


WRITER = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from numbered import filled, save_step
import rehead
run, step = Path({run!r}), 2
while True:
    save_step(run, step)
    shutil.rmtree(run / "checkpoints" / f"step-{{step - 2:06d}}", ignore_errors=True)
    rehead.save(filled(step), run / "model", overwrite=True)
    step += 1
"""


@pytest.mark.process
@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.reliability])])
def test_a_reader_beside_a_writer_reads_whole_models(seconds, tmp_path, nightly):
    run = tmp_path / "run"
    save_step(run, 1)
    rehead.save(filled(1), run / "model")
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER.format(here=str(Path(__file__).parent), run=str(run))]
    )
    last, reads = {"checkpoints": 0.0, "model": 0.0}, 0
    try:
        while last["model"] < 3:  # until it writes
            assert writer.poll() is None
            last["model"] = content(run / "model")
        end = time.monotonic() + seconds * (30 if nightly else 1)
        # On a machine, or with a disk, that may be busy.
        while time.monotonic() < end or reads <= 10 * seconds or last["model"] <= 5:
            assert writer.poll() is None
            for name in last:
                found = content(run if name == "checkpoints" else run / "model")
                assert found >= last[name], "an older one than before"
                last[name], reads = found, reads + 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()


STARTS = """
import json, os, sys, time
from pathlib import Path
from rehead.errors import Busy
from rehead.training.folder import RunFolder
for number in range(int(sys.argv[1])):
    place, children, begin = Path(f"run-{number}"), [], time.monotonic() + 0.02
    (ours, theirs), (go, stay) = os.pipe(), os.pipe()
    for _ in range(2):
        child = os.fork()
        if not child:
            while time.monotonic() < begin:
                pass
            try:
                with RunFolder(place).open(resume=False):
                    os.write(theirs, b"o")
                    os.close(stay)
                    os.read(go, 1)  # until the other one has been refused
            except Busy:
                os.write(theirs, b"b")
            os._exit(0)
        children.append(child)
    said = os.read(ours, 1) + os.read(ours, 1)
    os.close(stay)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert sorted(said) == sorted(b"ob"), said
print("done")
"""


@pytest.mark.process
@pytest.mark.parametrize("starts", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.reliability])])
def test_of_two_starts_in_one_folder_one_runs(starts, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(starts)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "done\n", done.stderr[-2000:]
