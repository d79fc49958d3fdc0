"""What every attention variant keeps, whatever it is: over all examples of the registry."""

import ast
import pydoc
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.utils.flop_counter import FlopCounterMode

import rehead.attention
from calls import by
from rehead.attention import (
    EMPTY,
    GroupedConfig,
    LatentConfig,
    LayerCache,
    Mask,
    RopeConfig,
    base,
    kernels,
    scalings,
    scores,
    variants,
)
from rehead.attention import cache as cache_module
from rehead.attention.score import Additive, ScaledDot, SoftCapped
from rehead.attention.summed import SummedConfig
from rehead.errors import ConfigError, ReheadError, UsageError

EXAMPLES = {name: config for variant in variants for name, config in variants[variant].examples().items()}
WINDOWED = {name: config for name, config in EXAMPLES.items() if config.window}
ABSORBABLE = {
    name: config
    for name, config in EXAMPLES.items()
    if isinstance(config, LatentConfig) and not config.rebuilds_keys
}
B, T, D, C = 8, 20, 13, 17  # no two sizes of the examples equal one of these

examples = pytest.mark.parametrize("config", EXAMPLES.values(), ids=EXAMPLES)
windowed = pytest.mark.parametrize("config", WINDOWED.values(), ids=WINDOWED)
absorbable = pytest.mark.parametrize("config", ABSORBABLE.values(), ids=ABSORBABLE)


def fresh(config, d_model=D):
    """A module in which no weight is at its first value and attention is not nearly flat."""
    torch.manual_seed(1)
    module = config.build(d_model)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def crossing(config):
    """The variant as cross-attention, over a context of another width."""
    return replace(config, causal=False, window=None, d_context=C)


def distance(a, b):
    """Largest difference, relative to the largest number."""
    return ((a - b).abs().max() / b.abs().max()).item()


# Names


@pytest.mark.parametrize("variant", list(variants))
def test_a_variant_is_found_by_the_name_of_its_configs(variant):
    names = {config.name for config in variants[variant].examples().values()}
    assert variant in names
    assert all(variants[name] is variants[variant] for name in names)


@examples
def test_a_config_is_complete_and_stays_itself(config):
    assert replace(config) == config
    assert hash(replace(config)) == hash(config)


# Causality


def check_causal(module):
    for n in (9, T):  # few queries and many take other kernels
        x = torch.randn(B, n, D)
        y = x.clone()
        y[:, 7:] = torch.randn(B, n - 7, D)
        assert torch.equal(module(x)[:, :7], module(y)[:, :7])
        assert not torch.equal(module(x)[:, 7:], module(y)[:, 7:])


@examples
def test_no_token_sees_the_future(config):
    check_causal(fresh(config))
    with pytest.raises(AssertionError):
        check_causal(fresh(replace(config, causal=False, window=None)))


@windowed
def test_no_token_sees_past_its_window(config):
    def check(module):
        for n in (9, T):
            x = torch.randn(B, n, D)
            y = x.clone()
            y[:, :3] = torch.randn(B, 3, D)
            changed = (module(x) != module(y)).any(-1).all(0)  # by position
            assert changed.tolist() == [at < 3 + config.window - 1 for at in range(n)]

    check(fresh(config))
    for wrong in (config.window - 1, config.window + 1, None):
        with pytest.raises(AssertionError):
            check(fresh(replace(config, window=wrong)))


@examples
def test_weights_are_a_causal_distribution(config):
    """C2: a longer prompt leaves the old rows as they were."""
    module, x = fresh(config), torch.randn(B, T, D)
    weights, seen = module.weights(x), Mask(n_query=T, n_key=T, window=config.window).dense()
    assert weights.shape == (B, config.n_map, T, T)
    assert torch.equal(weights != 0, seen.expand_as(weights))
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, config.n_map, T))
    torch.testing.assert_close(module.weights(x[:, :9]), weights[:, :, :9, :9])


# The cache


def positions_of(start, stop, given):
    rows = torch.arange(start, stop)[None]
    return {"none": None, "one row": rows, "rows": rows.expand(B, -1)}[given]


def cached(module, x, cache, cuts, given="none"):
    """Outputs of the chunks that end at `cuts`, joined."""
    return torch.cat(
        [
            module(x[:, a:b], positions=positions_of(a, b, given), cache=cache)
            for a, b in pairwise([0, *cuts])
        ],
        1,
    )


def caches(config):
    """A fresh cache of every kind the variant can use."""
    yield config.cache(B, dtype=torch.float64)
    yield config.cache(B, capacity=T, dtype=torch.float64)


def cuts_of(chunk):
    return [*range(chunk, T, chunk), T]


def check_cached(config, cuts, given):
    module, x = fresh(config), torch.randn(B, T, D)
    whole = module(x)
    for cache in caches(config):
        torch.testing.assert_close(cached(module, x, cache, cuts, given), whole, rtol=1e-9, atol=1e-11)


@examples
@pytest.mark.parametrize(("chunk", "given_positions"), [*((n, "none") for n in (1, 2, 3, 7, T)), (3, "rows")])
def test_cached_is_uncached(config, chunk, given_positions, monkeypatch):
    """Chunks shorter and longer than the window, through growing, preallocated and ring caches."""
    monkeypatch.setattr(cache_module, "FIRST_ROWS", 3)
    check_cached(config, cuts_of(chunk), given_positions)


