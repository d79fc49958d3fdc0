"""Signals sent to real processes. What follows a run is done here, in another process than the run's."""

import itertools
import json
import linecache
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import rehead
import rehead.training.run
from rehead.checkpoint import resolve
from rehead.cli import main
from rehead.data.files import write_whole
from rehead.tokenizer import open_model
from rehead.training.folder import RunFolder
from rehead.training.interrupt import stop_signals

TINY = [
    "data.path=input.txt",
    "data.block_size=8",
    "model.n_layer=1",
    "model.n_query_head=2",
    "model.n_embd=16",
    "trainer.batch_size=2",
    "trainer.eval_every=1000000",
    "trainer.eval_batches=1",
    "trainer.sample_every=0",
    "trainer.device=cpu",
]


ENDLESS = "trainer.max_iters=1000000"

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
]  # each begins processes, on a machine that may be busy


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text("Whether 'tis nobler in the mind to suffer\n" * 50)


@pytest.fixture
def start():
    """start(words): `python -m rehead ...` with the one thread that tests have; no process outlives its test."""
    begun = []

    def begin(*words, program=("-m", "rehead")):
        command = [sys.executable, *program, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        with process:  # which closes its pipes, and waits
            pass


def steps(folder):
    """The steps in metrics.jsonl, which another process may just be writing."""
    try:
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}")]


def wait_for(condition, process):
    """Until it holds or the test's time is up: on a busy machine a process may start in a minute."""
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def train_here(*words):
    assert main(["train", *words]) == 0


def everything(folder):
    return {file.name: file.read_bytes() for file in resolve(Path(folder)).iterdir()}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_message_says_how_to_go_on(number, status, start):
    process = start("train", *TINY, ENDLESS, "system.work_dir=runs/a b")
    wait_for(lambda: len(steps("runs/a b")) >= 5, process)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == status
    assert out == ""
    message = err.splitlines()[-1]
    assert len([line for line in err.splitlines() if line.startswith("rehead: ")]) == 1
    last = steps("runs/a b")[-1]
    assert message == (
        f"rehead: stopped at step {last} and saved in runs/a b: continue with "
        "system.work_dir=runs/a b trainer.resume=True."
    )
    end = f"trainer.max_iters={last + 4}"
    train_here("system.work_dir=runs/a b", "trainer.resume=True", end)
    train_here(*TINY, "system.work_dir=whole", end)
    assert everything("runs/a b") == everything("whole")


def test_a_second_process_leaves_at_once_and_names_the_first(capsys, start):
    process = start("train", *TINY, ENDLESS, "system.work_dir=a", "trainer.save_every=3")
    wait_for(lambda: Path("a/checkpoints/step-000003").exists(), process)
    begun = time.process_time()  # of this process: others may keep the machine busy
    for more in ([], ["trainer.resume=True"]):
        assert main(["train", *TINY, ENDLESS, "system.work_dir=a", *more]) == 6
        error = capsys.readouterr().err
        assert error.startswith(f"rehead: a is being written by pid {process.pid} on ")
        assert "choose another system.work_dir" in error
    assert time.process_time() - begun < 5
    process.kill()
    process.communicate()
    last = resolve(Path("a")).name
    train_here("system.work_dir=a", "trainer.resume=True", f"trainer.max_iters={int(last[5:]) + 1}")


def test_readers_may_come_in_while_a_run_saves_and_drops_checkpoints(start):
    """P11: a whole model each time, and no warning of a damaged one."""
    process = start("train", *TINY, ENDLESS, "system.work_dir=a", "trainer.save_every=1", "trainer.keep=1")
    wait_for(lambda: Path("a/checkpoints/step-000002").exists(), process)
    for _ in range(15):
        assert rehead.load("a").config.block_size == 8
    assert main(["generate", "a", "--prompt", "W", "--max-new-tokens", "3"]) == 0
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_checkpoint_dropped_while_it_is_opened_gives_way_to_the_next(monkeypatch):
    """What is not found in a folder that is gone was never looked for."""
    train_here(*TINY, "system.work_dir=a", "trainer.max_iters=2", "trainer.save_every=1", "trainer.keep=2")
    newest, opened = resolve(Path("a")), []

    def load_then_drop(folder, **given):
        opened.append(folder.name)
        model = rehead.load(folder, **given)
        if len(opened) == 1:
            folder.rename("elsewhere")
        return model

    monkeypatch.setattr("rehead.tokenizer.opened.load", load_then_drop)
    found = open_model("a")
    assert opened == [newest.name, found.folder.name]
    assert found.tokenizer is not None
    assert newest != found.folder


