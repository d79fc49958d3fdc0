"""Studies of which a variant fails: the others are made, the error names it, and it can be left out."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from rehead.cli import main
from rehead.errors import ConfigError, NumericError, ResourceError
from rehead.study import Preset, jobs
from rehead.study.failures import Failures
from rehead.study.parallel import run_parallel

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
            raise ResourceError("no room")
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
