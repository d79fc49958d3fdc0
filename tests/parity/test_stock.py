"""Stock folders of transformers, read and written: the same logits, the same tokens, the same bytes."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint import families, own, read_config
from rehead.checkpoint.huggingface import stock
from rehead.conversion.export.deepseek import to_deepseek, with_eps
from rehead.conversion.export.folder import export_folder
from rehead.errors import ConfigError, InvalidInput
from rehead.measure import evaluate

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
BASE = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
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
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = YARN | {"beta_fast": 8.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.5, 4.5],
    "long_factor": [1.0, 1.5, 2.5, 4.5],
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 53, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 64, "eos_token_id": None}
LATENT = {
    "kv_lora_rank": 14,
    "q_lora_rank": 11,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
}
MLA = {name: size for name, size in LATENT.items() if "_k_" not in name and "expert" not in name}
CASES = {
    **{
        f"llama, {kv} KV heads, {'tied' if tie else 'untied'}": (
            "Llama",
            BASE | {"num_key_value_heads": kv, "head_dim": 10, "tie_word_embeddings": tie},
        )
        for kv in (1, 2, 6)
        for tie in (False, True)
    },
    "llama, biases": ("Llama", BASE | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
    "llama, scaled rope": ("Llama", BASE | {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama, linear rope": (
        "Llama",
        BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    ),
    "llama, yarn": ("Llama", BASE | {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "llama, yarn with mscale": ("Llama", BASE | {"rope_parameters": DEEPSEEK_YARN}),
    "smollm": ("Llama", BASE | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}),
    "mistral, window": ("Mistral", BASE | {"num_key_value_heads": 2, "sliding_window": 5, "head_dim": 10}),
    "mistral, none": ("Mistral", BASE | {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", BASE | {"num_key_value_heads": 2}),
    "qwen2, windows": (
        "Qwen2",
        BASE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", BASE | {"num_key_value_heads": 2, "head_dim": 10}),
    "qwen3, biases, tied": (
        "Qwen3",
        BASE | {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied, narrow": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 40}),
    "gpt2, exact gelu": ("GPT2", GPT2 | {"activation_function": "gelu"}),
    "deepseek": ("DeepseekV3", BASE | LATENT),
    "deepseek, plain queries, half-split": (
        "DeepseekV3",
        BASE | LATENT | {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True},
    ),
    "deepseek, yarn": ("DeepseekV3", BASE | LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek, llama's eps": ("DeepseekV3", BASE | LATENT | {"rms_norm_eps": 1e-5}),
    "deepseek v2": (
        "DeepseekV2",
        BASE | LATENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "deepseek v2, plain queries, yarn, tied": (
        "DeepseekV2",
        BASE | LATENT | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN, "tie_word_embeddings": True},
    ),
    "youtu": ("Youtu", BASE | MLA | {"rms_norm_eps": 1e-5}),
    "youtu, untied, half-split, plain queries": (
        "Youtu",
        BASE | MLA | {"tie_word_embeddings": False, "rope_interleave": False, "q_lora_rank": None},
    ),
    "minicpm3": ("MiniCPM3", BASE | MLA | {"scale_emb": 3, "dim_model_base": 8}),
    "minicpm3, longrope, untied": (
        "MiniCPM3",
        BASE
        | MLA
        | {
            "rope_parameters": LONGROPE,
            "tie_word_embeddings": False,
            "scale_depth": 1.1,
            "dim_model_base": 5,
        },
    ),
    "minicpm3, no scales, plain queries": (
        "MiniCPM3",
        BASE
        | MLA
        | {
            "scale_depth": None,
            "dim_model_base": None,
            "scale_emb": 1,
            "q_lora_rank": None,
            "v_head_dim": None,
        },
    ),
}
PHI3 = BASE | {"num_key_value_heads": 2, "hidden_size": 48, "original_max_position_embeddings": 64}
NEOX = {name: value for name, value in BASE.items() if name != "num_key_value_heads"} | {"hidden_size": 48}
GLM = BASE | {"num_key_value_heads": 2, "head_dim": 12}
GEMMA = BASE | {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 14}
LOCAL = {"rope_type": "default", "rope_theta": 20.0}
CASES |= {
    "smollm3": ("SmolLM3", BASE | {"num_hidden_layers": 5, "num_key_value_heads": 2}),
    "smollm3, windows, biases, untied": (
        "SmolLM3",
        BASE
        | {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
        }
        | {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    ),
    "phi3": ("Phi3", PHI3),
    "phi3, part of a head, window": (
        "Phi3",
        PHI3
        | {"sliding_window": 5, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.8}},
    ),
    "phi3, longrope": (
        "Phi3",
        PHI3 | {"max_position_embeddings": 256, "rope_parameters": LONGROPE | {"factor": None}},
    ),
    "neox": ("GPTNeoX", NEOX | {"rotary_pct": 0.25}),
    "neox, in turn, tied, no biases": (
        "GPTNeoX",
        NEOX
        | {"use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False}
        | {"hidden_act": "gelu_pytorch_tanh", "rotary_pct": 1.0, "rotary_emb_base": 50},
    ),
    "olmo2": ("Olmo2", BASE | {"num_key_value_heads": 2}),
    "olmo2, biases, tied": ("Olmo2", BASE | {"attention_bias": True, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        BASE
        | {"num_key_value_heads": 2, "attention_multiplier": 0.3, "embedding_multiplier": 7.0}
        | {"residual_multiplier": 0.22, "logits_scaling": 3.0},
    ),
    "granite, no factors": ("Granite", BASE | {"attention_bias": True, "tie_word_embeddings": True}),
    "glm": ("Glm", GLM),
    "glm4": ("Glm4", GLM | {"attention_bias": True}),
    "glm4, all of a head": (
        "Glm4",
        GLM
        | {"attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0}},
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma2, no caps, biases, untied": (
        "Gemma2",
        GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": LOCAL}, "num_hidden_layers": 7},
    ),
    "gemma3, capped logits, usual scale": (
        "Gemma3",
        GEMMA
        | {"final_logit_softcapping": 4.0, "query_pre_attn_scalar": 10}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 28}
QWEN_MOE = BASE | EXPERTS | {"num_key_value_heads": 2, "head_dim": 10, "num_experts": 5}
LATENT_MOE = BASE | LATENT | EXPERTS | {"first_k_dense_replace": 1, "n_routed_experts": 8}
CASES |= {
    "qwen3 moe": ("Qwen3Moe", QWEN_MOE),
    "qwen3 moe, normed weights, some dense, window, biases, tied": (
        "Qwen3Moe",
        QWEN_MOE
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3]}
        | {"use_sliding_window": True, "sliding_window": 5}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "deepseek v2, experts": (
        "DeepseekV2",
        LATENT_MOE | {"n_shared_experts": 2, "q_lora_rank": None, "routed_scaling_factor": 1.3},
    ),
    "deepseek v2, experts in groups, all layers": (
        "DeepseekV2",
        LATENT_MOE
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        }
        | {"first_k_dense_replace": 0, "n_shared_experts": 1},
    ),
    "deepseek, experts in groups": ("DeepseekV3", LATENT_MOE | {"n_group": 4, "topk_group": 2}),
    "deepseek, experts, plain weights, three shared": (
        "DeepseekV3",
        LATENT_MOE
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 0.7}
        | {"n_shared_experts": 3, "q_lora_rank": None},
    ),
}


KINDS = {
    "Qwen3Moe": "qwen3_moe",
    "DeepseekV3": "deepseek_v3",
    "DeepseekV2": "deepseek_v2",
    "GPTNeoX": "gpt_neox",
    "Gemma3": "gemma3_text",
}
"""model_type, where it is not the class's name in small letters."""


