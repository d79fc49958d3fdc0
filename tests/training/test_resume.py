"""Going on: after a stop, after damage, from another run's weights."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint import newest_step
from rehead.checkpoint.files.publish import _write_manifest
from rehead.config import TrainerOptions
from rehead.config.flags import read
from rehead.errors import Busy, ConfigError, IntegrityError, Interrupted, InvalidInput, NumericError
from rehead.model import build
from rehead.training import train
from rehead.training.folder import RunFolder
from rehead.training.loop import Trainer
from rehead.training.optimizer import build_optimizer, learning_rate

VARIANTS = {
    "mha, learned positions": [],
    "gqa, rope": ["model.n_kv_head=2", "model.rope=true"],
    "mqa, window": ["model.n_kv_head=1", "model.window=5", "model.rope=true"],
    "mla": ["model.attention=mla", "model.rope=true", "model.kv_lora_rank=10"],
    "additive": ["model.score=additive", "model.score_width=3"],
    "rnn": ["model.type=rnn"],
    "cosine, accumulation": [
        "trainer.schedule=cosine",
        "trainer.warmup_iters=3",
        "trainer.grad_accumulation=2",
    ],
}


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    text = "the quick brown fox jumps over the lazy dog, again and again; "
    (tmp_path / "text.txt").write_text(text * 20)


def options(work_dir, *flags):
    sizes = [] if "model.type=rnn" in flags else ["model.n_layer=2", "model.n_query_head=4"]
    few = ["batch_size=3", "eval_every=4", "eval_batches=1", "sample_tokens=5", "sample_every=3"]
    given = {flag.partition("=")[0] for flag in flags}
    flags = [*flags] + ["trainer.max_iters=7"] * ("trainer.max_iters" not in given)
    common = ["data.path=text.txt", "data.block_size=13", "model.n_embd=24", f"system.work_dir={work_dir}"]
    base = [
        flag
        for flag in [*common, *sizes, *(f"trainer.{flag}" for flag in few)]
        if flag.partition("=")[0] not in given
    ]
    return read([*base, *flags])


def run(work_dir, *flags):
    return list(train(options(work_dir, *flags)))


def stop_at(step, work_dir, *flags):
    """Train until `step`, then Ctrl-C."""
    records = []

    def train_and_stop():
        for record in train(options(work_dir, *flags)):
            records.append(record)
            if record["step"] == step and "loss" in record:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        train_and_stop()
    assert stopped.value.exit_code == 130
    assert f"step {step}" in str(stopped.value)
    assert "trainer.resume=True" in str(stopped.value)
    return records


def resume(work_dir, *flags):
    """Go on as another process would: with a random state of its own."""
    torch.manual_seed(99)
    return run(work_dir, *flags, "trainer.resume=true")


def losses(records):
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records if "loss" in record}


def state(work_dir):
    """Weights, optimizer and random states of the newest checkpoint, byte for byte."""
    return {file.name: file.read_bytes() for file in newest_step(work_dir).glob("*.safetensors")}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_b19_resumed_is_uninterrupted_to_the_bit(tmp_path, flags, stop):
    """k + m iterations = k, Ctrl-C, resume, m: losses, weights, optimizer, random states, with dropout."""
    whole = run("whole", *flags)
    parts = stop_at(stop, "part", *flags) + resume("part", *flags)
    assert losses(parts) == losses(whole)
    assert len(losses(whole)) == 7
    assert state(tmp_path / "part") == state(tmp_path / "whole")


def test_a_forgotten_random_state_is_noticed(tmp_path, monkeypatch):
    """The mutant: dropout goes on from a fresh generator."""
    whole = run("whole")
    parts = stop_at(4, "part")
    monkeypatch.setattr(torch, "set_rng_state", lambda saved: None)
    parts += resume("part")
    assert losses(parts) != losses(whole)


def test_same_seed_same_run_and_another_seed_another(tmp_path):
    assert losses(run("a")) == losses(run("b"))
    assert losses(run("c", "system.seed=4")) != losses(run("d"))


def test_metrics_hold_every_step_once_after_a_resume(tmp_path):
    stop_at(5, "part")
    with (tmp_path / "part" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 9.9}\n{"step": 6, "lo')  # made after the save, and torn
    with pytest.warns(UserWarning, match=r"the last line of .*metrics\.jsonl is incomplete"):
        run("part", "trainer.resume=true")
    lines = [json.loads(line) for line in (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert all(line["loss"] < 9 for line in lines if "loss" in line)
    assert {"learning_rate", "grad_norm", "seconds", "rss_bytes"} <= next(
        line for line in lines if "loss" in line
    ).keys()


def test_the_run_folder(tmp_path):
    run("r", "trainer.save_every=2", "trainer.keep=2")
    held = {str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").rglob("*")}
    steps = {f"checkpoints/step-{step:06d}" for step in (6, 7)}
    assert {path for path in held if path.startswith("checkpoints/step") and path.count("/") == 1} == steps
    assert {"config.yaml", "metrics.jsonl", "samples/step-000003.txt", "samples/step-000007.txt"} <= held
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        assert f"checkpoints/step-000007/{name}" in held
    assert read([], (tmp_path / "r" / "config.yaml",)).trainer.max_iters == 7


def test_zero_iterations_save_a_model(tmp_path):
    run("r", "trainer.max_iters=0")
    assert rehead.load("r").config.n_layer == 2


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    run("r", "trainer.save_every=3", "trainer.keep=3")
    weights = tmp_path / "r" / "checkpoints" / "step-000007" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.warns(UserWarning, match="step-000007.*damaged"):
        assert newest_step(tmp_path / "r").name == "step-000006"


REFUSED_ON_RESUME = [
    ("model.n_kv_head=2", "model.n_kv_head=2", "leave it out"),
    ("data.block_size=9", "data.block_size=9", "leave it out"),
    ("trainer.batch_size=2", "trainer.batch_size=2", "leave it out"),
    ("system.seed=1", "system.seed=1", "leave it out"),
]


@pytest.mark.parametrize(("flag", "value", "remedy"), REFUSED_ON_RESUME)
def test_a_resumed_run_is_the_same_run(tmp_path, flag, value, remedy):
    run("r")
    with pytest.raises(ConfigError) as refused:
        run("r", flag, "trainer.resume=true", "trainer.max_iters=9")
    assert value in str(refused.value)
    assert remedy in str(refused.value)


def test_another_text_is_another_run(tmp_path):
    run("r")
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text().replace("dog", "god"))
    with pytest.raises(ConfigError, match="text has changed"):
        run("r", "trainer.resume=true", "trainer.max_iters=9")


def test_a_run_is_not_overwritten(tmp_path):
    run("r")
    before = state(tmp_path / "r")
    with pytest.raises(InvalidInput, match=r"already holds a run.*trainer.resume=True"):
        run("r")
    assert state(tmp_path / "r") == before


def test_one_folder_one_run(tmp_path):
    with RunFolder(tmp_path / "r").open(resume=False), pytest.raises(Busy, match=rf"pid {os.getpid()}"):
        run("r")
    assert Busy.exit_code == 6


@pytest.mark.parametrize(
    "flags", [[], ["model.rope=true"], ["model.type=rnn"]], ids=["learned", "rope", "rnn"]
)
def test_b20_longer_context_from_a_trained_run(tmp_path, flags):
    """Logits within the old length are unchanged; old rows of the position table are kept to the bit."""
    run("old", *flags)
    run("new", *flags, "model.pretrained_folder=old", "data.block_size=29", "trainer.max_iters=0")
    old, new = rehead.load("old"), rehead.load("new")
    ids = torch.randint(old.config.vocab_size, (2, 13))
    assert torch.equal(old(ids), new(ids))
    longer = torch.randint(old.config.vocab_size, (2, 29))
    assert new(longer).shape[1] == 29
    if not flags:
        assert torch.equal(new.embed_positions.weight[:13], old.embed_positions.weight)
        assert new.embed_positions.weight[13:].abs().sum() > 0


REFUSED_WARM_STARTS = [
    (["model.rope=true"], "learned_positions"),
    (["model.n_kv_head=2"], "n_kv_head is 2 here and 4 there"),
    (["model.n_layer=1"], "n_layer is 1 here and 2 there"),
    (["data.block_size=9"], "data.block_size=9"),
]


@pytest.mark.parametrize(("flags", "value"), REFUSED_WARM_STARTS)
def test_b20_other_weights_are_refused(tmp_path, flags, value):
    run("old")
    with pytest.raises(ConfigError) as refused:
        run("new", *flags, "model.pretrained_folder=old")
    assert value in str(refused.value)


def tiny():
    torch.manual_seed(1)
    return build(
        options("x", "model.embd_pdrop=0", "model.resid_pdrop=0", "model.attn_pdrop=0").model.resolve(11, 13)
    )


def other(change):
    def spoil(folder):
        path = folder / "state.safetensors"
        save_file(change(load_file(path)), path)

    return spoil


def numbers(**changes):
    def spoil(folder):
        path = folder / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


M = "optimizer.exp_avg.norm.weight"
STATES = {
    "of another shape": other(lambda t: t | {M: t[M][:-1]}),
    "of another weight": other(lambda t: t | {"optimizer.exp_avg.x.weight": t[M].clone()}),
    "of another dtype": other(lambda t: t | {M: t[M].half()}),
    "of whole numbers": other(lambda t: {k: v.int() if "optimizer" in k else v for k, v in t.items()}),
    "steps of another dtype": other(lambda t: {k: v.half() if ".step." in k else v for k, v in t.items()}),
    "one moment of two": other(lambda t: {k: v for k, v in t.items() if k != M}),
    "a step per number": other(lambda t: t | {"optimizer.step.norm.weight": t[M].clone()}),
    "no optimizer": other(lambda t: {k: v for k, v in t.items() if "optimizer" not in k}),
    "no random state": other(lambda t: {k: v for k, v in t.items() if k != "rng.torch"}),
    "half a random state": other(lambda t: t | {"rng.torch": t["rng.torch"][:9]}),
    "gone": lambda folder: (folder / "state.safetensors").unlink(),
    "a pickle": lambda folder: (folder / "state.safetensors").write_bytes(b"\x80\x02." + bytes(60)),
    "a step before 0": numbers(step=-1),
    "a step of text": numbers(step="7"),
    "no numbers": lambda folder: (folder / "state.json").unlink(),
}


@pytest.mark.parametrize("spoil", STATES.values(), ids=list(STATES))
def test_c35_a_state_that_is_not_this_models_is_refused(tmp_path, spoil):
    """Recorded in the manifest as if it had been written so: nothing is filled in, nothing left out."""
    run(tmp_path / "run", "trainer.max_iters=2")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "MANIFEST.json").unlink()
    spoil(newest)
    _write_manifest(newest)
    with pytest.raises(IntegrityError, match=r"state\.(safetensors|json)"):
        resume(tmp_path / "run", "trainer.max_iters=3")


def test_a_step_that_is_not_finite_changes_nothing():
    model = tiny()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batch = (torch.randint(11, (2, 13)),) * 2
    with pytest.raises(NumericError, match=r"step 1.*not finite"):
        Trainer(model, TrainerOptions()).advance(lambda: batch)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) or name == "head.weight"


def test_accumulated_gradients_are_those_of_the_whole_batch():
    ids = torch.randint(11, (6, 14))
    gradients = []
    for parts in (1, 3):
        model, batches = tiny(), iter(ids.chunk(parts))

        def next_batch(batches=batches):
            rows = next(batches)
            return rows[:, :-1], rows[:, 1:]

        Trainer(model, TrainerOptions(grad_accumulation=parts, grad_norm_clip=1e9)).advance(next_batch)
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-5, atol=1e-7)


def test_bfloat16_autocast_trains():
    batch = (torch.randint(11, (2, 13)),) * 2
    record = Trainer(tiny(), TrainerOptions(dtype="bfloat16")).advance(lambda: batch)
    assert record["loss"] == pytest.approx(2.4, abs=0.2)


def test_learning_rates():
    cosine = TrainerOptions(
        learning_rate=1.0, min_learning_rate=0.2, schedule="cosine", warmup_iters=4, max_iters=12
    )
    rates = [learning_rate(step, cosine) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.6)
    assert rates[12] == pytest.approx(0.2)
    assert learning_rate(7, TrainerOptions(learning_rate=0.3)) == 0.3


def test_only_weights_of_linear_layers_decay():
    model = build(options("x", "model.score=additive").model.resolve(11, 13))
    decaying, others = build_optimizer(model, TrainerOptions(weight_decay=0.3)).param_groups
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert decaying["weight_decay"] == 0.3
    assert others["weight_decay"] == 0
    assert all(names[id(weight)].endswith(("proj.weight", "head.weight")) for weight in decaying["params"])
    kept = {names[id(weight)] for weight in others["params"]}
    assert {"embed_tokens.weight", "embed_positions.weight", "norm.weight"} <= kept
    assert len(decaying["params"]) + len(others["params"]) == len(names)
