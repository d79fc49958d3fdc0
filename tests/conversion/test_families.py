"""What a user types on a folder of each family: `rehead plan`, and conversions that are exact or refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import rehead
from rehead.cli import main
from rehead.tokenizer import train

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.heavy
SMALL = {
    "vocab_size": 11,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GQA = {"num_key_value_heads": 2}
FAMILIES = {  # the class, its config, why it does not become a latent, why its heads are not pooled
    "smollm3": ("SmolLM3", GQA | {"no_rope_layers": [1, 0, 1]}, "", ""),
    "phi3": ("Phi3", GQA | {"partial_rotary_factor": 0.7, "sliding_window": 7}, "", ""),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.34}, "", ""),
    "olmo2": ("Olmo2", GQA, "qk_norm", "qk_norm"),
    "granite": ("Granite", GQA | {"attention_multiplier": 0.3, "logits_scaling": 3.0}, "", ""),
    "glm": ("Glm", GQA | {"head_dim": 8}, "", ""),
    "glm4": ("Glm4", GQA | {"head_dim": 8}, "", ""),
    "gemma2": ("Gemma2", GQA | {"head_dim": 8, "sliding_window": 7}, "scores with a cap of 50", ""),
    "gemma3": ("Gemma3", GQA | {"head_dim": 8, "sliding_window": 7}, "", ""),
}


def folder(kind, fields, path):
    """Their model, random, with a tokenizer of 11 symbols."""
    torch.set_default_dtype(torch.float32)
    config = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, config)(**SMALL | fields)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(train("char", "abcdefghij ").to_json())
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_planned_and_converted_or_refused(name, tmp_path, capfd):
    kind, fields, no_latent, no_pool = FAMILIES[name]
    theirs, path = folder(kind, fields, tmp_path / "theirs"), str(tmp_path / "theirs")
    assert main(["plan", path, "--json"]) == 0
    rows = {row["command"]: row for row in json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]}
    latent, pooled = rows["--to mla --kv-fraction 0.25"], rows["--to mqa"]
    assert (latent["verdict"], pooled["verdict"]) == (
        "impossible" if no_latent else "approximate",
        "impossible" if no_pool else "approximate",
    )
    assert no_latent in latent["why"]
    ids = torch.randint(11, (2, 20))
    wanted = theirs(ids).logits
    for to, flags, refused in (("mla", (), no_latent), ("mqa", ("--allow-loss",), no_pool)):
        out = tmp_path / to
        status = main(["convert", path, str(out), "--to", to, *flags])
        error = capfd.readouterr().err
        assert status == (2 if refused else 0), error
        assert refused in error
        assert out.exists() == (not refused)
        if not refused:
            logits = rehead.load(out)(ids)
            assert logits.isfinite().all()
            if to == "mla":  # of full rank
                assert json.loads((out / "conversion.json").read_text())["exact"] is True
                torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.process
def test_as_typed(tmp_path):
    folder("GPTNeoX", {"rotary_pct": 0.34}, tmp_path / "pythia")
    command = [str(Path(sys.executable).with_name("rehead"))]
    for words in (
        "plan pythia",
        "convert pythia half --to mla --kv-fraction 0.5 --allow-loss",
        "generate half --prompt abc --max-new-tokens 3 --temperature 0",
    ):
        done = subprocess.run(
            command + words.split(), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
