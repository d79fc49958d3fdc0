"""Llama 3's angles as a yarn: against transformers' own formulas, and every ramp tried."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.rope_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from rehead.conversion.steps.rotations import slots_of
from rehead.conversion.target import Target
from rehead.conversion.yarn import FAR, as_yarn, drift, reaching, stands_in
from rehead.errors import ConfigError

pytestmark = pytest.mark.heavy
STOCK = {  # rope_theta, factor, width of a head
    "Llama 3.2": (500_000.0, 32.0, 64),
    "Llama 3.1": (500_000.0, 8.0, 128),
    "small": (500.0, 8.0, 64),
}


def llama3(theta, factor, original=8192):
    return RopeConfig(
        theta=theta, scaling=Llama3Scaling(factor=factor, original_max_position_embeddings=original)
    )


def theirs(table, width):
    """Angles and magnitude by transformers, of heads of `width`."""
    config = LlamaConfig(
        hidden_size=width, num_attention_heads=1, max_position_embeddings=131_072, rope_parameters=table
    )
    angles, magnitude = ROPE_INIT_FUNCTIONS[table["rope_type"]](config, "cpu")
    return angles.double().numpy(), magnitude


@pytest.mark.parametrize(("theta", "factor", "width"), STOCK.values(), ids=STOCK)
def test_no_ramp_is_nearer(theta, factor, width):
    source = llama3(theta, factor)
    exact, _ = theirs({"rope_type": "llama3", "rope_theta": theta} | vars(source.scaling), width)
    exact = exact[:: width // 64]  # a part of 64 has every c-th pair
    yarn = as_yarn(source, 64)
    table = {name: value for name, value in vars(yarn.scaling).items() if value is not None}
    made, magnitude = theirs({"rope_type": "yarn", "rope_theta": theta} | table, 64)
    assert magnitude == yarn.magnitude == 1
    plain = theta ** (-np.arange(32) / 32)
    found = np.abs(made - exact).max()
    for first in range(32):
        for last in range(first + 1, 64):
            ramp = np.clip((np.arange(32) - first) / (last - first), 0, 1)
            assert found <= np.abs(plain * (1 - ramp + ramp / factor) - exact).max() + 1e-9
    assert drift(yarn, source, 64) == pytest.approx(FAR * found, rel=1e-3)
    assert (np.abs(made / exact - 1) < 1e-5).sum() >= 29 - 9 * (theta == 500)  # three of 32 differ


def test_the_stock_models_drift_by_a_third_of_a_radian():
    for theta, factor, width in list(STOCK.values())[:2]:
        source = llama3(theta, factor)
        assert 0.25 < drift(as_yarn(source, 64), source, 64) < 0.35, width


def test_other_scalings_have_none():
    for scaling in (None, LinearScaling(factor=2.0), LongRopeScaling(factors=(1.0,) * 32)):
        assert as_yarn(RopeConfig(scaling=scaling), 64) is None
    yarn = as_yarn(llama3(500.0, 8.0), 64)
    assert stands_in(yarn, llama3(500.0, 8.0), 64)
    assert not stands_in(yarn, llama3(500.0, 4.0), 64)
    assert not stands_in(llama3(500.0, 8.0), llama3(500.0, 8.0), 64)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_pair_continues_its_own(head_dim):
    """Also where the yarn's angle is nearer to another pair's."""
    source = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=head_dim, rope=llama3(500_000.0, 32.0))
    step = head_dim // 64
    assert slots_of(source, as_yarn(source.rope, 64), 64) == list(range(0, 32 * step, step))


def test_one_kv_head_rotates_by_the_yarn(gpt, apart):
    """All pairs are kept, so only the angles change: the same as the source with those, as longrope's factors."""
    source = GroupedConfig(
        n_query_head=4, n_kv_head=1, head_dim=64, v_head_dim=5, rope=llama3(500.0, 8.0, 32)
    )
    model = gpt(source)
    text = torch.arange(60) % 29
    result, certificate = rehead.convert(model, "mla", target="canonical", kv_rank=5, calibration=text)
    layer = result.config.attention[0]
    assert isinstance(layer, LatentConfig)
    assert (layer.qk_rope_head_dim, layer.rope) == (64, as_yarn(source.rope, 64))
    assert layer.rope.score_scale > 1.4  # which the queries make up for
    assert not certificate.exact
    assert "by a yarn's angles" in str(certificate)
    factors = (500.0 ** (-torch.arange(32, dtype=torch.float64) / 32) / layer.rope.frequencies(64)).tolist()
    rope = RopeConfig(theta=500.0, scaling=LongRopeScaling(factors=tuple(factors)))
    other = gpt(GroupedConfig(n_query_head=4, n_kv_head=1, head_dim=64, v_head_dim=5, rope=rope))
    other.load_state_dict(model.state_dict())
    assert apart(other, result) < 1e-12
    assert apart(model, result) > 1e-6


@pytest.mark.parametrize(
    ("rope", "original"),
    [
        (as_yarn(llama3(500_000.0, 8.0), 64), 16_384),  # Llama 3.1
        (as_yarn(llama3(500_000.0, 32.0), 64), 8192),  # Llama 3.2 reaches 262,144
        (RopeConfig(scaling=YarnScaling(factor=3.0, mscale=0.7, mscale_all_dim=0.5)), 43_691),
        (RopeConfig(scaling=YarnScaling(factor=4.0, attention_factor=1.0)), 32_768),
        (RopeConfig(), None),
        (llama3(500_000.0, 8.0), 8192),
    ],
)
def test_a_longer_yarn_has_the_same_angles(rope, original):
    """vLLM's class makes factor x original rows of angles; a later position is an IndexError there."""
    found = reaching(rope, 131_072)
    assert torch.equal(found.frequencies(64), rope.frequencies(64))
    assert (found.magnitude, found.score_scale) == (rope.magnitude, rope.score_scale)
    assert original == (None if rope.scaling is None else found.scaling.original_max_position_embeddings)
    if isinstance(found.scaling, YarnScaling):
        assert found.scaling.factor * found.scaling.original_max_position_embeddings >= 131_072
        table = {name: value for name, value in vars(found.scaling).items() if value is not None}
        angles, _ = theirs({"rope_type": "yarn", "rope_theta": rope.theta} | table, 64)
        assert np.abs(angles / found.frequencies(64).numpy() - 1).max() < 1e-5


def test_narrower_heads_are_refused():
    source = GroupedConfig(n_query_head=4, n_kv_head=4, head_dim=32, rope=llama3(500.0, 8.0))
    with pytest.raises(ConfigError, match=r"scaled rope: native MLA kernels compute other angles"):
        Target(to="mla", target="canonical", kv_fraction=0.6).attention(source, 200)


def test_the_ramp_is_rounded_as_it_was_meant():
    """beta_fast and beta_slow are half a pair away from where rounding would change."""
    scaling = as_yarn(llama3(500_000.0, 32.0), 64).scaling
    pairs = [
        32 * math.log(8192 / (beta * 2 * math.pi)) / math.log(500_000.0)
        for beta in (scaling.beta_fast, scaling.beta_slow)
    ]
    assert pairs == pytest.approx([14.5, 16.5])
