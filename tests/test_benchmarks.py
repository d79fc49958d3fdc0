"""The benchmark suite: that it measures what it says, on arms whose speed is known."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


class Clock:
    """Time that passes when it is told to: a busy machine makes no difference."""

    now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def suite(monkeypatch, clock):
    """harness and page, as `python benchmarks` sees them, with a clock of their own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness
    import page

    monkeypatch.setattr(harness, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(harness, "TRIES", 1)
    monkeypatch.setattr(harness, "read", lambda setting, dtype: (lambda: clock.sleep(0.002), 2000.0))
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    yield harness, page
    for name in ("harness", "page", "load"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "__main__")
)
def test_every_benchmark_can_be_imported(name, monkeypatch):
    """Names move; a benchmark that nobody ran for a while would not notice."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == BENCHMARKS
    for stale in {name, "harness", "page", "load"} - before:
        sys.modules.pop(stale, None)


def sleeper(harness, clock, seconds, result=1.0):
    return harness.Arm(lambda: clock.sleep(seconds), lambda: torch.tensor(result))


def test_a_ratio_is_the_peers_time_over_ours(suite, clock):
    harness, page = suite
    case = harness.Case(
        name="sleeping",
        ours=sleeper(harness, clock, 0.01),
        peers={
            "slow": sleeper(harness, clock, 0.04, 1.0005),
            "fast": sleeper(harness, clock, 0.002),
            "gone": "not there",
        },
        at_least={"slow": 3, "fast": 3, "gone": 2},
        n_bytes=5000,
        of_ceiling=0.9,
    )
    record = case.measure(harness.Setting(n_round=3))
    assert record["peers"]["slow"]["median"] == pytest.approx(4)
    assert record["peers"]["slow"]["difference"] == pytest.approx(5e-4)
    assert record["peers"]["fast"]["median"] == pytest.approx(0.2)
    assert record["control"]["median"] == pytest.approx(1)
    assert record["ceiling"]["share"]["median"] == pytest.approx(0.5)  # 5000 in 10 ms beside 2000 in 2 ms
    facts = {
        "torch": "0",
        "python": "0",
        "cpu capability": "none",
        "cores": 2,
        "processor": "P",
        "cuda": "none",
    }
    run = {"group": "training", "device": "cpu", "threads": 1, "date": "today", "command": "c"}
    text = page.page([run | {"environment": facts, "cases": json.loads(json.dumps([record]))}])
    summary, _, text = text.partition("## Training")
    assert [line.split(" | ")[1] for line in summary.splitlines() if "sleeping" in line] == ["slow", "fast"]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert "sleeping (float32)" in text
    assert [line.split(" | ")[1] for line in lines[2:]] == ["slow", "fast", "gone"]
    assert lines[2].split(" | ")[4].startswith("**")
    assert lines[3].split(" | ")[4].startswith("*0.")
    assert "peer absent: not there" in lines[4]
    assert "Not measured: no GPU was available" in text


@pytest.mark.parametrize("theirs", [1.1, [1.0, 2.0], float("nan")])
def test_what_is_not_equal_is_not_timed(suite, clock, theirs):
    harness, _ = suite
    case = harness.Case(
        name="unequal",
        ours=sleeper(harness, clock, 0),
        peers={"wrong": harness.Arm(lambda: pytest.fail("timed"), lambda: torch.tensor(theirs))},
    )
    with pytest.raises(AssertionError, match="unequal: wrong differs by"):
        case.measure(harness.Setting(n_round=1))


def test_tokens_must_be_the_same(suite):
    harness, _ = suite
    assert harness.difference(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert harness.difference(torch.tensor([1, 200]), torch.tensor([1, 201])) == float("inf")


def test_growth_is_per_doubling(suite, clock):
    harness, page = suite

    def make(n):
        return lambda: (clock.sleep(n * 1e-4), torch.ones(n, n, dtype=torch.float32).sum())

    growth = harness.Growth(name="square", sizes=(100, 200, 400), make=make, at_most=2.15)
    record = growth.measure(harness.Setting(n_round=3))
    assert list(record["memory"]) == ["100 to 200", "200 to 400"]
    assert all(grown == pytest.approx(4, rel=0.01) for grown in record["memory"].values())
    assert record["time"]["200 to 400"]["median"] == pytest.approx(2)
    assert "memory x4.0" in page.row(record)


def test_a_difference_must_be_clearer_than_the_control(suite):
    harness, _ = suite
    control = {"median": 1.0, "low": 0.97, "high": 1.03}
    assert harness.clear({"median": 1.2, "low": 1.1, "high": 1.3}, control)
    assert not harness.clear({"median": 1.05, "low": 1.02, "high": 1.08}, control)
    assert not harness.clear({"median": 1.2, "low": 0.9, "high": 1.3}, control)
