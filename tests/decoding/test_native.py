"""Decoding in C++ is the model's own forward: every attention, both dtypes, alike and ragged rows, rings, threads."""

import ctypes
import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch

from rehead import decoding
from rehead.attention import EMPTY, GroupedConfig, LatentConfig, RopeConfig, variants
from rehead.config import GPTConfig, ModelOptions, RNNConfig
from rehead.decoding.native_engine import MOST_SEQUENCES
from rehead.decoding.native_op import Kind, NativeOp, kernel
from rehead.decoding.native_program import NativeProgram
from rehead.errors import NumericError, UsageError
from rehead.generation import generate
from rehead.model import build
from rehead.native import KernelUnavailable
from rehead.native import build as building

needs_kernel = pytest.mark.skipif(isinstance(kernel(), KernelUnavailable), reason=str(kernel()))
pytestmark = needs_kernel
B, V, D, PREFILL, STEPS = 3, 23, 13, 90, 12
EXAMPLES = {name: config for variant in variants for name, config in variants[variant].examples().items()}
WIDE = GroupedConfig(n_query_head=10, n_kv_head=2, head_dim=36, v_head_dim=50, rope=RopeConfig())
EXAMPLES |= {
    "wide": WIDE,  # whole vectors and a rest, groups of 4 and 1
    "interleaved": replace(WIDE, rope=RopeConfig(layout="interleaved")),
    "modular, rope": replace(WIDE, head_map="modular"),
    "long window": replace(WIDE, window=70),  # a ring of more than a tile
    "mla, wide": LatentConfig(
        n_query_head=6, n_kv_head=3, kv_lora_rank=40, qk_nope_head_dim=20, qk_rope_head_dim=18, v_head_dim=34
    ),
}
REBUILT = LatentConfig(
    n_query_head=14, n_kv_head=2, kv_lora_rank=40, qk_nope_head_dim=36, v_head_dim=34, rope=RopeConfig()
)
EXAMPLES |= {
    "rebuilt, wide": REBUILT,  # whole panels and a rest, groups of 4, 2 and 1
    "rebuilt, interleaved": replace(REBUILT, rope=RopeConfig(layout="interleaved")),
    "rebuilt, partly rotated": replace(REBUILT, rope=RopeConfig(partial_rotary_factor=0.5)),
    "rebuilt, normed, biases": replace(REBUILT, qk_norm_eps=1e-3, qkv_bias=True),
    "rebuilt, long window": replace(REBUILT, window=70),
}
LEARNED = ("multiplicative", "concatenated", "additive")
SLOW = {name for name in EXAMPLES if name.endswith(LEARNED) or "gqa_sum" in name}
each = pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in SLOW])


def gpt(*attention, **other):
    settings = {
        "vocab_size": V, "block_size": 256, "n_embd": D, "attention": attention,
        "learned_positions": attention[0].rope is None, "norm": "layernorm", "norm_eps": 1e-5,
        "mlp": "gelu", "n_hidden": 37, "mlp_bias": True,
    }  # fmt: skip
    return GPTConfig(**settings | other)


LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "mlp_bias": False}


def made(config, dtype=torch.float32):
    model = build(config).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model.to(dtype)


def config_of(name):
    kind = EXAMPLES[name]
    return gpt(kind, kind, **(LLAMA if kind.rope else {}))


def forward(model):
    return lambda ids, cache: model(ids[:, None], cache=cache)[:, 0]


@torch.no_grad()
def logits(model, decode, lengths=None, batch=B, capacity=None, n_prefill=PREFILL):
    ids = torch.randint(V, (batch, n_prefill + STEPS), generator=torch.Generator().manual_seed(1))
    positions = None
    if lengths is not None:
        place = torch.arange(n_prefill)[None]
        positions = torch.where(place < torch.tensor(lengths)[:, None], place, EMPTY)
    cache = model.new_cache(batch, capacity)
    model(ids[:, :n_prefill], positions, cache)
    steps = [decode(one, cache) for one in ids[:, n_prefill:].T]
    return torch.stack([*steps, model(ids[:, :3], cache=cache)[:, -1]]).double()  # and the cache goes on


def errors(model, **given):
    """Distance from float64 on average, over the largest logit: of the native way, and of `forward`."""
    ways = [decoding.native_decoder(model), forward(model)]
    got = [logits(model, way, **given) for way in ways]
    exact = model.double()
    truth = logits(exact, forward(exact), **given)
    return [((one - truth).abs().mean() / truth.abs().max()).item() for one in got]


