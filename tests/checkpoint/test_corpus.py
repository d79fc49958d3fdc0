"""The malformed corpus, through every command that reads a folder (see corpus.py and readers.py).

Each case: the right exit status and one line, within 2 s of computing and 300 MB; no file opened outside the folder,
no code run, no process, no connection, nothing left behind.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import readers
from corpus import CORPUS

from rehead.checkpoint.files.shards import Shards

PARTS = 2


def run(part, *every, options=()):
    """What was wrong in a part of the corpus, and how many cases it has; `every` is "all" for every command."""
    program = [sys.executable, *options, readers.__file__, f"{part}/{PARTS}", *every]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {"load", "plan", "convert", "export", "eval", "generate", "inspect"} == set(found["readers"])
    return found["wrong"], found["cases"]


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_no_reader_is_taken_in(part):
    assert run(part) == ({}, len(list(CORPUS)[part - 1 :: PARTS]))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("options", [[], ["-O"]], ids=["", "-O"])
def test_no_command_is_taken_in_by_any_case(options, part):
    """Nor under python -O, where a refusal that is an assert is none."""
    assert run(part, "all", options=options)[0] == {}


def test_every_command_reads_every_row():
    met = {}
    for name, (first, *commands) in readers.dealt():
        assert first == "load"
        assert commands
        met.setdefault(readers.row(name), []).extend(commands)
    assert all(set(commands) == set(readers.COMMANDS) for commands in met.values())


def test_every_row_of_the_corpus_is_there():
    """C23 and C35 are tested where conversion and resuming are."""
    assert {name[:3] for name in CORPUS if name[0] == "C"} >= {
        f"C{row:02}" for row in range(1, 36) if row not in (23, 35)
    }


@pytest.mark.process
def test_what_a_folder_may_not_cause_is_seen(tmp_path):
    """Or the listener could be deaf."""
    with readers.watched() as events:
        Path("/etc/hostname").exists()
        open("/etc/hostname").close()
        subprocess.run(["true"], check=True)
        exec(compile("1", "/tmp/x.py", "exec"))  # as code from data would run
    seen = " ".join(readers.outside(events, ()))
    for event in ("open /etc/hostname", "subprocess.Popen", "exec /tmp/x.py"):
        assert event in seen


def test_the_good_file_is_read(tmp_path):
    """Or the cases of one file would be refused for another reason."""
    from corpus import GOOD

    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert Shards(tmp_path).read("a").tolist() == [[0.0] * 3] * 2
