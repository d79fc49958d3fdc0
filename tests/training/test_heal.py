"""Healing: a converted model learns back what it lost, and its certificate says so."""

import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import rehead
from rehead.checkpoint import resolve
from rehead.cli import main
from rehead.config import ModelOptions, TrainerOptions
from rehead.config.flags import read
from rehead.conversion.fit import teaching
from rehead.conversion.history import exported_of
from rehead.errors import ReheadError, ResourceError
from rehead.measure.forecast import step_bytes
from rehead.system import memory
from rehead.training import frozen, run, start, train
from rehead.training import heal as heal_module
from rehead.training.heal import _usual_batch

TINY = [
    "data.path=input.txt",
    "data.block_size=16",
    "model.n_layer=2",
    "model.n_query_head=4",
    "model.n_embd=24",
    "trainer.batch_size=8",
    "trainer.max_iters=40",
    "trainer.learning_rate=1e-2",
    "trainer.eval_batches=1",
    "trainer.sample_every=0",
    "trainer.device=cpu",
]
QUICK = ["trainer.batch_size=8", "trainer.eval_batches=1", "trainer.device=cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained source, and what became of it as MQA."""
    place = tmp_path_factory.mktemp("heal")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        torch.set_default_dtype(torch.float32)
        Path("input.txt").write_text(
            "The quality of mercy is not strain'd, it droppeth as the gentle rain\n" * 60
        )
        assert main(["train", *TINY, "system.work_dir=source"]) == 0
        assert main(["convert", "source", "mqa", "--to", "mqa", "--method", "mean", "--allow-loss"]) == 0
    return place


@pytest.fixture(autouse=True)
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)
    torch.set_default_dtype(torch.float32)


def heal(*words):
    return main(["heal", "mqa", "--teacher", "source", *QUICK, *words])


def certificate(folder):
    return json.loads((resolve(Path(folder)) / "conversion.json").read_text())


def test_a_text_that_the_source_was_not_trained_on_has_to_be_named(tmp_path, capfd):
    """Its config.yaml may name any file of this machine, and a healed model tells what it read."""
    shutil.copytree("source", tmp_path / "source")
    (tmp_path / "secret.txt").write_text(Path("input.txt").read_text() + "secret")
    config = tmp_path / "source" / "config.yaml"
    config.write_text(re.sub("  path: .*", f"  path: {tmp_path / 'secret.txt'}", config.read_text()))
    words = ["heal", "mqa", "--teacher", str(tmp_path / "source"), *QUICK, "trainer.max_iters=1"]
    assert main([*words, "system.work_dir=never"]) == 2
    said = capfd.readouterr().err
    assert (
        f"source/config.yaml names {tmp_path}/secret.txt, another text than the one it was trained on" in said
    )
    assert "Name the text to heal on: data.path=TEXT" in said
    assert not Path("never").exists()
    assert main([*words, f"data.path={tmp_path}/secret.txt", "system.work_dir=named"]) == 0


def test_what_was_lost_comes_back_and_the_certificate_says_how_far(capsys):
    assert heal("trainer.max_iters=60", "system.work_dir=healed", "trainer.learning_rate=3e-3") == 0
    printed = capsys.readouterr().out
    before, after = certificate("mqa"), certificate("healed")
    assert after["logits"]["kl"] < 0.2 * before["logits"]["kl"]
    assert after["exact"] is False
    assert after["loss"][1] < before["loss"][1]
    (entry,) = after["healing"]
    assert (entry["steps"], entry["teacher"], entry["batch_tokens"]) == (60, "source", 8 * 16)
    assert entry["kl"] == [before["logits"]["kl"], after["logits"]["kl"]]
    assert f"{after['loss'][1]:.4f}" in printed
    page = (resolve(Path("healed")) / "CONVERSION.md").read_text()
    assert "## Healing" in page
    assert "before it was healed" in page
    assert rehead.load("healed").config == rehead.load("mqa").config


def test_the_length_of_the_blocks(capsys):
    """The teacher's own; or as given, and then only once."""
    for words, size in (((), 16), (("--length", "5"), 5), (("data.block_size=7",), 7)):
        folder = f"length-{size}"
        assert heal("trainer.max_iters=1", f"system.work_dir={folder}", *words) == 0
        assert f"block_size: {size}\n" in Path(folder, "config.yaml").read_text()
        assert certificate(folder)["healing"][0]["batch_tokens"] == 8 * size
    capsys.readouterr()
    assert heal("data.block_size=7", "--length", "5") == 2
    assert "data.block_size is given twice" in capsys.readouterr().err
    assert heal("--length", "17") == 2
    assert "--length 17: the model reads at most block_size=16" in capsys.readouterr().err


def test_the_batch_follows_from_the_blocks_however_they_are_given(monkeypatch):
    monkeypatch.setattr(heal_module, "STEP_TOKENS", 48)
    for changes, length in (([], 4), (["data.block_size=4"], None)):
        options = heal_module.heal_options(Path("mqa"), Path("source"), changes, length)
        assert (options.data.block_size, options.trainer.batch_size) == (4, 12)
    with pytest.raises(ReheadError, match=r"data.block_size=17 is above the 16"):
        list(train(heal_module.heal_options(Path("mqa"), Path("source"), ["data.block_size=17"])))
    with pytest.raises(ReheadError, match=r"data.block_size=0: a block has at least 1 token"):
        heal_module.heal_options(Path("mqa"), Path("source"), ["data.block_size=0"])


