"""Flags to a model: the homework's defaults and sizes, and nothing given that is not used."""

from dataclasses import fields, replace

import pytest

from rehead.attention import LatentConfig, RopeConfig
from rehead.attention.rope_scaling import LinearScaling
from rehead.attention.summed import SummedConfig
from rehead.config import ModelOptions, RNNConfig, TrainerOptions
from rehead.config.flags import read
from rehead.errors import ConfigError
from rehead.measure import parameters


def resolve(*flags, vocab_size=65):
    options = read(list(flags))
    return options.model.resolve(vocab_size, options.data.block_size)


def test_b18_defaults():
    options, config = read([]), resolve()
    assert (config.n_layer, config.n_embd, config.block_size, config.vocab_size) == (6, 192, 128, 65)
    assert {(a.n_query_head, a.n_kv_head, a.head_dim, a.v_head_dim, a.name) for a in config.attention} == {
        (6, 6, 32, 32, "mha")
    }
    assert (config.embd_pdrop, config.resid_pdrop, config.attention[0].attn_pdrop) == (0.1, 0.1, 0.1)
    trainer = options.trainer
    assert (trainer.batch_size, trainer.learning_rate, trainer.max_iters) == (64, 5e-4, 600)
    assert (trainer.beta1, trainer.beta2, trainer.weight_decay, trainer.grad_norm_clip) == (
        0.9,
        0.95,
        0.1,
        1.0,
    )
    assert (trainer.schedule, options.system.seed, options.data.tokenizer) == ("constant", 3407, "char")
    assert (config.norm, config.mlp, config.n_hidden, config.mlp_bias, config.tie_embeddings) == (
        "layernorm", "gelu", 768, True, False
    )  # fmt: skip
    assert config.learned_positions
    assert config.attention[0].rope is None


@pytest.mark.parametrize(
    ("n_kv_head", "count"), [(6, 2_719_104), (3, 2_496_768), (2, 2_422_656), (1, 2_348_544)]
)
def test_b18_parameters(n_kv_head, count):
    assert parameters(resolve(f"model.n_kv_head={n_kv_head}")) == count
    assert parameters(resolve(f"model.n_kv_head={n_kv_head}", "model.rope=True")) == count - 24_576


def test_rope_replaces_the_table_of_positions():
    config = resolve("model.rope=True")
    assert not config.learned_positions
    assert {a.rope for a in config.attention} == {RopeConfig(theta=10_000, layout="half-split")}


def test_rope_in_part_of_a_head_and_not_in_every_layer():
    """Every fourth layer without rope (SmolLM3), a quarter of each head rotated (GPT-NeoX)."""
    flags = [
        "model.shape=llama",
        "model.n_layer=4",
        "model.partial_rotary_factor=0.25",
        "model.rope_theta=500",
    ]
    config = resolve(*flags, "model.layers=[{}, {}, {}, {rope: false}]")
    rope = RopeConfig(theta=500.0, partial_rotary_factor=0.25)
    assert [layer.rope for layer in config.attention] == [rope, rope, rope, None]
    assert not config.learned_positions
    with pytest.raises(ConfigError, match=r"rope_theta=9.0 has no effect with model.rope=False"):
        resolve(*flags, "model.layers=[{rope: false, rope_theta: 9.0}]")
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0.5 has no effect with model.rope=False"):
        resolve("model.partial_rotary_factor=0.5")


def test_llama_shape():
    config = resolve("model.shape=llama")
    assert (config.norm, config.mlp, config.n_hidden, config.mlp_bias) == ("rmsnorm", "swiglu", 512, False)
    assert not config.learned_positions
    attention = config.attention[0]
    assert (attention.qkv_bias, attention.o_bias, attention.rope) == (False, False, RopeConfig())


