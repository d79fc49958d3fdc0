"""SIGKILL at any moment: what was acknowledged is there and whole, and nothing else is in the way."""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from numbered import filled, save_step

import rehead
from rehead.checkpoint import newest_step
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.model import build
from rehead.system.aside import ASIDE
from rehead.tokenizer import train

publishing = sys.modules["rehead.checkpoint.files.publish"]
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def kills(few, many):
    return pytest.mark.parametrize(
        "kills",
        [
            few,
            pytest.param(many, marks=[pytest.mark.slow, pytest.mark.reliability, pytest.mark.timeout(900)]),
        ],
    )


def save_large(run, step):
    """A checkpoint that is large enough to be killed inside; then drop all but the newest two, as a trainer does."""
    save_step(run, step, n_more=4, n_repeat=10_000)
    shutil.rmtree(run / "checkpoints" / f"step-{step - 2:06d}", ignore_errors=True)


def save_over(run, step):
    rehead.save(filled(step), run / "model", overwrite=True)


def save_for_ever(save, run, step, acknowledge):
    try:
        while True:
            save(run, step)
            os.write(acknowledge, step.to_bytes(8, "little"))
            step += 1
    finally:
        os._exit(1)


def kill_while_saving(save, run, first, n_saved, delay):
    """The last step acknowledged by a writer killed `delay` seconds after its `n_saved`-th step."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(save, run, first, writer)
    os.close(writer)
    try:
        told = [os.read(reader, 8) for _ in range(n_saved)]
        time.sleep(delay)
    finally:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(ended)
    with open(reader, "rb") as pipe:
        told.append(pipe.read())
    acknowledged = b"".join(told)
    return int.from_bytes(acknowledged[-8:], "little") if acknowledged else first - 1


def duration(save, run, step):
    begin = time.monotonic()
    save(run, step)
    return time.monotonic() - begin


@kills(20, 200)
def test_the_newest_step_is_whole(kills, tmp_path):
    run, draw = tmp_path / "run", random.Random(1)
    one_save = duration(save_large, run, 1)
    last, inside = 1, 0
    for _ in range(kills):
        delay = draw.uniform(0, one_save)
        acknowledged = kill_while_saving(save_large, run, last + 1, draw.randrange(3), delay)
        inside += any(path.name.startswith(ASIDE) for path in (run / "checkpoints").iterdir())
        newest = newest_step(run)
        last = int(newest.name.removeprefix("step-"))
        assert last >= acknowledged
        assert all((weight == last).all() for weight in rehead.load(run).parameters())
    assert last > kills / 2
    assert inside > kills / 7, "hardly a kill came inside a save"
    save_large(run, last + 1)
    assert not list((run / "checkpoints").glob(f"{ASIDE}*"))


@kills(5, 200)
@pytest.mark.parametrize("how", ["exchanged", "renamed"])
def test_a_model_that_is_replaced_keeps_its_name(how, kills, tmp_path, monkeypatch):
    if how == "renamed":

        def cannot(one, other):
            raise OSError

        monkeypatch.setattr(publishing, "exchange", cannot)
    draw, last = random.Random(2), 1
    save_over(tmp_path, 1)
    one_save = duration(save_over, tmp_path, 1)
    for _ in range(kills):
        delay = draw.uniform(0, one_save)
        acknowledged = kill_while_saving(save_over, tmp_path, last + 1, draw.randrange(3), delay)
        (last,) = {
            weight.item()
            for part in rehead.load(tmp_path / "model").parameters()
            for weight in part.flatten()
        }
        last = int(last)
        assert last >= acknowledged
    save_over(tmp_path, last + 1)
    assert os.listdir(tmp_path) == ["model"]


COMMANDS = {
    "convert": ["convert", "source", "made", "--to", "mla", "--kv-fraction", "0.5", "--allow-loss"],
    "export": ["export", "source", "made"],
}


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    options = ModelOptions(
        shape="llama", n_layer=2, n_embd=24, n_query_head=6, n_kv_head=3, head_dim=4, rope=True
    )
    rehead.save(build(options.resolve(29, 32)), Path("source"))
    torch.set_default_dtype(torch.float32)


def run_command(words):
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        try:
            os._exit(main(words))
        finally:  # never back into pytest
            os._exit(70)
    return child


@kills(3, 50)
def test_a_gguf_file_is_whole_or_not_there(kills, source):
    rehead.save(
        rehead.load("source"),
        Path("told"),
        files={"tokenizer.json": train("char", "".join(map(chr, range(64, 93)))).to_json()},
    )
    words, draw = ["export", "told", "made.gguf", "--format", "gguf"], random.Random(4)
    assert main(words) == 0  # imports what the children need
    whole = Path("made.gguf").read_bytes()
    Path("made.gguf").unlink()
    begin = time.monotonic()
    os.waitpid(run_command(words), 0)
    duration = time.monotonic() - begin
    for _ in range(kills):
        Path("made.gguf").unlink(missing_ok=True)
        child = run_command(words)
        time.sleep(draw.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not os.path.exists("made.gguf"):
            assert main(words) == 0
        assert Path("made.gguf").read_bytes() == whole
    Path("made.gguf").unlink()
    assert main(words) == 0
    assert set(os.listdir(".")) == {"source", "told", "made.gguf"}


@kills(3, 50)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_leaves_a_whole_folder_or_none(command, kills, source):
    """Nor anything that the next command does not remove; that one writes what the first would have."""
    words, draw, ends = COMMANDS[command], random.Random(3), []
    assert main(words) == 0  # imports what the children need
    begin = time.monotonic()
    shutil.rmtree("made")
    os.waitpid(run_command(words), 0)
    duration = time.monotonic() - begin
    weights = Path("made/model.safetensors").read_bytes()
    shutil.rmtree("made")
    for _ in range(kills):
        child = run_command(words)
        time.sleep(draw.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ends.append((os.path.exists("made"), any(name.startswith(ASIDE) for name in os.listdir("."))))
        if os.path.exists("made"):
            rehead.load("made")
        else:
            again = (
                ["--resume"] if any(place.is_dir() for place in Path().glob("made.unfinished/*/*")) else []
            )
            assert main([*words, *again]) == 0
        assert Path("made/model.safetensors").read_bytes() == weights
        shutil.rmtree("made")
        shutil.rmtree("made.unfinished", ignore_errors=True)  # if it was killed after all but removing that
    assert main(words) == 0
    assert {place for place in os.listdir(".") if not place.endswith(".unfinished")} == {"source", "made"}
    assert kills < 10 or sum(left for _, left in ends) > kills / 7, "hardly a kill came inside"
