"""Going on after a stop: what is not in tests/training/test_run.py."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rehead
from rehead.checkpoint.files.publish import _write_manifest
from rehead.cli import main
from rehead.config.flags import read
from rehead.errors import IntegrityError, InvalidInput
from rehead.training import train

TINY = [
    "data.path=text.txt", "data.block_size=13", "model.n_layer=2", "model.n_query_head=4", "model.n_embd=24",
    "trainer.batch_size=3", "trainer.eval_every=4", "trainer.eval_batches=1", "trainer.sample_every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, and its text."""
    place = tmp_path_factory.mktemp("trained")
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog, again and again; " * 20)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run("run", "trainer.max_iters=2")
    torch.set_default_dtype(before)
    return place


@pytest.fixture(autouse=True)
def _somewhere(trained, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def run(folder, *flags):
    return list(train(read([*TINY, f"system.work_dir={folder}", *flags])))


def losses(records):
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records if "loss" in record}


def resume(folder):
    """Go on as another process would: with a random state of its own."""
    torch.manual_seed(99)
    return losses(run(folder, "trainer.max_iters=4", "trainer.resume=True"))


def test_a_forgotten_random_state_is_noticed(monkeypatch):
    """The mutant: dropout goes on from a fresh generator."""
    whole = losses(run("whole", "trainer.max_iters=4"))
    shutil.copytree("run", "again")
    assert whole == {step: whole[step] for step in (1, 2)} | resume("run")
    monkeypatch.setattr(torch, "set_rng_state", lambda saved: None)
    assert whole != {step: whole[step] for step in (1, 2)} | resume("again")


def other(change):
    def spoil(folder):
        path = folder / "state.safetensors"
        save_file(change(load_file(path)), path)

    return spoil


def numbers(**changes):
    def spoil(folder):
        path = folder / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


M = "optimizer.exp_avg.norm.weight"
STATES = {
    "of another shape": other(lambda t: t | {M: t[M][:-1]}),
    "of another weight": other(lambda t: t | {"optimizer.exp_avg.x.weight": t[M].clone()}),
    "of another dtype": other(lambda t: t | {M: t[M].half()}),
    "of whole numbers": other(lambda t: {k: v.int() if "optimizer" in k else v for k, v in t.items()}),
    "steps of another dtype": other(lambda t: {k: v.half() if ".step." in k else v for k, v in t.items()}),
    "one moment of two": other(lambda t: {k: v for k, v in t.items() if k != M}),
    "a step per number": other(lambda t: t | {"optimizer.step.norm.weight": t[M].clone()}),
    "no optimizer": other(lambda t: {k: v for k, v in t.items() if "optimizer" not in k}),
    "no random state": other(lambda t: {k: v for k, v in t.items() if k != "rng.torch"}),
    "half a random state": other(lambda t: t | {"rng.torch": t["rng.torch"][:9]}),
    "gone": lambda folder: (folder / "state.safetensors").unlink(),
    "a pickle": lambda folder: (folder / "state.safetensors").write_bytes(b"\x80\x02." + bytes(60)),
    "a step before 0": numbers(step=-1),
    "a step of text": numbers(step="7"),
    "a step that is true": numbers(step=True),
    "no numbers": lambda folder: (folder / "state.json").unlink(),
}


@pytest.mark.parametrize("spoil", STATES.values(), ids=list(STATES))
def test_c35_a_state_that_is_not_this_models_is_refused(spoil):
    """Recorded in the manifest as if it had been written so: nothing is filled in, nothing left out."""
    newest = Path("run/checkpoints/step-000002")
    (newest / "MANIFEST.json").unlink()
    spoil(newest)
    _write_manifest(newest, 0o644)
    with pytest.raises(IntegrityError, match=r"state\.(safetensors|json)"):
        resume("run")