def classes(name):
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    return getattr(transformers, head), getattr(transformers, config)


@torch.no_grad()
def made(name, fields, folder):
    """Their model with no weight at its first value, saved in `folder`."""
    torch.set_default_dtype(torch.float32)
    kind, config = classes(name)
    model = kind(config(**fields)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.5)
    model.save_pretrained(folder)
    return model


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request, tmp_path):
    name, fields = CASES[request.param]
    return name, made(name, fields, tmp_path / "theirs"), rehead.load(tmp_path / "theirs"), tmp_path


@torch.no_grad()
def test_a_yarn_of_gemmas_local_rope_is_of_the_models_own_length(tmp_path):
    """Where the file does not say the length of the first training."""
    ropes = {"full_attention": LOCAL, "sliding_attention": YARN}
    made("Gemma3", GEMMA | {"layer_types": ["sliding_attention"] * 3, "rope_parameters": ropes}, tmp_path)
    file = tmp_path / "config.json"
    table = json.loads(file.read_text())
    del table["rope_parameters"]["sliding_attention"]["original_max_position_embeddings"]
    file.write_text(json.dumps(table))
    theirs, ids = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path), torch.randint(1, 53, (2, 30))
    assert relative(rehead.load(tmp_path)(ids), theirs(ids).logits) <= 2e-5


