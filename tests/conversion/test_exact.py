"""Conversions that promise to be exact: the same logits and the same text, on whole models."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, scores
from rehead.attention.rope_scaling import LinearScaling
from rehead.attention.score import ScaledDot
from rehead.conversion import Target, conversions
from rehead.generation import generate

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
MHA, MQA = replace(GQA, n_kv_head=6), replace(GQA, n_kv_head=1)
FULL = 18  # K (E + V)
MLA = LatentConfig(
    n_query_head=6, n_kv_head=3, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)
TIED = GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=9, tie_kv=True)
DEEPSEEK = replace(MLA, latent_norm=True, qk_rope_head_dim=6, rope=RopeConfig(), q_lora_rank=11)
INTERLEAVED = RopeConfig(layout="interleaved", theta=100.0)
SCALED = RopeConfig(theta=50.0, scaling=LinearScaling(factor=2.0))


def latent(source, rank):
    return LatentConfig(
        n_query_head=source.n_query_head,
        n_kv_head=source.n_kv_head,
        kv_lora_rank=rank,
        qk_nope_head_dim=source.head_dim,
        v_head_dim=source.v_head_dim,
        latent_norm=False,
    )


CASES = {  # source, target, the steps between
    "modular": (replace(GQA, head_map="modular"), GQA, ["head-map"]),
    "contiguous": (GQA, replace(GQA, head_map="modular"), ["head-map"]),
    "mqa to gqa": (MQA, GQA, ["repeat-heads"]),
    "gqa to mha": (GQA, MHA, ["repeat-heads"]),
    "modular gqa to mha": (replace(GQA, head_map="modular"), MHA, ["head-map", "repeat-heads"]),
    "heads of a latent": (MLA, replace(MLA, n_kv_head=6), ["repeat-heads"]),
    "gqa to mla": (GQA, latent(GQA, FULL), ["factor"]),
    "scores of another scale": (replace(GQA, score=ScaledDot(scale=0.3)), latent(GQA, FULL), ["factor"]),
    "heads normed as a whole": (
        replace(MQA, qk_norm_eps=1e-5, qk_norm_over="projection"),
        replace(GQA, qk_norm_eps=1e-5, qk_norm_over="projection"),
        ["repeat-heads"],
    ),
    "modular, normed as a whole": (
        replace(GQA, head_map="modular", qk_norm_eps=1e-5, qk_norm_over="projection"),
        replace(GQA, qk_norm_eps=1e-5, qk_norm_over="projection"),
        ["head-map"],
    ),
    "mha to mla": (MHA, latent(MHA, 23), ["factor"]),
    "modular gqa to mla": (replace(GQA, head_map="modular"), latent(GQA, FULL), ["head-map", "factor"]),
    "wider latent": (MLA, replace(MLA, kv_lora_rank=14), ["pad-rank"]),
    "a latent that is too wide": (replace(MLA, kv_lora_rank=25), replace(MLA, kv_lora_rank=23), ["narrow"]),
    "mla to gqa": (MLA, replace(GQA, n_kv_head=3), ["expand"]),
    "mla to mha": (MLA, MHA, ["repeat-heads", "expand"]),
}
NO_ROTATION = {
    "mla to reduced": (MLA, TIED, ["reduce"]),
    "gqa to reduced": (GQA, replace(TIED, head_dim=FULL, v_head_dim=FULL), ["factor", "reduce"]),
    "wider reduced": (MLA, replace(TIED, head_dim=13, v_head_dim=13), ["pad-rank", "reduce"]),
    **{
        f"{score}, heads": (replace(MQA, score=scores[score]()), replace(GQA, score=scores[score]()),
                            ["repeat-heads"])
        for score in scores
    },
    **{
        f"{score}, modular": (replace(GQA, head_map="modular", score=scores[score]()),
                              replace(GQA, score=scores[score]()), ["head-map"])
        for score in scores
    },
}  # fmt: skip
ROTATED = {
    "gqa": (replace(GQA, rope=RopeConfig()), replace(GQA, rope=RopeConfig(layout="interleaved"))),
    "gqa, normed as a whole": (
        replace(GQA, rope=RopeConfig(), qk_norm_eps=1e-5, qk_norm_over="projection"),
        replace(GQA, rope=RopeConfig(layout="interleaved"), qk_norm_eps=1e-5, qk_norm_over="projection"),
    ),
    "partial gqa": (
        replace(GQA, head_dim=9, rope=replace(SCALED, partial_rotary_factor=0.7)),
        replace(GQA, head_dim=9, rope=replace(SCALED, partial_rotary_factor=0.7, layout="interleaved")),
    ),
    "gqa back": (replace(GQA, rope=INTERLEAVED), replace(GQA, rope=RopeConfig(theta=100.0))),
    "rebuilt keys": (replace(MLA, rope=RopeConfig()), replace(MLA, rope=RopeConfig(layout="interleaved"))),
    "rebuilt keys, normed": (
        replace(MLA, qk_norm_eps=1e-5, rope=RopeConfig()),
        replace(MLA, qk_norm_eps=1e-5, rope=RopeConfig(layout="interleaved")),
    ),
    "deepseek": (DEEPSEEK, replace(DEEPSEEK, rope=RopeConfig(layout="interleaved"))),
    "deepseek back": (replace(DEEPSEEK, rope=INTERLEAVED), replace(DEEPSEEK, rope=RopeConfig(theta=100.0))),
    "no query latent": (
        replace(DEEPSEEK, q_lora_rank=None, rope=SCALED),
        replace(DEEPSEEK, q_lora_rank=None, rope=replace(SCALED, layout="interleaved")),
    ),
}
WIDER = (
    replace(DEEPSEEK, latent_norm=False),
    replace(DEEPSEEK, latent_norm=False, kv_lora_rank=12),
    ["pad-rank"],
)
STOCK = LatentConfig(
    n_query_head=6,
    kv_lora_rank=21,
    qk_nope_head_dim=7,
    qk_rope_head_dim=8,
    v_head_dim=9,
    rope=INTERLEAVED,
)
TO_STOCK = {
    "mqa with rope": (replace(MQA, rope=INTERLEAVED), STOCK, ["decouple", "pad-to-stock", "identity-norm"]),
    "half-split": (
        replace(MQA, rope=RopeConfig(theta=100.0)),
        STOCK,
        ["rope-layout", "decouple", "pad-to-stock", "identity-norm"],
    ),
    "partial rope": (
        replace(
            MQA,
            head_dim=7,
            rope=replace(INTERLEAVED, partial_rotary_factor=0.6),
            score=ScaledDot(scale=0.3),
        ),
        STOCK,
        ["decouple", "pad-to-stock", "identity-norm"],
    ),
    "no rope": (GQA, STOCK, ["factor", "repeat-heads", "pad-to-stock", "identity-norm"]),
    "no more heads": (MHA, replace(STOCK, kv_lora_rank=23), ["factor", "pad-to-stock", "identity-norm"]),
}
BIASED = {"qkv_bias": True, "o_bias": True}
STOCK_BIASES = replace(STOCK, down_bias=True, o_bias=True, q_lora_rank=24)
BESIDE = replace(DEEPSEEK, latent_norm=False, q_lora_rank=None, down_bias=True, **BIASED)
BIASES = {
    "mqa with rope": (
        replace(MQA, rope=INTERLEAVED, qkv_bias=True),
        STOCK_BIASES,
        ["decouple", "pad-to-stock", "fold-biases", "identity-norm"],
    ),
    "partial rope": (
        replace(MQA, head_dim=7, rope=replace(INTERLEAVED, partial_rotary_factor=0.6), **BIASED),
        STOCK_BIASES,
        ["decouple", "pad-to-stock", "fold-biases", "identity-norm"],
    ),
    "no rope": (
        replace(GQA, **BIASED),
        STOCK_BIASES,
        ["factor", "repeat-heads", "pad-to-stock", "fold-biases", "identity-norm"],
    ),
    "of the output alone": (
        replace(MQA, rope=INTERLEAVED, o_bias=True),
        replace(STOCK, down_bias=True, o_bias=True),
        ["decouple", "pad-to-stock", "fold-biases", "identity-norm"],
    ),
    "of the output alone, beside a query latent": (
        replace(DEEPSEEK, latent_norm=False, o_bias=True),
        replace(DEEPSEEK, down_bias=True, o_bias=True),
        ["fold-biases", "identity-norm"],
    ),
    "of a latent, shared heads": (
        BESIDE,
        replace(BESIDE, latent_norm=True, qkv_bias=False, q_lora_rank=24),
        ["fold-biases", "identity-norm"],
    ),
    "of a latent that stays": (
        replace(BESIDE, qkv_bias=False),
        replace(BESIDE, qkv_bias=False, latent_norm=True),
        ["identity-norm"],
    ),
    "of a latent that is too wide": (
        replace(BESIDE, kv_lora_rank=25),
        replace(BESIDE, kv_lora_rank=23),
        ["narrow"],
    ),
    "of a latent that is widened": (BESIDE, replace(BESIDE, kv_lora_rank=14), ["pad-rank"]),
}
HEADS = (replace(DEEPSEEK, n_kv_head=2), replace(DEEPSEEK, n_kv_head=6), ["repeat-heads"])

VARIATIONS = {
    "plain": {},
    "biased, window": {"window": 5, "qkv_bias": True},
}
NORMED = {
    "normed": {"qk_norm_eps": 1e-5, "window": 5},
    "normed, rope, biased": {"qk_norm_eps": 1e-5, "rope": RopeConfig(), "qkv_bias": True, "o_bias": True},
}
ROPES = {
    "rope": {"rope": RopeConfig()},
    "interleaved, window": {"rope": INTERLEAVED, "window": 6},
    "scaled, biased": {"rope": SCALED, "qkv_bias": True, "o_bias": True},
    "partial, biased": {"rope": replace(SCALED, partial_rotary_factor=0.5), "qkv_bias": True, "o_bias": True},
}


def varied():
    for table, variations in ((CASES, VARIATIONS | ROPES | NORMED), (NO_ROTATION, VARIATIONS)):
        for case, (source, target, steps) in table.items():
            for name, change in variations.items():
                there = change
                if "reduce" in steps and change.get("qkv_bias"):
                    there = change | {"o_bias": True}  # the values' bias lands there
                yield pytest.param(
                    replace(source, **change), replace(target, **there), steps, id=f"{case}, {name}"
                )
    for case, (source, target) in ROTATED.items():
        for name, change in VARIATIONS.items():
            pair = replace(source, **change), replace(target, **change)
            yield pytest.param(*pair, ["rope-layout"], id=f"layout of {case}, {name}")
    for name, change in VARIATIONS.items():
        for case, (source, target, steps) in {"wider deepseek": WIDER, "heads of deepseek": HEADS}.items():
            pair = replace(source, **change), replace(target, **change)
            yield pytest.param(*pair, steps, id=f"{case}, {name}")
    for window in (None, 5):
        for layout in ("half-split", "interleaved"):
            rotated = replace(GQA, rope=RopeConfig(theta=100.0, layout=layout), window=window)
            for biased in (False, True):
                source = replace(rotated, qkv_bias=biased)
                target = Target(to="mla", target="uneven").attention(source, 23)
                name = f"all rotations, {layout}, biases {biased}, window {window}"
                yield pytest.param(source, target, ["keep-rotations"], id=name)
    for window in (None, 5):
        for case, (source, target, steps) in TO_STOCK.items():
            pair = replace(source, window=window, o_bias=True), replace(target, window=window, o_bias=True)
            yield pytest.param(*pair, steps, id=f"{case} to stock, window {window}")
    for window in (None, 5):
        for case, (source, target, steps) in BIASES.items():
            pair = replace(source, window=window), replace(target, window=window)
            yield pytest.param(*pair, steps, id=f"biases: {case}, window {window}")


ALL = list(varied())


def check(source, result, certificate, steps, apart, bound):
    assert [layer.steps for layer in certificate.layers] == [steps] * source.config.n_layer
    assert certificate.exact is True
    assert apart(source, result) < bound
    assert certificate.logits["relative_error"] < bound
    assert max(layer.output_error for layer in certificate.layers) < 10 * bound


@pytest.mark.parametrize(("source", "target", "steps"), ALL)
def test_logits_are_the_same(source, target, steps, gpt, apart):
    """Of a model that was trained a little; a fresh one is below."""
    model = gpt(source, n_step=1)
    result, certificate = rehead.convert(model, target)
    assert result.config.attention == (target, target)
    check(model, result, certificate, steps, apart, 1e-12)


FEWER = [case for case in ALL if case.id.endswith(("biased, window", ", window 5"))]


@pytest.mark.parametrize(("source", "target", "steps"), FEWER)
def test_in_float32_text_is_the_same(source, target, steps, gpt, apart):
    """Token for token, with a cache, past the end of the context."""
    model = gpt(source, n_layer=1, block_size=7).float()
    result, certificate = rehead.convert(model, target)
    check(model, result, certificate, steps, partial(apart, n_token=6), 1e-5)
    assert {weight.dtype for weight in result.parameters()} == {torch.float32}
    ids = torch.randint(model.config.vocab_size, (3, 4))
    expected = generate(model, ids, 5, temperature=0)
    assert torch.equal(generate(result, ids, 5, temperature=0), expected)


def test_generating_is_a_function_each_time():
    """`import rehead` gives the function, not the module of that name, however often it is asked."""
    assert callable(rehead.generate)
    assert callable(rehead.generate)


def test_every_exact_conversion_is_tried():
    """With pooling, which is exact for copies, below; sums of queries are tried in attention/test_summed.py."""
    tried = {step for case in ALL for step in case.values[2]} | {"pool-heads", "sum-queries"}
    assert tried == set(conversions)


def test_the_check_sees_a_wrong_weight(gpt, apart):
    """A scale or a bias that is off by 1e-9 is no exact conversion."""
    model = gpt(replace(GQA, qkv_bias=True))
    for name in ("q_proj.weight", "kv_b_proj.weight", "kv_b_proj.bias", "o_proj.weight"):
        result, certificate = rehead.convert(model, to="mla")
        check(model, result, certificate, ["factor"], apart, 1e-12)
        result.layers[1].self_attn.get_parameter(name).data[-1] += 1e-9
        with pytest.raises(AssertionError):
            check(model, result, certificate, ["factor"], apart, 1e-12)


ROUND_TRIPS = {
    "head map": (GQA, {"head_map": "modular"}, None),
    "rope layout": (replace(GQA, rope=RopeConfig()), {"rope": RopeConfig(layout="interleaved")}, None),
    "rope layout of deepseek": (DEEPSEEK, {"rope": RopeConfig(layout="interleaved")}, None),
    "mqa, mha, first": (MQA, {"n_kv_head": 6}, "first"),
    "mqa, mha, mean": (MQA, {"n_kv_head": 6}, "mean"),
    "gqa, mha, first": (GQA, {"n_kv_head": 6}, "first"),
    "gqa, mha, mean": (replace(GQA, rope=INTERLEAVED), {"n_kv_head": 6}, "mean"),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("source", "change", "method"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_there_and_back_is_the_same_to_the_bit(source, change, method, dtype, bias, gpt):
    source = replace(source, qkv_bias=bias, o_bias=bias)
    model = gpt(source).to(dtype)
    there, _ = rehead.convert(model, replace(source, **change))
    back, certificate = rehead.convert(there, source, method=method)
    assert back.config == model.config
    assert certificate.exact is True
    for (name, weight), (other, again) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, again), name
    assert any(
        weight.shape != other.shape or not torch.equal(weight, other)
        for weight, other in zip(model.parameters(), there.parameters(), strict=True)
    )


def test_learned_scores_come_back_too(gpt):
    source = replace(MQA, score=scores["additive"]())
    model = gpt(source)
    there, _ = rehead.convert(model, replace(source, n_kv_head=6))
    back, certificate = rehead.convert(there, source, method="mean")
    assert certificate.exact is True
    for weight, again in zip(model.parameters(), back.parameters(), strict=True):
        assert torch.equal(weight, again)


@pytest.mark.parametrize("shape", ["llama", "tied"])
def test_other_models(shape, gpt, apart):
    """RMSNorm, swiglu, no biases, a tied head; layers that differ."""
    changed = {"norm": "rmsnorm", "mlp": "swiglu", "mlp_bias": False}
    changed |= {"tie_embeddings": True} if shape == "tied" else {}
    rope = RopeConfig()
    model = gpt(
        replace(GQA, rope=rope), replace(MHA, rope=rope, window=7), replace(MQA, rope=rope), **changed
    )
    result, certificate = rehead.convert(model, to="mla")
    assert certificate.exact is True
    assert [layer.kv_lora_rank for layer in result.config.attention] == [18, 23, 9]
    assert apart(model, result) < 1e-12
    assert (result.head.weight is result.embed_tokens.weight) == (shape == "tied")


def test_the_source_is_left_alone(gpt):
    """No weight changed, none shared with the result, and its mode kept."""
    model = gpt(GQA)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for training, to in ((True, "mla"), (False, "mha")):
        model.train(training)
        result, _ = rehead.convert(model, to=to)
        assert model.training is training
        assert not result.training
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        mine = {weight.data_ptr() for weight in model.parameters()}
        assert not mine & {weight.data_ptr() for weight in result.parameters()}
        assert all(weight.requires_grad for weight in [*model.parameters(), *result.parameters()])


def test_nothing_to_convert_is_a_copy(gpt, apart):
    model = gpt(GQA)
    result, certificate = rehead.convert(model, GQA)
    assert certificate.exact is True
    assert apart(model, result) == 0
    assert [layer.steps for layer in certificate.layers] == [[], []]


def test_layers_may_get_different_attentions(gpt, apart):
    model = gpt(GQA, n_layer=3)
    targets = [latent(GQA, FULL), GQA, MHA]
    result, certificate = rehead.convert(model, targets)
    assert list(result.config.attention) == targets
    assert [layer.steps for layer in certificate.layers] == [["factor"], [], ["repeat-heads"]]
    assert apart(model, result) < 1e-12
    assert all(one != other for one, other in pairwise(result.config.attention))
