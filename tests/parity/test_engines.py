"""Exports for one engine: refused by name where it computes otherwise, in a layout that it reads."""

import copy

import gguf_models
import pytest
import torch
import transformers

import mlx_models
from mlx_models import GEMMA2, GEMMA3, GPT2, MOE, NO_PAD, SLIDING, WINDOW, rope
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.mla import LatentLike
from rehead.cli import main
from rehead.conversion.export.computed import COMPUTED
from rehead.conversion.export.engines import ENGINES
from rehead.conversion.export.fit import Asked, require_fit
from rehead.conversion.export.folder import export_folder
from rehead.errors import ConfigError

IDS = torch.arange(60)[None] * 7 % 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MQA = {"num_key_value_heads": 1, "head_dim": 16}
GQA = {"num_key_value_heads": 2, "head_dim": 16}


def llama(folder, fields):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True, **fields,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("fields", "engine", "row", "interleaved"),
    [
        (MQA, "sglang", 576, True),
        (MQA, "mlx", 32, True),
        (MQA, "llama.cpp", 32, True),
        (MQA | {"rope_parameters": LLAMA3}, "mlx", 32, True),
        (MQA | {"rope_parameters": YARN}, "mlx", 32, True),
        (GQA, "mlx", 64, False),  # longrope
    ],
    ids=str,
)
def test_an_export_is_as_its_engine_reads_it(fields, engine, row, interleaved, tmp_path):
    """mlx-lm and llama.cpp take pairs as interleaved whatever config.json says; no cache grows without need."""
    theirs = llama(tmp_path / "llama", fields)
    export_folder(tmp_path / "llama", tmp_path / "mla", "deepseek_v3", engine)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mla", dtype=torch.float32)
    logits = theirs(IDS).logits
    assert (written(IDS).logits - logits).abs().max() <= 5e-6 * logits.abs().max()
    config = written.config
    assert config.kv_lora_rank + config.qk_rope_head_dim == row
    assert config.rope_interleave == interleaved
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)


@pytest.mark.parametrize(
    ("fields", "engine", "why"),
    [
        (GQA, "sglang", "vLLM and SGLang have one rotary part"),
        (MQA | {"rope_parameters": LLAMA3}, "sglang", "vLLM and SGLang computes other angles"),
        (GQA, "llama.cpp", "llama.cpp cannot serve this model's scaled rope, longrope"),
        (MQA | {"rope_parameters": LLAMA3}, "llama.cpp", "scaled rope, llama3"),
        (MQA | {"rope_parameters": YARN | {"attention_factor": 1.3}}, "mlx", "yarn with attention_factor"),
        (MQA | {"rope_parameters": YARN | {"mscale": 0.7}}, "mlx", "yarn with attention_factor"),
        (GQA | {"rope_parameters": YARN}, "mlx", "scaled rope, longrope with attention_factor"),
    ],
    ids=str,
)
def test_what_an_engine_computes_otherwise_is_refused_by_name(fields, engine, why, tmp_path, capsys):
    llama(tmp_path / "llama", fields)
    words = [str(tmp_path / "llama"), str(tmp_path / "mla"), "--format", "deepseek_v3", "--for", engine]
    assert main(["export", *words]) != 0
    error = capsys.readouterr().err
    assert why in error
    assert "--for transformers" in error
    assert not (tmp_path / "mla").exists()


def test_a_folder_that_is_mla_already_is_refused_by_name(tmp_path):
    """Classes, layouts and sizes, with no conversion."""
    llama(tmp_path / "llama", MQA)
    export_folder(tmp_path / "llama", tmp_path / "half", "deepseek_v3", "transformers")
    for engine in ("mlx", "llama.cpp", "vllm"):
        with pytest.raises(
            ConfigError, match=r"rope_layout=half-split with default rope .it takes interleaved"
        ):
            export_folder(tmp_path / "half", tmp_path / "out", "auto", engine)
    assert export_folder(tmp_path / "half", tmp_path / "out", "auto", "sglang")[1] is None
    export_folder(tmp_path / "llama", tmp_path / "small", "deepseek_v3", "mlx")
    export_folder(tmp_path / "small", tmp_path / "v2", "deepseek_v2", "llama.cpp")
    with pytest.raises(ConfigError, match="mlx-lm cannot serve this model's DeepseekV2ForCausalLM"):
        export_folder(tmp_path / "small", tmp_path / "out2", "deepseek_v2", "mlx")


def test_transformers_is_refused_nothing():
    """The others are compared with it."""
    kinds = {kind for facts in ENGINES.values() for kind in facts.angles}
    assert set(ENGINES["transformers"].angles) >= kinds


