"""B11: every config and every group of options refuses a field of another type, naming field, value and type."""

from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, SummedConfig, scalings, scores
from rehead.config import GPTConfig, ModelOptions, RNNConfig
from rehead.config.options import DataOptions, SystemOptions, TrainerOptions
from rehead.errors import ConfigError
from rehead.fields import require_types

HEADS = {"n_query_head": 6, "head_dim": 10}
MLA = {"n_query_head": 6, "kv_lora_rank": 9, "qk_nope_head_dim": 10, "v_head_dim": 7}
GQA = GroupedConfig(**HEADS)
GPT = {
    "vocab_size": 23, "block_size": 64, "n_embd": 13, "attention": (GQA,), "learned_positions": False,
    "norm": "rmsnorm", "norm_eps": 1e-5, "mlp": "gelu", "n_hidden": 17, "mlp_bias": True,
}  # fmt: skip
RNN = {"vocab_size": 9, "block_size": 9, "n_embd": 5, "n_layer": 1, "n_hidden": 9, "n_output": 9}
WHOLE = "expected a whole number (int)"
WRONG = [
    (GroupedConfig, HEADS | {"window": 2.5}, f"window=2.5 is a float: {WHOLE}, or None."),
    (GroupedConfig, HEADS | {"window": True}, f"window=True is a bool: {WHOLE}, or None."),
    (GroupedConfig, HEADS | {"n_query_head": 6.0}, f"n_query_head=6.0 is a float: {WHOLE}."),
    (GroupedConfig, HEADS | {"n_kv_head": "3"}, f"n_kv_head='3' is a str: {WHOLE}, or None."),
    (GroupedConfig, HEADS | {"qkv_bias": 1}, "qkv_bias=1 is an int: expected True or False (bool)."),
    (GroupedConfig, HEADS | {"attn_pdrop": False}, "attn_pdrop=False is a bool: expected a number (float)."),
    (
        GroupedConfig,
        HEADS | {"causal": "yes"},
        "causal='yes' is a str: expected True or False (bool), or None.",
    ),
    (GroupedConfig, HEADS | {"d_context": 8.5}, f"d_context=8.5 is a float: {WHOLE}, or None."),
    (GroupedConfig, HEADS | {"rope": 10000}, "rope=10000 is an int: expected a RopeConfig, or None."),
    (GroupedConfig, HEADS | {"score": 3}, "score=3 is an int: expected a ScoreConfig, or None."),
    (
        GroupedConfig,
        HEADS | {"head_map": "odd"},
        "head_map='odd' is a str: expected one of 'contiguous', 'modular'.",
    ),
    (LatentConfig, MLA | {"kv_lora_rank": 8.0}, f"kv_lora_rank=8.0 is a float: {WHOLE}."),
    (LatentConfig, MLA | {"qk_rope_head_dim": True}, f"qk_rope_head_dim=True is a bool: {WHOLE}."),
    (LatentConfig, MLA | {"latent_norm": 0}, "latent_norm=0 is an int: expected True or False (bool)."),
    (SummedConfig, HEADS | {"n_kv_head": 2.0}, f"n_kv_head=2.0 is a float: {WHOLE}."),
    (RopeConfig, {"theta": "1e4"}, "rope theta='1e4' is a str: expected a number (float)."),
    (
        RopeConfig,
        {"layout": "halves"},
        "rope layout='halves' is a str: expected one of 'half-split', 'interleaved'.",
    ),
    (scalings["linear"], {"factor": True}, "rope scaling factor=True is a bool: expected a number (float)."),
    (scalings["longrope"], {"factors": [1.0]}, "expected a tuple, each item a number (float)."),
    (scores["additive"], {"width": 2.5}, f"score width=2.5 is a float: {WHOLE}."),
    (GPTConfig, GPT | {"vocab_size": 23.0}, f"vocab_size=23.0 is a float: {WHOLE}."),
    (GPTConfig, GPT | {"attention": [GQA]}, "is a list: expected a tuple, each item an AttentionConfig."),
    (GPTConfig, GPT | {"attention": (GQA, 3)}, "is a tuple: expected a tuple, each item an AttentionConfig."),
    (
        GPTConfig,
        GPT | {"norm": "rms"},
        "norm='rms' is a str: expected one of 'layernorm', 'rmsnorm', 'zero_centered_rmsnorm'.",
    ),
    (RNNConfig, RNN | {"n_layer": True}, f"n_layer=True is a bool: {WHOLE}."),
    (ModelOptions, {"window": 2.5}, f"model.window=2.5 is a float: {WHOLE}, or None."),
    (
        ModelOptions,
        {"layers": ({},)},
        "model.layers=({},) is a tuple: expected a list, each item a table (dict), or None.",
    ),
    (ModelOptions, {"layers": [3]}, "is a list: expected a list, each item a table (dict), or None."),
    (ModelOptions, {"shape": "gpt2"}, "model.shape='gpt2' is a str: expected one of 'gpt', 'llama'."),
    (TrainerOptions, {"max_iters": 1e3}, f"trainer.max_iters=1000.0 is a float: {WHOLE}."),
    (TrainerOptions, {"resume": "yes"}, "trainer.resume='yes' is a str: expected True or False (bool)."),
    (DataOptions, {"block_size": "64"}, f"data.block_size='64' is a str: {WHOLE}."),
    (SystemOptions, {"seed": 1.5}, f"system.seed=1.5 is a float: {WHOLE}."),
]


@pytest.mark.parametrize(("kind", "given", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_b11_a_wrong_type_is_named(kind, given, message):
    with pytest.raises(ConfigError) as caught:
        kind(**given)
    assert message in str(caught.value)


def test_what_is_a_number():
    assert GroupedConfig(**HEADS, attn_pdrop=0).attn_pdrop == 0  # a whole number is a number
    assert RopeConfig(theta=500_000).theta == 500_000
    assert GroupedConfig(**HEADS, rope=True, score="additive").rope == RopeConfig()


def test_no_field_escapes():
    """A value of no known type is refused in every field of every config."""

    class Thing:
        pass

    plain = ({}, {})
    for kind, given in (
        (GroupedConfig, HEADS), (LatentConfig, MLA), (SummedConfig, HEADS | {"n_kv_head": 2}), (GPTConfig, GPT),
        (RNNConfig, RNN), (ModelOptions, plain[0]), (TrainerOptions, plain[0]), (DataOptions, plain[0]),
        (SystemOptions, plain[0]), (RopeConfig, plain[0]), (scores["additive"], plain[0]),
        (scalings["yarn"], {"factor": 2.0}), (scalings["llama3"], {"factor": 2.0}),
    ):  # fmt: skip
        for field in fields(kind):
            with pytest.raises(ConfigError, match=f"{field.name}="):
                kind(**given | {field.name: Thing()})


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [1, 0.5], [True, "1", None]),
        (bool, [True], [1, None]),
        (int | None, [1, None], [1.5, False]),
        (Literal["a", "b"] | None, ["a", None], ["c", 1]),
        (tuple[float, ...], [(), (1, 2.5)], [[1.0], (1.0, "x"), (True,)]),
        (dict[str, Any] | None, [{}, None], [[]]),
        (Any, [None, object()], []),
    ],
)
def test_annotations(annotation, good, bad):
    @dataclass
    class Config:
        field: annotation

    for value in good:
        require_types(Config(value))
    for value in bad:
        with pytest.raises(ConfigError, match=r"group\.field="):
            require_types(Config(value), "group.")