def test_the_tokenizer_is_the_models(capsys):
    for words in ((), ("--teach", "1")):
        assert heal("data.tokenizer=byte", "system.work_dir=bytes", *words) == 2
        assert (
            "data.tokenizer=byte: a run that starts from mqa reads its text with" in capsys.readouterr().err
        )
        assert not Path("bytes").exists()
        assert not Path("bytes-taught").exists()


def test_only_attentions_learn_and_the_teacher_shares_the_rest(monkeypatch):
    """The other weights stay bit for bit; recomputing changes nothing; a resumed run is the same."""
    trainers = []
    real = run.Trainer
    monkeypatch.setattr(run, "Trainer", lambda *a: trainers.append(real(*a)) or trainers[-1])
    words = ("trainer.train=attention", "trainer.schedule=constant", "trainer.learning_rate=1e-2")
    assert heal(*words, "trainer.max_iters=4", "system.work_dir=some") == 0
    student, teacher = trainers[0].model, trainers[0].teacher
    for name, weight in student.named_parameters():
        assert weight.requires_grad == (".self_attn." in name)
        shared = weight is dict(teacher.named_parameters()).get(name)
        assert shared == (not weight.requires_grad)
    before, after = rehead.load("mqa").state_dict(), rehead.load("some").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".self_attn." in name}
    assert heal(*words, "trainer.max_iters=4", "system.work_dir=again", "trainer.recompute=True") == 0
    assert heal(*words, "trainer.max_iters=2", "system.work_dir=two") == 0
    assert heal("trainer.resume=True", "trainer.max_iters=4", "system.work_dir=two") == 0
    for other in ("again", "two"):
        assert all(
            torch.equal(after[name], weight) for name, weight in rehead.load(other).state_dict().items()
        )
    assert heal("trainer.resume=True", "trainer.train=all", "trainer.max_iters=5", "system.work_dir=two") == 2


def test_a_teacher_of_other_weights_keeps_its_own():
    """An embedding that differs is not shared, and what the teacher says does not change."""
    student, teacher = rehead.load("mqa"), rehead.load("source")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        student.embed_tokens.weight[3] += 1
        wanted = teacher(ids)
    frozen.freeze(student, TrainerOptions(train="attention"))
    lazy = rehead.load("source", in_memory=False)
    frozen.share_frozen(student, lazy)
    assert lazy.embed_tokens.weight is not student.embed_tokens.weight
    assert lazy.layers[0].mlp.up_proj.weight is student.layers[0].mlp.up_proj.weight
    assert torch.equal(lazy(ids), wanted)


def test_long_blocks_are_recomputed_and_batches_follow_the_memory(monkeypatch):
    large = ModelOptions(n_layer=16, n_embd=2048, n_query_head=32).resolve(1000, 2048)
    small = ModelOptions(n_layer=2, n_embd=24, n_query_head=4).resolve(1000, 2048)
    assert _usual_batch(small, 16) == {"batch_size": 64}
    monkeypatch.setattr("rehead.training.heal.available_memory", lambda: 2**35)
    found = _usual_batch(large, 2048)
    assert found["recompute"]
    assert 1 <= found["batch_size"] < 8
    assert step_bytes(large, found["batch_size"], 2048, recompute=True) <= 2**32 < step_bytes(large, 8, 2048)
    monkeypatch.setattr("rehead.training.heal.available_memory", lambda: 2**30)
    assert _usual_batch(large, 2048) == {"batch_size": 1, "recompute": True}


def test_nothing_is_recomputed_where_the_given_batch_fits_or_the_step_is_compiled(monkeypatch):
    config = rehead.load("mqa").config
    monkeypatch.setattr(heal_module, "STEP_BYTES", step_bytes(config, 1, 16))
    for flags, batch_size, recompute in (
        ([], 64, True),
        (["trainer.batch_size=1"], 1, False),
        (["trainer.batch_size=2"], 2, True),
        (["trainer.compile=True"], 1, False),
    ):
        found = heal_module.heal_options(Path("mqa"), Path("source"), flags).trainer
        assert found.recompute is recompute, flags
        assert found.batch_size <= batch_size


def test_processes_of_torchrun_choose_the_same_batch_and_can_share_it(monkeypatch):
    large = ModelOptions(n_layer=32, n_embd=960, n_query_head=15, shape="llama").resolve(49_152, 2048)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    found = set()
    for free in (2**30, 2**36):
        monkeypatch.setattr("rehead.training.heal.available_memory", lambda free=free: free)
        found.add(json.dumps(_usual_batch(large, 2048)))
    assert len(found) == 1
    assert json.loads(found.pop())["batch_size"] % 2 == 0


@pytest.mark.parametrize("flag", ["train=attention", "recompute=True"])
def test_an_rnn_has_no_attention_to_train(flag, capsys):
    words = ["data.path=input.txt", "model.type=rnn", "system.work_dir=rnn", f"trainer.{flag}"]
    assert main(["train", *words, "trainer.max_iters=1"]) == 2
    assert f"trainer.{flag} needs a model.type=gpt" in capsys.readouterr().err


