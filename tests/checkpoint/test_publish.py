"""Folders appear whole or not at all, whatever happens while they are written."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from safetensors import SafetensorError

import rehead
from rehead.checkpoint import publish, read_at, verify
from rehead.checkpoint.files import exchange as exchanging
from rehead.checkpoint.files.exchange import exchange
from rehead.checkpoint.files.publish import BEFORE, MANIFEST
from rehead.data.files import write_whole
from rehead.errors import IntegrityError, InvalidInput, ResourceError
from rehead.model import both_seen
from rehead.stages import listening
from rehead.system.aside import ASIDE

publishing = sys.modules["rehead.checkpoint.files.publish"]  # of which the function hides the name
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
    kept = "choose another name, or remove it first" if standing == "a model" else r"choose another name\.$"
    with pytest.raises(InvalidInput, match="it has no MANIFEST.json" if overwrite else kept):
        put(tmp_path / "model", {"new.json": "3"}, overwrite=overwrite)
    assert sorted((str(path), os.lstat(path).st_ino) for path in tmp_path.rglob("*")) == before


def test_a_link_to_a_model_is_not_replaced(tmp_path):
    """The link would stay in the temporary folder, which is removed only if it is one."""
    put(tmp_path / "v1")
    (tmp_path / "latest").symlink_to("v1")
    with pytest.raises(InvalidInput, match=r"latest is a link to .*v1: give that, or remove the link"):
        put(tmp_path / "latest", {"new.json": "3"}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["latest", "v1"]


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
    monkeypatch.setattr(publishing, "sync", lambda path: None)
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


def test_a_config_added_later_is_found_without_the_rest(tmp_path):
    """What reads the config alone, as `rehead plan` does, asks the manifest for that one file."""
    put(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "b.safetensors").unlink()
    assert set(verify(tmp_path / "model", only="a.json")["files"]) == set(TEXTS)
    with pytest.raises(
        IntegrityError, match=r"config\.json is not recorded in MANIFEST\.json: it was added later"
    ):
        verify(tmp_path / "model", only="config.json")


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match=r"file is a file\. Choose a path in a folder\.$"):
        put(tmp_path / "file" / "deep" / "model")
    assert (tmp_path / "file").read_text() == "mine"


def test_parents_that_cannot_all_be_created_leave_none(tmp_path, monkeypatch):
    mkdir, made = os.mkdir, []

    def second_fails(path, *mode):
        if Path(path) == tmp_path / "new" / "parents":
            made.append((tmp_path / "new").exists())
        if made == [False, True]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", second_fails)
    with pytest.raises(ResourceError, match=r"No space left on device\. Free some space"):
        put(tmp_path / "new" / "parents" / "model")
    assert made == [False, True]
    assert os.listdir(tmp_path) == []


def test_an_error_of_safetensors_is_a_resource_error(tmp_path):
    """It has the system's number in its text alone."""

    def write(number):
        with publish(tmp_path / "model"):
            raise SafetensorError(f"Error while serializing: I/O error: No matter what (os error {number})")

    with pytest.raises(ResourceError, match=r"No space left on device\. Free some space"):
        write(errno.ENOSPC)
    with pytest.raises(ResourceError, match=r"Read-only file system\. Choose a folder you may write to\.$"):
        write(errno.EROFS)
    assert os.listdir(tmp_path) == []


def test_the_check_of_a_large_folder_is_shown(tmp_path, monkeypatch):
    put(tmp_path / "model")
    for least, shown in ((4, []), (3, [(f"checking {tmp_path / 'model'}", 3)])):  # of TEXTS' 3 bytes
        monkeypatch.setattr(publishing, "LONG", least)
        stages = []
        with listening(stages.append):
            verify(tmp_path / "model")
        assert [(stage.title, stage.total) for stage in stages if stage.state == "begun"] == shown
        assert [stage.done for stage in stages if stage.state == "ended"] == [3] * len(shown)


def test_two_folders_exchange_their_names(tmp_path):
    put(tmp_path / "one", {"a.txt": "1"})
    put(tmp_path / "other", {"a.txt": "2"})
    exchange(tmp_path / "one", tmp_path / "other")
    assert contents(tmp_path / "one") == {"a.txt": "2"}
    assert contents(tmp_path / "other") == {"a.txt": "1"}
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*one"):
        exchange(tmp_path / "one", tmp_path / "none")
    assert contents(tmp_path / "one") == {"a.txt": "2"}


def test_a_system_that_cannot_exchange_renames(tmp_path, monkeypatch):
    """As a C library without `renameat2`."""
    monkeypatch.setattr(exchanging, "FUNCTION", "renameat_of_another_system")
    put(tmp_path / "model", {"a.txt": "1"})
    put(tmp_path / "other", {"a.txt": "2"})
    with pytest.raises(OSError, match="Function not implemented"):
        exchange(tmp_path / "model", tmp_path / "other")
    put(tmp_path / "model", {"a.txt": "3"}, overwrite=True)
    assert contents(tmp_path / "model") == {"a.txt": "3"}
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]


