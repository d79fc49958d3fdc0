"""Folders for mlx-lm: what it does not compute is refused from the config alone. `make test-serving` runs it."""

import copy
import json

import gguf_models
import pytest
import torch
import transformers
from safetensors import safe_open

import mlx_models
from mlx_models import MODELS, REFUSED
from rehead.checkpoint import families
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.mla import LatentLike
from rehead.cli import main
from rehead.conversion.export.computed import MLX, require_computed
from rehead.conversion.export.engines import ENGINES
from rehead.conversion.export.fit import Asked, require_fit
from rehead.errors import ConfigError

PLAIN = {name: row for name, row in REFUSED.items() if row[2] in MLX and row[0] != "DeepseekV3"}


def config(kind, fields):
    """rehead's reading of one of transformers' configs, and its family."""
    sizes = {} if kind in ("GPT2", "GPTNeoX") else gguf_models.SIZES
    table = getattr(transformers, f"{kind}Config")(**copy.deepcopy(sizes | fields)).to_dict()
    return stock.read_config(table, "config.json"), stock.family_of(table, "config.json")


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_computed_is_refused_by_name(name):
    kind, fields, family, why = PLAIN[name]
    with pytest.raises(ConfigError, match=f"does not compute this model's {why}") as error:
        require_fit(config(kind, fields)[0], Asked.of(family, "mlx"))
    assert "Use --for transformers" in str(error.value)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_is_not_refused(name):
    require_computed(*config(*MODELS[name]), "mlx")


def test_every_family_is_known_or_refused_as_mla():
    """What is in neither table would go out to mlx-lm untried."""
    latent = {name for name in families if isinstance(families[name], LatentLike)}
    assert set(families) - latent == set(MLX) - latent
    served = {name for name in latent if families[name].architecture in ENGINES["mlx"].classes}
    assert served == set(MLX) & latent


def test_a_layer_that_it_drops_is_refused():
    deep, family = config("DeepseekV3", mlx_models.MLA | mlx_models.DEEP)
    with pytest.raises(ConfigError, match="layer 61"):
        require_computed(deep, family, "mlx")


@pytest.mark.parametrize("name", MLX)
def test_everything_refused_has_its_failing_run(name):
    """In tests/serving/test_mlx.py; and every class is run."""
    said = [why for _, _, form, why in REFUSED.values() if form == name]
    for what in MLX[name].refused:
        assert any(why in what or what in why for why in said), what
    if name != "mistral":  # goes out as Llama where nothing is refused
        kinds = {kind.lower().removesuffix("text") for kind, _ in MODELS.values()}
        assert (
            families[name].architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
            in kinds
        )


@torch.no_grad()
def test_gpt2_goes_out_with_the_names_of_its_first_release(tmp_path):
    """mlx-lm adds `model.` to a tensor's name and no more; transformers reads them as well."""
    kind, fields = MODELS["gpt2"]
    theirs = gguf_models.write(tmp_path / "model", kind, fields)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "made"), "--for", "mlx"]) == 0
    with safe_open(tmp_path / "made" / "model.safetensors", "pt") as weights:
        assert {"wte.weight", "h.0.attn.c_attn.weight", "ln_f.bias"} <= set(weights.keys())
    assert json.loads((tmp_path / "made" / "config.json").read_text())["n_ctx"] == 256
    again, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(40)[None]
    assert torch.equal(again(ids).logits, theirs(ids).logits)
    assert main(["export", str(tmp_path / "made"), str(tmp_path / "back"), "--format", "gpt2"]) == 0
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as weights:
        assert "transformer.wte.weight" in weights.keys()  # noqa: SIM118
