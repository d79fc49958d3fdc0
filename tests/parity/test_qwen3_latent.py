"""Qwen3 as transformers writes it, converted by the command line: norms on rebuilt keys, before they are rotated."""

import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import rehead
from rehead.attention import LatentConfig
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.cli import main
from rehead.conversion.export.folder import export_folder
from rehead.conversion.steps.rotations import beside
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.measure import cache_bytes
from typed_lines import documents

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
FIELDS = {
    "vocab_size": 53, "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0, "bos_token_id": 1, "eos_token_id": None, "use_sliding_window": False,
    "attention_bias": False,
}  # fmt: skip
VARIATIONS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "mha, biased": {"num_key_value_heads": 6, "hidden_size": 23, "attention_bias": True},
}
N_PROMPT, N_NEW = 9, 32


@pytest.fixture(params=VARIATIONS.values(), ids=list(VARIATIONS))
def theirs(request, tmp_path):
    return written(FIELDS | request.param, tmp_path)


def written(fields, folder):
    """Their model in float64 with no weight at its first value, in the folder `theirs`."""
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / "theirs")
    return in_float64(model)


def in_float64(model):
    """Theirs, whose norms and angles are in float32 whatever the weights, all in float64."""
    for norm in model.modules():
        if isinstance(norm, Qwen3RMSNorm):
            norm.forward = partial(root_mean_square_norm, norm)
    width, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def cos_sin(x, position_ids):
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = cos_sin
    return model


def root_mean_square_norm(norm, x):
    return norm.weight * (x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt())


def converted(folder, *options):
    """The model that `rehead convert` writes, and its certificate."""
    words = ["convert", str(folder / "theirs"), str(folder / "ours"), *options]
    assert main(words) == 0
    return json.loads((folder / "ours/conversion.json").read_text()), rehead.load(folder / "ours")


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def norm_before_rebuilding(attention):
    """The norm of the keys, on the latent."""
    attention.k_norm = None
    rank = attention.config.kv_lora_rank
    attention.kv_a_layernorm.register_forward_hook(lambda *call: nn.functional.rms_norm(call[-1], (rank,)))


def norm_after_rotation(attention):
    rotary, norms = attention.rotary, [attention.q_norm, attention.k_norm] * 99
    attention.q_norm = attention.k_norm = None
    attention.rotary = lambda heads, *at: norms.pop(0)(rotary(heads, *at))


