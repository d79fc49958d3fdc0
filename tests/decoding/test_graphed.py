"""Decoding by CUDA graphs, without a GPU: a recorder bakes in what a graph bakes in, and replays at later positions."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rehead import decoding
from rehead.attention import EMPTY, GroupedConfig, LatentConfig, RopeConfig, variants
from rehead.attention.kernels import selfcheck
from rehead.config import GPTConfig, RNNConfig
from rehead.decoding import graph_engine as graphed
from rehead.decoding.token import Tables, recorded_token
from rehead.decoding.torch_engine import TorchProgram
from rehead.errors import UsageError
from rehead.generation import generate
from rehead.model import build

B, V, D, STEPS = 3, 23, 13, 14
EXAMPLES = {name: config for variant in variants for name, config in variants[variant].examples().items()}
LLAMA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7, rope=RopeConfig())
EXAMPLES |= {
    "interleaved": replace(LLAMA, rope=RopeConfig(layout="interleaved")),
    "modular, rope": replace(LLAMA, head_map="modular"),
    "long window": replace(LLAMA, window=11),
    "mla, shared heads": replace(EXAMPLES["mla"], n_kv_head=2, qkv_bias=True),
    "mla, rebuilt keys, bias": replace(EXAMPLES["mla, rebuilt keys"], qkv_bias=True, window=4),
}
LEARNED = ("multiplicative", "concatenated", "additive")
OWN = [name for name in EXAMPLES if not name.endswith(LEARNED)]
each = pytest.mark.parametrize("name", OWN)
LENGTHS = {"alike": None, "ragged": [7, 2, 4], "one empty": [3, 0, 9]}
starts = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


class Recorder(TorchDispatchMode):
    """Keeps every operator with its arguments, tensors and numbers alike, and what it gave; `replay` does them again.

    As while a CUDA graph is captured, the host may not read a number.
    """

    READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name.startswith(self.READS):
            raise RuntimeError(f"{name} while capturing")
        out = func(*args, **kwargs or {})
        self.done.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        def tensors(tree):
            return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]

        def places(tree):
            return {x.untyped_storage().data_ptr() for x in tensors(tree)}

        for func, args, kwargs, out in self.done:
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not places(out) & places((args, kwargs)):  # otherwise a view, which is there already
                for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                    old.copy_(new)


class Captures:
    """What was captured, and how often each was replayed."""

    def __init__(self):
        self.n_replay = []
        self.recorders = []

    def __call__(self, run, device):
        index = len(self.n_replay)
        self.n_replay.append(0)
        self.recorders.append(Recorder())
        with self.recorders[-1] as recorder:
            run()

        def replay():
            self.n_replay[index] += 1
            recorder.replay()

        return replay


@pytest.fixture
def captures(monkeypatch, switch):
    """As if this CPU were a GPU, whose first graph serves 16 tokens."""
    made = Captures()
    switch("gpu")
    monkeypatch.setattr(graphed, "DEVICE", "cpu")
    monkeypatch.setattr(graphed, "LEAST_REACH", 16)
    monkeypatch.setattr(graphed, "capture", made)
    selfcheck.warn_once.cache_clear()
    yield made
    selfcheck.warn_once.cache_clear()


def gpt(*attention, **other):
    settings = {
        "vocab_size": V, "block_size": 256, "n_embd": D, "attention": attention,
        "learned_positions": attention[0].rope is None, "norm": "layernorm", "norm_eps": 1e-5,
        "mlp": "gelu", "n_hidden": 17, "mlp_bias": True,
    }  # fmt: skip
    return GPTConfig(**settings | other)


def made(config, dtype=torch.float32):
    model = build(config).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model.to(dtype)


def model_of(name, dtype=torch.float32):
    kind = EXAMPLES[name]
    return made(gpt(kind, kind, **({"norm": "rmsnorm", "mlp": "swiglu"} if kind.rope else {})), dtype)


def forward(model):
    return lambda ids, cache: model(ids[:, None], cache=cache)[:, 0]


@torch.no_grad()
def logits(model, decode, lengths=None, capacity=50, n_prefill=9, n_step=STEPS, take=None, batch=B):
    """Of every step, and of a text after them; `take` reorders the rows in the middle."""
    ids = torch.randint(V, (batch, n_prefill + n_step), generator=torch.Generator().manual_seed(1))
    ids, place, positions = ids.to(model.device), torch.arange(n_prefill)[None], None
    if lengths is not None:
        positions = torch.where(place < torch.tensor(lengths)[:, None], place, EMPTY).to(model.device)
    cache = model.new_cache(batch, capacity)
    model(ids[:, :n_prefill], positions, cache)
    steps = []
    for index, one in enumerate(ids[:, n_prefill:].T):
        if take is not None and index == n_step // 2:
            for layer in cache:
                layer.select_batch(torch.tensor(take))
        rows = slice(None) if take is None or index < n_step // 2 else take
        steps.append(decode(one[rows], cache))
    more = model(ids[take or slice(None), :3], cache=cache)[:, -1]  # and the caches go on alike
    return [*steps, more]


def same(model, decode, most=1e-5, **given):
    """Every logit is `forward`'s, up to `most` of the largest."""
    for got, wanted in zip(
        logits(model, decode, **given), logits(model, forward(model), **given), strict=True
    ):
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() <= most * wanted.abs().max()


