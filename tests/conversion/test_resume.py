"""A conversion that is killed goes on where it was, and writes the same bytes."""

import hashlib
import shutil
import subprocess
import sys

import pytest
import torch

import rehead
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.model import build
from rehead.tokenizer.tokenizer import train

pytestmark = pytest.mark.process

TEXT = "To be, or not to be, that is the question. " * 60
CHILD = """
import os, signal, sys
wanted = sys.argv.pop(1)
def watch(event, values):
    if event == "os.rename":
        place = os.path.basename(os.fspath(values[1]))
        print("renamed", place, file=sys.stderr, flush=True)
        if place == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
from rehead.cli.entry import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs a command that is killed before a file gets the given name."""


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
    code, _, told = run("", "whole", at=here)
    assert code == 0, told
    return here


@pytest.fixture
def source(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(destination, *more):
    given = ["--to", "mla", "--kv-fraction", "0.5", "--calibration", "text.txt", "--length", "16"]
    return ["convert", "source", destination, *given, "--allow-loss", *more]


def run(killed_at, destination, *more, at=None):
    child = [sys.executable, "-c", CHILD, killed_at, *words(destination, *more)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=100, cwd=at)
    told = done.stderr.splitlines()
    return done.returncode, [line.split()[1] for line in told if line.startswith("renamed ")], told


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


PLACES = ["states-2", "pulls-3", "pulls-1", "statistics-0", "killed"]
"""Hidden states on the way forward, gradients at the top and on the way back, the last statistics, the result."""


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed(place, source):
    code, before, _ = run(place, "killed")
    assert code == -9
    assert before[-1] == place
    assert not (source / "killed").exists()
    code, after, told = run("", "killed", "--resume")
    assert code == 0, told
    assert digests(source / "killed") == digests(source / "whole")
    assert not set(before[:-2]) & set(after)  # only the layer at which it was killed is read again
    assert not (source / "killed.unfinished").exists()


def test_work_of_another_text_is_not_used(source):
    assert run("statistics-0", "other")[0] == -9
    (source / "text.txt").write_text(TEXT.replace("question", "quest ion"))
    code, renamed, told = run("", "other", "--resume")
    assert code == 0
    assert "states-1" in renamed
    assert any("is of another source, text, seed or version: starting anew" in line for line in told)
    assert digests(source / "other") != digests(source / "whole")


def test_what_is_unfinished_is_not_lost_by_a_mistake(source, capsys):
    assert main(words("new", "--resume")) == 2
    assert "new.unfinished does not exist: there is nothing to resume" in capsys.readouterr().err
    assert run("statistics-0", "new")[0] == -9
    kept = sorted(place.relative_to(source) for place in (source / "new.unfinished").rglob("*"))
    assert main(words("new")) == 2
    assert "new.unfinished holds an interrupted conversion: go on with --resume" in capsys.readouterr().err
    assert sorted(place.relative_to(source) for place in (source / "new.unfinished").rglob("*")) == kept
    assert main(words("new", "--resume", "--test", "typo.txt")) == 3
    assert "new.unfinished keeps what is done" in capsys.readouterr().err
    code, renamed, _ = run("", "new", "--resume")
    assert code == 0
    assert "states-1" not in renamed
    assert not (source / "new.unfinished").exists()


def test_a_refusal_leaves_nothing(source, capsys):
    assert main([word for word in words("refused") if word != "--allow-loss"]) == 2
    assert "this conversion is lossy" in capsys.readouterr().err
    assert not list(source.glob("refused*"))
