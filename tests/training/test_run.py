import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rehead
from rehead.checkpoint import resolve
from rehead.cli import main
from rehead.config import TrainerOptions
from rehead.config.flags import read
from rehead.data import BatchSampler, Source, evaluation_blocks, split, tokenize
from rehead.errors import (
    Busy,
    ConfigError,
    IntegrityError,
    Interrupted,
    InvalidInput,
    NumericError,
    ResourceError,
    UsageError,
)
from rehead.measure import evaluate, parameters
from rehead.model import build
from rehead.system import memory
from rehead.system.device import choose_device
from rehead.tokenizer import Tokenizer
from rehead.training import state, train
from rehead.training.folder import RunFolder
from rehead.training.loop import Trainer
from rehead.training.optimizer import build_optimizer, learning_rate
from rehead.training.ranks import OneProcess
from rehead.training.start import located, require_step, start_model

TEXT = "".join(f"Line {i}: to be, or not to be; that is {i * 7 % 13}.\n" for i in range(60))
TINY = [
    "data.block_size=10",
    "model.n_layer=2",
    "model.n_query_head=4",
    "model.n_embd=24",
    "trainer.batch_size=3",
    "trainer.max_iters=6",
    "trainer.eval_every=2",
    "trainer.eval_batches=2",
    "trainer.save_every=100",
    "trainer.sample_every=4",
    "trainer.sample_tokens=5",
    "trainer.device=cpu",
]
VARIANTS = {
    "mha learned": [],
    "gqa rope": ["model.n_kv_head=2", "model.rope=True"],
    "mqa": ["model.n_kv_head=1"],
    "mla": ["model.attention=mla", "model.rope=True", "model.kv_lora_rank=7"],
    "window": ["model.window=4", "model.n_kv_head=2"],
    "additive score, llama": ["model.score=additive", "model.shape=llama"],
    "tied": ["model.tie_embeddings=True"],
    "rnn": ["model.type=rnn"],
    "accumulation, cosine": [
        "trainer.grad_accumulation=3",
        "trainer.schedule=cosine",
        "trainer.warmup_iters=2",
        "trainer.min_learning_rate=1e-5",
    ],
}
DROPOUT = ["model.embd_pdrop=0.3", "model.resid_pdrop=0.2", "model.attn_pdrop=0.1"]
STATE = {"state.safetensors", "state.json"}
MODEL = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "MANIFEST.json"}


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    """Training is in float32, in a folder that holds input.txt."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text(TEXT)


def options(folder, *flags):
    """TINY, with `flags` in place of those of the same name."""
    mine = {flag.partition("=")[0]: flag for flag in flags}
    kept = [flag for flag in [*TINY, "data.path=input.txt"] if flag.partition("=")[0] not in mine]
    return read([*kept, f"system.work_dir={folder}", *mine.values()])


def run(folder, *flags):
    return list(train(options(folder, *flags)))


def resume(folder, *flags):
    torch.manual_seed(12345)  # nothing of the old process is left
    return run(folder, *flags, "trainer.resume=True")


def stop_at(step, folder, *flags, resumes=False):
    """A run that gets a SIGINT while it does `step`."""
    torch.manual_seed(54321)
    flags = [*flags, "trainer.resume=True"] if resumes else flags
    go_on = f"step {step} .*system.work_dir={folder} trainer.resume=True"
    with pytest.raises(Interrupted, match=go_on):  # noqa: PT012 (the loop is what is interrupted)
        for record in train(options(folder, *flags)):
            if "loss" in record and record["step"] == step:
                signal.raise_signal(signal.SIGINT)


def die_at(step, folder, *flags):
    """A run that ends in `step` without a chance to save."""
    records = train(options(folder, *flags))
    for record in records:
        if "loss" in record and record["step"] == step:
            records.close()
            return


def metrics(folder):
    def no_constant(text):
        raise AssertionError(f"{text} is no JSON")

    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def metrics_of(records):
    """Those in metrics.jsonl."""
    return [record for record in records if record.get("event") not in ("save", "sample")]


def deterministic(records):
    """All that does not depend on the clock, the machine or how often a run was begun."""
    timed = {"seconds", "rss_bytes", "rss_peak_bytes"}
    kept = [record for record in records if record.get("event") in (None, "end")]
    return [{key: value for key, value in record.items() if key not in timed} for record in kept]


def everything(folder):
    """Every byte of the newest checkpoint: weights, optimizer, random states, next batch, best loss."""
    return {file.name: file.read_bytes() for file in resolve(Path(folder)).iterdir()}


def samples(folder):
    return {file.name: file.read_text() for file in Path(folder, "samples").iterdir()}


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# Resume


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(variant):
    """N17: stopped in the first step; in a middle one and, once it had gone on, in the last."""
    flags = VARIANTS[variant] + DROPOUT
    whole = run("whole", *flags)
    for stops in ([1], [3, 5]):
        folder = "stopped-" + "-".join(map(str, stops))
        for step in stops:
            stop_at(step, folder, *flags, resumes=step != stops[0])
            assert resolve(Path(folder)).name == f"step-{step:06d}"
        resume(folder, *flags)
        assert deterministic(metrics(folder)) == deterministic(whole)
        assert everything(folder) == everything("whole")
        assert samples(folder) == samples("whole")
    losses = [record["loss"] for record in whole if "loss" in record]
    assert len(losses) == 6
    assert len(set(losses)) == 6


def test_a_signal_in_the_last_step_saves_it_and_resuming_does_what_was_due():
    run("whole")
    records = train(options("a"))
    while "loss" not in (record := next(records)) or record["step"] < 6:
        pass
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped at step 6 and saved in a"):
        list(records)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert resume("a")[-1]["event"] == "end"
    assert everything("a") == everything("whole")


def test_resuming_a_finished_run_trains_nothing_and_a_longer_one_goes_on():
    run("whole", "trainer.max_iters=8")
    run("a")
    before = everything("a")
    assert [record.get("event") for record in resume("a")] == ["start", None, "end"]
    assert everything("a") == before
    resume("a", "trainer.max_iters=8")
    assert everything("a") == everything("whole")


def test_resume_without_a_run_is_refused_by_name():
    """It would train from scratch, silently, for a mistyped folder."""
    run("runs/first", "trainer.max_iters=0")
    for place, known in (
        ("runs/frist", "Did you mean 'first'? Known: first."),
        ("x/y", "There are no runs in x."),
    ):
        with pytest.raises(InvalidInput) as refused:
            run(place, "trainer.resume=True")
        assert str(refused.value) == (
            f"{place} holds no run to resume. {known} Check system.work_dir, or leave trainer.resume out to begin a "
            "run there."
        )
        assert not Path(place).exists()


REFUSED_AT_THE_START = [
    ("model.n_kv_head=3", ConfigError),
    ("data.block_size=5000", InvalidInput),
    ("data.path=blank.txt", InvalidInput),
    ("data.path=nowhere.txt", InvalidInput),
    ("model.pretrained_folder=nowhere", InvalidInput),
]


@pytest.mark.parametrize(("flag", "error"), REFUSED_AT_THE_START)
def test_a_refused_run_leaves_nothing_behind(flag, error):
    Path("blank.txt").write_text("  \n")
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("kept")
    for place in ("new/er/run", "mine"):
        with pytest.raises(error):
            run(place, flag)
    assert not Path("new").exists()
    assert [place.name for place in Path("mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "tokens.bin"])
@pytest.mark.parametrize("flags", [[], ["trainer.resume=True"]])
def test_files_of_something_else_are_not_overwritten(name, flags):
    """Training would write its own config, and cut the metrics to its steps."""
    Path("mine").mkdir()
    Path("mine", name).write_text("precious: 1\n")
    with pytest.raises(
        InvalidInput, match="holds no run to resume" if flags else f"mine/{name} is not from a run"
    ):
        run("mine", *flags)
    assert Path("mine", name).read_text() == "precious: 1\n"
    assert [place.name for place in Path("mine").iterdir()] == [name]


def test_a_foreign_config_beside_checkpoints_is_not_overwritten():
    """Other trainers have such folders, too; metrics without a config are of a run that was killed as it began."""
    Path("mine/checkpoints").mkdir(parents=True)
    Path("mine/config.yaml").write_text("lr: 1\n")
    with pytest.raises(InvalidInput, match=r"mine/config\.yaml is not from a run"):
        run("mine")
    assert Path("mine/config.yaml").read_text() == "lr: 1\n"
    Path("mine/config.yaml").rename("mine/metrics.jsonl")
    run("mine")


def test_a_model_s_folder_is_no_place_for_a_run():
    """`eval`, `generate` and `plan` would read the model."""
    run("a", "trainer.max_iters=1")
    rehead.save(rehead.load("a"), "model")
    before = sorted(os.listdir("model"))
    with pytest.raises(InvalidInput, match=r"model is a model's folder: .* Choose another system\.work_dir"):
        run("model")
    assert sorted(os.listdir("model")) == before


def test_the_options_of_a_resumed_run_begin_another_one():
    run("a", "trainer.max_iters=1")
    resume("a", "trainer.max_iters=2")
    assert main(["train", "--config", "a/config.yaml", "system.work_dir=b"]) == 0
    assert resolve(Path("b")).name == "step-000002"


def test_a_refused_resume_leaves_the_runs_own_tokens():
    run("a")
    before = Path("a/tokens.bin").read_bytes()
    Path("other.txt").write_text(TEXT.replace("be", "eb"))
    with pytest.raises(ConfigError, match="the text has changed"):
        resume("a", "data.path=other.txt", "trainer.max_iters=9")
    assert Path("a/tokens.bin").read_bytes() == before


def test_paths_in_a_runs_config_hold_from_any_folder(monkeypatch):
    run("a", "trainer.max_iters=1")
    run("b", "model.pretrained_folder=a", "trainer.max_iters=1")
    said = read([], (Path("b/config.yaml"),))
    assert (said.data.path, said.model.pretrained_folder) == (
        os.path.abspath("input.txt"),
        os.path.abspath("a"),
    )
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    again = read(
        ["system.work_dir=../b", "trainer.resume=True", "trainer.max_iters=2"], (Path("../b/config.yaml"),)
    )
    assert [record["step"] for record in train(again)][-1] == 2
    name = f"org/model@{'0' * 40}"
    assert located(read([f"model.folder={name}"])).model.folder == name


def test_a_run_that_diverges_says_where_it_can_be_taken_up(monkeypatch):
    def diverge(step):
        advance = Trainer.advance

        def broken(self, next_batch, *rest):
            if self.step == step:
                raise NumericError("step X: not finite; lower trainer.learning_rate.")
            return advance(self, next_batch, *rest)

        monkeypatch.setattr(Trainer, "advance", broken)

    diverge(5)
    with pytest.raises(NumericError) as stopped:
        run("a", "trainer.save_every=4")
    assert str(stopped.value).endswith("rate. system.work_dir=a trainer.resume=True resumes from step 4.")
    diverge(2)
    with pytest.raises(NumericError) as stopped:
        run("b", "trainer.save_every=4")
    assert str(stopped.value).endswith("rate. There is no checkpoint to resume from yet: start again.")


def test_the_seed_decides_everything():
    runs = {name: run(name, f"system.seed={seed}", *DROPOUT) for name, seed in (("a", 1), ("b", 1), ("c", 2))}
    assert deterministic(runs["a"]) == deterministic(runs["b"])
    assert everything("a") == everything("b")
    assert [r["loss"] for r in runs["a"] if "loss" in r] != [r["loss"] for r in runs["c"] if "loss" in r]


REFUSED_ON_RESUME = [
    ("model.n_embd=28", "model.n_embd=28 was 24"),
    ("model.embd_pdrop=0.5", "model.embd_pdrop=0.5 was 0.1"),
    ("model.n_kv_head=2", "model.n_kv_head=2 was None"),
    ("data.block_size=9", "data.block_size=9 was 10"),
    ("data.val_fraction=0.2", "data.val_fraction=0.2 was 0.1"),
    ("system.seed=1", "system.seed=1 was 3407"),
    ("trainer.batch_size=4", "trainer.batch_size=4 was 3"),
    ("trainer.grad_accumulation=2", "trainer.grad_accumulation=2 was 1"),
    ("trainer.max_iters=1", "trainer.max_iters=1 is below step 2"),
    ("data.path=other.txt", "the text has changed"),
]


def test_a_changed_run_is_not_resumed_and_is_left_as_it_was():
    Path("other.txt").write_text(TEXT.replace("be", "eb"))
    stop_at(2, "a")
    before = {file: file.read_bytes() for file in Path("a").rglob("*.*")}
    for flag, message in REFUSED_ON_RESUME:
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            resume("a", flag)
        assert ("leave it out" in str(caught.value)) == (" was " in message)
        assert "new system.work_dir" in str(caught.value)
    assert before == {file: file.read_bytes() for file in before}
    resume("a")
    run("whole")
    assert everything("a") == everything("whole")


def test_a_run_is_not_begun_anew_in_its_folder():
    run("a")
    before = everything("a")
    with pytest.raises(
        InvalidInput, match=r"a already holds a run \(up to step-000006\).*trainer.resume=True"
    ):
        run("a")
    assert everything("a") == before


def test_other_arithmetic_is_warned_of(monkeypatch):
    stop_at(2, "a")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.warns(UserWarning, match="not bit for bit: threads 1 -> 7"):
        resume("a")


# Crashes and damage


def test_after_a_crash_metrics_after_the_checkpoint_are_made_again():
    run("whole", "trainer.save_every=2")
    die_at(5, "a", "trainer.save_every=2")
    assert [r["step"] for r in metrics("a") if "loss" in r] == [1, 2, 3, 4, 5]
    with Path("a/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "los')
    with pytest.warns(UserWarning, match=r"the last line of .*metrics\.jsonl is incomplete"):
        resume("a", "trainer.save_every=2")
    assert deterministic(metrics("a")) == deterministic(metrics("whole"))
    assert [r["step"] for r in metrics("a") if r.get("event") == "start"] == [0, 4]
    assert everything("a") == everything("whole")


def test_a_crash_before_the_first_checkpoint_does_not_block_the_folder():
    die_at(3, "a")
    with pytest.raises(InvalidInput, match="without a good checkpoint yet"):
        rehead.load("a")
    run("a")
    assert [r["step"] for r in metrics("a") if "loss" in r] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning():
    run("whole", "trainer.save_every=3")
    for name in sorted((MODEL | STATE) - {"MANIFEST.json"}):
        shutil.copytree("whole", name)
        damage(Path(name, "checkpoints/step-000006", name))
        with pytest.warns(UserWarning, match=f"skipped a damaged checkpoint: .*{name} is damaged"):
            resume(name, "trainer.save_every=3")
        assert everything(name) == everything("whole"), name


def test_a_newest_checkpoint_without_a_manifest_is_replaced():
    """As of a copy of the run that was cut off."""
    run("whole", "trainer.save_every=3")
    shutil.copytree("whole", "a")
    Path("a/checkpoints/step-000006/MANIFEST.json").unlink()
    with pytest.warns(UserWarning, match=r"skipped a damaged checkpoint: .*MANIFEST\.json is missing"):
        resume("a", "trainer.save_every=3")
    assert everything("a") == everything("whole")


def test_a_save_is_kept_even_where_damaged_later_ones_lie():
    """What is acknowledged as saved can be loaded, also with keep=1."""
    run("a", "trainer.save_every=2", "trainer.keep=3")
    for step in (4, 6):
        damage(Path(f"a/checkpoints/step-{step:06d}/model.safetensors"))
    with pytest.warns(UserWarning, match="damaged"):
        stop_at(3, "a", "trainer.keep=1", resumes=True)
    with pytest.warns(UserWarning, match="damaged"):
        assert resolve(Path("a")).name == "step-000003"


def test_an_optimizer_of_another_model_is_refused():
    stop_at(2, "a")
    other = build(options("b", "model.n_embd=28").model.resolve(len(set(TEXT)), 10))
    optimizer = build_optimizer(other, options("b").trainer)
    with pytest.raises(
        IntegrityError, match=r"state.safetensors: .*weight has moments \{.*\}, expected those of"
    ):
        state.restore(resolve(Path("a")), other, optimizer)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_only_the_newest_checkpoints_are_kept(keep):
    run("a", "trainer.save_every=1", f"trainer.keep={keep}")
    found = sorted(folder.name for folder in Path("a/checkpoints").iterdir())
    assert found == [f"step-{step:06d}" for step in range(7 - keep, 7)]


def test_a_folder_is_one_run_s_at_a_time():
    with RunFolder(Path("a")).open(resume=False), pytest.raises(Busy, match=r"pid \d+ on .+: wait for it"):
        run("a")
    run("a")


# The folder


def test_a_run_folder_holds_what_is_promised():
    flags = ["trainer.save_every=4", "trainer.sample_every=3"]
    records = run("deep/er/run", *flags)
    folder = Path("deep/er/run")
    assert {p.name for p in folder.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "samples",
        "tokens.bin",
    }
    assert read([], (folder / "config.yaml",)) == located(options(folder, *flags))
    assert [r for r in records if r.get("event") not in ("save", "sample")] == metrics(folder)
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    for step in (folder / "checkpoints").iterdir():
        assert {p.name for p in step.iterdir()} == MODEL | STATE
        assert torch.equal(rehead.load(step).embed_tokens.weight, rehead.load(step).embed_tokens.weight)
    assert torch.equal(
        rehead.load(folder).head.weight, rehead.load(folder / "checkpoints/step-000006").head.weight
    )
    for step in (3, 6):
        sample = (folder / f"samples/step-{step:06d}.txt").read_text()
        assert len(sample) == 8 + 5
        assert sample.startswith(TEXT[int(len(TEXT) * 0.9) :][:8])


def sample(folder, step):
    return Path(folder, f"samples/step-{step:06d}.txt").read_text()


def test_samples_follow_their_flags():
    """The starter's prompt, temperature, top-k and 500 characters; the defaults but for the prompt."""
    asked = options("x").trainer, TrainerOptions()
    assert [one.sample_prompt for one in asked] == [None, None]
    assert (asked[1].sample_tokens, asked[1].sample_temperature, asked[1].sample_top_k) == (500, 1.0, 10)
    flags = ["trainer.sample_every=6", "trainer.sample_tokens=40", "trainer.sample_prompt=to be"]
    run("warm", *flags)
    run("cold", *flags, "trainer.sample_temperature=0")
    run("one", *flags, "trainer.sample_top_k=1")
    run("all", *flags, "trainer.sample_top_k=null")
    assert len(sample("warm", 6)) == 5 + 40
    assert sample("warm", 6).startswith("to be")
    assert sample("cold", 6) == sample("one", 6) != sample("warm", 6)
    assert sample("all", 6) != sample("warm", 6)
    for prompt, said in (("Zorro", "'Z'"), ("to be, or not", "13 tokens, the model reads 10"), ("", "empty")):
        with pytest.raises((ConfigError, InvalidInput), match=said):
            list(
                train(
                    read(
                        [f"system.work_dir=new{len(prompt)}", *TINY, "data.path=input.txt"],
                        tables=({"trainer": {"sample_prompt": prompt}},),
                    )
                )
            )
        assert not Path(f"new{len(prompt)}").exists()