@each
@pytest.mark.parametrize(
    ("lengths", "dtype", "most"),
    [(None, torch.float32, 1e-5), ([7, 2, 4], torch.float64, 1e-12), ([3, 0, 9], torch.float32, 1e-5)],
    ids=LENGTHS,
)
def test_a_replay_is_forward(name, lengths, dtype, most, captures):
    """Windows of 4 and 5 wrap around; 9 + 14 tokens cross the 16 of the first graph."""
    model = model_of(name, dtype)
    same(model, decoding.graph_decoder(model), most=most, lengths=lengths)
    assert len(captures.n_replay) == 2
    assert sum(captures.n_replay) == STEPS - 4


@pytest.mark.parametrize("name", ["gqa, rope", "gqa, window", "mla", "mla, rebuilt keys"])
@starts
def test_a_cache_that_grows_is_captured_anew(name, lengths, captures, monkeypatch):
    monkeypatch.setattr("rehead.attention.cache.FIRST_ROWS", 10)
    model = model_of(name)
    same(model, decoding.graph_decoder(model), lengths=lengths, capacity=None, n_step=30)
    assert sum(captures.n_replay) > 10


TAKES = [[1, 1, 0], [2], [0, 1, 2, 1, 0]]
TAKEN = [
    (name, take, [*LENGTHS.values()][(row + column) % 3])  # each name and each `take` with all lengths
    for row, name in enumerate(["gqa", "gqa, rope, window", "mla", "mla, rebuilt keys, window"])
    for column, take in enumerate(TAKES)
]


@pytest.mark.parametrize(("name", "take", "lengths"), TAKEN, ids=str)
def test_rows_may_be_taken_in_between(name, take, lengths, captures):
    model = model_of(name)
    same(model, decoding.graph_decoder(model), lengths=lengths, take=take, n_step=20)


@starts
def test_layers_of_all_kinds(lengths, captures):
    kinds = [
        EXAMPLES[name] for name in ("gqa, rope, window", "mla", "gqa, rope", "mla, rebuilt keys, window")
    ]
    scaled = {"embed_scale": 3.0, "residual_scale": 0.7, "logit_scale": 0.4}
    model = made(gpt(*kinds, learned_positions=True, **scaled))
    same(model, decoding.graph_decoder(model), lengths=lengths, n_step=30)


def test_one_decoder_serves_several_texts(captures):
    model = model_of("gqa, rope")
    decode = decoding.graph_decoder(model)
    for batch, lengths in ((3, None), (2, None), (3, [7, 2, 4]), (3, None)):
        same(model, decode, lengths=lengths, batch=batch)


def test_logits_are_the_callers(captures):
    model = model_of("gqa")
    steps = logits(model, decoding.graph_decoder(model))
    assert len({one.data_ptr() for one in steps}) == len(steps)
    assert not torch.equal(steps[-3], steps[-2])


