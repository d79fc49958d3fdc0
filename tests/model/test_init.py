"""Fresh weights against the table of `rehead.model.init`."""

import math
from itertools import combinations

import pytest
import torch
from torch import nn

from rehead.config import ModelOptions
from rehead.model import build, init

N_LAYER = 3
MODELS = {
    "gpt": {},
    "gqa": {"n_kv_head": 2},
    "llama": {"shape": "llama"},
    "mla": {"attention": "mla", "q_lora_rank": 40},
    "multiplicative": {"score": "multiplicative"},
    "additive": {"score": "additive"},
    "tied": {"tie_embeddings": True},
    "rnn": {"type": "rnn"},
}


def make(name):
    return build(ModelOptions(**{"n_layer": N_LAYER, "n_embd": 96} | MODELS[name]).resolve(61, 32))


def check_table(model):
    """Every weight as the table says, to 5 standard errors."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * N_LAYER) if name.endswith(("o_proj", "down_proj")) else 0.02
            count = module.weight.numel()
            assert abs(module.weight.std() / std - 1) < 5 / math.sqrt(2 * count), name
            assert abs(module.weight.mean()) < 5 * std / math.sqrt(count), name
            if getattr(module, "bias", None) is not None:
                assert (module.bias == 0).all(), name
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            assert (module.weight == 1).all(), name
            assert getattr(module, "bias", None) is None or (module.bias == 0).all(), name


@pytest.mark.parametrize("name", [name for name in MODELS if name != "rnn"])
def test_weights_are_drawn_as_the_table_says(name):
    check_table(make(name))


def test_other_rules_are_caught(monkeypatch):
    for rule in (
        lambda model, n_layer: None,  # torch's own
        lambda model, n_layer: init.initialise(model, 1),
        lambda model, n_layer: [nn.init.normal_(p, std=0.02) for p in model.parameters()],
    ):
        monkeypatch.setattr("rehead.model.gpt.initialise", rule)
        with pytest.raises(AssertionError):
            check_table(make("gpt"))


def test_learned_scores_keep_their_own_rule():
    multiplicative = make("multiplicative").layers[0].self_attn.score.weight
    assert torch.equal(multiplicative, torch.eye(16).expand_as(multiplicative))
    assert make("additive").layers[0].self_attn.score.bias.std() > 0.5


def test_rnn_weights_are_uniform_in_one_over_sqrt_of_the_states():
    for layer in make("rnn").layers:
        for weight in (layer.x_proj.weight, layer.h_proj.weight):
            assert 0.98 / math.sqrt(96) < weight.abs().max() <= 1 / math.sqrt(96)
            assert abs(weight.std() * math.sqrt(3 * 96) - 1) < 0.02
        assert (layer.x_proj.bias == 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_no_two_random_weights_of_one_shape_are_equal(name):
    drawn = [p for p in make(name).parameters() if p.dim() > 1 and p.std() > 0]
    if name == "multiplicative":
        drawn = [p for p in drawn if p.dim() == 2]
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in combinations(drawn, 2))


@pytest.mark.parametrize("name", MODELS)
def test_one_seed_one_model(name):
    def weights(seed):
        torch.manual_seed(seed)
        return list(make(name).parameters())

    first, again, other = weights(1), weights(1), weights(2)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
