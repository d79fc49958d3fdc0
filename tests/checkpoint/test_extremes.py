"""Extreme values in every field of every config (see extremes.py), in a process of their own."""

import json
import os
import subprocess
import sys

import extremes
import pytest

from rehead.attention import variants
from rehead.checkpoint import families


def run(one_of, place):
    """How many configs were read, and what was wrong with them."""
    done = subprocess.run(
        [sys.executable, extremes.__file__, str(one_of)],
        capture_output=True,
        text=True,
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    last = place / "input"
    assert done.returncode == 0, (done.stderr[-2000:], last.exists() and last.read_text()[:2000])
    found = json.loads(done.stdout)
    return found["inputs"], found["wrong"]


@pytest.mark.process
@pytest.mark.timeout(300)
def test_an_extreme_value_is_read_or_refused(tmp_path):
    inputs, wrong = run(83, tmp_path)
    assert inputs > 200
    assert wrong == {}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_every_extreme_value_is_read_or_refused(tmp_path):
    inputs, wrong = run(1, tmp_path)
    assert inputs > 18_000
    assert wrong == {}


@pytest.mark.filterwarnings("ignore")
def test_every_family_and_variant_is_there():
    tables = dict(extremes.tables())
    assert tables.keys() >= set(families)
    named = {layer["variant"] for table in tables.values() for layer in table.get("attention", [])}
    assert {variants[name] for name in named} == {variants[name] for name in variants}
    for name in ("num_hidden_layers", "head_dim", "sliding_window", "rope_theta", "attention_bias"):
        assert name in tables["qwen3"]


def test_a_path_is_put_in_place():
    assert extremes.put({"a": [{"b": 1}], "c": 2}, ("a", 0, "b"), "1e400") == '{"a": [{"b": 1e400}], "c": 2}'
    assert list(extremes.places({"a": [{"b": 1}, 2], "c": {}})) == [("a",), ("a", 0), ("a", 0, "b"), ("c",)]