def test_a_checkpoint_dropped_just_as_it_was_found_gives_way_to_the_next(monkeypatch):
    train_here(*TINY, "system.work_dir=a", "trainer.max_iters=2", "trainer.save_every=1", "trainer.keep=2")
    found = []

    def resolve_then_drop(path):
        found.append(resolve(path))
        if len(found) == 1:
            found[0].rename("elsewhere")
        return found[-1]

    monkeypatch.setattr("rehead.checkpoint.find.resolve", resolve_then_drop)
    assert open_model("a").folder.name == "step-000001"
    assert found[0].name == "step-000002"


def after(calls, do):
    """`do`, with a SIGTERM during its call number `calls`."""
    count = itertools.count(1)

    def interrupted(*given, **more):
        if next(count) == calls:
            signal.raise_signal(signal.SIGTERM)
        return do(*given, **more)

    return interrupted


DUE = ["trainer.eval_every=2", "trainer.sample_every=2", "trainer.sample_tokens=2"]


@pytest.mark.parametrize(
    ("where", "calls", "last"),
    [
        ("BatchSampler.next", 8, 2),
        ("OneProcess.evaluate", 3, 2),
        ("OneProcess.evaluate", 6, 4),
        ("stream", 1, 2),
    ],
)
def test_what_a_signal_abandons_is_made_up_for(where, calls, last, monkeypatch, capsys):
    """A step among its batches, an evaluation, also the last, and a sample."""
    here = rehead.training.run
    of, _, name = where.rpartition(".")
    place = getattr(here, of) if of else here
    own = {flag.partition("=")[0] for flag in DUE}
    flags = [flag for flag in TINY if flag.partition("=")[0] not in own]
    flags += [*DUE, "trainer.grad_accumulation=3", "trainer.max_iters=4"]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, after(calls, getattr(place, name)))
        assert main(["train", *flags, "system.work_dir=a"]) == 143
    assert f"stopped at step {last} and saved" in capsys.readouterr().err
    train_here("system.work_dir=a", "trainer.resume=True")
    train_here(*flags, "system.work_dir=whole")
    assert everything("a") == everything("whole")
    assert [(one["step"], one.get("loss"), one.get("val_loss")) for one in kept("a")] == [
        (one["step"], one.get("loss"), one.get("val_loss")) for one in kept("whole")
    ]
    assert [file.read_bytes() for file in sorted(Path("a/samples").iterdir())] == [
        file.read_bytes() for file in sorted(Path("whole/samples").iterdir())
    ]


def kept(folder):
    """The records of steps and evaluations."""
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [one for one in lines if "event" not in one]


