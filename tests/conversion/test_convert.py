"""A whole model converted: what is refused, what is chosen, what is left alone."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, SummedConfig
from rehead.config import RNNConfig
from rehead.conversion import Target
from rehead.conversion.finite import require_holds
from rehead.errors import ConfigError, InvalidInput, NumericError, ReheadError
from rehead.model import build

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, qkv_bias=True)
MHA = replace(GQA, n_kv_head=6)
MLA = LatentConfig(
    n_query_head=6, n_kv_head=2, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)


def test_texts_that_do_not_fit_are_refused(gpt, words):
    model = gpt(GQA)
    for name in ("calibration", "test"):
        with pytest.raises(InvalidInput, match="1 token leaves nothing to predict"):
            rehead.convert(model, to="mla", kv_rank=7, **{name: words(1)})
        with pytest.raises(InvalidInput, match="29"):
            rehead.convert(model, to="mla", kv_rank=7, **{name: words(50, vocab=31)})


REFUSED = {
    "two layers for three": (lambda model: [GQA] * 3, {}, "3 attentions for 2 layers"),
    "an option beside a config": (lambda model: MHA, {"n_kv_head": 3}, "n_kv_head beside a config"),
    "another model": (
        lambda model: replace(model.config, n_hidden=99),
        {},
        "the two models differ beyond their attention",
    ),
    "unknown option": (lambda model: "mla", {"kv_rnak": 3}, "'kv_rnak'.*kv_rank"),
    "unknown target": (lambda model: "mlaa", {}, "unknown target 'mlaa'. Did you mean 'mla'"),
}


@pytest.mark.parametrize(("to", "options", "says"), REFUSED.values(), ids=REFUSED)
def test_what_convert_refuses(to, options, says, gpt):
    model = gpt(GQA)
    with pytest.raises(ConfigError, match=says):
        rehead.convert(model, to(model), **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_damaged_model_is_refused(bad, gpt):
    model = gpt(GQA)
    model.layers[1].mlp.up_proj.weight.data[3, 4] = bad
    with pytest.raises(NumericError, match=r"layers.1.mlp.up_proj.weight holds NaN or infinity"):
        rehead.convert(model, to="mla")


def test_a_model_without_heads_is_refused():
    model = build(RNNConfig(vocab_size=29, block_size=16, n_embd=5, n_layer=1, n_hidden=7, n_output=29))
    with pytest.raises(ConfigError, match="type rnn has no heads to convert"):
        rehead.convert(model, to="mla")


def test_weights_that_overflow_are_not_written_as_exact(gpt):
    """Multiplied out they may leave the range of the dtype: refused, or at least not called exact."""
    model = gpt(MLA).half()
    for layer in model.layers:
        layer.self_attn.kv_b_proj.weight.data *= 1000
        layer.self_attn.o_proj.weight.data *= 1000
    assert all(weight.isfinite().all() for weight in model.parameters())
    try:
        result, certificate = rehead.convert(model, to="reduced")
    except NumericError:
        return
    assert all(weight.isfinite().all() for weight in result.parameters()) or not certificate.exact
    json.loads(certificate.to_json(), parse_constant=pytest.fail)  # NaN is no JSON


def test_a_result_that_is_not_finite_has_no_small_error(gpt, words):
    """NaN in one model is never an error of 0."""
    from rehead.conversion.blocks import blocks_of
    from rehead.measure.fidelity import compare

    model, other = gpt(GQA), gpt(GQA)
    other.head.weight.data[3] = float("nan")
    try:
        found = compare(model, other, blocks_of(model, words(50)))
    except ReheadError:
        return
    assert not found.max_error < 1
    assert not found.relative_error < 1


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_seed_will_do_or_is_refused(seed, gpt):
    with contextlib.suppress(ConfigError):
        rehead.convert(gpt(GQA), to="mla", seed=seed)


def test_the_reduced_form_of_a_reduced_form_is_itself(gpt):
    """Nothing is left to multiply out."""
    model = gpt(MLA)
    reduced, _ = rehead.convert(model, to="reduced")
    (tied, _) = reduced.config.attention
    assert Target(to="reduced").attention(tied, 23) == tied


def test_summed_queries_that_stay_are_copied(gpt, apart):
    """A layer that no step changes keeps the weights of its own config."""
    summed = SummedConfig(n_query_head=6, n_kv_head=2, head_dim=4)
    model = gpt(summed)
    for targets in ([summed, summed], [summed, summed.equivalent()]):
        result, certificate = rehead.convert(model, targets)
        assert certificate.exact
        assert list(result.config.attention) == targets
        assert apart(model, result) < 1e-12


def test_layers_step_together(gpt, words):
    """What a second step looks at is the model after the first: a text is read again, of pooled heads."""
    model, ids = gpt(MHA), words(200)
    target = replace(MLA, qkv_bias=True, kv_lora_rank=7)
    at_once, certificate = rehead.convert(model, target, calibration=ids)
    assert certificate.layers[0].methods == ["procrustes", "weighted"]
    pooled, _ = rehead.convert(model, GQA, calibration=ids)
    later, _ = rehead.convert(pooled, target, calibration=ids)
    for weight, other in zip(at_once.parameters(), later.parameters(), strict=True):
        torch.testing.assert_close(weight, other)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32])
def test_ids_as_a_file_keeps_them(dtype, gpt, words):
    model, ids = gpt(GQA), words(90)
    _, expected = rehead.convert(model, to="mla", kv_rank=7, calibration=words(80), test=ids)
    again = words(80).astype(dtype), ids.astype(dtype)
    _, certificate = rehead.convert(model, to="mla", kv_rank=7, calibration=again[0], test=again[1])
    assert certificate == expected


def test_gradients_may_be_off(gpt, words):
    """The weighted method needs them, whatever the caller has set."""
    model, ids = gpt(GQA), words(90)
    _, expected = rehead.convert(model, to="mla", kv_rank=7, calibration=ids)
    with torch.no_grad():
        _, certificate = rehead.convert(model, to="mla", kv_rank=7, calibration=ids)
    assert certificate == expected
    assert certificate.layers[0].methods == ["weighted"]


def test_the_same_again_is_the_same_to_the_bit(gpt, words):
    model, ids = gpt(MHA), words(90)
    one, other = (rehead.convert(model, to="mla", kv_rank=7, calibration=ids)[0] for _ in range(2))
    for weight, again in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, again)


def test_weights_beyond_float16_name_the_way_out():
    """`convert` keeps the source's format: a copy in a wider one is what helps."""
    with pytest.raises(NumericError, match=r"leaves the range of float16: .* `rehead export --dtype bf16`"):
        require_holds({"k_proj.weight": torch.tensor([[1e6]])}, torch.float16, "layers.0.self_attn")
