"""What is typed wrongly, or meant to break something, is refused at once and by name."""

import json

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig
from rehead.attention.rope import RopeConfig
from rehead.attention.rope_scaling import Llama3Scaling, YarnScaling
from rehead.cli import main
from rehead.cli.wording import as_typed
from rehead.config import ModelOptions
from rehead.errors import ConfigError, UsageError
from rehead.model import build
from rehead.tokenizer import train


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build(ModelOptions(n_layer=1, n_query_head=2, n_embd=8).resolve(8, 16)).eval()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench x --rounds 1 --batch", "--batch needs a number."),
        ("bench x --prompt-lengths --rounds 1", "--prompt-lengths needs a number."),
        ("generate --prompt a", "generate needs FOLDER: a model or run folder."),
        ("convert a", "convert needs DESTINATION: a new folder for the result."),
        ("generate a b --prompt c", "unexpected argument 'b'."),
        (
            "convert a b --to mla --max-loss nan",
            "--max-loss nan: nats per token above the source's loss. Use 0",
        ),
        (
            "convert a b --to mla --max-loss inf",
            "--max-loss inf: nats per token above the source's loss. Use 0",
        ),
        ("generate a --prompt b --seed -1", "--seed -1. Use 0 to "),
        (f"generate a --prompt b --seed {2**64 + 1}", f"--seed {2**64 + 1}. Use 0 to "),
        (
            "generate a --prompt",
            "--prompt needs a value: the text to continue; may be repeated. See rehead gen",
        ),
        (
            "generate a",
            "generate needs --prompt: the text to continue; may be repeated. See rehead generate --help",
        ),
        ("convert a b --to", "--to needs a value: the attention to convert to. See rehead convert --help."),
        (
            "convert a b --to mlaa",
            "--to mlaa is unknown. Did you mean 'mla'? Known: mha, gqa, mqa, mla, reduced.",
        ),
        (
            "generate a --prompt b --top-k many",
            "--top-k many: expected a whole number. See rehead generate --help.",
        ),
        ("generate a --prompt b --top-p=all", "--top-p all: expected a number. See rehead generate --help."),
        (
            "generate a --prompt b --no-cache=3",
            "--no-cache takes no value. Leave out '3'. See rehead generate --help.",
        ),
        (
            "generate a --prompt b --seed 1 --seed 2",
            "--seed is given twice. Leave one out. See rehead generate",
        ),
        ("env --jsn", "unknown option '--jsn'. Did you mean '--json'? Known: --json. See rehead env --help."),
        ("--help x", "unexpected argument 'x'. See rehead --help."),
        (
            "study --preset grid --fraction 2",
            "--fraction 2 is not a share of the iterations. Use a number above 0",
        ),
        ("generate a --prompt b --device cpu:1", "--device cpu:1: only cuda devices have numbers"),
        ("inspect a --text b --device cpu:1", "--device cpu:1: only cuda devices have numbers"),
    ],
)
def test_a_command_line_names_what_is_wrong(words, said, capfd):
    assert main(words.split()) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"rehead: {said}")
    assert len(error.splitlines()) == 1


def test_a_flag_is_named_as_it_was_typed(model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rehead.save(model, "model")
    (tmp_path / "model" / "tokenizer.json").write_text(train("char", "abcdefgh").to_json())
    (tmp_path / "model" / "MANIFEST.json").unlink()
    for words, said in (
        ("generate model --prompt a --max-new-tokens -1", "--max-new-tokens -1. Use 0 to 10,000,000."),
        ("generate model --prompt a --max-new-tokens=-1", "--max-new-tokens -1. Use 0 to 10,000,000."),
        ("generate model --prompt a --temperature -1", "--temperature -1. Use 0 (always"),
        ("plan model --batch 0", "--batch 0. Use 1 to 1,048,576."),
        ("bench model --batch 0", "--batch 0. Use 1 or more."),
        ("bench model --prompt-lengths 4 --prompt-lengths 0", "--prompt-lengths 0. Use 1 or more."),
        (
            "convert model new --to mla --kv-fraction 1.50",
            "--kv-fraction 1.50: a share of the source's cache.",
        ),
        ("convert model new --head-map modular --n-kv-head 2", "--n-kv-head 2 means nothing without --to."),
    ):
        assert main(words.split()) == 2
        assert capfd.readouterr().err.startswith(f"rehead: {said}")


def test_what_was_not_typed_is_not_taken_for_a_flag():
    said = "a/MANIFEST.json has format=2, model.seed=3, seed=31 and n_seed=3, and seed=3.5: not --seed 4"
    assert as_typed(said, ["x", "--format", "gpt2", "--seed", "3"]) == said


def test_a_seed_may_be_of_numpy(model):
    ids = torch.zeros(1, 2, dtype=torch.long)
    same = rehead.generate(model, ids, 8, seed=3)
    assert torch.equal(rehead.generate(model, ids, 8, seed=np.int64(3)), same)


def test_a_temperature_that_no_int64_holds(model):
    ids = torch.zeros(1, 2, dtype=torch.long)
    hot = rehead.generate(model, ids, 8, temperature=1e30, seed=0)
    assert torch.equal(rehead.generate(model, ids, 8, temperature=10**30, seed=0), hot)
    with pytest.raises(UsageError, match=r"temperature=10+. Use 0"):
        rehead.generate(model, ids, 1, temperature=10**400)


def test_ids_of_any_whole_dtype(model):
    ids = torch.arange(8)[None]
    with torch.no_grad():
        for dtype in (torch.int16, torch.int32):
            assert torch.equal(model(ids.to(dtype)), model(ids))


GROUPED = {"n_query_head": 2, "head_dim": 4}
LATENT = {"n_query_head": 2, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [(GroupedConfig, GROUPED, name) for name in (*GROUPED, "v_head_dim", "n_kv_head")]
    + [(LatentConfig, LATENT, name) for name in (*LATENT, "qk_rope_head_dim", "q_lora_rank")],
)
def test_no_model_is_as_large(kind, fields, name):
    with pytest.raises(ConfigError, match=f"{name}={2**70}: no model has that many. Use at most 131,072"):
        kind(**{**fields, name: 2**70})


def test_a_config_of_a_size_that_no_int64_holds(model, tmp_path, capfd):
    rehead.save(model, tmp_path / "model")
    place = tmp_path / "config.json"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["attention"][0]["head_dim"] = 2**70
    place.write_text(json.dumps(config))
    assert main(["plan", str(place)]) == 3
    assert f"head_dim={2**70} has more than 64 bits" in capfd.readouterr().err


def test_rope_bounds_in_order():
    with pytest.raises(ConfigError, match=r"theta=1e-320: the base of angles is at least 1. Use 10000"):
        RopeConfig(theta=1e-320)
    with pytest.raises(ConfigError, match=r"low_freq_factor=4.0 with high_freq_factor=1.0.*swap"):
        Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0)
    with pytest.raises(ConfigError, match=r"beta_fast=1.0 with beta_slow=32.0.*swap"):
        YarnScaling(factor=8.0, beta_fast=1.0, beta_slow=32.0)


def test_a_wish_of_the_wrong_type(model):
    with pytest.raises(ConfigError, match="kv_fraction='a' is a str: expected a number"):
        rehead.convert(model, "mla", kv_fraction="a")
