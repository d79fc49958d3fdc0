"""Signals in every phase of work, sent to processes once that phase is seen to run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rehead.checkpoint import resolve
from rehead.cli import main

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
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORD = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
SECONDS = 2.0
MARGIN = 8.0
"""Seconds more on a machine that other work shares."""
FOREVER = "1000000"

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text("Whether 'tis nobler in the mind to suffer\n" * 50)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.said.read_text()
        time.sleep(0.01)


def ended(process, number, send=None):
    """Send the signal; return what the process said. It ends soon, with the signal's status and one last line."""
    begun = time.monotonic()
    (send or process.send_signal)(number)
    process.wait(60)
    took = time.monotonic() - begun
    said = process.said.read_text()
    assert process.returncode == STATUS[number], said
    assert "Traceback" not in said
    assert took < SECONDS + MARGIN
    return said.splitlines()


def reports(process, stage):
    return lambda: stage in process.said.read_text()


@pytest.mark.slow
def test_a_whole_study_ends_in_one_line_though_every_process_gets_the_signal(start):
    process = start(
        *[
            "study",
            "--preset",
            "grid",
            "model.n_kv_head=[1,2]",
            "--jobs",
            "2",
            *TINY,
            f"trainer.max_iters={FOREVER}",
        ],
        "system.work_dir=s",
    )
    wait_for(lambda: len(list(Path("s").rglob("metrics.jsonl"))) == 2, process)
    time.sleep(0.5)
    said = ended(process, signal.SIGTERM, lambda number: os.killpg(process.pid, number))
    assert said[-1] == "rehead: stopped, with every run saved: repeat the command to resume."
    assert "warning" not in "".join(said)


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *[pytest.param(one, marks=pytest.mark.slow) for one in STATUS]]
)
def test_training_saves_within_one_long_step(number, start):
    process = start(
        *["train", *TINY, "trainer.grad_accumulation=1000000", "trainer.max_iters=3", "system.work_dir=a"]
    )
    wait_for(
        lambda: "val_loss" in Path("a/metrics.jsonl").read_text() if Path("a/metrics.jsonl").exists() else 0,
        process,
    )
    time.sleep(0.3)
    assert ended(process, number)[-1].startswith("rehead: stopped at step 0 and saved in a: continue with ")
    assert resolve(Path("a")).name == "step-000000"


@pytest.fixture
def model():
    assert main(["train", *TINY, "trainer.max_iters=1", "system.work_dir=m"]) == 0
    Path("long.txt").write_text("Whether 'tis nobler in the mind to suffer\n" * 200_000)
    return "m"


PHASES = {
    "evaluate": (["eval", "m", "--data", "long.txt"], "eval"),
    "prepare": (
        [
            *["train", *TINY[1:], "data.path=long.txt"],
            "data.tokenizer=bpe",
            "data.vocab_size=500",
            "system.work_dir=p",
        ],
        "tokenizing",
    ),
    "convert": (
        [
            *["convert", "m", "c", "--to", "mla", "--kv-fraction", "0.25"],
            "--calibration",
            "long.txt",
            "--teach",
            "1000",
        ],
        "teaching",
    ),
    "generate": (["generate", "m", "--prompt", "W", "--max-new-tokens", FOREVER, "--json"], "generate"),
    "study": (
        [
            "study",
            "--preset",
            "grid",
            "model.n_kv_head=[1,2]",
            *TINY,
            f"trainer.max_iters={FOREVER}",
            "system.work_dir=s",
        ],
        "step",
    ),
}


@pytest.mark.slow
@pytest.mark.reliability
@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_ends_in_one_line(phase, number, model, start):
    words, seen = PHASES[phase]
    process = start(*words)
    wait_for(reports(process, seen), process)
    said = ended(process, number)
    assert said[-1] == WORD[number] or said[-1].startswith("rehead: stopped")


def test_a_call_that_python_cannot_end_is_ended_with_the_process():
    """As torch's and tokenizers' calls are: a handler of Python would wait for their end."""
    program = (
        "import torch\nfrom rehead.cli.interrupt import answer_signals\n"
        "torch.set_num_threads(1)\n"
        "answer_signals()\na = torch.rand(4000, 4000, dtype=torch.float64)\nprint(1, flush=True)\n"
        "torch.linalg.svd(a)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "1\n"
        time.sleep(0.2)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
    assert (process.returncode, said) == (143, "terminated\n")
    assert time.monotonic() - begun < SECONDS + MARGIN / 2