@pytest.mark.parametrize(
    ("flags", "name", "n_kv_head"),
    [
        ([], "mha", 6),
        (["model.n_kv_head=6"], "mha", 6),
        (["model.n_kv_head=3"], "gqa", 3),
        (["model.n_kv_head=1"], "mqa", 1),
        (["model.attention=mha"], "mha", 6),
        (["model.attention=mqa"], "mqa", 1),
        (["model.attention=gqa", "model.n_kv_head=2"], "gqa", 2),
        (["model.attention=mqa", "model.n_kv_head=1"], "mqa", 1),
        (["model.attention=mla"], "mla", 6),
        (["model.attention=mla", "model.n_kv_head=2"], "mla", 2),
    ],
)
def test_attention_follows_from_n_kv_head_and_the_other_way(flags, name, n_kv_head):
    attention = resolve(*flags).attention[0]
    assert (attention.name, attention.n_kv_head) == (name, n_kv_head)


def test_mla_defaults_and_flags():
    plain, turned = resolve("model.attention=mla"), resolve("model.attention=mla", "model.rope=True")
    assert isinstance(plain.attention[0], LatentConfig)
    assert (plain.attention[0].qk_rope_head_dim, plain.attention[0].rope) == (0, None)
    assert (turned.attention[0].qk_rope_head_dim, turned.attention[0].kv_lora_rank) == (16, 128)
    config = resolve(
        "model.attention=mla", "model.rope=True", "model.kv_lora_rank=9", "model.q_lora_rank=11", "model.v_head_dim=7",
        "model.qk_nope_head_dim=10", "model.qk_rope_head_dim=4", "model.latent_norm=False",
    )  # fmt: skip
    latent = config.attention[0]
    assert (latent.kv_lora_rank, latent.q_lora_rank, latent.v_head_dim) == (9, 11, 7)
    assert (latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.latent_norm) == (10, 4, False)
    rebuilt = resolve("model.attention=mla", "model.rope=True", "model.qk_rope_head_dim=0").attention[0]
    assert rebuilt.rebuilds_keys


def test_rope_flags():
    rope = resolve(
        "model.rope=True", "model.rope_theta=500", "model.rope_layout=interleaved",
        "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 64}",
    ).attention[0].rope  # fmt: skip
    assert (rope.theta, rope.layout) == (500.0, "interleaved")
    assert (rope.scaling.factor, rope.scaling.original_max_position_embeddings) == (4.0, 64)


@pytest.mark.parametrize(
    ("pattern", "n_layer", "windows"),
    [
        ("[{window: 3}, {}]", 5, [3, None, 3, None, 3]),
        ("[{window: 3},{window: 3},{window: 3},{window: 3},{window: 3},{}]", 7, [3, 3, 3, 3, 3, None, 3]),
        ("[{window: 3}]", 2, [3, 3]),
        ("[{}]", 2, [None, None]),
    ],
)
def test_layers_repeat_a_pattern(pattern, n_layer, windows):
    config = resolve(f"--model.layers={pattern}", f"model.n_layer={n_layer}")
    assert [attention.window for attention in config.attention] == windows


def test_layers_change_the_common_flags():
    config = resolve(
        "model.rope=True", "model.window=9", "model.n_layer=4", "model.n_kv_head=2",
        "model.layers=[{}, {window: null, rope: false}, {n_kv_head: 3, head_dim: 8}, {attention: mla}]",
    )  # fmt: skip
    common, no_position, wider, latent = config.attention
    assert (common.window, common.n_kv_head, common.rope) == (9, 2, RopeConfig())
    assert (no_position.window, no_position.rope, no_position.n_kv_head) == (None, None, 2)
    assert (wider.window, wider.n_kv_head, wider.head_dim) == (9, 3, 8)
    assert (latent.name, latent.window, latent.kv_lora_rank) == ("mla", 9, 128)


