"""Files and command lines with random faults (see fuzz.py and damage.py), in other processes."""

import json
import os
import subprocess
import sys
import time

import fuzz
import pytest
from families_corpus import GOOD as KINDS

from rehead.errors import InvalidInput

GROUPS = {
    "weights": {"header": 10_000, "index": 1000, "manifest": 1000},
    "configs": {"config": 1500, "config-loaded": 500, "native": 500, "native-loaded": 500},
    "families": {f"config-{kind}": 150 for kind in KINDS},
    "others": {"tokenizer": 1000, "certificate": 1000, "metrics": 1000, "yaml": 700},
    "runs": {"state": 200, "moments": 200, "metrics-resumed": 100},
    "command lines": {"argv": 1000},
}
"""Inputs of each kind for `make test-reliability`: 10,000 headers, and 11,000 others; a hundredth for `make test`."""


def run(counts, seed, place):
    """What was wrong with so many inputs of each kind."""
    words = [sys.executable, fuzz.__file__, str(seed), *(f"{kind}={count}" for kind, count in counts.items())]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    last = place / "input"
    assert done.returncode == 0, (
        done.returncode,
        done.stderr[-2000:],
        last.exists() and last.read_bytes()[:2000],
    )
    found = json.loads(done.stdout)
    assert found["inputs"] == counts
    return found["wrong"]


@pytest.mark.process
@pytest.mark.timeout(600)
def test_random_faults_end_in_one_clean_line(tmp_path):
    counts = {kind: max(2, count // 100) for kinds in GROUPS.values() for kind, count in kinds.items()}
    assert run(counts, 0, tmp_path) == {}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GROUPS)
def test_thousands_of_random_faults(group, tmp_path, nightly):
    for seed in range(1, 1 + (20 if nightly else 1)):
        assert run(GROUPS[group], seed, tmp_path) == {}


def test_every_kind_is_fuzzed():
    assert {kind for counts in GROUPS.values() for kind in counts} == set(fuzz.FUZZED)


def busy(seconds):
    """Take the processor for so long."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (lambda folder: None, ""),
        (lambda folder: [].pop(), "IndexError"),
        (lambda folder: (_ for _ in ()).throw(InvalidInput("two\nlines")), "InvalidInput"),
        (lambda folder: fuzz.typed("plan", "none"), ""),
        (lambda folder: fuzz.typed("plan"), "status 2"),
        (lambda folder: bytearray(400 * 2**20).clear(), "MiB"),
        (lambda folder: busy(1.1), " s"),
        (lambda folder: sys.exit(1), "SystemExit"),
    ],
)
def test_a_reader_that_fails_is_seen(read, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 1.0)
    monkeypatch.setattr(fuzz.signal, "setitimer", lambda *given: None)
    found = fuzz.wrong(read, tmp_path)
    assert (fault in found) if fault else not found
