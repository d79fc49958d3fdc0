"""The certificate: the same fields for all, and every number what it says."""

import functools
import json
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion import Certificate, Statistics, path
from rehead.conversion.certificate import CERTIFICATE, LayerRecord, Text
from rehead.conversion.texts import Passage
from rehead.errors import ConfigError, InvalidInput

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, qkv_bias=True)
MHA = replace(GQA, n_kv_head=6)
MLA = LatentConfig(
    n_query_head=6, n_kv_head=2, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)
TIED = GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=9, tie_kv=True)
ROPE = RopeConfig()
ONE_OF_EACH = {
    "repeat-heads": (GQA, MHA),
    "pool-heads": (MHA, GQA),
    "head-map": (GQA, replace(GQA, head_map="modular")),
    "rope-layout": (replace(GQA, rope=ROPE), replace(GQA, rope=replace(ROPE, layout="interleaved"))),
    "factor": (GQA, replace(MLA, qkv_bias=True)),
    "pad-rank": (MLA, replace(MLA, kv_lora_rank=11)),
    "expand": (MLA, replace(GQA, qkv_bias=False)),
    "reduce": (MLA, TIED),
}


def table_shape(value):
    """Names and types, whatever the numbers."""
    if isinstance(value, dict):
        return {key: table_shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [table_shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.parametrize(("source", "target"), ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_the_same_fields_for_every_conversion(source, target, gpt, words, tmp_path):
    name = next(name for name, pair in ONE_OF_EACH.items() if pair == (source, target))
    model = gpt(source)
    result, certificate = rehead.convert(model, target, calibration=words(90), test=words(70, seed=1))
    assert [layer.steps for layer in certificate.layers] == [[name]] * 2
    table = asdict(certificate)
    layer = table_shape(table["layers"])[0]
    assert list(layer) == [
        "steps", "methods", "why", "source", "result", "kv_numbers", "lost_energy", "output_error", "taught",
    ]  # fmt: skip
    assert set(table["logits"]) == {
        "max_error", "relative_error", "kl", "argmax_flips", "change_error", "tokens",
    }  # fmt: skip
    assert table["format"] == "rehead-certificate-1"
    assert table["test"].keys() == {
        "name", "tokens", "sha256", "read", "bytes", "text_sha256", "length", "bos",
    }  # fmt: skip
    fitted = any(layer.methods for layer in certificate.layers)  # an exact one reads no text
    assert [text.keys() for text in table["calibration"]] == [table["test"].keys()] * fitted
    assert (table["held_out"], table["length"]) == (False, 16)
    assert table["loss"] == pytest.approx(table["loss"])
    assert certificate.exact is (name not in ("pool-heads", "factor"))
    assert table["healing"] == table["earlier"] == []
    # to disk and back
    assert json.loads(certificate.to_json()) == table
    assert certificate.to_json().endswith("}\n")
    (tmp_path / CERTIFICATE).write_text(certificate.to_json())
    assert Certificate.read(tmp_path) == certificate
    # sizes are those of the models
    assert certificate.parameters == [sum(p.numel() for p in one.parameters()) for one in (model, result)]
    assert certificate.layers[0].kv_numbers == [source.kv_numbers(), target.kv_numbers()]
    assert certificate.kv_bytes_per_token == [2 * 8 * one.kv_numbers() for one in (source, target)]
    assert certificate.dtype == "float64"
    assert certificate.environment["torch"] == torch.__version__


def test_a_lossy_promise_that_lost_nothing_is_exact(gpt):
    """Copies are pooled: no promise, but nothing was lost."""
    model = gpt(GQA)
    copies, _ = rehead.convert(model, MHA)
    for method in (None, "mean", "first"):
        _, certificate = rehead.convert(copies, GQA, method=method)
        assert certificate.exact is True
        assert certificate.layers[0].lost_energy <= 1e-20
        assert certificate.layers[0].why == ["6 KV heads become 2"]
    _, certificate = rehead.convert(gpt(MHA), GQA)
    assert certificate.exact is False


def test_a_rank_that_is_enough_for_these_weights_is_exact(gpt, apart):
    """Below full rank, but the matrix is deficient."""
    model = gpt(GQA, n_layer=1)
    attention = model.layers[0].self_attn
    stack = torch.randn(18, 5) @ torch.randn(5, 23)
    attention.k_proj.weight.data, attention.v_proj.weight.data = stack[:8].clone(), stack[8:].clone()
    result, certificate = rehead.convert(model, to="mla", kv_rank=5)
    assert certificate.exact is True
    assert apart(model, result) < 1e-12
    _, certificate = rehead.convert(model, to="mla", kv_rank=4)
    assert certificate.exact is False


def test_one_lossy_layer_is_a_lossy_model(gpt):
    model = gpt(MHA, GQA)
    _, certificate = rehead.convert(model, GQA)
    assert [layer.steps for layer in certificate.layers] == [["pool-heads"], []]
    assert certificate.exact is False
    assert [layer.lost_energy == 0 for layer in certificate.layers] == [False, True]


def test_lost_energy_by_hand(gpt):
    """Of the stacked keys' and values' weights, per layer; of two lossy steps, what both leave."""
    model = gpt(GQA)
    _, certificate = rehead.convert(model, to="mla", kv_rank=7, method="svd")
    for layer, found in zip(model.layers, certificate.layers, strict=True):
        stack = torch.cat([layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])
        values = torch.linalg.svdvals(stack.detach()).square()
        assert found.lost_energy == pytest.approx(float(values[7:].sum() / values.sum()), rel=1e-10)
    mha = gpt(MHA)
    _, pooled = rehead.convert(mha, to="gqa", n_kv_head=2)
    half, _ = rehead.convert(mha, to="gqa", n_kv_head=2)
    _, factored = rehead.convert(half, to="mla", kv_rank=7)
    _, both = rehead.convert(mha, to="mla", n_kv_head=2, kv_rank=7)
    for one, other, all_steps in zip(pooled.layers, factored.layers, both.layers, strict=True):
        assert all_steps.methods == ["procrustes", "svd"]
        kept = (1 - one.lost_energy) * (1 - other.lost_energy)
        assert all_steps.lost_energy == pytest.approx(1 - kept, rel=1e-9)


def test_output_error_by_hand(gpt, words):
    """RMS of the difference on the inputs each layer gets in the source, over the RMS of its output."""
    model, test = gpt(GQA), words(70)
    result, certificate = rehead.convert(model, to="mla", kv_rank=7, test=test)
    from rehead.conversion.blocks import blocks_of

    (ids, targets), *_ = blocks_of(model, test)
    counts = targets != -100
    assert not counts.all()  # the last window is padded, and its padding is nobody's input
    x = model.embed_tokens(ids) + model.embed_positions(torch.arange(ids.shape[1]))
    for layer, other, found in zip(model.layers, result.layers, certificate.layers, strict=True):
        normed = layer.input_layernorm(x)
        expected = layer.self_attn(normed)[counts]
        difference = other.self_attn(normed)[counts] - expected
        error = (difference.square().mean() / expected.square().mean()).sqrt().item()
        assert found.output_error == pytest.approx(error, rel=1e-9)
        x = layer(x)


def test_logits_and_losses_by_hand(gpt, words):
    """KL of the source to the result, changed likeliest tokens, nats per token, each over every target."""
    model, test = gpt(GQA), words(70)
    result, certificate = rehead.convert(model, to="mla", kv_rank=7, test=test)
    from rehead.conversion.blocks import blocks_of

    kl, flips, losses, largest, error = [], [], [], 0.0, 0.0
    for ids, targets in blocks_of(model, test):
        with torch.no_grad():
            logits = [one(ids)[targets != -100] for one in (model, result)]
        logs = [one.log_softmax(-1) for one in logits]
        kl.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
        flips.append(logs[0].argmax(-1) != logs[1].argmax(-1))
        wanted = targets[targets != -100]
        losses.append(torch.stack([-log[torch.arange(len(wanted)), wanted] for log in logs]))
        centred = [one - one.mean(-1, keepdim=True) for one in logits]
        largest = max(largest, centred[0].abs().max().item())
        error = max(error, (centred[0] - centred[1]).abs().max().item())
    found = certificate.logits
    assert found["tokens"] == 69
    assert found["kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-9)
    assert found["argmax_flips"] == pytest.approx(torch.cat(flips).double().mean().item())
    before, after = torch.cat(losses, 1)
    assert certificate.loss == pytest.approx([before.mean().item(), after.mean().item()], rel=1e-9)
    assert found["change_error"] == pytest.approx((after - before).std().item() / 69**0.5, rel=1e-9)
    assert found["max_error"] == pytest.approx(error, rel=1e-9)
    assert found["relative_error"] == pytest.approx(error / largest, rel=1e-9)


def test_without_a_text_random_tokens(gpt):
    model = gpt(GQA)
    _, certificate = rehead.convert(model, to="mla", kv_rank=7)
    assert certificate.loss is certificate.test is None
    assert certificate.calibration == []
    assert certificate.logits["tokens"] == 4 * model.config.block_size
    assert certificate.logits["kl"] > 0
    again, other = (rehead.convert(model, to="mla", kv_rank=7, seed=seed)[1] for seed in (0, 5))
    assert again == certificate
    assert other.seed == 5
    assert other.logits != certificate.logits


def test_a_text_is_named_by_its_tokens(words):
    ids = words(100)

    def of(ids):
        return Text.of(Passage(name="words", ids=ids), 60)  # token by token

    text = of(ids)
    assert (text.name, text.tokens, text.read) == ("words", 100, 60)
    assert of(ids[:50]).read == 50
    assert Text.of(Passage(name="words", ids=ids), 60, 16).read == 48  # whole windows,
    assert Text.of(Passage(name="words", ids=ids), 5, 16).read == 16  # at least one
    assert of(ids.astype(np.uint16)) == text  # as it is stored, or as it is computed
    assert of(words(100, seed=1)).sha256 != text.sha256


def test_fitting_and_measuring_on_one_text_is_refused(gpt, words):
    model, ids = gpt(GQA), words(70)
    with pytest.raises(
        ConfigError, match=r"calibration and test text are the same.*Give another text"
    ) as caught:
        rehead.convert(model, to="mla", kv_rank=7, calibration=ids, test=ids.astype(np.uint16))
    assert "Give another text" in str(caught.value)
    rehead.convert(model, to="mla", kv_rank=7, calibration=ids, test=words(70, seed=1))


DESCRIBED = {
    "mqa, 1 KV head of 4": replace(GQA, n_kv_head=1),
    "gqa, 2 KV heads of 4, modular, window 5": replace(GQA, head_map="modular", window=5),
    "mha, 6 KV heads of 4, rope": replace(MHA, rope=ROPE),
    "gqa, 2 KV heads of 4, rope interleaved": replace(GQA, rope=RopeConfig(layout="interleaved")),
    "mqa, 1 KV head of 9, tied": TIED,
    "mla, rank 9": MLA,
    "mla, rank 9, rebuilt keys, rope": replace(MLA, rope=ROPE),
    "mla, rank 9 + 6 rotated, rope": replace(MLA, qk_rope_head_dim=6),
}


@pytest.mark.parametrize(("words", "config"), DESCRIBED.items(), ids=DESCRIBED)
def test_in_a_few_words(words, config):
    assert config.describe() == words


DAMAGED = ["", "[]", "{}", '{"format": 1}', "null", "[" * 100_000]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:20])
def test_what_is_no_certificate(text, tmp_path):
    (tmp_path / CERTIFICATE).write_text(text)
    with pytest.raises(InvalidInput, match="is not a conversion certificate"):
        Certificate.read(tmp_path)


HUGE = 10**400
"""A whole number that no float holds."""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"logits": {"tokens": 3, "max_error": 0, "relative_error": 0, "kl": HUGE, "argmax_flips": 0}},
            "out of bounds",
        ),
        ({"seed": 2**63}, "the number 9223372036854775808 is out of bounds"),
        ({"kv_bytes_per_token": [-(2**63), 1]}, "the number -9223372036854775808 is out of bounds"),
        ({"loss": [1.0, float("inf")]}, "1e999 is not a number that float64 can hold"),
        (
            {"source": {"a": functools.reduce(lambda inner, _: [inner], range(40), 1)}},
            "more than 32 tables and lists",
        ),
        (
            {"source": functools.reduce(lambda inner, _: {"a": inner}, range(800), 1)},
            "more than 32 tables and lists",
        ),
        ({"layers": []}, "without layers"),
        ({"loss": [1.0]}, "not a pair: before and after"),
        ({"kv_bytes_per_token": [0, 0]}, "kv_bytes_per_token=[0, 0]: its source caches nothing"),
        ({"logits": {"tokens": 3.0}}, "its logits lack argmax_flips"),
        (
            {"format": "rehead-certificate-2"},
            "format 'rehead-certificate-2', expected 'rehead-certificate-1'",
        ),
    ],
)
def test_a_certificate_of_somebody_else_is_held_to_bounds(change, why, gpt, tmp_path):
    """Its numbers are computed with and written: those that cannot be end in one line."""
    _, certificate = rehead.convert(gpt(GQA), to="mha")
    table = json.loads(certificate.to_json())
    (tmp_path / CERTIFICATE).write_text(json.dumps(table | {"seed": 2**63 - 1}))
    assert Certificate.read(tmp_path).seed == 2**63 - 1
    (tmp_path / CERTIFICATE).write_text(json.dumps(table | change).replace("Infinity", "1e999"))
    with pytest.raises(InvalidInput, match="is not a conversion certificate") as caught:
        Certificate.read(tmp_path)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 400


