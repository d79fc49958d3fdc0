"""Sizes from the config alone: the seeds' ground truth, and what is really built, computed and held."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from rehead.attention import GroupedConfig, LatentConfig, kernels, variants, visible
from rehead.config import ExpertsConfig, GPTConfig, ModelOptions, RNNConfig, TrainerOptions
from rehead.generation import generate
from rehead.measure import cache_bytes, forward_flops, kv_bytes_per_token, parameters
from rehead.measure.parts import parts
from rehead.measure.size import decode_bytes, decode_flops, prefill_flops, prompt_flops, training_flops
from rehead.model import build
from rehead.training.frozen import freeze

HOMEWORK = [  # seeds, section 3
    # n_kv_head, parameters, forward FLOPs per token at T = 128, KV fp32 bytes per token, of 128 tokens
    (6, 2_719_104, 5_923_200, 9_216, 1_179_648),
    (3, 2_496_768, 5_480_832, 4_608, 589_824),
    (2, 2_422_656, 5_333_376, 3_072, 393_216),
    (1, 2_348_544, 5_185_920, 1_536, 196_608),
]
COMMON = {"n_layer": 2, "n_embd": 30, "n_query_head": 6, "n_hidden": 19, "head_dim": 4}
FLAGS = {
    "mha": {},
    "gqa": {"n_kv_head": 2},
    "mqa, rope": {"n_kv_head": 1, "rope": True},
    "modular, wide values": {"n_kv_head": 2, "head_map": "modular", "v_head_dim": 7},
    "llama": {"shape": "llama", "n_kv_head": 3},
    "gelu without bias": {"bias": False, "norm": "rmsnorm"},
    "swiglu with bias": {"bias": True, "mlp": "swiglu"},
    "tied": {"tie_embeddings": True},
    "multiplicative": {"score": "multiplicative", "n_kv_head": 2},
    "concatenated": {"score": "concatenated", "n_kv_head": 2},
    "additive": {"score": "additive", "score_width": 5, "n_kv_head": 2},
    "mla": {"attention": "mla", "kv_lora_rank": 9},
    "mla, rope, query latent": {"attention": "mla", "kv_lora_rank": 9, "q_lora_rank": 7, "rope": True},
    "mla, rebuilt keys, shared": {"attention": "mla", "n_kv_head": 2, "rope": True, "qk_rope_head_dim": 0},
    "mla, no norm, no bias": {"attention": "mla", "latent_norm": False, "bias": False},
    "window": {"window": 5},
    "pattern": {"n_layer": 5, "layers": [{"window": 3}, {"n_kv_head": 2}, {"attention": "mla", "window": 4}]},
}
CONFIGS = {name: ModelOptions(**COMMON | flags).resolve(29, 16) for name, flags in FLAGS.items()}
MIXED = {"layers": (1,), "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
CONFIGS |= {
    "experts": replace(CONFIGS["llama"], experts=ExpertsConfig(**MIXED)),
    "experts, shared, corrected": replace(
        CONFIGS["llama"], experts=ExpertsConfig(**MIXED, n_shared_experts=3, scoring_func="sigmoid")
    ),
}
RNN = RNNConfig(vocab_size=29, block_size=16, n_embd=5, n_layer=2, n_hidden=7, n_output=29)
CONFIGS |= {f"rnn, {d}": replace(RNN, direction=d) for d in ("forward", "bidirectional", "prefix")}
each_model = pytest.mark.parametrize("name", CONFIGS)


def homework(n_kv_head, **flags):
    return ModelOptions(n_kv_head=n_kv_head, **flags).resolve(65, 128)


@pytest.mark.parametrize(("n_kv_head", "count", "flops", "per_token", "of_128"), HOMEWORK)
def test_homework_ground_truth(n_kv_head, count, flops, per_token, of_128):
    config = homework(n_kv_head)
    assert parameters(config) == count
    assert forward_flops(config, 128) == flops
    assert kv_bytes_per_token(config) == per_token
    assert cache_bytes(config, 128) == of_128
    assert cache_bytes(config, 128, 3, torch.bfloat16) == 3 * of_128 / 2
    rotary = homework(n_kv_head, rope=True)
    assert parameters(rotary) == count - 24_576
    assert (forward_flops(rotary, 128), cache_bytes(rotary, 128)) == (flops, of_128)


def test_a_head_of_its_own_costs_12_480():
    assert parameters(homework(6, tie_embeddings=True)) == 2_706_624


def test_gpt2():
    gpt2 = ModelOptions(n_layer=12, n_query_head=12, n_embd=768, tie_embeddings=True).resolve(50_257, 1024)
    assert parameters(gpt2) == 124_439_808
    assert kv_bytes_per_token(gpt2, torch.float16) == 36_864
    assert kv_bytes_per_token(gpt2) == 73_728
    assert round(cache_bytes(gpt2, 503) / 1e6, 1) == 37.1


@pytest.mark.parametrize(
    ("n_kv_head", "kv", "projections", "cached"),
    [
        (8, 2_097_152, 17_179_869_184, 8_388_608),
        (4, 1_048_576, 12_884_901_888, 4_194_304),
        (2, 524_288, 10_737_418_240, 2_097_152),
        (1, 262_144, 9_663_676_416, 1_048_576),
    ],
)
def test_notebook_quiz(n_kv_head, kv, projections, cached):
    """Seeds C5-C8: D = 1024, H = 8, L = 2048; the scores cost the same whatever is shared."""
    config = GroupedConfig(n_query_head=8, n_kv_head=n_kv_head, head_dim=128)
    assert config.n_parameters(1024) - 2 * 1024**2 == kv
    assert config.projection_flops(1024) * 2048 == projections
    assert config.attention_flops(2048) * 2048 == 17_179_869_184
    assert config.kv_numbers() * 2048 * 2 == cached


def test_notebook_quiz_by_its_parts():
    """C5-C8: parameters of keys and values, FLOPs, and one output projection for all but the reduced MLA."""
    shapes = set()
    for n_kv_head, kv, projections in ((8, 2_097_152, 17_179_869_184), (1, 262_144, 9_663_676_416)):
        config = GroupedConfig(n_query_head=8, n_kv_head=n_kv_head, head_dim=128, qkv_bias=True)
        found = parts(config, 1024, 2048)
        assert (found.kv_parameters, found.projection_flops, found.attention_flops) == (
            kv,
            projections,
            17_179_869_184,
        )
        shapes.add(found.output_projection)
    assert shapes == {(1024, 1024)}
    reduced = GroupedConfig(n_query_head=8, n_kv_head=1, head_dim=64, tie_kv=True, window=5)
    assert parts(reduced, 1024, 2048).output_projection == (1024, 8 * 64)
    assert parts(reduced, 1024, 2048).kv_parameters == 64 * 1024
    assert parts(reduced, 1024, 2048).attention_flops == 2048 * 5 * 2 * 8 * 128
    latent = LatentConfig(
        n_query_head=8, kv_lora_rank=50, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=7
    )
    assert parts(latent, 1024, 9).kv_parameters == 1024 * 54 + 50 * 8 * 10
    normed = replace(latent, qk_norm_eps=1e-6, qk_norm_head_dim=6)
    assert parts(normed, 1024, 9).kv_parameters == 1024 * (54 + 8 * 6) + 50 * 8 * 10
    assert parts(latent, 1024, 9).output_projection == (1024, 56)


def test_olympiad_part_13():
    latent = LatentConfig(
        n_query_head=32, kv_lora_rank=50, qk_nope_head_dim=32, v_head_dim=32, latent_norm=False
    )
    heads = GroupedConfig(n_query_head=32, head_dim=32)
    assert (heads.n_parameters(1024), heads.kv_numbers()) == (4_194_304, 2_048)
    assert (latent.n_parameters(1024), latent.kv_numbers()) == (2_250_752, 50)


@pytest.mark.parametrize(
    ("flags", "giga_bytes"),
    [
        ({}, 17.18),
        ({"n_kv_head": 8}, 4.29),
        ({"layers": [{"window": 1024}] * 5 + [{}]}, 3.14),
        ({"n_kv_head": 8, "layers": [{"window": 1024}] * 5 + [{}]}, 0.78),
    ],
)
def test_long_context_estimates(flags, giga_bytes):
    """LLMs-from-scratch: 32k context, 4096 wide, 32 heads, 32 layers, bf16."""
    config = ModelOptions(n_layer=32, n_embd=4096, n_query_head=32, rope=True, **flags).resolve(
        50_257, 32_768
    )
    # 5 : 1 windows in 32 layers leave 5 full ones; GB are 10^9
    assert round(cache_bytes(config, 32_768, dtype=torch.bfloat16) / 1e9, 2) == giga_bytes


@each_model
def test_parameters_are_those_built(name):
    with torch.device("meta"):
        model = build(CONFIGS[name])
    assert parameters(CONFIGS[name]) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("variant", "name"),
    [(kind, name) for kind in dict.fromkeys(map(variants.__getitem__, variants)) for name in kind.examples()],
)
def test_parameters_of_every_example_are_those_built(variant, name):
    config = variant.examples()[name]
    assert config.n_parameters(23) == sum(weight.numel() for weight in config.build(23).parameters())


def held(model, n_prompt, n_new, batch_size):
    """Bytes in the caches that really served a generation."""
    caches, new_cache = [], model.new_cache
    model.new_cache = lambda *args: caches.append(new_cache(*args)) or caches[-1]
    generate(model, torch.zeros(batch_size, n_prompt, dtype=torch.long), n_new)
    assert len(caches) == 1
    return sum(layer.n_bytes for layer in caches[0])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CONFIGS if name not in ("rnn, bidirectional", "rnn, prefix")),
        ("mha", torch.float64),
    ],
)
def test_bytes_held_are_bytes_predicted(name, dtype):
    config = CONFIGS[name]
    model = build(config).to(dtype)
    for n_token in (2, 3, 5, 16):
        assert held(model, 1, n_token - 1, 3) == cache_bytes(config, n_token, 3, dtype)


@pytest.mark.parametrize(("n_kv_head", "of_128"), [(row[0], row[-1]) for row in HOMEWORK])
def test_homework_bytes_are_held(n_kv_head, of_128):
    model = build(homework(n_kv_head)).float()
    assert held(model, 125, 3, 1) == of_128


def test_a_window_holds_no_more_than_itself():
    config = ModelOptions(**COMMON, window=5, rope=True).resolve(29, 16)
    sizes = [cache_bytes(config, n_token) for n_token in (1, 4, 5, 6, 1000)]
    assert [size // kv_bytes_per_token(config) for size in sizes] == [1, 4, 5, 5, 5]
    assert held(build(config).float(), 40, 3, 2) == cache_bytes(config, 43, 2) == 2 * sizes[-1]


def test_an_rnn_holds_one_state():
    assert kv_bytes_per_token(RNN) == 0
    assert {cache_bytes(RNN, n_token, 3) for n_token in (1, 10, 10**6)} == {3 * 2 * 7 * 4}
    assert held(build(RNN).float(), 40, 3, 3) == 3 * 2 * 7 * 4


def by_reference(query, key, value, mask, *, pdrop=0.0, **options):
    return kernels.reference(query, key, value, mask.dense(), **options)


def counted(config, n_token, batch_size=2):
    model = build(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch_size, n_token, dtype=torch.long))
    return counter.get_total_flops() / (batch_size * n_token)


def check_flops(config, n_token, predicted=forward_flops):
    assert counted(config, n_token) == predicted(config, n_token)


@pytest.mark.parametrize("n_token", [2, 16])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("window", "pattern")])
def test_flops_are_those_torch_counts(name, n_token, monkeypatch):
    """By the reference kernel, which skips nothing; one token is no product over keys, so torch counts from 2 on."""
    monkeypatch.setattr(kernels, "attend", by_reference)
    check_flops(CONFIGS[name], n_token)


@pytest.mark.parametrize(("n_kv_head", "flops"), [(row[0], row[2]) for row in HOMEWORK])
def test_homework_flops_are_those_torch_counts(n_kv_head, flops, monkeypatch):
    monkeypatch.setattr(kernels, "attend", by_reference)
    assert counted(homework(n_kv_head), 128, 1) == flops


@pytest.mark.parametrize("name", ["mha", "llama", "tied", "mla", "experts"])
def test_a_training_step_takes_the_flops_torch_counts(name, monkeypatch):
    """Of a first layer that alone learns, torch does not compute the gradient of its input."""
    monkeypatch.setattr(kernels, "attend", by_reference)
    config = CONFIGS[name]
    for train in ("attention",) if config.experts else ("all", "attention"):
        model, ids = build(config), torch.arange(32).view(2, 16) % 29
        freeze(model, TrainerOptions(train=train))
        with FlopCounterMode(display=False) as counter:
            model(ids).sum().backward()
        of_inputs = sum(
            weight.numel()
            for name, weight in model.layers[0].self_attn.named_parameters()
            if weight.ndim == 2 and weight.shape[1] == config.n_embd and "o_proj" not in name
        )
        not_computed = 2 * of_inputs * (train == "attention")
        assert counter.get_total_flops() == 32 * (training_flops(config, 16, train=train) - not_computed)


class Counter(TorchDispatchMode):
    """Counts FLOPs by torch's formulas, without its hooks: `generate` calls a hooked model as a whole."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            with self:  # it consists of others, perhaps
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs)
        self.flops += count(*args, **kwargs, out_val=out)
        return out