def test_a_run_says_which_text_it_took_and_why():
    said = [
        next(train(options(name, *flags, "trainer.max_iters=0")))["text"]
        for name, flags in (
            ("a", []),
            ("b", ["data.path=null"]),
            ("c", ["data.path=null", "data.name=python-docs"]),
        )
    ]
    assert said == [
        "input.txt",
        "Python's help texts, because neither data.path nor data.name is given (to use input.txt from this "
        "folder, give data.path=input.txt)",
        "the corpus python-docs",
    ]
    assert metrics("b")[0]["text"] == said[1]


def test_metrics_say_what_was_done():
    start, *rest, end = run("a")
    assert start["event"] == "start"
    assert start["step"] == 0
    assert start["train_tokens"] + start["val_tokens"] == len(TEXT)
    assert start["vocab_size"] == len(set(TEXT))
    assert start["parameters"] == sum(p.numel() for p in rehead.load("a").parameters())
    steps = [record for record in rest if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        assert {"step", "loss", "learning_rate", "grad_norm", "seconds", "rss_bytes"} <= record.keys()
        assert record["seconds"] > 0
    evaluations = [record for record in rest if "val_loss" in record]
    assert [record["step"] for record in evaluations] == [0, 2, 4, 6]
    assert end["event"] == "end"
    assert end["val_loss"] == evaluations[-1]["val_loss"]
    assert end["best_val_loss"] == min(record["val_loss"] for record in evaluations)


def test_without_validation_the_training_loss_is_what_there_is():
    *_, end = run("a", "data.val_fraction=0")
    assert end.keys() == {"event", "step", "train_loss", "best_val_loss"}
    assert metrics("a")[-1]["best_val_loss"] is None
    resume("a", "data.val_fraction=0", "trainer.max_iters=7")


def test_no_steps_save_the_model_as_drawn():
    start, evaluation, save, end = run("a", "trainer.max_iters=0")
    assert (start["step"], save["event"], end["step"]) == (0, "save", 0)
    assert metrics("a") == [start, evaluation, end]
    torch.manual_seed(3407)
    drawn = build(options("a").model.resolve(len(set(TEXT)), 10))
    for name, weight in rehead.load("a").state_dict().items():
        assert torch.equal(weight, drawn.state_dict()[name])


@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_recorded_is_yielded_also_by_a_finished_run(steps):
    flags = [f"trainer.max_iters={steps}", "trainer.sample_every=0"]
    first = metrics_of(run("a", *flags))
    assert metrics("a") == first
    again = metrics_of(resume("a", *flags))
    assert [record.get("event") for record in again] == ["start", None, "end"]
    assert metrics("a")[-3:] == again
    assert again[-1] == first[-1]


def test_losses_are_of_fixed_blocks_without_dropout():
    *_, end = run("a", "model.resid_pdrop=0.9", "model.embd_pdrop=0.9")
    model, tokenizer = rehead.load("a"), Tokenizer.load(resolve(Path("a")))
    tokens = tokenize(Source(path=Path("input.txt")), tokenizer, Path("tokens.bin"))
    for name, ids in zip(("train_loss", "val_loss"), split(tokens.ids, 10), strict=True):
        expected, _ = evaluate(model, evaluation_blocks(ids, 10, 3, limit=6))
        assert end[name] == expected


def test_evaluating_and_sampling_change_nothing():
    run("a", *DROPOUT)
    run("b", *DROPOUT, "trainer.eval_every=1", "trainer.eval_batches=3", "trainer.sample_every=1")
    assert everything("a")["model.safetensors"] == everything("b")["model.safetensors"]


# Warm start (seeds B20)


@pytest.mark.parametrize(
    "flags",
    [[], ["model.rope=True"], ["model.rope=True", "model.attention=mla"], ["model.type=rnn"]],
)
def test_a_longer_block_keeps_what_was_learned(flags):
    run("short", *flags)
    run("long", *flags, "data.block_size=17", "model.pretrained_folder=short", "trainer.max_iters=0")
    short, long = rehead.load("short"), rehead.load("long")
    assert long.config.block_size == 17
    for name, weight in short.state_dict().items():
        assert torch.equal(long.state_dict()[name][: len(weight)], weight)
    if not flags:
        table = long.state_dict()["embed_positions.weight"]
        assert table.shape == (17, 24)
        assert 0.01 < table[10:].std() < 0.03
    else:
        assert {name: w.shape for name, w in long.state_dict().items()} == {
            name: w.shape for name, w in short.state_dict().items()
        }
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(short(ids), long(ids))
    assert long(torch.arange(17)[None]).isfinite().all()


def test_a_warm_start_trains_on_and_resumes_without_the_old_folder():
    run("old")
    flags = ["data.block_size=17", "model.pretrained_folder=old"]
    first = run("whole", *flags)
    assert first[1]["train_loss"] < run("cold", "data.block_size=17")[1]["train_loss"]
    stop_at(3, "a", *flags)
    shutil.rmtree("old")
    resume("a", *flags)
    assert everything("a") == everything("whole")


MISMATCHES = [
    (["model.n_embd=28"], "n_embd is 28 here and 24 there"),
    (["model.n_layer=3"], "n_layer is 3 here and 2 there"),
    (["model.n_kv_head=2"], "n_kv_head is 2 here and 4 there"),
    (["model.window=4"], "window is 4 here and None there"),
    (["model.rope=True"], "holds another model: rope is True here and False there. Give"),
    (["model.attention=mla"], "attention is mla here and mha there"),
    (["model.shape=llama"], "norm is rmsnorm here and layernorm there"),
    (["model.tie_embeddings=True"], "tie_embeddings is True here and False there"),
    (["model.type=rnn"], "model.type is rnn here and gpt there"),
]


def test_another_model_is_no_warm_start():
    run("old")
    for flags, message in MISMATCHES:
        with pytest.raises(
            ConfigError, match=f"pretrained_folder=old .*{message}.*flags it was trained with"
        ):
            run("new", *flags, "model.pretrained_folder=old")
    with pytest.raises(ConfigError, match=r"block_size=9 is below the 10 .*never cut. Use 10 or more"):
        run("new", "data.block_size=9", "model.pretrained_folder=old")
    Path("other.txt").write_text("Ж" * 500)
    with pytest.raises(InvalidInput, match=r"not in the vocabulary .*'Ж'"):
        run("new", "data.path=other.txt", "model.pretrained_folder=old")
    with pytest.raises(InvalidInput, match="nowhere does not exist"):
        run("new", "model.pretrained_folder=nowhere")
    run("new", "model.pretrained_folder=old", *DROPOUT)


def test_what_rotates_has_no_table_to_cut():
    run("old", "model.rope=True")
    run("new", "model.rope=True", "data.block_size=9", "model.pretrained_folder=old", "trainer.max_iters=0")
    old, new = rehead.load("old"), rehead.load("new")
    ids = torch.arange(18).view(2, 9)
    assert new.config.block_size == 9
    assert torch.equal(old(ids), new(ids))


def test_a_model_keeps_its_tokenizer():
    """The one that it was trained with may be named again, also with the size asked for where the text gave fewer."""
    bpe = ["data.tokenizer=bpe", "data.vocab_size=9000"]
    run("old", *bpe, "trainer.max_iters=1")
    size = rehead.load("old").config.vocab_size
    assert size < 9000
    for asked in (["data.tokenizer=byte"], ["data.tokenizer=bpe", f"data.vocab_size={size - 1}"]):
        said = (
            f"{', '.join(asked)}: a run that starts from old reads its text with the tokenizer there (bpe, "
        )
        with pytest.raises(ConfigError, match=re.escape(f"{said}vocab_size={size}). Leave data.tokenizer")):
            run("new", *asked, "model.pretrained_folder=old")
        assert not Path("new").exists()
    for asked, name in (([], "same"), (bpe, "named")):
        run(name, *asked, "model.pretrained_folder=old", "trainer.max_iters=1")
        assert rehead.load(name).config.vocab_size == size


# One step


def trainer(*flags):
    run_options = options("a", "model.attn_pdrop=0", "model.embd_pdrop=0", "model.resid_pdrop=0", *flags)
    torch.manual_seed(1)
    return Trainer(build(run_options.model.resolve(20, 10)), run_options.trainer)


def batches(size):
    ids = torch.randint(20, (500,), generator=torch.Generator().manual_seed(3)).numpy()
    return BatchSampler(ids, 10, size, seed=5)


@pytest.mark.parametrize(
    "broken",
    [
        lambda weight: weight.sum() * float("nan"),
        lambda weight: weight.sum() * float("inf"),
        lambda weight: (weight * 0).sum().sqrt(),  # 0, with an infinite gradient
    ],
)
def test_a_step_that_is_not_finite_changes_no_weight(broken, monkeypatch):
    one = trainer()
    one.advance(batches(3).next)
    weights = {name: weight.clone() for name, weight in one.model.state_dict().items()}
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in one.optimizer.state.items()}
    monkeypatch.setattr(one.objective, "forward", lambda *batch: broken(one.model.head.weight))
    which = r"(, batch 1 of 1)?: loss \S+, gradient norm \S+, first in \S+weight: not finite"
    with pytest.raises(NumericError, match=rf"step 2{which}.*trainer.learning_rate"):
        one.advance(batches(3).next)
    assert one.step == 1
    assert all(torch.equal(weight, weights[name]) for name, weight in one.model.state_dict().items())
    for weight, kept in one.optimizer.state.items():
        assert all(torch.equal(value, moments[weight][key]) for key, value in kept.items())