def test_a_readme_may_be_added_and_edited(tmp_path):
    """Also where a manifest of before lists it."""
    put(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("")
    verify(tmp_path / "model")
    put(tmp_path / "other", {"README.md": "license: unknown", "a.txt": "1"})
    (tmp_path / "other" / "README.md").write_text("license: mit")
    assert list(verify(tmp_path / "other")["files"]) == ["a.txt"]
    manifest = json.loads((tmp_path / "other" / "MANIFEST.json").read_text())
    manifest["files"]["README.md"] = {"bytes": 1, "sha256": "0"}
    (tmp_path / "other" / "MANIFEST.json").write_text(json.dumps(manifest))
    verify(tmp_path / "other")


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


def test_the_next_one_removes_what_killed_writers_left_and_nothing_else(tmp_path):
    """A living writer has locked its folder; others' names are not ours."""
    put(tmp_path / "model")
    for name in (f"{ASIDE}model-abc", f"{ASIDE}other-abc", ".tmp-model-abc", "mine"):
        shutil.copytree(tmp_path / "model", tmp_path / name)
    with publish(tmp_path / "slow") as aside:
        (aside / "a.txt").write_text("slow")
        put(tmp_path / "new")
        assert {*os.listdir(tmp_path)} == {"model", "mine", ".tmp-model-abc", "new", aside.name}
    assert contents(tmp_path / "slow") == {"a.txt": "slow"}


def test_a_file_is_swept_like_a_folder(tmp_path):
    left = tmp_path / f"{ASIDE}tokens.bin-abc"
    left.mkdir()
    (left / "tokens.bin").write_text("half of them")
    write_whole(tmp_path / "tokens.bin", [b"all of ", b"them"])
    assert os.listdir(tmp_path) == ["tokens.bin"]
    assert (tmp_path / "tokens.bin").read_text() == "all of them"


def cannot(one, other):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def taken_away(tmp_path, monkeypatch):
    """A folder whose writer was killed between taking it away and renaming the new one, on an old file system."""
    put(tmp_path / "model", {"config.json": "1"})
    monkeypatch.setattr(publishing, "exchange", cannot)
    rename = Path.rename

    def killed(path, target):
        if path.name.startswith(ASIDE):
            os._exit(9)
        return rename(path, target)

    if not (child := os.fork()):
        Path.rename = killed
        put(tmp_path / "model", {"new.json": "3"}, overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "model").exists()
    return tmp_path / "model"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_that_was_taken_away_is_found(tmp_path, monkeypatch):
    folder = taken_away(tmp_path, monkeypatch)
    assert contents(read_at(folder, lambda place: place)) == {"config.json": "1"}
    with pytest.raises(InvalidInput, match="model exists: choose another name"):
        put(folder)
    assert contents(folder) == {"config.json": "1"}
    put(folder, {"new.json": "3"}, overwrite=True)
    assert contents(folder) == {"new.json": "3"}
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_old_folder_beside_the_new_one_is_removed(tmp_path, monkeypatch):
    folder = taken_away(tmp_path, monkeypatch)
    shutil.copytree(folder.with_name(f"{BEFORE}model"), folder)
    put(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]


def test_the_slower_of_two_writers_hears_that_the_folder_exists(tmp_path):
    with pytest.raises(InvalidInput, match="model exists: choose another name"):  # noqa: PT012, SIM117 (the end raises)
        with publish(tmp_path / "model") as aside:
            (aside / "a.txt").write_text("slow")
            put(tmp_path / "model")
    assert contents(tmp_path / "model")
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("shared_only", [False, True], ids=["locks", "shared locks, as on NFS"])
def test_a_writer_of_another_model_leaves_a_folder_that_is_being_replaced(shared_only, tmp_path, monkeypatch):
    """On a file system without exchange: between two renames the old folder has another name, and its writer lives."""
    put(tmp_path / "model")
    monkeypatch.setattr(publishing, "exchange", cannot)
    flock, rename, seen = fcntl.flock, Path.rename, []

    def on_nfs(handle, how):
        if how & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(handle, how)

    if shared_only:
        monkeypatch.setattr(fcntl, "flock", on_nfs)

    def beside(path, target):
        if path.name.startswith(ASIDE) and Path(target).name == "model":
            seen.append(os.listdir(tmp_path))
            publishing.recover(tmp_path, "another")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", beside)
    put(tmp_path / "model", {"new.json": "3"}, overwrite=True)
    assert f"{BEFORE}model" in seen[0]
    assert contents(tmp_path / "model") == {"new.json": "3"}
    assert os.listdir(tmp_path) == ["model"]


def test_what_another_user_left_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / f"{BEFORE}theirs").mkdir()
    (tmp_path / f"{BEFORE}link").symlink_to("nowhere")
    (tmp_path / BEFORE).mkdir()
    rename = Path.rename

    def refused(path, target):
        if path.name.startswith(BEFORE):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    put(tmp_path / "mine")
    assert contents(tmp_path / "mine") == TEXTS


def test_two_writers_leave_the_permissions_of_the_process(tmp_path):
    """`os.umask` can only be read by changing it, for all threads."""
    before = os.umask(0o027)
    try:
        threads = [threading.Thread(target=put, args=(tmp_path / f"model-{i}",)) for i in range(8)]
        with mock.patch.object(os, "umask", side_effect=AssertionError):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        assert os.umask(before) == 0o027
    assert {place.stat().st_mode & 0o777 for place in tmp_path.iterdir()} == {0o750}


def test_a_file_is_flushed_before_it_has_its_name(tmp_path, monkeypatch):
    """After a power cut config.yaml would be empty, with days of checkpoints beside it."""
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (events.append("renamed"), replace(*names)))
    write_whole(tmp_path / "config.yaml", [b"a: 1"])
    assert events == [(tmp_path / "config.yaml").stat().st_ino, "renamed", tmp_path.stat().st_ino]
