"""A program is all that an engine needs of a variant, and it is not trusted where it may not be what `forward` does."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import nn

from rehead import decoding
from rehead.attention import Attention, AttentionConfig, GroupedAttention, GroupedConfig, RopeConfig, kernels
from rehead.attention import variants as known
from rehead.attention.program import Add, Attend, Gate, Rotate, Store
from rehead.attention.rope import Rotary
from rehead.attention.score import ScaledDot, SoftCapped
from rehead.config import GPTConfig
from rehead.decoding import native_limits, native_op, native_program
from rehead.decoding.check import Check
from rehead.decoding.lowering import stored_layers
from rehead.decoding.native_op import Kind
from rehead.decoding.native_program import NativeProgram
from rehead.decoding.torch_engine import registers
from rehead.errors import InvalidInput, UsageError
from rehead.model import GPT, build
from small import llama_shaped

B, V, D = 3, 23, 24
GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7, rope=RopeConfig())
MLA = next(config for name, config in known["mla"].examples().items() if name == "mla")


@dataclass(frozen=True, kw_only=True)
class DirectConfig(AttentionConfig):
    """The model's own columns are its queries: `n_query_head` heads over one rotated key and one value."""

    n_query_head: int

    @classmethod
    def examples(cls):
        return {"direct": cls(n_query_head=4, rope=RopeConfig())}

    @property
    def name(self):
        return "direct"

    def build(self, d_model):
        return Direct(self, d_model)

    def cache_rows(self):
        return {"key": (1, D // self.n_query_head), "value": (1, 5)}

    def n_parameters(self, d_model):
        return d_model * (D // self.n_query_head + 5 + 5 * self.n_query_head)

    def projection_flops(self, d_model):
        return 2 * self.n_parameters(d_model)

    def attention_flops(self, n_key):
        return 2 * self.n_query_head * (D // self.n_query_head + 5) * n_key


class Direct(Attention):
    def __init__(self, config, d_model):
        super().__init__(config, d_model)
        self.n_head, self.width = config.n_query_head, d_model // config.n_query_head
        self.k_proj, self.v_proj = nn.Linear(d_model, self.width), nn.Linear(d_model, 5)
        self.o_proj = nn.Linear(5 * self.n_head, d_model)
        self.rotary = Rotary(config.rope, self.width)

    def forward(self, x, context=None, positions=None, cache=None, context_positions=None):
        start = 0
        if cache is not None:
            positions, start = cache.next(x.shape[1]) if positions is None else positions, cache.length
        query = self.rotary(x.unflatten(2, (self.n_head, -1)), positions, start)
        key = self.rotary(self.k_proj(x)[:, :, None], positions, start)
        value, seen = self.v_proj(x)[:, :, None], positions
        if cache is not None:
            rows, seen = cache.append(positions, key=key, value=value)
            key, value = rows["key"], rows["value"]
        mask = self._mask(x.shape[1], key.shape[1], positions, seen)
        return self.o_proj(kernels.attend(query, key, value, mask).flatten(2))

    def weights(self, x, context=None, positions=None, context_positions=None):
        raise NotImplementedError

    def lower(self, program, x, layer):
        key, value = program.linear(x, (self.k_proj, self.width), (self.v_proj, 5))
        heads = program.add(Rotate((x.split(self.n_head), key), self.rotary))
        program.add(Store(layer, {"key": (heads.head(self.n_head, 1),), "value": (value,)}))
        query = (heads.head(0, self.n_head),)
        gathered = program.add(Attend(layer, query, "key", "value", 1, 5, self.width**-0.5))
        return program.linear(gathered.flat(), (self.o_proj, self.d_model))[0]


def gpt(*attention, **other):
    config = llama_shaped(*attention, **{"vocab_size": V, "n_embd": D, "n_hidden": 17} | other)
    model = build(config).eval().float()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model


def forward(model):
    return lambda ids, cache: model(ids[:, None], cache=cache)[:, 0]


@torch.no_grad()
def logits(model, decode, n_step=12):
    ids = torch.randint(V, (B, 9 + n_step), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(B)
    model(ids[:, :9], cache=cache)
    return torch.stack([decode(one, cache) for one in ids[:, 9:].T])


def check(model, decode):
    torch.testing.assert_close(logits(model, decode), logits(model, forward(model)), rtol=1e-4, atol=1e-4)


def test_a_variant_of_known_operations_decodes_in_cpp():
    """Nothing of decoding knows it."""
    model = gpt(DirectConfig(n_query_head=4, rope=RopeConfig()), GQA)
    assert not any(type(op).__name__ == "Call" for op in model.lower().ops)
    check(model, decoding.torch_decoder(model))
    refusal = decoding.native_refusal(model)
    assert refusal is None or "compile" in refusal
    if refusal is None:
        check(model, decoding.native_decoder(model))


def test_rows_may_be_stored_one_by_one():
    program = gpt(DirectConfig(n_query_head=4, rope=RopeConfig())).lower()
    (layer,) = stored_layers(program)
    store = next(op for op in program.ops if isinstance(op, Store))
    program.add(Store(layer, {"value": store.rows["value"]}))
    assert stored_layers(program) == [layer]


class Echo(nn.Module):
    """An MLP that ends with GELU, or reads its gate twice."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        if self.kind == "gelu":
            return nn.functional.gelu(self.up(x), approximate="tanh")
        return nn.functional.silu(self.up(x)) * self.down(x) + self.up(x)

    def lower(self, program, x):
        if self.kind == "gelu":
            return program.linear(x, (self.up, D), gelu="tanh")[0]
        gate, up = program.linear(x, (self.up, D), (self.down, D))
        gated = program.add(Gate(gate, up))
        return program.add(Add(gate, gated, 1.0))


@pytest.mark.parametrize(
    ("kind", "why"), [("gelu", "does not follow a linear layer"), ("again", "read again after Gate")]
)
def test_what_cpp_would_overwrite_is_refused(kind, why):
    model = gpt(GQA, GQA)
    model.layers[1].mlp = Echo(kind).float()
    assert why in native_limits.refusal(model.lower())
    check(model, decoding.decoder(model))


class Doubled(GroupedAttention):
    """Its `lower` is another's."""

    def forward(self, x, *rest, **more):
        return 2 * super().forward(x, *rest, **more)


def subclass(layer):
    layer.self_attn.__class__ = Doubled


def patch(layer):
    was = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **more: 2 * was(*args, **more)


def other_mlp(layer):
    was = layer.mlp.forward
    layer.mlp.forward = lambda x: x + was(x)


@pytest.mark.parametrize("change", [subclass, patch, other_mlp])
def test_a_changed_forward_is_called(change):
    model = gpt(GQA, GQA)
    before = logits(model, forward(model))
    change(model.layers[1])
    assert not torch.allclose(before, logits(model, forward(model)))
    check(model, decoding.decoder(model))
    assert decoding.native_refusal(model).startswith("it has a ")


def test_results_are_kept_until_their_last_reader():
    few, many = (registers(gpt(*[GQA] * n).lower())[1] for n in (1, 6))
    assert few == many < 8


def reads_and_writes(op):
    """Bytes, for one sequence, from the fields alone."""
    span = {
        Kind.NORM: (op.n, op.n), Kind.LINEAR: (op.k, op.n), Kind.EXPAND: (op.n, op.k), Kind.ROTATE: (op.k, op.k),
        Kind.STORE: (op.n, 0), Kind.GATE: (op.n, op.n), Kind.EMBED: (0, op.n), Kind.ATTEND: (op.k, op.n),
        Kind.SCALE: (op.n, op.n),
        Kind.INVERSE_RMS: (op.n, 1),
    }[op.kind]  # fmt: skip

    def covered(start, width, head, far):
        if not start or not width:
            return set()
        heads = (
            [g * head + k * far for g in range(op.group) for k in range(op.heads)]
            if op.kind == Kind.ATTEND
            else [h * head for h in range(op.heads)]
        )
        return {start + 4 * (at + i) for at in heads for i in range(width)}

    reads = covered(op.x, span[0], op.x_head, op.x_kv)
    writes = covered(op.y, span[1], op.y_head, op.y_kv)
    if op.add or op.kind == Kind.GATE:
        reads |= writes
    if op.kind == Kind.STORE:
        writes.add(op.w)
    if op.kind == Kind.ATTEND:
        reads |= {op.w, op.w2}
    return reads, writes


def races(model):
    """Pairs of operations of which one needs the other's result, or its place, while threads may still be at it."""
    program = model.lower()
    caches = model.new_cache(1, 30)
    stores = [dict(zip(cache.rows, cache.stores, strict=True)) for cache in caches]
    ops = NativeProgram(program, stores, 30)._ops
    touched = [reads_and_writes(op) for op in ops]
    return [
        (first, second)
        for second in range(len(ops))
        for first in range(second)
        if not any(op.sync for op in ops[first:second])
        and (
            touched[first][1] & (touched[second][0] | touched[second][1])
            or touched[first][0] & touched[second][1]
        )
    ], sum(op.sync for op in ops)


MODELS = {
    "gqa": (GQA, GQA),
    "modular, normed": (replace(GQA, head_map="modular", qk_norm_eps=1e-6),) * 2,
    "partial rope, none": (replace(GQA, rope=RopeConfig(partial_rotary_factor=0.4)), replace(GQA, rope=None)),
    "mla": (MLA, replace(MLA, q_lora_rank=5, latent_norm=False)),
    "mla, normed": (
        replace(MLA, rope=None, qk_rope_head_dim=0, q_lora_rank=None, n_kv_head=3, qk_norm_eps=1e-6),
    )
    * 2,
    "tied": (GroupedConfig(n_query_head=4, n_kv_head=1, head_dim=6, tie_kv=True),) * 2,
}


BLOCKS = {  # parts of a layer and of a model beside the attention, as families have them
    "olmo2": ({"qk_norm_eps": 1e-6, "qk_norm_over": "projection"}, {"norm_position": "post"}),
    "gemma2": (
        {"score": SoftCapped(cap=2.0, scale=0.5), "window": 5},
        {"norm_position": "both", "norm": "zero_centered_rmsnorm", "mlp": "geglu", "logit_softcap": 3.0}
        | {"embed_scale": 4.9},
    ),
    "gemma3": ({"qk_norm_eps": 1e-6, "qk_norm": "zero_centered_rmsnorm"}, {}),
    "neox": (
        {"qkv_bias": True, "o_bias": True, "rope": RopeConfig(partial_rotary_factor=0.4)},
        {"norm": "layernorm", "mlp": "gelu_erf", "mlp_bias": True, "parallel_residual": True},
    ),
    "granite": (
        {"score": ScaledDot(scale=0.1)},
        {"embed_scale": 12.0, "residual_scale": 0.3, "logit_scale": 0.2},
    ),
    "parallel, four norms": ({}, {"parallel_residual": True, "norm_position": "both"}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_engine_computes_the_parts_of_a_layer(name):
    """As `forward` does; each with the field left at its default, something else."""
    layer, other = BLOCKS[name]
    model = gpt(replace(GQA, **layer), replace(GQA, **layer), **other)
    check(model, decoding.torch_decoder(model))
    if not isinstance(native_op.kernel(), Exception):
        assert decoding.native_refusal(model) is None
        check(model, decoding.native_decoder(model))
    wanted = logits(model, forward(model))
    for field in other:
        if field in ("norm", "mlp", "mlp_bias", "norm_position"):  # other weights
            continue
        default = next(one.default for one in fields(GPTConfig) if one.name == field)
        plain = build(replace(model.config, **{field: default})).eval().float()
        plain.load_state_dict(model.state_dict())
        with pytest.raises(AssertionError):
            torch.testing.assert_close(logits(plain, forward(plain)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*MODELS, *BLOCKS])
def test_threads_wait_for_each_other(name, monkeypatch):
    if isinstance(native_op.kernel(), Exception):
        pytest.skip("no compiler")
    layer, other = BLOCKS.get(name, ({}, {}))
    layers = MODELS.get(name, (replace(GQA, **layer),) * 2)
    model = gpt(*layers, **other)
    found, n_barrier = races(model)
    assert not found
    assert n_barrier <= 17 * len(layers)
    monkeypatch.setattr(native_program.Span, "overlaps", lambda *_: False)
    assert races(model)[0]


def other_head(model):
    model.head = nn.Linear(D, V + 11, bias=False).float()


def other_mlp_width(model):
    mlp = model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = nn.Linear(D, 300).float(), nn.Linear(D, 300).float()
    mlp.down_proj = nn.Linear(300, D).float()


@pytest.mark.parametrize("change", [other_head, other_mlp_width])
def test_layers_of_other_widths_are_computed_whole(change):
    model = gpt(GQA, GQA)
    change(model)
    check(model, decoding.decoder(model))


def test_wrong_ids_and_caches_are_refused():
    """C++ would read and write beyond their ends."""
    model = gpt(GQA, GQA)
    decode, ids = decoding.decoder(model), torch.tensor([1, 2])
    with torch.no_grad():
        for wrong, words in (
            (torch.tensor([1, V]), str(V)), (torch.tensor([1, -1]), "-1"), (torch.tensor([1]), "sequences"),
            (torch.tensor([[1], [2]]), "sequences"),
        ):  # fmt: skip
            with pytest.raises((UsageError, InvalidInput), match=words):
                decode(wrong, model.new_cache(2))
        one_of_two = model.new_cache(2)
        one_of_two[1].select_batch(torch.tensor([0]))
        kind = model.config.attention[0]
        for caches in (
            one_of_two,
            [kind.cache(2, None, torch.bfloat16) for _ in range(2)],
            [replace(kind, n_kv_head=6).cache(2) for _ in range(2)],
            model.new_cache(2)[:1],
        ):
            if isinstance(native_op.kernel(), Exception):
                pytest.skip("no compiler")
            with pytest.raises(UsageError):
                decode(ids, caches)


class Negated(GPT):
    """Its `lower` is another's."""

    def hidden(self, *given, **named):
        return -super().hidden(*given, **named)


def patched(part):
    def change(model):
        module = model.get_submodule(part)
        was = module.forward
        module.forward = lambda x: 1.5 * was(x) + 0.1

    return change


def other_projection(model):
    layer = model.layers[0].self_attn
    was = layer._project
    layer._project = lambda x, *rest: was(2 * x, *rest)


def other_dropout(model):
    model.layers[1].resid_dropout = nn.Tanh()


def no_norm_weight(model):
    model.norm = nn.RMSNorm(D, elementwise_affine=False)


CHANGES = {
    "norm": patched("norm"), "layer norm": patched("layers.0.input_layernorm"), "table": patched("embed_tokens"),
    "dropout": patched("embd_dropout"), "other dropout": other_dropout, "projection": other_projection,
    "subclass": lambda model: setattr(model, "__class__", Negated), "no weight": no_norm_weight,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_change_of_a_part_goes_unnoticed(change):
    model = gpt(GQA, GQA)
    before = logits(model, forward(model))
    change(model)
    assert not torch.allclose(before, logits(model, forward(model)))
    check(model, decoding.decoder(model))
    check(model, decoding.torch_decoder(model))


def test_a_hook_on_all_modules_is_run():
    model, seen = gpt(GQA), []
    hook = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        decode = decoding.decoder(model)
        with torch.no_grad():
            decode(torch.tensor([1]), model.new_cache(1))
    finally:
        hook.remove()
    assert len(seen) > 5


def test_threads_may_share_a_decoder():
    model = gpt(GQA, GQA)
    decode, alone = decoding.decoder(model), decoding.torch_decoder(model)

    @torch.no_grad()
    def run(first, decode):
        cache, ids = model.new_cache(1), torch.tensor([first])
        return torch.stack([decode(ids, cache) for _ in range(60)])

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda first: run(first, decode), range(4)))
    for first, got in enumerate(together):
        torch.testing.assert_close(got, run(first, alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [None, torch.arange(5, 9)[None]], ids=["consecutive", "given"])
def test_a_refused_call_leaves_a_cache_as_it_was(positions):
    module, cache = GQA.build(D).float(), GQA.cache(1, 8)
    with torch.no_grad():
        module(torch.randn(1, 5, D).float(), cache=cache)
        with pytest.raises(UsageError, match="capacity=8"):
            module(torch.randn(1, 4, D).float(), positions=positions, cache=cache)
        module(torch.randn(1, 3, D).float(), cache=cache)
    assert cache.n_token == 8


class Same(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("config", "name"),
    [(MLA, "kv_a_layernorm"), (replace(GQA, qk_norm_eps=1e-6), "k_norm")],
    ids=["mla", "gqa"],
)
def test_a_module_that_returns_its_input_decodes_batches(config, name):
    """Its input is a view of a joint product, with the rows of other sequences between its own."""
    model = build(llama_shaped(config, vocab_size=V, n_embd=D, n_hidden=9, norm_eps=1e-5)).eval()
    setattr(model.layers[0].self_attn, name, Same())
    ids = torch.randint(V, (B, 9))
    cache = model.new_cache(B)
    decode = decoding.torch_decoder(model)
    got = torch.stack([decode(one, cache) for one in ids.T], 1)
    torch.testing.assert_close(got, model(ids))


def test_arrays_go_to_the_device_of_the_model(monkeypatch):
    """Before any cache counts them."""
    model = build(llama_shaped(GQA, vocab_size=V, n_embd=D, n_hidden=9))
    check = Check(model)
    assert check(np.array([1, 2]), model.new_cache(2)).tolist() == [1, 2]
    away = model.to("meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # it does not know meta
    assert Check(away)(np.array([1, 2]), away.new_cache(2)).device == torch.device("meta")
    cache = away.new_cache(2)
    with pytest.raises(UsageError, match=r"ids is on cpu, the model on meta"):
        decoding.torch_decoder(away)(torch.tensor([1, 2]), cache)
    assert cache[0].n_token == 0