def test_generation_takes_it(captures, monkeypatch):
    monkeypatch.setattr(decoding, "native_decoder", lambda model: None)
    model, ids = model_of("gqa, rope"), torch.randint(V, (2, 5))
    got = generate(model, ids, 40, 0)
    assert sum(captures.n_replay) == 39 - 2 * len(captures.n_replay)
    monkeypatch.setattr(graphed, "DEVICE", "cuda")
    assert torch.equal(got, generate(model, ids, 40, 0))
    assert len(captures.n_replay) == 3  # up to 16, 32 and 64


def test_a_limited_context_starts_again(captures, monkeypatch):
    monkeypatch.setattr(decoding, "native_decoder", lambda model: None)
    kind = EXAMPLES["gqa"]
    model, ids = made(gpt(kind, kind, block_size=20)), torch.randint(V, (2, 5))
    assert torch.equal(generate(model, ids, 60, 0), generate(model, ids, 60, 0, use_cache=False))
    assert sum(captures.n_replay) > 20


@pytest.mark.parametrize("lengths", [None, [4, 2, 3]], ids=["alike", "ragged"])
def test_a_full_context_is_refused(lengths, captures):
    model = made(gpt(EXAMPLES["gqa"], block_size=7))
    with pytest.raises(UsageError, match="block_size=7"):
        logits(model, decoding.graph_decoder(model), lengths, n_prefill=4)


def test_rows_beyond_a_gap_go_another_way(captures):
    """Of several layers, the one that remembers most says whether there is one."""
    window, whole = EXAMPLES["gqa, rope, window"], EXAMPLES["gqa, rope"]
    model = made(gpt(window, whole))
    positions = torch.stack([torch.arange(5, 12), torch.arange(7)])
    ids = torch.randint(V, (2, 30))
    for decode in (
        decoding.graph_decoder(model),
        decoding.native_decoder(model) or decoding.torch_decoder(model),
    ):
        caches = [model.new_cache(2, 40) for _ in range(2)]
        with torch.no_grad():
            for cache in caches:
                model(ids[:, :7], positions, cache)
            for one in ids[:, 7:14].T:
                ways = decode(one, caches[0]), forward(model)(one, caches[1])
                torch.testing.assert_close(*ways, rtol=1e-5, atol=1e-5)
    assert not captures.n_replay


# What goes wrong


def fails(run, device):
    raise RuntimeError("operation not permitted when stream is capturing\nmore about it")


def test_where_nothing_can_be_captured_pytorch_decodes(captures, monkeypatch, caplog):
    monkeypatch.setattr(graphed, "capture", fails)
    model = model_of("gqa, rope")
    for _ in range(2):
        same(model, decoding.graph_decoder(model), lengths=[7, 2, 4])
    (message,) = caplog.messages
    assert message == (
        "CUDA graphs are not used on cpu, PyTorch decodes (RuntimeError: operation not permitted when stream is "
        "capturing)"
    )
    assert caplog.records[0].levelno == logging.WARNING


def late(run, device):
    """Repeats the position it was captured at."""
    fixed = {}
    recorded = graphed.recorded_token

    def stuck(ids, positions, *rest):
        return recorded(ids, fixed.setdefault("at", positions.clone()), *rest)

    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr(graphed, "recorded_token", stuck)
        run()
    recorder.done = [done for done in recorder.done if "clone" not in str(done[0])]
    return recorder.replay


@pytest.mark.parametrize("wrong", [late, lambda run, device: lambda: None], ids=["stuck", "nothing done"])
@pytest.mark.parametrize("name", ["gqa, rope", "mla", "gqa"])
def test_wrong_numbers_are_noticed(wrong, name, captures, monkeypatch, caplog):
    monkeypatch.setattr(graphed, "capture", wrong)
    model = model_of(name)
    decode = decoding.graph_decoder(model)
    got = logits(model, decode)
    assert not decode.is_trusted
    (message,) = caplog.messages
    assert "CUDA graphs are not used on cpu, PyTorch decodes (off by" in message
    same(model, decoding.graph_decoder(model))
    assert all(one.isfinite().all() for one in got)


