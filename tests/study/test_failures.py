"""Studies of which a variant fails: the others are made, the error names it, and it can be left out."""

import json
import logging
import multiprocessing
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rehead.cli import main
from rehead.errors import ConfigError, InvalidInput, NumericError, OutOfMemory, ResourceError
from rehead.report import lines
from rehead.study import Preset, jobs
from rehead.study.failures import Failures
from rehead.study.parallel import _Sent, run_parallel

COMMON = {
    "data": {"path": "input.txt", "block_size": 16},
    "model": {"n_layer": 1, "n_query_head": 2, "n_embd": 8},
    "trainer": {"max_iters": 3, "batch_size": 2, "eval_batches": 1, "sample_every": 0},
}
STAGES = {
    "Wild": {"trainer": {"learning_rate": 1e30}},
    "Wild, half": {"from": "Wild", "convert": {"to": "mla", "kv_fraction": 0.5}},
    "Wild, healed": {"from": "Wild, half", "heal": True},
    "Calm": {},
    "Calm, one head": {"from": "Calm", "convert": {"to": "mqa"}},
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text("O God, O God! How weary, stale, flat and unprofitable\n" * 40)


def preset(variants):
    return {"about": "x", "run": COMMON, "variants": variants, "new_tokens": 2}


def run(variants, *words):
    Path("study.yaml").write_text(json.dumps(preset(variants)))
    return main(["study", "--preset", "study.yaml", "system.work_dir=study", *words])


def made():
    return sorted(str(file.parent.relative_to("study")) for file in Path("study").glob("*/*/measured.json"))


@pytest.mark.filterwarnings("always:Wild, seed 3407 failed")
def test_the_others_are_made_and_the_variant_that_failed_can_be_left_out(capsys):
    assert run(STAGES) == NumericError.exit_code
    *before, said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("rehead: warning: Wild, seed 3407 failed; what") for line in before)
    assert said.startswith("rehead: Wild, seed 3407: step ")
    assert "What does not start from it is made." in said
    assert "leave the variant out; with other options it needs another name" in said
    assert made() == ["calm-one-head/seed-3407", "calm/seed-3407"]
    assert not Path("study/report.html").exists()
    stamps = {file: file.stat().st_mtime_ns for file in Path("study").rglob("measured.json")}
    assert run({name: STAGES[name] for name in ("Calm", "Calm, one head")}) == 0
    assert Path("study/report.html").exists()
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    assert run({name: STAGES[name] for name in ("Calm", "Calm, one head")}) == 0  # and again


@pytest.mark.filterwarnings("always:A, seed 1 failed")
def test_a_seed_that_failed_does_not_keep_its_variant_in_the_study(monkeypatch):
    """Its other seed has results, but there is no report of them."""
    train = "rehead.study.work.train"
    module = pytest.importorskip("rehead.study.work")
    usual = module.train

    def failing(options):
        if "a/seed-1" in options.system.work_dir:
            raise OutOfMemory("no room")
        yield from usual(options)

    monkeypatch.setattr(train, failing)
    variants = {"A": {}, "B": {"model": {"n_kv_head": 1}}, "C": {"model": {"n_embd": 12}}}
    seeds = "system.seed=[0,1]"
    assert run(variants, seeds) == ResourceError.exit_code
    assert made() == ["a/seed-0", "b/seed-0", "b/seed-1", "c/seed-0", "c/seed-1"]
    del variants["A"]
    assert run(variants, seeds) == 0
    assert run(variants, seeds) == 0
    del variants["C"]
    assert run(variants, seeds) == 3  # which the report has


def test_every_failure_is_told_and_the_first_one_is_raised():
    planned = {job.variant: job for job in jobs(Preset.of("p", preset(STAGES)), [])}
    failures = Failures()
    failures.raise_first()
    with pytest.warns(
        UserWarning, match=r"^Wild, seed 3407 failed; what does not start from it .*: loss nan$"
    ):
        failures.add(planned["Wild"], NumericError("loss nan"))
    with pytest.warns(UserWarning, match="^Calm, one head, seed 3407 failed"):
        failures.add(planned["Calm, one head"], ConfigError("no"))
    stopped = [name for name, job in planned.items() if failures.stop(job)]
    assert stopped == ["Wild", "Wild, half", "Wild, healed", "Calm, one head"]
    with pytest.raises(
        NumericError, match=r"^Wild, seed 3407: loss nan .*; Calm, one head, seed 3407 failed, too\."
    ):
        failures.raise_first()


