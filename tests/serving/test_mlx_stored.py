"""mlx-lm with fewer bits, with latents that lost something, and as a user types it."""

import subprocess

import gguf_models
import pytest
import torch
from gguf_models import GQA, LETTERS

import rehead
from exact import CONTEXTS, PROMPTS, TRAINED, Exact, divergence
from rehead.cli import main
from rehead.conversion.export import deepseek
from rehead.measure import kv_bytes_per_token

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]
VOCAB = len(LETTERS)


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def export(source, made, kind):
    assert main(["export", str(source), str(made), "--for", "mlx", "--format", kind]) == 0
    return made


def lost(mlx, made, model, **job):
    """Mean KL in nats of the first predictions after CONTEXTS from those of the exact model."""
    answer = mlx(made, CONTEXTS, max_tokens=0, **job)
    assert ("quantize" in job) == (answer["quantized"] > 0)
    after = torch.tensor([rows[-1] for rows in answer["logits"]])
    return divergence(model, CONTEXTS, after.double().log_softmax(-1))


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_smaller_weights(n_kv_head, tmp_path, mlx, monkeypatch, caplog):
    """8 bits and bfloat16, of all weights: an exact MLA loses at most twice what its Llama loses."""
    fields = TRAINED | {"num_key_value_heads": n_kv_head}
    model = gguf_models.write(tmp_path / "model", "Llama", fields).double()
    llama = export(tmp_path / "model", tmp_path / "llama", "llama")
    mla = export(tmp_path / "model", tmp_path / "mla", "deepseek_v3")
    assert "keep this export" not in caplog.text
    for job in ({"quantize": 8}, {"dtype": "bfloat16"}):
        control = lost(mlx, llama, model, **job)
        assert 1e-5 < control < 0.01
        assert lost(mlx, mla, model, **job) < 2 * control
    # computed in float16, a latent before its norm keeps a few bits, of which the card warns
    assert "should compute in bfloat16 or float32" in (mla / "README.md").read_text()
    assert 100 * lost(mlx, llama, model, dtype="float16") < lost(mlx, mla, model, dtype="float16") < 0.05
    # with an identity norm's numbers as they were, 8 bits lose the latent
    monkeypatch.setattr(deepseek, "storable", lambda model, layers, folded=(): model)
    before = export(tmp_path / "model", tmp_path / "before", "deepseek_v3")
    assert "keep this export in bfloat16 or float32" in caplog.text
    assert lost(mlx, before, model, quantize=8) > 0.5


def test_an_uneven_latent(tmp_path, mlx):
    """Rotary GQA at half of its cache: mlx-lm computes the converted model, and holds its bytes."""
    source = gguf_models.write(tmp_path / "model", "Llama", GQA | {"num_key_value_heads": 4})
    text = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(2))
    half, _ = rehead.convert(
        rehead.load(tmp_path / "model"), "mla", target="uneven", kv_rank=40, rope_dim=24, calibration=text
    )
    rehead.save(half, tmp_path / "half")
    exact = Exact(rehead.load(tmp_path / "half"))
    answer = mlx(export(tmp_path / "half", tmp_path / "made", "auto"), PROMPTS)
    assert answer["tokens"] == exact.tokens
    assert exact.error(answer) <= 1e-5
    assert exact.same({"tokens": Exact(source).tokens}) < 72  # it is another model than its source
    per_token = kv_bytes_per_token(half.config, torch.float32)
    assert (
        per_token
        == 3 * 4 * (40 + 24)
        == kv_bytes_per_token(rehead.load(tmp_path / "model").config, torch.float32) // 2
    )
    assert [cache["used"] for cache in answer["cache"]] == [
        (len(prompt) + 24) * per_token for prompt in PROMPTS
    ]


def run(command, *words):
    done = subprocess.run(
        [command, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands(tmp_path, mlx, mlx_python):
    """Those of docs/serving.md: a text from an export, and its 8 bits."""
    prompt, here = "O God", mlx_python.parent
    ids = [LETTERS.index(letter) for letter in prompt]
    fields = TRAINED | {"num_key_value_heads": 1, "eos_token_id": None}
    exact = Exact(gguf_models.write(tmp_path / "model", "Llama", fields), [ids])
    mla, small = export(tmp_path / "model", tmp_path / "mla", "deepseek_v3"), tmp_path / "mla-8bit"
    words = ["--prompt", prompt, "--max-tokens", "24", "--temp", "0", "--verbose", "False"]
    text = run(here / "mlx_lm.generate", "--model", mla, *words)
    assert text.strip() == "".join(LETTERS[token] for token in exact.tokens[0]).strip()
    run(here / "mlx_lm.convert", "--hf-path", mla, "--mlx-path", small, "-q", "--q-bits", "8")
    answer = mlx(small, [ids])
    assert answer["quantized"] > 0
    assert 1e-5 < exact.error(answer) < 0.1