def test_the_batch_and_the_weight_are_named():
    one = trainer("trainer.grad_accumulation=3")
    sampler, whole, parts = batches(3), one.objective.forward, iter(range(1, 4))
    one.objective.forward = lambda *batch: whole(*batch) * (float("inf") if next(parts) > 1 else 1)
    last = one.model.head.weight
    with pytest.raises(
        NumericError, match=r"step 1, batch 2 of 3: loss inf, gradient norm \S+, first in embed_tokens"
    ):
        one.advance(sampler.next)
    one.objective.forward = lambda *batch: whole(*batch) + (last * 0).sum().sqrt()
    with pytest.raises(NumericError, match=r"step 1: loss \d.*, first in head\.weight: not finite"):
        one.advance(sampler.next)


@pytest.mark.parametrize("flags", [["trainer.learning_rate=1e30"], ["trainer.learning_rate=1e300"]])
def test_a_run_that_diverges_never_saves_it(flags):
    with pytest.raises(NumericError, match="not finite"):
        run("a", *flags, "trainer.save_every=1", "trainer.keep=1", "trainer.eval_every=100")
    for folder in Path("a/checkpoints").iterdir():
        assert all(weight.isfinite().all() for weight in rehead.load(folder).parameters())
    shutil.rmtree("a/checkpoints")
    run("a")


