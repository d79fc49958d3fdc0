"""Windows by PyTorch's flash attention for GPUs: what it is asked, by an emulation of its documentation; its guard."""

import pytest
import torch
from torch.nn.attention import varlen

from calls import by
from rehead.attention import GroupedConfig, kernels
from rehead.attention.kernels import flash, selfcheck
from rehead.attention.kernels.compiled import Compiled
from rehead.attention.kernels.windowed import Windowed
from rehead.attention.mask import Mask

pytestmark = pytest.mark.heavy

B, H, K, E, V = 3, 10, 2, 6, 7


def emulated(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    scale=None, window_size=(-1, -1), enable_gqa=False, shift=0, after=0, group=None,
):  # fmt: skip
    """`varlen_attn` as documented: texts one after another, each aligned at its end, a window of (left, right) keys.

    What the kernel refuses is refused. `shift`, `after` and `group` make it wrong.
    """
    assert query.dim() == key.dim() == value.dim() == 3
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    n_head, n_kv_head = query.shape[1], key.shape[1]
    assert enable_gqa or n_head == n_kv_head
    left, right = window_size
    left, right = (float("inf") if side < 0 else side for side in (left, right))
    ends = [list(map(int, cu_seq)) for cu_seq in (cu_seq_q, cu_seq_k)]
    texts = []
    for first_q, last_q, first_k, last_k in zip(*(e[i:] for e in ends for i in (0, 1)), strict=False):
        assert (last_q - first_q, last_k - first_k) == (max_q, max_k)
        q, k, v = query[first_q:last_q], key[first_k:last_k], value[first_k:last_k]
        spread = group or (lambda t: t.repeat_interleave(n_head // n_kv_head, dim=1))
        k, v = spread(k), spread(v)
        place = torch.arange(len(q))[:, None] + len(k) - len(q)
        distance = place - torch.arange(len(k)) + shift
        seen = (distance <= left) & (-distance <= right + after)
        scores = torch.einsum("qhe,khe->hqk", q.float(), k.float()) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        texts.append(torch.einsum("hqk,khv->qhv", weights, v.float()).to(query.dtype))
    return torch.cat(texts)


@pytest.fixture
def guarded(monkeypatch, switch):
    """As if this CPU were a GPU; what the guard has found out is forgotten. `use(way)` puts a kernel there."""
    calls = []
    switch("gpu")
    monkeypatch.setattr(flash, "DEVICE", "cpu")
    monkeypatch.setattr(Compiled, "limit", lambda *_: "not on a CPU")

    def use(way):
        def counted(*args, **given):
            calls.append(given)
            return way(*args, **given)

        monkeypatch.setattr(varlen, "varlen_attn", counted)
        return calls

    for found in (flash.trusted, selfcheck.warn_once):
        found.cache_clear()
    yield use
    for found in (flash.trusted, selfcheck.warn_once):
        found.cache_clear()


def sample(n_query, n_key, batch=B, dtype=torch.bfloat16, v_width=V):
    shapes = ((batch, n_query, H, E), (batch, n_key, K, E), (batch, n_key, K, v_width))
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def refusal(tensors, mask):
    return flash.Flash().refuses(kernels.Call(*tensors, mask, 1.0))


def with_gradients(way, leaves, upstream):
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = way(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def far(n_query, n_key, window, dtype=torch.bfloat16, batch=B, scale=None, v_width=V):
    """How far `attend` and its gradients are from the reference in float64, of the largest number."""
    leaves, mask = (
        sample(n_query, n_key, batch, dtype, v_width),
        Mask(n_query=n_query, n_key=n_key, window=window),
    )
    upstream = torch.randn(batch, n_query, H, v_width)
    got = with_gradients(lambda *call: kernels.attend(*call, mask, scale=scale), leaves, upstream)
    exact = [t.double() for t in leaves]
    wanted = with_gradients(
        lambda *call: kernels.reference(*call, mask.dense(), scale=scale), exact, upstream.to(dtype)
    )
    assert all(g.dtype == dtype and g.shape == w.shape for g, w in zip(got, wanted, strict=True))
    return max(
        ((g - w).abs().max() / w.abs().max().clamp(min=1.0)).item() for g, w in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", flash.DTYPES)
@pytest.mark.parametrize(
    ("n_query", "n_key", "window"), [(520, 520, 9), (520, 520, 1), (100, 600, 64), (9, 512, 256)], ids=str
)
def test_it_is_asked_for_the_reference(n_query, n_key, window, dtype, guarded):
    """Whole texts, and chunks after a past; several rows; grouped heads; values of another width than keys."""
    calls = guarded(emulated)
    for given in ({}, {"batch": 1, "scale": 0.3, "v_width": 3}):
        assert far(n_query, n_key, window, dtype, **given) <= selfcheck.BUDGET[dtype]
        assert calls[-1]["window_size"] == (window - 1, 0)
    assert len(calls) == 2 * (1 + len(flash.CHECKED_SIZES))  # tried once for each width of values


def test_the_real_one_takes_what_it_is_given():
    """Of the PyTorch that is installed, as far as its rule for shapes goes, both ways."""
    leaves = [t.to("meta").requires_grad_() for t in sample(50, 60)]
    out = by(flash.Flash())(*leaves, Mask(n_query=50, n_key=60, window=9))
    assert out.shape == (B, 50, H, V)
    for leaf, gradient in zip(leaves, torch.autograd.grad(out, leaves, torch.empty_like(out)), strict=True):
        assert gradient.shape == leaf.shape


def test_a_layer_takes_it(guarded):
    calls = guarded(emulated)
    module = GroupedConfig(
        n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7, window=20, rope=True
    ).build(13)
    x = torch.randn(2, 600, 13)
    wanted = module(x)  # in float64, which it does not know
    assert not calls
    with torch.inference_mode():
        got = module.bfloat16()(x.bfloat16())
        cache = module.config.cache(2, dtype=torch.bfloat16)
        parts = [module(part.bfloat16(), cache=cache) for part in x.split([555, 45], dim=1)]
    assert len(calls) == len(flash.CHECKED_SIZES) + 2
    for ours in (got, torch.cat(parts, dim=1)):
        assert (ours - wanted).abs().max() <= 3e-2 * wanted.abs().max()


def test_what_it_is_not_for(guarded, monkeypatch, switch):
    calls = guarded(emulated)
    window, wide = Mask(n_query=520, n_key=520, window=9), torch.randn(1, 520, 2, 264).bfloat16()
    kernels.attend(*sample(520, 520), window, pdrop=0.1)
    kernels.attend(*sample(520, 520, dtype=torch.float32), window)
    kernels.attend(wide, wide, wide, window)
    kernels.attend(*sample(520, 520), Mask(n_query=520, n_key=520))
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert refusal(sample(520, 520), window) == "a compiled graph"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(flash, "DEVICE", "cuda")
        kernels.attend(*sample(520, 520), window)
    switch("1")
    assert refusal(sample(520, 520), window) == "not switched on (REHEAD_NATIVE=gpu)"
    kernels.attend(*sample(520, 520), window)
    assert not calls


def test_it_is_tried_once_and_draws_no_random_number(guarded, caplog):
    calls = guarded(emulated)
    before = torch.get_rng_state()
    with torch.inference_mode():
        for _ in range(3):
            call = [torch.zeros(1, 520, *heads).bfloat16() for heads in ((4, 8), (2, 8), (2, 5))]
            assert refusal(call, Mask(n_query=520, n_key=520, window=9)) is None
    assert len(calls) == len(flash.CHECKED_SIZES)
    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records


def fails(*_, **__):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore about it")


def with_wrong_gradients(*args, **given):
    """Right forward, no gradient for keys."""
    query, key, *rest = args
    return emulated(query, key.detach() + 0 * key, *rest, **given)


def wrong(**how):
    return lambda *args, **given: emulated(*args, **given, **how)


WRONG = {
    "a window too early": wrong(shift=1),
    "a window too late": wrong(shift=-1),
    "the next key as well": wrong(after=1),
    "heads in another order": wrong(group=lambda t: t.repeat(1, H // K, 1)),
    "no gradient": with_wrong_gradients,
    "not a number": lambda query, *_, **__: query * torch.nan,
    "fails": fails,
    "an older one": lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: query,
}


@pytest.mark.parametrize("name", WRONG)
def test_where_it_does_not_agree_chunks_are_computed(name, guarded, caplog):
    guarded(WRONG[name])
    leaves, mask = sample(520, 520), Mask(n_query=520, n_key=520, window=9)
    for _ in range(2):
        assert torch.equal(kernels.attend(*leaves, mask), by(Windowed())(*leaves, mask))
    (message,) = caplog.messages
    assert message.startswith("flash attention is not used for windows on cpu, chunks are computed (")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", flash.DTYPES)
def test_it_agrees_on_a_gpu(dtype):
    for n_head, n_kv_head, width, n_value in ((8, 8, 64, 64), (8, 2, 128, 128), (10, 2, 6, 7)):
        assert flash.trusted(torch.device("cuda", 0), dtype, n_head, n_kv_head, width, n_value)
