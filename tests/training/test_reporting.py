"""trainer.report_to: TensorBoard's files read back by TensorBoard; stand-ins of trackio's and wandb's documented calls.

trackio.init(project, name, config, resume, embed), trackio.log(metrics, step) and trackio.finish(); wandb.init(project,
id, name, config, resume, dir, ...), which gives a run with log and finish(exit_code). The real ones bring 15 to 25
packages each.
"""

import json
import shutil
import signal
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from rehead.cli import main
from rehead.training.reporting import reports

RUN = [
    "data.path=text.txt", "data.block_size=8", "model.n_layer=1", "model.n_query_head=2", "model.n_embd=16",
    "trainer.batch_size=2", "trainer.eval_every=2", "trainer.eval_batches=1", "trainer.save_every=3",
    "trainer.sample_every=0", "trainer.device=cpu", "system.work_dir=run",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    # files of one second are read in the order of their numbers, as texts
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog, again and again; " * 20)


def train(*flags):
    given = {flag.partition("=")[0] for flag in flags}
    return main(["train", *(flag for flag in RUN if flag.partition("=")[0] not in given), *flags])


def expected(place="run"):
    """By metric, the (step, value) pairs of metrics.jsonl."""
    found = {}
    for line in Path(place, "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in {} if "event" in record else record.items():
            if name != "step":
                found.setdefault(name, []).append((record["step"], value))
    return found


def shown(place="run"):
    """What TensorBoard shows, by metric."""
    events = EventAccumulator(
        str(Path(place, "reports", "tensorboard")), size_guidance={"scalars": 0}
    ).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def pairs_of(metrics):
    return {(metric, step): value for metric, pairs in metrics.items() for step, value in pairs}


def in_float32(metrics):
    return {
        name: [(step, float(np.float32(value))) for step, value in pairs] for name, pairs in metrics.items()
    }


def interrupted():
    """Make the run one that was killed after step 5: its last checkpoint is of step 3."""
    shutil.rmtree("run/checkpoints/step-000005")
    Path("run/reports/tensorboard.step").unlink(missing_ok=True)


def owe_what_follows_step_4():
    """Make the checkpoint of step 4 one that was saved before the validation after it."""
    state = Path("run/checkpoints/step-000004/state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"owed": True}))
    manifest = Path("run/checkpoints/step-000004/MANIFEST.json")
    manifest.unlink()
    from rehead.checkpoint.files.publish import _write_manifest

    _write_manifest(manifest.parent, 0o644)


@pytest.mark.process
def test_tensorboard_shows_what_metrics_jsonl_has():
    command = Path(sys.executable).with_name("rehead")
    words = [*RUN, "trainer.max_iters=5", "trainer.report_to=tensorboard", "--json"]
    done = subprocess.run([command, "train", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 5
    assert shown() == in_float32(expected())
    assert {"loss", "learning_rate", "grad_norm", "seconds", "train_loss", "val_loss"} <= set(shown())
    events = EventAccumulator("run/reports/tensorboard").Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"n_query_head: 2" in text.tensor_proto.string_val[0]


def test_a_resumed_run_shows_each_step_once(capfd):
    assert train("trainer.max_iters=5", "trainer.report_to=tensorboard") == 0
    interrupted()
    assert train("trainer.max_iters=8", "trainer.resume=True") == 0
    assert shown() == in_float32(expected())
    assert [step for step, _ in shown()["loss"]] == list(range(1, 9))


def test_a_resumed_run_adds_to_a_report_that_was_closed(capfd, caplog):
    """TensorBoard warns of no step that it removes; it does of those that a killed run may have written halfway."""
    assert train("trainer.max_iters=5", "trainer.report_to=tensorboard") == 0
    assert train("trainer.max_iters=8", "trainer.resume=True") == 0
    assert shown() == in_float32(expected())
    assert "out of order" not in caplog.text
    Path("run/reports/tensorboard.step").unlink()
    assert train("trainer.max_iters=9", "trainer.resume=True") == 0
    assert shown() == in_float32(expected())
    assert "out of order" in caplog.text


def test_a_resumed_run_writes_what_a_killed_one_did_not(capfd):
    """Its last step was saved, and in no file of events yet."""
    assert train("trainer.max_iters=4", "trainer.save_every=4", "trainer.report_to=tensorboard") == 0
    whole = in_float32(expected())
    shutil.rmtree("run/reports")
    assert train("trainer.max_iters=6", "trainer.resume=True") == 0
    found = shown()
    assert [step for step, _ in found["loss"]] == [4, 5, 6]
    assert found["loss"][0] == whole["loss"][-1]
    assert found["val_loss"][0] == whole["val_loss"][-1]


def test_an_older_checkpoint_after_a_closed_report_shows_each_step_once(capfd):
    assert train("trainer.max_iters=5", "trainer.report_to=tensorboard") == 0
    shutil.rmtree("run/checkpoints/step-000005")
    assert train("trainer.max_iters=8", "trainer.resume=True") == 0
    assert shown() == in_float32(expected())
    assert [step for step, _ in shown()["loss"]] == list(range(1, 9))


def test_a_validation_that_a_signal_cut_off_is_shown_once(capfd):
    """The checkpoint owes what follows its step, so the validation is repeated."""
    assert train("trainer.max_iters=4", "trainer.save_every=4", "trainer.report_to=tensorboard") == 0
    owe_what_follows_step_4()
    assert train("trainer.max_iters=6", "trainer.resume=True") == 0
    assert shown() == in_float32(expected())
    assert [step for step, _ in shown()["val_loss"]] == [0, 2, 4, 6]


def test_a_run_that_had_ended_shows_its_last_validation_once(capfd):
    assert train("trainer.max_iters=3", "trainer.report_to=tensorboard") == 0
    assert train("trainer.max_iters=3", "trainer.resume=True") == 0
    assert [step for step, _ in shown()["val_loss"]] == [0, 2, 3]
    assert [step for step, _ in shown()["loss"]] == [1, 2, 3]


class StandIn:
    """A module with `init`, whose runs keep what is logged; `fail` names the call that fails."""

    def __init__(self, name, monkeypatch, fail=None):
        self.begun, self.rows, self.finished, self.exit_codes, self.fail = [], [], 0, [], fail
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.init, module.log, module.finish = self.init, self.log, self.finish
        module.Settings, module.setup, module.login = lambda **words: words, self.setup, self.login
        monkeypatch.setitem(sys.modules, name, module)

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(project=None, mode="online"))

    def login(self, *, prompt):
        assert prompt is False
        return self.fail != "login"

    def init(self, **words):
        print("a line on stdout")
        self.begun.append(words)
        self._may_fail("init")
        return self

    def log(self, metrics, step):
        if step == 3:
            self._may_fail("log")
        self.rows += [(name, step, value) for name, value in metrics.items()]

    def finish(self, exit_code=None):
        self.finished += 1
        self.exit_codes.append(exit_code)
        self._may_fail("finish")

    def _may_fail(self, call):
        if call == self.fail:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_resumed_run_goes_on_under_its_name_and_repeats_nothing(name, monkeypatch, capfd):
    service = StandIn(name, monkeypatch)
    assert train("trainer.max_iters=5", f"trainer.report_to=[{name}]", "--json") == 0
    assert len(capfd.readouterr().out.splitlines()) == 1
    interrupted()
    rows = pairs_of(expected())
    assert train("trainer.max_iters=8", "trainer.resume=True") == 0
    rows |= pairs_of(expected())
    assert sorted((metric, step) for metric, step, _ in service.rows) == sorted(rows)
    for metric, step, value in service.rows:
        assert metric in ("seconds", "rss_bytes") or value == rows[metric, step]
    first, second = service.begun
    assert service.finished == 2
    assert (first["project"], first["resume"]) == ("rehead", "allow")
    assert first["config"]["model"]["n_query_head"] == 2
    assert first["name"] == second["name"]
    assert first.get("id") == second.get("id")
    assert first["name"] == (
        "run" if name == "wandb" else f"run-{Path('run/reports/trackio.id').read_text()[:8]}"
    )
    assert first.get("dir") == (str(Path("run/reports").absolute()) if name == "wandb" else None)


def test_a_validation_that_two_signals_cut_off_is_logged(monkeypatch, capfd):
    """A resumed run records its start under the same step, which is not the validation."""
    service = StandIn("trackio", monkeypatch)
    assert train("trainer.max_iters=4", "trainer.save_every=4", "trainer.report_to=trackio") == 0
    owe_what_follows_step_4()
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    kept = [one for one in records if one["step"] < 4 or "loss" in one] + [{"event": "start", "step": 4}]
    Path("run/metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in kept))
    service.rows.clear()
    assert train("trainer.max_iters=4", "trainer.resume=True") == 0
    assert [step for name, step, _ in service.rows if name == "val_loss"] == [4]


def test_wandb_hears_how_a_run_ended(monkeypatch, capfd):
    """As its `finish` takes it: anything but 0 marks the run as failed."""
    service = StandIn("wandb", monkeypatch)
    flags = ["trainer.max_iters=3", "trainer.report_to=wandb"]
    assert train(*flags) == 0
    assert (
        train(*flags, "trainer.learning_rate=1e30", "trainer.grad_norm_clip=1e30", "system.work_dir=diverged")
        == 7
    )
    log = service.log

    def interrupted_at_2(metrics, step):
        log(metrics, step)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    service.log = interrupted_at_2
    assert train(*flags, "system.work_dir=interrupted") == 130
    assert service.exit_codes == [0, 1, 1]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_reporter_that_fails_costs_one_warning(call, monkeypatch, capfd):
    assert train("trainer.max_iters=5", "trainer.keep=2") == 0
    plain = expected()["loss"]
    shutil.move("run", "plain")
    service = StandIn("trackio", monkeypatch, fail=call)
    capfd.readouterr()
    assert train("trainer.max_iters=5", "trainer.report_to=[trackio,tensorboard]") == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rehead:")]
    assert said == [
        "rehead: warning: trackio failed ([Errno 28] No space left on device): training continues without it."
    ]
    assert expected()["loss"] == plain
    assert shown() == in_float32(expected())
    steps = {step for name, step, _ in service.rows if name == "loss"}
    assert steps == {"init": set(), "log": {1, 2}, "finish": {1, 2, 3, 4, 5}}[call]


def test_wandb_asks_nobody_for_an_account(monkeypatch, capfd):
    service = StandIn("wandb", monkeypatch, fail="login")
    assert train("trainer.max_iters=1", "trainer.report_to=wandb") == 0
    words = (
        "wandb failed (there is no account: `wandb login`, or set WANDB_MODE=offline): "
        "training continues without it."
    )
    assert f"rehead: warning: {words}" in capfd.readouterr().err.splitlines()
    assert service.begun == []


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(name, monkeypatch, capfd):
    monkeypatch.setattr(reports, "find_spec", lambda package: None)
    assert train(f"trainer.report_to={name}") == 2
    assert (
        capfd.readouterr().err
        == f'rehead: trainer.report_to={name} needs {name}: pip install "rehead[{name}]".\n'
    )
    assert not Path("run").exists()


def test_healing_reports_too(capfd):
    assert train("trainer.max_iters=2") == 0
    assert main(["convert", "run", "mqa", "--to", "mqa", "--allow-loss"]) == 0
    flags = ["trainer.max_iters=3", "trainer.eval_batches=1", "trainer.report_to=tensorboard"]
    assert (
        main(["heal", "mqa", "--teacher", "run", "trainer.device=cpu", "trainer.batch_size=2", *flags]) == 0
    )
    assert shown("mqa-healed") == in_float32(expected("mqa-healed"))
    assert len(shown("mqa-healed")["loss"]) == 3


def test_nothing_is_reported_unless_asked(monkeypatch, capfd):
    services = [StandIn(name, monkeypatch) for name in ("trackio", "wandb")]
    assert train("trainer.max_iters=1") == 0
    assert train("trainer.max_iters=1", "trainer.resume=True") == 0
    assert not Path("run/reports").exists()
    assert not any(service.begun for service in services)


@pytest.mark.parametrize("value", ["none", "null"])
def test_a_report_is_switched_off_by_none(value, capfd):
    """For a run that began with one, too."""
    assert train("trainer.max_iters=1", "trainer.report_to=tensorboard") == 0
    before = shown()
    assert train("trainer.max_iters=2", "trainer.resume=True", f"trainer.report_to={value}") == 0
    assert shown() == before
    assert "report_to: null" in Path("run/config.yaml").read_text()
    assert train(f"trainer.report_to={value}", "trainer.max_iters=1", "system.work_dir=other") == 0
    assert not Path("other/reports").exists()


REFUSED = {
    "mlflow": "trainer.report_to=mlflow: unknown choice. Use one of tensorboard, trackio, wandb, several as "
    "[tensorboard, trackio], or none.",
    "[none]": "or none.",
    "[tensorboard,mlflow]": "unknown choice.",
    "3": "unknown choice.",
    "[wandb,wandb]": "trainer.report_to=['wandb', 'wandb'] names one twice. Leave it out.",
}


@pytest.mark.parametrize("value", REFUSED)
def test_other_values_are_refused(value, capfd):
    assert train(f"trainer.report_to={value}") == 2
    assert REFUSED[value] in capfd.readouterr().err