def test_context_is_unlimited_only_with_windows_everywhere_and_no_table():
    assert resolve().context_limit == 128
    assert resolve("model.rope=True").context_limit == 128
    assert resolve("model.window=5").context_limit == 128
    assert resolve("model.rope=True", "model.layers=[{window: 5}, {}]").context_limit == 128
    assert resolve("model.rope=True", "model.window=5").context_limit is None
    assert resolve("model.rope=True", "model.window=128").context_limit is None
    assert resolve("model.rope=True", "model.window=129").context_limit == 128  # no text had such a distance
    assert resolve("model.type=rnn").context_limit is None


def test_rnn():
    assert resolve("model.type=rnn", vocab_size=7) == RNNConfig(
        vocab_size=7, block_size=128, n_embd=192, n_layer=1, n_hidden=192, n_output=7, embd_pdrop=0.1
    )
    shared = (
        "model.resid_pdrop=0",
        "model.attn_pdrop=0",
        "model.n_query_head=4",
    )  # of variants, as in a study
    assert resolve("model.type=rnn", *shared) == resolve("model.type=rnn")
    config = resolve("model.type=rnn", "model.n_layer=2", "model.n_hidden=5", "model.activation=slide")
    assert (config.n_layer, config.n_hidden, config.activation) == (2, 5, "slide")


