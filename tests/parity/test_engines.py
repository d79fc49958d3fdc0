"""Exports for one engine: refused by name where it computes otherwise, in a layout that it reads."""

import pytest
import torch
import transformers

from rehead.cli import main
from rehead.conversion.export.engines import ENGINES
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
