"""The benchmark times what it says: real prefill and decoding, with a cache and surely without."""

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import rehead
from rehead.cli import main
from rehead.config import ModelOptions, RNNConfig
from rehead.errors import ResourceError, UsageError
from rehead.measure import bench as module
from rehead.measure import cache_bytes, parameters, roofline
from rehead.measure.bench import Arm, Case, Times, bench
from rehead.measure.roofline import Roofline, matmul_rate, read_rate
from rehead.model import build
from rehead.report.bench import present

CPU = torch.device("cpu")
OPTIONS = ModelOptions(n_layer=2, n_query_head=6, n_kv_head=2, n_embd=36)
RNN = RNNConfig(vocab_size=19, block_size=16, n_embd=5, n_layer=2, n_hidden=7, n_output=19)


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 kB and 5 MFLOP per second."""
    monkeypatch.setattr(module, "read_rate", lambda n_bytes, device: 8e3)
    monkeypatch.setattr(module, "matmul_rate", lambda dtype, device: 5e6)


def gpt(**flags):
    return build(OPTIONS.resolve(19, 16)).eval()


@pytest.mark.parametrize("model", [gpt(), build(RNN)], ids=["gpt", "rnn"])
def test_the_uncached_arm_is_uncached(model, machine):
    case = bench(model, prompt_length=5, batch_size=3, new_tokens=4, rounds=3)
    assert case.cached.forwarded == 5 + 3
    assert case.uncached.forwarded == 5 + 6 + 7 + 8
    assert case.same_tokens
    dtype = model.head.weight.dtype
    assert case.cache_bytes_predicted == case.cache_bytes_held == cache_bytes(model.config, 9, 3, dtype)
    held = parameters(model.config) * dtype.itemsize + case.cache_bytes_held
    assert held < case.peak_bytes < held + 3 * 5 * 5000 * dtype.itemsize
    assert "hidden" not in vars(model)


def test_what_is_timed_decodes_as_generation_does(machine, monkeypatch):
    """No hook slows it down, and with a cache only the prompt goes through the whole model."""
    watched, whole = [], []
    real = module.stream

    def stream(model, *given, **named):
        watched.append(any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()))
        tokens = real(model, *given, **named)
        yield next(tokens)
        hidden = model.hidden
        model.hidden = lambda ids, *more, **named: whole.append(ids.shape[1]) or hidden(ids, *more, **named)
        yield from tokens
        model.hidden = hidden

    monkeypatch.setattr(module, "stream", stream)
    bench(gpt(), prompt_length=5, new_tokens=4, rounds=1)
    assert watched == [False] * len(watched)
    assert whole == [6, 6, 7, 8]  # the short uncached run, and the timed one


def test_both_arms_take_turns_and_each_round_measures_the_machine(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "read_rate", lambda n_bytes, device: calls.append("read") or 1.0)
    monkeypatch.setattr(module, "matmul_rate", lambda dtype, device: calls.append("matmul") or 1.0)
    real = module._generate
    monkeypatch.setattr(
        module, "_generate", lambda *given: (calls.append("cached" if given[3] else "uncached"), real(*given))
    )
    bench(gpt(), 3, new_tokens=2, rounds=3)
    one = ["read", "matmul", "cached", "uncached"]
    other = ["read", "matmul", "uncached", "cached"]
    assert calls == ["cached", "uncached", *one, *other, *one]


def test_times_and_shares_from_a_clock_of_our_own(machine, monkeypatch):
    """The clock is read at the start, after the first token and at the end of each generation."""
    ticks = map(float, [0, 1, 2] * 2 + [10, 12, 15] + [20, 24, 30] + [40, 41, 46] + [50, 56, 58])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    model = gpt()
    case = bench(model, prompt_length=5, batch_size=2, new_tokens=3, rounds=2)  # A B, then B A
    assert case.cached.prefill == Times(median=4.0, least=2.0, most=6.0)
    assert case.cached.decode == Times(median=1.25, least=1.0, most=1.5)
    assert case.uncached.prefill == Times(median=2.5, least=1.0, most=4.0)
    assert case.cached.tokens_per_second == pytest.approx(2 * 3 / ((2 + 3 + 6 + 2) / 2))
    steps = [module.decode_bytes(model.config, 7, 2, torch.float64) / 8e3, 2 * 1.0]
    assert steps[0] > 2 * module.decode_flops(model.config, 7) / 5e6
    assert case.decode_share.most == pytest.approx(steps[0] / 1)
    assert case.decode_share.least == pytest.approx(steps[0] / 1.5)
    reads = module.decode_bytes(model.config, 0, dtype=torch.float64) / 8e3
    assert case.prefill_share.most == pytest.approx(reads / 2)


def test_shares_of_what_only_computes(monkeypatch):
    monkeypatch.setattr(module, "read_rate", lambda n_bytes, device: 1e30)
    monkeypatch.setattr(module, "matmul_rate", lambda dtype, device: 1e3)
    model = gpt()
    case = bench(model, prompt_length=5, batch_size=3, new_tokens=4, rounds=1)
    prefill = 3 * module.prompt_flops(model.config, 5) / 1e3
    decode = 3 * module.decode_flops(model.config, 7) / 1e3
    assert case.prefill_share.median == pytest.approx(prefill / case.cached.prefill.median)
    assert case.decode_share.median == pytest.approx(decode / case.cached.decode.median)


def test_what_is_no_measurement():
    model = gpt()
    for words, sizes in {
        "prompt_length=0. Use 1": {"prompt_length": 0},
        "batch_size=0": {"prompt_length": 3, "batch_size": 0},
        "new_tokens=1. Use 2": {"prompt_length": 3, "new_tokens": 1},
        "rounds=0": {"prompt_length": 3, "rounds": 0},
        "prompt_length=9 and new_tokens=8 make 17 tokens, more than the model's context of 16": {
            "prompt_length": 9,
            "new_tokens": 8,
        },
    }.items():
        with pytest.raises(UsageError, match=words):
            bench(model, **sizes)
    with pytest.raises(
        ResourceError, match=r"batch_size=1000000000 .* needs about .* GB .* are free. .*smaller --batch"
    ):
        bench(model, 3, 10**9, 2)


def test_the_roof_is_the_slower_of_reading_and_computing():
    roof = Roofline(read=100.0, matmul=10.0)
    assert roof.seconds(300, 20) == 3
    assert roof.seconds(100, 20) == 2


def test_rates_count_what_is_read_and_multiplied(monkeypatch):
    monkeypatch.setattr(roofline, "_rate", lambda work, device: (work(), 3.0)[1])
    assert read_rate(4000, CPU) == 12_000
    assert matmul_rate(torch.float32, CPU) == 3 * 2 * 1024**3


def test_a_rate_is_calls_over_time(monkeypatch):
    clock = count()
    now = SimpleNamespace(seconds=0.0)

    def work():
        next(clock)
        now.seconds += 0.004

    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now.seconds)
    assert roofline._rate(work, CPU) == pytest.approx(250)
    assert next(clock) == 1 + 1 + 2 + 4 + 8  # doubled until 20 ms are full


def test_the_tables(monkeypatch, capsys):
    arm = Arm(
        prefill=Times.of([0.002, 2.5, 0.001]),
        decode=Times.of([0.0005]),
        tokens_per_second=1500.0,
        forwarded=40,
    )
    slow = Arm(prefill=Times.of([0.002]), decode=Times.of([0.01]), tokens_per_second=1.234, forwarded=900)
    case = Case(
        prompt_length=8,
        batch_size=2,
        new_tokens=32,
        cached=arm,
        uncached=slow,
        same_tokens=False,
        cache_bytes_predicted=46_080,
        cache_bytes_held=46_080,
        peak_bytes=1_400_000,
        read_bytes=1_300_000,
        roofline=Roofline(read=30e9, matmul=200e9),
        prefill_share=Times.of([0.25]),
        decode_share=Times.of([0.5]),
    )
    monkeypatch.setenv("COLUMNS", "160")
    present("out/x", [case])
    out = capsys.readouterr().out
    assert "8 2 2 (1-2,500) 25 % 0.5 (0.5-0.5) 50 % 1,500 1.23 1215.6 40 900" in " ".join(out.split())
    assert "8 2 0.046 0.046 1.4 30.0 1.3 200" in " ".join(out.split())
    assert "the tokens differ" in out


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with `model`, which is timed for an instant."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(roofline, "SAMPLE", 1e-4)
    monkeypatch.setitem(roofline.SIDE, "cpu", 32)
    monkeypatch.chdir(tmp_path)
    rehead.save(gpt(), "model")


def test_an_empty_list_of_batches_is_the_default(saved, capsys):
    sizes = ["--prompt-lengths", "3", "--rounds", "1", "--new-tokens", "2"]
    assert main(["bench", "model", *sizes, "--batch", "[]", "--json"]) == 0
    assert [case["batch_size"] for case in json.loads(capsys.readouterr().out)["cases"]] == [1]


def test_the_command(saved, capsys):
    sizes = ["--prompt-lengths", "3", "5", "--batch", "2", "1", "--rounds", "1"]
    assert main(["bench", "model", *sizes, "--new-tokens", "4", "--dtype", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16"
    assert [(case["prompt_length"], case["batch_size"]) for case in found["cases"]] == [
        (3, 2),
        (5, 2),
        (3, 1),
        (5, 1),
    ]
    assert main(["bench", "model", "--rounds", "1"]) == 0
    printed = capsys.readouterr()
    assert "model on cpu in float32, length 16: 8 new tokens" in printed.out
    assert printed.err == ""


def test_the_explanation_is_printed_before_anything_is_timed(saved, monkeypatch, capsys):
    printed = []

    def watched(*given):
        printed.append(capsys.readouterr().out)
        return bench(*given)

    monkeypatch.setattr(module, "bench", watched)
    monkeypatch.setattr("rehead.measure.explain.native_refusal", lambda _: None)  # without a compiler, too
    words = [
        "bench",
        "model",
        "--prompt-lengths",
        "3",
        "--new-tokens",
        "2",
        "--rounds",
        "1",
        "--batch",
        "1",
        "32",
    ]
    assert main([*words, "--explain"]) == 0
    lines = printed[0].splitlines()
    assert lines[0].startswith("batch 1: decoding: ")
    assert lines[1].startswith("batch 32: decoding: PyTorch, one operation after another (no C++ decoder: ")
    assert "decoding: " not in capsys.readouterr().out
    printed.clear()
    assert main([*words, "--explain", "--json"]) == 0
    assert printed == ["", ""]
    assert json.loads(capsys.readouterr().out)["explain"] == lines


def test_a_size_is_refused_before_anything_is_explained_or_timed(saved, monkeypatch, capsys):
    for batch in ("0", "-1", str(10**18)):
        assert main(["bench", "model", "--explain", "--batch", "1", batch, "--prompt-lengths", "3"]) in (2, 5)
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"batch_size={batch}" in printed.err
