"""What a target means, and which targets mean nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion import Target, targets
from rehead.conversion.target import layers_of
from rehead.errors import ConfigError

D = 23
GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, qkv_bias=True, window=7)
MLA = LatentConfig(
    n_query_head=6, n_kv_head=2, kv_lora_rank=18, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False,
    qkv_bias=True, window=7,
)  # fmt: skip
TIED = GroupedConfig(
    n_query_head=6, n_kv_head=1, head_dim=18, tie_kv=True, qkv_bias=True, o_bias=True, window=7
)

MEANT = {
    "mha": (Target(to="mha"), replace(GQA, n_kv_head=6)),
    "mqa": (Target(to="mqa"), replace(GQA, n_kv_head=1)),
    "gqa": (Target(to="gqa", n_kv_head=3), replace(GQA, n_kv_head=3)),
    "the kind stays": (Target(head_map="modular"), replace(GQA, head_map="modular")),
    "mla, exact": (Target(to="mla"), MLA),
    "mla, rank": (Target(to="mla", kv_rank=7), replace(MLA, kv_lora_rank=7)),
    "mla, half": (Target(to="mla", kv_fraction=0.5), replace(MLA, kv_lora_rank=9)),
    "mla, of one head": (Target(to="mla", n_kv_head=1), replace(MLA, kv_lora_rank=9, n_kv_head=1)),
    "reduced": (Target(to="reduced"), TIED),
    "reduced, rank": (Target(to="reduced", kv_rank=7), replace(TIED, head_dim=7, v_head_dim=7)),
}


@pytest.mark.parametrize(("target", "expected"), MEANT.values(), ids=MEANT)
def test_meant(target, expected):
    assert target.attention(GQA, D) == expected


@pytest.mark.parametrize("to", list(targets))
def test_from_a_latent_too(to):
    again = Target(to=to).attention(MLA, D)
    assert again == Target(to=to).attention(GQA, D)


def test_a_layout_is_turned_beside_the_kind():
    rope, other = RopeConfig(), RopeConfig(layout="interleaved")
    target = Target(to="mla", rope_layout="interleaved")
    assert target.attention(replace(GQA, rope=rope), D) == replace(MLA, rope=other)


def test_a_layout_is_turned_where_a_layer_rotates(gpt):
    """As of SmolLM3, whose every fourth layer does not."""
    model = gpt(replace(GQA, rope=RopeConfig()), GQA)
    turned, _ = rehead.convert(model, "mla", rope_layout="interleaved")
    assert turned.config.attention[0].rope == RopeConfig(layout="interleaved")
    assert turned.config.attention[1].rope is None
    with pytest.raises(ConfigError, match="rope_layout=interleaved: none of its layers rotates its keys"):
        rehead.convert(gpt(GQA), "mla", rope_layout="interleaved")


@given(st.floats(0, 1, exclude_min=True), st.sampled_from([1, 2, 3, 6]))
def test_a_fraction_is_never_exceeded_and_never_useless(fraction, n_kv_head):
    source = replace(GQA, n_kv_head=n_kv_head)
    rank = Target(to="mla", kv_fraction=fraction).attention(source, D).kv_lora_rank
    assert 1 <= rank <= min(D, 9 * n_kv_head)
    assert rank == 1 or rank <= fraction * source.kv_numbers()
    assert rank + 1 > fraction * source.kv_numbers() or rank == min(D, 9 * n_kv_head)


@pytest.mark.parametrize("fraction", [1.0, 0.9, 0.75, 0.5])
@pytest.mark.parametrize(
    "source",
    [
        replace(MLA, rope=RopeConfig(), qk_rope_head_dim=6),
        replace(MLA, qk_norm_eps=1e-6),
        replace(GQA, qkv_bias=False, qk_norm_eps=1e-6),
    ],
    ids=["a rotary part", "norms of keys", "norms of keys to be"],
)
def test_what_is_cached_beside_a_latent_is_a_part_of_the_fraction(source, fraction):
    made = Target(to="mla", kv_fraction=fraction).attention(source, D)
    assert made.kv_numbers() <= fraction * source.kv_numbers()
    assert made.kv_numbers() + 1 > fraction * source.kv_numbers() or made.kv_lora_rank == 18


def test_what_is_cached_beside_a_latent_leaves_nothing_for_it():
    source = replace(MLA, rope=RopeConfig(), qk_rope_head_dim=6)
    with pytest.raises(
        ConfigError,
        match=r"^kv_fraction=0.25 is 6 numbers, and 6 stay beside the latent: none are left for it",
    ):
        Target(to="mla", kv_fraction=0.25).attention(source, D)


MEANINGLESS = {  # options, what the message must name
    "rank too large": ({"to": "mla", "kv_rank": 19}, ["kv_rank=19", "18", "Use 1 to 18"]),
    "rank too large, reduced": ({"to": "reduced", "kv_rank": 40}, ["kv_rank=40", "Use 1 to 18"]),
    "rank 0": ({"to": "mla", "kv_rank": 0}, ["kv_rank=0", "Use 1 to 18"]),
    "rank -1": ({"to": "mla", "kv_rank": -1}, ["kv_rank=-1", "Use 1 to 18"]),
    "fraction 0": ({"to": "mla", "kv_fraction": 0.0}, ["kv_fraction=0.0", "above 0 up to 1"]),
    "fraction 1.5": ({"to": "mla", "kv_fraction": 1.5}, ["kv_fraction=1.5", "above 0 up to 1"]),
    "fraction nan": ({"to": "mla", "kv_fraction": float("nan")}, ["kv_fraction=nan", "above 0 up to 1"]),
    "twice": ({"to": "mla", "kv_rank": 3, "kv_fraction": 0.5}, ["kv_rank=3", "kv_fraction=0.5", "Give one"]),
    "non-dividing": ({"to": "gqa", "n_kv_head": 4}, ["n_kv_head=4", "n_query_head=6", "[1, 2, 3, 6]"]),
    "non-dividing, mla": ({"to": "mla", "n_kv_head": 4}, ["n_kv_head=4", "[1, 2, 3, 6]"]),
    "no gqa": ({"to": "gqa", "n_kv_head": 6}, ["n_kv_head=6", "[2, 3]"]),
    "no gqa, one": ({"to": "gqa", "n_kv_head": 1}, ["n_kv_head=1", "[2, 3]"]),
    "heads of mha": ({"to": "mha", "n_kv_head": 3}, ["n_kv_head=3", "--to gqa or mla"]),
    "heads of mqa": ({"to": "mqa", "n_kv_head": 1}, ["n_kv_head=1", "--to gqa or mla"]),
    "rank of gqa": ({"to": "gqa", "kv_rank": 3}, ["kv_rank=3", "--to mla or reduced"]),
    "fraction of mha": ({"to": "mha", "kv_fraction": 0.5}, ["kv_fraction=0.5", "--to mla or reduced"]),
    "map of mla": ({"to": "mla", "head_map": "modular"}, ["head_map=modular", "mla", "Leave it out"]),
    "unknown": ({"to": "mlq"}, ["'mlq'", "Did you mean", "mha, mqa, gqa, mla, reduced"]),
}


@pytest.mark.parametrize(("options", "says"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_meaningless(options, says):
    with pytest.raises(ConfigError) as caught:
        Target(**options).attention(GQA, D)
    assert all(part in str(caught.value) for part in says), str(caught.value)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_latent_of_nothing_beside_a_rotary_part(rank):
    with pytest.raises(
        ConfigError, match=rf"^kv_rank={rank}: .* beside a rotary part of .*\. Use 1 to \d+\.$"
    ):
        Target(to="mla", target="uneven", kv_rank=rank).attention(replace(GQA, rope=RopeConfig()), D)


@pytest.mark.parametrize("kind", ["uneven", "canonical"])
def test_a_latent_beside_a_rotary_part_has_the_heads_there_are(kind):
    source = GroupedConfig(n_query_head=6, n_kv_head=6, head_dim=64, rope=RopeConfig())
    made = Target(to="mla", target=kind, kv_fraction=0.5, n_kv_head=6).attention(source, 384)
    assert made == Target(to="mla", target=kind, kv_fraction=0.5).attention(source, 384)
    with pytest.raises(ConfigError, match=f"^n_kv_head=2 means nothing with --target {kind}, whose .* 6 KV"):
        Target(to="mla", target=kind, kv_fraction=0.5, n_kv_head=2).attention(source, 384)


def test_mha_is_no_gqa_as_it_is():
    with pytest.raises(
        ConfigError, match=r"--to gqa needs --n-kv-head: how many KV heads\? Use one of \[2, 3\]"
    ):
        Target(to="gqa").attention(replace(GQA, n_kv_head=6), D)


def test_between_one_and_two_heads_is_no_gqa():
    two = GroupedConfig(n_query_head=2, n_kv_head=1, head_dim=4)
    for options in ({}, {"n_kv_head": 2}):
        with pytest.raises(
            ConfigError, match=r"no number between 1 and 2 divides 2 query heads. Use --to mqa or --to mha"
        ):
            Target(to="gqa", **options).attention(two, D)


@pytest.mark.parametrize(
    ("to", "options", "says"),
    [
        (MLA, {"kv_rank": 3}, "kv_rank beside a config, which already defines it. Give one of them."),
        pytest.param(
            3,
            {},
            "to=3: expected a name (mha, mqa, gqa, mla, reduced), an attention's config",
            marks=pytest.mark.mistyped,
        ),
        pytest.param(
            [MLA, "mla"], {}, "expected a name (mha, mqa, gqa, mla, reduced)", marks=pytest.mark.mistyped
        ),
        ([MLA, MLA, MLA], {}, "3 attentions for 2 layers: give one per layer, or one."),
        ([], {}, "0 attentions for 2 layers"),
        ("mla", {"kv_rnk": 3}, "unknown option 'kv_rnk'. Did you mean 'kv_rank'"),
    ],
)
def test_what_is_no_target(to, options, says, gpt):
    with pytest.raises(ConfigError) as caught:
        layers_of(gpt(GQA).config, to, options)
    assert says in str(caught.value)


def test_configs_for_one_or_all_layers(gpt):
    config = gpt(GQA).config
    assert list(layers_of(config, MLA, {})) == [MLA, MLA]
    assert list(layers_of(config, [MLA, GQA], {})) == [MLA, GQA]
    assert layers_of(config, replace(config, attention=(GQA, MLA)), {}) == (GQA, MLA)
    with pytest.raises(ConfigError, match="the two models differ beyond their attention"):
        layers_of(config, replace(config, n_hidden=3), {})
