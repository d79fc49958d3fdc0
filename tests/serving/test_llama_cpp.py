"""llama.cpp writes what transformers writes, from the files of `rehead export --format gguf`."""

import gguf_models
import pytest
import torch
from gguf_models import GQA, LETTERS, MLA, MODELS

import rehead
from exact import CONTEXTS, PROMPTS, TRAINED, Exact, divergence
from rehead.checkpoint.gguf import architectures
from rehead.cli import main
from rehead.conversion.export import deepseek, fit

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]
VOCAB = len(LETTERS)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float32)


def export(source, file, *flags):
    assert main(["export", str(source), str(file), "--format", "gguf", *flags]) == 0
    return file


def kl(model, answer):
    """Mean KL in nats of an engine's first predictions after CONTEXTS from the exact ones."""
    found = torch.tensor([[step[0][str(i)] for i in range(VOCAB)] for step in answer["logprobs"]])
    return divergence(model, CONTEXTS, found)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(name, tmp_path, llama_cpp):
    model = gguf_models.write(tmp_path / "model", *MODELS[name])
    exact = Exact(model)
    assert exact.lead > 1e-4
    assert all(len(set(tokens)) > 5 for tokens in exact.tokens)
    answer = llama_cpp(export(tmp_path / "model", tmp_path / "f32.gguf"), prompts=PROMPTS)
    assert answer["tokens"] == exact.tokens
    # GPT-2's gelu is a table of float16 there
    assert exact.apart(answer) < (5e-3 if name == "gpt2" else 3e-5)


@pytest.mark.parametrize("name", ["llama", "gqa", "mla"])
def test_smaller_types(name, tmp_path, llama_cpp):
    """F16: the same tokens. Q8_0: an exact MLA loses at most twice what its Llama loses."""
    fields = TRAINED | {"num_key_value_heads": {"llama": 4, "gqa": 2, "mla": 1}[name]}
    source = tmp_path / "model"
    exact = Exact(gguf_models.write(source, "Llama", fields))
    files = {"llama": source}
    if name == "mla":
        files["mla"] = tmp_path / "mla"
        words = ["--format", "deepseek_v3", "--for", "llama.cpp"]
        assert main(["export", str(source), str(files["mla"]), *words]) == 0
    lost = {}
    for kind, place in files.items():
        half = llama_cpp(export(place, tmp_path / f"{kind}16.gguf", "--dtype", "fp16"), prompts=PROMPTS)
        assert half["tokens"] == exact.tokens
        assert exact.apart(half) < 0.02
        small = export(place, tmp_path / f"{kind}8.gguf", "--dtype", "q8_0")
        answer = llama_cpp(small, prompts=CONTEXTS, max_tokens=1, n_probs=VOCAB)
        lost[kind] = kl(exact.model, answer)
    assert 1e-5 < lost["llama"] < 0.01
    assert lost.get("mla", 0) < 2 * lost["llama"]


def test_flash_attention_rounds(tmp_path, llama_cpp):
    """llama.cpp's default: the same model, further from it."""
    exact = Exact(gguf_models.write(tmp_path / "model", "Llama", GQA))
    file = export(tmp_path / "model", tmp_path / "f32.gguf")
    assert exact.apart(llama_cpp(file, prompts=PROMPTS)) < 3e-5
    assert 1e-3 < exact.apart(llama_cpp(file, prompts=PROMPTS, flash_attention=True)) < 0.05


@pytest.fixture
def unrefused(monkeypatch):
    """A call that takes away the checks of what llama.cpp computes otherwise."""

    def without_checks():
        for module in (deepseek, fit):
            monkeypatch.setattr(module, "require_served", lambda *_: None)
        monkeypatch.setattr(architectures.Architecture, "refuse", lambda *_: None)

    return without_checks


DEEP = {"num_hidden_layers": 26, "first_k_dense_replace": 26, "initializer_range": 0.05, "q_lora_rank": 24}
REFUSED = {
    "window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "scaled rope": ("Qwen2", {**gguf_models.rope("llama3")}),
    "qkv_bias, o_bias": ("Qwen3", {"attention_bias": True}),
    "rope_layout=half-split": ("DeepseekV3", MLA | {"rope_interleave": False}),
    "q_lora_rank=24 with 26 layers": ("DeepseekV3", MLA | DEEP),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_would_be_another_model(why, tmp_path, llama_cpp, unrefused, capsys):
    """It is written for this test: llama.cpp does not load it, or says something else without an error."""
    exact = Exact(gguf_models.write(tmp_path / "model", *REFUSED[why]))
    words = ["export", str(tmp_path / "model"), str(tmp_path / "f32.gguf"), "--format", "gguf"]
    assert main(words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "f32.gguf").exists()
    unrefused()
    answer = llama_cpp(export(tmp_path / "model", tmp_path / "f32.gguf"), prompts=PROMPTS)
    assert answer is None or exact.apart(answer) > 0.05


def test_heads_side_by_side_are_refused(tmp_path, llama_cpp, unrefused, capsys):
    """GQA as MLA: every head's angles are factors of longrope, which llama.cpp leaves out."""
    exact = Exact(gguf_models.write(tmp_path / "model", "Llama", GQA))
    words = ["--format", "deepseek_v3", "--for", "transformers"]
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "mla"), *words]) == 0
    assert main(["export", str(tmp_path / "mla"), str(tmp_path / "f32.gguf"), "--format", "gguf"]) == 2
    assert "llama.cpp cannot serve this model's scaled rope, longrope" in capsys.readouterr().err
    unrefused()
    answer = llama_cpp(export(tmp_path / "mla", tmp_path / "f32.gguf"), prompts=PROMPTS)
    assert exact.apart(answer) > 1


def test_a_canonical_latent(tmp_path, llama_cpp):
    """Approximate, with one rotary part: llama.cpp writes what the exported folder does, from half of the cache."""
    source = gguf_models.write(tmp_path / "model", "Llama", GQA | {"num_key_value_heads": 4})
    text = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(2))
    half, _ = rehead.convert(
        rehead.load(tmp_path / "model"), "mla", target="canonical", kv_rank=48, calibration=text
    )
    tokenizer = (tmp_path / "model" / "tokenizer.json").read_text()
    rehead.save(half, tmp_path / "half", files={"tokenizer.json": tokenizer})
    file = export(tmp_path / "half", tmp_path / "f32.gguf")
    exact = Exact(rehead.load(tmp_path / "half"))
    answer = llama_cpp(file, prompts=PROMPTS)
    assert answer["tokens"] == exact.tokens
    assert exact.apart(answer) < 3e-5
    assert exact.same({"tokens": Exact(source).tokens}) < 72  # it is another model than its source