@examples
@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, T - 1)), given_positions=st.sampled_from(["none", "one row", "rows"]))
def test_cached_is_uncached_for_uneven_chunks(config, cuts, given_positions):
    check_cached(config, [*sorted(cuts), T], given_positions)


@absorbable
@pytest.mark.parametrize("path", [0.0, float("inf")])
def test_cached_is_uncached_on_both_paths(config, path, monkeypatch):
    monkeypatch.setattr(LatentConfig, "absorbs_below", path)
    for chunk in (1, 7, T):
        check_cached(config, cuts_of(chunk), "none")


@pytest.mark.parametrize("config", [EXAMPLES[name] for name in WINDOWED if "rope" in name or "mla" in name])
def test_broken_caches_are_caught(config):
    module, x = fresh(config), torch.randn(B, T, D)

    class Stale(LayerCache):
        """Counts one token too few."""

        def append(self, positions=None, **new):
            out = super().append(positions, **new)
            self.length -= 1
            return out

    class Forgetful(LayerCache):
        """Loses the rows of the first token."""

        def append(self, positions=None, **new):
            rows, where = super().append(positions, **new)
            return {name: torch.cat([row[:, :1] * 0, row[:, 1:]], 1) for name, row in rows.items()}, where

    def check(kind=LayerCache, rows=config.window):
        for chunk in (1, 4):
            cache = kind(config.cache_rows(), batch_size=B, window=rows, dtype=torch.float64)
            cache.window = config.window  # what it says of itself is checked; what it does is compared
            out = cached(module, x, cache, [6, *range(6 + chunk, T, chunk), T])
            torch.testing.assert_close(out, module(x), rtol=1e-9, atol=1e-11)

    check()
    one_row_short = {"rows": config.window - 1}
    for mutant in (one_row_short, {"kind": Stale}, {"kind": Forgetful}):
        with pytest.raises(AssertionError):
            check(**mutant)


LENGTHS = torch.tensor([T, 1, 5, 14, 0, 7, 6, T - 1])


@examples
@pytest.mark.parametrize("chunks", [[T], [4, 5, 16, T]], ids=len)
def test_ragged_batch_is_each_sequence_alone(config, chunks):
    """Right-padded prompts, then decoding without positions: each goes on where its own prompt ended."""
    module, x, more = fresh(config), torch.randn(B, T, D), torch.randn(B, 8, D)
    at = torch.arange(T).expand(B, -1)
    padded = torch.where(at < LENGTHS[:, None], at, EMPTY)

    def check(cache, positions):
        edges = pairwise([0, *chunks])
        prompt = torch.cat([module(x[:, a:b], positions=positions[:, a:b], cache=cache) for a, b in edges], 1)
        answer = torch.cat([module(more[:, a:b], cache=cache) for a, b in pairwise([0, 1, 2, 5, 8])], 1)
        for b, n in enumerate(LENGTHS.tolist()):
            alone = module(torch.cat([x[b, :n], more[b]])[None])[0]
            torch.testing.assert_close(torch.cat([prompt[b, :n], answer[b]]), alone, rtol=1e-9, atol=1e-11)
        check_nothing(module, prompt[positions == EMPTY])

    check(config.cache(B, dtype=torch.float64), padded)
    check(config.cache(B, capacity=T + 8, dtype=torch.float64), padded)
    for mutant in (at, torch.where(padded == EMPTY, 0, padded)):  # padding that is seen
        rewinds = (
            mutant is not at and config.window is not None and len(chunks) > 1
        )  # a full ring refuses that
        with pytest.raises(UsageError if rewinds else AssertionError):
            check(config.cache(B, dtype=torch.float64), mutant)


@examples
def test_left_padding_is_each_sequence_alone(config):
    """Positions say what is padding, wherever it stands: prompts that end together, then decoding."""
    module, x, more = fresh(config), torch.randn(B, T, D), torch.randn(B, 3, D)
    first = (T - LENGTHS)[:, None]
    positions = (torch.arange(T) - first).clamp(min=EMPTY)
    for cache in (None, config.cache(B, dtype=x.dtype)):
        prompt = module(x, positions=positions, cache=cache)
        answer = [] if cache is None else [module(more[:, i : i + 1], cache=cache) for i in range(3)]
        out = torch.cat([prompt, *answer], 1)
        for b, n in enumerate(LENGTHS.tolist()):
            if n or answer:
                alone = module(torch.cat([x[b, T - n :], more[b, : len(answer)]])[None])[0]
                torch.testing.assert_close(out[b, T - n :], alone, rtol=1e-9, atol=1e-11)
        check_nothing(module, prompt[positions == EMPTY])


def check_nothing(module, out):
    """The output of a query that sees nothing is what the biases alone give, to the last bit."""
    assert torch.equal(out, module.o_proj(torch.zeros(len(out), module.o_proj.in_features)))


