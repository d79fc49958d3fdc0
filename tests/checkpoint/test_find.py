"""Which folder a path means."""

import json
import os
import shutil
import time
import warnings
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

import rehead
from rehead.checkpoint import find, newest_step, publish, read_at, resolve
from rehead.checkpoint.find import run_data, steps
from rehead.errors import IntegrityError, InvalidInput
from rehead.model import both_seen

publishing = import_module("rehead.checkpoint.files.publish")  # of which the function hides the name


def save(folder, value=0.0):
    model = both_seen()
    model.head.bias.data.fill_(value)
    rehead.save(model, folder)


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints 9, 10 and 200, which hold their number, and other things."""
    for step in (200, 9, 10):
        save(tmp_path / "run" / "checkpoints" / f"step-{step:06d}", step)
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in (
        "step-000300-old",
        "xstep-000400",
        "step-",
        "step-abc",
        ".tmp-step-000500-x",
        "step--1",
        "step-１",
    ):
        shutil.copytree(checkpoints / "step-000200", checkpoints / name)
    (tmp_path / "run" / "config.yaml").write_text("")
    return tmp_path / "run"


def flip(folder, name="model.safetensors"):
    whole = bytearray((folder / name).read_bytes())
    whole[-1] ^= 1
    (folder / name).write_bytes(whole)


DAMAGE = {
    "bit flip": flip,
    "cut short": lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100),
    "file missing": lambda folder: (folder / "config.json").unlink(),
    "manifest missing": lambda folder: (folder / "MANIFEST.json").unlink(),
    "manifest empty": lambda folder: (folder / "MANIFEST.json").write_text(""),
    "everything missing": lambda folder: [path.unlink() for path in folder.iterdir()],
}


def test_steps_are_ordered_by_number(run):
    names = ["step-000009", "step-000010", "step-000200", "step-300", "step-1000000"]
    for name in names[-2:]:
        save(run / "checkpoints" / name)
    assert [folder.name for _, folder in steps(run)] == names
    assert all(one < other for (one, _), (other, _) in pairwise(steps(run)))


def test_the_newest_step_is_the_highest_not_the_latest_written(run):
    with warnings.catch_warnings(action="error"):
        assert newest_step(run).name == "step-000200"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_step_is_skipped_with_a_warning(damage, run):
    DAMAGE[damage](run / "checkpoints" / "step-000200")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: .*step-000200") as caught:
        assert newest_step(run).name == "step-000010"
    assert len(caught) == 1


def test_several_damaged_steps_are_skipped(run):
    for name in ("step-000200", "step-000010"):
        flip(run / "checkpoints" / name)
    with pytest.warns(UserWarning, match="skipped") as caught:
        assert newest_step(run).name == "step-000009"
    assert len(caught) == 2


def test_no_step_at_all(run, tmp_path):
    for folder in (run / "checkpoints").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    assert newest_step(run) is None
    assert newest_step(tmp_path / "nothing") is None
    with pytest.raises(InvalidInput, match="is a run without a good checkpoint yet: train it further"):
        resolve(run)


def test_a_run_folder_means_its_newest_good_step(run):
    assert [rehead.load(folder).head.bias.item() for _, folder in steps(run)] == [9, 10, 200]
    assert rehead.load(run).head.bias.item() == 200
    flip(run / "checkpoints" / "step-000200")
    with pytest.warns(UserWarning, match="skipped"):
        assert rehead.load(run).head.bias.item() == 10


@pytest.mark.parametrize("where", ["require_regular", "sha256", "strict_json"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_retired_while_it_is_checked_is_left_for_the_next(where, call, run, monkeypatch):
    """As a run that saves does it, at any moment between two looks at the same file."""
    real, calls, newest = getattr(publishing, where), [], run / "checkpoints" / "step-000200"

    def retire(*arguments):
        calls.append(arguments)
        if len(calls) == call and newest.exists():
            newest.rename(newest.with_name(".tmp-step-000200"))
        return real(*arguments)

    monkeypatch.setattr(publishing, where, retire)
    found = read_at(run, lambda folder: rehead.load(folder).head.bias.item())
    assert found == (200 if len(calls) < call else 10)


def test_a_listing_that_misses_what_is_renamed_is_made_again(run, monkeypatch):
    real, answers = find.steps, [[], [], []]
    monkeypatch.setattr(find, "steps", lambda run: answers.pop() if answers else real(run))
    assert newest_step(run).name == "step-000200"


def test_a_link_out_of_a_step_is_refused_not_skipped(run, tmp_path):
    """Somebody put it there; training on from an older step would hide it."""
    weights = run / "checkpoints" / "step-000200" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(InvalidInput, match=r"step-000200/model\.safetensors is a link out of its folder"):
        newest_step(run)


@pytest.mark.mistyped
@pytest.mark.parametrize("path", [3, None, b"model", ["model"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(
        InvalidInput, match=r"path is .* \((int|NoneType|bytes|list)\): expected a text or a pathlib"
    ):
        rehead.load(path)


def test_a_work_folder_of_mingpt_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.pt").write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / "model.pt"):
        with pytest.raises(InvalidInput, match=r"is a work folder of minGPT.*model\.pt is a pickle"):
            resolve(path)
    save(tmp_path / "model")
    (tmp_path / "model" / "model.pt").write_bytes(b"\x80\x02")
    assert resolve(tmp_path / "model") == tmp_path / "model"


def test_a_run_names_its_text(run, tmp_path):
    options = "system:\ndata:\n  path: mine.txt\n  block_size: 7\nmodel:\ntrainer:\n"
    (run / "config.yaml").write_text(options)
    for path in (run, run / "checkpoints" / "step-000010"):
        assert (run_data(path).path, run_data(path).block_size) == ("mine.txt", 7)
    save(tmp_path / "model")
    (tmp_path / "model" / "config.yaml").write_text("data: {path: secret.txt}")
    assert run_data(tmp_path / "model") is None
    elsewhere = tmp_path / "elsewhere.yaml"
    (run / "config.yaml").rename(elsewhere)
    (run / "config.yaml").symlink_to(elsewhere)
    with pytest.raises(InvalidInput, match=r"config\.yaml is a link out of its folder"):
        run_data(run)


@pytest.mark.parametrize("name", ["llama", "step-000010"])
def test_a_config_yaml_of_another_program_says_nothing_of_a_model(name, tmp_path):
    """Hydra, NeMo and torchtune write one beside a folder called checkpoints."""
    save(tmp_path / "project" / "checkpoints" / name)
    (tmp_path / "project" / "config.yaml").write_text("lr: 0.1\ndata:\n  block_size: 4\n")
    assert run_data(tmp_path / "project" / "checkpoints" / name) is None


def test_a_step_belongs_to_its_run_from_wherever_it_is_named(run, monkeypatch):
    (run / "config.yaml").write_text("system:\ndata:\n  block_size: 7\nmodel:\ntrainer:\n")
    monkeypatch.chdir(run / "checkpoints")
    assert run_data(Path("step-000200")).block_size == 7
    monkeypatch.chdir("step-000200")
    assert run_data(Path()).block_size == 7


def test_a_named_step_is_that_step_or_an_error(run):
    step = run / "checkpoints" / "step-000009"
    assert rehead.load(step).head.bias.item() == 9
    flip(step)
    with pytest.raises(IntegrityError, match=r"step-000009/model\.safetensors is damaged"):
        rehead.load(step)


def test_a_model_folder_means_itself(run):
    step = run / "checkpoints" / "step-000009"
    assert resolve(step) == step


def test_a_step_without_a_model_is_no_model(tmp_path):
    with publish(tmp_path / "run" / "checkpoints" / "step-000001") as aside:
        (aside / "state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(InvalidInput, match=r"config\.json"):
        rehead.load(tmp_path / "run")


def test_a_run_is_hashed_once_until_it_changes(run, monkeypatch):
    """A plan asks several times which checkpoint is the newest; loading it hashes what it reads."""
    old = time.time() - 60
    for file in (run / "checkpoints").rglob("*"):
        os.utime(file, (old, old))
    hashed, real = [], publishing.sha256
    monkeypatch.setattr(publishing, "sha256", lambda path: (hashed.append(path.name), real(path))[1])
    assert {resolve(run).name for _ in range(3)} == {"step-000200"}
    assert sorted(hashed) == sorted(set(hashed)) != []
    hashed.clear()
    flip(run / "checkpoints" / "step-000200")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert resolve(run).name == "step-000010"
    assert hashed


def test_a_checkpoint_that_was_just_written_is_hashed_each_time(run, monkeypatch):
    """Two changes within a tick of the clock have one time stamp."""
    hashed, real = [], publishing.sha256
    monkeypatch.setattr(publishing, "sha256", lambda path: (hashed.append(path.name), real(path))[1])
    monkeypatch.setattr("rehead.checkpoint.find.SETTLED", 10**12)  # nanoseconds
    os.utime(run / "checkpoints" / "step-000200" / "config.json")
    assert {resolve(run).name for _ in range(3)} == {"step-000200"}
    assert len(hashed) == 3 * len(set(hashed))


def test_a_new_file_beside_a_model_is_no_reason_to_read_it_again(run):
    """An editor's file, a log: the model is the same."""
    readings = []

    def read(folder):
        readings.append(folder)
        (folder / f"notes-{len(readings)}.swp").write_text("")
        return len(readings)

    assert read_at(run / "checkpoints" / "step-000200", read) == 1


