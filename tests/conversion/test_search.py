"""The way from one attention to another: which steps, how few approximations, and why there is none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, scores
from rehead.attention.rope_scaling import LinearScaling
from rehead.conversion import conversions, path
from rehead.errors import ConfigError

D = 23
GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
MHA, MQA = replace(GQA, n_kv_head=6), replace(GQA, n_kv_head=1)
MLA = LatentConfig(
    n_query_head=6, n_kv_head=2, kv_lora_rank=18, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)
ROPE = RopeConfig()


def tied(rank):
    return GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=rank, tie_kv=True)


WAYS = {  # source, target, steps, how many are approximations
    "nothing to do": (GQA, GQA, [], 0),
    "modular mha to mla": (
        replace(MHA, head_map="modular"),
        replace(MLA, n_kv_head=6, kv_lora_rank=23),
        ["head-map", "factor"],
        0,
    ),
    "modular gqa to contiguous mha": (
        replace(GQA, head_map="modular"),
        MHA,
        ["head-map", "repeat-heads"],
        0,
    ),
    "mha through a pooled gqa to mla": (MHA, MLA, ["pool-heads", "factor"], 1),
    "mha to a smaller mla of fewer heads": (
        MHA,
        replace(MLA, kv_lora_rank=11),
        ["pool-heads", "factor"],
        2,
    ),
    "mla to mha": (replace(MLA, n_kv_head=6), MHA, ["expand"], 0),
    "small mla to a smaller one": (
        replace(MLA, kv_lora_rank=10),
        replace(MLA, kv_lora_rank=7),
        ["narrow"],
        1,
    ),
    "mla to mqa": (MLA, MQA, ["expand", "pool-heads"], 1),
    "mla to a modular gqa": (MLA, replace(GQA, head_map="modular"), ["expand", "head-map"], 0),
    "gqa to reduced": (GQA, tied(18), ["factor", "reduce"], 0),
    "gqa to a small reduced": (GQA, tied(7), ["factor", "reduce"], 1),
    "mla to a wider reduced": (replace(MLA, kv_lora_rank=10), tied(13), ["pad-rank", "reduce"], 0),
    "gqa to an mla of more heads": (GQA, replace(MLA, n_kv_head=6), ["factor", "repeat-heads"], 0),
    "one step more, but exact": (
        MQA,
        replace(MLA, n_kv_head=6),
        ["repeat-heads", "factor", "repeat-heads"],
        0,
    ),
    "rope and layout": (
        replace(GQA, rope=ROPE),
        replace(MLA, rope=replace(ROPE, layout="interleaved")),
        ["factor", "rope-layout"],
        0,
    ),
    "rotations kept rather than heads pooled": (
        replace(GQA, rope=ROPE),
        replace(MLA, kv_lora_rank=12, n_kv_head=2, qk_rope_head_dim=4, rope=ROPE),
        ["keep-rotations", "narrow"],
        2,
    ),
    "gqa of 2 to gqa of 3": (GQA, replace(GQA, n_kv_head=3), ["repeat-heads", "pool-heads"], 1),
}


@pytest.mark.parametrize(("source", "target", "names", "n_approximate"), WAYS.values(), ids=WAYS)
def test_ways(source, target, names, n_approximate):
    steps = path(source, target, D)
    assert [step.name for step in steps] == names
    assert sum(not step.promise.exact for step in steps) == n_approximate
    places = [source, *(step.result for step in steps)]
    assert [step.source for step in steps] == places[:-1]
    assert places[-1] == target
    assert all(step.promise.why for step in steps)


def test_exact_though_longer():
    """Repeating first would be as short, but the rank is then too small to be exact."""
    steps = path(GQA, replace(MLA, n_kv_head=6), D)
    assert all(step.promise.exact for step in steps)
    repeated = replace(GQA, n_kv_head=6)
    assert not conversions["factor"]().promise(repeated, replace(MLA, n_kv_head=6), D).exact


def test_no_squeeze_on_the_way():
    """6 heads become 2 by one pooling; 2 become 3 through 6 copies, which lose nothing, not through 1."""
    steps = path(MHA, replace(MHA, n_kv_head=2), D)
    assert [step.result.n_kv_head for step in steps] == [2]
    steps = path(GQA, replace(GQA, n_kv_head=3), D)
    assert [step.result.n_kv_head for step in steps] == [6, 3]


def test_heads_with_many_divisors():
    """360 has 24: all are ways, though a message lists the first 20."""
    source = GroupedConfig(n_query_head=360, n_kv_head=1, head_dim=2)
    assert [step.name for step in path(source, replace(source, n_kv_head=360), D)] == ["repeat-heads"]
    names = [step.name for step in path(replace(source, n_kv_head=360), replace(source, n_kv_head=180), D)]
    assert names == ["pool-heads"]


heads = st.sampled_from([1, 2, 3, 6])
maps = st.sampled_from(["contiguous", "modular"])
ropes = st.sampled_from([None, ROPE, replace(ROPE, layout="interleaved")])


@settings(max_examples=40)
@given(heads, maps, heads, maps, ropes, st.booleans())
def test_between_heads_there_is_always_a_way(before, one, after, other, rope, flips):
    """Exact if and only if the heads of the source divide those of the target."""
    source = replace(GQA, n_kv_head=before, head_map=one, rope=rope)
    if rope is not None and flips:
        rope = replace(rope, layout="interleaved" if rope.layout == "half-split" else "half-split")
    target = replace(GQA, n_kv_head=after, head_map=other, rope=rope)
    steps = path(source, target, D)
    assert all(step.promise.exact for step in steps) == (after % before == 0)
    assert sum(not step.promise.exact for step in steps) <= 1


@settings(max_examples=40)
@given(heads, st.integers(1, 23), ropes)
def test_into_a_latent_exact_from_full_rank_on(n_kv_head, rank, rope):
    """A11: min(K (E + V), D) numbers hold everything."""
    source = replace(GQA, n_kv_head=n_kv_head, rope=rope)
    full = min(n_kv_head * 9, D)
    target = replace(MLA, n_kv_head=n_kv_head, kv_lora_rank=min(rank, full), rope=rope)
    (step,) = path(source, target, D)
    assert (step.name, step.promise.exact) == ("factor", rank >= full)
    assert str(full) in step.promise.why


NONE = {  # source, target, what the message must say, what it must not
    "window changed": (
        replace(GQA, window=5),
        replace(GQA, window=7),
        ["window=5", "7", "Keep it"],
        ["tie_kv"],
    ),
    "window dropped": (replace(GQA, window=5), GQA, ["window=5", "None", "Keep it"], ["tie_kv"]),
    "window changed on the way to mla": (
        replace(GQA, window=5),
        replace(MLA, window=7),
        ["window=5", "7", "Keep it"],
        ["tie_kv"],
    ),
    "query heads": (
        GQA,
        replace(GQA, n_query_head=12),
        ["n_query_head=6", "12", "train a new model"],
        ["tie_kv"],
    ),
    "learned score to mla": (
        replace(GQA, score=scores["additive"]()),
        MLA,
        ["MLA has plain scaled dot products for scores", "--to mqa"],
        ["tie_kv"],
    ),
    "score changed": (
        replace(GQA, score=scores["additive"]()),
        GQA,
        ["score=Additive", "ScaledDot", "Keep it"],
        ["mla"],
    ),
    "latent norm": (
        replace(MLA, latent_norm=True),
        GQA,
        ["an MLA with a norm on its latent (latent_norm=True)", "Keep it"],
        [],
    ),
    "latent norm, wider": (
        replace(MLA, latent_norm=True, kv_lora_rank=9),
        replace(MLA, latent_norm=True),
        ["an MLA with a norm on its latent (latent_norm=True)", "Keep it"],
        [],
    ),
    "a norm is not made": (GQA, replace(MLA, latent_norm=True), ["latent_norm"], ["tie_kv"]),
    "decoupled rope": (
        replace(MLA, qk_rope_head_dim=6, rope=ROPE),
        GQA,
        ["qk_rope_head_dim=6", "rotate in part only"],
        ["tie_kv"],
    ),
    "query latent": (replace(MLA, q_lora_rank=11), GQA, ["q_lora_rank=11", "norm"], ["tie_kv"]),
    "rope to reduced": (
        replace(GQA, rope=ROPE),
        tied(18),
        ["reduce: with rope=True", "rebuilt keys are rotated", "W_UK and W_Q"],
        ["tie_kv"],
    ),
    "rank above the useful maximum": (GQA, replace(MLA, kv_lora_rank=19), ["19", "18"], ["LatentConfig"]),
    "other angles": (
        replace(GQA, rope=ROPE),
        replace(GQA, rope=replace(ROPE, theta=500.0)),
        ["theta", "500"],
        [],
    ),
    "other scaling": (
        replace(GQA, rope=ROPE),
        replace(GQA, rope=replace(ROPE, scaling=LinearScaling(factor=3.0))),
        ["scaling"],
        [],
    ),
    "rope dropped": (replace(GQA, rope=ROPE), GQA, ["rope"], ["tie_kv"]),
    "head width": (GQA, replace(GQA, head_dim=6), ["head_dim=4", "6"], ["tie_kv"]),
    "bias": (GQA, replace(GQA, qkv_bias=True), ["qkv_bias=False", "True"], ["tie_kv"]),
    "tied heads apart": (tied(18), GQA, ["tie_kv=True"], []),
}


@pytest.mark.parametrize(("source", "target", "says", "silent"), NONE.values(), ids=NONE)
def test_where_there_is_no_way(source, target, says, silent):
    with pytest.raises(ConfigError) as caught:
        path(source, target, D)
    message = str(caught.value)
    known = says[0].startswith(("MLA has", "an MLA"))
    called = "the reduced form of a latent" if getattr(target, "tie_kv", False) else target.name
    assert message.startswith(says[0] if known else f"no conversion leads from {source.name} to {called}: ")
    assert all(part in message for part in says), message
    assert not any(part in message for part in silent), message


def test_the_first_obstacles_are_named_and_those_of_the_source_first():
    """Ten conversions refuse a norm on keys; the reader needs to hear it once or twice."""
    source = replace(GQA, rope=ROPE, qk_norm_eps=1e-6)
    target = replace(MLA, latent_norm=True, qk_rope_head_dim=8, rope=ROPE)
    with pytest.raises(ConfigError) as caught:
        path(source, target, D)
    refusals = str(caught.value).removeprefix("no conversion leads from gqa to mla: ").split("; ")
    assert len(refusals) == 3
    assert refusals[0] == "decouple: qk_norm_eps: MLA's heads have no norm"
