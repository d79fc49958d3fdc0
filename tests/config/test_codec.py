"""Configs as JSON and back, strictly."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from rehead.attention import AttentionConfig, variants
from rehead.config import ModelConfig, ModelOptions, RNNConfig, decode, encode
from rehead.errors import ConfigError, InvalidInput

MIXED = ModelOptions(
    n_layer=5,
    n_embd=40,
    n_query_head=4,
    rope=True,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
    layers=[{"window": 3}, {"window": 3, "n_kv_head": 2}, {"attention": "mla", "kv_lora_rank": 9}],
).resolve(65, 17)


def through_json(config):
    return decode(ModelConfig, json.loads(json.dumps(encode(config), allow_nan=False)))


def drawn_flags():
    size = st.integers(1, 9)
    grouped = {
        "n_kv_head": st.sampled_from([1, 2, 3, 6]),
        "head_map": st.sampled_from(["contiguous", "modular"]),
        "score": st.sampled_from(["scaled_dot", "multiplicative", "concatenated", "additive"]),
    }
    latent = {
        "attention": st.just("mla"),
        "kv_lora_rank": size,
        "q_lora_rank": size,
        "qk_nope_head_dim": size.map(lambda n: 2 * n),
        "qk_rope_head_dim": st.sampled_from([0, 2, 4]),
        "latent_norm": st.booleans(),
    }
    rotated = {
        "rope": st.just(True),
        "rope_theta": st.floats(1, 1e6),
        "rope_layout": st.sampled_from(["half-split", "interleaved"]),
        "rope_scaling": st.sampled_from(
            [{"rope_type": kind, "factor": 3} for kind in ("linear", "llama3", "yarn")]
        ),
    }
    common = {
        "n_layer": st.integers(1, 5),
        "n_embd": st.just(24),
        "n_query_head": st.just(6),
        "head_dim": size.map(lambda n: 2 * n),
        "v_head_dim": size,
        "window": st.none() | size,
        "layers": st.lists(
            st.sampled_from([{}, {"window": 7}, {"bias": True}, {"n_query_head": 12}]), min_size=1
        ),
        "shape": st.sampled_from(["gpt", "llama"]),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "mlp": st.sampled_from(["gelu", "swiglu"]),
        "n_hidden": size,
        "bias": st.booleans(),
        "tie_embeddings": st.booleans(),
        "attn_pdrop": st.floats(0, 0.99),
    }
    rnn = {
        "type": st.just("rnn"),
        "n_layer": size,
        "n_hidden": size,
        "activation": st.sampled_from(["tanh", "slide"]),
    }
    needed = {"n_embd", "n_query_head", "attention", "rope", "type"}
    return st.one_of(
        *(
            st.fixed_dictionaries(
                {k: v for k, v in keys.items() if k in needed},
                optional={k: v for k, v in keys.items() if k not in needed},
            )
            for keys in (common | grouped, common | grouped | rotated, common | latent | rotated, rnn)
        )
    )


@settings(max_examples=60)
@given(drawn_flags(), st.integers(1, 10**6), st.integers(1, 10**6))
def test_any_model_that_flags_describe_survives(flags, vocab_size, block_size):
    try:
        config = ModelOptions(**flags).resolve(vocab_size, block_size)
    except ConfigError:
        reject()
    assert through_json(config) == config


@pytest.mark.parametrize(
    ("variant", "name"),
    [(kind, name) for kind in dict.fromkeys(map(variants.__getitem__, variants)) for name in kind.examples()],
)
def test_every_example_of_every_variant_survives(variant, name):
    config = variant.examples()[name]
    assert decode(AttentionConfig, json.loads(json.dumps(encode(config)))) == config


@pytest.mark.parametrize("changes", [{"direction": "prefix"}, {"n_output": 3, "output_activation": "slide"}])
def test_rnns_of_every_kind_survive(changes):
    config = RNNConfig(vocab_size=7, block_size=9, n_embd=5, n_layer=2, n_hidden=4, n_output=7)
    assert through_json(replace(config, **changes)) == replace(config, **changes)


def test_factors_of_every_pair_survive():
    scaling = {"rope_type": "longrope", "factors": [1.0, 1.5, 2.0, 8.0], "attention_factor": 1.25}
    config = ModelOptions(n_layer=1, rope=True, head_dim=8, rope_scaling=scaling).resolve(65, 17)
    assert config.attention[0].rope.scaling.factors == (1.0, 1.5, 2.0, 8.0)
    assert through_json(config) == config


def test_equal_layers_are_written_once():
    assert [group["layers"] for group in encode(MIXED)["attention"]] == [[0, 3], [1, 4], [2]]
    assert through_json(MIXED) == MIXED


def test_defaults_may_be_left_out():
    table = encode(MIXED)
    for name in ("tie_embeddings", "embd_pdrop", "resid_pdrop"):
        del table[name]
    assert decode(ModelConfig, table) == replace(MIXED, embd_pdrop=0.0, resid_pdrop=0.0)


def test_decoding_leaves_the_table_alone():
    table = encode(MIXED)
    before = deepcopy(table)
    decode(ModelConfig, table)
    assert table == before


def put(path, value):
    def change(table):
        *place, last = path
        for step in place:
            table = table[step]
        table[last] = value

    return change


def drop(*path):
    def change(table):
        *place, last = path
        for step in place:
            table = table[step]
        del table[last]

    return change


REFUSED = [  # change of a good table, what the message must name
    (put(["n_embed"], 40), ["config: unknown key 'n_embed'", "'n_embd'"]),
    (put(["attention", 0, "n_kvhead"], 2), ["config.attention: unknown key 'n_kvhead'", "'n_kv_head'"]),
    (put(["attention", 0, "kv_lora_rank"], 2), ["unknown key 'kv_lora_rank'"]),
    (put(["attention", 0, "rope", "thet"], 2), ["config.attention.rope: unknown key 'thet'", "'theta'"]),
    (put(["attention", 0, "rope", "scaling", "low_freq_factor"], 2), ["unknown key 'low_freq_factor'"]),
    (drop("n_embd"), ["config: n_embd is missing"]),
    (drop("norm"), ["config: norm is missing"]),
    (drop("attention"), ["config: attention is missing"]),
    (drop("attention", 0, "head_dim"), ["config.attention: head_dim is missing"]),
    (drop("attention", 2, "kv_lora_rank"), ["config.attention: kv_lora_rank is missing"]),
    (put(["n_embd"], True), ["config.n_embd=True", "expected a whole number"]),
    (put(["n_embd"], 40.0), ["config.n_embd=40.0", "expected a whole number"]),
    (put(["n_embd"], "40"), ["config.n_embd='40'", "expected a whole number"]),
    (put(["n_embd"], None), ["config.n_embd=None", "expected a whole number"]),
    (put(["n_embd"], [40]), ["config.n_embd=[40]", "expected a whole number"]),
    (put(["n_embd"], 0), ["n_embd=0", "at least 1"]),
    (put(["n_embd"], 2**63), ["config.n_embd=9223372036854775808 has more than 64 bits"]),
    (put(["block_size"], -(2**63)), ["config.block_size=-9223372036854775808 has more than 64 bits"]),
    (
        put(["attention", 0, "rope", "scaling"], {"rope_type": "longrope", "factors": []}),
        ["factors=[]", "a list of"],
    ),
    (
        put(["attention", 0, "rope", "scaling"], {"rope_type": "longrope", "factors": "1"}),
        ["factors='1'", "a list of"],
    ),
    (
        put(["attention", 0, "rope", "scaling"], {"rope_type": "longrope", "factors": [1, "2"]}),
        ["config.attention.rope.scaling.factors='2': expected a number"],
    ),
    (put(["block_size"], -1), ["block_size=-1", "at least 1"]),
    (put(["learned_positions"], 1), ["config.learned_positions=1", "expected True or False"]),
    (put(["norm_eps"], float("nan")), ["config.norm_eps=nan", "expected a number"]),
    (put(["norm_eps"], float("inf")), ["config.norm_eps=inf", "expected a number"]),
    (put(["norm_eps"], 10**400), ["config.norm_eps=1000", "expected a number"]),
    (put(["norm_eps"], True), ["config.norm_eps=True", "expected a number"]),
    (put(["norm_eps"], "1e-5"), ["config.norm_eps='1e-5'", "expected a number"]),
    (put(["norm_eps"], 0), ["norm_eps=0.0", "1e-5"]),
    (put(["embd_pdrop"], 1), ["embd_pdrop=1.0", "below 1"]),
    (put(["norm"], "batchnorm"), ["config.norm='batchnorm'", "'layernorm', 'rmsnorm'"]),
    (put(["norm"], ["rmsnorm"]), ["config.norm=['rmsnorm']", "'layernorm', 'rmsnorm'"]),
    (put(["model_type"], "gtp"), ["unknown model type 'gtp'", "'gpt'"]),
    (put(["model_type"], "rnn"), ["unknown key"]),
    (put(["model_type"], 3), ["'model_type'", "gpt, rnn"]),
    (drop("model_type"), ["'model_type'", "gpt, rnn"]),
    (
        put(["attention", 0, "variant"], "gqa"),
        ["config.attention: variant='gqa' contradicts its sizes", "mha"],
    ),
    (put(["attention", 1, "variant"], "mha"), ["variant='mha' contradicts its sizes", "gqa"]),
    (put(["attention", 0, "variant"], "mla"), ["unknown key"]),
    (put(["attention", 0, "variant"], "mhq"), ["unknown attention variant 'mhq'", "Did you mean"]),
    (drop("attention", 0, "variant"), ["'variant'", "mha, gqa, mqa, mla"]),
    (put(["attention", 0, "score", "name"], "dot"), ["unknown score 'dot'", "scaled_dot"]),
    (put(["attention", 0, "rope", "scaling", "rope_type"], "linaer"), ["'linaer'", "'linear'"]),
    (put(["attention", 0, "rope", "scaling"], 2), ["config.attention.rope.scaling", "'rope_type'"]),
    (put(["attention", 0, "rope", "scaling", "factor"], 0.5), ["factor=0.5", "1 or more"]),
    (put(["attention", 0, "rope"], True), ["config.attention.rope: expected a table, got True"]),
    (put(["attention", 0, "rope", "layout"], "other"), ["layout='other'", "'half-split', 'interleaved'"]),
    (put(["attention", 0, "window"], 0), ["window=0", "window=1 or more"]),
    (put(["attention", 0, "window"], True), ["config.attention.window=True", "expected a whole number"]),
    (put(["attention", 0, "n_kv_head"], 3), ["n_kv_head=3 does not divide n_query_head=4", "[1, 2, 4]"]),
    (put(["attention", 0, "causal"], False), ["causal=False", "causal=True"]),
    (put(["attention", 0, "layers"], [0, 3, 4]), ["layers [0, 1, 2, 3, 4, 4]", "each once"]),
    (put(["attention", 0, "layers"], [0, 0, 3]), ["layers [0, 0, 1, 2, 3, 4]", "each once"]),
    (put(["attention", 0, "layers"], [0]), ["layers [0, 1, 2, 4]", "each once"]),
    (put(["attention", 0, "layers"], [-1, 0, 3]), ["layers [-1, 0, 1, 2, 3, 4]", "each once"]),
    (put(["attention", 0, "layers"], [False, 3]), ["every entry needs 'layers'"]),
    (put(["attention", 0, "layers"], "03"), ["every entry needs 'layers'"]),
    (put(["attention", 0, "layers"], 0), ["every entry needs 'layers'"]),
    (drop("attention", 0, "layers"), ["every entry needs 'layers'"]),
    (put(["attention", 0], 3), ["every entry needs 'layers'"]),
    (put(["attention", 0, "layers"], [0, 3, *range(5, 1025)]), ["n_layer=1025", "Use 1 to 1024"]),
    (put(["attention"], []), ["layers []"]),
    (put(["attention"], {"layers": [0]}), ["layers []"]),
    (put(["attention"], "mha"), ["layers []"]),
]


def flat(table):
    """A table nothing of which is shared."""
    return json.loads(json.dumps(table))


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_refused(change, named):
    table = flat(encode(MIXED))
    decode(ModelConfig, table)
    change(table)
    with pytest.raises(InvalidInput) as caught:
        decode(ModelConfig, table)
    for part in named:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [None, True, 3, "gpt", [], [{}], {}, {"model_type": None}])
def test_refused_where_a_model_is_expected(value):
    with pytest.raises(InvalidInput, match="'model_type'"):
        decode(ModelConfig, value)


def test_the_place_is_named():
    table = flat(encode(MIXED))
    put(["attention", 0, "head_dim"], "8")(table)
    with pytest.raises(
        InvalidInput, match=r"^/run/config\.json\.attention\.head_dim='8': expected a whole number\.$"
    ):
        decode(ModelConfig, table, "/run/config.json")
