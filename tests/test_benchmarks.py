"""The benchmark suite: that it measures what it says, on arms whose speed is known."""

import importlib
import json
import os
import subprocess
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


def test_another_process_is_timed_by_its_own_clock(suite, clock):
    """The way there, and what this process does meanwhile, does not count."""
    harness, _ = suite

    def elsewhere(seconds):
        return lambda: (clock.sleep(1.5), seconds)[1]

    case = harness.Case(
        name="elsewhere",
        ours=harness.Arm(elsewhere(0.25), lambda: torch.ones(3), pid=os.getpid()),
        peers={"slow": harness.Arm(elsewhere(0.75), lambda: torch.ones(3), pid=os.getpid())},
    )
    record = case.measure(harness.Setting(n_round=2))
    assert record["peers"]["slow"]["median"] == pytest.approx(3)
    assert record["seconds"]["ours"] == [pytest.approx(0.25)] * 2


def test_load_counts_the_processes_it_is_told_of(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load = importlib.import_module("load")
    work = "import time\ninput()\nend = time.process_time() + 0.5\n"
    work += "while time.process_time() < end: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=-1, stdout=-1) as child:
        alone, both = load.Load(), load.Load(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        used = both._process() - alone._process()
        child.stdin.close()
    assert used >= 0.4
    sys.modules.pop("load")


TINY = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def engines(monkeypatch):
    """The group, with short texts."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("engines")
    for name, value in {"N_PROMPT": 9, "N_NEW": 8, "N_PREFILL": 24, "N_CONTEXT": 64}.items():
        monkeypatch.setattr(module, name, value)
    torch.set_default_dtype(torch.float32)
    yield module
    for stale in {"engines", "harness", "page", "load"} - before:
        sys.modules.pop(stale, None)


@pytest.mark.process
def test_engines_that_are_not_there_are_named_and_ours_is_transformers(engines, monkeypatch, tmp_path):
    """The process of rehead gives the greedy tokens of the model that wrote the folder."""
    import transformers

    monkeypatch.setattr(engines, "environment", lambda name: None)
    folder, file = engines.write(tmp_path, TINY, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.arange(9)[None] * 7
    with (
        torch.no_grad(),
        engines.engine(sys.executable, "run_rehead.py", {"model": str(folder), "threads": 1}, 1) as ours,
    ):
        found = ours.ask(prompt=prompt[0].tolist(), n_new=9)
        new = theirs.generate(prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
    assert found["tokens"] == new[0, 9:].tolist()
    assert len(set(found["tokens"])) > 2
    assert found["prefill"] > 0 < found["decode"]
    assert ours.name.startswith("rehead ")
    setting = engines.Setting(threads=1, n_round=1)
    with engines.ExitStack() as running:
        _, peers = engines.start(running, setting, folder, file, torch.float32)
    assert list(peers) == [
        "llama.cpp, cache in float32, no flash attention",
        "llama.cpp, as it comes",
        "vLLM, CPU",
    ]
    assert [why.rpartition("make ")[2] for why in peers.values()] == ["llama-cpp-env)"] * 2 + ["serving-env)"]


@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.bfloat16, 299)])
def test_an_engine_with_other_tokens_is_not_timed(engines, tmp_path, dtype, wrong):
    """In float32 the second likeliest token is wrong; in bfloat16 what is unlikely by more than rounding is."""
    folder, _ = engines.write(tmp_path, TINY, torch.float32)
    model = engines.load(folder).eval()
    ids = [7 * i % 300 for i in range(24)]
    with torch.no_grad():
        ranked = model(torch.tensor([ids]))[0, -1].argsort(descending=True).tolist()

    def one(rank):
        return engines.Engine("fake", os.getpid(), lambda **job: {"tokens": [ranked[rank]], "prefill": 1.0})

    arms = engines.Arms(model, dtype, ids)
    good, bad = (arms.arm(one(rank), "prefill", 24, 1) for rank in (0, wrong))
    case = engines.Case(name="c", ours=good, peers={"right": good}, dtype=dtype, tolerance=engines.ROUNDING)
    assert case.measure(engines.Setting(n_round=1))["peers"]["right"]["difference"] == 0
    bad_case = engines.Case(
        name="c", ours=good, peers={"wrong": bad}, dtype=dtype, tolerance=engines.ROUNDING
    )
    with pytest.raises(AssertionError, match=r"other greedy tokens|wrong differs by"):
        bad_case.measure(engines.Setting(n_round=1))


@pytest.mark.serving
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama-cpp", "vllm"])
def test_every_engine_computes_the_same(engines, monkeypatch, name):
    """Both formats of the weights, one round; `measure` compares the tokens."""
    place = engines.environment(name)
    if place is None:
        pytest.skip(f"no environment of {name}")
    monkeypatch.setattr(engines, "environment", lambda engine: place if engine == name else None)
    for variable, value in {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}.items():
        monkeypatch.setenv(variable, value)  # vLLM would compile for over a minute
    setting = engines.Setting(threads=1, n_round=1)
    records = [case.measure(setting) for case in engines.cases(setting, TINY)]
    assert [one["dtype"] for one in records] == ["float32"] * 2 + ["bfloat16"] * 2
    for record in records:
        there = {peer: one for peer, one in record["peers"].items() if "absent" not in one}
        assert len(there) == {"llama-cpp": 2, "vllm": 1}[name]
        assert all(one["difference"] <= engines.ROUNDING and one["median"] > 0 for one in there.values())
