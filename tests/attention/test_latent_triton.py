"""The GPU's kernel for one token over latents, in Triton's interpreter: the definition, its guard, its compilation."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from one_layer import one_layer
from rehead.attention import EMPTY, LatentConfig, kernels
from rehead.attention.kernels import latent_token, selfcheck

pytest.importorskip("triton")  # comes with torch on Linux only

import triton.language as tl
from triton.runtime import interpreter

from rehead.attention.kernels import latent_triton as kernel

pytestmark = pytest.mark.heavy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
SIZES = [(1, 1, 9, 0), (3, 3, 9, 4), (2, 16, 48, 64), (2, 40, 48, 4), (3, 3, 512, 0), (1, 16, 512, 64)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)  # B, H, R, P


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch):
    """The interpreter keeps bfloat16 as its bits and multiplies those; a GPU multiplies the numbers, in float32."""
    dot = interpreter.InterpreterBuilder.create_dot

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *c: dot(self, wide(a), wide(b), *c)
    )


def sample(size, n_row, dtype, lengths=None):
    """A query, and rows in a longer cache; what nobody may read is NaN."""
    (B, H, R, P), S = size, n_row
    query, store = torch.randn(B, 2 * H, R + P).to(dtype)[:, ::2], torch.randn(B, S + 3, R + P).to(dtype)
    store[:, S:] = torch.nan
    rows, hidden = store[:, :S], None
    if lengths is not None:
        unseen = torch.arange(S) >= torch.tensor(lengths)[:, None]
        rows.masked_fill_(unseen[..., None], torch.nan)
        hidden = torch.zeros(B, 1, S, dtype=dtype).masked_fill_(unseen[:, None], -torch.inf)
    return query, rows, hidden


def off(module, size, n_row, dtype, lengths=None, n_part=None, scale=0.3):
    """The largest difference from the definition in float64, of its largest number."""
    query, rows, hidden = sample(size, n_row, dtype, lengths)
    B, H, R, _ = size
    key = rows.double().nan_to_num()[:, :, None]
    seen = None if hidden is None else hidden == 0
    wanted = kernels.reference(query.double()[:, None], key, key[..., :R], seen, scale=scale)[:, 0]
    got = module.attend_latent_triton(query, rows, R, scale, hidden, n_part=n_part)
    assert got.dtype == dtype
    assert got.shape == (B, H, R)
    assert got.isfinite().all()
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def ragged(size, n_row):
    return torch.linspace(n_row, 1, size[0]).long().tolist() if size[0] > 1 else [(n_row + 1) // 2]


@pytest.mark.parametrize(
    ("size", "n_row"),
    [*product(SIZES, (65, 300)), *product(((3, 3, 9, 4), (2, 16, 48, 64)), (1, 63, 64))],
    ids=str,
)
def test_it_is_the_definition(size, n_row):
    """One part; several; more parts than tiles, some of them all hidden, and more than rows."""
    for lengths, n_part in ((None, 1), (None, 4), (ragged(size, n_row), 7)):
        assert off(kernel, size, n_row, torch.float32, lengths, n_part) <= TOLERANCE[torch.float32]


@sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_definition_in_low_precision(size, dtype):
    for n_row, lengths, n_part in ((65, None, 1), (300, ragged(size, 300), 3)):
        assert off(kernel, size, n_row, dtype, lengths, n_part) <= TOLERANCE[dtype]


def test_parts_are_chosen():
    assert off(kernel, (2, 3, 9, 4), 600, torch.float32, [600, 20]) <= TOLERANCE[torch.float32]


def test_rows_that_need_not_be_the_first_are_hidden():
    query, rows, _ = sample((2, 3, 9, 4), 150, torch.float32)
    seen = torch.rand(2, 1, 150) < 0.5
    hidden = torch.zeros(2, 1, 150, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
    key = rows.double()[:, :, None]
    wanted = kernels.reference(query.double()[:, None], key, key[..., :9], seen, scale=0.3)[:, 0]
    got = kernel.attend_latent_triton(query, rows, 9, 0.3, hidden, n_part=2)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing_gathers_nothing():
    query, rows, hidden = sample((3, 3, 9, 4), 70, torch.float32, [70, 0, 1])
    got = kernel.attend_latent_triton(query, rows, 9, 0.3, hidden, n_part=2)
    assert got[1].eq(0).all()
    torch.testing.assert_close(got[2], rows[2, :1, :9].expand(3, -1))


def test_scores_in_the_hundreds_do_not_overflow():
    assert off(kernel, (2, 3, 9, 4), 300, torch.float32, scale=60.0, n_part=3) <= 1e-3


MUTANTS = {
    "unscaled": ("scores * scale", "scores"),
    "unhidden": ("seen[None], scores * scale", "(row >= 0)[None], scores * scale"),
    "not joined by weight": ("tl.load(logs + at) - zero)", "0.0)"),
    "never shrunk": ("gathered * shrink[:, None]", "gathered"),
    "no rope": ("if rope:", "if rope > 64:"),
}


@pytest.fixture(params=MUTANTS.values(), ids=MUTANTS)
def mutant(request, tmp_path):
    """The kernel with one thing wrong."""
    source, (right, wrong) = Path(kernel.__file__).read_text(), request.param
    assert right in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_mutant_is_caught(mutant):
    assert off(mutant, (3, 3, 9, 4), 300, torch.float32, [300, 70, 1], 3) > 100 * TOLERANCE[torch.float32]


# Its guard


@pytest.fixture
def guarded(monkeypatch, switch):
    """As if this CPU were a GPU; what the guard has found out is forgotten."""
    known = latent_token.trusted, selfcheck.warn_once
    monkeypatch.setattr(latent_token, "TRITON_ON", "cpu")
    switch("gpu")
    for found in known:
        found.cache_clear()
    yield latent_token
    for found in known:
        found.cache_clear()


def counted(monkeypatch, way):
    calls = []
    monkeypatch.setattr(kernel, "attend_latent_triton", lambda *a, **k: (calls.append(1), way(*a, **k))[1])
    return calls


def both(guarded, dtype=torch.float32):
    call = sample((2, 3, 9, 4), 70, dtype)
    call = call[0], call[1], 9, 0.3
    return guarded.attend_latent_token(*call), guarded.latent_token_reference(*call)


def test_it_is_used_once_it_agrees(guarded, monkeypatch, caplog):
    calls = counted(monkeypatch, kernel.attend_latent_triton)
    with torch.inference_mode():
        for n_call in (
            len(latent_token.CHECKED_SIZES) + 1,
            len(latent_token.CHECKED_SIZES) + 2,
        ):  # tried once
            torch.testing.assert_close(*both(guarded), rtol=1e-5, atol=1e-5)
            assert len(calls) == n_call
        both(guarded, torch.float64)  # which it does not know
    both(guarded)  # with gradients
    assert len(calls) == n_call
    assert not caplog.records


def test_the_guard_draws_no_random_number(guarded):
    before = torch.get_rng_state()
    guarded.trusted(torch.device("cpu"), torch.float32, 3, 13, 9, True)
    assert torch.equal(torch.get_rng_state(), before)


def fails(*_, **__):
    raise RuntimeError("out of resource: shared memory\nmore about it")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (lambda q, rows, rank, *_: rows.new_zeros(*q.shape[:2], rank), "off by 1.0e+00"),
        (lambda q, rows, rank, *_: rows.new_full((*q.shape[:2], rank), torch.nan), "off by inf"),
        (fails, "(RuntimeError: out of resource: shared memory)"),
    ],
)
def test_where_it_does_not_agree_pytorch_decodes(way, said, guarded, monkeypatch, caplog):
    calls = counted(monkeypatch, way)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            assert torch.equal(*both(guarded, dtype))
    assert len(calls) in (2, 2 * len(latent_token.CHECKED_SIZES))  # once for each type
    (message,) = {m for m in caplog.messages if said in m}
    assert "the Triton kernel for MLA is not used on cpu, PyTorch decodes" in message
    assert len(caplog.messages) == 1


def test_the_guard_catches_a_mutant(guarded, mutant, monkeypatch):
    monkeypatch.setattr(kernel, "attend_latent_triton", mutant.attend_latent_triton)
    assert (
        guarded.trusted(torch.device("cpu"), torch.float32, 3, 13, 9, True) is guarded.latent_token_reference
    )


def test_without_triton_pytorch_decodes(guarded, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "rehead.attention.kernels.latent_triton", None)
    with torch.inference_mode():
        assert torch.equal(*both(guarded))
    assert not caplog.records


PLAIN = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=10, v_head_dim=7)
DEEPSEEK = replace(PLAIN, qk_rope_head_dim=4, rope=True, n_kv_head=2, qkv_bias=True)


@pytest.mark.parametrize("lengths", [None, [7, 2, 4]], ids=["alike", "ragged"])
@pytest.mark.parametrize(
    "config", [PLAIN, DEEPSEEK, replace(DEEPSEEK, window=5)], ids=["no rope", "rope", "ring"]
)
def test_a_step_by_it_is_forward(config, lengths, guarded, monkeypatch):
    calls = counted(monkeypatch, kernel.attend_latent_triton)
    module = config.build(13).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    module.float()
    past, new = torch.randn(3, 9, 13).float(), torch.randn(6, 3, 13).float()
    place = torch.arange(9)[None]
    positions = None if lengths is None else torch.where(place < torch.tensor(lengths)[:, None], place, EMPTY)
    outputs = []
    with torch.inference_mode():
        for prepared in (True, False):
            cache = config.cache(3, 40)
            module(past, positions=positions, cache=cache)
            if prepared:
                step = one_layer(module)
                outputs.append(torch.stack([step(x, cache) for x in new]))
                assert len(calls) == len(new) + len(latent_token.CHECKED_SIZES)
            else:
                outputs.append(torch.stack([module(x[:, None], cache=cache)[:, 0] for x in new]))
    torch.testing.assert_close(*outputs, rtol=2e-5, atol=2e-5 * outputs[1].abs().max().item())


# Beside the interpreter


def run(code, folder, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = kept | {"TRITON_CACHE_DIR": str(folder)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_rehead_imports_no_triton(tmp_path):
    code = """
