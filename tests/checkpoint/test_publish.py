"""Folders appear whole or not at all, whatever happens while they are written."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rehead
from rehead.checkpoint import newest_step, publish, verify
from rehead.checkpoint.files.publish import MANIFEST, sweep
from rehead.errors import IntegrityError, InvalidInput, ResourceError
from rehead.model import both_seen

TEXTS = {"a.json": "1", "b.safetensors": "22", "c.txt": ""}


def put(folder, texts=TEXTS, **options):
    with publish(folder, **options) as aside:
        for name, text in texts.items():
            (aside / name).write_text(text)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != MANIFEST}


def test_a_folder_is_published_with_its_parents(tmp_path):
    folder = tmp_path / "new" / "parents" / "é x"
    put(folder)
    assert contents(folder) == TEXTS
    assert set(verify(folder)["files"]) == set(TEXTS)
    assert os.listdir(folder.parent) == ["é x"]


def test_nothing_shows_before_the_end(tmp_path):
    with publish(tmp_path / "model") as aside:
        (aside / "a.json").write_text("1")
        assert not (tmp_path / "model").exists()
        assert aside.parent == tmp_path  # on the same disk, so that a rename is enough
        assert aside.name.startswith(".tmp-")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_usual_permissions(mask, tmp_path):
    before = os.umask(mask)
    try:
        rehead.save(both_seen(), tmp_path / "model")
    finally:
        os.umask(before)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o777 & ~mask
    for path in (tmp_path / "model").iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path.name


STANDING = {
    "a file": lambda path: path.write_text("mine"),
    "a folder": lambda path: (path.mkdir(), (path / "mine").write_text("mine")),
    "a link to a folder": lambda path: (
        path.with_name("there").mkdir(),
        path.symlink_to(path.with_name("there")),
    ),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a model": lambda path: put(path),
}


@pytest.mark.parametrize("standing", STANDING)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_stands_there_is_kept(standing, overwrite, tmp_path):
    """Unless it is a published folder, and that is to be replaced."""
    STANDING[standing](tmp_path / "model")
    before = sorted((str(path), os.lstat(path).st_ino) for path in tmp_path.rglob("*"))
    if overwrite and standing == "a model":
        put(tmp_path / "model", {"new.json": "3"}, overwrite=True)
        assert contents(tmp_path / "model") == {"new.json": "3"}
        assert os.listdir(tmp_path) == ["model"]
        return
    remedy = "it has no MANIFEST.json" if overwrite else "choose another name, or remove it first"
    with pytest.raises(InvalidInput, match=remedy):
        put(tmp_path / "model", {"new.json": "3"}, overwrite=overwrite)
    assert sorted((str(path), os.lstat(path).st_ino) for path in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "model").mkdir()
    put(tmp_path / "model")
    assert contents(tmp_path / "model") == TEXTS


def test_what_appears_meanwhile_is_kept(tmp_path):
    with (  # noqa: PT012
        pytest.raises(InvalidInput, match="model exists: choose another name"),
        publish(tmp_path / "model") as aside,
    ):
        (aside / "new.json").write_text("3")
        put(tmp_path / "model")
    assert contents(tmp_path / "model") == TEXTS
    assert os.listdir(tmp_path) == ["model"]


class Mishap(BaseException):
    """Like KeyboardInterrupt, no Exception."""


@pytest.mark.parametrize("error", [Mishap, KeyboardInterrupt, ValueError, MemoryError, ReferenceError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_inside_leaves_nothing(error, overwrite, tmp_path):
    if overwrite:
        put(tmp_path / "model")
    with pytest.raises(error), publish(tmp_path / "model", overwrite=overwrite) as aside:  # noqa: PT012
        (aside / "new.json").write_text("3")
        raise error
    assert os.listdir(tmp_path) == (["model"] if overwrite else [])
    if overwrite:
        verify(tmp_path / "model")
        assert contents(tmp_path / "model") == TEXTS


REMEDIES = [
    (errno.ENOSPC, "Free some space"),
    (errno.EDQUOT, "Free some space"),
    (errno.EROFS, "Choose a folder you may write to"),
    (errno.EACCES, "Choose a folder you may write to"),
    (errno.EIO, "Nothing was published"),
]


@pytest.mark.parametrize(
    ("number", "remedy"), REMEDIES, ids=[errno.errorcode[number] for number, _ in REMEDIES]
)
def test_a_system_error_is_a_resource_error(number, remedy, tmp_path):
    with pytest.raises(ResourceError) as caught, publish(tmp_path / "model"):
        raise OSError(number, os.strerror(number), str(tmp_path / "secret"))
    assert str(caught.value).startswith(f"cannot write {tmp_path / 'model'}: {os.strerror(number)}. {remedy}")
    assert os.listdir(tmp_path) == []


class Faults:
    """The n-th call of any operation that touches the disk fails, once."""

    def __init__(self, monkeypatch, fail_at, error):
        self.count, self.fired = 0, 0
        for owner, name in (
            (os, "fsync"), (os, "open"), (os, "mkdir"), (Path, "rename"), (Path, "mkdir"), (Path, "chmod"),
            (Path, "write_text"), (Path, "rmdir"), (Path, "stat"),
        ):  # fmt: skip
            self.wrap(monkeypatch, owner, name, fail_at, error)

    def wrap(self, monkeypatch, owner, name, fail_at, error):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            self.count += 1
            if self.count == fail_at:
                self.fired += 1
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def fails_at(tmp_path, n, error, overwrite):
    """Whether the n-th operation existed; the folder is then as before, or whole and new."""
    folder = tmp_path / str(n) / "model"
    folder.parent.mkdir()
    if overwrite:
        put(folder, {"old.json": "0"})
    with pytest.MonkeyPatch.context() as monkeypatch:
        faults = Faults(monkeypatch, n, error)
        try:
            put(folder, overwrite=overwrite)
        except (ResourceError, KeyboardInterrupt):
            assert faults.fired == 1
    now = contents(folder) if folder.exists() else None
    assert now in (TEXTS, {"old.json": "0"} if overwrite else None), f"after operation {n}: {now}"
    if now is not None:
        verify(folder)
    left = [name for name in os.listdir(folder.parent) if name != "model"]
    replaced = now == TEXTS and [name[:9] for name in left] == [".tmp-old-"]  # whose removal failed
    assert left == [] or replaced, f"operation {n} left {left}"
    return bool(faults.fired)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space"), OSError(errno.EIO, "I/O"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_any_operation_may_fail(error, overwrite, tmp_path):
    n = 1
    while fails_at(tmp_path, n, error, overwrite):
        n += 1
    assert n > 15
    assert contents(tmp_path / str(n) / "model") == TEXTS


FULL_DISK = """
import resource, signal, sys, torch, rehead
from rehead.config import ModelOptions
from rehead.model import build
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = build(ModelOptions(n_layer=1, n_embd=48).resolve(29, 11))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    rehead.save(model, sys.argv[1])
except rehead.errors.ResourceError as error:
    print(error)