def test_accumulated_batches_are_one_large_batch():
    """N18: k batches of b give the gradients, the loss and the step of one of k b."""
    small, large = trainer("trainer.grad_accumulation=4"), trainer()
    sampler = batches(3)
    parts = [sampler.next() for _ in range(4)]
    whole = tuple(torch.cat(side) for side in zip(*parts, strict=True))
    first = small.advance(iter(parts).__next__)
    second = large.advance(lambda: whole)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-6)
    gradients = [torch.cat([w.grad.flatten() for w in one.model.parameters()]) for one in (small, large)]
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-6 * gradients[1].abs().max()


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ([], [1, 1, 1, 1, 1, 1]),
        (["trainer.warmup_iters=4"], [0.25, 0.5, 0.75, 1, 1, 1]),
        (["trainer.schedule=cosine", "trainer.warmup_iters=2"], [0.5, 1, 1, 0.85355339, 0.5, 0.14644661]),
        (["trainer.schedule=cosine", "trainer.min_learning_rate=1e-4"], [1, 0.93971143, 0.775, 0.55, 0.325]),
        (["trainer.warmup_iters=12"], [1 / 12, 2 / 12, 3 / 12, 4 / 12, 5 / 12, 6 / 12]),
    ],
)
def test_learning_rates(flags, rates):
    made = options("a", "trainer.learning_rate=1e-3", *flags)
    found = [learning_rate(step, made.trainer) / 1e-3 for step in range(len(rates))]
    assert found == pytest.approx(rates)
    used = [record["learning_rate"] for record in train(made) if "loss" in record]
    assert used == [learning_rate(step, made.trainer) for step in range(6)]


