"""Any operation on the disk may fail, in any way: afterwards the old model is there or the new one, and the next is."""

import errno
import fcntl
import importlib
import io
import os
import shutil
from itertools import cycle, repeat

import pytest

import rehead
from rehead.errors import ResourceError
from rehead.model import both_seen

publishing = importlib.import_module("rehead.checkpoint.files.publish")
OPERATIONS = (
    (os, "open"), (os, "mkdir"), (os, "rename"), (os, "rmdir"), (os, "unlink"), (os, "chmod"), (os, "fsync"),
    (os, "stat"), (os, "scandir"), (io, "open"), (fcntl, "flock"), (publishing, "exchange"),
)  # fmt: skip
CLEANING = {"unlink", "rmdir", "scandir", "stat", "open", "rename"}
"""Operations that also remove what is left over, which may fail without harm."""
ERRORS = [
    OSError(number, os.strerror(number))
    for number in (
        errno.ENOSPC,
        errno.EIO,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EMFILE,
        errno.EINTR,
        errno.EPERM,
    )
]


class Faults:
    """The n-th operation on the disk fails, once."""

    def __init__(self, monkeypatch, fail_at, error):
        self.count, self.fail_at, self.error, self.fired = 0, fail_at, error, None
        for owner, name in OPERATIONS:
            self.wrap(monkeypatch, owner, name)

    def count_one(self, name):
        self.count += 1
        if self.count == self.fail_at:
            self.fired = name
            raise self.error

    def wrap(self, monkeypatch, owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            self.count_one(name)
            made = real(*args, **kwargs)
            return Watched(made, self) if owner is io and set("wa+") & set(args[1]) else made

        monkeypatch.setattr(owner, name, call)


class Watched:
    """An open file each of whose writes counts."""

    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        self.faults.count_one("write")
        return self.file.write(data)


def number(folder):
    """The number that a model's weights hold."""
    (value,) = {weight.item() for weight in rehead.load(folder).parameters() for weight in weight.flatten()}
    return value


def model(value):
    made = both_seen()
    for weight in made.parameters():
        weight.data.fill_(value)
    return made


def fails_at(place, n, error, overwrite, old, new):
    """The n-th operation's name, or None if there are fewer."""
    place.mkdir()
    folder = place / "model"
    if overwrite:
        rehead.save(old, folder)
    failed = False
    with pytest.MonkeyPatch.context() as monkeypatch:
        faults = Faults(monkeypatch, n, error)
        try:
            rehead.save(new, folder, overwrite=overwrite)
        except (ResourceError, KeyboardInterrupt):
            failed = True
            assert faults.fired
    where = f"operation {n}, {faults.fired}"
    if overwrite or not failed:
        assert number(folder) in ((1, 2) if failed else (2,)), where
    else:
        assert not folder.exists() or number(folder) == 2, where
    left = [name for name in os.listdir(place) if name != "model"]
    assert not left or faults.fired in CLEANING, f"{where}: {left} is left"
    rehead.save(old, folder, overwrite=True)
    assert number(folder) == 1
    assert os.listdir(place) == ["model"], where
    shutil.rmtree(place)
    return faults.fired


def errors_of(name):
    if name == "each in turn":
        return cycle([*ERRORS, KeyboardInterrupt()])
    return repeat(
        next((error for error in ERRORS if errno.errorcode[error.errno] == name), KeyboardInterrupt())
    )


EVERY = [
    pytest.param(errno.errorcode[error.errno], marks=[pytest.mark.slow, pytest.mark.reliability])
    for error in ERRORS
]


@pytest.mark.parametrize("errors", ["each in turn", *EVERY, pytest.param("Ctrl-C", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["new", "exchanged", "renamed"])
def test_any_operation_may_fail(how, errors, tmp_path, monkeypatch):
    """Of a save to a new path, and of one that replaces a model, on file systems that can exchange folders or not."""

    def cannot(one, other):
        raise OSError(errno.ENOSYS, "")

    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and nothing here asks what is on the disk
    if how == "renamed":
        monkeypatch.setattr(publishing, "exchange", cannot)
    old, new, fired = model(1), model(2), []
    for n, error in enumerate(errors_of(errors), 1):
        fired.append(fails_at(tmp_path / "place", n, error, how != "new", old, new))
        if fired[-1] is None:
            break
    assert len(fired) > 50
    last = {"new": "rename", "exchanged": "exchange", "renamed": "rename"}[how]
    assert {"open", "mkdir", last, "chmod", "fsync", "write", "stat"} <= {*fired}