import sys, torch, rehead, rehead.attention, rehead.model
from rehead.config import GPTConfig
from rehead.decoding import torch_decoder
mla = rehead.attention.LatentConfig(n_query_head=2, kv_lora_rank=9, qk_nope_head_dim=6, v_head_dim=5)
config = GPTConfig(
    vocab_size=5, block_size=9, n_embd=8, n_hidden=7, norm_eps=1e-5, attention=(mla,), learned_positions=True,
    norm="layernorm", mlp="gelu", mlp_bias=True,
)
model = rehead.model.GPT(config).eval()
cache = model.new_cache(1)
with torch.inference_mode(): torch_decoder(model)(torch.zeros(1, dtype=torch.long), cache)
assert cache[0].length == 1 and "triton" not in sys.modules
"""
    run(code, tmp_path)


COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rehead.attention.kernels import latent_triton as split

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

def compiled(fn, pointers, constants, options, target):
    types = {name: pointers.get(name, "i32") for name in fn.arg_names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn, types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)

for target, most, n_head, rank, rope, dtype, hides in (
    (80, 166912, 16, 512, 64, torch.bfloat16, True),
    (90, 232448, 128, 512, 64, torch.bfloat16, False),
    (90, 232448, 5, 9, 0, torch.float32, True),
):
    tile = split.tiles(n_head, rank + rope, rank, dtype)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("query", "rows", "hidden"), "*" + NAMES[dtype])
    pointers |= {"sums": "*fp32", "logs": "*fp32", "scale": "fp32"}
    done = compiled(split._part, pointers, tile | {"rank": rank, "rope": rope, "hides": hides}, options, target)
    assert done.asm["cubin"] and done.metadata.shared <= most, done.metadata
    pointers["out"] = "*" + NAMES[dtype]
    done = compiled(split._join, pointers, {"rank": rank, "tile_r": tile["tile_r"]}, {}, target)
    assert done.asm["cubin"]
print("compiled")
"""


@pytest.mark.process
def test_it_compiles_for_gpus(tmp_path):
    """A100 and H100, without either: what fits into their shared memory. That it runs there is not shown."""
    assert run(COMPILE, tmp_path) == "compiled\n"


@pytest.mark.process
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_it_agrees_on_a_gpu(tmp_path):
    code = """
import torch
from rehead.attention.kernels import latent_token
for dtype in latent_token.BUDGET:
    for n_head, rank, rope in ((16, 512, 64), (40, 48, 4), (3, 9, 0)):
        for hides in (False, True):
            way = latent_token.trusted(torch.device("cuda", 0), dtype, n_head, rank + rope, rank, hides)
            assert way is not latent_token.latent_token_reference, (dtype, n_head, rank, rope, hides)
"""
    run(code, tmp_path)
