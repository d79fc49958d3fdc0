"""Checkpoints that are written while training goes on: the same files as those that training waits for."""

import errno
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from rehead.checkpoint import newest_step, own, resolve
from rehead.checkpoint.files.deferred import Deferred
from rehead.config.flags import read
from rehead.errors import Interrupted, NumericError, ResourceError
from rehead.model import build, skeleton
from rehead.training import train
from rehead.training.saving import Snapshot

MODELS = {
    "gqa": ["model.n_layer=2", "model.n_query_head=4", "model.n_kv_head=2", "model.rope=True"],
    "tied llama": [
        "model.shape=llama",
        "model.n_layer=1",
        "model.n_query_head=4",
        "model.tie_embeddings=True",
    ],
    "rnn": ["model.type=rnn"],
}
BESIDE = "trainer.save_async=True"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog, again and again; " * 20)


def options(place, *flags, model="gqa"):
    """One that saves every three of twelve steps, but for `flags`."""
    common = [
        "data.path=text.txt",
        "data.block_size=13",
        "model.n_embd=24",
        f"system.work_dir={place}",
        *MODELS[model],
    ]
    few = [
        "max_iters=12",
        "batch_size=3",
        "eval_every=6",
        "eval_batches=1",
        "sample_every=0",
        "save_every=3",
        "keep=9",
    ]
    given = {flag.partition("=")[0] for flag in flags}
    others = [flag for flag in (f"trainer.{one}" for one in few) if flag.partition("=")[0] not in given]
    return read([*common, *others, *flags])


def files(place):
    folder = Path(place, "checkpoints")
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("model", MODELS)
def test_the_files_are_the_same(model):
    one, two = list(train(options("one", model=model))), list(train(options("two", BESIDE, model=model)))
    assert files("one") == files("two")
    saved = [
        [record["step"] for record in records if record.get("event") == "save"] for records in (one, two)
    ]
    assert saved == [[3, 6, 9, 12]] * 2
    assert len({Path(name).parent for name in files("two")}) == 4


@pytest.fixture
def held(monkeypatch):
    """The file of step 6 is written only once this is set."""
    event, write = threading.Event(), Snapshot.write

    def late(snapshot, folder):
        if snapshot.numbers["step"] == 6:
            assert event.wait(20)
        write(snapshot, folder)

    monkeypatch.setattr(Snapshot, "write", late)
    return event


def test_training_goes_on_and_changes_nothing_of_what_is_saved(held):
    """A save is told of when it is there; the next one waits for it."""
    held.set()
    list(train(options("one", "trainer.save_every=6")))
    held.clear()
    order = []
    for record in train(options("two", "trainer.save_every=6", BESIDE)):
        order.append(record.get("event") or record["step"])
        if record["step"] == 9:
            assert newest_step(Path("two")) is None
            held.set()
    assert files("one") == files("two")
    assert order.index("save") > order.index(9)
    assert order.count("save") == 2


def test_what_goes_wrong_ends_the_run_and_keeps_what_was_saved(monkeypatch):
    write = Snapshot.write

    def full(snapshot, folder):
        if snapshot.numbers["step"] == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(snapshot, folder)

    monkeypatch.setattr(Snapshot, "write", full)
    with pytest.raises(
        ResourceError, match=r"step-000006: No space left.* Continue with trainer.resume=True then"
    ):
        list(train(options("one", BESIDE)))
    assert resolve(Path("one")).name == "step-000003"
    monkeypatch.setattr(Snapshot, "write", write)
    list(train(options("one", BESIDE, "trainer.resume=True")))
    list(train(options("two")))
    assert files("one") == files("two")


def test_a_signal_waits_for_what_is_being_written(held):
    def interrupted():
        for record in train(options("one", BESIDE)):
            if record["step"] == 8 and "loss" in record:
                threading.Timer(0.3, held.set).start()
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped at step 8 and saved"):
        interrupted()
    assert [place.name[5:] for place in sorted(Path("one/checkpoints").iterdir())] == [
        "000003",
        "000006",
        "000008",
    ]
    list(train(options("one", BESIDE, "trainer.resume=True")))
    list(train(options("two")))
    mine, wanted = files("one"), files("two")
    assert {name: mine[name] for name in wanted} == wanted


def test_a_loss_that_is_not_finite_is_told_after_what_is_being_written(held, monkeypatch):
    from rehead.training.loop import Trainer

    advance = Trainer.advance

    def broken(trainer, *given):
        if trainer.step == 7:
            threading.Timer(0.3, held.set).start()
            raise NumericError("not finite.")
        return advance(trainer, *given)

    monkeypatch.setattr(Trainer, "advance", broken)
    with pytest.raises(NumericError, match="resumes from step 6"):
        list(train(options("one", BESIDE)))


def test_a_copy_gathers_what_is_sharded_at_once():
    """Each tensor once, as the other processes take part only then."""
    whole = build(options("one").model.resolve(9, 13))
    model, gathered = skeleton(whole.config), []

    def sharded(name, value):
        return Deferred(lambda: gathered.append(name) or value, value.shape, value.dtype)

    weights = {name: sharded(name, value.detach()) for name, value in whole.named_parameters()}
    own.assign(model, weights, "the model", in_memory=False)
    tensors = {"moment": sharded("moment", torch.ones(3))}
    copy = Snapshot(model=model, tensors=tensors, numbers={}, texts={}).copied()
    assert sorted(gathered) == sorted([*weights, "moment"])
    assert type(copy.tensors["moment"]) is torch.Tensor
    for name, weight in copy.model.named_parameters():
        assert type(weight.data) is torch.Tensor
        assert torch.equal(weight, whole.get_parameter(name))
        assert weight.data_ptr() != whole.get_parameter(name).data_ptr()
    assert len(gathered) == len(weights) + 1