class Told:
    """Stands in for multiprocessing: a process sends what `says` has for its job, and ends."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self, says):
        self.says, self.begun = says, []

    def Process(self, target, args):  # as the module names it
        job, _, threads, _, out = args
        self.begun.append((job.variant, threads))
        self.say = lambda: out.send(self.says[job.variant]) if job.variant in self.says else None
        return self

    def start(self):
        self.say()

    def join(self):
        pass

    def terminate(self):
        self.terminated = True

    kill = join
    exitcode = 0


@pytest.mark.filterwarnings("ignore:Wild, seed 3407 failed")
def test_several_at_once_leave_out_what_starts_from_one_that_failed(monkeypatch):
    """Each has its share of the threads of those that there are."""
    told = Told({"Wild": NumericError("loss nan")})
    monkeypatch.setattr(multiprocessing, "get_context", lambda way: told)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10)
    planned, failures = jobs(Preset.of("p", preset(STAGES)), []), Failures()
    run_parallel(planned, Preset.of("p", preset(STAGES)), 8, lambda job, record: None, failures)
    assert told.begun == [("Wild", 2), ("Calm", 2), ("Calm, one head", 2)]
    with pytest.raises(NumericError, match=r"^Wild, seed 3407: loss nan"):
        failures.raise_first()
    assert not hasattr(told, "terminated")
    told.says, told.begun = {"Calm": KeyError("a bug")}, []
    with pytest.raises(KeyError):
        run_parallel(planned[3:], Preset.of("p", preset(STAGES)), 8, lambda job, record: None, failures)
    assert told.begun == [("Calm", 5)]


@pytest.mark.filterwarnings("ignore:A, seed 3407 failed")
@pytest.mark.parametrize(
    ("error", "status", "rest"),
    [
        (MemoryError(), 5, ["b/seed-3407"]),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), 5, ["b/seed-3407"]),
        (InvalidInput("a short text"), 3, ["b/seed-3407"]),
        (ResourceError("No space left on device"), 5, []),
        (KeyError("a bug"), 8, []),
    ],
)
def test_what_concerns_one_variant_stops_no_other(error, status, rest, monkeypatch):
    """A full disk or a bug concerns all."""
    module = pytest.importorskip("rehead.study.work")
    usual = module.train

    def failing(options):
        if "/a/" in options.system.work_dir:
            raise error
        yield from usual(options)

    monkeypatch.setattr(module, "train", failing)
    assert run({"A": {}, "B": {"model": {"n_kv_head": 1}}}) == status
    assert made() == rest


@pytest.mark.filterwarnings("ignore:A, seed 3407 failed")
def test_what_failed_is_not_kept_in_memory_or_among_what_runs(monkeypatch, capsys):
    module = pytest.importorskip("rehead.study.work")
    usual, held = module.train, []

    def failing(options):
        if "/a/" not in options.system.work_dir:
            assert [model() for model in held] == [None]
            yield from usual(options)
            return
        model = torch.nn.Linear(3, 3)
        held.append(weakref.ref(model))
        yield {"event": "start", "step": 0, "text": "x", "parameters": 9, "vocab_size": 3, "train_tokens": 9,
               "val_tokens": 9, "device": "cpu"}  # fmt: skip
        yield {"step": 1, "loss": 8.1431, "learning_rate": 1.0, "grad_norm": 1.0, "seconds": 1.0}
        raise NumericError("loss nan")

    monkeypatch.setattr(module, "train", failing)
    monkeypatch.setattr(lines, "EVERY", 0.0)
    assert run({"A": {}, "B": {"model": {"n_kv_head": 1}}}) == 7
    told = capsys.readouterr().err
    shown = [line for line in told.splitlines() if line.startswith("A  step")]
    assert held
    assert shown
    assert told.rindex(shown[-1]) < told.index("B  ")


def test_a_model_of_the_hub_is_done_though_no_folder_has_its_name(monkeypatch):
    work, job_of = pytest.importorskip("rehead.study.work"), pytest.importorskip("rehead.study.job")
    Path("kept").mkdir()
    monkeypatch.setattr(job_of.checkpoint, "resolve", lambda folder: Path("kept"))
    found, (job, _) = Preset.of("p", preset(STAGES)), jobs(Preset.of("p", preset({"A": {}, "B": {}})), [])
    options = replace(job.options, model=replace(job.options.model, folder="org/name@" + "0" * 40))
    job = replace(job, options=options, kind="given")
    assert not work.is_done(job, found)
    job.folder.mkdir(parents=True)
    (job.folder / work.MEASURED).write_text(json.dumps({"of": work._subject(job, found)}))
    assert work.is_done(job, found)


def test_a_process_sends_what_its_log_warns_of():
    """It has no terminal of its own to say it on."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    log = logging.Logger("rehead")
    log.addHandler(_Sent(writer))
    log.info("no")
    log.warning("%s is dropped", "wandb")
    assert reader.recv() == "wandb is dropped"
    assert not reader.poll()