@torch.no_grad()
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gqa, rope", "mla"])
def test_a_step_that_fails_can_be_repeated(name, failing, captures, monkeypatch):
    """Warm-up, the run before the capture, the comparison (another eager run after it), and a replay."""
    model = model_of(name)
    decode, cache, ids = decoding.graph_decoder(model), model.new_cache(B), torch.randint(V, (6, B))
    wanted = model(ids.T)
    run, replayed = graphed.CapturedStep._run, Recorder.replay

    def fail(*_):
        raise MemoryError

    for number, one in enumerate(ids, start=1):
        if number == failing:
            with monkeypatch.context() as patch:
                patch.setattr(graphed.CapturedStep, "_run", fail)
                patch.setattr(Recorder, "replay", fail)
                if failing == 3:  # the comparison takes any failure for one of the graph
                    torch.testing.assert_close(decode(one, cache), wanted[:, 2], atol=2e-5, rtol=2e-5)
                    continue
                with pytest.raises(MemoryError):
                    decode(one, cache)
        torch.testing.assert_close(decode(one, cache), wanted[:, number - 1], atol=2e-5, rtol=2e-5)
    assert (graphed.CapturedStep._run, Recorder.replay) == (run, replayed)
    assert decode.is_trusted == (failing != 3)


def test_a_host_that_reads_numbers_is_noticed(captures, monkeypatch, caplog):
    """The recorder is as strict as a capture."""
    run = Tables.at
    monkeypatch.setattr(Tables, "at", lambda self, *a: (int(a[-1].max()), run(self, *a))[1])
    model = model_of("gqa, rope")
    same(model, decoding.graph_decoder(model))
    assert "while capturing" in caplog.text


@each
def test_a_program_is_all_on_the_device(name):
    """On a device without numbers, whose host can read none; nothing is copied there from the host."""

    class Placed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            for tensor in tree_leaves((args, kwargs, out)):
                assert not isinstance(tensor, torch.Tensor) or tensor.is_meta, func
            return out

    model = model_of(name).to("meta")
    cache = model.new_cache(B, 40)
    ids, positions = (
        torch.zeros(B, dtype=torch.long, device="meta"),
        torch.zeros(B, 1, dtype=torch.long, device="meta"),
    )
    run, tables = TorchProgram(model.lower()), Tables(16)
    with torch.inference_mode():
        run(recorded_token(ids, positions, cache, tables))  # makes tables
        with Placed():
            got = run(recorded_token(ids, positions, cache, tables))
    assert got.shape == (B, V)


# Which models


def test_what_is_not_graphed_says_why(captures, monkeypatch, switch):
    model = model_of("gqa, rope")
    assert decoding.graph_refusal(model) is None
    hook = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "forward hooks" in decoding.graph_refusal(model)
    hook.remove()
    for name in set(EXAMPLES) - set(OWN):
        assert "that only its forward describes" in decoding.graph_refusal(model_of(name))
        assert decoding.graph_decoder(model_of(name)) is None
    few = LatentConfig(
        n_query_head=2,
        n_kv_head=1,
        kv_lora_rank=40,
        qk_nope_head_dim=1,
        v_head_dim=1,
        qk_rope_head_dim=4,
        rope=True,
    )
    assert "that only its forward describes" in decoding.graph_refusal(made(gpt(few)))
    switch("1")
    assert decoding.graph_refusal(model) == "not switched on (REHEAD_NATIVE=gpu)"
    switch("gpu")
    rnn = build(RNNConfig(vocab_size=V, block_size=9, n_embd=D, n_layer=1, n_hidden=9, n_output=V)).float()
    assert "rnn" in decoding.graph_refusal(rnn)
    monkeypatch.setattr(graphed, "DEVICE", "cuda")
    assert decoding.graph_refusal(model) == "the model is on cpu"
    assert decoding.graph_decoder(model) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@each
@starts
def test_on_a_gpu_it_is_forward(name, lengths, switch):
    switch("gpu")
    model = model_of(name, torch.float64).cuda()
    decode = decoding.graph_decoder(model)
    same(model, decode, most=1e-9, lengths=lengths)
    assert decode.is_trusted