def check(name, dtype=torch.float32, **given):
    ours, theirs = errors(made(config_of(name), dtype), **given)
    assert ours <= (1e-6 if dtype == torch.float32 else 5e-4) + 1.2 * theirs


@each
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [(torch.float32, None), (torch.float32, [90, 2, 71]), (torch.bfloat16, [90, 2, 71])],
    ids=["float32", "float32, ragged", "bfloat16, ragged"],
)
def test_native_is_forward(name, dtype, lengths):
    check(name, dtype, lengths=lengths)


@each
def test_one_row_and_five(name):
    check(name, batch=1, capacity=110)
    check(name, batch=5, n_prefill=3)


@pytest.mark.parametrize("other", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("width", [127, 150, 192])
def test_rows_of_weights_one_after_another(width, other):
    """One text, and weights as wide as real ones: whole vectors, some of them and a rest."""
    kind = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=36, rope=RopeConfig() if other else None)
    ours, theirs = errors(made(gpt(kind, kind, n_embd=width, n_hidden=2 * width + 1, **other)), batch=1)
    assert ours <= 1e-6 + 1.2 * theirs


def test_rows_of_weights_per_head():
    """The same for the expansions of an MLA's latent, which have as many rows per head as a head has numbers."""
    kind = replace(EXAMPLES["mla, wide"], kv_lora_rank=137)
    ours, theirs = errors(made(gpt(kind, kind, **LLAMA)), batch=1)
    assert ours <= 1e-6 + 1.2 * theirs


def tensors():
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]


def bytes_beside(known):
    """Bytes of all tensors there are that share no memory with those of `known`, which stay alive meanwhile."""
    places = {one.untyped_storage().data_ptr() for one in known}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors()}
    return sum(size for place, size in storages.items() if place not in places)


@pytest.mark.parametrize("name", ["gqa, rope", "mla"])
def test_nothing_is_prepared_that_nobody_uses(name):
    """PyTorch joins weights in copies; the C++ reads them where they are."""
    model = made(config_of(name))
    one_layer = sum(weight.nbytes for weight in model.layers[0].parameters())
    known = [*model.state_dict().values(), *tensors()]
    decode = decoding.native_decoder(model)
    assert bytes_beside(known) < one_layer / 4
    by_torch = decoding.torch_decoder(model)  # the same count sees the copies
    assert bytes_beside(known) > one_layer / 4
    del by_torch
    logits(model, decode, batch=MOST_SEQUENCES + 1)  # here they are needed
    assert bytes_beside(known) > one_layer / 4


@pytest.mark.parametrize("name", ["wide", "mla, wide", "mqa", "gqa, rope, window", "rebuilt, wide"])
def test_threads_change_nothing(name):
    model, one = made(config_of(name)), None
    for n_thread in (1, 2, 3, 2, 3):
        decode = decoding.native_decoder(model)

        def with_threads(ids, cache, decode=decode, n_thread=n_thread):
            torch.set_num_threads(n_thread)
            logits = decode(ids, cache)
            torch.set_num_threads(1)
            return logits

        got = logits(model, with_threads)
        one = got if one is None else one
        assert torch.equal(got, one)


WRONG = {
    Kind.NORM: {"eps": 0.5},
    Kind.LINEAR: {"k": -1},
    Kind.EXPAND: {"n": -1},
    Kind.ROTATE: {"interleaved": 1},
    Kind.STORE: {"rows": -1},
    Kind.ATTEND: {"scale": 2.0},
    Kind.GATE: {"n": -1},
    Kind.EMBED: {"n": -1},
    Kind.ATTEND_REBUILT: {"interleaved": 1},
    Kind.JOIN: {"n": -1},
}
SHOWS = {Kind.EXPAND: "mla, wide", Kind.ATTEND_REBUILT: "rebuilt, wide", Kind.JOIN: "rebuilt, wide"}
"""The example with an operation, where "wide" has none."""