@torch.no_grad()
def test_logits_and_greedy_tokens_are_theirs_and_every_byte_written_back(case):
    """Their class misses nothing in what is written back, and computes the same."""
    name, theirs, ours, folder = case
    ids = torch.randint(1, 53, (2, 30))
    assert relative(ours(ids), theirs(ids).logits) <= 2e-5
    loss = torch.nn.functional.cross_entropy(theirs(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(evaluate(ours, [(ids[:, :-1], ids[:, 1:])])[0] - float(loss)) <= 1e-5
    options = {"max_new_tokens": 32, "do_sample": False, "use_cache": True}
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert rehead.generate(ours, ids, max_new_tokens=32, temperature=0).tolist() == expected.tolist()
    family = families[KINDS.get(name, name.lower())]
    table = family.write(ours.config)
    assert stock.read_config(table, "config.json") == ours.config
    stock.export(ours, folder / "back", family, {})
    back, info = classes(name)[0].from_pretrained(folder / "back", output_loading_info=True)
    assert not any(info.values()), info
    state = back.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for key, weight in theirs.state_dict().items():
        assert torch.equal(state[key], weight), key
    assert torch.equal(back(ids).logits, theirs(ids).logits)


@torch.no_grad()
def test_an_exported_folder_generates_with_max_new_tokens_without_a_warning(tmp_path, caplog):
    made("Llama", BASE, tmp_path / "theirs")
    stock.export(rehead.load(tmp_path / "theirs"), tmp_path / "ours", families["llama"], {})
    assert rehead.load(tmp_path / "ours").config.block_size == BASE["max_position_embeddings"]
    log = transformers.utils.logging.get_logger()
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_warning()
    log.addHandler(caplog.handler)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        ids = torch.randint(1, 53, (1, 5))
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7)
    finally:
        log.removeHandler(caplog.handler)
        transformers.utils.logging.set_verbosity(verbosity)
    assert tokens.shape == (1, 12)
    assert not caplog.records, caplog.text


def test_wrong_layouts_are_seen(tmp_path):
    """The checks above can fail: another rope layout, a window one too long."""
    from dataclasses import replace

    theirs = made("Mistral", CASES["mistral, window"][1], tmp_path / "theirs")
    ours = rehead.load(tmp_path / "theirs")
    ids = torch.randint(1, 53, (2, 30))
    layer = ours.config.attention[0]
    for mutant in (replace(layer, window=6), replace(layer, rope=replace(layer.rope, layout="interleaved"))):
        wrong = rehead.model.build(replace(ours.config, attention=(mutant,) * 3)).eval()
        wrong.load_state_dict(ours.state_dict())
        with torch.no_grad():
            assert relative(wrong(ids), theirs(ids).logits) > 1e-3


EXACT = {
    "mqa, heads of 64": {"num_attention_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5},
    "mqa, heads of 32, tied": {"head_dim": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "mqa, heads of 16": {"head_dim": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


@torch.no_grad()
@pytest.mark.parametrize("fields", EXACT.values(), ids=list(EXACT))
def test_mqa_goes_out_exactly_as_deepseek(fields, tmp_path):
    """The canonical shape, an identity norm, eps 1e-6: the same logits through another architecture."""
    theirs = made("Llama", BASE | fields | {"num_key_value_heads": 1}, tmp_path / "llama")
    converted, certificate = to_deepseek(rehead.load(tmp_path / "llama"))
    assert certificate.exact
    family = stock.fitting(converted.config, list(families))
    assert family.architecture == "DeepseekV3ForCausalLM"
    stock.export(converted, tmp_path / "mla", family, {})
    mla, info = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "mla", output_loading_info=True)
    assert not any(info.values())
    config = mla.config
    sizes = (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    assert sizes == (512, 64, 128, 128)
    ids = torch.randint(1, 53, (2, 40))
    assert relative(mla(ids).logits, theirs(ids).logits) <= 5e-6
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert mla.generate(ids, **options).tolist() == theirs.generate(ids, **options).tolist()


@torch.no_grad()
def test_a_model_without_rope_goes_out_exactly(tmp_path):
    """Its keys and values become one latent of full rank beside a rotary part of zeros."""
    from rehead.config import ModelOptions

    torch.set_default_dtype(torch.float32)
    options = ModelOptions(shape="llama", rope=False, n_layer=2, n_query_head=6, n_kv_head=2, n_embd=48)
    config = options.resolve(53, 64)
    from dataclasses import replace

    config = replace(config, learned_positions=False, embd_pdrop=0.0, resid_pdrop=0.0)
    model = rehead.model.build(config).eval()
    converted, certificate = to_deepseek(model)
    assert certificate.exact
    stock.export(converted, tmp_path / "mla", stock.fitting(converted.config, list(families)), {})
    mla = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "mla")
    ids = torch.randint(1, 53, (2, 40))
    assert relative(mla(ids).logits, model(ids)) <= 5e-6


ROPED = {
    "part of a head": ({"partial_rotary_factor": 0.5}, "Phi3ForCausalLM"),
    "part of a head, interleaved": (
        {"partial_rotary_factor": 0.5, "rope_layout": "interleaved"},
        "GlmForCausalLM",
    ),
    "some layers": ({"layers": [{}, {"rope": False}]}, "SmolLM3ForCausalLM"),
}


@torch.no_grad()
@pytest.mark.parametrize(("flags", "architecture"), ROPED.values(), ids=list(ROPED))
def test_a_model_with_partial_rope_goes_out_as_it_is_and_as_deepseek(flags, architecture, tmp_path):
    """Trained here: its own class, and exactly absorbed MLA whose latent holds what does not rotate."""
    from rehead.config import ModelOptions

    torch.set_default_dtype(torch.float32)
    sizes = {
        "n_layer": 2,
        "n_query_head": 6,
        "n_kv_head": 2,
        "n_embd": 48,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    config = ModelOptions(shape="llama", attn_pdrop=0.0, **sizes, **flags).resolve(53, 64)
    model = rehead.model.build(config).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    rehead.save(model, tmp_path / "ours")
    ids = torch.randint(1, 53, (2, 40))
    assert export_folder(tmp_path / "ours", tmp_path / "auto")[0] == architecture
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path / "auto")
    assert relative(theirs(ids).logits, model(ids)) <= 2e-5
    if "layers" in flags:
        return
    _, certificate = export_folder(tmp_path / "ours", tmp_path / "mla", "deepseek_v3", "transformers")
    assert certificate.exact
    mla = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "mla")
    assert (mla.config.kv_lora_rank, mla.config.qk_rope_head_dim) == (2 * (4 + 8), 2 * 4)
    assert relative(mla(ids).logits, model(ids)) <= 5e-6


G = {"rms_norm_eps": 1e-5, "max_position_embeddings": 64}
SPREAD = {
    "gqa of 2": G | {"num_key_value_heads": 2},
    "gqa of 3, heads of 10": G | {"num_key_value_heads": 3, "head_dim": 10},
    "gqa of 4, yarn": G
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "rope_parameters": YARN},
    "mha, tied": G | {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "gqa of 2, llama3": G | {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "mqa, heads of 20, llama3": G | {"num_key_value_heads": 1, "head_dim": 20, "rope_parameters": LLAMA3},
}


@torch.no_grad()
@pytest.mark.parametrize("fields", SPREAD.values(), ids=list(SPREAD))
def test_gqa_with_rope_goes_out_exactly_for_transformers(fields, tmp_path):
    """Every head's frequencies one after another, by longrope's factors; the cache is as large as before."""
    theirs = made("Llama", BASE | fields, tmp_path / "llama")
    architecture, certificate = export_folder(
        tmp_path / "llama", tmp_path / "mla", "deepseek_v3", "transformers"
    )
    assert (architecture, certificate.exact) == ("DeepseekV3ForCausalLM", True)
    mla, info = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "mla", output_loading_info=True)
    assert not any(info.values())
    n_kv_head, width = theirs.config.num_key_value_heads, theirs.config.head_dim
    assert mla.config.kv_lora_rank + mla.config.qk_rope_head_dim == 2 * n_kv_head * width
    ids = torch.randint(1, 53, (2, 60))
    assert relative(mla(ids).logits, theirs(ids).logits) <= 5e-6
    assert relative(rehead.load(tmp_path / "mla")(ids), theirs(ids).logits) <= 5e-6
    options = {"max_new_tokens": 32, "do_sample": False}
    text = ids[:, :30]
    options["attention_mask"] = torch.ones_like(text)
    assert mla.generate(text, **options).tolist() == theirs.generate(text, **options).tolist()


def test_repeated_frequencies_are_needed(tmp_path):
    """The check above can fail: one head's angles for all of the rotary part."""
    from dataclasses import replace

    from rehead.attention import RopeConfig

    made("Llama", BASE | SPREAD["gqa of 2"], tmp_path / "llama")
    source = rehead.load(tmp_path / "llama")
    converted, _ = to_deepseek(source, "transformers")
    layers = tuple(replace(layer, rope=RopeConfig()) for layer in converted.config.attention)
    wrong = rehead.model.build(replace(converted.config, attention=layers)).eval()
    wrong.load_state_dict(converted.state_dict())
    ids = torch.randint(1, 53, (2, 60))
    with torch.no_grad():
        assert relative(wrong(ids), source(ids)) > 1e-3


BF16 = {
    "gqa of 2": ("transformers", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "gqa of 4": ("transformers", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}),
    "mqa": ("vllm", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}),
}


@torch.no_grad()
@pytest.mark.parametrize(("engine", "fields"), BF16.values(), ids=list(BF16))
def test_bfloat16_is_no_further_from_the_truth(engine, fields, tmp_path):
    """Root mean squares of the logits' errors, over seeds: one model says little (see docs/log.md)."""
    ratios = []
    for seed in range(4):
        torch.manual_seed(seed)
        shape = {"hidden_size": 96, "intermediate_size": 160, "rms_norm_eps": 1e-5}
        theirs = made("Llama", BASE | fields | shape, tmp_path / f"{seed}")
        converted, _ = to_deepseek(rehead.load(tmp_path / f"{seed}"), engine)
        stock.export(converted, tmp_path / f"mla-{seed}", families["deepseek_v3"], {})
        mla = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / f"mla-{seed}")
        ids = torch.randint(1, 53, (4, 60))
        gold = theirs.double()(ids).logits
        errors = [(model.bfloat16()(ids).logits.double() - gold).square().mean() for model in (mla, theirs)]
        ratios.append((errors[0] / errors[1]).sqrt().log())
    assert torch.stack(ratios).mean().exp() <= 1.05


SERVED = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
}
UNSERVED = {
    "cache rows": ({"kv_lora_rank": 128}, "kv_lora_rank + qk_rope_head_dim = 192"),
    "heads": ({"v_head_dim": 64}, "heads of (128, 64, 64)"),
    "angles": ({"rope_parameters": LLAMA3}, "scaled rope"),
    "magnitude": ({"rope_parameters": YARN | {"attention_factor": 1.3}}, "scaled rope"),
    "scores": ({"rope_parameters": DEEPSEEK_YARN | {"mscale": 0.5, "attention_factor": 1.0}}, "scaled rope"),
    "layout": ({"rope_interleave": False}, "rope_layout=half-split"),
}