"""


@pytest.mark.process
def test_a_full_disk_is_a_resource_error_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk: a short write, then an error."""
    command = [sys.executable, "-W", "error", "-c", FULL_DISK, str(tmp_path / "model"), "20000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"cannot write {tmp_path / 'model'}: File too large. Free some space")
    assert os.listdir(tmp_path) == []


def trace(monkeypatch, write):
    """Names synced and renamed, in order."""
    events, fsync, rename = [], os.fsync, Path.rename

    def traced_fsync(handle):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def traced_rename(path, target):
        events.append(("rename", Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    write()
    return [(what, "aside" if name.startswith(".tmp-") else name) for what, name in events]


def check_order(monkeypatch, tmp_path):
    events = trace(monkeypatch, lambda: put(tmp_path / "run" / "model"))
    assert events == [
        *(("sync", name) for name in sorted(TEXTS)),
        ("sync", MANIFEST),
        ("sync", "aside"),
        ("rename", "model"),
        ("sync", "run"),
    ]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files need /proc")
def test_everything_is_flushed_before_the_rename_and_the_rename_after(monkeypatch, tmp_path):
    check_order(monkeypatch, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["rehead.checkpoint.files.publish"], "_sync", lambda path: None)
    with pytest.raises(AssertionError):
        check_order(monkeypatch, tmp_path / "again")


DAMAGE = {  # what is done to a published folder, what the message must name
    "changed": (lambda folder: (folder / "a.json").write_text("2"), "a.json is damaged"),
    "longer": (lambda folder: (folder / "a.json").write_text("11"), "a.json is damaged"),
    "missing": (lambda folder: (folder / "a.json").unlink(), "a.json is missing"),
    "a folder": (
        lambda folder: ((folder / "a.json").unlink(), (folder / "a.json").mkdir()),
        "a.json is missing",
    ),
    "added": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json is not recorded"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "MANIFEST.json is missing or unreadable"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found(case, tmp_path):
    damage, named = DAMAGE[case]
    put(tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(IntegrityError, match=named):
        verify(tmp_path / "model")


def test_a_readme_may_be_added(tmp_path):
    put(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("")
    verify(tmp_path / "model")


MANIFESTS = [
    "",
    "[]",
    "null",
    "{}",
    '{"format": 1}',
    '{"files": {}}',
    '{"format": 1, "files": []}',
    '{"format": 1, "files": {"a.json": 3}}',
    '{"format": 1, "files": {"a.json": {"bytes": 1}}}',
    '{"format": 1, "files": {"a.json": {"bytes": "x", "sha256": ""}}}',
    '{"format": 1, "files": {}}',
    '{"format": 2, "files": {}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda text: text[:60])
def test_bad_manifests_are_refused(manifest, tmp_path):
    put(tmp_path / "model")
    (tmp_path / "model" / MANIFEST).write_text(manifest)
    with pytest.raises(IntegrityError):
        verify(tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "../model/a.json", "./a.json", "", ".", "..", "a\0b", "x" * 300]
)
def test_a_manifest_lists_nothing_but_files_of_its_folder(name, tmp_path):
    put(tmp_path / "model")
    (tmp_path / "outside").write_text("1")
    manifest = verify(tmp_path / "model")
    manifest["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"1").hexdigest()}
    (tmp_path / "model" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match="is missing"):
        verify(tmp_path / "model")


def test_a_newer_manifest_says_so(tmp_path):
    put(tmp_path / "model")
    (tmp_path / "model" / MANIFEST).write_text('{"format": 7, "files": {}}')
    with pytest.raises(IntegrityError, match="has format=7, this version of rehead knows 1: upgrade"):
        verify(tmp_path / "model")


def test_sweep_takes_what_writers_left(tmp_path):
    put(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / ".tmp-model-abc")
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["model"]


def save_step(run, step):
    """A checkpoint whose every weight is its number, large enough to be killed inside."""
    model = both_seen()
    for weight in model.parameters():
        weight.data.fill_(step)
    with publish(run / "checkpoints" / f"step-{step:06d}") as aside:
        rehead.checkpoint.own.write(model, aside, {f"more-{i}.json": f"{step}" * 10_000 for i in range(4)})


def save_for_ever(run, step, acknowledge):
    """What a trainer does: save, tell, drop all but the newest two."""
    try:
        sweep(run / "checkpoints")
        while True:
            save_step(run, step)
            os.write(acknowledge, step.to_bytes(8, "little"))
            shutil.rmtree(run / "checkpoints" / f"step-{step - 2:06d}", ignore_errors=True)
            step += 1
    finally:
        os._exit(1)


def kill_while_saving(run, first, n_saved, delay):
    """The last step acknowledged by a writer killed `delay` seconds after its `n_saved`-th step."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(run, first, writer)
    os.close(writer)
    try:
        told = [os.read(reader, 8) for _ in range(n_saved)]
        time.sleep(delay)
    finally:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(ended)
    with open(reader, "rb") as pipe:
        told.append(pipe.read())
    acknowledged = b"".join(told)
    return int.from_bytes(acknowledged[-8:], "little") if acknowledged else first - 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_at_any_moment_the_newest_step_is_whole(tmp_path):
    run, draw = tmp_path / "run", random.Random(1)
    (run / "checkpoints").mkdir(parents=True)
    start = time.monotonic()
    save_step(run, 1)
    one_save = time.monotonic() - start
    last, inside = 1, 0
    for _ in range(20):
        acknowledged = kill_while_saving(run, last + 1, draw.randrange(3), draw.uniform(0, one_save))
        inside += any(path.name.startswith(".tmp-") for path in (run / "checkpoints").iterdir())
        newest = newest_step(run)
        last = int(newest.name.removeprefix("step-"))
        assert last >= acknowledged
        assert all((weight == last).all() for weight in rehead.load(run).parameters())
    assert last > 10
    assert inside > 3, "hardly a kill came inside a save"


def test_the_slower_of_two_writers_hears_that_the_folder_exists(tmp_path):
    with pytest.raises(InvalidInput, match="model exists: choose another name"):  # noqa: PT012, SIM117 (the end raises)
        with publish(tmp_path / "model") as aside:
            (aside / "a.txt").write_text("slow")
            put(tmp_path / "model")
    assert contents(tmp_path / "model")
    assert [place.name for place in tmp_path.iterdir()] == ["model"]