@examples
def test_padding_gives_the_biases_and_gets_no_gradient(config):
    for n in (9, T):
        module, x = fresh(config), torch.randn(B, n, D, requires_grad=True)
        at = torch.arange(n).expand(B, -1)
        padded = torch.where(at < LENGTHS[:, None], at, EMPTY)
        for cache in (None, config.cache(B, dtype=x.dtype)):
            check_nothing(module, module(x, positions=padded, cache=cache)[padded == EMPTY])
        module(x, positions=padded).square().sum().backward()
        assert not x.grad[padded == EMPTY].any()
        assert x.grad[padded != EMPTY].all()
        assert all(p.grad.isfinite().all() for p in module.parameters())


@examples
def test_padded_context_is_the_context_cut_short(config):
    """Cross-attention, also to a context shorter than the queries; other padding changes nothing."""
    module, x = fresh(crossing(config)), torch.randn(B, 9, D)
    for n in (5, 12):
        context, at = torch.randn(B, n, C), torch.arange(n)[None]
        padded = torch.where(at < 3, at, EMPTY)
        out = module(x, context, context_positions=padded)
        torch.testing.assert_close(out, module(x, context[:, :3]), rtol=1e-12, atol=1e-12)
        assert distance(module(x, context), out) > 1e-3


# One result by any road


def rows_of(module, x, positions=None):
    """What `_project` gives, with the rows as a cache keeps them."""
    query, latent, key_positions, mask = module._project(x, None, positions, None, None)
    return query, module._with_key_scales(latent), key_positions, mask


@absorbable
def test_absorbed_is_expanded(config):
    """A14, A15: the same numbers from rebuilt keys and values and from the latent itself."""
    module, x = fresh(config), torch.randn(B, T, D)
    at = torch.arange(T).expand(B, -1)
    padded = torch.where(at < LENGTHS[:, None], at, EMPTY)

    def check(absorbed):
        calls = [rows_of(module, x, at) for at in (None, padded)]
        query, latent, _, _ = calls[0]
        calls.append((query[:, -3:], latent, None, Mask(n_query=3, n_key=T, window=config.window)))
        for query, latent, _, mask in calls:
            assert distance(absorbed(query, latent, mask), module.expanded(query, latent, mask)) < 1e-12

    ups, rank, scale = module._ups, config.kv_lora_rank, module.scale

    def with_ups(change):
        def absorbed(*call):
            module._ups = lambda: change(*ups())
            out = module.absorbed(*call)
            module._ups = ups
            return out

        return absorbed

    def with_scale(*call):
        module.scale = rank**-0.5
        out = module.absorbed(*call)
        module.scale = scale
        return out

    check(module.absorbed)
    for mutant in (
        with_scale,
        with_ups(lambda key, value: (key.roll(1, 0), value)),  # another head's keys
        with_ups(lambda key, value: (key, value.roll(1, -1))),
        lambda query, latent, mask: module.absorbed(query, latent.roll(1, 0), mask),  # of another sequence
        lambda query, latent, mask: module.absorbed(query.flip(2), latent, mask).flip(2),
    ):
        with pytest.raises(AssertionError):
            check(mutant)


@absorbable
def test_absorbed_gradients_are_expanded(config):
    module, x = fresh(config), torch.randn(B, T, D, requires_grad=True)
    query, latent, _, mask = rows_of(module, x)
    leaves = [x, *(p for name, p in module.named_parameters() if not name.startswith("o_proj"))]
    both = [
        torch.autograd.grad(way(query, latent, mask).square().sum(), leaves, retain_graph=True)
        for way in (module.absorbed, module.expanded)
    ]
    for ours, wanted in zip(*both, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max().item())


@examples
def test_any_kernel_gives_the_same(config, monkeypatch):
    module, x = fresh(config), torch.randn(B, T, D)
    fast = module(x)
    monkeypatch.setattr(kernels, "attend", lambda q, k, v, m, **o: kernels.reference(q, k, v, m.dense(), **o))
    assert distance(fast, module(x)) < 1e-12


@examples
def test_a_sequence_does_not_see_its_batch(config):
    module, x = fresh(config), torch.randn(B, T, D)
    torch.testing.assert_close(module(x)[2:3], module(x[2:3]), rtol=1e-12, atol=1e-12)


