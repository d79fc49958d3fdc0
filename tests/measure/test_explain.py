"""What is said of a model's ways is what it does: every line is held against the kernels that really run."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from rehead import decoding
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, kernels
from rehead.attention.grouped import GroupedAttention
from rehead.attention.kernels import compiled, continued, flash, windowed
from rehead.attention.kernels.definition import Reference
from rehead.config import GPTConfig, RNNConfig
from rehead.decoding import graph_engine
from rehead.decoding.native_engine import MOST_SEQUENCES
from rehead.decoding.native_program import NativeProgram
from rehead.measure.explain import _why_not_faster, explain, explain_all, ranges
from rehead.model import GPT, build
from rehead.model.layers import Block

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, rope=RopeConfig())
MLA = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=7)
LENGTH = 150


def made(*attention):
    config = GPTConfig(
        vocab_size=23, block_size=LENGTH, n_embd=13, attention=attention, learned_positions=False, norm="rmsnorm",
        norm_eps=1e-5, mlp="gelu", n_hidden=17, mlp_bias=True,
    )  # fmt: skip
    return build(config).eval()


KINDS = {
    "mha": replace(GQA, n_kv_head=6),
    "gqa": GQA,
    "mqa": replace(GQA, n_kv_head=1),
    "window": replace(GQA, window=20),
    "dropout": replace(GQA, attn_pdrop=0.2),
    "window, dropout": replace(GQA, window=20, attn_pdrop=0.2),
    "additive": replace(GQA, score="additive"),
    "mla": replace(MLA, kv_lora_rank=40),
    "mla, dropout": replace(MLA, attn_pdrop=0.2),
    "mla, rebuilt": replace(MLA, qk_rope_head_dim=0, rope=RopeConfig()),
}
WORDS = {kernel.name: kernel.words for kernel in kernels.ROSTER}


@pytest.fixture
def ran(monkeypatch):
    """The kernels that run, in order; thresholds low enough for small tests."""
    monkeypatch.setattr(compiled, "LONGEST", 90)
    for module in (continued, windowed):
        monkeypatch.setattr(module, "LONG", 60)
    names = []

    def watch(kind):
        run = kind.run
        monkeypatch.setattr(kind, "run", lambda self, call: names.append(self.name) or run(self, call))

    for one in kernels.ROSTER:
        watch(type(one))
    return names


def words_for(lines, what, n_token):
    """What is said of a text of so many tokens."""
    (line,) = (line for line in lines if f", {what}: " in line)
    for part in line.split(f", {what}: ")[1].split("; "):
        first, last, words = re.fullmatch(r"(\d+)(?: to (\d+))? tokens?: (.*)", part).groups()
        if int(first) <= n_token <= int(last or first):
            return words
    raise AssertionError(f"nothing is said of {n_token} tokens: {line}")


CASES = [(kind, torch.float32, threads) for kind in KINDS for threads in (1, 3)]
CASES += [
    (kind, dtype, 1) for kind in ("mqa", "window, dropout") for dtype in (torch.bfloat16, torch.float64)
]


@pytest.mark.parametrize(("kind", "dtype", "threads"), CASES)
def test_what_is_said_is_what_runs(ran, kind, dtype, threads):
    torch.set_num_threads(threads)
    model = made(KINDS[kind]).to(dtype)
    for batch_size, lengths in ((1, (1, 5, 8, 31, 33, 65, LENGTH)), (3, (5, 91))):
        lines = explain(model, batch_size)
        for n_token in lengths:
            ids = torch.zeros(batch_size, n_token, dtype=torch.long)
            ran.clear()
            with torch.inference_mode():
                model(ids, cache=model.new_cache(batch_size))
            words = words_for(lines, "prompts", n_token)
            if (
                "half absorbed" in words
            ):  # which sums latents by weights of the reference, and calls no kernel
                assert not ran
            else:
                assert WORDS[ran[0]] in words
            ran.clear()
            model.train()(ids)
            model.eval()
            words = words_for(lines, "training", n_token)
            assert WORDS[ran[0]] in words
            assert ("expanded" in words) == ("mla" in kind)


def test_a_lie_is_caught(ran, monkeypatch):
    """As the page once said of one sequence of MQA: C++, where there was less work than threads."""
    torch.set_num_threads(3)
    monkeypatch.setattr(kernels, "choose", lambda _: kernels.Choice(compiled.Compiled(), {}))
    model = made(KINDS["mqa"]).float()
    words = words_for(explain(model), "prompts", 9)
    monkeypatch.undo()
    assert model.layers[0].self_attn.choice(9, 0).kernel.words not in words


SAID = [
    (GQA, "folded into the rows", "SDPA (no C++ attention kernel: not in float32, bfloat16 or float16)"),
    (replace(GQA, window=300), "folded", "SDPA (no C++ attention kernel"),
    (
        replace(GQA, rope=None, score="additive"),
        "slow, a learned score",
        "1 to 150 tokens: the reference kernel (slow, O(L^2) memory) (no other kernel: a learned score)",
    ),
    (replace(MLA, kv_lora_rank=8), "absorbed, as any number", "absorbed, SDPA"),
    (replace(MLA, kv_lora_rank=40), "absorbed, as up to 10 new tokens", "11 to 150 tokens: expanded, SDPA"),
    (
        replace(MLA, qk_rope_head_dim=0, rope=RopeConfig()),
        "rebuilt from all latents",
        "memory) (no other kernel: keys are rebuilt, latents summed)",
    ),
    (
        replace(MLA, n_kv_head=1, kv_lora_rank=200, v_head_dim=1, qk_nope_head_dim=1),
        "1 KV heads cost less",
        "expanded, query heads folded into rows",
    ),
]


@pytest.mark.parametrize(("config", "one", "many"), SAID)
def test_what_is_said(config, one, many):
    model = made(config, config, GQA)
    lines = explain(model)
    assert "float64" in lines[0]  # no kernel for it
    assert one in lines[1]
    assert many in lines[2]
    assert lines[1].startswith(("layers 0, 1", "layers 0, 1, 2"))
    assert ", training: 1 to " in lines[3]
    model.float()
    assert ("C++ decoder, on 1 thread" in explain(model)[0]) == (decoding.native_refusal(model) is None)


def test_a_batch_that_is_too_large_is_decoded_in_pytorch(monkeypatch):
    """As decode.cpp is called or not."""
    model = made(GQA).float()
    if decoding.native_refusal(model) is not None:
        pytest.skip("no compiler")
    calls = []
    run = NativeProgram.__call__
    monkeypatch.setattr(NativeProgram, "__call__", lambda self, *given: calls.append(1) or run(self, *given))
    for batch_size in (1, MOST_SEQUENCES, MOST_SEQUENCES + 1):
        calls.clear()
        decoding.decoder(model)(torch.zeros(batch_size, dtype=torch.long), model.new_cache(batch_size, 2))
        assert ("into the C++ decoder" in explain(model, batch_size)[0]) == bool(calls)
    assert explain(model, 17)[0].endswith("(no C++ decoder: 17 sequences, more than 16)")


def test_gaps_in_a_cache_are_decoded_in_pytorch(monkeypatch):
    """As decode.cpp is called or not: the second sequence begins at 0, the first at 2, without what was before."""
    model = made(GQA).float()
    if decoding.native_refusal(model) is not None:
        pytest.skip("no compiler")
    calls = []
    run = NativeProgram.__call__
    monkeypatch.setattr(NativeProgram, "__call__", lambda self, *given: calls.append(1) or run(self, *given))
    for first, in_cpp in ((0, True), (2, False)):
        calls.clear()
        cache = model.new_cache(2, 9)
        with torch.no_grad():
            model(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[first], [0]]) + torch.arange(3), cache)
            decoding.decoder(model)(torch.zeros(2, dtype=torch.long), cache)
        assert bool(calls) == in_cpp
    said = explain(model, 2)[0]
    assert re.search(
        r"into the C\+\+ decoder, on \d+ threads?; PyTorch where the positions of a cache have gaps$", said
    )
    assert "gaps" not in explain(model, MOST_SEQUENCES + 1)[0]  # PyTorch anyway


def test_what_only_some_batch_sizes_do_names_them(monkeypatch):
    monkeypatch.setattr("rehead.measure.explain.native_refusal", lambda _: None)  # without a compiler, too
    model = made(GQA).float()
    lines = explain_all(model, (1, 8, 32))
    assert [line.split(" decoding: ")[0] for line in lines[:2]] == ["batch 1, 8:", "batch 32:"]
    assert lines[2] == explain(model)[1]
    assert explain_all(model, (32,)) == explain(model, 32)


def test_every_reason_against_the_others_of_the_reference_kernel_is_given():
    several = kernels.Choice(
        Reference(), {"folded": "many queries", "C++": "too wide", "SDPA": "many queries"}
    )
    assert _why_not_faster(several) == " (no folded or SDPA: many queries, no C++: too wide)"


class Changed(Block):
    """A layer whose author forgot `lower`."""


class Doubling(nn.Dropout):
    """Another dropout."""


def other_layer(model):
    model.layers[1].__class__ = Changed


def other_dropout(model):
    model.layers[1].resid_dropout = Doubling()


def other_method(model):
    model.layers[1]._add = lambda x, update: x + update


def other_model(model):
    model.__class__ = type("MyGPT", (GPT,), {})


def other_attention(model):
    model.layers[1].self_attn.__class__ = type("MyGQA", (GroupedAttention,), {})


ONLY = "that only its forward describes, since"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_layer, f"it has a Changed {ONLY} Changed does not repeat `lower = Block.lower`"),
        (other_dropout, f"its layers.1.resid_dropout is {__name__}.Doubling instead of rehead's Dropout"),
        (other_method, f"it has a Block {ONLY} its _add is replaced"),
        (other_model, f"it is a MyGPT {ONLY} MyGPT does not repeat `lower = GPT.lower`"),
        (other_attention, f"it has a MyGQA {ONLY} MyGQA does not repeat `lower = GroupedAttention.lower`"),
    ],
)
def test_what_is_not_lowered_is_named(change, why):
    model = made(GQA, GQA).float()
    change(model)
    assert explain(model)[0] == f"decoding: PyTorch, one operation after another (no C++ decoder: {why})"


def test_a_network_without_attention():
    rnn = build(RNNConfig(vocab_size=9, block_size=9, n_embd=5, n_layer=1, n_hidden=9, n_output=9))
    assert len(explain(rnn.to(torch.float32))) == 1


def test_nothing_is_computed_or_changed():
    """A context of a million tokens is explained at once, and every mode is as it was."""
    model = made(replace(GQA, window=1000), KINDS["dropout"]).float()
    model.config = replace(model.config, block_size=2**20)
    model.train()
    model.layers[0].eval()
    before = [part.training for part in model.modules()]
    assert f"to {2**20} tokens" in explain(model)[2]
    assert [part.training for part in model.modules()] == before


@pytest.mark.parametrize("edges", [[], [1], [2, 3, 17], [5, 50, 99], [99]])
def test_ranges_are_where_the_way_changes(edges):
    def way(n):
        return kernels.Choice(kernels.ROSTER[sum(n > edge for edge in edges)], {})

    stretches = [(first, last) for first, last, _ in ranges(way, 100)]
    starts = [1, *(edge + 1 for edge in edges)]
    assert stretches == list(zip(starts, [*edges, 100], strict=True))


def test_a_gpu_has_ways_of_its_own(monkeypatch, switch):
    """As if this CPU were one."""
    switch("gpu")
    for room in (graph_engine, flash):
        monkeypatch.setattr(room, "DEVICE", "cpu")
    monkeypatch.setattr(flash, "trusted", lambda *_: True)
    monkeypatch.setattr(windowed, "LONG", 60)
    model = made(replace(GQA, window=40), replace(GQA, window=40)).bfloat16()
    monkeypatch.setattr("rehead.measure.explain.native_refusal", lambda model: "the model is on cuda")
    monkeypatch.setattr(compiled.Compiled, "limit", lambda *_: "not on a CPU")
    lines = explain(model)
    gaps = "; PyTorch where the positions of a cache have gaps"
    assert lines[0] == f"decoding: CUDA graphs, one per length bucket{gaps}"
    assert "80 to 150 tokens: windowed flash attention (no C++ attention kernel: not on a CPU)" in lines[2]
    hook = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "(no CUDA graphs: it has forward hooks" in explain(model)[0]
    hook.remove()


def test_without_compiled_code_it_says_so(switch):
    switch("0")
    assert "(no C++ attention kernel: compiled code is switched off)" in explain(made(GQA).float())[2]