@torch.no_grad()
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": DEEPSEEK_YARN}], ids=["plain", "yarn"])
def test_for_vllm_eps_and_head_are_what_it_reads(rope, tmp_path):
    """The same function; only for transformers every bit stays."""
    fields = BASE | SERVED | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True} | rope
    theirs = made("DeepseekV3", fields, tmp_path / "mla")
    ids = torch.randint(1, 53, (2, 40))
    for engine in ("vllm", None):
        export_folder(tmp_path / "mla", tmp_path / f"{engine}", "deepseek_v3", engine)
        written = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / f"{engine}")
        assert (written.config.rms_norm_eps, written.config.tie_word_embeddings) == (1e-6, False)
        assert relative(written(ids).logits, theirs(ids).logits) <= 2e-5
    export_folder(tmp_path / "mla", tmp_path / "same", "deepseek_v3", "transformers")
    same = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "same")
    assert torch.equal(same(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(("fields", "why"), UNSERVED.values(), ids=list(UNSERVED))
def test_what_vllm_cannot_say_is_refused_by_name(fields, why, tmp_path):
    made("DeepseekV3", BASE | SERVED | fields, tmp_path / "mla")
    with pytest.raises(ConfigError) as caught:
        export_folder(tmp_path / "mla", tmp_path / "out", "auto", "vllm")
    assert why in str(caught.value)
    assert "--for transformers" in str(caught.value)
    assert export_folder(tmp_path / "mla", tmp_path / "out", "auto", "transformers")[1] is None


def test_scaled_angles_are_nothing_for_vllm(tmp_path):
    """Its class would take llama3's factors for yarn's, without a word."""
    fields = {"num_key_value_heads": 1, "head_dim": 64, "rope_parameters": LLAMA3}
    made("Llama", BASE | fields, tmp_path / "mqa")
    for engine in ("vllm", None):
        with pytest.raises(ConfigError, match=r"^scaled rope: .* --for transformers"):
            export_folder(tmp_path / "mqa", tmp_path / "out", "deepseek_v3", engine)


def test_gqa_with_rope_is_nothing_for_vllm(tmp_path):
    made("Llama", BASE | {"num_key_value_heads": 2}, tmp_path / "gqa")
    for engine in ("vllm", None):
        with pytest.raises(ConfigError, match="Use --for transformers"):
            export_folder(tmp_path / "gqa", tmp_path / "out", "deepseek_v3", engine)
    assert export_folder(tmp_path / "gqa", tmp_path / "out", "auto", "vllm")[0] == "LlamaForCausalLM"


@torch.no_grad()
def test_minicpms_scales_go_into_the_weights(tmp_path):
    """Where a class has no fields for them: exact but for rounding, untied."""
    theirs = made("MiniCPM3", BASE | MLA | {"scale_emb": 3, "dim_model_base": 8}, tmp_path / "theirs")
    architecture, _ = export_folder(tmp_path / "theirs", tmp_path / "auto")
    assert architecture == "MiniCPM3ForCausalLM"
    with pytest.raises(ConfigError, match="scales"):
        families["youtu"].write(rehead.load(tmp_path / "theirs").config)
    plain = with_eps(rehead.load(tmp_path / "theirs"), 1e-5, tied=True)
    assert not plain.config.scaled
    ids = torch.randint(1, 53, (2, 40))
    assert relative(plain(ids), theirs(ids).logits) <= 2e-5


def test_what_deepseek_cannot_say_is_refused(tmp_path):
    made("Llama", BASE | {"num_key_value_heads": 2}, tmp_path / "gqa")
    made("Llama", BASE | {"num_key_value_heads": 1, "attention_bias": True}, tmp_path / "biased")
    made("Qwen3", BASE | {"num_key_value_heads": 1, "head_dim": 16}, tmp_path / "normed")
    for folder, why in (
        ("gqa", "2 KV heads become one"),
        ("biased", "its attention has biases"),
        (
            "normed",
            "DeepseekV3ForCausalLM has no norms on queries and keys, and this model has.",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            to_deepseek(rehead.load(tmp_path / folder))
        assert why in str(caught.value)


@pytest.mark.parametrize("engine", [None, "vllm", "transformers"])
def test_rebuilt_keys_are_refused_by_name(engine, tmp_path):
    """No way out is offered that ends in another refusal."""
    made("Llama", BASE | {"num_key_value_heads": 2}, tmp_path / "gqa")
    half, _ = rehead.convert(rehead.load(tmp_path / "gqa"), to="mla", kv_fraction=0.5)
    rehead.save(half, tmp_path / "half")
    with pytest.raises(ConfigError, match="keys are rebuilt from a latent") as caught:
        export_folder(tmp_path / "half", tmp_path / "out", engine=engine)
    assert "use --for " not in str(caught.value)  # of a latent with rebuilt keys: for no engine
    assert not (tmp_path / "out").exists()


def test_a_width_that_the_llama_class_refuses_goes_out_as_mistral():
    """Theirs wants hidden_size to be a multiple of the heads; Mistral's, the same without a window, does not."""
    from dataclasses import replace

    from rehead.config import ModelOptions

    sizes = {"n_query_head": 3, "n_kv_head": 1, "head_dim": 16, "n_embd": 40}
    config = ModelOptions(shape="llama", rope=True, n_layer=1, **sizes).resolve(53, 64)
    with pytest.raises(ConfigError, match="n_embd, not a multiple of n_query_head"):
        stock.fitting(config, ["llama"])
    family = stock.fitting(config, list(families))
    assert family.architecture == "MistralForCausalLM"
    transformers.MistralConfig(**family.write(config))
    table = families["llama"].write(replace(config, n_embd=39))
    with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
        transformers.LlamaConfig(**table | {"hidden_size": 40})


def test_every_family_is_tested():
    assert {KINDS.get(name, name.lower()) for name, _ in CASES.values()} == set(families)


def test_folders_of_the_first_releases_are_read(tmp_path):
    """GPT-2's own file has no prefix and the mask as a buffer; old Llamas carry their angles."""
    import json

    from safetensors.torch import load_file, save_file

    theirs = made("GPT2", GPT2, tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    old = {name.removeprefix("transformer."): weight for name, weight in load_file(file).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(old, file, metadata={"format": "pt"})
    ids = torch.randint(1, 53, (2, 30))
    with torch.no_grad():
        assert relative(rehead.load(tmp_path / "gpt2")(ids), theirs(ids).logits) <= 2e-5

    theirs = made("Llama", BASE | {"rope_parameters": LLAMA3}, tmp_path / "llama")
    path = Path(tmp_path / "llama" / "config.json")
    table = json.loads(path.read_text())
    rope = table.pop("rope_parameters")
    table["rope_theta"] = rope.pop("rope_theta")
    table["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(table))
    with torch.no_grad():
        assert relative(rehead.load(tmp_path / "llama")(ids), theirs(ids).logits) <= 2e-5


def say(folder, **more):
    """Set keys of config.json; ... removes one."""
    file = folder / "config.json"
    table = json.loads(file.read_text()) | more
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))
    return folder


def test_rope_of_neox_may_be_said_twice(tmp_path):
    """As the last releases of transformers 4 write it; the class reads its own names."""
    theirs, ids = made("GPTNeoX", CASES["neox"][1], tmp_path), torch.randint(1, 53, (2, 30))
    own = {"rope_parameters": ..., "rotary_pct": 0.25, "rotary_emb_base": 10_000}
    both = own | {"partial_rotary_factor": 0.25, "rope_theta": 10_000, "rope_scaling": None}
    with torch.no_grad():
        assert relative(rehead.load(say(tmp_path, **both))(ids), theirs(ids).logits) <= 2e-5
    for name, read in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        with pytest.raises(
            InvalidInput, match=rf"{name}=0.5 beside {read}=.*: remove {name}, or correct one"
        ):
            rehead.load(say(tmp_path, **both | {name: 0.5}))
    rope = transformers.GPTNeoXConfig.from_pretrained(tmp_path).rope_parameters
    assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (10_000, 0.25)


@pytest.mark.parametrize("name", ["gelu_fast", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX"])
def test_names_of_the_tanh_form_of_gelu(kind, name, tmp_path):
    """gpt-neox-20b has gelu_fast. What is written is the name that it was before."""
    fields, key = (GPT2, "activation_function") if kind == "GPT2" else (NEOX, "hidden_act")
    theirs, ids = made(kind, fields | {key: name}, tmp_path), torch.randint(1, 53, (2, 30))
    ours = rehead.load(tmp_path)
    with torch.no_grad():
        assert relative(ours(ids), theirs(ids).logits) <= 2e-5
    written = families[KINDS.get(kind, "gpt2")].write(ours.config)[key]
    assert written == {"GPT2": "gelu_new", "GPTNeoX": "gelu_pytorch_tanh"}[kind]


@torch.no_grad()
def test_layers_that_predict_a_further_token_are_left_out(tmp_path):
    """DeepSeek-V3's after the last one, which transformers does not build; a second that nothing counts is refused."""
    from safetensors.torch import load_file, save_file

    theirs, ids = made("DeepseekV3", CASES["deepseek"][1], tmp_path), torch.randint(1, 53, (2, 30))
    file, n_layer = tmp_path / "model.safetensors", theirs.config.num_hidden_layers
    weights = load_file(file)
    more = {
        f"model.layers.{n_layer}.{name}": torch.ones(3)
        for name in ("eh_proj.weight", "input_layernorm.weight")
    }
    save_file(weights | more, file, metadata={"format": "pt"})
    say(tmp_path, num_nextn_predict_layers=1)
    with pytest.warns(
        UserWarning, match=rf"left out 2 weights .*num_nextn_predict_layers=1.*layers.{n_layer}.eh_proj"
    ):
        ours = rehead.load(tmp_path)
    assert relative(ours(ids), theirs(ids).logits) <= 2e-5
    save_file(weights | more | {f"model.layers.{n_layer + 1}.enorm.weight": torch.ones(3)}, file)
    with (
        pytest.warns(UserWarning, match="left out 2"),
        pytest.raises(InvalidInput, match="beyond what its config"),
    ):
        rehead.load(tmp_path)
    for wrong in (0, -1, None, "1", 0.5):
        with pytest.raises(InvalidInput, match="beyond what its config describes, 3 weights"):
            rehead.load(say(tmp_path, num_nextn_predict_layers=wrong))


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize("full", [0, 1, 2, 3])
def test_releases_without_layer_types_read_the_same_windows(kind, full, tmp_path):
    """By max_window_layers, from which on the layers have one."""
    config = classes(kind)[1]
    fields = BASE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": full}
    config(**fields).save_pretrained(tmp_path)
    table = families[kind.lower()].write(read_config(tmp_path))
    assert config(**table | {"layer_types": None}).layer_types == config(**fields).layer_types


@torch.no_grad()
def test_windows_of_smollm3_that_are_said_and_denied_are_refused(tmp_path):
    """Its masks have the window of layer_types whatever use_sliding_window says; FlashAttention has none."""
    fields = BASE | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5}
    theirs, ids = (
        made("SmolLM3", fields | {"use_sliding_window": False}, tmp_path),
        torch.randint(1, 53, (2, 30)),
    )
    with pytest.raises(InvalidInput, match="use_sliding_window=false with sliding_attention in layer_types"):
        rehead.load(tmp_path)
    ours = rehead.load(say(tmp_path, use_sliding_window=True))
    assert relative(ours(ids), theirs(ids).logits) <= 2e-5
    say(tmp_path, use_sliding_window=False, layer_types=["full_attention"] * 3)
    assert relative(rehead.load(tmp_path)(ids), theirs(ids).logits) > 1e-3


@torch.no_grad()
def test_a_window_as_wide_as_the_context_is_none(tmp_path):
    """Phi-4-mini has one of 262,144 and a context of 131,072."""
    theirs = made("Phi3", PHI3 | {"sliding_window": 64}, tmp_path / "theirs")
    ours = rehead.load(tmp_path / "theirs")
    assert {layer.window for layer in ours.config.attention} == {None}
    assert ours.config.context_limit == 64
    ids = torch.randint(1, 53, (2, 64))
    assert relative(ours(ids), theirs(ids).logits) < 2e-5
    made("Phi3", PHI3 | {"sliding_window": 63}, tmp_path / "narrow")
    assert {layer.window for layer in rehead.load(tmp_path / "narrow").config.attention} == {63}


def test_weights_that_are_mostly_narrow_are_named(tmp_path):
    """All of them become as wide as the widest, as transformers' do not: it goes by config.json."""
    theirs = made("Llama", BASE, tmp_path / "theirs").bfloat16()
    theirs.model.norm.float()
    theirs.save_pretrained(tmp_path / "theirs")
    said = "most weights are bfloat16, but norm.weight is float32: all are held in float32"
    with pytest.warns(UserWarning, match=said):
        assert rehead.load(tmp_path / "theirs").head.weight.dtype == torch.float32
    assert rehead.load(tmp_path / "theirs", dtype=torch.bfloat16).head.weight.dtype == torch.bfloat16
    theirs.model.norm.half()
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"but norm.weight is float16: all are held in float32"):
        rehead.load(tmp_path / "theirs")
    made("Llama", BASE, tmp_path / "theirs").save_pretrained(tmp_path / "theirs")
    rehead.load(tmp_path / "theirs")


def test_weights_of_another_format_than_config_json_names_are_told(tmp_path):
    """transformers would round them: `dtype="auto"` goes by config.json."""
    made("Llama", BASE, tmp_path / "theirs").save_pretrained(tmp_path / "theirs")
    say(tmp_path / "theirs", dtype="bfloat16")
    said = "config.json says bfloat16, but the weights are float32 and are held so"
    with pytest.warns(UserWarning, match=said):
        assert rehead.load(tmp_path / "theirs").head.weight.dtype == torch.float32
    rehead.load(tmp_path / "theirs", dtype=torch.bfloat16)
    say(tmp_path / "theirs", dtype=None)
    rehead.load(tmp_path / "theirs")


def test_a_buffer_that_no_model_reads_has_no_say_in_the_format(tmp_path):
    """Llamas of 2023 have `inv_freq` in float32 beside weights in float16."""
    folder = tmp_path / "theirs"
    made("Llama", BASE, folder).half().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert own.stored_dtype(folder) == torch.float16
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert own.stored_dtype(folder) == torch.float16
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert own.stored_dtype(folder) == torch.float32


def test_a_window_that_is_not_named_is_their_default(tmp_path):
    """Missing is not null: transformers takes 4096."""
    import json

    made("Mistral", CASES["mistral, window"][1], tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    table = json.loads(path.read_text())
    del table["sliding_window"]
    path.write_text(json.dumps(table))
    assert transformers.MistralConfig.from_pretrained(tmp_path / "theirs").sliding_window == 4096
    assert {layer.window for layer in rehead.load(tmp_path / "theirs").config.attention} == {4096}