REFUSED = [  # flags, what the message must name, the remedy it must offer
    ("model.n_kv_head=4", "n_kv_head=4 does not divide n_query_head=6", "[1, 2, 3, 6]"),  # B25
    ("model.n_kv_head=12", "n_kv_head=12 does not divide n_query_head=6", "[1, 2, 3, 6]"),
    ("model.n_kv_head=0", "n_kv_head=0", "at least 1"),
    ("model.attention=mla model.n_kv_head=0", "n_kv_head=0", "at least 1"),
    ("model.attention=mla model.n_kv_head=4", "n_kv_head=4 does not divide n_query_head=6", "[1, 2, 3, 6]"),
    ("model.n_embd=188", "model.n_query_head=6 does not divide model.n_embd=188", "[1, 2, 4, 47, 94, 188]"),
    ("model.n_query_head=0", "model.n_query_head=0", "Use one of [1, 2, 3,"),
    ("model.n_embd=0", "model.n_embd=0", "1 or more"),
    ("model.n_layer=0", "model.n_layer=0", "Use 1 to 1024"),
    ("model.n_layer=1025", "model.n_layer=1025", "Use 1 to 1024"),
    ("model.n_embd=-6 model.head_dim=4", "model.n_embd=-6", "1 or more"),
    ("model.n_hidden=0", "n_hidden=0", "at least 1"),
    ("model.head_dim=0", "head_dim=0", "at least 1"),
    ("model.v_head_dim=0", "v_head_dim=0", "at least 1"),
    ("model.window=0", "window=0", "window=1 or more"),
    ("model.rope=True model.head_dim=31", "head_dim=31 is odd", "30 or 32"),
    ("data.block_size=0", "block_size=0", "at least 1"),
    ("model.embd_pdrop=1", "embd_pdrop=1.0", "below 1"),
    ("model.resid_pdrop=.nan", "resid_pdrop=nan", "below 1"),
    ("model.attn_pdrop=-0.1", "attn_pdrop=-0.1", "not including) 1"),
    ("model.attention=mha model.n_kv_head=3", "mha contradicts model.n_kv_head=3 with n_query_head=6", "which is gqa"),
    ("model.attention=mqa model.n_kv_head=2", "mqa contradicts model.n_kv_head=2 with n_query_head=6", "which is gqa"),
    ("model.attention=gqa model.n_kv_head=6", "gqa contradicts model.n_kv_head=6", "which is mha. Leave one"),
    ("model.attention=gqa model.n_kv_head=1", "gqa contradicts model.n_kv_head=1", "which is mqa. Leave one"),
    ("model.attention=gqa", "model.attention=gqa", "model.n_kv_head"),
    ("model.kv_lora_rank=8", "model.kv_lora_rank=8 has no effect", "Leave it out"),
    ("model.attention=gqa model.n_kv_head=3 model.latent_norm=true", "model.latent_norm=True", "Leave it out"),
    ("model.attention=mla model.head_map=modular", "model.head_map=modular", "Leave it out"),
    ("model.attention=mla model.score=additive", "model.score=additive", "Leave it out"),
    ("model.activation=slide", "model.activation=slide has no effect with model.type=gpt", "Leave it out"),
    ("model.score_width=3", "model.score_width=3 with score=scaled_dot", "model.score=additive"),
    ("model.score=multiplicative model.score_width=3", "score=multiplicative", "model.score=additive"),
    ("model.score=additiv", "unknown score 'additiv'", "'additive'"),
    ("model.score=additive model.score_width=0", "score_width=0", "64"),
    ("model.rope_theta=100", "model.rope_theta=100.0 has no effect with model.rope=False", "Leave it out"),
    ("model.shape=llama model.rope=False model.rope_layout=interleaved", "model.rope_layout=interleaved", "Leave it"),
    ("model.rope=True model.rope_theta=0", "theta=0.0", "10000"),
    ("model.rope=True model.rope_theta=.inf", "theta=inf", "10000"),
    ("model.rope=True model.rope_scaling={factor: 2}", "rope_scaling", "linear, llama3, yarn"),
    ("model.rope=True model.rope_scaling={rope_type: linaer}", "'linaer'", "'linear'"),
    ("model.rope=True model.rope_scaling={rope_type: linear}", "factor", "missing"),
    ("model.rope=True model.rope_scaling={rope_type: linear, fctor: 2}", "'fctor'", "'factor'"),
    ("model.rope=True model.rope_scaling={rope_type: linear, factor: two}", "factor='two'", "expected a number"),
    ("model.rope=True model.rope_scaling={rope_type: linear, factor: 0.5}", "factor=0.5", "1 or more"),
    ("model.attention=mla model.kv_lora_rank=0", "kv_lora_rank=0", "at least 1"),
    ("model.attention=mla model.q_lora_rank=0", "q_lora_rank=0", "at least 1"),
    ("model.attention=mla model.qk_nope_head_dim=0", "qk_nope_head_dim=0", "at least 1"),
    ("model.attention=mla model.qk_rope_head_dim=8", "qk_rope_head_dim=8 with rope=False", "rope=True"),
    ("model.attention=mla model.rope=True model.qk_rope_head_dim=7", "qk_rope_head_dim=7 is odd", "6 or 8"),
    ("model.layers=[{windwo: 3}]", "'windwo'", "'window'"),
    ("model.layers=[{n_embd: 96}]", "'n_embd'", "Known: attention"),
    ("model.layers=[{mlp: swiglu}]", "'mlp'", "Known: attention"),
    ("model.layers=[{type: rnn}]", "'type'", "Known: attention"),
    ("model.layers=[{layers: []}]", "'layers'", "Known: attention"),
    ("model.layers=[{window: three}]", "window='three'", "expected a whole number"),
    ("model.layers=[{window: 2.5}]", "window=2.5", "expected a whole number"),
    ("model.layers=[{window: true}]", "window=True", "expected a whole number"),
    ("model.layers=[{head_map: modluar}]", "head_map='modluar'", "'modular'"),
    ("model.layers=[{},{},{}] model.n_layer=2", "model.layers has 3 entries for model.n_layer=2", "Use 1 to 2."),
    ("model.layers=[]", "model.layers has 0 entries", "Use 1 to 6."),
    ("model.layers=[{n_kv_head: 4}]", "n_kv_head=4", "[1, 2, 3, 6]"),
    ("model.layers=[{kv_lora_rank: 4}]", "model.kv_lora_rank=4", "Leave it out"),
    ("model.type=rnn model.attention=mha", "model.attention=mha has no effect with model.type=rnn", "Leave it out"),
    ("model.type=rnn model.n_kv_head=2", "model.n_kv_head=2", "Leave it out"),
    ("model.type=rnn model.rope=False", "model.rope=False", "Leave it out"),
    ("model.type=rnn model.window=3", "model.window=3", "Leave it out"),
    ("model.type=rnn model.shape=llama", "model.shape=llama", "Leave it out"),
    ("model.type=rnn model.tie_embeddings=True", "model.tie_embeddings=True", "Leave it out"),
    ("model.type=rnn model.layers=[{}]", "model.layers=[{}]", "Leave it out"),
    ("model.type=rnn model.n_layer=0", "n_layer=0", "Use 1 to 1024"),
    ("model.type=rnn model.n_hidden=0", "n_hidden=0", "at least 1"),
    ("data.block_size=16777217", "block_size=16777217 is too large", "16,777,216"),
    ("model.n_query_head=4098 model.head_dim=2", "n_query_head=4098 is too large", "at most 4096"),
    ("model.layers=[{rope_scaling: {rope_type: linear, factor: 3}}]", "model.rope_scaling=", "Leave it out"),
    ("model.attention=gqa_sum model.n_kv_head=2 model.score=additive", "model.score=additive has no", "gqa_sum. Leave"),
    ("model.attention=gqa_sum", "gqa_sum has no default for n_kv_head", "Set model.n_kv_head."),
    ("model.folder=out/a", "model.folder=out/a has a config of its own", "load it"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "named", "remedy"), REFUSED)