def test_a_signal_before_the_first_step_blocks_nothing(start):
    process = start("train", *TINY, ENDLESS, "system.work_dir=a")
    wait_for(Path("a/.lock").exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted" or "stopped at step" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not Path("a").exists() or Path("a/config.yaml").exists(), [*Path("a").rglob("*")]
    end = f"trainer.max_iters={len(steps('a')) + 2}"
    train_here(*TINY, "system.work_dir=a", *["trainer.resume=True"] * Path("a").exists(), end)


def test_a_signal_while_something_is_removed_leaves_no_folder(tmp_path, monkeypatch):
    remove, called = shutil.rmtree, []

    def interrupted(place, **more):
        called.append(place)
        if len(called) == 1:
            raise KeyboardInterrupt
        remove(place, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    folder = RunFolder(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt), folder.open(resume=False):
        write_whole(folder.read_tokens, [b"1"])
    assert not folder.path.exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_signal_while_a_run_begins_leaves_no_folder(tmp_path, monkeypatch, name):
    def interrupted(path, parts):
        if path.name == name:
            raise KeyboardInterrupt
        write_whole(path, parts)

    monkeypatch.setattr("rehead.training.folder.write_whole", interrupted)
    folder = RunFolder(tmp_path / "a")

    def begin():
        with folder.open(resume=False):
            folder.read_tokens.write_bytes(b"1")
            folder.begin("seed: 1", [])

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert not folder.path.exists()


SLOW = """
import sys, time
from rehead.cli import main
import rehead.cli.entry
from rehead.training.saving import Saver

publish = Saver._publish

def slowly(saver, snapshot):
    print("saving", flush=True)
    time.sleep(2.5)
    return publish(saver, snapshot)

Saver._publish = slowly
sys.exit(main())
"""


@pytest.mark.parametrize("again", ["", "at once", "later"])
def test_a_save_that_takes_longer_than_a_command_has_to_answer(again, start):
    """Ended after 1.5 s it lost the run. Two signals at once, as `timeout` sends them, are one; a later one is not."""
    process = start("train", *TINY, ENDLESS, "system.work_dir=a", program=["-c", SLOW])
    wait_for(lambda: len(steps("a")) >= 5, process)
    process.send_signal(signal.SIGINT)
    if again == "at once":
        process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "saving\n"
    if again == "later":
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    is_saved = again != "later"
    assert ("and saved in a: continue with" in err.splitlines()[-1]) == is_saved, err
    assert bool(list(Path("a").glob("checkpoints/step-*"))) == is_saved


@pytest.mark.filterwarnings("ignore:.*unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_before_a_run_begins_leaves_no_folder(tmp_path):
    """A trace function raises it at the first, second, ... line of the lock and of the run's folder."""

    def interrupt_at(wanted):
        """Whether there was such a line."""
        lines = itertools.count()

        def trace(frame, event, _):
            file = frame.f_code.co_filename
            if Path(file).name not in {"hold.py", "folder.py"}:
                return None
            does_something = linecache.getline(file, frame.f_lineno).split("#")[0].strip() != "try:"
            if event == "line" and does_something and next(lines) == wanted:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with RunFolder(tmp_path / "new" / "a").open(resume=False):
                sys.settrace(before)
                return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)

    for number in itertools.count():
        if not interrupt_at(number):
            break
        assert not (tmp_path / "new").exists(), number
    assert number > 20


@pytest.mark.slow
@pytest.mark.reliability
def test_killed_at_any_time_the_newest_good_checkpoint_is_there(capsys, start):
    """P01: what was acknowledged as saved can be loaded; nothing half written is ever taken for a model."""
    rng = random.Random(0)
    flags = ["system.work_dir=a", "trainer.save_every=2"]
    for again in range(5):
        before = steps("a")[-1] if steps("a") else 0
        process = start("train", *TINY, ENDLESS, *flags, *["trainer.resume=True"] * (again > 0))
        wait_for(lambda before=before: len(steps("a")) and steps("a")[-1] > before + 3, process)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        _, err = process.communicate()
        saved = [int(line.split()[3]) for line in err.splitlines() if "saved step" in line]
        newest = resolve(Path("a"))
        assert int(newest.name[5:]) >= max(saved)
        rehead.load(newest)
        assert main(["generate", "a", "--prompt", "W", "--max-new-tokens", "3", "--temperature", "0"]) == 0
    last = int(resolve(Path("a")).name[5:])
    end = f"trainer.max_iters={last + 5}"
    train_here("system.work_dir=a", "trainer.resume=True", end)
    train_here(*TINY, "system.work_dir=whole", end)
    assert everything("a") == everything("whole")
    assert not list(Path("a/checkpoints").glob(".tmp-*"))
    assert steps("a") == list(range(1, last + 6))


def test_generation_is_interrupted_in_one_line(start):
    train_here(*TINY, "system.work_dir=a", "trainer.max_iters=1")
    process = start("generate", "a", "--prompt", "W", "--max-new-tokens", "1000000")
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize(("together", "ends"), [(100.0, False), (0.0, True)])
def test_only_the_first_signal_is_noted_and_handlers_come_back(together, ends, monkeypatch):
    """One that comes with the first is the same; a later one ends the process."""
    monkeypatch.setattr("rehead.training.interrupt.TOGETHER", together)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_signals() as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
            signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGTERM
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