def test_a_copied_run_goes_on_in_its_own_folder(capsys):
    """config.yaml has the folder of the original."""
    for command in (["train", *TINY, "system.work_dir=one/run"], ["train", "system.work_dir=one/run"]):
        if command[1:] != ["system.work_dir=one/run"]:
            assert main([*command, "trainer.max_iters=2"]) == 0
            shutil.copytree("one/run", "out/run")
    assert main(["train", "trainer.resume=True", "trainer.max_iters=3"]) == 0  # out/run is the default
    assert [place.name for place in Path("one/run/checkpoints").iterdir()] == ["step-000002"]
    assert Path("out/run/checkpoints/step-000003").is_dir()
    shutil.move("one/run", "two")
    assert main(["train", "system.work_dir=two", "trainer.resume=True", "trainer.max_iters=3"]) == 0
    assert Path("two/checkpoints/step-000003").is_dir()


@pytest.mark.parametrize("damage", ["tokens", "config", "link"])
def test_a_damaged_run_is_evaluated_all_the_same(damage, capsys):
    """Whether the text was trained on is unknown then: no reason to throw away what was measured."""
    shutil.copytree("run", "damaged")
    tokens = Path("damaged/tokens.bin")
    if damage == "tokens":
        tokens.write_bytes(b"\xff" * 200)
    elif damage == "link":
        tokens.unlink()
        tokens.symlink_to(Path("run/tokens.bin").resolve())
    else:
        config = Path("damaged/config.yaml")
        config.write_text(config.read_text().replace("block_size: 13", "block_size: many"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert main(["eval", "damaged", "--data", "text.txt", "--length", "13", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["contains_training_text"] is None
    assert found["loss"] > 0
    assert "it is unknown whether the model was trained on this text" in said.err + " ".join(
        str(one.message) for one in told
    )


@pytest.mark.filterwarnings("ignore:licence and base model are not passed on")
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_card_that_is_no_file_stops_nothing(kind):
    place = Path("started")
    run("from", f"model.pretrained_folder={Path('run').resolve()}", "trainer.max_iters=1")
    shutil.move("from", place)
    card = place / "checkpoints/step-000001/README.md"
    card.unlink()
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("nowhere"), "folder": Path.mkdir}[kind](card)
    run(
        place,
        f"model.pretrained_folder={Path('run').resolve()}",
        "trainer.max_iters=2",
        "trainer.resume=True",
    )
    assert (place / "checkpoints/step-000002").is_dir()


@pytest.mark.parametrize("place", ["corpus/out/run", "corpus"])
def test_what_rehead_wrote_in_the_folder_of_the_text_is_no_text(place):
    """Samples of the run itself, and cards of models; other texts in folders of the same names are the user's."""
    Path("corpus/samples").mkdir(parents=True)
    shutil.move("text.txt", "corpus/text.txt")
    Path("corpus/samples/mine.txt").write_text(Path("corpus/text.txt").read_text()[:50])
    others = [flag for flag in TINY if not flag.startswith(("data.path", "trainer.sample_every"))]

    def run(folder, *flags):
        words = ["data.path=corpus", "trainer.sample_every=1", "trainer.sample_tokens=2", *flags]
        return list(train(read([*others, f"system.work_dir={folder}", *words])))

    run(place, "trainer.max_iters=1")
    rehead.save(rehead.load(place), "corpus/out/model", files={"CONVERSION.md": "# A model"})
    assert list(Path(place, "samples").glob("*.txt"))
    run(place, "trainer.max_iters=2", "trainer.resume=True")
    start, *_ = run("other", "trainer.max_iters=0")
    mine = [Path("corpus", name).read_text() for name in ("samples/mine.txt", "text.txt")]
    assert start["train_tokens"] + start["val_tokens"] == len("\n\n".join(mine))


def test_samples_are_not_written_through_a_link(tmp_path):
    Path("elsewhere").mkdir()
    Path("linked").mkdir()
    Path("linked/samples").symlink_to(Path("elsewhere").resolve())
    with pytest.raises(InvalidInput, match="linked/samples is a link"):
        run("linked", "trainer.max_iters=1")
    assert not list(Path("elsewhere").iterdir())
