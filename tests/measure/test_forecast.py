"""What work will take is known before it begins, and refused where it does not fit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rehead
from rehead import tokenizer
from rehead.config import ExpertsConfig, ModelOptions, RNNConfig, TrainerOptions, encode
from rehead.measure import evaluate_text
from rehead.measure.attention_maps import attention_maps
from rehead.measure.forecast import (
    MASK_BYTES,
    batch_of,
    forward_bytes,
    generation_bytes,
    loss_bytes,
    map_bytes,
    step_bytes,
)
from rehead.measure.size import cache_bytes, parameters
from rehead.measure.training import step_memory
from rehead.model import build, skeleton
from rehead.training.objective import Objective
from typed_lines import typed

pytestmark = pytest.mark.process
WITHIN = 2.0
"""Factor by which an estimate may differ from what a process takes."""
LLAMA = ModelOptions(n_layer=2, n_embd=512, n_query_head=8, n_kv_head=2, shape="llama")
MEASURE = """
import json, sys
import numpy, torch
from dataclasses import replace
from rehead.config import ExpertsConfig, ModelOptions
from rehead.data import evaluation_blocks
from rehead.measure import evaluate
from rehead.model import build

options, vocab, batch, length, dtype = json.loads(sys.argv[1])
experts = options.pop("experts", None)
config = ModelOptions(**options).resolve(vocab, length)
if experts:
    config = replace(config, experts=ExpertsConfig(**experts | {"layers": (0, 1)}))
model = build(config).to(getattr(torch, dtype))

def read(rows, size):
    ids = numpy.zeros(rows * size + 1, dtype=int)
    evaluate(model, evaluation_blocks(ids, size, rows))

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

