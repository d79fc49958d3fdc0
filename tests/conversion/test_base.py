"""The contract of a conversion, over the registry."""

import inspect
from dataclasses import replace
from typing import get_args

import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, variants
from rehead.attention.grouped_config import HeadMap
from rehead.attention.rope import Layout
from rehead.checkpoint import families
from rehead.cli.conversion import convert
from rehead.cli.exporting import export
from rehead.conversion import conversions, methods, targets
from rehead.conversion.base import Statistics
from rehead.conversion.export.engines import Engine
from rehead.errors import ConfigError

D = 23
GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
EXAMPLES = {name: config for variant in variants for name, config in variants[variant].examples().items()}
MQA = replace(GQA, n_kv_head=1, rope=RopeConfig(), o_bias=True)
FLAT = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False)
EXAMPLES |= {"mqa, rope": MQA, "mla, flat": FLAT, "mla, flat, rope": replace(FLAT, qk_rope_head_dim=4)}
EXAMPLES["mla, flat, rope, biases"] = replace(FLAT, qk_rope_head_dim=4, qkv_bias=True)
EXAMPLES |= {f"{name}, interleaved": replace(config, rope=RopeConfig(layout="interleaved"))
             for name, config in EXAMPLES.items() if config.rope}  # fmt: skip
TARGETS = [
    GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=7, tie_kv=True),
    LatentConfig(n_query_head=6, kv_lora_rank=13, qk_nope_head_dim=10, v_head_dim=7, latent_norm=False),
    LatentConfig(
        n_query_head=6,
        kv_lora_rank=13,
        qk_nope_head_dim=12,
        v_head_dim=9,
        qk_rope_head_dim=20,
        rope=RopeConfig(),
    ),
    LatentConfig(
        n_query_head=6,
        kv_lora_rank=3,
        qk_nope_head_dim=4,
        v_head_dim=5,
        qk_rope_head_dim=2,
        rope=RopeConfig(),
        latent_norm=False,
    ),
]


def cases():
    """Every step of every conversion from every example of every variant."""
    for name in conversions:
        conversion = conversions[name]()
        for label, source in EXAMPLES.items():
            if isinstance(source, conversion.takes) and not conversion.refusal(source):
                found = {result for target in TARGETS for result in conversion.steps(source, target, D)}
                for result in sorted(found, key=repr):
                    yield pytest.param(conversion, source, result, id=f"{name}: {label} to {result.name}")


CASES = list(cases())


@pytest.mark.parametrize(("conversion", "source", "result"), CASES)
def test_what_every_step_keeps(conversion, source, result):
    """Its weights fit the module of its result; with an exact promise, so does the output."""
    torch.manual_seed(1)
    module = source.build(D).requires_grad_(False)
    for weight in module.parameters():
        weight.copy_(0.5 * torch.randn_like(weight))
    weights = dict(module.named_parameters())
    before = {name: weight.clone() for name, weight in weights.items()}
    promise = conversion.promise(source, result, D)
    known = {} if promise.exact else conversion.methods
    assert promise.exact or known
    for method in known or [""]:
        if known and known[method]:
            continue  # reads a text
        done = conversion.convert(weights, source, result, Statistics(), method)
        other = result.build(D).requires_grad_(False)
        other.load_state_dict(done.weights)
        assert 0 <= done.lost <= 2
        x = torch.randn(3, 8, D)
        if promise.exact:
            assert done.lost == 0
            torch.testing.assert_close(other(x), module(x))
        else:
            assert done.lost > 0
            assert not torch.allclose(other(x), module(x))
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert result != source
    for field in ("n_query_head", "window", "causal", "attn_pdrop", "d_context"):
        assert getattr(result, field) == getattr(source.equivalent(), field)  # of most variants itself


def test_every_conversion_has_a_case():
    assert {type(case.values[0]) for case in CASES} == {conversions[name] for name in conversions}


@pytest.mark.parametrize("name", list(conversions))
def test_every_conversion_says_what_it_does(name):
    conversion = conversions[name]
    assert conversion.__doc__
    assert conversion.source
    assert conversion.target
    assert conversion.costs.endswith(".")
    assert set().union(*conversion.methods.values(), set()) <= {"inputs", "pair", "turns"}
    if conversion.methods:
        assert not list(conversion.methods.values())[-1]  # one does without a text


def test_the_command_line_knows_all_of_them():
    """Its choices are the registries', written out because help imports no torch."""

    def choices(command, name):
        found = inspect.get_annotations(command)[name]
        return {
            choice
            for part in (found, *get_args(found))
            for literal in (part, *get_args(part))
            for choice in get_args(literal)
            if isinstance(choice, str)
        }

    assert choices(convert, "to") == set(targets)
    assert choices(convert, "method") == set(methods())
    assert choices(convert, "head_map") == set(get_args(HeadMap))
    assert choices(convert, "rope_layout") == set(get_args(Layout))
    assert choices(export, "format") == {"auto", "gguf", *families}
    assert choices(export, "engine") == set(get_args(Engine))


def test_methods_that_are_of_no_use(gpt):
    model = gpt(replace(GQA, n_kv_head=6))
    with pytest.raises(
        ConfigError, match=r"method='average' is unknown. Use one of .*procrustes, mean, first"
    ):
        rehead.convert(model, to="mqa", method="average")
    with pytest.raises(
        ConfigError,
        match=r"method='svd' belongs to factor, keep-rotations, narrow, not to pool-heads. Use one of procrustes",
    ):
        rehead.convert(model, to="mqa", method="svd")
    modular = replace(model.config.attention[0], head_map="modular")
    with pytest.raises(
        ConfigError, match=r"method='mean' belongs to pool-heads, not to head-map. Leave it out"
    ):
        rehead.convert(model, modular, method="mean")
    with pytest.raises(ConfigError, match=r"method='mean' belongs to pool-heads, not to .*Leave it out"):
        rehead.convert(model, model.config.attention[0], method="mean")


def test_a_method_that_norms_forbid(gpt):
    """A turned key is another one once it is multiplied by the norm's weight."""
    normed = GroupedConfig(n_query_head=6, n_kv_head=3, head_dim=4, qk_norm_eps=1e-6)
    with pytest.raises(ConfigError, match=r"method='procrustes' with qk_norm_eps: .* Use mean or first\.$"):
        rehead.convert(gpt(normed), "mqa", method="procrustes")
    assert not rehead.convert(gpt(normed), "mqa", method="mean")[1].exact
