"""What a model and a command give on a GPU, beside a CPU.

Run by test_pretended_gpu.py on a GPU that is not there, or by hand on one that is: pytest tests/test_on_gpu.py
"""

import copy
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import rehead
from rehead.checkpoint.files.deferred import Deferred
from rehead.cli import main
from rehead.decoding import decoder
from rehead.errors import UsageError
from rehead.generation import generate, stream

sys.path.insert(0, str(Path(__file__).parent / "contract"))
from test_generation import CONFIGS, SOME, V, make

GENERATING = [*SOME, "mla, normed"] if "PRETENDED_GPU" in os.environ else list(CONFIGS)
"""Models that generate: in seconds on a GPU that is there."""

if not (torch.cuda.is_available() or "PRETENDED_GPU" in os.environ):
    pytest.skip("no GPU", allow_module_level=True)

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20
RUN = (
    "system.work_dir=run model.n_layer=2 model.n_query_head=4 model.n_embd=32 model.norm=rmsnorm model.mlp=swiglu "
    "model.bias=False data.block_size=32 data.path=text.txt trainer.batch_size=4 trainer.sample_tokens=20"
)


@pytest.fixture(autouse=True)
def _single():
    torch.set_default_dtype(torch.float32)


def both(name):
    """A model on each device."""
    model = make(name).eval()
    return model, copy.deepcopy(model).to("cuda")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_numbers(name):
    cpu, gpu = both(name)
    ids = torch.randint(V, (3, 9))
    positions = torch.tensor([[*range(9)], [-1, -1, *range(7)], [*range(5), -1, -1, -1, -1]])
    wanted, got = cpu(ids, positions), gpu(ids.to("cuda"), positions.to("cuda"))
    assert got.device.type == "cuda"
    seen = positions >= 0
    assert torch.allclose(got.cpu()[seen], wanted[seen], atol=1e-4)
    wanted[seen].logsumexp(-1).mean().backward()
    got[seen.to("cuda")].logsumexp(-1).mean().backward()
    for (weight, mine), theirs in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), weight
        assert mine.grad is None or torch.allclose(theirs.grad.cpu(), mine.grad, atol=1e-4), weight


@pytest.mark.parametrize("name", GENERATING)
def test_the_same_tokens(name):
    cpu, gpu = both(name)
    ids = torch.randint(V, (3, 7))
    greedy = generate(cpu, ids, 9, 0)
    for use_cache in (True, False):
        assert torch.equal(generate(gpu, ids, 9, 0, use_cache=use_cache).cpu(), greedy)
    texts = [ids[0], ids[1, :4], ids[2, :6]]
    drawn = [list(stream(model, texts, 6, top_k=9, top_p=0.9, seed=4)) for model in (cpu, gpu)]
    assert torch.equal(torch.stack(drawn[1]).cpu(), torch.stack(drawn[0]))


@torch.no_grad()
def test_a_changed_model_is_decoded_as_it_is_now():
    _, gpu = both("gqa, rope")
    decode = decoder(gpu)
    ids = torch.randint(V, (3,), device="cuda")
    before = decode(ids, gpu.new_cache(3))
    for weight in gpu.parameters():
        weight.mul_(1.5)
    wanted = gpu(ids[:, None])[:, 0]
    assert not torch.allclose(wanted, before)
    assert torch.allclose(decode(ids, gpu.new_cache(3)), wanted, atol=1e-4)


