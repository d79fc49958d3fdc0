"""mlx-lm computes and writes what transformers does, from the folders of `rehead export --for mlx`."""

import json

import gguf_models
import pytest
import torch

import rehead
from exact import PROMPTS, Exact
from mlx_models import CACHED, CONVERTED, MODELS, NOT_LOADED, REFUSED
from rehead.cli import main
from rehead.conversion.export import deepseek, fit
from rehead.measure import kv_bytes_per_token

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]
STEP = 256
"""mlx-lm's caches grow by so many rows."""
ERROR = 1e-5
FEW = 8


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def eager(model):
    """The model, whose experts are multiplied in float64, too."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model


def export(source, made, *flags):
    assert main(["export", str(source), str(made), "--for", "mlx", *flags]) == 0
    return made


def planned(model, capsys, rows):
    """The bytes that `rehead plan` counts for a cache of so many rows."""
    capsys.readouterr()
    assert main(["plan", str(model), "--context", str(rows), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"][0]["cache_bytes"]


def require_same(model, made, mlx, capsys):
    """The logits, the tokens and the cache of an exported folder are those of the exact model."""
    exact = Exact(model)
    assert exact.lead > 1e-4
    assert len({token for tokens in exact.tokens for token in tokens}) > 2
    answer = mlx(made, PROMPTS)
    assert "error" not in answer, answer["error"]
    assert answer["tokens"] == exact.tokens
    assert exact.error(answer) <= ERROR
    for prompt, cache in zip(PROMPTS, answer["cache"], strict=True):
        assert cache["used"] == planned(made, capsys, len(prompt) + 24)
    return answer


@pytest.mark.parametrize("name", MODELS)
def test_every_class(name, tmp_path, mlx, capsys):
    model = gguf_models.write(tmp_path / "model", *MODELS[name])
    answer = require_same(eager(model), export(tmp_path / "model", tmp_path / "made"), mlx, capsys)
    if name != "gemma3":  # rings
        assert answer["cache"][0]["held"] == planned(tmp_path / "made", capsys, STEP)


def test_windows_save_nothing_in_smollm3(tmp_path, mlx, capsys):
    """They are computed, but every row stays."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"layer_types": types, "use_sliding_window": True, "sliding_window": 8, "pad_token_id": None}
    exact = Exact(gguf_models.write(tmp_path / "model", "SmolLM3", gguf_models.GQA | fields))
    made = export(tmp_path / "model", tmp_path / "made")
    answer = mlx(made, PROMPTS)
    assert answer["tokens"] == exact.tokens
    assert exact.error(answer) <= ERROR
    rows = len(PROMPTS[0]) + 24
    per_token = kv_bytes_per_token(rehead.load(made).config)
    assert answer["cache"][0]["used"] == rows * per_token > 1.9 * planned(made, capsys, rows)


@pytest.fixture
def unrefused(monkeypatch):
    """A call that takes away the checks of what mlx-lm computes otherwise."""

    def without_checks():
        for module, name in (
            (deepseek, "require_served"),
            (fit, "require_served"),
            (fit, "require_computed"),
        ):
            monkeypatch.setattr(module, name, lambda *_: None)

    return without_checks


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_wrong(name, tmp_path, mlx, unrefused, capsys):
    """It is written for this test: mlx-lm does not load it, computes something else, or caches more."""
    kind, fields, form, why = REFUSED[name]
    exact = Exact(eager(gguf_models.write(tmp_path / "model", kind, fields)), PROMPTS[1:2], FEW)
    words = ["export", str(tmp_path / "model"), str(tmp_path / "made"), "--for", "mlx", "--format", form]
    assert main(words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    unrefused()
    assert main(words) == 0
    answer = mlx(tmp_path / "made", exact.prompts, max_tokens=FEW)
    if name in NOT_LOADED:
        assert NOT_LOADED[name] in answer["error"]
    elif name in CACHED:
        assert answer.get("error") is None, answer["error"]
        assert exact.error(answer) <= ERROR
        assert answer["cache"][0]["used"] >= 2 * planned(tmp_path / "made", capsys, len(PROMPTS[1]) + FEW)
    else:
        assert exact.error(answer) > 10 * ERROR


@pytest.mark.parametrize("name", CONVERTED)
def test_exact_mla(name, tmp_path, mlx, capsys):
    model = gguf_models.write(tmp_path / "model", *CONVERTED[name])
    made = export(tmp_path / "model", tmp_path / "made", "--format", "deepseek_v3")
    answer = require_same(model, made, mlx, capsys)
    assert answer["cache"][0]["held"] == planned(made, capsys, STEP)
