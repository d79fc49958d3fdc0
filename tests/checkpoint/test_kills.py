"""SIGKILL at any moment: what was acknowledged is there and whole."""

import os
import random
import shutil
import signal
import time

import pytest

import rehead
from rehead.checkpoint import newest_step, publish
from rehead.checkpoint.files.publish import recover
from rehead.model import both_seen
from rehead.system.aside import ASIDE


def save_step(run, step):
    """A checkpoint whose every weight is its number, large enough to be killed inside."""
    model = both_seen()
    for weight in model.parameters():
        weight.data.fill_(step)
    with publish(run / "checkpoints" / f"step-{step:06d}") as aside:
        rehead.checkpoint.own.write(model, aside, {f"more-{i}.json": f"{step}" * 10_000 for i in range(4)})


def save_for_ever(run, step, acknowledge):
    """What a trainer does: save, tell, drop all but the newest two."""
    try:
        recover(run / "checkpoints")
        while True:
            save_step(run, step)
            os.write(acknowledge, step.to_bytes(8, "little"))
            shutil.rmtree(run / "checkpoints" / f"step-{step - 2:06d}", ignore_errors=True)
            step += 1
    finally:
        os._exit(1)


def kill_while_saving(run, first, n_saved, delay):
    """The last step acknowledged by a writer killed `delay` seconds after its `n_saved`-th step."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(run, first, writer)
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_killed_at_any_moment_the_newest_step_is_whole(kills, tmp_path):
    run, draw = tmp_path / "run", random.Random(1)
    (run / "checkpoints").mkdir(parents=True)
    start = time.monotonic()
    save_step(run, 1)
    one_save = time.monotonic() - start
    last, inside = 1, 0
    for _ in range(kills):
        acknowledged = kill_while_saving(run, last + 1, draw.randrange(3), draw.uniform(0, one_save))
        inside += any(path.name.startswith(ASIDE) for path in (run / "checkpoints").iterdir())
        newest = newest_step(run)
        last = int(newest.name.removeprefix("step-"))
        assert last >= acknowledged
        assert all((weight == last).all() for weight in rehead.load(run).parameters())
    assert last > kills / 2
    assert inside > kills / 7, "hardly a kill came inside a save"