@pytest.mark.parametrize("name", ["mha", "llama", "tied", "mla", "rnn, forward"])
def test_reading_a_prompt_takes_the_flops_torch_counts(name, monkeypatch):
    monkeypatch.setattr(kernels, "attend", by_reference)
    model = build(CONFIGS[name]).eval()
    with Counter() as counter:
        generate(model, torch.arange(48).view(3, 16) % 29, 1)  # equal prompts would be read once
    assert counter.flops == 3 * prefill_flops(CONFIGS[name], 16)


@pytest.mark.parametrize(
    "name", ["mha", "window", "pattern", "mla", "mla, rebuilt keys, shared", "narrow", "rnn, forward"]
)
def test_a_prompts_queries_compute_nothing_of_the_keys_after_them(name, monkeypatch):
    """As torch counts it, less the pairs that the mask hides; a latent is absorbed where `generate` absorbs it."""
    narrow = {
        "attention": "mla",
        "kv_lora_rank": 2,
        "qk_nope_head_dim": 5,
        "v_head_dim": 4,
        "qk_rope_head_dim": 4,
    }
    config = CONFIGS.get(name) or ModelOptions(**COMMON | narrow, rope=True).resolve(29, 16)
    monkeypatch.setattr(kernels, "attend", by_reference)
    with Counter() as counter:
        generate(build(config).eval(), torch.arange(48).view(3, 16) % 29, 1)
    layers = getattr(config, "attention", ())
    windows = [layer.window or 16 for layer in layers]
    masks = [visible(torch.arange(16)[None], torch.arange(16)[None], window) for window in windows]
    per_pair = [
        6 * 2 * (2 + 4 + 2) if name == "narrow" else layer.attention_flops(1) for layer in layers
    ]  # a latent is key and value
    hidden = sum(flops * int((~mask).sum()) for flops, mask in zip(per_pair, masks, strict=True))
    assert counter.flops == 3 * (prompt_flops(config, 16) + hidden)
    assert (prompt_flops(config, 16) < prefill_flops(config, 16)) == bool(layers)