def test_cosine_ends_at_the_minimum_and_stays_there():
    made = options("a", "trainer.schedule=cosine", "trainer.min_learning_rate=1e-5").trainer
    assert learning_rate(6, made) == learning_rate(9, made) == pytest.approx(1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_linear_weights_decay(variant):
    made = options("a", *VARIANTS[variant], "trainer.weight_decay=0.3")
    model = build(made.model.resolve(20, 10))
    decaying, others = build_optimizer(model, made.trainer).param_groups
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0)
    assert decaying["betas"] == (0.9, 0.95)
    decay = {names[id(weight)] for weight in decaying["params"]}
    rest = {names[id(weight)] for weight in others["params"]}
    assert decay | rest == set(names.values())
    assert not decay & rest
    head = () if variant == "tied" else ("head",)
    suffixes = tuple(f"{name}.weight" for name in ("_proj", "with_mqa", *head))
    assert decay == {name for name in names.values() if name.endswith(suffixes)}


def test_gradients_are_clipped():
    norms = {}
    for clip in (1e-3, 1e9):
        one = trainer(f"trainer.grad_norm_clip={clip}")
        norm = one.advance(batches(3).next)["grad_norm"]
        norms[clip] = float(nn.utils.get_total_norm([p.grad for p in one.model.parameters()]))
        assert norm == pytest.approx(norms[1e9]) if clip == 1e9 else norm > 0.1
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)