def decoded(ours, theirs, prompt):
    """The caches after the tokens that theirs generates: ours are the same, and so are the logits of every step."""
    wanted = theirs.generate(prompt, max_new_tokens=N_NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(rehead.generate(ours, prompt, max_new_tokens=N_NEW, temperature=0), wanted)
    caches = ours.new_cache(2, N_PROMPT + N_NEW)
    logits = [ours(prompt, cache=caches)[:, -1]]
    logits += [ours(one[:, None], cache=caches)[:, -1] for one in wanted[:, N_PROMPT:-1].T]
    assert relative(torch.stack(logits, 1), theirs(wanted).logits[:, N_PROMPT - 1 : -1]) <= 1e-12
    return caches


@torch.no_grad()
def test_all_logits_tokens_and_bytes_at_full_rank(theirs, tmp_path):
    certificate, ours = converted(tmp_path, "--to", "mla")
    assert certificate["exact"] is True
    layers = ours.config.attention
    assert all(isinstance(layer, LatentConfig) and layer.qk_norm_eps == 1e-6 for layer in layers)
    ids = torch.randint(1, 53, (2, 30))

    def check(model):
        assert relative(model(ids), theirs(ids).logits) <= 1e-12

    check(ours)
    caches = decoded(ours, theirs, ids[:, :N_PROMPT])
    held = sum(cache.n_bytes for cache in caches)
    assert held == cache_bytes(ours.config, N_PROMPT + N_NEW, 2, torch.float64)
    assert held == 2 * (N_PROMPT + N_NEW) * 8 * sum(layer.kv_lora_rank for layer in layers)
    for mutant in (norm_before_rebuilding, norm_after_rotation):
        wrong = rehead.load(tmp_path / "ours")
        for layer in wrong.layers:
            mutant(layer.self_attn)
        with pytest.raises(AssertionError):
            check(wrong)


def all_rotated(layer):
    """The attention that `--target uneven` makes where every key keeps its rotation."""
    target = Target(to="mla", target="uneven", rope_dim=layer.n_kv_head * layer.head_dim, kv_rank=1)
    made = target.attention(layer, 40)
    return replace(made, kv_lora_rank=beside(layer, made.qk_rope_head_dim, 40)[1])


def norm_of_all_keys(attention):
    """One RMS for all heads, instead of one for each."""
    own = attention.k_scale_proj.forward
    attention.k_scale_proj.forward = lambda x: own(x).view(*x.shape[:2], -1, 10).mean(2).tile(1, 1, 2)


def norm_left_out_of_rotated_parts(attention):
    rank, width = attention.config.kv_lora_rank, attention.config.qk_rope_head_dim
    own = attention._expand

    def expand(latent, positions):
        key, value = own(latent, positions)
        return torch.cat(
            [key[..., :-width], latent[:, :, None, rank : rank + width].expand_as(key[..., -width:])], -1
        ), value

    attention._expand = expand


@torch.no_grad()
def test_all_logits_and_tokens_with_a_rotary_part(tmp_path):
    """Absorbed: no key is rebuilt, and the cache holds the RMS of those that never were."""
    theirs = written(FIELDS, tmp_path)
    model = rehead.load(tmp_path / "theirs")
    ours, certificate = rehead.convert(model, all_rotated(model.config.attention[0]))
    assert certificate.exact is True
    ids = torch.randint(1, 53, (2, 30))

    def check(model):
        assert relative(model(ids), theirs(ids).logits) <= 1e-12

    check(ours)
    caches = decoded(ours, theirs, ids[:, :N_PROMPT])
    layers = ours.config.attention
    held = sum(cache.n_bytes for cache in caches)
    assert held == 2 * (N_PROMPT + N_NEW) * 8 * sum(layer.kv_lora_rank + 20 + 2 for layer in layers)
    for mutant in (norm_of_all_keys, norm_left_out_of_rotated_parts):
        wrong = copy.deepcopy(ours)
        for layer in wrong.layers:
            mutant(layer.self_attn)
        with pytest.raises(AssertionError):
            check(wrong)


@pytest.mark.process
@torch.no_grad()
def test_half_the_cache_as_a_user_types_it(tmp_path):
    """Half the numbers a token, and other logits, but not nonsense."""
    written(FIELDS, tmp_path)
    (certificate,) = documents("convert theirs ours --to mla --kv-fraction 0.5 --allow-loss", cwd=tmp_path)
    assert certificate["exact"] is False
    assert {name for layer in certificate["layers"] for name in layer["methods"]} == {"weighted"}
    assert [text["name"] for text in certificate["calibration"]] == ["self"]
    ours, theirs = rehead.load(tmp_path / "ours"), rehead.load(tmp_path / "theirs")
    assert [2 * layer.kv_numbers() for layer in ours.config.attention] == [40, 40, 40]
    ids = torch.randint(1, 53, (2, 30))
    assert certificate["logits"]["relative_error"] > 1e-3
    assert 1e-3 < relative(ours(ids), theirs(ids)) < 1


@torch.no_grad()
def test_a_latent_comes_back_as_theirs(tmp_path):
    """To a latent and back: the stock class can say it again."""
    theirs = written(FIELDS, tmp_path)
    model = rehead.load(tmp_path / "theirs")
    latent, _ = rehead.convert(model, to="mla")
    back, certificate = rehead.convert(latent, to="gqa", n_kv_head=2)
    assert certificate.exact is True
    assert back.config == model.config
    assert stock.fitting(back.config, list(families)).architecture == "Qwen3ForCausalLM"
    ids = torch.randint(1, 53, (2, 30))
    assert relative(back(ids), theirs(ids).logits) <= 1e-12


@pytest.mark.parametrize("engine", [None, "transformers", "vllm"])
@pytest.mark.parametrize("kind", ["auto", "deepseek_v3"])
def test_no_stock_class_has_a_latent_with_norms(kind, engine, tmp_path):
    written(FIELDS, tmp_path)
    latent, _ = rehead.convert(rehead.load(tmp_path / "theirs"), to="mla")
    rehead.save(latent, tmp_path / "latent")
    with pytest.raises(ConfigError, match="norm") as caught:
        export_folder(tmp_path / "latent", tmp_path / "out", kind, engine)
    assert "qwen3" in str(caught.value)
    for family in ("deepseek_v3", "youtu", "minicpm3"):
        plain = replace(latent.config.attention[0], rope=None)
        with pytest.raises(ConfigError, match="qk_norm_eps"):
            families[family].write(replace(latent.config, attention=(plain,) * 3))


@torch.no_grad()
@pytest.mark.parametrize("method", ["mean", "first", None])
def test_pooled_heads_are_their_class_again(method, tmp_path):
    """Fewer heads, the norm after pooling: transformers computes the same."""
    written(FIELDS | {"num_key_value_heads": 6}, tmp_path)
    pooled, certificate = rehead.convert(
        rehead.load(tmp_path / "theirs"), to="gqa", n_kv_head=2, method=method
    )
    assert certificate.exact is False
    assert {name for layer in certificate.layers for name in layer.methods} == {method or "mean"}
    rehead.save(pooled, tmp_path / "pooled")
    assert export_folder(tmp_path / "pooled", tmp_path / "out")[0] == "Qwen3ForCausalLM"
    theirs = in_float64(transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64))
    ids = torch.randint(1, 53, (2, 30))
    assert relative(pooled(ids), theirs(ids).logits) <= 1e-12


def test_normed_heads_are_not_turned(tmp_path):
    written(FIELDS, tmp_path)
    model = rehead.load(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"method='procrustes' with qk_norm_eps.* Use mean or first\.$"):
        rehead.convert(model, to="mqa", method="procrustes")
    with pytest.raises(ConfigError, match="method='svd'"):
        rehead.convert(model, to="mqa", method="svd")