def test_interrupted_and_resumed_is_uninterrupted():
    assert heal("trainer.max_iters=6", "system.work_dir=whole", "trainer.schedule=constant") == 0
    assert heal("trainer.max_iters=4", "system.work_dir=parts", "trainer.schedule=constant") == 0
    assert main(["heal", "mqa", "--teacher", "source", "system.work_dir=parts", "trainer.resume=True",
                 "trainer.max_iters=6"]) == 0  # fmt: skip
    one, other = (rehead.load(name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_the_text_alone_can_teach():
    """distillation=0: the losses of the steps are those of the text, not divergences."""
    assert heal("trainer.max_iters=2", "system.work_dir=plain", "trainer.distillation=0") == 0
    assert heal("trainer.max_iters=2", "system.work_dir=taught") == 0

    def first(folder):
        lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        return next(line["loss"] for line in lines if "loss" in line)

    assert first("plain") > first("taught") > 0


def test_flags_that_would_do_nothing(capsys):
    """As typed; a run that began with one is resumed."""
    train = ["train", *TINY, "system.work_dir=nothing"]
    rate = "trainer.min_learning_rate=1e-05"
    for words, said in (
        ([*train, rate], f"{rate} has no effect with trainer.schedule=constant. Leave it out, or use"),
        ([*train, "trainer.distillation=0.5"], "trainer.distillation=0.5 has no effect without a teacher."),
        (
            [*train, "model.type=rnn", "model.attn_pdrop=0.2"],
            "model.attn_pdrop=0.2 has no effect with model.type=rnn. Leave it out, or use model.embd_pdrop.",
        ),
        (
            [*train, "model.type=rnn"],
            "model.n_query_head=4 has no effect with model.type=rnn",
        ),
        (["heal", "mqa", "--teacher", "source", rate, "trainer.schedule=constant"], f"{rate} has no effect"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
        assert not Path("nothing").exists()
    assert main([*train, rate, "trainer.schedule=cosine"]) == 0
    config = Path("nothing/config.yaml")
    config.write_text(config.read_text().replace("schedule: cosine", "schedule: constant"))
    assert main(["train", "system.work_dir=nothing", "trainer.resume=True"]) == 0


def test_the_run_that_was_exported_heals_what_was_made_of_the_export(capsys):
    """It learnt with dropout, of which an export has none. That both are one function is not known by a sha256."""
    assert main(["train", *TINY, "model.shape=llama", "system.work_dir=dropped"]) == 0
    assert main(["export", "dropped", "stock"]) == 0
    words = ["--to", "mla", "--kv-fraction", "0.5", "--allow-loss", "--calibration", "input.txt"]
    assert main(["convert", "stock", "stock-mla", *words]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["heal", "stock-mla", "--teacher", "dropped", *QUICK, "trainer.max_iters=1"]) == 0
    assert "the trained model gets no conversion.json" in capsys.readouterr().err


def test_an_export_of_a_healing_that_did_not_end_says_what_is_missing():
    assert heal("trainer.max_iters=4", "trainer.save_every=2", "system.work_dir=halfway") == 0
    first, last = (Path(f"halfway/checkpoints/step-00000{number}") for number in (2, 4))
    with pytest.warns(UserWarning, match=r"step-000002 learnt from .*source, but has no conversion\.json"):
        assert exported_of(first, first) is None
    assert exported_of(last, last).loss is not None
    Path("halfway/config.yaml").write_text("system: {unknown: 1}\ndata: {}\nmodel: {}\ntrainer: {}\n")
    assert exported_of(first, first) is None
    assert exported_of(Path("source"), resolve(Path("source"))) is None


def test_what_cannot_be_healed(capsys):
    Path("two.txt").write_text("ab" * 400)
    others = {
        "other": {"model.n_embd": "20"},
        "heads": {"model.n_query_head": "2"},
        "few": {"data.path": "two.txt"},
    }
    for folder, changes in others.items():
        flags = dict(flag.split("=") for flag in TINY) | {"trainer.max_iters": "1"} | changes
        words = [f"{name}={value}" for name, value in flags.items()]
        assert main(["train", *words, f"system.work_dir={folder}"]) == 0
    refusals = {
        (
            "mqa",
            "other",
        ): "another model than the teacher, one with n_embd=24 where the teacher has 20: give that",
        ("mqa", "heads"): "n_query_head=4 where the teacher has 2: give that model",
        ("mqa", "few"): "was converted from another model",
        ("mqa", "nowhere"): "nowhere does not exist",
        ("nowhere", "source"): "nowhere does not exist",
    }
    for (folder, teacher), says in refusals.items():
        capsys.readouterr()
        assert main(["heal", folder, "--teacher", teacher, *QUICK]) in (2, 3)
        assert says in capsys.readouterr().err
    assert heal("system.work_dir=mqa") == 2
    assert "never touched" in capsys.readouterr().err
    assert heal("model.n_layer=3", "system.work_dir=flags") == 2
    assert "model.folder=mqa" in capsys.readouterr().err
    for flag, known in (("trainer.teacher=mqa", "--teacher source"), ("model.folder=source", "mqa")):
        assert heal(flag, "system.work_dir=twice") == 2
        assert f"{flag.split('=')[0]}: the command has {known} already" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_another_teacher(capsys):
    assert heal("trainer.max_iters=1", "system.work_dir=once") == 0
    assert main(["train", "system.work_dir=once", "trainer.resume=True", "trainer.max_iters=2",
                 "trainer.teacher=mqa"]) == 2  # fmt: skip
    assert "trainer.teacher" in capsys.readouterr().err


def test_a_teacher_may_move_but_not_change(capsys):
    """It is known by its manifest."""
    shutil.copytree("source", "there")
    first = ["heal", "mqa", "--teacher", "there", *QUICK, "system.work_dir=followed"]
    assert main([*first, "trainer.max_iters=1"]) == 0
    shutil.move("there", "moved")

    def resumed(steps, teacher):
        words = ["train", "system.work_dir=followed", "trainer.resume=True"]
        return main([*words, f"trainer.max_iters={steps}", f"trainer.teacher={teacher}"])

    assert resumed(2, "moved") == 0
    assert main(["train", "system.work_dir=moved", "trainer.resume=True", "trainer.max_iters=41"]) == 0
    capsys.readouterr()
    for other in ("moved", "null"):
        assert resumed(3, other) == 2
        said = capsys.readouterr().err
        assert "is not the model that the run to resume learned from" in said
        assert "its checkpoint of then" in said
    assert resumed(3, "moved/checkpoints/step-000040") == 0


def test_a_run_heals_the_model_that_it_began_with(capsys):
    shutil.copytree("mqa", "twin")
    assert heal("trainer.max_iters=1", "system.work_dir=one-model") == 0
    words = ["--teacher", "source", "system.work_dir=one-model", "trainer.resume=True", "trainer.max_iters=2"]
    capsys.readouterr()
    assert main(["heal", "twin", *words]) == 2
    assert f"the run in one-model heals {Path('mqa').absolute()}, not twin: give" in capsys.readouterr().err
    assert main(["heal", "mqa", *words]) == 0


def test_a_teacher_without_a_text_needs_one_only_at_the_start():
    files = {"tokenizer.json": (resolve(Path("source")) / "tokenizer.json").read_text()}
    rehead.save(rehead.load("source"), "untold", files=files)
    words = ["heal", "mqa", "--teacher", "untold", "system.work_dir=told"]
    assert main([*words, *QUICK, "trainer.max_iters=1", "data.path=input.txt"]) == 0
    assert main([*words, "trainer.max_iters=2", "trainer.resume=True"]) == 0


@pytest.mark.filterwarnings("always:.* is not the model that mqa was converted from")
def test_another_teacher_than_the_source_leaves_no_certificate(capsys):
    """Its figures would be those of the source."""
    fewer = [flag for flag in TINY if not flag.startswith(("model.n_layer", "trainer.max_iters"))]
    assert main(["train", *fewer, "model.n_layer=1", "trainer.max_iters=1", "system.work_dir=fewer"]) == 0
    given = ["model.folder=mqa", "trainer.teacher=fewer", "data.path=input.txt", "data.block_size=16"]
    assert main(["train", *given, *QUICK, "trainer.max_iters=1", "system.work_dir=led"]) == 0
    assert "fewer is not the model that mqa was converted from" in capsys.readouterr().err
    assert not (resolve(Path("led")) / "conversion.json").exists()


def test_a_source_is_not_taught_by_its_conversion(capsys):
    """The two folders swapped."""
    assert main(["heal", "source", "--teacher", "mqa", "data.path=input.txt"]) == 2
    error = capsys.readouterr().err
    assert "mqa was converted from a model like source, not source from mqa" in error
    assert "rehead heal mqa --teacher source" in error
    assert not Path("source-healed").exists()


@pytest.mark.filterwarnings("always:.* is not the model that mqa was converted from")
def test_nor_does_another_model_of_its_shape(capsys):
    """The certificate has the sha256 of the source's weights; one of before has not, and cannot tell."""
    fewer = [flag for flag in TINY if not flag.startswith("trainer.max_iters")]
    words = [*fewer, "trainer.max_iters=1", "system.seed=7", "system.work_dir=stranger"]
    assert main(["train", *words]) == 0
    weights = (resolve(Path("source")) / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert certificate("mqa")["source_sha256"] == [digest]
    assert f"sha256 {digest[:12]}...." in Path("mqa/CONVERSION.md").read_text()
    words = ["--teacher", "stranger", *QUICK, "data.path=input.txt", "trainer.max_iters=1"]
    capsys.readouterr()
    assert main(["heal", "mqa", *words, "system.work_dir=strange"]) == 0
    assert (
        "stranger is not the model that mqa was converted from, by its config and the"
        in capsys.readouterr().err
    )
    assert not (resolve(Path("strange")) / "conversion.json").exists()
    shutil.copytree("mqa", "older")
    table = certificate("older")
    del table["source_sha256"]
    Path("older/conversion.json").write_text(json.dumps(table))
    Path("older/MANIFEST.json").unlink()
    assert main(["heal", "older", *words, "system.work_dir=strange-2"]) == 0
    assert certificate("strange-2")["healing"]


def test_a_run_that_was_stopped_is_certified_at_its_last_step():
    """Where its checkpoint is that of the last step asked for."""
    words = ["trainer.save_every=2", "system.work_dir=enough"]
    assert heal(*words, "trainer.max_iters=3") == 0
    shutil.rmtree("enough/checkpoints/step-000003")
    assert heal(*words, "trainer.max_iters=2", "trainer.resume=True") == 0
    assert certificate("enough")["healing"][0]["steps"] == 2


@pytest.mark.filterwarnings("always:.* is gone, and with it")
def test_without_the_converted_model_there_is_no_certificate_and_it_is_said(capsys):
    shutil.copytree("mqa", "brief")
    words = ["--teacher", "source", *QUICK, "system.work_dir=orphan"]
    assert main(["heal", "brief", *words, "trainer.max_iters=1"]) == 0
    shutil.rmtree("brief")
    assert main(["train", "system.work_dir=orphan", "trainer.resume=True", "trainer.max_iters=2"]) == 0
    assert "brief is gone, and with it what was measured if it was converted" in capsys.readouterr().err
    assert not (resolve(Path("orphan")) / "conversion.json").exists()


def test_the_last_steps_are_saved_before_they_are_measured(monkeypatch):
    """Which takes long, and memory."""

    def full(*given):
        raise ResourceError("no memory is left.")

    words = ["trainer.max_iters=3", "trainer.save_every=3", "system.work_dir=unmeasured-yet"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "healed_files", full)
        assert heal(*words) == 5
    assert resolve(Path("unmeasured-yet")).name == "step-000003"
    assert heal(*words, "trainer.resume=True") == 0
    assert certificate("unmeasured-yet")["healing"][0]["steps"] == 3
    assert len(losses("unmeasured-yet")) == 3


@pytest.mark.parametrize("train", ["all", "attention"])
@pytest.mark.parametrize("parallel", ["none", "fsdp"])
def test_a_teacher_computes_in_float32(parallel, train):
    """As its pupil does, so that neither what is trained nor the number of processes changes what is measured."""
    rehead.save(rehead.load("source").bfloat16(), "narrow", overwrite=True)
    options = read(["trainer.teacher=narrow", f"trainer.train={train}", f"trainer.parallel={parallel}"])
    teacher = start.read_teacher(options, rehead.load("mqa"), torch.device("cpu"))
    assert {weight.dtype for weight in teacher.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("data.block_size=17", "data.block_size=17 is above the 16 of mqa"),
        ("model.attn_pdrop=0", "model.folder=mqa"),
        ("model.folder=recurrent", "trainer.train=attention needs a model.type=gpt"),
    ],
)
def test_what_the_config_refuses_is_refused_before_the_text_is_read(flag, says, monkeypatch, capsys):
    small = ["model.type=rnn", "data.path=input.txt", "trainer.max_iters=0", "trainer.sample_every=0"]
    if not Path("recurrent").exists():
        assert main(["train", *small, "system.work_dir=recurrent"]) == 0
    monkeypatch.setattr(start, "tokenize", None)
    given = {"model.folder": "mqa", "data.path": "input.txt", "data.block_size": "16"}
    given |= {"trainer.train": "attention", "system.work_dir": "early"} | dict([flag.split("=")])
    capsys.readouterr()
    assert main(["train", *(f"{name}={value}" for name, value in given.items())]) == 2
    assert says in capsys.readouterr().err


def test_a_model_too_large_to_train_is_told_a_way_out_that_there_is(monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    given = ["model.folder=mqa", "data.path=input.txt", "data.block_size=16", "system.work_dir=large"]
    assert main(["train", *given]) == 5
    assert "Where there is no --dtype, use a smaller model." in capsys.readouterr().err


@pytest.mark.filterwarnings("always:bare has no")
def test_without_a_certificate_one_is_told(capsys):
    rehead.save(
        rehead.load("source"),
        "bare",
        files={"tokenizer.json": (resolve(Path("source")) / "tokenizer.json").read_text()},
    )
    assert main(["heal", "bare", "--teacher", "source", *QUICK, "trainer.max_iters=1"]) == 0
    assert "bare has no conversion.json" in capsys.readouterr().err
    assert not (resolve(Path("bare-healed")) / "conversion.json").exists()


SPOILED = [  # what a certificate has instead, and what is said of it
    ({"format": "other"}, "expected 'rehead-"),
    ({"layers": []}, "without layers"),
    ({"logits": {}}, "lack"),
    ({"length": 0}, "length=0"),
    ({"length": 10**12}, "length=1000000000000"),
    ({"loss": 3}, "loss"),
    ({"healing": [{}]}, "missing"),
]


@pytest.mark.parametrize(
    ("change", "says", "command"),
    [*((*case, "heal") for case in SPOILED), *((*case, "train") for case in (SPOILED[0], SPOILED[-1]))],
)
def test_a_certificate_that_could_not_be_written_at_the_end_is_refused_at_the_beginning(
    change, says, command, capsys
):
    files = {name: (Path("mqa") / name).read_text() for name in ("tokenizer.json", "conversion.json")}
    files["conversion.json"] = json.dumps(json.loads(files["conversion.json"]) | change)
    rehead.save(rehead.load("mqa"), "odd", files=files, overwrite=True)
    given = ["model.folder=odd", "trainer.teacher=source", "data.path=input.txt", "data.block_size=16"]
    words = ["heal", "odd", "--teacher", "source"] if command == "heal" else ["train", *given]
    flags = [flag for flag in QUICK if flag != "--json"]
    assert main([*words, *flags, "trainer.max_iters=1", "system.work_dir=odd-run"]) == 3
    said = capsys.readouterr().err
    assert says in said
    assert not list(Path().glob("odd-run/checkpoints/*"))


@pytest.mark.filterwarnings("always:data.val_fraction=0")
def test_without_a_validation_text_there_is_no_certificate_and_it_is_said(capsys):
    assert heal("trainer.max_iters=1", "system.work_dir=unmeasured", "data.val_fraction=0") == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "warning" in line] == [
        "rehead: warning: data.val_fraction=0 leaves no text to measure the healed model on: it gets no "
        "conversion.json. Use 0.1 for one"
    ]
    assert not (resolve(Path("unmeasured")) / "conversion.json").exists()


def test_a_model_in_bfloat16_is_healed_in_float32():
    """Or most steps would be rounded away."""
    model = rehead.load("mqa").bfloat16()
    files = {name: (Path("mqa") / name).read_text() for name in ("tokenizer.json", "conversion.json")}
    rehead.save(model, "half", files=files)
    assert main(["heal", "half", "--teacher", "source", *QUICK, "trainer.max_iters=2"]) == 0
    assert rehead.load("half-healed").head.weight.dtype == torch.float32


def test_what_is_healed_in_float32_is_certified_so(capsys):
    """Of a source in bfloat16: the certificate, its page and the line that is printed have twice the bytes."""
    files = {"tokenizer.json": (resolve(Path("source")) / "tokenizer.json").read_text()}
    rehead.save(rehead.load("source").bfloat16(), "low", files=files)
    assert main(["convert", "low", "low-mqa", "--to", "mqa", "--method", "mean", "--allow-loss"]) == 0
    words = ["low-mqa", "--teacher", "low", *QUICK, "data.path=input.txt", "trainer.max_iters=1"]
    capsys.readouterr()
    assert main(["heal", *words]) == 0
    assert "KV cache      384 -> 96 bytes per token, float32 (25 %)" in capsys.readouterr().out
    before, after = certificate("low-mqa"), certificate("low-mqa-healed")
    found = [(one["dtype"], one["kv_bytes_per_token"]) for one in (before, after)]
    assert found == [("bfloat16", [192, 48]), ("float32", [384, 96])]
    page = (resolve(Path("low-mqa-healed")) / "CONVERSION.md").read_text()
    assert "weights and activations in float32" in page
    assert "384" in page


def test_no_steps_leave_a_certificate(capsys):
    """Its figures are those of the conversion, on the same text."""
    assert heal("trainer.max_iters=0", "system.work_dir=as-it-was") == 0
    before, after = certificate("mqa"), certificate("as-it-was")
    kl = f"{before['logits']['kl']:.2e}"
    assert (
        f"\nhealed        KL {kl} nats before, {kl} after 0 steps\ncertificate   as-it-was/"
        in capsys.readouterr().out
    )
    assert after["healing"][0]["steps"] == 0
    assert after["loss"] == pytest.approx(before["loss"])
    assert (resolve(Path("as-it-was")) / "CONVERSION.md").is_file()


def test_a_teacher_is_followed_without_dropout():
    """And without one there is dropout, as in any training."""
    from rehead.config import TrainerOptions
    from rehead.training.loop import Trainer

    model, teacher, ids = rehead.load("mqa"), rehead.load("source"), torch.zeros(2, 5, dtype=torch.long)
    for mode, given in ((False, teacher), (True, None)):
        Trainer(model, TrainerOptions(), given).advance(lambda: (ids, ids))
        assert model.training is mode


@pytest.fixture(autouse=True)
def untaught(here):
    for place in Path().glob("*-taught*"):
        shutil.rmtree(place)


def taught(*words):
    return main(["heal", "mla", "--teacher", "source", "--teach", "2", *QUICK, *words])


@pytest.fixture(scope="module")
def latent(trained):
    """The source as an MLA of few numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained)
        torch.set_default_dtype(torch.float32)
        words = ["--to", "mla", "--kv-fraction", "0.2", "--method", "svd", "--allow-loss"]
        assert main(["convert", "source", "mla", *words]) == 0


def losses(folder):
    """What the steps of a run minimised: the divergence from the teacher."""
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [one["loss"] for one in records if "loss" in one]


def test_two_phases_layers_first_and_then_the_predictions(latent, capsys):
    """Every attention comes nearer to its teacher's, so that the second phase starts and ends lower."""
    words = ["trainer.max_iters=5", "trainer.eval_every=5"]
    assert main(["heal", "mla", "--teacher", "source", *QUICK, *words, "system.work_dir=alone"]) == 0
    assert taught(*words, "system.work_dir=phases") == 0
    before, first, after = (certificate(name) for name in ("mla", "phases-taught", "phases"))
    assert first["teach"] == after["teach"] == 2
    assert all(layer["taught"][1] < 0.9 * layer["taught"][0] for layer in first["layers"])
    errors = [[layer["output_error"] for layer in one["layers"]] for one in (before, first)]
    assert all(taught < 0.9 * lossy for lossy, taught in zip(*errors, strict=True))
    assert first["logits"]["kl"] < 0.5 * before["logits"]["kl"]
    assert after["healing"][0]["kl"][0] == pytest.approx(first["logits"]["kl"])
    assert after["healing"][0]["kl"][1] == after["logits"]["kl"]
    alone, phases = losses("alone"), losses("phases")
    assert len(phases) == len(alone) == 5
    assert all(one < 0.5 * other for one, other in zip(phases, alone, strict=True))
    assert after["logits"]["kl"] < 0.5 * certificate("alone")["logits"]["kl"]
    assert "Taught is that error" in (resolve(Path("phases-taught")) / "CONVERSION.md").read_text()


def test_each_text_has_its_own_windows(trained):
    """Those of the conversion, and those of the lessons."""
    fitted = ["--to", "mla", "--kv-fraction", "0.2", "--allow-loss", "--length", "12"]
    assert main(["convert", "source", "mla-12", *fitted]) == 0
    lessons = ["--teach", "1", "--length", "9", *QUICK, "trainer.max_iters=1", "system.work_dir=nine"]
    assert main(["heal", "mla-12", "--teacher", "source", *lessons]) == 0
    assert [text["length"] for text in certificate("nine-taught")["calibration"]] == [None, 9]
    for folder in ("nine-taught", "nine"):
        page = (resolve(Path(folder)) / "CONVERSION.md").read_text()
        windows = re.findall(
            r"of the [\w,]+ tokens of ([^(]*) .*?in windows of (\d+)", page.partition("Fitted to")[2]
        )
        assert windows == [
            ("the training part of the run's text", "12"),
            ("the training part of the healing text", "9"),
        ]


def test_interrupted_lessons_go_on(latent, monkeypatch, capsys):
    """Killed in the second layer, and in the second phase: the same bytes as without. Other passes are refused."""
    words = ["trainer.max_iters=4", "trainer.save_every=2"]
    assert taught(*words, "system.work_dir=lessons") == 0
    expected = [rehead.load(name).state_dict() for name in ("lessons-taught", "lessons")]
    learn, calls = teaching._learn, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return learn(*given)

    monkeypatch.setattr(teaching, "_learn", interrupted)
    assert taught(*words, "system.work_dir=broken") == 130
    assert not Path("broken-taught").exists()
    capsys.readouterr()
    assert taught(*words, "system.work_dir=broken") == 2
    assert (
        "broken-taught.unfinished holds an interrupted teaching: use trainer.resume=True"
        in capsys.readouterr().err
    )
    others = ["--teach", "3", *words, "system.work_dir=broken", "trainer.resume=True"]
    assert main(["heal", "mla", "--teacher", "source", *QUICK, *others]) == 2
    assert (
        "--teach 3 does not match the 2 passes of broken-taught.unfinished: give --teach 2"
        in capsys.readouterr().err
    )
    assert taught(*words, "system.work_dir=broken", "trainer.resume=True") == 0
    assert len(calls) == 3  # the first layer was not taught again
    for wanted, name in zip(expected, ("broken-taught", "broken"), strict=True):
        found = rehead.load(name).state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert taught("trainer.max_iters=6", "system.work_dir=broken", "trainer.resume=True") == 0
    assert len(calls) == 3


def test_lessons_that_make_no_sense(latent, capsys):
    def refused(*words, passes="2", model="mla", status=2):
        argv = [
            "heal",
            model,
            "--teacher",
            "source",
            "--teach",
            passes,
            *QUICK,
            "system.work_dir=never",
            *words,
        ]
        assert main(argv) == status
        return capsys.readouterr().err

    assert "--teach 0: the number of passes" in refused(passes="0")
    assert main(["convert", "source", "mha", "--to", "mla"]) == 0
    assert "neither never-taught nor a run to resume" in refused("trainer.resume=True")
    assert "converted exactly, so there is nothing to learn" in refused(model="mha")
    assert not Path("never").exists()
    assert "--teach with data.val_fraction=0" in refused("data.val_fraction=0")
    assert taught("trainer.max_iters=1", "system.work_dir=one") == 0
    shutil.move("mla", "first")
    words = ["--to", "mla", "--kv-fraction", "0.3", "--method", "svd", "--allow-loss"]
    assert main(["convert", "source", "mla", *words]) == 0
    capsys.readouterr()
    assert taught("system.work_dir=one", "trainer.resume=True") == 2
    assert "one-taught was taught from another conversion than mla" in capsys.readouterr().err
    shutil.rmtree("mla")
    shutil.move("first", "mla")
    shutil.rmtree("one-taught")
    assert taught("system.work_dir=mla-taught") == 2
    assert "mla-taught is the source itself: the source is never touched" in capsys.readouterr().err
    assert taught("system.work_dir=one") == 3
    assert "one already holds a run" in capsys.readouterr().err
    assert not Path("one-taught").exists()


def test_removed_lessons_are_not_called_another_run(latent, capsys):
    assert taught("trainer.max_iters=1", "system.work_dir=removed") == 0
    shutil.rmtree("removed-taught")
    capsys.readouterr()
    assert taught("trainer.max_iters=2", "system.work_dir=removed", "trainer.resume=True") == 2
    assert "begun without --teach, or removed-taught has been removed" in capsys.readouterr().err


def test_only_the_source_gives_lessons(latent, capsys):
    shutil.copytree("source", "source-on")
    assert main(["train", "system.work_dir=source-on", "trainer.resume=True", "trainer.max_iters=41"]) == 0
    capsys.readouterr()
    words = ["mla", "--teacher", "source-on", "--teach", "2", *QUICK, "system.work_dir=by-another"]
    assert main(["heal", *words]) == 2
    said = capsys.readouterr().err
    assert (
        "--teach: source-on has other weights than the model that mla was converted from, whose sha256 is in"
        in said
    )
    assert not list(Path().glob("by-another*"))


def test_lessons_are_repeated_beside_the_first(latent, capsys):
    """With other passes in another work_dir; what the messages advise works."""

    def heal(passes, *words):
        argv = ["heal", "mla", "--teacher", "source", *QUICK, "--teach", passes, "trainer.max_iters=1"]
        return main([*argv, *words]), capsys.readouterr().err

    for name in ("mla-healed", "mla-taught"):
        shutil.rmtree(name, ignore_errors=True)
    assert heal("1")[0] == 0
    status, told = heal("2")
    assert status == 3
    assert "mla-taught exists: continue with trainer.resume=True, or give another system.work_dir" in told
    status, told = heal("2", "trainer.resume=True")
    assert status == 2
    assert (
        "--teach 2 does not match the 1 pass of mla-taught: give --teach 1, or start again with another"
        in told
    )
    assert heal("1", "trainer.resume=True")[0] == 0
    assert heal("2", "system.work_dir=second/run")[0] == 0
    assert [certificate(name)["teach"] for name in ("mla-taught", "second/run-taught")] == [1, 2]
    shutil.rmtree("second")


@pytest.mark.filterwarnings("always:the conversion was fitted")
@pytest.mark.parametrize(
    ("fitted", "healed", "held_out"),
    [
        (["--test", "other.txt"], ["data.path=input.txt"], False),
        ([], ["data.path=input.txt", "data.val_fraction=0.2"], False),
        ([], ["data.path=input.txt"], True),
        (["--test", "other.txt"], ["data.path=other.txt"], True),
    ],
)
def test_a_text_that_was_fitted_to_is_not_called_held_out(trained, fitted, healed, held_out, capsys):
    Path("other.txt").write_text("it is the queen that dates the rain\n" * 60)
    asked = ["--to", "mla", "--kv-fraction", "0.2", "--allow-loss", "--calibration", "input.txt"]
    shutil.rmtree("fitted", ignore_errors=True)
    assert main(["convert", "source", "fitted", *asked, *fitted]) == 0
    capsys.readouterr()
    words = ["--teach", "1", "trainer.max_iters=1", *healed]
    shutil.rmtree("measured", ignore_errors=True)
    assert main(["heal", "fitted", "--teacher", "source", *QUICK, *words, "system.work_dir=measured"]) == 0
    said = capsys.readouterr()
    named = ", which the conversion was fitted to"
    for folder in ("measured-taught", "measured"):
        found = certificate(folder)
        assert found["held_out"] is held_out
        assert found["test"]["name"].endswith(named) is not held_out
        text = (resolve(Path(folder)) / "CONVERSION.md").read_text()
        assert ("It is held out of what was fitted to" in text) is held_out
        assert (named in text) is not held_out
    assert ("the conversion was fitted to a part of this validation text" in said.err) is not held_out


@pytest.mark.filterwarnings("always:the conversion was fitted")
def test_the_last_of_several_texts_that_were_fitted_to_is_not_called_held_out(trained, capsys):
    """A folder is one text: its end is the last file's."""
    for folder in ("several", "fitted", "measured", "between", "measured-again"):
        shutil.rmtree(folder, ignore_errors=True)
    Path("several").mkdir()
    first, last = Path("several/a.txt"), Path("several/b.txt")
    first.write_text("it is the queen that dates the rain\n" * 60)
    last.write_text(Path("input.txt").read_text())
    Path("other.txt").write_text("the rain in the east is strained\n" * 60)
    asked = ["--to", "mla", "--kv-fraction", "0.2", "--allow-loss", "--test", "other.txt"]
    assert (
        main(["convert", "source", "fitted", *asked, "--calibration", str(first), "--calibration", str(last)])
        == 0
    )
    words = ["data.path=several", "trainer.max_iters=1", "system.work_dir=measured"]
    assert main(["heal", "fitted", "--teacher", "source", *QUICK, *words]) == 0
    assert certificate("measured")["held_out"] is False
    assert "the conversion was fitted to a part of this validation text" in capsys.readouterr().err
    Path("third.txt").write_text("a road that leads east to the plain\n" * 60)
    for folder, text, place, held_out in (
        ("fitted", "third.txt", "between", True),
        ("between", "several", "measured-again", False),
    ):
        words = [f"data.path={text}", "trainer.max_iters=1", f"system.work_dir={place}"]
        assert main(["heal", folder, "--teacher", "source", *QUICK, *words]) == 0
        assert certificate(place)["held_out"] is held_out


@pytest.mark.filterwarnings("always:the model was healed on")
@pytest.mark.parametrize(("fraction", "held_out"), [(0.3, False), (0.1, True), (0.05, True)])
def test_a_text_that_was_healed_on_is_not_called_held_out(trained, fraction, held_out, capsys):
    for folder in ("once-healed", "twice-healed"):
        shutil.rmtree(folder, ignore_errors=True)
    assert heal("trainer.max_iters=1", "system.work_dir=once-healed") == 0
    words = ["trainer.max_iters=1", f"data.val_fraction={fraction}", "system.work_dir=twice-healed"]
    capsys.readouterr()
    assert main(["heal", "once-healed", "--teacher", "source", *QUICK, *words]) == 0
    found = certificate("twice-healed")
    assert found["held_out"] is held_out
    assert found["test"]["name"].endswith(", which the model was healed on") is not held_out
    said = capsys.readouterr().err
    assert ("the model was healed on a part of this validation text" in said) is not held_out
