"""What cannot go out as DeepSeek's class is refused with the way around it."""

from dataclasses import replace

import pytest
import torch

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.rope_scaling import LinearScaling, YarnScaling
from rehead.config import ExpertsConfig, ModelOptions
from rehead.conversion.base import CannotConvert
from rehead.conversion.export.deepseek import own_target, require_sayable, stock_target, to_deepseek
from rehead.errors import ConfigError
from rehead.model import build

WIDTH = 3000
ROPE = RopeConfig(theta=100.0)
MQA = GroupedConfig(n_query_head=4, n_kv_head=1, head_dim=32, rope=ROPE)
STILL = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=128)
MLA = LatentConfig(
    n_query_head=4, kv_lora_rank=256, qk_nope_head_dim=7, qk_rope_head_dim=16, v_head_dim=9, rope=ROPE
)
EXPERTS = ExpertsConfig(layers=(0,), n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
SCALED = replace(ROPE, scaling=LinearScaling(factor=2.0))


def test_sizes_are_those_of_kernels():
    """64 rotated numbers, heads of 128, and a latent of 512; beside a rotary part one of 256, if it fits."""
    for layer, rank in (
        (MQA, 512),
        (STILL, 512),
        (replace(MQA, head_dim=64), 512),
        (replace(MQA, head_dim=144, v_head_dim=9, rope=RopeConfig(partial_rotary_factor=1 / 9)), 512),
        (MLA, 256),
        (replace(MLA, kv_lora_rank=257), 512),
        (replace(MLA, kv_lora_rank=512), 512),
    ):
        made = stock_target(layer, WIDTH)
        assert (made.kv_lora_rank, made.qk_nope_head_dim, made.qk_rope_head_dim, made.v_head_dim) == (
            rank,
            128,
            64,
            128,
        )


REFUSED = {  # an attention, and what the message must name; the ways out are in test_ways_out.py
    "biases": (replace(STILL, o_bias=True), "its attention has biases"),
    "biases of queries": (replace(MQA, qkv_bias=True), "its attention has biases"),
    "biases of a latent": (replace(MLA, down_bias=True), "its attention has biases"),
    "a width": (replace(MQA, head_dim=24), "head_dim=24 with rope"),
    "a large width": (replace(MQA, head_dim=128), "head_dim=128 with rope"),
    "numbers that stand still": (
        replace(MQA, head_dim=160, rope=RopeConfig(partial_rotary_factor=0.1)),
        "head_dim=160, of which 144 do not rotate: vLLM's heads hold 128 such numbers",
    ),
    "scaled rope": (replace(MQA, rope=SCALED), "computes other angles"),
    "many numbers": (replace(STILL, n_kv_head=4), "need 1024 numbers a token, and the kernels of engines take 512"),
    "a wide latent": (replace(MLA, kv_lora_rank=513), "need 513 numbers"),
    "frequencies of a latent": (replace(MLA, rope=SCALED), "frequencies of its own"),
    "a rotary part": (replace(MLA, qk_rope_head_dim=24), "frequencies of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_do_not_know_is_refused(name):
    layer, named = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        stock_target(layer, WIDTH)
    assert named in str(caught.value)


NO_CLASS = {
    "a window": (replace(MQA, window=5), "window=5: DeepseekV3ForCausalLM has no window"),
    "norms": (
        replace(MLA, qk_rope_head_dim=0, qk_norm_eps=1e-6, rope=None),
        "with norms on queries and keys: no engine has a class",
    ),
    "rebuilt keys": (
        replace(MLA, qk_rope_head_dim=0, qk_nope_head_dim=8),
        "whose keys are rebuilt from a latent and then rotated",
    ),
}


@pytest.mark.parametrize("name", NO_CLASS)
@pytest.mark.parametrize("target", [stock_target, own_target])
def test_what_no_class_has_is_refused_for_every_engine(name, target):
    layer, named = NO_CLASS[name]
    with pytest.raises(ConfigError) as caught:
        target(layer, WIDTH)
    assert named in str(caught.value)


def llama(**changes):
    return replace(
        ModelOptions(shape="llama", n_layer=1, n_query_head=2, n_embd=32).resolve(11, 16), **changes
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (llama(mlp="gelu"), "cannot represent mlp=gelu, which"),
        (llama(mlp_bias=True), "cannot represent mlp_bias=True, which"),
        (llama(logit_softcap=30.0), "cannot represent logit_softcap=30.0, which"),
        (
            ModelOptions(n_layer=1).resolve(11, 16),
            "norm=layernorm, mlp=gelu, mlp_bias=True, learned_positions=True",
        ),
        (llama(experts=EXPERTS), "Experts can only be exported in the class of their own family"),
    ],
)
def test_what_conversions_do_not_change_is_refused(config, named):
    require_sayable(llama())
    with pytest.raises(CannotConvert) as caught:
        require_sayable(config)
    assert named in str(caught.value)
    assert caught.value.reason.endswith("which no conversion changes")


def test_float16_cannot_hold_an_identity_norm():
    model = build(llama(attention=(MQA,))).half()
    with pytest.raises(ConfigError, match=r"float16 cannot hold .* use bfloat16 or float32"):
        to_deepseek(model)


def test_the_factor_that_a_yarn_puts_on_the_scores_of_a_rotary_part_is_divided_out():
    """A whole head that rotates has no such factor; MLA has."""
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
    model = build(llama(attention=(replace(MQA, rope=RopeConfig(scaling=scaling)),))).double().eval()
    converted, certificate = to_deepseek(model, "transformers")
    ids = torch.arange(64)[None] % model.config.vocab_size
    assert certificate.exact
    torch.testing.assert_close(converted(ids), model(ids), rtol=0, atol=1e-6)


def test_heads_that_rotate_by_themselves_are_not_exact():
    model = build(llama(attention=(replace(MQA, n_kv_head=2),))).eval()
    with pytest.raises(ConfigError, match="every KV head rotates in its own way"):
        to_deepseek(model)
