"""What plan, convert and export say of families that a conversion or a class cannot hold: reasons in plain words."""

import json
from pathlib import Path

import pytest
import torch
from families_corpus import GOOD, SMALL

import rehead
from rehead.checkpoint.huggingface import stock
from rehead.cli import main
from rehead.conversion.converter import convert
from rehead.model import build
from rehead.report.conversion import present_certificate

LATENT = {
    "kv_lora_rank": 6,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
FAMILIES = GOOD | {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 7},
    "gemma3_text": GOOD["gemma3_text"] | {"sliding_window_pattern": 2},
    "youtu": LATENT,
    "minicpm3": LATENT,
}
UNEVEN = ["--to", "mla", "--target", "uneven", "--kv-fraction", "0.5"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


@pytest.fixture
def model(tmp_path, monkeypatch, capfd):
    """A small model of a family in a folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def make(kind):
        table = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 11}
        table = table if kind == "gpt2" else SMALL | FAMILIES[kind]
        rehead.save(build(stock.read_config(table | {"model_type": kind}, kind)), "model")
        capfd.readouterr()
        return "model"

    return make


@pytest.mark.filterwarnings("always:no stock class")
@pytest.mark.parametrize("kind", ["smollm3", "mistral", "gpt_neox", "glm4"])
def test_uneven_without_a_class_is_told_by_plan_and_convert(kind, model, capfd):
    """From the config alone; the export then refuses it for the same reason."""
    folder = model(kind)
    assert main(["plan", folder, "--json"]) == 0
    (note,) = [note for note in json.loads(capfd.readouterr().out)["notes"] if note.startswith("uneven: ")]
    lead, _, why = note.partition("so `export` refuses it: ")
    assert lead.endswith("No stock class can hold the result, ")
    assert why
    assert main(["convert", folder, "out", *UNEVEN, "--allow-loss", "--json"]) == 0
    (line,) = [
        line for line in capfd.readouterr().err.splitlines() if "no stock class can hold the result" in line
    ]
    assert line.endswith(why)
    assert main(["export", "out", "stock", "--for", "transformers"]) == 2
    assert why[:30] in capfd.readouterr().err


def test_uneven_with_a_class_is_not_warned_of(model, capfd):
    folder = model("llama")
    assert main(["plan", folder, "--json"]) == 0
    notes = json.loads(capfd.readouterr().out)["notes"]
    assert [note for note in notes if note.endswith("transformers has a class for it.")]
    assert main(["convert", folder, "out", *UNEVEN, "--allow-loss", "--json"]) == 0
    assert "stock class" not in capfd.readouterr().err
    assert main(["export", "out", "stock", "--for", "transformers"]) == 0


def test_uneven_means_nothing_without_rope(model, capfd):
    folder = model("gpt2")
    assert main(["convert", folder, "out", *UNEVEN]) == 2
    assert "--target uneven: none of its layers rotates its keys. Leave it out." in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "youtu", "minicpm3"])
def test_a_normed_latent_is_kept(kind, model, capfd):
    folder = model(kind)
    for words in (["--kv-fraction", "0.5"], ["--kv-rank", "2"]):
        assert main(["convert", folder, "out", "--to", "mla", *words]) == 2
        said = capfd.readouterr().err
        assert said.endswith(
            "an MLA with a norm on its latent (latent_norm=True) cannot be narrowed or expanded. Keep it as it is: it "
            "can be run, measured and exported.\n"
        )
    assert main(["export", folder, "out"]) == 0


def test_a_cap_is_no_class_name(model, capfd):
    folder = model("gemma2")
    assert main(["convert", folder, "out", "--to", "mla"]) == 2
    said = capfd.readouterr().err
    assert (
        "MLA has plain scaled dot products for scores, and this attention has scores with a cap of 50."
        in said
    )
    assert "Use --to mqa, " in said
    assert (
        main(["convert", folder, "out", "--to", "mqa", "--allow-loss", "--json"]) == 0
    )  # the way out leads out


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_longrope_names_the_key_of_the_file(key, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    table = SMALL | {"model_type": "phi3", "num_key_value_heads": 2, "original_max_position_embeddings": 8}
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(table | {key: LONGROPE}))
    assert main(["convert", "model", "made", "--to", "mha"]) == 3
    said = capfd.readouterr().err
    assert said.endswith(f" in {key}.\n")
    factor = float(said.partition("attention_factor=")[2].split()[0])
    fixed = {key: LONGROPE | {"attention_factor": factor}, "max_position_embeddings": 8}
    Path("model/config.json").write_text(json.dumps(table | fixed))
    assert main(["plan", "model"]) == 0  # the way out leads out
    assert "longrope" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["smollm3", "gemma3_text"])
def test_a_plan_names_both_kinds_of_layers(kind, model, capfd):
    folder = model(kind)
    config = rehead.load(folder).config
    first = config.attention[0].describe()
    assert main(["plan", folder, "--json"]) == 0
    note = json.loads(capfd.readouterr().out)["notes"][0]
    kinds = {layer.describe() for layer in config.attention}
    assert len(kinds) == 2
    assert note.startswith(f"Layers differ: 1 of {first}; 1 of ")
    assert all(each in note for each in kinds)


def test_exact_says_why_predictions_change(model, tmp_path, capfd):
    """Rounding the new weights to bfloat16 changes some; an export with a conversion has the same line."""
    folder = model("llama")
    _, certificate = convert(rehead.load(folder, dtype=torch.bfloat16), "mha")
    assert certificate.exact
    certificate.logits["argmax_flips"] = 0.0121
    present_certificate(certificate, tmp_path)
    first = capfd.readouterr().out.splitlines()[0]
    assert first.endswith(": exact; what changes below is the rounding of the new weights to bfloat16")
    certificate.logits["argmax_flips"] = 0.0
    present_certificate(certificate, tmp_path)
    assert capfd.readouterr().out.splitlines()[0].endswith(": exact")
    assert main(["export", folder, "out", "--format", "deepseek_v3", "--for", "transformers"]) == 0
    assert "\npredictions   KL " in capfd.readouterr().out