@examples
def test_only_distances_between_positions_matter(config):
    module, x = fresh(config), torch.randn(B, T, D)
    at = torch.arange(T)[None]
    torch.testing.assert_close(module(x, positions=at), module(x), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(module(x, positions=at + 41), module(x), rtol=1e-9, atol=1e-10)
    spread = module(x, positions=at * 2)
    assert (distance(spread, module(x)) > 1e-3) == (config.rope is not None or config.window is not None)


def gradients_are_right(module, n):
    positions = torch.stack([torch.arange(n), torch.arange(n).masked_fill(torch.arange(n) > n - 2, EMPTY)])
    names = [name for name, _ in module.named_parameters()]

    def run(x, *weights):
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(module, named, (x, None, positions))

    leaves = (torch.randn(2, n, 3, requires_grad=True), *module.parameters())
    return torch.autograd.gradcheck(
        run, leaves, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True, raise_exception=False
    )


@examples
def test_gradients_are_right(config):
    """N15, with padding, for the input and every weight, with few queries and with many."""
    for n in (3, 17):
        assert gradients_are_right(fresh(config, d_model=3), n)


def test_wrong_gradients_are_caught():
    module = fresh(GroupedConfig(n_query_head=2, n_kv_head=1, head_dim=3), d_model=3)
    module.o_proj.register_forward_pre_hook(lambda _, args: (args[0] + args[0].detach()) / 2)
    assert not gradients_are_right(module, 3)


@examples
def test_arguments_are_left_alone(config):
    module, x = fresh(config), torch.randn(B, T, D)
    positions = torch.arange(T).expand(B, -1).clone()
    before, cache = (x.clone(), positions.clone()), config.cache(B, dtype=x.dtype)
    module(x), module(x, positions=positions), module.weights(x, positions=positions)
    module(x, positions=positions, cache=cache)
    module(x, positions=positions + T, cache=cache)
    assert torch.equal(x, before[0])
    assert torch.equal(positions, before[1])
    module, context, at = fresh(crossing(config)), torch.randn(B, 5, C), torch.arange(5)[None]
    before = (x.clone(), context.clone())
    module(x, context, context_positions=at), module.weights(x, context)
    assert torch.equal(x, before[0])
    assert torch.equal(context, before[1])
    assert torch.equal(at, torch.arange(5)[None])


@examples
def test_b21_dropout_is_for_training(config):
    """B21: attn_pdrop changes a training pass, never an evaluation."""
    module, x = fresh(replace(config, attn_pdrop=0.5)), torch.randn(B, T, D)
    plain = fresh(config)
    assert distance(module(x), plain(x)) > 1e-3
    if config.causal:
        last = [cached(one, x, config.cache(B, dtype=x.dtype), [T - 1, T])[:, -1] for one in (module, plain)]
        assert distance(*last) > 1e-3
    assert torch.equal(module.eval()(x), plain(x))


# Fields and counts

ALTERNATIVES = {
    "d_context": [C + 1],
    "causal": [False, True],
    "window": [3],
    "rope": [
        RopeConfig(),
        RopeConfig(theta=10.0),
        RopeConfig(layout="interleaved"),
        None,
        False,
        RopeConfig(partial_rotary_factor=0.6),
    ],
    "attn_pdrop": [0.5],
    "n_query_head": [12],
    "n_kv_head": [3],
    "head_dim": [12],
    "v_head_dim": [8],
    "head_map": ["contiguous", "modular"],
    "score": [*scores, Additive(width=3), Additive(width=3, bias=False), ScaledDot(scale=0.7)],
    "qkv_bias": [True, False],
    "down_bias": [True, False],
    "o_bias": [True, False],
    "tie_kv": [True, False],
    "qk_norm_eps": [1e-6, 0.5, None],
    "qk_norm_head_dim": [5, None],
    "qk_norm": ["rmsnorm", "layernorm", "zero_centered_rmsnorm"],
    "qk_norm_over": ["head", "projection"],
    "kv_lora_rank": [8],
    "q_lora_rank": [5],
    "qk_nope_head_dim": [12],
    "qk_rope_head_dim": [2, 0],
    "latent_norm": [True, False],
}


def fingerprint(config):
    """Parameter shapes, and the outputs of a training pass."""
    module = fresh(config).train()
    torch.manual_seed(2)
    x, context = torch.randn(2, 9, D), torch.randn(2, 7, config.d_context or D)
    return {n: p.shape for n, p in module.named_parameters()}, module(x, None if config.causal else context)


FIRST = dict(next(iter(variants[name].examples().items())) for name in variants)
SELF_OR_CROSS = {f"{name}-self": config for name, config in EXAMPLES.items()}
SELF_OR_CROSS |= {f"{name}-cross": crossing(config) for name, config in FIRST.items()}


@pytest.mark.parametrize("config", SELF_OR_CROSS.values(), ids=SELF_OR_CROSS)
def test_every_field_is_read(config):
    """Another value changes the parameters or the output, or is refused: no field is a lie."""
    shapes, out = fingerprint(config)
    for field in fields(config):
        for value in ALTERNATIVES[field.name]:
            try:
                other = replace(config, **{field.name: value})
            except UsageError:
                continue
            if other == config or (field.name == "head_map" and config.n_kv_head in (1, config.n_query_head)):
                continue  # A8: both maps coincide
            other_shapes, other_out = fingerprint(other)
            differs = shapes != other_shapes or not torch.allclose(out, other_out)
            assert differs, f"{field.name}={value} changes nothing"


@examples
def test_parameters_are_counted(config):
    changes = ({}, {"qkv_bias": True}, {"o_bias": True}, {"causal": False, "window": None, "d_context": C})
    for change in changes:
        if change.keys() - {field.name for field in fields(config)}:
            continue
        changed = replace(config, **change)
        assert changed.n_parameters(D) == sum(p.numel() for p in changed.build(D).parameters())


@examples
def test_flops_are_counted(config, monkeypatch):
    """Products of one pass over n tokens, every pair scored: what torch counts in the reference kernel."""
    monkeypatch.setattr(kernels, "attend", lambda q, k, v, m, **o: kernels.reference(q, k, v, m.dense(), **o))
    for n in (5, 11):
        with FlopCounterMode(display=False) as counter:
            config.build(D)(torch.randn(1, n, D))
        assert counter.get_total_flops() == n * (config.projection_flops(D) + config.attention_flops(n))


@examples
def test_a17_cache_bytes(config):
    """A17: batch x min(T, W) rows x kv_numbers x bytes: the formula is what is held, also after T tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = config.cache(B, capacity=T, dtype=dtype)
        rows = min(T, config.window or T)
        assert cache.n_bytes == config.kv_numbers() * dtype.itemsize * rows * B
    cache = config.cache(B, capacity=T, dtype=torch.float64)
    module = fresh(config)
    for _ in range(T):
        module(torch.randn(B, 1, D), cache=cache)
    assert cache.n_bytes == config.kv_numbers() * 8 * rows * B
    assert cache.length == T


@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("name", ["gqa, rope", "gqa, window", "mla", "mla, rebuilt keys"])
def test_lengths_that_vary_are_compiled_as_whole_graphs(name):
    """Also once a length is a symbol, of which no kernel may ask whether it equals another."""
    config = EXAMPLES[name]
    torch._dynamo.reset()
    module = fresh(config).eval()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for n in (64, 90, 33, 17):
        x = torch.randn(2, n, D)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-9, atol=1e-11)


# Refusals


@pytest.mark.typed
@examples
def test_shapes_are_checked(config):
    module, x = config.build(D), torch.randn(B, T, D)
    cross, context = crossing(config).build(D), torch.randn(B, 5, C)
    wrong = [
        lambda: module(x[0]),
        lambda: module(x[..., None]),
        lambda: module(x.long()),
        lambda: module(x, positions=torch.arange(T)),
        lambda: module(x, positions=torch.arange(T - 1)[None]),
        lambda: module(x, positions=torch.arange(T).expand(B - 1, -1)),
        lambda: module(x, positions=torch.arange(T)[None].double()),
        lambda: cross(x, context[:-1]),
        lambda: cross(x, context[0]),
        lambda: cross(x, context, context_positions=torch.arange(6)[None]),
        lambda: module.weights(x[0]),
    ]
    for call in wrong:
        with pytest.raises(TypeCheckError):
            call()


@pytest.mark.typed
def test_kernel_shapes_are_checked():
    query, key, value = torch.randn(B, 4, 6, 10), torch.randn(B, 5, 2, 10), torch.randn(B, 5, 2, 7)
    mask = Mask(n_query=4, n_key=5)
    for kernel in (kernels.attend, *map(by, kernels.ROSTER)):
        for q, k, v in ((query[0], key, value), (query, key[..., :9], value), (query, key, value[:, :4]),
                        (query, key, value[:, :, :1]), (query[1:], key, value)):  # fmt: skip
            with pytest.raises(TypeCheckError):
                kernel(q, k, v, mask)


def grouped(**fields):
    return GroupedConfig(**{"n_query_head": 6, "head_dim": 10} | fields)


def latent(**fields):
    heads = {"n_query_head": 6, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 7}
    return LatentConfig(**{"kv_lora_rank": 9} | heads | fields)


def full_ring():
    cache = grouped(window=3).cache(1)
    cache.append(None, **{name: torch.zeros(1, 6, *shape) for name, shape in cache.rows.items()})
    return cache, {name: torch.zeros(1, 1, *shape) for name, shape in cache.rows.items()}


def old_token():
    cache, token = full_ring()
    cache.append(torch.tensor([[4]]), **token)


def token_after_lost_ones():
    cache, token = full_ring()
    count = cache.count
    for _ in range(2):
        cache.append(None, **token)
    cache.count = count
    cache.append(None, **token)


def token_after_rewritten_rows():
    """What a model's call does that fails after it was given an old position."""
    cache, token = full_ring()
    count, given = cache.count, torch.tensor([[5]])
    cache.append(given, **token)
    cache.take_back(count, given)
    cache.append(None, **token)


def full_cache():
    cache = grouped().cache(1, capacity=4, dtype=torch.float64)
    grouped().build(D)(torch.randn(1, 5, D), cache=cache)


def summed(**fields):
    return SummedConfig(**{"n_query_head": 6, "n_kv_head": 2, "head_dim": 10} | fields)


X, Y, PLACES = (
    torch.zeros(1, 3, D, dtype=torch.float64),
    torch.zeros(1, 4, C, dtype=torch.float64),
    torch.arange(3)[None],
)
CROSS = {"causal": False, "d_context": C}
REFUSED = [  # B25: a call, the value its message names, the way out it shows
    (lambda: grouped(causal=True, d_context=17), "d_context=17", "Use causal=False"),
    (lambda: grouped(window=0), "window=0", "Use window=1 or more with causal=True"),
    (lambda: grouped(window=-3), "window=-3", "Use window=1 or more with causal=True"),
    (lambda: grouped(window=4, causal=False), "window=4 with causal=False", "with causal=True"),
    (lambda: grouped(window=4, d_context=17), "window=4 with causal=False", "with causal=True"),
    (lambda: grouped(attn_pdrop=1.0), "attn_pdrop=1.0", "Use 0 up to (not including) 1"),
    (lambda: grouped(attn_pdrop=-0.1), "attn_pdrop=-0.1", "Use 0 up to (not including) 1"),
    (lambda: grouped(attn_pdrop=float("nan")), "attn_pdrop=nan", "Use 0 up to (not including) 1"),
    (lambda: grouped(n_query_head=0), "n_query_head=0", "a whole number of at least 1"),
    (lambda: grouped(n_query_head=True), "n_query_head=True", "expected a whole number (int)"),
    (lambda: grouped(head_dim=2.0), "head_dim=2.0", "expected a whole number (int)"),
    (lambda: grouped(n_kv_head=-1), "n_kv_head=-1", "a whole number of at least 1"),
    (lambda: grouped(v_head_dim="7"), "v_head_dim='7'", "expected a whole number (int)"),
    (lambda: grouped(d_context=0), "d_context=0", "a whole number of at least 1"),
    (lambda: grouped(n_kv_head=4), "n_kv_head=4 does not divide n_query_head=6", "Use one of [1, 2, 3, 6]"),
    (lambda: grouped(n_kv_head=12), "n_kv_head=12 does not divide n_query_head=6", "Use one of [1, 2, 3, 6]"),
    (lambda: grouped(head_map="modulo"), "head_map='modulo'", "one of 'contiguous', 'modular'"),
    (lambda: grouped(head_dim=9, rope=True), "head_dim=9", "Use 8 or 10, or rope=False"),
    (lambda: grouped(head_dim=1, rope=True), "head_dim=1", "Use 2, or rope=False"),
    (lambda: grouped(score="aditive"), "'aditive'", "Did you mean 'additive'? Known: scaled_dot"),
    (lambda: grouped(qk_norm_eps=0.0), "qk_norm_eps=0.0", "Use 1e-6, or None"),
    (
        lambda: grouped(qk_norm_over="projection"),
        "over a projection without qk_norm_eps",
        "Use qk_norm_eps=1e-6",
    ),
    (lambda: ScaledDot(scale=-1.0), "scale=-1.0", "Leave it out"),
    (lambda: ScaledDot(scale=0), "scale=0", "Leave it out"),
    (lambda: SoftCapped(cap=-3), "cap=-3", "Use 50"),
    (
        lambda: grouped(tie_kv=True, v_head_dim=7),
        "v_head_dim=7",
        "Use v_head_dim=10 and rope=False, or tie_kv=False",
    ),
    (lambda: latent(kv_lora_rank=0), "kv_lora_rank=0", "a whole number of at least 1"),
    (lambda: latent(q_lora_rank=0), "q_lora_rank=0", "a whole number of at least 1"),
    (lambda: latent(qk_rope_head_dim=-2), "qk_rope_head_dim=-2", "a whole number of at least 1"),
    (lambda: latent(qk_rope_head_dim=3), "qk_rope_head_dim=3", "Use 2 or 4"),
    (lambda: latent(rope=False), "qk_rope_head_dim=4 with rope=False", "Use rope=True, or qk_"),
    (lambda: latent(qk_rope_head_dim=0, qk_nope_head_dim=9, rope=True), "qk_nope_head_dim=9", "Use 8 or 10"),
    (lambda: latent(n_kv_head=4), "n_kv_head=4", "Use one of [1, 2, 3, 6]"),
    (lambda: latent(qk_rope_head_dim=0, qk_norm_eps=1.0), "qk_norm_eps=1.0", "Use 1e-6, or None"),
    (
        lambda: latent(qk_norm_eps=1e-6),
        "qk_norm_head_dim=None with qk_rope_head_dim=4 and qk_norm_eps=1e-06",
        "Give all three",
    ),
    (
        lambda: latent(qk_norm_head_dim=8),
        "qk_norm_head_dim=8 with qk_rope_head_dim=4 and qk_norm_eps=None",
        "Give all three",
    ),
    (lambda: grouped(head_dim=2**40), "head_dim=1099511627776", "Use at most 131,072"),
    (
        lambda: scalings["llama3"](factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0),
        "low_freq_factor=4.0 with high_freq_factor=1.0",
        "Use 1 and 4, or swap them",
    ),
    (
        lambda: scalings["yarn"](factor=8.0, beta_fast=1.0, beta_slow=32.0),
        "beta_fast=1.0 with beta_slow=32.0",
        "Use 32 and 1, or swap them",
    ),
    (lambda: RopeConfig(theta=0.0), "theta=0.0", "Use 10000"),
    (lambda: RopeConfig(scaling={"factor": 4}), "scaling={'factor': 4}", "Use scalings['yarn'](factor=4.0)"),
    (lambda: RopeConfig(theta=float("inf")), "theta=inf", "Use 10000"),
    (lambda: RopeConfig(partial_rotary_factor=0.0), "partial_rotary_factor=0.0", "Use a number above 0"),
    (
        lambda: grouped(rope=RopeConfig(partial_rotary_factor=0.3)),
        "partial_rotary_factor=0.3 rotates 3 of a head's 10",
        "Use 0.2, which rotates 2",
    ),
    (
        lambda: latent(rope=RopeConfig(partial_rotary_factor=0.5)),
        "partial_rotary_factor=0.5 with qk_rope_head_dim=4",
        "a smaller qk_rope_head_dim",
    ),
    (lambda: RopeConfig(layout="halves"), "layout='halves'", "one of 'half-split', 'interleaved'"),
    (lambda: RopeConfig(scaling=scalings["linear"](factor=0.5)), "factor=0.5", "Use 1 or more"),
    (
        lambda: RopeConfig(scaling=scalings["yarn"](factor=float("nan"))),
        "factor=nan",
        "Use 1 or more",
    ),
    (lambda: scalings["longrope"](factors=()), "factors=[]", "a list of numbers, one for each pair"),
    (lambda: RopeConfig(theta=1.0, scaling=scalings["yarn"](factor=2.0)), "theta=1", "Use 10000"),
    (
        lambda: grouped(head_dim=6, rope=RopeConfig(scaling=scalings["longrope"](factors=(1.0, 2.0)))),
        "2 factors for 3 pairs",
        "give one for each",
    ),
    (
        lambda: RopeConfig(scaling=scalings["yarn"](factor=2.0, beta_fast=0.0)),
        "beta_fast=0.0",
        "Use 1e-06 or more",
    ),
    (lambda: scalings["yarm"], "'yarm'", "Did you mean 'yarn'? Known: linear, llama3, yarn"),
    (lambda: variants["mlaa"], "'mlaa'", "Did you mean 'mla'? Known: mha, gqa, mqa, mla"),
    (lambda: Additive(width=0), "score_width=0", "Use 64"),
    (full_cache, "capacity=4 tokens and was given 5", "build it with capacity=5 or more, or without one"),
    (old_token, "overwritten what an earlier token sees", "read the text with a new cache"),
    (token_after_lost_ones, "overwritten what an earlier token sees", "read the text with a new cache"),
    (token_after_rewritten_rows, "had been given positions again", "read the text with a new cache"),
    (lambda: grouped().cache(2, 0), "capacity=0", "Use 1 or more"),
    (
        lambda: grouped().cache(2).select_batch(torch.tensor([1, 2])),
        "rows [1, 2]",
        "Give indices of them, or 2 times",
    ),
    (lambda: grouped().build(D)(X, X), "context given to a causal attention", "Build it with causal=False"),
    (lambda: grouped(**CROSS).build(D)(X), "d_context=17", "call it as module(x, context)"),
    (lambda: latent(**CROSS).build(D)(X), "d_context=17", "call it as module(x, context)"),
    (lambda: grouped(causal=False).build(D)(X, cache=grouped().cache(1)), "a KV cache", "needs causal=True"),
    (lambda: grouped().build(0), "d_model=0", "a whole number of at least 1"),
    (lambda: latent().build(-3), "d_model=-3", "a whole number of at least 1"),
    (
        lambda: grouped().build(D)._check(X, context_positions=PLACES),
        "without a context",
        "Use positions for",
    ),
    (
        lambda: grouped().build(D)._check(X, cache=[1]),
        "cache is a list",
        "Build it with attention.config.cache",
    ),
    (lambda: given_cache(latent()), "keeps {'latent': (", "Build it with attention.config.cache"),
    (
        lambda: given_cache(grouped(window=3)),
        "the layer sees all tokens",
        "Build it with attention.config.cache",
    ),
    *(
        (
            lambda kept=kept: grouped(window=3).build(D)(
                X, cache=grouped(window=kept).cache(1, dtype=X.dtype)
            ),
            f"keeps {keeps} and the layer sees the last window=3 tokens",
            "Build it with attention.config.cache",
        )
        for kept, keeps in ((None, "all tokens"), (4, "the last window=4 tokens"))
    ),
    (lambda: given_cache(grouped(), batch_size=4), "batch_size=4 sequences and x has 1", "batch_size=1"),
    (lambda: given_cache(grouped(), dtype=torch.float32), "keeps torch.float32", "with dtype=torch.float64"),
    (lambda: given_cache(grouped(), device="meta"), "is on meta and x on cpu", "with device='cpu'"),
]


CALLS = {  # of every variant: what is given, the value the message names, the way out it shows
    "2-D x": (lambda own, cross: own(X[0]), "x has shape (3, 13)", "Use x[None]"),
    "half x": (
        lambda own, cross: own(X.half()),
        "x is torch.float16, the weights of this attention are torch.float64",
        "Use x.to(torch.float64), attention.to(torch.float16), or torch.autocast",
    ),
    "half context": (
        lambda own, cross: cross(X, torch.zeros(1, 2, 17, dtype=torch.float16)),
        "context is torch.float16",
        "Use context.to(torch.float64)",
    ),
    "narrow x": (
        lambda own, cross: own(X[..., :5]),
        "x has width 5: this attention was built for d_model=13",
        "or build it with d_model=5",
    ),
    "no token": (
        lambda own, cross: own(X[:, :0]),
        "x has shape (1, 0, 13)",
        "Give at least one token per row",
    ),
    "positions of one axis": (
        lambda own, cross: own(X, positions=PLACES[0]),
        "positions have shape (3,)",
        "Use (1, 3), or (1, 3) where all rows are alike",
    ),
    "too many positions": (
        lambda own, cross: own(X.expand(2, -1, -1), positions=torch.arange(4)[None]),
        "positions have shape (1, 4)",
        "Use (2, 3), or (1, 3) where all rows are alike",
    ),
    "positions of other rows": (
        lambda own, cross: own(X.expand(2, -1, -1), positions=PLACES.expand(3, -1)),
        "positions have shape (3, 3)",
        "Use (2, 3), or (1, 3) where all rows are alike",
    ),
    "positions that are no whole numbers": (
        lambda own, cross: own(X, positions=PLACES.float()),
        "positions are torch.float32",
        "Use positions.long()",
    ),
    "2-D context": (lambda own, cross: cross(X, Y[0]), "context has shape (4, 17)", "Use context[None]"),
    "wide context": (
        lambda own, cross: cross(X, torch.zeros(1, 4, 18)),
        "context has width 18: this attention reads d_context=17",
        "or build it with d_context=18",
    ),
    "rows of context": (
        lambda own, cross: cross(X.expand(3, -1, -1), Y),
        "context is a batch of 1 and x a batch of 3",
        "Use context[:1].expand(3, -1, -1)",
    ),
    "positions of the context": (
        lambda own, cross: cross(X, Y, context_positions=PLACES),
        "context_positions have shape (1, 3)",
        "Use (1, 4)",
    ),
}
VARIANTS = {"grouped": grouped, "latent": latent, "summed": summed}


def call_row(call, build):
    """The check of a module, that `forward` and `weights` begin with; the annotations of these refuse shapes before."""
    return call(build().build(D)._check, build(**CROSS).build(D)._check)


REFUSED += [
    (lambda call=call, build=build: call_row(call, build), f"{value}", remedy)
    for build in VARIANTS.values()
    for call, value, remedy in CALLS.values()
]


@pytest.mark.parametrize("build", VARIANTS.values(), ids=VARIANTS)
def test_a4_calls_are_checked_before_anything_is_computed(build, monkeypatch):
    """As a user calls, without annotations that are checked: `forward` and `weights` hand all they are given over."""

    class Checked(Exception):
        pass

    def check(*call):
        raise Checked(call)

    monkeypatch.setattr(base, "require_call", check)
    module, cache = build().build(D), build().cache(1, dtype=torch.float64)
    own = {"positions": PLACES}
    for call, wanted in (
        (lambda: module(X, cache=cache, **own), (X, None, PLACES, cache, None)),
        (lambda: module(X, X, PLACES, None, PLACES), (X, X, PLACES, None, PLACES)),
        (lambda: module.weights(X, X, PLACES, PLACES), (X, X, PLACES, None, PLACES)),
    ):
        with pytest.raises(Checked) as caught:
            call()
        config, d_model, weight, *given = caught.value.args[0]
        assert (config, d_model, weight.dtype) == (module.config, D, torch.float64)
        assert all(ours is other for ours, other in zip(given, wanted, strict=True))


def given_cache(config, **changes):
    """A GQA layer with the cache of another config, or another call."""
    cache = config.cache(**{"batch_size": 1, "dtype": torch.float64} | changes)
    grouped().build(D)(X, cache=cache)


def refusal(call):
    with pytest.raises(ReheadError) as caught:
        call()
    return caught


@pytest.mark.parametrize(("call", "value", "remedy"), REFUSED, ids=[value for _, value, _ in REFUSED])
def test_b25_refusals_name_the_value_and_the_way_out(call, value, remedy):
    def check(call):
        message = str(refusal(call).value)
        assert value in message
        assert remedy in message

    def vague():
        raise UsageError("invalid value")

    check(call)
    with pytest.raises(AssertionError):
        check(vague)


def test_help_says_what_a_layer_takes_and_gives():
    """Of the class a user holds, not where else to look."""
    for config in EXAMPLES.values():
        said = pydoc.plain(pydoc.render_doc(type(config.build(D)).forward))
        for part in (
            "(B, L, D)",
            "(B, S, C)",
            "`positions` (B, L)",
            "`cache`",
            "returns (B, L, D)",
            "Raises",
        ):
            assert part in said


@pytest.mark.parametrize("variant", list(variants))
@pytest.mark.parametrize("width", [0, -1, True])
def test_no_variant_is_built_for_no_width(variant, width):
    with pytest.raises(ConfigError, match=rf"d_model={width}: .*a whole number of at least 1, such as 192"):
        next(iter(variants[variant].examples().values())).build(width)


@pytest.mark.parametrize(
    "config", [config for config in EXAMPLES.values() if config.causal], ids=lambda c: c.name
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, of qk_norm
def test_under_autocast_a_cache_keeps_what_is_computed(config):
    """A float32 layer under bfloat16 autocast: with a float32 cache, or a bfloat16 one, as without."""
    module, x = config.build(D).float().eval(), torch.randn(B, T, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        whole = module(x)
        for dtype in (torch.float32, torch.bfloat16):
            for positions in (None, torch.arange(T)[None].expand(B, -1)):
                cache = config.cache(B, dtype=dtype)
                parts = [
                    module(x[:, a:b], cache=cache, positions=None if positions is None else positions[:, a:b])
                    for a, b in pairwise([0, 6, 7, 10, 17, T])
                ]
                assert all(store.dtype == dtype for store in cache.stores)
                torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0.05, atol=0.02)


def test_b25_every_refusal_is_listed():
    """Each `raise` of this room is reached by a row of REFUSED."""
    written = {
        (path, node.lineno, node.end_lineno)
        for path in Path(rehead.attention.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
    }
    reached = set()
    for call, _, _ in REFUSED:
        last = refusal(call).traceback[-1]
        path, line = Path(last.path), last.lineno + 1
        reached |= {raised for raised in written if raised[0] == path and raised[1] <= line <= raised[2]}
    assert reached == written
