"""A conversion that is killed goes on where it was, and writes the same bytes."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import forked
import rehead
from processes import is_running
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.conversion.kept import Order
from rehead.data.hold import hold
from rehead.model import build
from rehead.tokenizer.tokenizer import train

pytestmark = pytest.mark.process

TEXT = "To be, or not to be, that is the question. " * 60
CHILD = """
import os, signal, sys
wanted, removed = sys.argv.pop(1), []
def watch(event, values):
    if event == "os.remove" and "half cleared" == wanted and os.path.exists("killed"):
        removed.append(os.path.basename(os.fspath(values[0])))
        if {*removed[-2:]} == {"figures.json", "model.safetensors"}:  # of a layer; the second is still there
            os.kill(os.getpid(), signal.SIGKILL)
    if event == "shutil.rmtree" and "clearing" == wanted and os.path.exists("killed"):
        if ".unfinished" in os.fspath(values[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    if event == "os.rename":
        place = os.path.basename(os.fspath(values[1]))
        print("renamed", place, file=sys.stderr, flush=True)
        if place == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
from rehead.cli.entry import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs a command that is killed before a file gets the given name, or, clearing, once its work is published."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A source, its text, and what a conversion that nobody interrupts makes of them."""
    here = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    options = ModelOptions(n_layer=3, n_embd=24, n_query_head=6, n_kv_head=3, head_dim=4, rope=True)
    tokenizer = train("char", TEXT)
    model = build(options.resolve(tokenizer.vocab_size, 32))
    rehead.save(model, here / "source", files={"tokenizer.json": tokenizer.to_json()})
    (here / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert main(words("whole")) == 0
    return here


@pytest.fixture
def source(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(destination, *more):
    given = ["--to", "mla", "--kv-fraction", "0.5", "--calibration", "text.txt", "--length", "16"]
    return ["convert", "source", destination, *given, "--allow-loss", *more]


def in_a_child(place, *given):
    """Run a command, killed before a file is renamed to `place`."""
    return forked.python(CHILD, place, *given, timeout=100)


def kill(place, destination, *more):
    """Kill the command before a file is renamed to `place`; returns the names of those before."""
    done = in_a_child(place, *words(destination, *more))
    assert done.returncode == -9, done.stderr
    renamed = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("renamed ")]
    assert renamed.pop() == place
    return renamed


@pytest.fixture
def written(monkeypatch):
    """The names of the states and gradients that are written in this process."""
    names, replace = [], os.replace

    def noting(old, new):
        if Path(new).name.startswith(("states-", "gradients-")):
            names.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(os, "replace", noting)
    return names


def digests(folder):
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


PLACES = ["states-2", "gradients-3", "gradients-1", "statistics-0", "0-1", "killed"]
"""Hidden states on the way forward, gradients at the top and on the way back, the last statistics, a converted layer,
the result."""


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed(place, source, written):
    before = kill(place, "killed")
    assert not (source / "killed").exists()
    assert main(words("killed", "--resume")) == 0
    assert digests(source / "killed") == digests(source / "whole")
    assert not (source / "killed.unfinished").exists()
    assert not set(before[:-1]) & set(written)  # only the layer at which it was killed is read again
    assert len(written) < 7


@pytest.fixture
def made(monkeypatch):
    """The numbers of the layers that are converted in this process."""
    numbers, take = [], Order.take

    def noting(order):
        numbers.append(order.index)
        return take(order)

    monkeypatch.setattr(Order, "take", noting)
    return numbers


def test_processes_change_no_byte(source, made):
    """Of more than there are layers; below, of fewer."""
    assert main(words("several", "--jobs", "5")) == 0
    assert digests(source / "several") == digests(source / "whole")
    assert made == []


def test_layers_of_several_processes_are_not_made_again(source, made):
    """Nor if it goes on with another number of processes."""
    kill("killed", "killed", "--jobs", "2")
    (layers,) = (source / "killed.unfinished").glob("*/layers-*")
    assert sorted(place.name for place in layers.iterdir()) == ["0-0", "0-1", "0-2"]
    shutil.rmtree(layers / "0-1")
    assert main(words("killed", "--resume", "--jobs", "3")) == 0
    assert made == [1]  # the one that is left needs no process of its own
    assert digests(source / "killed") == digests(source / "whole")
    assert not (source / "killed.unfinished").exists()


def children(pid):
    """The processes that a process began to work for it."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for number in numbers:
        with suppress(OSError):  # it has just ended
            if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(int(number))
    return found


@pytest.mark.parametrize("lost", ["worker", "parent"])
def test_a_lost_process_ends_the_others(lost, source, written):
    command = [sys.executable, "-m", "rehead", *words("killed", "--jobs", "2")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=one_thread) as parent:
        while not (workers := children(parent.pid)):
            assert parent.poll() is None, parent.communicate()[1]
            time.sleep(0.01)
        os.kill(workers[0] if lost == "worker" else parent.pid, signal.SIGKILL)
        said = parent.communicate()[1]
    assert parent.returncode == (5 if lost == "worker" else -9), said
    if lost == "worker":
        assert "one of 2 processes was killed, perhaps because memory ran out: use fewer --jobs" in said
        assert "killed.unfinished keeps what is done: --resume continues from there" in said
    while any(map(is_running, workers)):
        time.sleep(0.05)
    assert main(words("killed", "--resume")) == 0
    assert written == []  # the text is not read again
    assert digests(source / "killed") == digests(source / "whole")


@pytest.mark.parametrize(
    ("owner", "name", "full"), [(os, "replace", "gradients-1"), (Path, "rename", "killed")]
)
def test_a_full_disk_does_not_lose_what_was_read(owner, name, full, source, written, capsys, monkeypatch):
    """While the text is read, and when the result is written."""
    rename = getattr(owner, name)

    def fails(old, new, **others):
        if Path(new).name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(old, new, **others)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        assert main(words("killed")) == 5
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "killed.unfinished keeps what is done: --resume continues from there" in said
    assert not (source / "killed").exists()
    before = list(written)
    assert before
    assert main(words("killed", "--resume")) == 0
    assert not set(before) & set(written[len(before) :])
    assert digests(source / "killed") == digests(source / "whole")
    assert not (source / "killed.unfinished").exists()


def test_layers_outlive_a_full_disk_without_a_text(source, made, monkeypatch):
    """But not exact ones, which are made again in no time."""
    asked = [
        "convert",
        "source",
        "new",
        "--to",
        "mla",
        "--kv-fraction",
        "0.5",
        "--method",
        "svd",
        "--allow-loss",
    ]

    def fails(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("rehead.conversion.folder.own.write", fails)
        assert main(asked) == 5
        assert main(["convert", "source", "exact", "--to", "mha"]) == 5
    assert not Path("exact.unfinished").exists()
    assert made == [0, 1, 2, 0, 1, 2]
    assert main([*asked, "--resume"]) == 0
    assert made == [0, 1, 2, 0, 1, 2]


@pytest.mark.long
def test_taught_killed_and_resumed(source):
    """All of them in children: shape checks choose other kernels, whose last bits differ."""
    teach = ["--teach", "2"]
    assert in_a_child("nowhere", *words("taught", *teach)).returncode == 0
    before = kill("taught-1", "killed", *teach)
    assert "taught-0" in before
    done = in_a_child("nowhere", *words("killed", *teach, "--resume"))
    assert done.returncode == 0, done.stderr
    assert "renamed taught-1" in done.stderr
    assert "renamed taught-0" not in done.stderr
    assert digests(source / "killed") == digests(source / "taught")
    assert digests(source / "killed") != digests(source / "whole")
    assert not (source / "killed.unfinished").exists()


def test_work_of_another_text_is_not_used(source, written, capsys):
    kill("statistics-0", "other")
    (source / "text.txt").write_text(TEXT.replace("question", "quest ion"))
    assert main(words("other", "--resume")) == 0
    assert len(written) == 8  # states before, between and after three layers, and as many gradients
    told = capsys.readouterr().err
    assert "other.unfinished is from another source, text, seed, device or version: starting again" in told
    assert digests(source / "other") != digests(source / "whole")


def test_what_is_unfinished_is_not_lost_by_a_mistake(source, written, capsys):
    assert main(words("new", "--resume")) == 2
    assert "new.unfinished does not exist: there is nothing to resume" in capsys.readouterr().err
    kill("statistics-0", "new")
    kept = digests(source / "new.unfinished")
    assert main(words("new")) == 2
    assert "new.unfinished holds an interrupted conversion: use --resume" in capsys.readouterr().err
    assert main(words("new", "--resume", "--test", "typo.txt")) == 3
    assert digests(source / "new.unfinished") == kept
    (source / "blank.txt").write_text(" ")
    assert main(words("new", "--resume", "--test", "blank.txt")) == 3
    assert "new.unfinished keeps what is done" in capsys.readouterr().err
    assert digests(source / "new.unfinished") | kept == digests(source / "new.unfinished")
    assert main(words("new", "--resume")) == 0
    assert written == ["gradients-0"]
    assert not (source / "new.unfinished").exists()


def test_killed_as_it_clears_up(source, capsys):
    """The result is whole; the next conversion in the folder removes what is kept, unless it is of another result."""
    assert in_a_child("clearing", *words("killed")).returncode == -9
    assert digests(source / "killed") == digests(source / "whole")
    kept = digests(source / "killed.unfinished")
    assert len(kept) > 1
    shutil.move(source / "killed", source / "away")
    shutil.copytree(source / "source", source / "killed")  # of another result
    assert main(words("first")) == 0
    assert digests(source / "killed.unfinished") == kept
    shutil.rmtree(source / "killed")
    assert main(words("second")) == 0  # of none
    assert digests(source / "killed.unfinished") == kept
    shutil.move(source / "away", source / "killed")
    with hold(source / "killed.unfinished", lambda: True, "destination"):
        assert main(words("third")) == 0
        assert digests(source / "killed.unfinished") == kept
    capsys.readouterr()
    assert main(words("killed")) == 3
    said = capsys.readouterr().err
    assert "removed killed.unfinished: its result is in killed" in said
    assert "killed exists: choose another name, or remove it first." in said
    assert not list(source.glob("*.unfinished"))
    assert digests(source / "killed") == digests(source / "whole")


@pytest.mark.parametrize("again", [[], ["--resume"]])
def test_half_a_layer_is_not_taken_for_a_whole_one(again, source):
    """Killed while the kept layers are removed; then somebody removes the result and converts once more."""
    done = in_a_child("half cleared", *words("killed"))
    assert done.returncode == -9, done.stderr
    assert digests(source / "killed") == digests(source / "whole")
    shutil.rmtree(source / "killed")
    assert main(words("killed", *again)) == 0
    assert digests(source / "killed") == digests(source / "whole")
    assert not list(source.glob("*.unfinished"))


def test_a_refusal_leaves_nothing(source, capsys):
    assert main([word for word in words("refused") if word != "--allow-loss"]) == 2
    assert "this conversion is lossy" in capsys.readouterr().err
    assert not list(source.glob("refused*"))


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_that_name_with_other_things_is_left_alone(resume, source, capsys):
    """Whatever is in it would be removed at the end."""
    for kind in ("model", "notes"):
        place = Path(f"{kind}.unfinished")
        if kind == "model":
            shutil.copytree("source", place)
        else:
            (place / "empty").mkdir(parents=True)
            (place / "notes.txt").write_text("mine")
        before = sorted(place.iterdir())
        assert main(words(kind, *["--resume"] * resume)) == 3
        assert f"{place} holds " in (said := capsys.readouterr().err)
        assert "which is not part of unfinished work and would be removed" in said
        assert sorted(place.iterdir()) == before
    Path("seen.unfinished").mkdir()
    Path("seen.unfinished/.DS_Store").write_text("a file browser's")
    assert main(words("seen")) == 0
    assert Path("seen.unfinished/.DS_Store").exists()
    assert main(words("other.unfinished")) == 0  # a name like any other
    assert main(words("other")) == 3


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused(kind, source, capsys):
    """Its content is replaced: a link may lead to any file of the user."""
    Path("precious").write_text("precious")
    Path("made.unfinished").mkdir()
    lock = Path("made.unfinished/.lock")
    lock.symlink_to("../precious") if kind == "link" else os.mkfifo(lock)
    assert main(words("made")) == 3
    assert f"{lock} is {'a link' if kind == 'link' else 'not a regular file'}" in capsys.readouterr().err
    assert Path("precious").read_text() == "precious"
    assert not Path("made").exists()