def test_a_step_of_an_rnn_does_not_grow():
    assert decode_flops(RNN, 1) == decode_flops(RNN, 1000) == forward_flops(RNN, 1)
    built = sum(weight.numel() for name, weight in build(RNN).named_parameters() if "embed" not in name)
    assert decode_bytes(RNN, 1000, 3) == 4 * built + cache_bytes(RNN, 1, 3)


def test_wrong_flops_are_caught(monkeypatch):
    monkeypatch.setattr(kernels, "attend", by_reference)
    for mutant in (
        lambda config, n: forward_flops(replace(config, mlp="gelu"), n),
        lambda config, n: forward_flops(config, n) - 2 * config.n_embd * config.vocab_size,
        lambda config, n: forward_flops(config, n + 1),
        lambda config, n: forward_flops(replace(config, attention=config.attention[:1]), n),
    ):
        with pytest.raises(AssertionError):
            check_flops(CONFIGS["llama"], 7, mutant)


def test_windowed_flops_count_the_window_only():
    full, windowed = CONFIGS["mha"], CONFIGS["window"]
    assert isinstance(full, GPTConfig)
    pairs = 2 * 6 * (4 + 4) * 2  # 2 H (E + V), two layers
    for n_token in (1, 5, 6, 100):
        assert forward_flops(full, n_token) - forward_flops(windowed, n_token) == pairs * max(0, n_token - 5)