def test_a_model_that_is_removed_and_written_anew_is_read_anew(tmp_path):
    """Its files may get the numbers of the removed ones, which a file system uses again."""
    save(tmp_path / "model", 1.0)
    save(tmp_path / "other", 2.0)
    for name in ("model", "other"):
        (tmp_path / name / "MANIFEST.json").unlink()
    readings = []

    def read(folder):
        readings.append(folder)
        first = (folder / "config.json").read_bytes()
        if len(readings) == 1:
            for file in list(folder.iterdir()):
                file.unlink()
            for file in (tmp_path / "other").iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        return first, (folder / "model.safetensors").read_bytes()

    _, weights = read_at(tmp_path / "model", read)
    assert len(readings) == 2
    assert weights == (tmp_path / "other" / "model.safetensors").read_bytes()


def test_a_small_model_that_changes_often_is_read_between_two_changes(run):
    """A writer beside the reader, on one processor, can spoil one reading after another."""
    readings = []

    def read(folder):
        readings.append(folder)
        if len(readings) < 50:
            (folder / "new").write_text("{}")
            (folder / "new").rename(folder / "config.json")
            os.utime(folder, ns=(len(readings), len(readings)))  # however coarse the file system's clock is
        return len(readings)

    assert read_at(run / "checkpoints" / "step-000200", read) == 50


def test_a_model_that_changes_whenever_it_is_read_is_an_error(run, monkeypatch):
    monkeypatch.setattr(find, "PATIENCE", 0)
    readings = []

    def read(folder):
        readings.append(folder)
        (folder / "new").write_text("{}")
        (folder / "new").rename(folder / "config.json")

    with pytest.raises(IntegrityError, match="step-000200 changed while it was read"):
        read_at(run / "checkpoints" / "step-000200", read)
    assert len(readings) == 5