@pytest.mark.parametrize("kind", WRONG)
def test_a_broken_operation_is_caught(kind, monkeypatch):
    name = SHOWS.get(kind, "wide")
    check(name)
    emit = NativeProgram._emit

    def wrong(self, of, *slots, **fields):
        if of == kind:
            fields |= {
                field: fields[field] + value if value == -1 else value for field, value in WRONG[kind].items()
            }
        emit(self, of, *slots, **fields)

    monkeypatch.setattr(NativeProgram, "_emit", wrong)
    with pytest.raises(AssertionError):
        check(name)


def test_a_wrong_position_is_caught(monkeypatch):
    run = NativeProgram.__call__
    monkeypatch.setattr(NativeProgram, "__call__", lambda self, ids, positions: run(self, ids, positions - 1))
    with pytest.raises(AssertionError):
        check("wide")


def test_weights_are_read_where_they_are():
    model = made(config_of("wide"))
    decode = decoding.native_decoder(model)
    before = logits(model, decode)
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    after = logits(model, decode)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, logits(model, forward(model)), rtol=1e-4, atol=1e-4)


def test_rows_beyond_a_gap_are_not_decoded_natively():
    """A row that does not hold all of its past has no short rule for what it sees."""
    model = made(config_of("gqa, rope"))
    positions = torch.tensor([[2, 3, 4], [0, 1, 2]])
    ways = []
    for decode in (decoding.native_decoder(model), forward(model)):
        cache = model.new_cache(2, 20)
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3], [4, 5, 6]]), positions, cache)
            ways.append(decode(torch.tensor([7, 8]), cache))
    torch.testing.assert_close(*ways, rtol=1e-5, atol=1e-5)


def test_stale_rows_of_a_ring_are_a_gap():
    """As many rows as the window, but some of them from before it."""
    kind = replace(EXAMPLES["gqa, rope"], window=8)
    model, ways = made(gpt(kind, kind, **LLAMA)), []
    for decode in (decoding.native_decoder(model), forward(model)):
        cache = model.new_cache(1)
        with torch.no_grad():
            for first, end in ((0, 4), (10, 14), (14, 16)):
                positions = torch.arange(first, end)[None]
                model(positions, positions, cache)
            ways.append(decode(torch.tensor([7]), cache))
    torch.testing.assert_close(*ways, rtol=1e-5, atol=1e-5)


def test_what_is_not_decoded_natively_says_why():
    model = made(config_of("wide"))
    assert decoding.native_refusal(model) is None
    assert "float64" in decoding.native_refusal(model.double())
    model.float()
    hook = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "forward hooks" in decoding.native_refusal(model)
    hook.remove()
    for name in SLOW:
        assert decoding.native_decoder(made(config_of(name))) is None
    rnn = build(RNNConfig(vocab_size=V, block_size=9, n_embd=D, n_layer=1, n_hidden=9, n_output=V)).float()
    assert "rnn" in decoding.native_refusal(rnn)

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.layers[0].mlp.up_proj = Twice(D, 37, dtype=torch.float32)
    assert "Twice" in decoding.native_refusal(model)


def fewer_tokens(model):
    model.embed_tokens = torch.nn.Embedding(V - 1, D, dtype=torch.float32)


def fewer_positions(model):
    model.embed_positions = torch.nn.Embedding(255, D, dtype=torch.float32)


def narrower_norm(model):
    model.norm = torch.nn.LayerNorm(D - 1, dtype=torch.float32)


def narrower_key_norm(model):
    model.layers[0].self_attn.k_norm = torch.nn.RMSNorm(35, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("mha", fewer_tokens, "an embedding with fewer rows"),
        ("mha", fewer_positions, "an embedding with fewer rows"),
        ("mha", narrower_norm, "a norm of another width than its input"),
        ("rebuilt, normed, biases", narrower_key_norm, "a norm of another width than its keys"),
    ],
)
def test_smaller_weights_than_the_config_says_are_not_read_beyond(name, change, why):
    model = made(gpt(EXAMPLES[name]) if name == "mha" else config_of(name))
    assert decoding.native_refusal(model) is None
    change(model)
    assert why in decoding.native_refusal(model)


def test_another_default_device_is_not_read_from_the_cpu():
    """C++ gets addresses: of buffers and positions that it makes itself."""
    model = made(config_of("wide"))
    decode, cache = decoding.native_decoder(model), model.new_cache(B)
    wanted = [decode(torch.full((B,), token), cache) for token in range(3)]
    decode, cache = decoding.native_decoder(model), model.new_cache(B)
    ids = [torch.full((B,), token) for token in range(3)]
    with torch.device("meta"):
        got = [decode(one, cache) for one in ids]
    assert all(map(torch.equal, got, wanted))