def test_bfloat16_computes_low_and_keeps_float32_weights():
    low, full = run("low", "trainer.dtype=bfloat16"), run("full")
    for a, b in zip(low, full, strict=True):
        if "loss" in a:
            assert a["loss"] != b["loss"]
            assert a["loss"] == pytest.approx(b["loss"], abs=0.05)
    assert {weight.dtype for weight in rehead.load("low").parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["cuda", "tpu", "cuda:99", ""])
def test_a_device_that_is_not_there(name):
    kind = name.partition(":")[0]
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        pytest.skip("it is there")
    with pytest.raises(UsageError, match=f"device={name}: this machine has .*cpu. Use one of them, or auto"):
        choose_device(name)


def test_apple_s_gpu_has_no_float64_and_is_neither_chosen_nor_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto").type == "cpu"
    for name in ("mps", "mps:0"):
        with pytest.raises(
            UsageError, match=rf"device={name}: .* float64, which mps does not have\. Use cpu"
        ):
            choose_device(name)
    with pytest.raises(UsageError, match="device=cuda: this machine has cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("kind", ["gpt", "rnn"])
def test_a_gpu_needs_of_the_machine_s_memory_only_what_the_weights_take(kind, monkeypatch):
    """Gradients and moments are counted where they will be: on a CPU with the weights, on a GPU beside them."""
    options = read([f"model.type={kind}", "model.n_embd=48", "data.block_size=8", "trainer.batch_size=1"])
    n_bytes = 4 * parameters(options.model.resolve(31, 8))
    free = dict.fromkeys(("cpu", "cuda"), 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: free[device.type])

    def begin(device, cpu, gpu=0):
        free.update(cpu=cpu, cuda=gpu)
        return start_model(options, 31, torch.device(device))

    with pytest.raises(ResourceError, match=r"weights \d+ MB, gradients and moments \d+ MB"):
        begin("cpu", 4 * n_bytes - 1)
    with pytest.raises(ResourceError, match=r"\(weights \d+ MB\)"):
        begin("cuda", n_bytes - 1)
    model = begin("cuda", n_bytes)
    for device in ("cuda", "cpu"):
        free[device] = 3 * n_bytes - 1
        with pytest.raises(
            ResourceError, match=r"a step of 1 x 8 tokens .*\(gradients and moments .* Use .*model"
        ):
            require_step(options, model, torch.device(device))
    free["cuda"] = 3 * n_bytes + 2**20
    require_step(options, model, torch.device("cuda"))


def test_a_short_context_cuts_the_default_prompt_of_samples(tmp_path):
    (tmp_path / "text.txt").write_text("O God, O God! How weary, stale, flat\n" * 20)
    flags = [f"data.path={tmp_path}/text.txt", "data.block_size=4", f"system.work_dir={tmp_path}/run"]
    small = ["model.n_layer=1", "model.n_embd=6", "trainer.max_iters=1", "trainer.batch_size=1"]
    options = read([*flags, *small, "trainer.sample_every=1", "trainer.sample_tokens=5"])
    assert list(train(options))[-1]["event"] == "end"


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(tmp_path):
    (tmp_path / "text.txt").write_text("O God, O God! How weary, stale, flat\n" * 20)
    flags = [f"data.path={tmp_path}/text.txt", "data.block_size=4", f"system.work_dir={tmp_path}/run"]
    small = ["model.n_layer=1", "model.n_embd=6", "trainer.batch_size=1", "trainer.sample_every=0"]
    list(train(read([*flags, *small, "trainer.max_iters=1"])))
    (tmp_path / "run/checkpoints/step-000001/config.json").unlink()
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = read([*flags, *small, "trainer.max_iters=2", "trainer.resume=True"])
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(IntegrityError, match=r"every checkpoint in .* is damaged"),
    ):
        list(train(again))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics


def test_more_sample_tokens_than_a_text_has_are_refused_before_training():
    with pytest.raises(ConfigError, match=r"trainer\.sample_tokens=100000000000\. Use 0 to 1,000,000"):
        read(["trainer.sample_tokens=100000000000"])


CUT = """
import sys, numpy as np
from pathlib import Path
from rehead.data import BatchSampler, evaluation_blocks
from rehead.errors import IntegrityError
Path("tokens.bin").write_bytes(np.arange(300_000, dtype=np.uint16).tobytes())
ids = np.memmap("tokens.bin", dtype=np.uint16, mode="r")
sampler, blocks = BatchSampler(ids[: 200_000], 8, 16, 0), evaluation_blocks(ids[200_000:], 8, 16)
sampler.next(), next(blocks)
with open("tokens.bin", "r+b") as file:
    file.truncate(8192)
for batch in (sampler.next, lambda: next(blocks)):
    try:
        batch()
    except IntegrityError as error:
        print(error)
"""


def test_a_text_that_is_cut_while_it_is_read_ends_the_run_and_not_the_process():
    """The system sends SIGBUS to whoever reads memory beyond the end of the file it stands for."""
    done = subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.returncode
    said = "tokens.bin was cut from 600,000 to 8,192 bytes while it was read: start again."
    assert [line.endswith(said) for line in done.stdout.splitlines()] == [True, True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_copy_to_save_is_counted_in_the_cpu_s_memory(device, monkeypatch):
    options = read(
        ["model.n_embd=48", "data.block_size=8", "trainer.batch_size=1", "trainer.save_async=True"]
    )
    model = build(options.model.resolve(31, 8))
    model.embed_tokens.requires_grad_(False)  # has no moments
    every, frozen = (sum(w.numel() for w in part.parameters()) for part in (model, model.embed_tokens))
    needed = []
    monkeypatch.setattr("rehead.training.start.require_memory", lambda *given: needed.append(given))
    require_step(options, model, torch.device(device))
    copy = 4 * (3 * every - 2 * frozen)
    found = [parts["a copy to save, with moments"] for _, parts, *_ in needed if len(parts) in (1, 4)]
    assert found == [copy]
    assert [len(parts) for _, parts, *_ in needed] == ([4] if device == "cpu" else [1, 3])
    assert [given[3].type for given in needed if len(given) > 3] == [device]


def test_a_compiled_step_holds_all_logits(monkeypatch):
    options = read(["model.n_embd=6", "model.n_layer=1", "data.block_size=64", "trainer.batch_size=64"])
    model = build(options.model.resolve(50_000, 64))
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    require_step(options, model, torch.device("cpu"))
    options.trainer.compile = True
    with pytest.raises(ResourceError, match=r"logits 2.5 GB"):
        require_step(options, model, torch.device("cpu"))


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a compiler")
@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own
def test_a_compiled_run_learns_the_same_and_is_saved_and_resumed_under_the_same_names():
    losses = {}
    for name in ("plain", "compiled"):
        flags = [f"trainer.compile={name == 'compiled'}", "model.n_layer=1", "trainer.sample_every=0"]
        flags += ["model.embd_pdrop=0", "model.attn_pdrop=0", "model.resid_pdrop=0"]
        run(name, *flags, "trainer.max_iters=2")
        losses[name] = resume(name, *flags, "trainer.max_iters=4")[-1]["val_loss"]
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-6)
    plain, compiled = (rehead.load(name).state_dict() for name in losses)
    assert plain.keys() == compiled.keys()


def test_a_teacher_with_other_tokens_is_refused(tmp_path, monkeypatch, capsys):
    """Of as many, so that no size tells."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("abcabcabc" * 60)
    Path("b.txt").write_text("xyzxyzxyz" * 60)
    small = [
        "model.n_layer=1",
        "model.n_embd=12",
        "data.block_size=8",
        "trainer.max_iters=1",
        "trainer.batch_size=2",
    ]
    assert main(["train", "data.path=a.txt", "system.work_dir=a", *small]) == 0
    assert main(["train", "data.path=b.txt", "system.work_dir=b", "trainer.teacher=a", *small]) == 2
    assert "trainer.teacher=a has another tokenizer than the model" in capsys.readouterr().err
    assert not Path("b").exists()
    assert main(["train", "data.path=a.txt", "system.work_dir=c", "trainer.teacher=a", *small]) == 0


@pytest.mark.parametrize("name", ["cuda:1", "cuda", "cpu"])
def test_the_gpu_that_trains_is_the_current_one(name, monkeypatch):
    """Whose random states are saved, and whose name is written down."""
    current = []
    monkeypatch.setattr("rehead.training.ranks.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    OneProcess().device(name)
    assert current == ([torch.device(name)] if name == "cuda:1" else [])