def test_refused(flags, named, remedy):
    with pytest.raises(ConfigError) as caught:
        resolve(*flags.replace(" model.", "\nmodel.").splitlines())
    assert named in str(caught.value)
    assert remedy in str(caught.value)


def test_a_layer_has_a_scaling_of_its_own():
    config = resolve(
        "model.rope=True", "model.n_layer=3", "model.layers=[{rope_scaling: {rope_type: linear, factor: 3}}, {}]"
    )  # fmt: skip
    assert [layer.rope.scaling for layer in config.attention] == [
        LinearScaling(factor=3.0),
        None,
        LinearScaling(factor=3.0),
    ]


def test_flags_of_a_variant_are_its_fields():
    config = resolve("model.attention=gqa_sum", "model.n_kv_head=2", "model.rope=True", "model.bias=False")
    assert set(config.attention) == {
        SummedConfig(n_query_head=6, n_kv_head=2, head_dim=32, rope=RopeConfig(), attn_pdrop=0.1)
    }


GPT = [  # fields, the value the message must name, the remedy
    ({"vocab_size": 2**22 + 1}, "vocab_size=4194305 is too large", "at most 4,194,304"),
    ({"embd_pdrop": -0.5}, "embd_pdrop=-0.5 is not a dropout probability", "0 or more, below 1"),
    ({"norm_eps": 1.0}, "norm_eps=1.0 is not between 0 and 1", "1e-5"),
    ({"embed_scale": 0.0}, "embed_scale=0.0 is not a positive number", "Use 1 for no scaling"),
    ({"residual_scale": float("nan")}, "residual_scale=nan", "Use 1 for no scaling"),
    ({"logit_scale": float("inf")}, "logit_scale=inf", "Use 1 for no scaling"),
    ({"logit_softcap": 0.0}, "logit_softcap=0.0 is not a positive number", "Use 30, or None"),
    ({"logit_softcap": float("inf")}, "logit_softcap=inf", "Use 30, or None"),
    (
        {"parallel_residual": True, "norm_position": "post"},
        "parallel_residual=True with norm_position=post",
        "norm_position=pre or both",
    ),
    ({"attention": ()}, "n_layer=0", "1 to 1024"),
]


@pytest.mark.parametrize(("values", "named", "remedy"), GPT)
def test_refused_fields_of_a_model(values, named, remedy):
    with pytest.raises(ConfigError) as caught:
        replace(resolve(), **values)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


