"""Rotary heads converted to a decoupled rotary part, as transformers' own DeepSeek class computes them."""

import pytest
import torch
import transformers

import rehead
from rehead.conversion.export.folder import export_folder
from rehead.errors import ConfigError

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
BASE = {
    "vocab_size": 53,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
UNEVEN = {
    "llama": {},
    "tied, llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "mha, heads of 24": {"num_key_value_heads": 4, "head_dim": 24},
}


def made(fields, folder):
    """A Llama of transformers, with no weight at its first value, saved in `folder`."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | fields)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def converted(tmp_path, fields, **options):
    made(fields, tmp_path / "llama")
    source = rehead.load(tmp_path / "llama")
    text = torch.randint(1, 53, (500,), generator=torch.Generator().manual_seed(3))
    model, _ = rehead.convert(source, "mla", calibration=text, length=64, **options)
    rehead.save(model, tmp_path / "converted")
    return model


def require_alike(ours, folder, ids):
    """The same logits, the same greedy tokens, from a cache of as many numbers."""
    theirs, info = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert relative(theirs(ids).logits, ours(ids)) <= 5e-6
    assert relative(rehead.load(folder)(ids), ours(ids)) <= 5e-6
    text = ids[:, :30]
    options = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(text)}
    expected = rehead.generate(ours, text, max_new_tokens=32, temperature=0)
    assert theirs.generate(text, **options).tolist() == expected.tolist()
    return theirs.config


@torch.no_grad()
@pytest.mark.parametrize("fields", UNEVEN.values(), ids=list(UNEVEN))
def test_an_uneven_rotary_part(fields, tmp_path):
    """In transformers its frequencies are longrope's factors."""
    ours = converted(tmp_path, fields, target="uneven", kv_fraction=0.5)
    attention = ours.config.attention[0]
    architecture, certificate = export_folder(
        tmp_path / "converted", tmp_path / "out", "deepseek_v3", "transformers"
    )
    assert (architecture, certificate.exact) == ("DeepseekV3ForCausalLM", True)
    config = require_alike(ours, tmp_path / "out", torch.randint(1, 53, (2, 60)))
    n_kv_head = BASE["num_key_value_heads"] if "num_key_value_heads" not in fields else 4
    numbers = n_kv_head * 2 * fields.get("head_dim", 16)
    assert config.kv_lora_rank + config.qk_rope_head_dim == numbers // 2 == attention.kv_numbers()
    with pytest.raises(
        ConfigError, match=r"64 rotated numbers of frequencies of its own.*--for transformers"
    ):
        export_folder(tmp_path / "converted", tmp_path / "vllm", "deepseek_v3", "vllm")


@torch.no_grad()
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_canonical_rotary_part(engine, tmp_path):
    """Heads of 64 have DeepSeek's angles; for vLLM the latent, the heads and the values are widened with zeros."""
    ours = converted(tmp_path, {"head_dim": 64}, target="canonical", kv_fraction=0.5)
    assert ours.config.attention[0].rope.scaling is None
    export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", engine)
    config = require_alike(ours, tmp_path / "out", torch.randint(1, 53, (2, 60)))
    sizes = (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    assert sizes == ((64, 64, 64, 64) if engine == "transformers" else (256, 64, 128, 128))


@torch.no_grad()
def test_half_a_head_is_canonical_in_every_other_pair(tmp_path):
    """Heads of 32 have each second of DeepSeek's 32 angles."""
    ours = converted(tmp_path, {"head_dim": 32}, target="canonical", kv_fraction=0.5)
    export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", "vllm")
    assert require_alike(ours, tmp_path / "out", torch.randint(1, 53, (2, 60))).qk_rope_head_dim == 64
