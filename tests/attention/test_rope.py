"""Rotary embedding against complex multiplication: a pair (a, b) is a + bi, a turn is exp(i m theta)."""

import gc
import math
import pickle
import weakref
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from rehead.attention.grouped_config import GroupedConfig
from rehead.attention.latent import LatentConfig
from rehead.attention.rope import RopeConfig, Rotary
from rehead.attention.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from rehead.config import encode
from rehead.errors import ConfigError

B, L, H, E = 3, 7, 5, 32
N_EMBD = 192
PAPER = [10_000 ** (-2 * (i - 1) / E) for i in range(1, E // 2 + 1)]
MISPRINT = [10_000 ** (-(2 ** (i - 1)) / (E // 2)) for i in range(1, E // 2 + 1)]  # E16
HALF, INTERLEAVED = RopeConfig(), RopeConfig(layout="interleaved")
EVENS_THEN_ODDS = [*range(0, E, 2), *range(1, E, 2)]


def turned(x, positions, angles=PAPER, interleaved=False):
    """Every pair of x (B L H E) turned as a complex number, in NumPy."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : E // 2], x[..., E // 2 :])
    pairs = first.numpy() + 1j * second.numpy()
    pairs = pairs * np.exp(1j * np.multiply.outer(positions.numpy(), angles))[:, :, None]
    parts = [torch.from_numpy(pairs.real), torch.from_numpy(pairs.imag)]
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def as_wide_as_the_model(x, positions):
    """E22: the table of d = n_embd, cut to the head's width; it does not rotate."""
    angle = positions[..., None] * RopeConfig().frequencies(N_EMBD)
    angle = torch.cat([angle, angle], -1)[:, :, None, :E]
    return x * angle.cos() + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * angle.sin()


def misprinted(x, positions):
    return turned(x, positions, MISPRINT)


def test_b14_angles():
    """B14: theta_i = 10000^(-2(i-1)/d_k), i = 1 .. d_k/2: sixteen values, 1.0 to 1.78e-4, for d_k = 32."""

    def check(frequencies):
        assert len(frequencies) == 16
        assert [frequencies[0], frequencies[-1]] == pytest.approx([1.0, 1.78e-4], rel=2e-3)
        np.testing.assert_allclose(frequencies, PAPER, rtol=1e-15)

    check(HALF.frequencies(E))
    for mutant in (
        torch.tensor(MISPRINT),  # E16: as printed
        HALF.frequencies(N_EMBD)[:16],  # E22: of the model's width
        HALF.frequencies(E).flip(0),
        RopeConfig(theta=1000.0).frequencies(E),
        10_000 ** (-2 * torch.arange(1.0, 17) / E),  # i from 1, without the - 1
    ):
        with pytest.raises(AssertionError):
            check(mutant)


@pytest.mark.parametrize("interleaved", [False, True])
def test_b14_rotates(interleaved):
    """B14: pair i turns by m theta_i, whichever numbers form the pair."""
    x, positions = torch.randn(B, L, H, E), torch.randint(0, 4000, (B, L))

    def check(rotate):
        torch.testing.assert_close(rotate(x, positions), turned(x, positions, PAPER, interleaved))

    ours, other = (Rotary(INTERLEAVED, E), Rotary(HALF, E))[:: 1 if interleaved else -1]
    check(ours)
    for mutant in (
        other,  # E18: the other layout's pairs
        as_wide_as_the_model,
        misprinted,
        lambda x, m: ours(x, -m),  # the other way
        lambda x, m: ours(x, m + 1),  # a position off by one
    ):
        with pytest.raises(AssertionError):
            check(mutant)


def check_relative(rotate):
    """Lengths are kept, and a score depends on the distance t - j alone."""
    query, key = torch.randn(B, 1, H, E), torch.randn(B, 1, H, E)

    def score(t, j):
        t, j = torch.full((B, 1), t), torch.full((B, 1), j)
        return (rotate(query, t) * rotate(key, j)).sum(-1)

    torch.testing.assert_close(rotate(key, torch.full((B, 1), 13)).norm(dim=-1), key.norm(dim=-1))
    for t, j in ((5, 2), (4, 4), (60, 1)):
        torch.testing.assert_close(score(t, j), score(t + 37, j + 37), rtol=1e-11, atol=1e-11)
    assert (score(5, 2) - score(6, 2)).abs().max() > 1e-2


@pytest.mark.parametrize("config", [HALF, INTERLEAVED], ids=lambda config: config.layout)
def test_b14_norm_and_shift(config):
    check_relative(Rotary(config, E))
    check_relative(misprinted)  # E16 passes: this is why the angles themselves are tested
    with pytest.raises(AssertionError):
        check_relative(as_wide_as_the_model)
    with pytest.raises(AssertionError):
        check_relative(lambda x, positions: x)


def test_b15_half_split_is_interleaved_permuted():
    """B15: Y cos C + [-Y2, Y1] sin C equals B14 after [evens, odds], to the last bit."""
    x, positions = torch.randn(B, L, H, E), torch.arange(L)[None]

    def check(permutation):
        after = Rotary(INTERLEAVED, E)(x, positions)[..., permutation]
        assert torch.equal(Rotary(HALF, E)(x[..., permutation], positions), after)

    check(EVENS_THEN_ODDS)
    for mutant in (list(range(E)), EVENS_THEN_ODDS[::-1], EVENS_THEN_ODDS[16:] + EVENS_THEN_ODDS[:16]):
        with pytest.raises(AssertionError):
            check(mutant)


def test_e17_scores_do_not_depend_on_the_first_position():
    query, key, rotate = torch.randn(B, L, H, E), torch.randn(B, L, H, E), Rotary(HALF, E)
    scores = [torch.einsum("blhe,bshe->bhls", rotate(query, start=n), rotate(key, start=n)) for n in (0, 1)]
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [HALF, INTERLEAVED], ids=lambda config: config.layout)
def test_start_counts_positions(config):
    """The kept table, also after it has grown, is the angles of the positions, to the last bit."""
    rotate, x = Rotary(config, E), torch.randn(B, L, H, E)

    def check(off=0):
        for start in (0, 3, 58, 121, 200, 1):  # the first table has 64 rows
            positions = torch.arange(start + off, start + off + L)[None]
            assert torch.equal(rotate(x, start=start), Rotary(config, E)(x, positions))

    check()
    with pytest.raises(AssertionError):
        check(off=1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_a_partial_head_the_first_numbers_turn(interleaved):
    """With the angles of a head of that width; the others stay as they are (GPT-NeoX, Phi, GLM)."""
    x, positions = torch.randn(B, L, H, E + 13), torch.randint(0, 4000, (B, L))
    rope = RopeConfig(layout="interleaved" if interleaved else "half-split", partial_rotary_factor=0.72)
    assert rope.rotated(E + 13) == E

    def check(rope):
        out = Rotary(rope, E + 13)(x, positions)
        torch.testing.assert_close(out[..., :E], turned(x[..., :E], positions, PAPER, interleaved))
        assert torch.equal(out[..., E:], x[..., E:])

    check(rope)
    for mutant in (
        replace(rope, partial_rotary_factor=34 / 45),
        replace(rope, theta=9_000.0),
        replace(rope, layout="half-split" if interleaved else "interleaved"),
    ):
        with pytest.raises(AssertionError):
            check(mutant)


def test_the_share_that_a_refusal_names_is_right():
    for width in range(2, 300):
        rope = RopeConfig(partial_rotary_factor=1.01 * (3 if width > 3 else 1) / width)
        with pytest.raises(ConfigError) as caught:
            rope.require_width(width)
        share = float(str(caught.value).partition("Use ")[2].partition(",")[0])
        assert RopeConfig(partial_rotary_factor=min(share, 1.0)).rotated(width) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_turns_exactly(dtype):
    """Angles are float64 whatever the model's type, so a million positions in, only the result is rounded."""
    x, positions = torch.randn(B, L, H, E).to(dtype), torch.arange(10**6, 10**6 + L)[None]
    gold = turned(x.double(), positions.expand(B, -1))
    once = torch.finfo(dtype).eps / 2 * gold.abs()  # the result's rounding, on top of float32's own
    bound = 1.01 * once + 3 * torch.finfo(torch.float32).eps * x.abs().max()

    def check(rotate):
        assert ((rotate(x, positions).double() - gold).abs() <= bound).all()

    def angles_in_low_precision(x, positions):
        angle = positions.to(dtype)[..., None] * HALF.frequencies(E).to(dtype)
        angle = torch.cat([angle, angle], -1)[:, :, None]
        return x * angle.cos() + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * angle.sin()

    def applied_in_low_precision(x, positions):
        angle = positions.double()[..., None] * HALF.frequencies(E)
        angle = torch.cat([angle, angle], -1)[:, :, None]
        half_turned = torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1)
        return x * angle.cos().to(dtype) + half_turned * angle.sin().to(dtype)

    check(Rotary(HALF, E))
    assert Rotary(HALF, E)(x, positions).dtype == dtype
    with pytest.raises(AssertionError):
        check(angles_in_low_precision)
    if dtype != torch.float32:
        with pytest.raises(AssertionError):
            check(applied_in_low_precision)


@pytest.mark.parametrize("scaling", [LinearScaling, Llama3Scaling, YarnScaling])
def test_a_scaling_by_one_is_none(scaling):
    plain, one = HALF.frequencies(E), RopeConfig(scaling=scaling(factor=1.0))
    torch.testing.assert_close(one.frequencies(E), plain, rtol=1e-15, atol=0)
    assert one.scaling.magnitude == 1.0
    two = RopeConfig(scaling=scaling(factor=2.0))
    assert not torch.allclose(two.frequencies(E), plain, rtol=1e-3, atol=0)


def test_yarn_magnitude():
    """0.1 ln(factor) + 1, or what is given, multiplies what is turned."""
    x = torch.randn(B, L, H, E)
    for scaling, magnitude in (
        (YarnScaling(factor=4.0), 0.1 * math.log(4) + 1),
        (YarnScaling(factor=4.0, attention_factor=0.7), 0.7),
        (LinearScaling(factor=4.0), 1.0),
    ):
        out = Rotary(RopeConfig(scaling=scaling), E)(x)
        torch.testing.assert_close(out.norm(dim=-1), magnitude * x.norm(dim=-1))


def test_angles_met_in_inference_serve_training():
    """What was generated before does not stop the next training step."""
    attention = GroupedConfig(n_query_head=2, head_dim=4, rope=True).build(6)
    with torch.inference_mode():
        attention(torch.randn(1, 3, 6))
    attention(torch.randn(1, 3, 6)).sum().backward()
    assert attention.q_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "config",
    [
        HALF,
        LinearScaling(factor=4.0),
        Llama3Scaling(factor=4.0, original_max_position_embeddings=64),
        YarnScaling(factor=4.0, original_max_position_embeddings=4096, attention_factor=1.5),
        YarnScaling(factor=4.0, original_max_position_embeddings=4096, mscale=0.7, mscale_all_dim=0.5),
        LongRopeScaling(factors=tuple(map(float, range(1, E // 2 + 1))), attention_factor=1.5),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_field_turns_something(config):
    def turns(config):
        if not isinstance(config, RopeConfig):
            config = RopeConfig(scaling=config)
        torch.manual_seed(1)
        return Rotary(config, E)(torch.randn(1, L, 1, E))

    others = {"layout": "interleaved", "scaling": LinearScaling(factor=2.0), "factors": (3.0,) * (E // 2)}
    for field in fields(config):
        if getattr(config, field.name) is None and field.name != "scaling":
            continue
        value = others.get(field.name) or getattr(config, field.name) * 2
        value = 0.5 if field.name == "partial_rotary_factor" else value
        other = replace(config, **{field.name: value})
        assert not torch.allclose(turns(other), turns(config)), f"{field.name}={value} changes nothing"


def test_longrope_has_a_factor_for_each_pair():
    """And any number of them turns by theta ** (-2i / E) / factor i."""
    factors = tuple(1.0 + i for i in range(E // 2))
    rope = RopeConfig(scaling=LongRopeScaling(factors=factors))
    expected = torch.tensor(PAPER) / torch.tensor(factors)
    torch.testing.assert_close(rope.frequencies(E), expected, rtol=1e-14, atol=0)
    GroupedConfig(n_query_head=2, head_dim=E, rope=rope)
    with pytest.raises(ConfigError, match="16 factors for 15 pairs"):
        GroupedConfig(n_query_head=2, head_dim=E - 2, rope=rope)
    with pytest.raises(ConfigError, match="16 factors for 2 pairs"):
        LatentConfig(
            n_query_head=2, kv_lora_rank=3, qk_nope_head_dim=E, v_head_dim=5, qk_rope_head_dim=4, rope=rope
        )
    with pytest.raises(ConfigError, match=r"factors=-1\.0"):
        RopeConfig(scaling=LongRopeScaling(factors=(1.0, -1.0)))


def test_deepseeks_mscale_moves_from_the_angles_to_the_scores():
    """As its classes in transformers: m(mscale) / m(mscale_all_dim) here, m(mscale_all_dim) ** 2 there."""
    yarn = YarnScaling(factor=40.0, mscale=0.707, mscale_all_dim=0.5)
    grown = [0.1 * m * math.log(40) + 1 for m in (0.707, 0.5)]
    assert yarn.magnitude == pytest.approx(grown[0] / grown[1], rel=1e-15)
    sizes = {
        "n_query_head": 2,
        "kv_lora_rank": 3,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "qk_rope_head_dim": 4,
    }
    plain, scaled = (
        LatentConfig(**sizes, rope=RopeConfig(scaling=scaling)).build(7).scale
        for scaling in (replace(yarn, mscale_all_dim=None), yarn)
    )
    assert plain == 10**-0.5
    assert scaled == pytest.approx(10**-0.5 * grown[1] ** 2, rel=1e-15)


def test_layers_alike_share_one_table():
    """A table has two numbers for each position and rotated one; it goes with the last layer that reads it."""
    kind = GroupedConfig(n_query_head=2, head_dim=E, rope=RopeConfig(theta=1234.5))
    first, second = kind.build(N_EMBD), kind.build(N_EMBD)
    assert first.rotary is second.rotary
    other = replace(kind, rope=RopeConfig(theta=1234.5, layout="interleaved")).build(N_EMBD)
    assert other.rotary is not first.rotary
    alive = weakref.ref(first.rotary)
    del first, second
    gc.collect()
    assert alive() is None


def test_a_pickled_layer_has_no_tables():
    """Neither is larger after a long text, nor has tables of its own where it is read."""
    layer = GroupedConfig(n_query_head=4, head_dim=16, rope=RopeConfig(theta=777.0)).build(32)
    before, x = pickle.dumps(layer), torch.randn(1, 3000, 32)
    layer(x)
    assert len(pickle.dumps(layer)) == len(before)
    again = pickle.loads(pickle.dumps(layer))
    assert again.rotary is layer.rotary
    assert torch.equal(again(x), layer(x))


def test_a_trace_leaves_no_table_for_others():
    """Layers alike share one; that of a trace has no numbers."""
    kind = GroupedConfig(n_query_head=2, head_dim=E, rope=RopeConfig(theta=4321.5))
    traced, other = (torch.nn.Sequential(kind.build(N_EMBD)) for _ in range(2))
    x = torch.randn(1, L, N_EMBD)
    torch.export.export(traced, (x,), strict=False)
    assert other(x).isfinite().all()


def test_a_scaling_of_the_users_own_may_have_any_fields():
    """Bounds are those of the scalings that have them; a scaling that is not registered cannot be saved."""

    @dataclass(frozen=True, kw_only=True)
    class Shifted(RopeScaling):
        mode: str = "a"
        truncate: bool = False
        offset: float = 0.0

        def scale(self, frequencies, theta):
            return frequencies + self.offset

    rope = RopeConfig(scaling=Shifted())
    assert torch.equal(rope.frequencies(E), RopeConfig().frequencies(E))
    with pytest.raises(
        ConfigError, match=r"Shifted.* is not registered as a rope scaling: register it with `add`"
    ):
        encode(rope)