read(1, 64)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
before = status("VmRSS")
read(batch, length)
print(status("VmHWM") - before)
"""
MANY = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
CASES = {
    "activations": ({"n_layer": 2, "n_embd": 512, "n_query_head": 8, "shape": "llama"}, 900, 2, 2048, "float32"),
    "logits": ({"n_layer": 1, "n_embd": 64, "n_query_head": 2, "n_kv_head": 1}, 60_000, 1, 1024, "bfloat16"),
    "a learned score": ({"n_layer": 2, "n_embd": 64, "n_query_head": 4, "score": "additive"}, 90, 1, 600, "float32"),
}  # fmt: skip
LLAMA_OF_512 = {"n_layer": 2, "n_embd": 512, "n_query_head": 4, "shape": "llama"}
CASES |= {
    "experts": (LLAMA_OF_512 | {"experts": MANY}, 90, 2, 2048, "float32"),
    "shared experts": (LLAMA_OF_512 | {"experts": MANY | {"n_shared_experts": 8}}, 90, 2, 2048, "float32"),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("case", CASES)
def test_a_process_takes_what_was_forecast(case):
    options, vocab, batch, length, dtype = CASES[case]
    experts = options.get("experts")
    plain = ModelOptions(**{name: value for name, value in options.items() if name != "experts"})
    config, kind = plain.resolve(vocab, length), getattr(torch, dtype)
    if experts is not None:
        config = replace(config, experts=ExpertsConfig(**experts | {"layers": (0, 1)}))
    forecast = forward_bytes(config, batch, length, kind) + loss_bytes(config, batch * length, kind)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(CASES[case])], capture_output=True, text=True, timeout=100
    )
    taken = int(done.stdout)
    assert taken > 50e6
    assert forecast / WITHIN < taken < forecast * WITHIN


@pytest.fixture
def llama(tmp_path):
    """A folder of a model that says it reads 100,000 tokens, and a text for it."""
    torch.set_default_dtype(torch.float32)
    words = tokenizer.train("byte", "ab")
    model = build(LLAMA.resolve(words.vocab_size, 100_000))
    rehead.save(model, tmp_path / "llama", files={"tokenizer.json": words.to_json()})
    (tmp_path / "text.txt").write_text("to be or not " * 9000)
    return tmp_path


def limited(place, gigabytes, *lines):
    """Run rehead with so much address space: exit status and the last line of stderr, for each line."""
    before = ["bash", "-c", f'ulimit -v {int(gigabytes * 1e6)}; exec "$@"', "bash"]
    results = typed(*lines, cwd=place, before=before, OMP_NUM_THREADS="2")  # each thread takes addresses
    return [(status, (err.splitlines() or [""])[-1]) for status, _, err in results]


TOO_LARGE = {
    "eval llama --data text.txt --length 100000": "reading 1 x 100,000 tokens at once needs about",
    "eval llama --data text.txt --batch-size 40": "Use a smaller --batch-size or --length.",
    f"inspect llama --length 50000 --text {'a' * 26000}": "a text of 26,000 tokens",
    "bench llama --prompt-lengths 90000": "with prompts of 90,000 tokens needs about",
    "generate llama --prompt a --samples 300 --max-new-tokens 9000": "300 texts of 1 tokens and 9,000 new ones",
    "convert llama new --to mla --kv-fraction 0.5 --method svd --length 90000": "Use a smaller --length.",
    "train data.path=text.txt data.block_size=9000 trainer.batch_size=64": "a step of 64 x 9,000 tokens",
    "train data.path=text.txt model.n_embd=9600": "Use a smaller model.n_embd or model.n_layer.",
}


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_flag(llama):
    for (status, line), says in zip(limited(llama, 3, *TOO_LARGE), TOO_LARGE.values(), strict=True):
        assert status == 5, line
        for part in (says, " needs about ", "B (", "B are free. Use "):
            assert part in line


def test_a_model_that_does_not_fit_is_not_loaded(llama):
    """Its file is sparse: 3.7 GB that nobody reads."""
    config = ModelOptions(n_layer=1, n_embd=8736, n_query_head=2).resolve(30, 8)
    entries, end = {}, 0
    for name, weight in skeleton(config).named_parameters():
        start, end = end, end + 4 * weight.numel()
        entries[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [start, end]}
    assert end == 4 * parameters(config) > 3e9
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    (llama / "large").mkdir()
    (llama / "large" / "config.json").write_text(json.dumps({"format": "rehead-1", **encode(config)}))
    with (llama / "large" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    for words in ("generate large --prompt a", "generate large --prompt a --dtype bf16"):
        [(status, line)] = limited(llama, 1.9 if "bf16" in words else 3.2, words)
        assert status == 5, line
        assert "loading large" in line
        assert "are free. Free some memory" in line
        assert ("or use --dtype bf16." in line) == ("bf16" not in words)


def test_batches_follow_the_memory():
    config = LLAMA.resolve(32_000, 100_000)
    sizes = {free: batch_of(config, 1024, torch.float32, free)[0] for free in (2**24, 2**29, 2**30, 2**40)}
    assert sizes[2**24] == 1
    assert 1 <= sizes[2**29] <= sizes[2**30] <= sizes[2**40] <= 8
    assert batch_of(config, 128, torch.float32, 2**40)[0] <= 32
    large = ModelOptions(n_layer=16, n_embd=2048, n_query_head=32).resolve(32_000, 4096)
    assert [batch_of(large, length, torch.bfloat16, 2**40)[0] for length in (64, 512, 2048)] == [32, 4, 1]
    given, parts = batch_of(config, 100, torch.float32, 2**24, 7)
    assert given == 7
    assert parts["activations"] == forward_bytes(config, 7, 100, torch.float32)


def test_the_parts_of_generation():
    config = LLAMA.resolve(32_000, 1000)
    parts = generation_bytes(config, 3, 50, 20, torch.float32)
    assert parts["cache"] == cache_bytes(config, 70, 3)
    assert parts["activations"] == forward_bytes(config, 3, 50, torch.float32)
    again = generation_bytes(config, 3, 50, 20, torch.float32, use_cache=False)
    assert (again["cache"], again["activations"]) == (0, forward_bytes(config, 3, 70, torch.float32))
    assert generation_bytes(config, 1, 50, 2000, torch.float32)["cache"] == cache_bytes(config, 1000, 1)


def test_maps_and_training_are_counted(llama):
    """Against the tensors themselves: the maps of all layers, and what a forward pass keeps."""
    torch.set_default_dtype(torch.float32)
    config = LLAMA.resolve(50, 64)
    maps = attention_maps(build(config), torch.arange(40))
    assert sum(each.nbytes for each in maps) < map_bytes(config, 40) < 3 * sum(each.nbytes for each in maps)
    plain = LLAMA.resolve(50, 256)
    few = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    for config in (plain, replace(plain, experts=ExpertsConfig(**few, layers=(0, 1)))):
        model = build(config)
        optimizer = torch.optim.AdamW(model.parameters())
        objective = Objective(model, TrainerOptions())
        kept = step_memory(model, objective, optimizer, torch.randint(50, (4, 257)))["activations"]
        assert step_bytes(config, 4, 256) / WITHIN < kept < step_bytes(config, 4, 256) * WITHIN


def test_an_rnn_needs_memory_too():
    config = RNNConfig(vocab_size=19, block_size=16, n_embd=5, n_layer=2, n_hidden=7, n_output=19)
    assert forward_bytes(config, 3, 10, torch.float32) > 3 * 10 * 7 * 4
    assert evaluate_text(build(config), [1, 2, 3]).tokens == 2


def test_a_full_context_is_read_again():
    config = LLAMA.resolve(32_000, 1000)
    parts = generation_bytes(config, 3, 50, 2000, torch.float32)
    assert parts["activations"] == forward_bytes(config, 3, 501, torch.float32)


def test_equal_prompts_are_read_once():
    config = LLAMA.resolve(32_000, 1000)
    once = generation_bytes(config, 100, 50, 20, torch.float32, n_distinct=1)
    assert once["activations"] == forward_bytes(config, 1, 50, torch.float32)
    assert once["cache"] == cache_bytes(config, 70, 100)
    again = generation_bytes(config, 100, 50, 2000, torch.float32, n_distinct=1)
    assert again["activations"] == forward_bytes(config, 100, 501, torch.float32)
    without = generation_bytes(config, 100, 50, 20, torch.float32, use_cache=False, n_distinct=1)
    assert without["activations"] == forward_bytes(config, 100, 70, torch.float32)


def test_the_numbers_that_drop_attention_weights_are_counted():
    torch.set_default_dtype(torch.float32)
    config = ModelOptions(n_layer=2, n_embd=64, n_query_head=4).resolve(50, 1024)
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters())
    objective = Objective(model, TrainerOptions())
    kept = step_memory(model, objective, optimizer, torch.randint(50, (2, 1025)))["activations"]
    assert (
        step_bytes(config, 2, 1024, draws=True) / WITHIN
        < kept
        < step_bytes(config, 2, 1024, draws=True) * WITHIN
    )
    assert kept > step_bytes(config, 2, 1024) * WITHIN  # what is tested can be told


def test_prompts_of_different_lengths_have_a_mask():
    """Of the distinct ones where a cache is read once; of all, and as long as they become, where it is read again."""
    config = ModelOptions(n_layer=2, n_embd=24).resolve(29, 100)
    plain = generation_bytes(config, 6, 40, 5, torch.float32, n_distinct=2)
    ragged = generation_bytes(config, 6, 40, 5, torch.float32, n_distinct=2, ragged=True)
    assert ragged == plain | {"mask": MASK_BYTES * 2 * 40**2}
    whole = generation_bytes(config, 6, 40, 5, torch.float32, use_cache=False, ragged=True)
    assert whole["mask"] == MASK_BYTES * 6 * 45**2
    full = generation_bytes(config, 6, 40, 500, torch.float32, n_distinct=2, ragged=True)
    assert full["mask"] == MASK_BYTES * 6 * 100**2
    assert (
        full["activations"] > generation_bytes(config, 6, 40, 500, torch.float32, n_distinct=2)["activations"]
    )
    rnn = RNNConfig(vocab_size=29, block_size=100, n_embd=5, n_layer=1, n_hidden=7, n_output=7)
    assert "mask" not in generation_bytes(rnn, 6, 40, 5, torch.float32, ragged=True)