def test_cache_of_one_gpu_holds_the_heads_that_its_queries_read():
    """12 query heads in turn: wherever engines can split them, the fullest GPU has what its query heads need."""
    latent = LatentConfig(
        n_query_head=12, kv_lora_rank=7, qk_nope_head_dim=4, v_head_dim=5, qk_rope_head_dim=2
    )
    for n_kv_head, tp in product((1, 2, 3, 4, 6, 12), (1, 2, 3, 4, 6, 12, 24)):
        layer = GroupedConfig(n_query_head=12, n_kv_head=n_kv_head, head_dim=4, v_head_dim=5)
        group, most = 12 // n_kv_head, -(-n_kv_head // tp)
        if 12 % tp == 0 and (n_kv_head % tp == 0 or tp % n_kv_head == 0):
            needed = [
                {head // group for head in range(gpu * 12 // tp, (gpu + 1) * 12 // tp)} for gpu in range(tp)
            ]
            most = max(map(len, needed))
        assert layer.kv_numbers(tp) == most * 9, f"{n_kv_head=}, {tp=}"
        assert latent.kv_numbers(tp) == latent.kv_numbers() == 9


def test_an_rnn_that_reads_backwards_too_keeps_nothing():
    """It reads the whole text again for every token, both ways."""
    rnn = RNNConfig(
        vocab_size=29, block_size=16, n_embd=5, n_layer=2, n_hidden=7, n_output=14, direction="prefix"
    )
    model = build(rnn).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(9)[None])
    assert counter.get_total_flops() == 9 * forward_flops(rnn, 9)
    assert decode_flops(rnn, 9) == counter.get_total_flops() - 8 * 2 * rnn.n_hidden * rnn.n_output
    assert cache_bytes(rnn, 9) == 0
    assert decode_flops(replace(rnn, direction="forward", n_output=7), 9) < decode_flops(rnn, 9) / 9