def test_growing_caches_free_the_rows_they_replace(monkeypatch):
    """Before the rows of the second layer grow, those of the first are gone."""
    model = made(config_of("wide"))
    decode, cache = decoding.native_decoder(model), model.new_cache(1)
    old, grow = [], type(cache[1])._reserve

    def note(self, length):
        alive = self is cache[1] and self.is_full and old and old[-1]() is not None
        assert not alive
        old.append(weakref.ref(self.stores[0])) if self is cache[0] and self.n_rows else None
        grow(self, length)

    monkeypatch.setattr(type(cache[1]), "_reserve", note)
    for _ in range(70):
        decode(torch.zeros(1, dtype=torch.long), cache)
    assert cache[0].n_rows >= 70


def test_many_rows_go_another_way(monkeypatch):
    model = made(config_of("wide"))
    monkeypatch.setattr(NativeProgram, "__call__", None)
    logits(model, decoding.native_decoder(model), batch=MOST_SEQUENCES + 1)
    with pytest.raises(TypeError):
        logits(model, decoding.native_decoder(model), batch=MOST_SEQUENCES)


def test_generation_takes_it(monkeypatch, switch):
    model, ran, run = made(config_of("wide")), [], NativeProgram.__call__
    ids = torch.randint(V, (2, 5))
    switch("0")
    wanted = generate(model, ids, 60, 0)
    switch("1")
    monkeypatch.setattr(NativeProgram, "__call__", lambda self, *a: ran.append(1) or run(self, *a))
    assert torch.equal(generate(model, ids, 60, 0), wanted)
    assert len(ran) == 59
    model.head.weight.data[3, 2] = float("nan")
    with pytest.raises(NumericError):
        generate(model, ids, 4, 0)


def test_a_full_context_is_refused_natively_too():
    model = made(gpt(EXAMPLES["gqa"], block_size=4))
    decode, cache = decoding.native_decoder(model), model.new_cache(1)
    for _ in range(4):
        decode(torch.tensor([1]), cache)
    with pytest.raises(UsageError, match="block_size=4"):
        decode(torch.tensor([1]), cache)


def test_both_sides_mean_the_same_operation():
    assert kernel().op_size() == ctypes.sizeof(NativeOp)
    kinds = (building.HERE / "decode.cpp").read_text().split("enum Kind : int64_t {")[1].split("}")[0]
    assert [name.strip() for name in kinds.split(",")] == [kind.name for kind in Kind]
    declared = (building.HERE / "decode.cpp").read_text().split("struct Op {")[1].split("};")[0]
    names = re.findall(r"(\w+)[,;]", re.sub("//.*", "", declared))
    assert names == [name for name, _ in NativeOp._fields_]


def test_the_rest_of_the_process_still_has_small_numbers():
    """A library linked with -ffast-math would flush them to zero in all of it."""
    kernel()
    assert (torch.tensor([2.0**-1070]) * 0.5).item() > 0
    assert 2.0**-1070 * 0.5 > 0


# Building


@pytest.fixture
def _anew(monkeypatch, tmp_path):
    monkeypatch.setattr(building.Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    building._loaded.cache_clear()
    yield
    building._loaded.cache_clear()


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("COMPILERS", ("no-such-compiler",), "no C++ compiler"),
        ("FLAGS", ("--no-such-flag",), "failed"),
        ("TIMEOUT_SECONDS", 0.001, "longer than"),
    ],
)
def test_without_a_kernel_pytorch_decodes(name, value, why, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(building, name, value)
    model = made(config_of("gqa"))
    assert why in decoding.native_refusal(model)
    assert decoding.native_decoder(model) is None
    assert generate(model, torch.zeros(1, 2, dtype=torch.long), 3, 0).shape == (1, 5)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.usefixtures("_anew")
def test_the_next_compiler_is_tried_where_one_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "COMPILERS", ("false", *building.COMPILERS))
    assert decoding.native_refusal(made(config_of("gqa"))) is None
    assert list(tmp_path.rglob("*.so"))


def test_the_demo_model_is_decoded_natively():
    options = ModelOptions(n_layer=2, n_query_head=2, n_embd=24)
    assert decoding.native_refusal(build(options.resolve(V, 16)).float()) is None
