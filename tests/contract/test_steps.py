"""A program is `forward` of one token: for every attention, cache and dtype; and it does nothing else."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from one_layer import one_layer
from rehead.attention import EMPTY, GroupedConfig, LayerCache, RopeConfig, variants
from rehead.attention.kernels import token
from rehead.attention.rope import Rotary
from rehead.config import GPTConfig
from rehead.decoding import torch_decoder
from rehead.decoding.token import Token
from rehead.model import build
from rehead.nn.few_rows import JoinedLinear, linear_few_rows

B, D, C = 3, 13, 19
EXAMPLES = {name: config for variant in variants for name, config in variants[variant].examples().items()}
LLAMA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7, rope=RopeConfig())
MORE = {
    "interleaved": replace(LLAMA, rope=RopeConfig(layout="interleaved")),
    "modular, rope": replace(LLAMA, head_map="modular"),
    "mla, shared heads": replace(EXAMPLES["mla"], n_kv_head=2, qkv_bias=True),
    "mla, too many new queries": replace(EXAMPLES["mla"], n_kv_head=1, kv_lora_rank=40),
    "mla, rebuilt keys, bias": replace(EXAMPLES["mla, rebuilt keys"], qkv_bias=True, window=4),
    "mla, rebuilt keys, rank too large": replace(EXAMPLES["mla, rebuilt keys"], kv_lora_rank=90),
}
each = pytest.mark.parametrize("config", (EXAMPLES | MORE).values(), ids=EXAMPLES | MORE)


def fresh(config, d_model=D):
    module = config.build(d_model).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def begun(module, lengths, capacity):
    """A cache with a few tokens, as many in every row or not."""
    dtype = module.o_proj.weight.dtype
    cache = module.config.cache(B, capacity, dtype=dtype)
    place = torch.arange(9)[None]
    positions = None if lengths is None else torch.where(place < torch.tensor(lengths)[:, None], place, EMPTY)
    torch.manual_seed(7)
    module(torch.randn(B, 9, D, dtype=dtype), positions=positions, cache=cache)
    return cache


@torch.no_grad()
def outputs(module, cache, n_step, prepared):
    """What each of `n_step` tokens gathers."""
    torch.manual_seed(3)
    given = torch.randn(n_step, B, D).to(module.o_proj.weight.dtype)
    advance = one_layer(module)
    return torch.stack(
        [advance(x, cache) if prepared else module(x[:, None], cache=cache)[:, 0] for x in given]
    )


def check(config, lengths=None, capacity=40, n_step=11, **tolerance):
    module = fresh(config)
    caches = [begun(module, lengths, capacity) for _ in range(2)]
    pairs = [outputs(module, cache, n_step, cache is caches[0]) for cache in caches]
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(*pairs, **tolerance)
    # and the caches go on alike, by either way
    more = torch.randn(B, 2, D)
    torch.testing.assert_close(*(module(more, cache=cache) for cache in caches), **tolerance)


@each
@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [(None, None), ([7, 2, 4], 40), ([3, 0, 9], None)],
    ids=["alike", "ragged", "ragged, one empty"],
)
def test_a_program_is_forward_of_one_token(config, lengths, capacity):
    check(config, lengths, capacity)


def late(monkeypatch):
    cos_sin = Rotary.cos_sin
    monkeypatch.setattr(
        Rotary,
        "cos_sin",
        lambda self, *a: cos_sin(self, *a[:4], a[4] - 1) if len(a) > 4 else cos_sin(self, *a),
    )


def unhidden(monkeypatch):
    monkeypatch.setattr(Token, "bias", lambda *_: None)


def misplaced(monkeypatch):
    next_row = LayerCache.next_row

    def late_slots(self, at):
        right = next_row(self, at)
        batch, slots = right.slot
        return replace(right, slot=(batch, slots - 1))

    monkeypatch.setattr(LayerCache, "next_row", late_slots)


def early(monkeypatch):
    rows_until = LayerCache.rows_until
    monkeypatch.setattr(LayerCache, "rows_until", lambda self, name, n_row: rows_until(self, name, n_row - 1))


def unscaled(monkeypatch):
    weigh = token.token_weights
    for module in ("attention.kernels.token", "decoding.torch_engine", "attention.kernels.latent_token"):
        monkeypatch.setattr(
            f"rehead.{module}.token_weights",
            lambda q, k, scale, *more: weigh(q, k, 1.0, *more),
        )


@pytest.mark.parametrize(
    ("breaks", "name", "lengths"),
    [
        (late, "gqa, rope", None),
        (late, "mla", None),
        (unhidden, "gqa", [7, 2, 4]),
        (unhidden, "mla", [7, 2, 4]),
        (unhidden, "mla, rebuilt keys", [7, 2, 4]),
        (misplaced, "gqa, rope", [7, 2, 4]),
        (misplaced, "mla, window", [7, 2, 4]),
        (early, "gqa", None),
        (early, "mla, rebuilt keys", None),
        (unscaled, "gqa", None),
        (unscaled, "mla", None),
        (unscaled, "mla, rebuilt keys", None),
    ],
)
def test_a_broken_program_is_caught(breaks, name, lengths, monkeypatch):
    check(EXAMPLES[name], lengths)
    breaks(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check(EXAMPLES[name], lengths)


# Models: the parts around the attention


def gpt(*attention, **other):
    settings = {
        "vocab_size": 23, "block_size": 64, "n_embd": D, "attention": attention, "learned_positions": False,
        "norm": "rmsnorm", "norm_eps": 1e-5, "mlp": "gelu", "n_hidden": 17, "mlp_bias": True,
    }  # fmt: skip
    return GPTConfig(**settings | other)


PATTERN = tuple(EXAMPLES[name] for name in ("gqa, rope", "mla", "gqa, rope, window", "gqa, additive"))
MODELS = {
    "gpt-2": gpt(EXAMPLES["gqa, modular, bias"], learned_positions=True, norm="layernorm"),
    "llama": gpt(LLAMA, LLAMA, mlp="swiglu", mlp_bias=False),
    "scaled": gpt(LLAMA, LLAMA, embed_scale=3.0, residual_scale=0.7, logit_scale=0.4),
    "pattern": gpt(*PATTERN, mlp="swiglu"),
    "rebuilt": gpt(EXAMPLES["mla, rebuilt keys"], EXAMPLES["mla, rebuilt keys, window"]),
}
models = pytest.mark.parametrize("name", MODELS)


def made(config, dtype=torch.float64):
    model = build(config).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model.to(dtype)


@torch.no_grad()
def logits(model, prepared, n_step=12, lengths=None, batch=B):
    ids = torch.randint(23, (batch, 9 + n_step), generator=torch.Generator().manual_seed(1))
    place = torch.arange(9)[None]
    positions = None if lengths is None else torch.where(place < torch.tensor(lengths)[:, None], place, EMPTY)
    cache = model.new_cache(batch, 40)
    model(ids[:, :9], positions, cache)
    decode = torch_decoder(model) if prepared else lambda one, cache: model(one[:, None], cache=cache)[:, 0]
    return torch.stack([decode(one, cache) for one in ids[:, 9:].T])


@models
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 6e-2)]
)
def test_a_decoder_is_the_model(name, batch, dtype, tolerance):
    """float32 and bfloat16 against the definition in their own precision, relative to the largest logit."""
    model = made(MODELS[name], dtype)
    wanted, got = (logits(model, prepared, batch=batch).double() for prepared in (False, True))
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    if dtype == torch.float32:
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@models
def test_bfloat16_is_no_further_from_the_truth_than_the_definition(name):
    model = made(MODELS[name], torch.bfloat16).double()
    truth = logits(model, False)
    model.bfloat16()  # the same numbers
    definition, prepared = ((logits(model, way).double() - truth).abs().mean() for way in (False, True))
    assert prepared <= 1.3 * definition


@models
def test_a_ragged_decoder_is_the_model(name):
    model = made(MODELS[name])
    for lengths in ([7, 2, 4], [3, 1, 9]):
        wanted, got = (logits(model, prepared, lengths=lengths) for prepared in (False, True))
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_decoder_made_after_weights_changed_has_the_new_ones():
    model = made(MODELS["llama"])
    before = logits(model, True)
    model.layers[1].self_attn.k_proj.weight.data.mul_(1.5)
    model.layers[0].mlp.gate_proj.weight.data.mul_(1.5)
    after = logits(model, True)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, logits(model, False))


def test_hooks_and_replaced_parts_are_run():
    model, seen = made(MODELS["llama"]), []
    hook = model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    logits(model, True, n_step=4)
    assert len(seen) == 5
    hook.remove()

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for owner, part in ((model.layers[0].self_attn, "v_proj"), (model.layers[1].mlp, "up_proj")):
        old = getattr(owner, part)
        new = Twice(old.in_features, old.out_features, bias=old.bias is not None)
        setattr(owner, part, new)
    torch.testing.assert_close(logits(model, True), logits(model, False))


# What a step does not do


class Counted(TorchDispatchMode):
    """Operators that compute, and the bytes of all that is made anew."""

    FREE = ("view", "expand", "transpose", "select", "slice", "narrow", "split", "unsqueeze", "as_strided")
    FREE += ("detach", "permute", "t.default", "empty", "alias", "squeeze", "unbind", "flatten", "unflatten")
    FREE += ("reshape", "new_empty", "promote_types", "to.")

    def __init__(self):
        super().__init__()
        self.names, self.n_bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = str(func).removeprefix("aten.")
        if not name.startswith(self.FREE):
            self.names.append(name.split(".")[0])
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.n_bytes += tensor.nbytes
        return out


@torch.inference_mode()
def counted(model, context, batch=1, lengths=None):
    cache = model.new_cache(batch, 2000)
    ids = torch.zeros(batch, context, dtype=torch.long)
    place = torch.arange(context)[None]
    positions = None if lengths is None else torch.where(place < torch.tensor(lengths)[:, None], place, EMPTY)
    model.hidden(ids, positions, cache)
    decode = torch_decoder(model)
    decode(ids[:, 0], cache)  # tables are made here
    with Counted() as count:
        decode(ids[:, 0], cache)
    return count


def shape(attention, n_layer, **other):
    return made(gpt(*[attention] * n_layer, block_size=2048, **other), torch.float32)


PER_LAYER = {"mha": 14, "gqa, rope": 18, "gqa, rope, window": 18, "mla": 27}
"""Operators that compute, one layer of one token; the definition needs many more."""


@pytest.mark.parametrize("name", PER_LAYER)
def test_operators_per_layer(name):
    one, four = (counted(shape(EXAMPLES[name], n), 50).names for n in (1, 4))
    assert (len(four) - len(one)) / 3 <= PER_LAYER[name]


@pytest.mark.parametrize("name", PER_LAYER)
@pytest.mark.parametrize("lengths", [None, [50, 20, 30]])
def test_nothing_in_a_step_copies_the_cache(name, lengths):
    batch = 1 if lengths is None else 3
    model = shape(EXAMPLES[name], 2)
    few_rows, many_rows = (counted(model, n, batch, lengths) for n in (50, 1500))
    assert not {"repeat_interleave", "repeat", "stack", "clone"} & set(many_rows.names)
    scores = 2 * 2 * 1450 * 4 * batch * 6  # layers, scores and weights
    slack = 0 if lengths is None else 60 * batch * 1500 * 8  # whose rows are whose, in a ragged batch
    assert many_rows.n_bytes - few_rows.n_bytes <= 1.3 * scores + slack
    cache = 2 * sum(torch.Size(s).numel() for s in EXAMPLES[name].cache_rows().values()) * 1500 * 4 * batch
    assert lengths or many_rows.n_bytes < cache


def test_a_ragged_step_builds_its_mask_once():
    one, four = (counted(shape(EXAMPLES["gqa, rope"], n), 50, 3, [50, 20, 30]).names for n in (1, 4))
    assert one.count("le") == four.count("le") == 1
    assert one.count("cos") == four.count("cos") == 1


# One-token products


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("n_out", "n_in"), [(6, 11), (7, 11), (1030, 1100), (1031, 1100)])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows(threads, rows, n_out, n_in, bias):
    torch.set_num_threads(threads)
    layer = torch.nn.Linear(n_in, n_out, bias=bias, dtype=torch.float32)
    x = torch.randn(rows, n_in, dtype=torch.float32)
    wanted = layer.double()(x.double())
    got = linear_few_rows(x, layer.float().weight, layer.bias)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_products_side_by_side():
    small = [torch.nn.Linear(C, n, bias=n != 4) for n in (5, 4, 3)]
    x = torch.randn(2, C)
    wanted = torch.cat([layer(x) for layer in small], -1)
    torch.testing.assert_close(JoinedLinear(*small)(x), wanted)
    assert JoinedLinear(*small).joined is not None
    whole = JoinedLinear(*small)
    whole.joined = None  # as with large weights
    torch.testing.assert_close(whole(x), wanted)
    mixed = JoinedLinear(small[0], torch.nn.Sequential(small[1]), small[2])
    torch.testing.assert_close(mixed(x), wanted)