FULL, SOME = ["full_attention"] * 3, ["full_attention", "full_attention", "sliding_attention"]
FACTOR = rope("yarn", attention_factor=1.5)
FACTORS = rope("longrope", attention_factor=1.5)
BIASED, TIED, UNTIED = {"attention_bias": True}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TURNED = {"rope_parameters": {"full_attention": mlx_models.LOCAL, "sliding_attention": mlx_models.LOCAL}}
SCALED = rope("linear")["rope_parameters"]
LONG = rope(
    "longrope",
    attention_factor=1.0,
    partial_rotary_factor=0.5,
    short_factor=[1.0] * 32,
    long_factor=[1.0] * 32,
)
NO_WINDOW = GEMMA2 | {"layer_types": FULL}
EVERY_SECOND = GEMMA2 | WINDOW | {"layer_types": None}
OTHERWISE = [
    ("Qwen3", BIASED, "qwen3", "vllm", "biases"),
    ("Qwen3Moe", MOE | BIASED, "qwen3_moe", "vllm", "biases"),
    ("Qwen2", SLIDING | {"layer_types": SOME}, "qwen2", "vllm", "windows in some layers only"),
    ("Qwen3", SLIDING | {"layer_types": SOME}, "qwen3", "vllm", "windows in some layers only"),
    ("Gemma2", GEMMA2 | UNTIED, "gemma2", "vllm", "untied output head"),
    ("Glm4", NO_PAD | LONG, "glm4", "vllm", "scaled rope, longrope"),
    ("Llama", {"mlp_bias": True}, "llama", "sglang", "biases in the MLP"),
    ("Llama", FACTOR, "llama", "sglang", "scaled rope, yarn with attention_factor"),
    ("Mistral", WINDOW, "mistral", "sglang", "windows"),
    ("Phi3", WINDOW | NO_PAD, "phi3", "sglang", "windows"),
    ("Qwen2", SLIDING, "qwen2", "sglang", "windows"),
    ("Qwen3", SLIDING, "qwen3", "sglang", "windows"),
    ("Qwen3Moe", MOE | SLIDING, "qwen3_moe", "sglang", "windows"),
    ("Qwen3Moe", MOE | TIED, "qwen3_moe", "sglang", "tied output head"),
    ("SmolLM3", NO_PAD | SLIDING | {"layer_types": SOME}, "smollm3", "sglang", "windows"),
    ("Granite", BIASED, "granite", "sglang", "biases"),
    ("Granite", {"mlp_bias": True}, "granite", "sglang", "biases in the MLP"),
    ("Olmo2", FACTOR, "olmo2", "sglang", "scaled rope, yarn with attention_factor"),
    ("Gemma2", NO_WINDOW, "gemma2", "sglang", "windows in other layers than every second"),
    ("Gemma2", EVERY_SECOND | UNTIED, "gemma2", "sglang", "untied output head"),
    ("Gemma2", EVERY_SECOND | rope("linear"), "gemma2", "sglang", "scaled rope, linear"),
    ("Gemma3Text", GEMMA3 | UNTIED, "gemma3_text", "sglang", "untied output head"),
    (
        "Gemma3Text",
        GEMMA3 | {"rope_parameters": TURNED["rope_parameters"] | {"sliding_attention": SCALED}},
        "gemma3_text",
        "sglang",
        "scaled rope in layers with a window",
    ),
    ("Glm4", NO_PAD | LONG, "glm4", "sglang", "scaled rope, longrope"),
    ("GPT2", GPT2 | UNTIED, "gpt2", "sglang", "untied output head"),
]
ALIKE = [
    ("Llama", {"mlp_bias": True} | BIASED | FACTOR, "llama", "vllm"),
    ("Llama", FACTORS, "llama", "vllm"),
    ("Llama", BIASED | FACTORS, "llama", "sglang"),
    ("Mistral", WINDOW, "mistral", "vllm"),
    ("Qwen2", SLIDING, "qwen2", "vllm"),
    ("Qwen3", BIASED, "qwen3", "sglang"),
    ("SmolLM3", NO_PAD | SLIDING | {"layer_types": SOME}, "smollm3", "vllm"),
    ("Gemma2", NO_WINDOW, "gemma2", "vllm"),
    ("Gemma2", EVERY_SECOND, "gemma2", "sglang"),
    ("Gemma3Text", GEMMA3 | mlx_models.BOTH, "gemma3_text", "sglang"),
    ("GPT2", GPT2 | UNTIED, "gpt2", "vllm"),
]


def read(kind, fields):
    """rehead's reading of one of transformers' configs."""
    sizes = {} if kind == "GPT2" else gguf_models.SIZES
    table = getattr(transformers, f"{kind}Config")(**copy.deepcopy(sizes | fields)).to_dict()
    return stock.read_config(table, "config.json")


@pytest.mark.parametrize(("kind", "fields", "family", "engine", "what"), OTHERWISE)
def test_what_a_server_computes_otherwise_of_plain_heads_is_refused(kind, fields, family, engine, what):
    """Read in the source of vLLM 0.32.0 and SGLang 0.5.23."""
    name = ENGINES[engine].name
    with pytest.raises(
        ConfigError, match=f"{name}'s {kind.removesuffix('Text')}.* does not compute .*{what}"
    ):
        require_fit(read(kind, fields), Asked.of(family, engine))
    require_fit(read(kind, fields), Asked.of(family, "transformers"))


@pytest.mark.parametrize(("kind", "fields", "family", "engine"), ALIKE)
def test_what_a_server_computes_as_transformers_is_not_refused(kind, fields, family, engine):
    require_fit(read(kind, fields), Asked.of(family, engine))


@pytest.mark.parametrize("engine", COMPUTED)
def test_every_class_of_plain_heads_was_looked_at(engine):
    plain = {name for name in families if not isinstance(families[name], LatentLike)}
    assert plain <= set(COMPUTED[engine])
    said = {(family, what) for _, _, family, asked, what in OTHERWISE if asked == engine}
    for family, computed in COMPUTED[engine].items() if engine != "mlx" else ():
        assert {(family, what) for what in computed.refused} <= said


def test_without_for_a_warning_names_what_a_server_leaves_out(tmp_path, capsys):
    gguf_models.write(tmp_path / "model", "Mistral", GQA | WINDOW)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "made")]) == 0
    warned = capsys.readouterr().err
    assert (
        "SGLang's MistralForCausalLM does not compute this model as transformers does (windows): serve it with another"
        in warned
    )
    assert "vLLM" not in warned
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "again"), "--for", "vllm"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "third"), "--for", "sglang"]) != 0
    assert "SGLang's MistralForCausalLM does not compute this model's windows. " in capsys.readouterr().err