def test_no_certificate_at_all(tmp_path):
    with pytest.raises(InvalidInput, match=CERTIFICATE):
        Certificate.read(tmp_path)


def test_fields_are_all_documented_by_their_names():
    """What a script may rely on; growing it is fine, so this list grows with it."""
    assert {field.name for field in fields(Certificate)} >= {
        "format", "exact", "layers", "source", "result", "logits", "loss", "kv_bytes_per_token", "parameters",
        "dtype", "calibration", "test", "held_out", "length", "seed", "environment",
    }  # fmt: skip


def test_what_no_text_showed_is_still_lost():
    """Heads that differ only where the calibration text has no energy are pooled with a loss."""
    source = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4)
    weights = {name: weight.detach().double() for name, weight in source.build(23).named_parameters()}
    for name in ("k_proj.weight", "v_proj.weight"):
        first, second = weights[name].chunk(2)
        weights[name] = torch.cat([first, torch.cat([first[:, :1], second[:, 1:]], dim=1)])
    moment = torch.zeros(24, 24, dtype=torch.float64)
    moment[0, 0] = 1.0
    (step,) = path(source, replace(source, n_kv_head=1), 23)
    done = step.conversion.convert(weights, step.source, step.result, Statistics(inputs=moment), "mean")
    assert done.lost <= 1e-20
    assert done.residual > 0.1
    assert not LayerRecord(steps=[step], methods=["mean"], converted=[done]).exact