TRAINER = [  # fields, the value the message must name, the remedy
    ({"batch_size": 0}, "batch_size=0", "1 or more"),
    ({"grad_accumulation": 0}, "grad_accumulation=0", "1 or more"),
    ({"eval_every": 0}, "eval_every=0", "1 or more"),
    ({"save_every": -2}, "save_every=-2", "1 or more"),
    ({"keep": 0}, "keep=0", "1 or more"),
    ({"max_iters": -1}, "max_iters=-1", "0 or more"),
    ({"warmup_iters": -1}, "warmup_iters=-1", "0 or more"),
    ({"sample_every": -3}, "sample_every=-3", "0 or more"),
    ({"learning_rate": 0.0}, "learning_rate=0.0", "above 0"),
    ({"learning_rate": float("nan")}, "learning_rate=nan", "above 0"),
    ({"learning_rate": float("inf")}, "learning_rate=inf", "above 0"),
    (
        {"min_learning_rate": 1.0},
        "min_learning_rate=1.0 with learning_rate=0.0005",
        "up to the learning rate",
    ),
    ({"min_learning_rate": -1.0}, "min_learning_rate=-1.0", "0 up to"),
    ({"beta1": 1.0}, "beta1=1.0", "below 1"),
    ({"beta2": -0.5}, "beta2=-0.5", "below 1"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0", "0 or more"),
    ({"grad_norm_clip": 0.0}, "grad_norm_clip=0.0", "above 0"),
    ({"grad_norm_clip": float("nan")}, "grad_norm_clip=nan", "above 0"),
    ({"distillation": 1.5}, "distillation=1.5 is not a share", "0 to 1"),
    ({"compile": True, "recompute": True}, "compile=True and trainer.recompute=True", "use one of them"),
    ({"compile": True, "parallel": "ddp"}, "compile=True and trainer.parallel=ddp", "use one of them"),
    ({"report_to": ["wandb", "wandb"]}, "report_to=['wandb', 'wandb'] names one twice", "Leave it out"),
    ({"sample_tokens": 1_000_001}, "sample_tokens=1000001", "0 to 1,000,000"),
    ({"sample_tokens": -1}, "sample_tokens=-1", "0 or more"),
    ({"sample_temperature": float("inf")}, "sample_temperature=inf", "0 or more"),
    ({"sample_top_k": 0}, "sample_top_k=0", "1 or more, or null for all"),
    ({"sample_prompt": ""}, "sample_prompt is empty", "or null to use the validation text"),
]


@pytest.mark.parametrize(("values", "named", "remedy"), TRAINER)
def test_refused_trainer_settings(values, named, remedy):
    with pytest.raises(ConfigError) as caught:
        TrainerOptions(**values)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


MOVED = {  # every flag of the model group off its default, with what it needs beside it
    "type": {"type": "rnn"},
    "shape": {"shape": "llama"},
    "attention": {"attention": "mqa"},
    "n_layer": {"n_layer": 2},
    "n_query_head": {"n_query_head": 12},
    "n_kv_head": {"n_kv_head": 2},
    "n_embd": {"n_embd": 96},
    "head_dim": {"head_dim": 10},
    "v_head_dim": {"v_head_dim": 10},
    "head_map": {"head_map": "modular"},
    "partial_rotary_factor": {"rope": True, "partial_rotary_factor": 0.5},
    "window": {"window": 5},
    "score": {"score": "multiplicative"},
    "score_width": {"score": "additive", "score_width": 5},
    "tie_kv": {"tie_kv": True},
    "qk_norm_eps": {"qk_norm_eps": 1e-6},
    "rope": {"rope": True},
    "rope_theta": {"rope": True, "rope_theta": 500.0},
    "rope_layout": {"rope": True, "rope_layout": "interleaved"},
    "rope_scaling": {"rope": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "kv_lora_rank": {"attention": "mla", "kv_lora_rank": 5},
    "q_lora_rank": {"attention": "mla", "q_lora_rank": 5},
    "qk_nope_head_dim": {"attention": "mla", "qk_nope_head_dim": 6},
    "qk_rope_head_dim": {"attention": "mla", "rope": True, "qk_rope_head_dim": 6},
    "latent_norm": {"attention": "mla", "latent_norm": False},
    "layers": {"layers": [{"window": 5}, {}]},
    "norm": {"norm": "rmsnorm"},
    "mlp": {"mlp": "swiglu"},
    "n_hidden": {"n_hidden": 5},
    "bias": {"bias": False},
    "tie_embeddings": {"tie_embeddings": True},
    "activation": {"type": "rnn", "activation": "slide"},
    "embd_pdrop": {"embd_pdrop": 0.5},
    "resid_pdrop": {"resid_pdrop": 0.5},
    "attn_pdrop": {"attn_pdrop": 0.5},
}


FOLDERS = ("pretrained_folder", "folder")


@pytest.mark.parametrize("name", [f.name for f in fields(ModelOptions) if f.name not in FOLDERS])
def test_every_flag_changes_the_model(name):
    values = dict(MOVED[name])
    there = ModelOptions(**values).resolve(65, 128)
    values.pop(name)
    assert there != ModelOptions(**values).resolve(65, 128)


def test_common_flags_are_for_the_layers_that_read_them():
    """Left out, the rank would be another one, without a word."""
    mixed = resolve(
        "model.kv_lora_rank=64", "model.layers=[{attention: mla}, {}]", "model.n_layer=2"
    ).attention
    assert (mixed[0].kv_lora_rank, mixed[1].name) == (64, "mha")
    flags = [
        "model.attention=mla",
        "model.kv_lora_rank=64",
        "model.layers=[{}, {attention: gqa, n_kv_head: 2}]",
    ]
    mixed = resolve(*flags, "model.n_layer=2").attention
    assert (mixed[0].kv_lora_rank, mixed[1].n_kv_head) == (64, 2)
    mixed = resolve(
        "model.score=additive", "model.layers=[{}, {attention: mla}]", "model.n_layer=2"
    ).attention
    assert (type(mixed[0].score).__name__, mixed[1].name) == ("Additive", "mla")
    with pytest.raises(ConfigError, match="kv_lora_rank=64 has no effect"):
        resolve("model.kv_lora_rank=64", "model.layers=[{}, {n_kv_head: 2}]")
    with pytest.raises(ConfigError, match="kv_lora_rank=8 has no effect"):
        resolve("model.layers=[{attention: mla}, {attention: mha, kv_lora_rank: 8}]")


def test_a_whole_table_replaces_another_and_an_entry_joins_it(tmp_path):
    file = tmp_path / "c.yaml"
    yarn = "rope_type: yarn, factor: 4, original_max_position_embeddings: 64, attention_factor: 1.5"
    file.write_text(f"model: {{rope: true, rope_scaling: {{{yarn}}}}}")
    other = "model.rope_scaling={rope_type: linear, factor: 8}"
    assert read([other], (file,)).model.rope_scaling == {"rope_type": "linear", "factor": 8}
    entry = read(["model.rope_scaling.factor=8"], (file,)).model.rope_scaling
    assert (entry["factor"], entry["attention_factor"]) == (8, 1.5)


@pytest.mark.parametrize("name", ["embd_pdrop", "resid_pdrop", "attn_pdrop"])
def test_a_dropout_that_a_teacher_ignores(name):
    options = read([f"model.{name}=0.7", "trainer.teacher=m"])
    with pytest.raises(ConfigError, match=rf"model.{name}=0.7 has no effect with trainer.teacher"):
        options.refuse_unused()
    read([f"model.{name}=0", "trainer.teacher=m"]).refuse_unused()


@pytest.mark.parametrize("size", [0, -3])
def test_a_block_has_a_token(size):
    with pytest.raises(ConfigError, match=rf"data.block_size={size}: a block has at least 1 token"):
        read([f"data.block_size={size}", "model.folder=m"])
