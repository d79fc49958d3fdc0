"""A mixture of experts: the definition in NumPy, and what its config refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rehead.config import ExpertsConfig, ModelOptions, decode, encode
from rehead.config.model import ModelConfig
from rehead.decoding import native_refusal
from rehead.errors import ConfigError, InvalidInput
from rehead.model import build
from rehead.model.experts import MixtureOfExperts

SIZES = {"layers": (0, 2), "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
KINDS = {
    "softmax": {},
    "softmax, normed": {"norm_topk_prob": True, "n_shared_experts": 1},
    "softmax, groups": {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7},
    "sigmoid": {"scoring_func": "sigmoid", "n_shared_experts": 2},
    "sigmoid, groups, normed": {
        "scoring_func": "sigmoid", "n_group": 3, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
OPTIONS = ModelOptions(n_layer=3, n_embd=18, n_query_head=3, n_hidden=11, shape="llama", rope=True)


def config(**fields):
    return replace(OPTIONS.resolve(13, 16), experts=ExpertsConfig(**SIZES | fields))


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(mixture, x):
    """One token after another, one expert after another."""
    of, weights = mixture.gate.config, {k: v.detach().numpy() for k, v in mixture.named_parameters()}

    def mlp(name, token):
        gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (silu(gate @ token) * (up @ token))

    result = []
    for token in x:
        logits = weights["gate.weight"] @ token
        softmax = of.scoring_func == "softmax"
        scores = np.exp(logits) / np.exp(logits).sum() if softmax else 1 / (1 + np.exp(-logits))
        wanted = scores if softmax else scores + weights["gate.e_score_correction_bias"]
        groups = wanted.reshape(of.n_group, -1)
        rank = [max(group) if softmax else sum(sorted(group)[-2:]) for group in groups]
        best = np.argsort(rank)[-of.topk_group :]
        allowed = [e for e in range(len(wanted)) if e // groups.shape[1] in best]
        chosen = sorted(allowed, key=lambda e: wanted[e])[-of.num_experts_per_tok :]
        total = sum(scores[e] for e in chosen) if of.norm_topk_prob else 1
        out = sum(scores[e] / total * of.routed_scaling_factor * mlp(f"experts.{e}", token) for e in chosen)
        result.append(out + (mlp("shared_experts", token) if of.n_shared_experts else 0))
    return np.array(result)


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def mixture(request):
    torch.manual_seed(1)
    model = build(config(**request.param)).double()
    mixture = model.layers[2].mlp
    assert isinstance(mixture, MixtureOfExperts)
    assert not isinstance(model.layers[1].mlp, MixtureOfExperts)
    with torch.no_grad():
        for weight in mixture.parameters():
            weight.normal_()
    return mixture


def test_it_computes_what_the_definition_says(mixture):
    x = torch.randn(5, 3, 18, dtype=torch.float64)
    expected = by_hand(mixture, x.numpy().reshape(15, 18)).reshape(5, 3, 18)
    np.testing.assert_allclose(mixture(x).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def test_gradients_pass_the_experts(mixture):
    x = torch.randn(2, 2, 18, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixture, x)


def test_experts_that_no_token_chose_are_not_read(mixture):
    """Weights that are read when they are used stay on disk."""
    used = set()
    for index, expert in enumerate(mixture.experts):
        expert.register_forward_hook(lambda *_, index=index: used.add(index))
    mixture(torch.randn(1, 1, 18, dtype=torch.float64))
    assert len(used) == mixture.gate.config.num_experts_per_tok


def test_a_config_is_read_back():
    for fields in KINDS.values():
        assert decode(ModelConfig, encode(config(**fields))) == config(**fields)
    table = encode(config())
    table["experts"] |= {"layers": [0, "1"]}
    with pytest.raises(InvalidInput, match=r"config.experts.layers='1': expected"):
        decode(ModelConfig, table)


def test_the_cpp_kernel_says_why_it_does_not_decode():
    reason = native_refusal(build(config()).float().eval())
    assert "MixtureOfExperts" in reason


REFUSED = {
    "n_routed_experts=0": {"n_routed_experts": 0},
    "moe_intermediate_size=0": {"moe_intermediate_size": 0},
    "n_shared_experts=-1": {"n_shared_experts": -1},
    "layers=(2, 0)": {"layers": (2, 0)},
    "layers=()": {"layers": ()},
    "layer 3 has experts, and there are 3": {"layers": (3,)},
    "too many. Use at most": {"layers": (0, 1, 2), "n_routed_experts": 60_000},
    "routed_scaling_factor=0.0": {"routed_scaling_factor": 0.0},
    "n_group=4 groups of n_routed_experts=6": {"n_group": 4},
    "topk_group=3 of n_group=2": {"n_group": 2, "topk_group": 3},
    "judged by its two best": {"n_group": 6, "topk_group": 2, "scoring_func": "sigmoid"},
    "chooses among 3 experts": {"n_group": 2, "num_experts_per_tok": 4},
    "too wide": {"n_shared_experts": 40_000, "moe_intermediate_size": 60_000},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_is_refused(why):
    with pytest.raises(ConfigError) as caught:
        config(**REFUSED[why])
    assert why in str(caught.value)


def test_biases_in_experts_are_refused():
    with pytest.raises(ConfigError, match="mlp_bias=True with experts"):
        replace(config(), mlp_bias=True)


def test_experts_are_chosen_in_float32_under_autocast_too(mixture):
    router, x = mixture.gate.float(), torch.randn(40, 18, dtype=torch.float32)
    expected = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, router(x), expected))
