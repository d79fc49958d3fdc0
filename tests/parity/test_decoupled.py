"""Rotary heads converted to a decoupled rotary part, as transformers' own DeepSeek class computes them."""

import copy

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


def made(fields, folder, family="Llama"):
    """A model of transformers, with no weight at its first value, saved in `folder`."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**BASE | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def converted(tmp_path, fields, family="Llama", **options):
    made(fields, tmp_path / "source", family)
    source = rehead.load(tmp_path / "source")
    text = torch.randint(1, 53, (500,), generator=torch.Generator().manual_seed(3))
    model, _ = rehead.convert(source, "mla", calibration=text, length=64, **options)
    rehead.save(model, tmp_path / "converted")
    return model


def require_alike(ours, folder, ids):
    """The same logits, the same greedy tokens, from a cache of as many numbers.

    Compared with float64: how much float32 rounds depends on the CPU, and two sides that round differ by twice as much.
    """
    theirs, info = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    exact = rehead.load(folder).double()(ids)
    assert relative(exact, copy.deepcopy(ours).double()(ids)) <= 5e-6
    assert relative(theirs(ids).logits, exact) <= 5e-6
    assert relative(rehead.load(folder)(ids), exact) <= 5e-6
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
@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang", "mlx"])
@pytest.mark.parametrize("fields", [{}, {"rope_parameters": LLAMA3}], ids=["plain", "llama3"])
def test_a_canonical_rotary_part(engine, fields, tmp_path):
    """Heads of 64 have DeepSeek's angles, Llama 3's by a yarn; for vLLM all sizes are widened with zeros."""
    ours = converted(tmp_path, {"head_dim": 64} | fields, target="canonical", kv_fraction=0.5)
    export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", engine)
    config = require_alike(ours, tmp_path / "out", torch.randint(1, 53, (2, 60)))
    assert config.rope_parameters["rope_type"] == ("yarn" if fields else "default")
    sizes = (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    assert sizes == ((256, 64, 128, 128) if engine in ("vllm", "sglang") else (64, 64, 64, 64))


@torch.no_grad()
def test_half_a_head_is_canonical_in_every_other_pair(tmp_path):
    """Heads of 32 have each second of DeepSeek's 32 angles."""
    ours = converted(tmp_path, {"head_dim": 32}, target="canonical", kv_fraction=0.5)
    export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", "vllm")
    assert require_alike(ours, tmp_path / "out", torch.randint(1, 53, (2, 60))).qk_rope_head_dim == 64


BIASED = {
    "qwen2": ("Qwen2", {}),
    "qwen2, mqa, tied": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}),
}


@torch.no_grad()
@pytest.mark.parametrize("share", [None, 0.5], ids=["all", "half"])
@pytest.mark.parametrize(("family", "fields"), BIASED.values(), ids=BIASED)
def test_biases_go_where_the_class_has_some(family, fields, share, tmp_path):
    """Those of the queries through a latent with a constant, those of the values into the output's."""
    ours = converted(tmp_path, fields, family, target="uneven", kv_fraction=share)
    ids = torch.randint(1, 53, (2, 60))
    if share is None:
        assert relative(ours(ids), rehead.load(tmp_path / "source")(ids)) <= 5e-6
    export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", "transformers")
    config = require_alike(ours, tmp_path / "out", ids)
    assert (config.attention_bias, config.q_lora_rank) == (True, 65)
    assert config.kv_lora_rank + config.qk_rope_head_dim == ours.config.attention[0].kv_numbers()


@torch.no_grad()
def test_biases_of_a_source_as_it_is(tmp_path):
    model, ids = made({}, tmp_path / "source", "Qwen2"), torch.randint(1, 53, (2, 60))
    export_folder(tmp_path / "source", tmp_path / "out", "deepseek_v3", "transformers")
    require_alike(rehead.load(tmp_path / "source"), tmp_path / "out", ids)
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out")
    assert relative(theirs(ids).logits, model(ids).logits) <= 5e-6


@torch.no_grad()
def test_biases_in_float16_files(tmp_path):
    """The latent of the queries is stored without loss: rounded to float16, the model predicts as before."""
    converted(tmp_path, {}, "Qwen2", target="uneven")
    export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", "transformers")
    ids = torch.randint(1, 53, (2, 60))
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out")
    exact = theirs(ids).logits
    for name, weight in theirs.named_parameters():
        if ".self_attn." in name:
            weight.copy_(weight.half().float())
    assert relative(theirs(ids).logits, exact) <= 2e-2


@torch.no_grad()
@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_engines_that_leave_biases_out(engine, tmp_path):
    converted(tmp_path, {}, "Qwen2", target="uneven", kv_fraction=0.5)
    with pytest.raises(ConfigError, match=r"biases.*leaves them out.*--for transformers"):
        export_folder(tmp_path / "converted", tmp_path / "out", "deepseek_v3", engine)


@torch.no_grad()
def test_canonical_has_no_biases(tmp_path):
    with pytest.raises(ConfigError, match=r"biases, which vLLM's and SGLang's .* Use --target uneven"):
        converted(tmp_path, {"head_dim": 64}, "Qwen2", target="canonical", kv_fraction=0.5)


@torch.no_grad()
@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV2"])
def test_a_stock_model_with_biases_is_read_and_written(family, q_lora_rank, tmp_path, caplog):
    sizes = {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6}
    fields = sizes | {"num_key_value_heads": 4, "attention_bias": True, "q_lora_rank": q_lora_rank}
    fields |= {"first_k_dense_replace": 2, "n_routed_experts": 4, "head_dim": 8}
    theirs = made(fields, tmp_path / "source", family)
    ours, ids = rehead.load(tmp_path / "source"), torch.randint(1, 53, (2, 60))
    assert relative(ours(ids), theirs(ids).logits) <= 5e-6
    name = {"DeepseekV3": "deepseek_v3", "DeepseekV2": "deepseek_v2"}[family]
    export_folder(tmp_path / "source", tmp_path / "out", name, "transformers")
    again = getattr(transformers, f"{family}ForCausalLM").from_pretrained(tmp_path / "out")
    assert relative(again(ids).logits, theirs(ids).logits) <= 5e-6
    with pytest.raises(ConfigError, match=r"vLLM cannot serve this model's .*biases"):
        export_folder(tmp_path / "source", tmp_path / "vllm", name, "vllm")
    assert not caplog.messages
    export_folder(tmp_path / "source", tmp_path / "any", name)
    assert [message for message in caplog.messages if "leave out the biases of this MLA" in message]