@pytest.mark.parametrize("name", GENERATING)
def test_bfloat16(name):
    _, gpu = both(name)
    ids = torch.randint(V, (3, 7), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        gpu(ids).float().sum().backward()
        assert generate(gpu, ids, 4).shape == (3, 11)
    assert generate(gpu.bfloat16(), ids, 4, 0).shape == (3, 11)


@pytest.mark.parametrize("name", ["gqa, rope", "mla", "rnn"])
def test_left_in_files(name, tmp_path):
    cpu, _ = both(name)
    rehead.save(cpu, tmp_path / "model")
    ids = torch.randint(V, (3, 7))
    for model in (
        rehead.load(tmp_path / "model", in_memory=False, device="cuda"),
        rehead.load(tmp_path / "model", in_memory=False).to("cuda"),
    ):
        assert all(isinstance(weight, Deferred) for weight in model.parameters())
        assert torch.allclose(model(ids.to("cuda")).cpu(), cpu(ids), atol=1e-5)
        assert torch.equal(generate(model, ids, 4, 0).cpu(), generate(cpu, ids, 4, 0))


def test_texts_on_the_gpu():
    _, gpu = both("gqa, rope")
    ids = torch.randint(V, (200,), device="cuda")
    _, certificate = rehead.convert(
        gpu, "mla", kv_fraction=0.5, calibration=ids[:100], test=ids[100:], length=8
    )
    assert certificate.loss is not None


def test_shared_heads_in_float32_reach_a_fused_kernel(monkeypatch):
    """Which takes as many KV heads as query heads; the one that is left would keep the weights of all pairs."""
    _, gpu = both("gqa, rope")
    seen, attend = [], F.scaled_dot_product_attention

    def noting(query, key, value, **more):
        seen.append((query.shape[1], key.shape[1], more["enable_gqa"]))
        return attend(query, key, value, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    gpu(torch.randint(V, (3, 9), device="cuda"))
    assert seen
    assert all(n_query == n_key and not shared for n_query, n_key, shared in seen)


def test_ids_elsewhere():
    cpu, gpu = both("gqa, rope")
    ids = torch.randint(V, (3, 7))
    assert torch.allclose(gpu(ids.numpy()).cpu(), cpu(ids), atol=1e-4)
    with pytest.raises(
        UsageError, match=r"ids is on cpu, the model on cuda:0: .* Use ids.to\(model.device\)."
    ):
        gpu(ids)
    assert torch.equal(generate(gpu, ids.numpy(), 4, 0).cpu(), generate(cpu, ids, 4, 0))


@pytest.fixture
def typed(tmp_path, monkeypatch, capfd):
    """typed(line, status): run it, and return what it printed."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)

    def run(line, status=0):
        assert main(shlex.split(line)) == status, capfd.readouterr().err
        return capfd.readouterr().out

    return run


def test_from_training_to_healing(typed):
    for further in ("trainer.max_iters=4", "trainer.resume=True trainer.max_iters=6"):
        typed(f"train {RUN} model.n_kv_head=2 model.rope=True trainer.device=cuda {further}")
    typed("eval run --data text.txt --length 16 --kv-dtype fp8 --dtype bf16 --device cuda")
    typed("generate run --prompt 'It is' --max-new-tokens 20 --device cuda")
    typed("check run --device cuda")
    losses = {}
    for device in ("cpu", "cuda"):
        typed(
            f"convert run {device} --to mla --kv-fraction 0.25 --calibration text.txt --teach 1 --length 32 "
            f"--allow-loss --device {device}"
        )
        certificate = rehead.conversion.Certificate.read(Path(device))
        assert certificate.environment["device"].split(":")[0] == device
        losses[device] = certificate.loss
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=1e-4)
    typed("convert run uneven --to mla --target uneven --kv-fraction 0.5 --allow-loss --device cuda")
    steps = "trainer.max_iters=3 trainer.batch_size=4 trainer.device=cuda"
    typed(f"heal cuda --teacher run {steps}")
    healed = rehead.conversion.Certificate.read(Path("cuda-healed/checkpoints/step-000003"))
    assert healed.environment["device"].startswith("cuda")
    typed(f"heal uneven --teacher run --teach 1 {steps} trainer.train=attention trainer.dtype=bfloat16")


@pytest.mark.parametrize(
    "flags",
    [
        "trainer.dtype=bfloat16 model.attention=mla model.kv_lora_rank=16 model.attn_pdrop=0.1",
        "trainer.grad_accumulation=2 trainer.recompute=True model.window=8",
    ],
)
def test_ways_to_train(flags, typed):
    typed(f"train {RUN} trainer.max_iters=4 trainer.device=cuda {flags}")


def test_rnn(typed):
    typed(
        "train system.work_dir=run trainer.device=cuda model.type=rnn model.n_embd=16 data.block_size=32 "
        "data.path=text.txt trainer.batch_size=4 trainer.max_iters=4 trainer.sample_tokens=20"
    )
    typed("generate run --prompt It --max-new-tokens 9 --device cuda")


@pytest.mark.parametrize(("device", "why"), [("cuda:3", "this machine has cuda:0"), ("mps", "float64")])
def test_refused_before_the_work(device, why, typed, capfd):
    typed(f"train {RUN} trainer.max_iters=1")
    assert main(["convert", "run", "out", "--to", "mqa", "--allow-loss", "--device", device]) == 2
    assert why in capfd.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["run", "text.txt"]
