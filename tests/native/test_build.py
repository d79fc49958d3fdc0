"""The compiled object in the cache folder: rebuilt if it is damaged, not loaded if another user can change it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from processes import is_running
from rehead.native import build
from rehead.native.build import COMPILERS
from rehead.system import folders

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler"),
]
ANSWER = """
import logging, sys
from pathlib import Path
import torch
from rehead.native import build
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
build.HERE = Path(sys.argv[1])
build.HEADER = build.HERE / "vectors.h"
made = build.library("answer")
print(made if isinstance(made, build.KernelUnavailable) else made.answer())
"""
BUILDS = "building answer.cpp for this machine, once ..."


@pytest.fixture
def source(tmp_path):
    """A folder with a library of one function, large enough to be read in pages."""
    (tmp_path / "vectors.h").write_text("")
    table = "const int table[99999] = {1, 2};"
    code = f'{table}\nextern "C" int answer() {{ volatile int at = 99998; return 42 + table[at]; }}'
    (tmp_path / "answer.cpp").write_text(code)
    return tmp_path


def answer(source, as_user=(), **variables):
    """What a fresh process says that loads the library, with `source` as its cache."""
    environment = os.environ | {"XDG_CACHE_HOME": str(source)} | variables
    environment = {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run(
        [*as_user, sys.executable, "-c", ANSWER, str(source)], env=environment, capture_output=True, text=True, cwd="/"
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def built(source):
    (path,) = (source / "rehead" / "native").iterdir()
    return path


def flipped(whole):
    table = len(whole) - 300_000
    return whole[:table] + bytes([whole[table] ^ 1]) + whole[table + 1 :]


DAMAGE = {"cut": lambda whole: whole[:20_000], "flipped": flipped, "empty": lambda whole: b""}


def damage(path, how):
    """Put a damaged file in its place: cut in place, the pages that this process has loaded would be gone."""
    damaged = path.with_name("damaged")
    damaged.write_bytes(DAMAGE[how](path.read_bytes()))
    damaged.chmod(0o700)
    damaged.replace(path)


@pytest.fixture
def here(source, monkeypatch):
    """Builds in this process, in this cache."""
    monkeypatch.setattr(build, "HERE", source)
    monkeypatch.setattr(build, "HEADER", source / "vectors.h")
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    return source


def load():
    """What `library` returns in a process that has not asked yet."""
    return build._loaded.__wrapped__("answer")


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_is_built_again(how, here):
    whole = build._built("answer").read_bytes()
    made = built(here).stat().st_mtime_ns
    build._built("answer")
    assert built(here).stat().st_mtime_ns == made
    damage(built(here), how)
    build._built("answer")
    assert built(here).read_bytes() == whole


def test_a_process_that_finds_a_cut_object_computes(source):
    """Loading it would be SIGBUS."""
    assert answer(source) == [BUILDS, "42"]
    damage(built(source), "cut")
    assert answer(source) == [BUILDS, "42"]


def test_what_another_user_can_change_is_not_loaded(here):
    """A folder or file of others is refused with a reason, and PyTorch computes."""
    path = build._built("answer")
    for place in (path, path.parent):
        usual = place.stat().st_mode
        place.chmod(0o777)
        refused = load()
        assert str(refused) == f"C++ cannot be built or loaded ({place} can be changed by other users)"
        assert refused.remedy == f"Make {here / 'rehead'} your own and writable, or set XDG_CACHE_HOME."
        place.chmod(usual)
    assert build._built("answer") == path
    hidden = path.with_name("hidden")
    path.rename(hidden)
    path.symlink_to(hidden)
    assert f"{path} is a link" in str(load())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a file another user's")
def test_a_file_of_another_user_is_not_loaded(here):
    path = build._built("answer")
    os.chown(path, 12_345, 12_345)
    assert f"{path} belongs to another user" in str(load())


@pytest.fixture
def everybodys():
    """A folder that all users can read: pytest closes its own."""
    with tempfile.TemporaryDirectory(prefix="rehead-test-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "tmp").mkdir()
        (Path(name) / "tmp").chmod(0o1777)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_a_user_without_a_home_builds_among_the_temporary_files(source, everybodys):
    for file in source.iterdir():
        shutil.copy(file, everybodys)
    nobody = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    if subprocess.run(
        [*nobody, sys.executable, "-c", "import rehead"], cwd="/", capture_output=True
    ).returncode:
        pytest.skip("others may not read this Python or this repository")
    said = answer(everybodys, nobody, HOME=None, XDG_CACHE_HOME=None, TMPDIR=str(everybodys / "tmp"))
    assert said == [BUILDS, "42"]
    (path,) = (everybodys / "tmp" / "rehead-12345" / "native").iterdir()
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", ["another processor", "another machine without a list"])
def test_an_object_of_another_processor_is_never_loaded(other, here, monkeypatch):
    """On a home that several machines share."""
    mine = build._built("answer")
    if other == "another processor":
        cpuinfo = here / "cpuinfo"
        cpuinfo.write_text("flags : sse2\n")
        monkeypatch.setattr("rehead.system.machine.CPUINFO", cpuinfo)
    else:
        monkeypatch.setattr("rehead.system.machine.CPUINFO", here / "none")
        monkeypatch.setattr("platform.node", lambda: "one")
        assert build._built("answer") != mine
        mine = build._built("answer")
        monkeypatch.setattr("platform.node", lambda: "other")
    assert build._built("answer") != mine


def test_a_compiler_that_hangs_is_ended_with_what_it_began(here, monkeypatch):
    compiler = here / "hangs"
    compiler.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >> {here / 'children'}\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", [str(compiler)] * 3)
    monkeypatch.setattr(build, "TIMEOUT_SECONDS", 1)
    begin = time.monotonic()
    with pytest.raises(build.KernelUnavailable, match="took longer than 1 s"):
        build._built("answer")
    assert time.monotonic() - begin < 60
    children = (here / "children").read_text().split()
    assert children
    while any(map(is_running, children)):
        assert time.monotonic() - begin < 60
    assert not list((here / "rehead" / "native").iterdir())


def test_what_killed_builds_left_is_swept(here):
    left = here / "rehead" / "native" / ".tmp-rehead-answer-x"
    left.mkdir(parents=True)
    (left / "made.o").write_bytes(b"1")
    build._built("answer")
    assert not left.exists()


def test_the_cache_folder_follows_its_variable(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(folders.cache_folder()) == "/somewhere/rehead"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, as its specification says
    monkeypatch.setenv("HOME", "/home/me")
    assert str(folders.cache_folder()) == "/home/me/.cache/rehead"


def test_a_library_that_cannot_be_loaded_is_not_kept_and_another_compiler_is_tried(
    here, monkeypatch, tmp_path
):
    """As from clang with an OpenMP that is not linked."""
    working = next(filter(None, map(shutil.which, COMPILERS)))
    broken = tmp_path / "compilers" / "c++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nfor word; do last=$word; done\necho no library > $last\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    assert str(refused := load()).startswith(f"{broken} made a library that cannot be loaded (")
    assert "file too short" in str(refused)
    assert not list((here / "rehead" / "native").glob("*.so"))
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.defpath}")
    monkeypatch.setattr(build, "COMPILERS", ("c++", working))
    assert load().answer() == 42


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a folder another user's")
def test_a_cache_in_a_folder_of_another_user_is_not_used(here):
    """Its owner could put another folder in its place, after it was looked at; a link of one's own is fine."""
    path = build._built("answer")
    (here / "rehead").rename(here / "elsewhere")
    (here / "rehead").symlink_to(here / "elsewhere")
    assert build._built("answer").name == path.name
    os.chown(here / "elsewhere", 12_345, 12_345)
    assert "elsewhere belongs to another user" in str(load())
