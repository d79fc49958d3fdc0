"""`rehead plan` and `rehead convert` as a user meets them: folders whole or absent, one line of error."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.checkpoint import families, verify
from rehead.checkpoint.huggingface import stock
from rehead.cli import main
from rehead.conversion import Certificate, Target
from rehead.conversion.folder import convert_folder
from rehead.conversion.history import history
from rehead.errors import InvalidInput
from rehead.generation import generate
from rehead.model import build
from rehead.tokenizer import Tokenizer
from small import llama_shaped
from typed_lines import typed

pytestmark = pytest.mark.heavy

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of a few steps, trained once and copied to each test that wants it."""
    place = tmp_path_factory.mktemp("trained")
    (place / "text.txt").write_text(TEXT * 12)
    here, before = os.getcwd(), torch.get_default_dtype()
    os.chdir(place)
    torch.set_default_dtype(torch.float32)
    try:
        done = main([
            "train", "data.path=text.txt", "data.block_size=16", "system.work_dir=run", "model.n_layer=2",
            "model.n_embd=12", "model.n_query_head=6", "model.n_kv_head=3", "trainer.batch_size=3",
            "trainer.eval_batches=1", "trainer.max_iters=3", "trainer.device=cpu",
        ])  # fmt: skip
    finally:
        os.chdir(here)
        torch.set_default_dtype(before)
    assert done == 0
    return place


@pytest.fixture
def run(trained, tmp_path, capfd):
    """run/ and text.txt, here."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    capfd.readouterr()
    return "run"


@pytest.fixture
def model(gpt, tmp_path):
    """A model folder without tokenizer."""
    rehead.save(gpt(GQA).float(), tmp_path / "model")
    return "model"


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def one_line(capfd, status, *says):
    printed = capfd.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1, printed.err
    assert printed.err.startswith("rehead: ")
    assert len(printed.err) <= 400
    assert all(part in printed.err for part in says), printed.err
    assert "Traceback" not in printed.err
    return status


def refused(capfd, arguments, status, *says):
    """The exit status and one line; nothing under the final name, nothing beside it, the source as it was."""
    before, names = contents("."), sorted(os.listdir("."))
    assert main(["convert", *arguments]) == status, capfd.readouterr().err
    one_line(capfd, status, *says)
    assert sorted(os.listdir(".")) == names
    assert contents(".") == before


# What is written


@pytest.mark.parametrize("to", ["mha", "mla", "reduced"])
def test_a_run_is_converted_exactly(to, run, capfd):
    before = contents("run")
    assert main(["convert", run, "out/new", "--to", to]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "exact" in printed.out
    assert "on a held-out text" in printed.out
    assert "out/new/CONVERSION.md" in printed.out
    assert contents("run") == before
    verify(Path("out/new"))
    assert sorted(os.listdir("out/new")) == [
        "CONVERSION.md", "MANIFEST.json", "README.md", "config.json", "conversion.json", "generation_config.json",
        "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert os.listdir("out") == ["new"]
    source, result = rehead.load("run"), rehead.load("out/new")
    ids = torch.randint(source.config.vocab_size, (3, 5))
    assert torch.equal(generate(result, ids, 7, 0), generate(source, ids, 7, 0))
    (step,) = Path("run/checkpoints").iterdir()
    assert Path("out/new/tokenizer.json").read_bytes() == (step / "tokenizer.json").read_bytes()


def test_the_certificate_beside_the_weights(run, capfd):
    """Fitted to the training part of the run's own text, measured on its validation part."""
    arguments = ["convert", run, "new", "--to", "mla", "--kv-fraction", "0.5", "--allow-loss", "--json"]
    assert main(arguments) == 0
    printed = json.loads(capfd.readouterr().out)
    certificate = Certificate.read(Path("new"))
    assert printed == json.loads(Path("new/conversion.json").read_text()) == asdict(certificate)
    assert certificate.exact is False
    assert certificate.calibration[0].tokens + certificate.test.tokens == len(TEXT) * 12
    assert certificate.calibration[0].tokens > certificate.test.tokens
    assert f"{certificate.loss[1]:.4f}" in Path("new/CONVERSION.md").read_text()
    assert rehead.load("new").config.attention[0].kv_lora_rank == 6
    assert certificate.layers[0].methods == ["weighted"]


def test_a_model_folder_without_tokenizer(model, capfd):
    assert main(["convert", model, "new", "--to", "mla"]) == 0
    printed = capfd.readouterr()
    assert "on random tokens" in printed.out
    assert printed.err == (
        "rehead: warning: compared on random tokens, which say little about text: --test TEXT measures the loss on "
        "one.\n"
    )
    assert "tokenizer.json" not in os.listdir("new")
    certificate = Certificate.read(Path("new"))
    assert (certificate.loss, certificate.compared_on) == (None, "random tokens")


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        (["--to", "mla", "--kv-fraction", "0.5"], True),
        (["--to", "mla", "--kv-fraction", "0.5", "--method", "whitened"], True),
        (["--to", "mla", "--kv-fraction", "0.5", "--method", "svd"], False),
        (["--to", "mla", "--kv-fraction", "0.5", "--method", "svd", "--measured-ranks"], True),
        (["--to", "mqa"], True),
        (["--to", "mqa", "--method", "mean"], False),
        (["--to", "mqa", "--method", "first"], False),
    ],
)
@pytest.mark.filterwarnings("always:method")
@pytest.mark.filterwarnings("ignore:the test text begins with a.txt")
def test_a_certificate_names_the_texts_that_were_read(words, reads, run, capfd):
    """Other texts give other weights where, and only where, it does; and who named one in vain is told."""
    weights = []
    for name, text in (("a", TEXT * 11), ("b", TEXT[::-1].replace("O", "u") * 12)):
        Path(f"{name}.txt").write_text(text)
        more = (
            ["--calibration", f"{name}.txt", "--test", "text.txt"]
            if reads
            else ["--calibration", f"{name}.txt"]
        )
        assert main(["convert", run, name, *words, *more, "--allow-loss", "--json"]) == 0
        printed = capfd.readouterr()
        found = json.loads(printed.out)
        assert [one["name"] for one in found["calibration"]] == [f"{name}.txt"] * reads
        assert ("does not use a text: nothing was fitted to the calibration" in printed.err) == (not reads)
        assert ("Fitted to no text" in Path(name, "CONVERSION.md").read_text()) == (not reads)
        weights.append(rehead.load(name).state_dict())
    one, other = weights
    alike = one.keys() == other.keys() and all(
        one[key].shape == other[key].shape and torch.equal(one[key], other[key]) for key in one
    )
    assert alike == (not reads) or "--measured-ranks" in words  # which two texts may choose alike


def test_what_was_converted_is_converted_again(model, capfd):
    """And back to the same config."""
    for source, target, to in (("model", "a", "mla"), ("a", "b", "gqa")):
        assert main(["convert", source, target, "--to", to]) == 0
    assert rehead.load("b").config == rehead.load("model").config
    capfd.readouterr()


def test_texts_by_name(run, capfd):
    """A calibration text keeps its last tenth to measure on; with --test all of it is fitted to; --test alone
    leaves the run its training part."""
    Path("other.txt").write_text(TEXT[::-1].replace("\n", "") * 3)
    lossy = ["--to", "mqa", "--allow-loss", "--json"]
    assert main(["convert", run, "a", *lossy, "--calibration", "other.txt"]) == 0
    one = json.loads(capfd.readouterr().out)
    total = 3 * len(TEXT)
    assert one["calibration"][0]["tokens"] + one["test"]["tokens"] == total
    assert one["test"]["tokens"] <= 0.2 * total
    assert main(["convert", run, "b", *lossy, "--calibration", "other.txt", "--test", "text.txt"]) == 0
    two = json.loads(capfd.readouterr().out)
    assert two["calibration"][0]["tokens"] == total
    assert two["test"]["tokens"] == 12 * len(TEXT)
    assert main(["convert", run, "c", *lossy, "--test", "other.txt"]) == 0
    three = json.loads(capfd.readouterr().out)
    assert three["calibration"][0]["tokens"] < 12 * len(TEXT)  # the training part of the run's own
    assert three["test"]["tokens"] == total


def test_a_text_whose_last_tenth_is_no_window(run, capfd):
    """The message has its size, that of a window, and a --length that works."""
    Path("other.txt").write_text(TEXT)
    words = ["convert", run, "a", "--to", "mqa", "--allow-loss", "--calibration", "other.txt"]
    assert main([*words, "--length", "12"]) == 3
    said = capfd.readouterr().err
    tenth = len(TEXT) - int(0.9 * len(TEXT))
    assert f"other.txt, {tenth} of {len(TEXT)} tokens, is held out" in said
    assert "less than one window of 12 tokens" in said
    assert f"--length {tenth - 1}." in said
    needed = next(n for n in range(1, 999) if n - int(0.9 * n) >= 13)
    assert f"Give a text of at least {needed} tokens, --test TEXT" in said
    for size, status in ((needed - 1, 3), (needed, 0)):
        Path("grown.txt").write_text((TEXT * 9)[:size])
        grown = ["grown.txt" if word == "other.txt" else word for word in words]
        assert main([*grown[:2], f"of{size}", *grown[3:], "--length", "12"]) == status
    capfd.readouterr()
    assert main([*words, "--length", str(tenth)]) == 3
    assert main([*words, "--length", str(tenth - 1)]) == 0
    capfd.readouterr()


def test_a_run_brings_its_own_tokens_to_any_folder(run, capfd, monkeypatch):
    """Where its text was changed meanwhile, or is gone, too."""
    lossy = ["--to", "mqa", "--allow-loss", "--json"]
    assert main(["convert", run, "here", *lossy]) == 0
    here = capfd.readouterr()
    Path("text.txt").write_text(TEXT[::-1] * 12)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["convert", f"../{run}", "there", *lossy]) == 0
    there = capfd.readouterr()
    assert here.err == there.err == ""
    one, other = json.loads(here.out), json.loads(there.out)
    assert one["test"] == other["test"] is not None
    assert one["loss"] == other["loss"]
    assert other["compared_on"] == "text"


def test_a_run_is_healed_from_any_folder(run, monkeypatch):
    assert main(["convert", run, "mqa", "--to", "mqa", "--allow-loss"]) == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert (
        main(["heal", "../mqa", "--teacher", f"../{run}", "trainer.max_iters=1", "trainer.batch_size=2"]) == 0
    )


PROGRESS = r"rehead: self: .+|converting .+|[a-z ]+  [\d,]+(/[\d,]+)? [a-z]+(  \d+:\d\d:\d\d left)?"


@pytest.mark.long
@pytest.mark.process
def test_several_calibrations_as_typed(run, capfd):
    """As a user types it, from a shell: equal shares of a file and of the model's own text; what is held out is
    said; twice the same is the same."""
    Path("other.txt").write_text(TEXT[::-1].replace("\n", "") * 12)
    words = [run, "out/new", "--to", "mla", "--kv-fraction", "0.5", "--allow-loss"]
    texts = ["--calibration", "other.txt", "--calibration", "self"]

    def convert():
        """In a process of its own."""
        [(code, _, err)] = typed(["convert", *words, *texts, "--length", "12"])
        assert code == 0
        for line in err.splitlines():  # on a slow machine it says how far it is, and nothing else
            assert re.fullmatch(PROGRESS, line), line

    convert()
    one = Certificate.read(Path("out/new"))
    assert [text.name for text in one.calibration] == ["other.txt", "self"]
    assert one.calibration[1].read == one.calibration[1].tokens == 24_576
    assert (one.test.name, one.held_out, one.length) == ("the last tenth of other.txt", True, 12)
    written = " ".join(Path("out/new/CONVERSION.md").read_text().split())
    assert "of the last tenth of other.txt" in written
    assert "so of its kind: on other kinds of text more may be lost" in written
    assert "tokens of self (sampled from the source, at temperature 1" in written
    words[1] = "again"
    convert()
    assert Path("again/model.safetensors").read_bytes() == Path("out/new/model.safetensors").read_bytes()
    assert main(["convert", run, "tested", *words[2:], *texts, "--test", "text.txt", "--json"]) == 0
    two = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (two["test"]["name"], two["held_out"]) == ("text.txt", False)


def test_calibrated_on_itself_alone(run, model, capfd):
    """A run is measured on its own text; a folder without tokenizer on more text of itself, which is said."""
    lossy = ["--to", "mla", "--kv-rank", "5", "--allow-loss", "--calibration", "self", "--json"]
    found = []
    for source in (run, model):
        assert main(["convert", source, f"{source}-new", *lossy]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert [one["test"]["name"] for one in found] == ["the validation part of the run's text", "self"]
    assert [one["held_out"] for one in found] == [False, True]
    assert found[1]["test"]["sha256"] != found[1]["calibration"][0]["sha256"]


def test_weights_and_text_are_read_once(run, monkeypatch):
    """One conversion looks over the weights once and takes statistics once, also where ranks are measured."""
    convert, seen = sys.modules["rehead.conversion.converter"], []
    for name in ("require_finite", "gather"):
        original = getattr(convert, name)
        monkeypatch.setattr(
            convert,
            name,
            lambda *a, name=name, original=original, **k: (seen.append(name), original(*a, **k))[1],
        )
    ranks = ["--to", "mla", "--kv-fraction", "0.5", "--measured-ranks", "--allow-loss"]
    assert main(["convert", run, "new", *ranks]) == 0
    assert sorted(seen) == ["gather", "require_finite"]


@pytest.mark.filterwarnings("always:the run's own text")
def test_a_run_whose_text_and_tokens_are_gone(run, capfd):
    """It is said, and what the certificate is worth; then as for a model without a text.

    The file that config.yaml names is not opened: in a run folder of somebody else it may be any.
    """
    config = Path(run, "config.yaml")
    Path("secret.txt").write_bytes(Path("text.txt").read_bytes())
    config.write_text(config.read_text().replace("text.txt", "secret.txt"))
    Path(run, "tokens.bin").unlink()
    assert main(["convert", run, "new", "--to", "mla", "--json"]) == 0
    shutil.rmtree("new")
    assert "tokens.bin: No such file" in capfd.readouterr().err
    Path(run, "tokens.bin").symlink_to(Path("secret.txt").resolve())
    assert main(["convert", run, "new", "--to", "mla", "--json"]) == 0
    printed = capfd.readouterr()
    first, second = printed.err.splitlines()
    assert "the run's own text cannot be read" in first
    assert "random tokens" in second
    assert json.loads(printed.out)["test"] is None


def test_tokens_that_are_not_the_models_are_refused(run, capfd):
    Path(run, "tokens.bin").write_bytes(b"\xff\xff" * 300)
    with pytest.warns(UserWarning, match="the run's own text cannot be read.*token id 65535"):
        convert_folder(Path(run), Path("new"), Target(to="mla"))


def test_ranks_by_measuring(run, capfd):
    source = rehead.load("run")
    budget = 0.5 * sum(layer.kv_numbers() for layer in source.config.attention)
    ranks = ["--to", "mla", "--allow-loss", "--json"]
    assert main(["convert", run, "a", *ranks, "--kv-fraction", "0.5", "--measured-ranks"]) == 0
    capfd.readouterr()
    assert sum(layer.kv_lora_rank for layer in rehead.load("a").config.attention) <= budget
    assert main(["convert", run, "b", *ranks, "--max-loss", "0.01"]) == 0
    loss = json.loads(capfd.readouterr().out)["loss"]
    assert loss[1] - loss[0] < 0.1  # kept on the training part, near it on the other


@pytest.fixture
def untrained():
    """untrained(flags): a run of one layer, in "run"."""

    def made(*shape):
        Path("text.txt").write_text(TEXT * 12)
        flags = ["data.path=text.txt", "data.block_size=16", "system.work_dir=run", "trainer.max_iters=0"]
        small = ["model.n_embd=12", "model.n_query_head=3", "model.n_layer=1"]
        assert main(["train", *flags, *small, *shape]) == 0

    return made


def test_a_layout_is_turned_beside_ranks_by_measuring(untrained, capfd):
    untrained("model.rope=True")
    words = ["--kv-fraction", "0.45", "--measured-ranks", "--rope-layout", "interleaved", "--allow-loss"]
    capfd.readouterr()
    assert main(["convert", "run", "a", "--to", "mla", *words]) == 0
    assert ": the measured ranks nearest below the 45 % asked for)" in capfd.readouterr().out
    assert rehead.load("a").config.attention[0].rope.layout == "interleaved"


def test_a_measured_width_is_not_called_a_measured_rank(untrained, capfd):
    untrained("model.shape=llama")
    words = ["--target", "uneven", "--kv-fraction", "0.45", "--measured-ranks", "--allow-loss"]
    capfd.readouterr()
    assert main(["convert", "run", "a", "--to", "mla", *words]) == 0
    said = capfd.readouterr().out
    assert ": 45 % rounded down to a whole rank)" in said
    assert "measured ranks" not in said


@pytest.mark.parametrize("command", ["convert", "plan"])
def test_json_is_one_document(command, model, capfd):
    words = ["convert", model, "new", "--to", "mha"] if command == "convert" else ["plan", model]
    assert main([*words, "--json"]) == 0
    printed = capfd.readouterr()
    assert ["random tokens" in line for line in printed.err.splitlines()] == [True] * (command == "convert")
    assert len(printed.out.splitlines()) == 1
    assert isinstance(json.loads(printed.out), dict)


# Lossy without leave


def test_a_loss_needs_leave_and_is_told(run, model, capfd):
    says = ("this conversion is lossy", "Nothing was written", "Accept it with --allow-loss")
    half = ["--to", "mla", "--kv-fraction", "0.5"]
    refused(capfd, [run, "new", *half], 2, *says, "the loss would go from", "nats per token", "KL")
    refused(capfd, [model, "new", *half, "--method", "svd"], 2, *says, "on random tokens")
    refused(capfd, [run, "new", *half, "--json"], 2, *says)


def test_folders_on_the_way_are_not_left_either(model, capfd):
    refused(capfd, [model, "deep/er/new", "--to", "mqa", "--method", "mean"], 2, "this conversion is lossy")


def test_no_text_is_advised_to_a_model_that_cannot_read_one(model, capfd):
    """Without a tokenizer, --calibration is refused, so it is not what to give."""
    assert main(["convert", model, "new", "--to", "mqa"]) == 2
    assert "--calibration" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-fraction", "0.5"],
        ["--kv-rank", "3", "--method", "whitened"],
        ["--kv-fraction", "0.5", "--measured-ranks"],
        ["--kv-fraction", "0.5", "--method", "svd", "--teach", "1"],
        ["--max-loss", "0.01"],
    ],
)
def test_what_is_fitted_reads_text_of_the_model_s_own_where_none_is_given(words, model, capfd):
    assert main(["convert", model, "new", "--to", "mla", *words, "--allow-loss"]) == 0
    first = capfd.readouterr().err.splitlines()[0]
    assert first == "rehead: no calibration text: fitting to one sampled from the model (self)"
    certificate = Certificate.read(Path("new"))
    assert [text.name for text in certificate.calibration] == ["self"]
    assert (certificate.loss is not None, certificate.held_out) == (True, True)
    same = ["convert", model, "same", "--to", "mla", *words, "--allow-loss", "--calibration", "self"]
    assert main(same) == 0
    for file in ("model.safetensors", "conversion.json"):
        assert Path("new", file).read_bytes() == Path("same", file).read_bytes()


def test_a_model_that_reads_is_told_that_a_text_can_be_given(run, capfd):
    (step,) = Path(run, "checkpoints").iterdir()
    Path("test.txt").write_text(TEXT * 3)
    assert main(["convert", str(step), "new", "--to", "mqa", "--test", "test.txt", "--allow-loss"]) == 0
    assert "(self). --calibration TEXT fits to what it will read\n" in capfd.readouterr().err
    certificate = Certificate.read(Path("new"))
    assert ([text.name for text in certificate.calibration], certificate.test.name) == (["self"], "test.txt")


# Mistakes

MISTAKES = {
    "rank 0": (["--to", "mla", "--kv-rank", "0"], 2, ["--kv-rank 0", "Use 1 to 18"]),
    "rank too large": (["--to", "mla", "--kv-rank", "19"], 2, ["--kv-rank 19", "Use 1 to 18"]),
    "rank and fraction": (
        ["--to", "mla", "--kv-rank", "3", "--kv-fraction", "0.5"],
        2,
        ["--kv-rank 3", "Give one"],
    ),
    "non-dividing heads": (
        ["--to", "gqa", "--n-kv-head", "4"],
        2,
        ["--n-kv-head 4", "n_query_head=6", "[1, 2, 3, 6]"],
    ),
    "no heads": (["--to", "gqa", "--n-kv-head", "0"], 2, ["--n-kv-head 0", "[2, 3]"]),
    "negative heads": (["--to", "gqa", "--n-kv-head", "-2"], 2, ["--n-kv-head -2", "[2, 3]"]),
    "unknown target": (["--to", "mlaa"], 2, ["mlaa", "mla", "--help"]),
    "unknown option": (["--to", "mla", "--kv-rnak", "3"], 2, ["--kv-rnak", "--kv-rank"]),
    "unknown method": (["--to", "mla", "--method", "magic"], 2, ["magic", "svd"]),
    "another's method": (["--to", "mla", "--kv-rank", "3", "--method", "mean"], 2, ["mean", "pool-heads"]),
    "no tokenizer": (
        ["--to", "mla", "--calibration", "text.txt"],
        3,
        ["no tokenizer.json", "Leave out --calibration and --test"],
    ),
    "loss of pooled heads": (
        ["--to", "mla", "--n-kv-head", "1", "--max-loss", "0.1", "--calibration", "self"],
        2,
        ["--n-kv-head 1: ranks are measured for the KV heads there are", "--to gqa first"],
    ),
    "layout without rope": (["--rope-layout", "interleaved"], 2, ["--rope-layout", "Leave it out"]),
    "a rank of nothing": (["--kv-rank", "3"], 2, ["--kv-rank 3", "--to mla or reduced"]),
    "no number": (["--to", "mla", "--kv-rank", "many"], 2, ["many", "kv-rank"]),
    "a seed that is none": (
        ["--to", "mla", "--calibration", "self", "--seed", "-1"],
        2,
        ["--seed -1", "Use 0"],
    ),
    "a window too long": (
        ["--to", "mla", "--length", "17"],
        2,
        ["--length 17", "at most block_size=16", "Use 1 to 16"],
    ),
}


@pytest.mark.parametrize(("arguments", "status", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(arguments, status, says, model, capfd):
    Path("text.txt").write_text(TEXT)
    refused(capfd, [model, "new", *arguments], status, *says)


RUN_MISTAKES = {
    "missing calibration": (["--calibration", "nowhere.txt"], 3, ["nowhere.txt"]),
    "missing test": (["--test", "nowhere.txt"], 3, ["nowhere.txt"]),
    "calibration is the test": (
        ["--calibration", "text.txt", "--test", "text.txt"],
        2,
        ["calibration and test text are the same", "Give another"],
    ),
    "blank text": (["--calibration", "blank.txt"], 3, ["blank.txt", "0 tokens"]),
    "not UTF-8": (["--calibration", "latin.txt"], 3, ["latin.txt", "UTF-8"]),
    "unknown characters": (["--calibration", "other.txt"], 3, ["vocabulary", "'Ω'"]),
    "a short text": (
        ["--calibration", "short.txt"],
        3,
        ["the last tenth of short.txt, 1 of 1", "less than one window", "--test TEXT"],
    ),
    "fraction and loss": (
        ["--kv-fraction", "0.5", "--max-loss", "0.1", "--allow-loss"],
        2,
        ["either --kv-fraction or --max-loss"],
    ),
    "a negative loss": (["--max-loss", "-1"], 2, ["--max-loss -1", "0 or more"]),
    "fewer passes than none": (["--teach", "-1"], 2, ["--teach -1", "the number of passes"]),
    "nothing to learn": (["--teach", "1"], 2, ["this conversion is exact", "nothing to learn"]),
    "one window to learn from": (
        [
            "--teach",
            "1",
            "--kv-rank",
            "3",
            "--allow-loss",
            "--calibration",
            "brief.txt",
            "--test",
            "text.txt",
        ],
        3,
        ["a single window", "Give a longer text"],
    ),
}


@pytest.mark.parametrize(("arguments", "status", "says"), RUN_MISTAKES.values(), ids=RUN_MISTAKES)
def test_mistakes_with_texts(arguments, status, says, run, capfd):
    Path("blank.txt").write_text("   ")
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    Path("other.txt").write_text("It was Ω. " * 20)
    Path("short.txt").write_text("I")
    Path("brief.txt").write_text(TEXT[:9])
    refused(capfd, [run, "new", "--to", "mla", *arguments], status, *says)


def test_a_text_that_is_too_short_is_refused_before_minutes_of_sampling(run, capfd, monkeypatch):
    reading = sys.modules["rehead.conversion.reading"]
    monkeypatch.setattr(reading, "sampled_once", lambda *_: pytest.fail("sampled"))
    Path("short.txt").write_text(TEXT)
    texts = ["--calibration", "self", "--calibration", "short.txt"]
    words = [run, "new", "--to", "mla", "--kv-rank", "3", "--allow-loss", *texts]
    refused(capfd, words, 3, "the last tenth of short.txt", "--test TEXT")


def test_rope_to_reduced(gpt, capfd):
    rehead.save(gpt(replace(GQA, rope=RopeConfig())).float(), "model")
    refused(
        capfd, ["model", "new", "--to", "reduced"], 2, "rope=True", "rebuilt keys are rotated", "W_UK and W_Q"
    )


def test_a_latent_norm_stands_in_the_way(gpt, capfd):
    mla = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5)
    rehead.save(gpt(mla).float(), "model")
    refused(capfd, ["model", "new", "--to", "mha"], 2, "latent_norm=True")


@pytest.mark.filterwarnings("ignore:.*hold NaN or infinity")  # said when they are loaded
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(bad, gpt, capfd):
    damaged = gpt(GQA).float()
    damaged.layers[1].self_attn.k_proj.weight.data[2, 3] = bad
    rehead.save(damaged, "model")
    for arguments in (["--to", "mla"], ["--to", "mqa", "--allow-loss", "--method", "mean"]):
        refused(capfd, ["model", "new", *arguments], 7, "layers.1.self_attn.k_proj.weight", "NaN or infinity")
    assert main(["convert", "model", "new", "--to", "mqa", "--allow-loss"]) == 7  # which samples a text
    first, last = capfd.readouterr().err.splitlines()
    assert first.startswith("rehead: no calibration text")
    assert "layers.1.self_attn.k_proj.weight holds NaN or infinity" in last
    assert not Path("new").exists()


PLACES = {
    "itself": ("model", 2, "source is never touched"),
    "itself, otherwise spelled": ("./x/../model/", 2, "source is never touched"),
    "inside it": ("model/new", 2, "source is never touched"),
    "around it": (".", 2, "source is never touched"),
    "a folder": ("standing", 3, "exists: choose another name"),
    "a file": ("file", 3, "exists: choose another name"),
    "a link to it": ("link", 2, "source is never touched"),
    "below a file": ("file/new", 3, "file is a file. Choose a path in a folder"),
}


@pytest.mark.parametrize(("place", "status", "says"), PLACES.values(), ids=PLACES)
def test_places_that_will_not_do(place, status, says, model, capfd):
    Path("standing").mkdir()
    Path("standing/mine").write_text("mine")
    Path("file").write_text("mine")
    Path("x").mkdir()
    Path("link").symlink_to("model")
    refused(capfd, [model, place, "--to", "mha"], status, says)


def test_the_folder_one_stands_in_is_no_place(model, capfd, monkeypatch):
    """It has no name of its own, by which what is written beside it could be called."""
    source = Path(model).resolve()
    Path("x").mkdir()
    monkeypatch.chdir("x")
    for command in (["convert", str(source), ".", "--to", "mha"], ["export", str(source), "."]):
        assert main(command) == 3
        assert ". exists: choose another name" in capfd.readouterr().err


def test_what_needs_no_weights_is_refused_before_they_are_read(model, capfd, monkeypatch):
    monkeypatch.setattr("rehead.conversion.folder.open_model", lambda *given, **named: pytest.fail("read"))
    lossy = ["--to", "mla", "--kv-fraction", "0.5", "--allow-loss"]
    refused(capfd, [model, "new", *lossy, "--kv-rank", "3"], 2, "say the same thing. Give one")
    refused(capfd, [model, "new", *lossy, "--length", "0"], 2, "length 0: the model reads at most")
    for option in ("--calibration", "--test"):
        refused(capfd, [model, "new", *lossy, option, "nowhere.txt"], 3, f"give {option} a file or folder")
    refused(capfd, [model, "new", *lossy, "--test", "self"], 3, "give --test a file or folder")
    Path("text.txt").write_text(TEXT)
    refused(capfd, [model, "new", *lossy, "--test", "text.txt"], 3, "no tokenizer.json", "save_pretrained")
    refused(
        capfd, [model, "new", "--to", "mla", "--teach", "1", "--calibration", "self"], 2, "nothing to learn"
    )
    heads = [*lossy, "--calibration", "self", "--target", "uneven"]
    refused(capfd, [model, "new", *heads], 2, "none of its layers rotates its keys")
    assert not Path("new.unfinished").exists()


def test_ranks_beside_a_rotary_part_are_refused_before_weights_are_read(gpt, capfd, monkeypatch):
    """They would differ by layer, and no stock class could hold the result."""
    beside = {"kv_lora_rank": 9, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 5}
    rehead.save(
        gpt(LatentConfig(n_query_head=6, latent_norm=False, rope=RopeConfig(), **beside)).float(), "model"
    )
    monkeypatch.setattr("rehead.conversion.folder.open_model", lambda *given, **named: pytest.fail("read"))
    words = [
        "model",
        "new",
        "--to",
        "mla",
        "--kv-fraction",
        "0.5",
        "--measured-ranks",
        "--calibration",
        "self",
    ]
    refused(capfd, words, 2, "this MLA has a rotary part. Give --kv-fraction or --kv-rank alone")


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["--test", "text.txt"], "the training part of the run's text"),
        (["--calibration", "begin.txt", "--test", "text.txt"], "begin.txt"),
        (["--test", "other.txt"], None),
        (["--test", "text.txt", "--method", "svd"], None),
    ],
)
@pytest.mark.filterwarnings("always:the test text begins")
def test_a_test_text_that_begins_with_what_was_fitted_to_is_told_of(words, begins, run, capfd):
    whole = Path("text.txt").read_text()
    Path("begin.txt").write_text(whole[:300])
    Path("other.txt").write_text(whole[40:])
    assert main(["convert", run, "new", "--to", "mla", "--kv-rank", "3", "--allow-loss", *words]) == 0
    said = capfd.readouterr().err
    assert ("the loss looks better than it is" in said) == (begins is not None)
    assert begins is None or f"the test text begins with {begins}, which was fitted to" in said


def test_texts_that_are_too_short_are_refused_before_the_weights_are_read(run, capfd, monkeypatch):
    monkeypatch.setattr("rehead.conversion.folder.open_model", lambda *given, **named: pytest.fail("read"))
    Path("brief.txt").write_text(TEXT)
    Path("one.txt").write_text("I")
    words = [run, "new", "--to", "mla", "--kv-rank", "3", "--allow-loss", "--calibration", "text.txt"]
    refused(capfd, [*words, "--calibration", "brief.txt"], 3, "the last tenth of brief.txt, 8 of 79 tokens")
    refused(capfd, [*words, "--test", "one.txt"], 3, "a text of 1 token leaves nothing to predict")


@pytest.mark.filterwarnings("always:no stock class")
def test_a_class_that_is_missing_is_told_of_before_a_text_is_sampled(tmp_path, capfd, monkeypatch):
    class Sampled(Exception): ...

    def sampling(*given):
        raise Sampled

    windowed = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, rope=RopeConfig(), window=5)
    rehead.save(build(llama_shaped(windowed, vocab_size=29, n_embd=24, n_hidden=31)), Path("windowed"))
    monkeypatch.setattr("rehead.conversion.reading.sampled_once", sampling)
    target = Target(to="mla", target="uneven", kv_fraction=0.5)
    with pytest.warns(UserWarning, match="no stock class can hold the result"), pytest.raises(Sampled):
        convert_folder(Path("windowed"), Path("new"), target, calibration=["self"], allow_loss=True)


def test_sources_that_are_none(capfd):
    Path("empty").mkdir()
    Path("file").write_text("")
    refused(capfd, ["nowhere", "new", "--to", "mha"], 3, "nowhere", "model folder or a run folder")
    refused(capfd, ["empty", "new", "--to", "mha"], 3, "empty", "config.json")
    refused(capfd, ["file", "new", "--to", "mha"], 3, "file", "model folder or a run folder")


def test_a_damaged_source(model, capfd):
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(capfd, [model, "new", "--to", "mha"], 4, "model.safetensors is damaged")


def test_a_tokenizer_that_is_damaged(run, capfd):
    (step,) = Path("run/checkpoints").iterdir()
    (step / "tokenizer.json").write_text("{}")
    refused(capfd, [str(step), "new", "--to", "mha"], 4, "tokenizer.json is damaged")


WRITES = [(os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "chmod")]


@pytest.mark.parametrize(("owner", "name"), WRITES, ids=[name for _, name in WRITES])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_nothing(owner, name, number, model, capfd, monkeypatch):
    """Whichever operation it shows in first."""
    before, names = contents("."), sorted(os.listdir("."))

    def fails(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        assert main(["convert", model, "new", "--to", "mha"]) == 5
    one_line(capfd, 5, "cannot write new", os.strerror(number))
    assert sorted(os.listdir(".")) == names
    assert contents(".") == before


def test_no_space_for_the_weights(model, capfd, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rehead.checkpoint.files.writing.bytes_of", full)
    refused(capfd, [model, "new", "--to", "mha"], 5, "cannot write new", "No space left", "Free some space")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_stopped_in_the_middle(error, model, capfd, monkeypatch):
    """Ctrl-C, or out of memory, before anything was worked out that would be worth keeping: nothing is left either."""
    names = sorted(os.listdir("."))

    def stops(*args, **kwargs):
        raise error

    monkeypatch.setattr(sys.modules["rehead.conversion.converter"], "require_method", stops)
    assert main(["convert", model, "new", "--to", "mha"]) == (130 if error is KeyboardInterrupt else 5)
    assert sorted(os.listdir(".")) == names
    assert len(capfd.readouterr().err.splitlines()) == 1


# Plan


def test_a_plan_on_the_terminal_and_as_json(run, capfd):
    assert main(["plan", run, "--context", "9", "--batch", "2", "--dtype", "bf16"]) == 0
    text = capfd.readouterr().out
    assert main(["plan", run, "--context", "9", "--batch", "2", "--dtype", "bf16", "--json"]) == 0
    table = json.loads(capfd.readouterr().out)
    assert (table["context"], table["batch_size"], table["dtype"]) == (9, 2, "bfloat16")
    present = table["rows"][0]
    numbers = sum(layer.kv_numbers() for layer in rehead.load("run").config.attention)
    assert present["kv_bytes_per_token"] == 2 * numbers
    assert present["cache_bytes"] == 2 * numbers * 9 * 2
    squeezed = "".join(text.split())
    for row in table["rows"]:
        assert "".join(row["variant"].split()) in squeezed or len(row["variant"]) > 20
        assert row["verdict"] in text
    assert "context 9, batch 2, bfloat16" in text
    assert "".join(table["advice"].split())[:40] in squeezed


def test_a_plan_of_what_is_not_built(model, capfd):
    """A config.json alone, or a YAML of options; the same as of the folder."""
    Path("alone.json").write_text(Path("model/config.json").read_text())
    tables = []
    for what in ("model", "alone.json", "model/config.json"):
        assert main(["plan", what, "--json"]) == 0
        tables.append(json.loads(capfd.readouterr().out))
    assert tables[0] == tables[1] == tables[2]
    assert tables[0]["context"] == 16
    Path("options.yaml").write_text("model: {n_layer: 3, n_query_head: 8, n_embd: 64, rope: true}\n")
    assert main(["plan", "options.yaml", "--context", "5", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["kv_bytes_per_token"] == 4 * 3 * 2 * 64


def deepseek_v3():
    from transformers import DeepseekV3Config

    return DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16").to_dict()


def gemma3():
    """As Google writes it: what transformers assumes is left out of `text_config`."""
    from transformers import Gemma3TextConfig

    table = Gemma3TextConfig(hidden_size=640, num_hidden_layers=12, dtype="bfloat16").to_dict()
    left_out = (
        "vocab_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return table, {name: value for name, value in table.items() if name not in left_out}


def phi3():
    from transformers import Phi3Config

    longrope = {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [float(1 + i) for i in range(48)],
    }
    table = Phi3Config(max_position_embeddings=131_072, dtype="bfloat16").to_dict()
    del table["rope_parameters"]
    plain = table | {"rope_theta": 1e4}
    return plain, plain | {"rope_scaling": longrope, "original_max_position_embeddings": 4096}


ONLY_PLANNED = {
    "fp8": (
        lambda: (
            deepseek_v3(),
            deepseek_v3() | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
        ),
        61 * (512 + 64) * 2,
        "counted as if they were not quantised",
        "from before its quantisation",
    ),
    "quantised": (
        lambda: (deepseek_v3(), deepseek_v3() | {"quantization_config": {"bits": 4}}),
        61 * (512 + 64) * 2,
        "counted as if they were not quantised",
        "from before its quantisation",
    ),
    "multimodal": (
        lambda: (gemma3()[0], {"model_type": "gemma3", "text_config": gemma3()[1], "vision_config": {}}),
        12 * 2 * 4 * 256 * 2,
        "only the text model is counted",
        "model_type 'gemma3' is multimodal",
    ),
    "quantised, multimodal": (
        lambda: (
            gemma3()[0],
            {"model_type": "gemma3", "text_config": gemma3()[1], "quantization_config": {"bits": 4}},
        ),
        12 * 2 * 4 * 256 * 2,
        "counted as if they were not quantised",
        "model_type 'gemma3' is multimodal",
    ),
    "longrope": (
        phi3,
        32 * 2 * 32 * 96 * 2,
        "longrope changes its angles within a text",
        "longrope with other",
    ),
}


@pytest.mark.filterwarnings("always:.*counted", "always:longrope changes", "always:.*longrope changes")
@pytest.mark.parametrize("name", ONLY_PLANNED)
def test_a_plan_of_what_no_other_command_reads(name, capfd, tmp_path, monkeypatch):
    """DeepSeek-V3 exists in fp8 only. The sizes are those of the plain config; weights and angles matter to none."""
    made, n_bytes, told, refused = ONLY_PLANNED[name]
    monkeypatch.chdir(tmp_path)
    tables = []
    for folder, table in zip(("plain", "model"), made(), strict=True):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(table))
        assert main(["plan", folder, "--json", "--context", "4096", "--dtype", "bf16"]) == 0
        said = capfd.readouterr()
        tables.append(json.loads(said.out))
        assert (told in said.err) == (folder == "model")
    for table in tables:
        table["notes"] = []  # longrope is what some targets lack
    assert tables[1]["rows"][0] == tables[0]["rows"][0]
    assert tables[1]["rows"][0]["kv_bytes_per_token"] == n_bytes
    assert name == "longrope" or tables[1] == tables[0]
    for command in (
        ["convert", "model", "new", "--to", "mha"],
        ["eval", "model", "--data", "model/config.json"],
    ):
        assert main(command) == 3
        one_line(capfd, 3, refused)


@pytest.mark.parametrize("factors", [2, "x", None, [1.0], ["x"] * 48, [None] * 48, [[1.0]] * 48])
def test_a_plan_reads_no_longrope_that_is_none(factors, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = phi3()[1]
    table["rope_scaling"]["long_factor"] = factors
    Path("config.json").write_text(json.dumps(table))
    assert main(["plan", "config.json"]) == 3
    one_line(capfd, 3, "longrope")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_sizes_that_published_files_leave_out_are_those_of_the_class(kind):
    from transformers import AutoConfig

    table = AutoConfig.for_model(kind).to_dict()
    for name, size in families[kind].sizes.items():
        assert table.pop(name) == size
    found = stock.read_config(table, "config.json")
    assert found.block_size == families[kind].sizes["max_position_embeddings"]


PLAN_MISTAKES = {
    "nowhere": (["nowhere"], 3, ["nowhere"]),
    "no JSON": (["bad.json"], 3, ["bad.json", "not JSON"]),
    "no context": (["model", "--context", "0"], 2, ["--context 0", "Use 1 to 16,777,216"]),
    "no batch": (["model", "--batch", "0"], 2, ["--batch 0", "Use 1 to 1,048,576"]),
    "no dtype": (["model", "--dtype", "fp8"], 2, ["fp8", "bf16"]),
    "no YAML": (["bad.yaml"], 3, ["bad.yaml"]),
    "unknown option in YAML": (["other.yaml"], 2, ["n_kv_haed", "n_kv_head"]),
}


@pytest.mark.parametrize(("arguments", "status", "says"), PLAN_MISTAKES.values(), ids=PLAN_MISTAKES)
def test_mistakes_in_plan(arguments, status, says, model, capfd):
    Path("bad.json").write_text("{")
    Path("bad.yaml").write_text("model: [")
    Path("other.yaml").write_text("model: {n_kv_haed: 3}\n")
    assert main(["plan", *arguments]) == status, capfd.readouterr().err
    one_line(capfd, status, *says)


def test_ids_are_those_of_the_text(run, capfd):
    """The certificate's sha256 is of the token ids, as anyone can compute it again."""
    assert main(["convert", run, "new", "--to", "mha", "--test", "text.txt", "--json"]) == 0
    table = json.loads(capfd.readouterr().out)
    ids = Tokenizer.load(Path("new")).encode(TEXT * 12).astype(np.int64)
    assert table["test"]["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("0.5", "9 numbers: 50 %"),
        ("0.6", "10 numbers: 55.56 %: 60 % rounded down to a whole rank"),
        ("0.01", "1 numbers: 5.556 %: 1 % rounded up to a whole rank"),
    ],
)
def test_the_share_that_was_reached_is_told(asked, said, model, capfd):
    """Of 18 numbers per token and layer, 4 bytes each, in 2 layers."""
    words = ["convert", model, "out", "--to", "mla", "--kv-fraction", asked, "--allow-loss"]
    assert main(words) == 0
    numbers, _, share = said.partition(" numbers: ")
    n_layer = rehead.load("out").config.n_layer
    assert f"{72 * n_layer} -> {4 * int(numbers) * n_layer} bytes per token, float32 ({share})\n" in (
        capfd.readouterr().out
    )
    reached = share.partition(":")[0]
    assert f"| KV cache, share of the source's | 100 % | {reached} |" in Path("out/CONVERSION.md").read_text()


@pytest.mark.filterwarnings("always:the source was itself converted", "always:the conversion that made")
def test_what_the_source_had_lost_is_not_forgotten(run, capfd):
    """By its exact conversion: the certificate, its page, a warning, and the card of an export."""
    lossy = ["convert", run, "lossy", "--to", "mqa", "--method", "mean", "--allow-loss"]
    assert main(lossy) == 0
    first = Certificate.read(Path("lossy"))
    assert first.earlier == []
    assert "was itself converted" not in capfd.readouterr().err
    assert main(["convert", "lossy", "exact", "--to", "mla"]) == 0
    second = Certificate.read(Path("exact"))
    (one,) = second.earlier
    assert second.exact
    assert (one.exact, one.kl, one.loss, one.healed) == (False, first.logits["kl"], first.loss, 0)
    assert one.kv_bytes_per_token == first.kv_bytes_per_token
    assert f"the source was itself converted ({first.layers[0].source} to" in capfd.readouterr().err
    assert "The source was itself made by conversions" in Path("exact/CONVERSION.md").read_text()
    assert main(["convert", "exact", "third", "--to", "mqa", "--allow-loss"]) == 0
    assert Certificate.read(Path("third")).earlier[:1] == [one]
    assert len(Certificate.read(Path("third")).earlier) == 2
    assert main(["convert", "lossy", "heads", "--to", "mha"]) == 0
    assert main(["export", "heads", "stock"]) == 0
    assert f"| {one.kl:.3g} |" in Path("stock/README.md").read_text()
    table = json.loads(Path("exact/conversion.json").read_text())
    for damage in ({"kl": "a"}, {"loss": [1.0]}, {"more": 1}):
        damaged = table | {"earlier": [table["earlier"][0] | damage]}
        Path("exact/conversion.json").write_text(json.dumps(damaged))
        with pytest.raises(InvalidInput, match="is not a conversion certificate"):
            Certificate.read(Path("exact"))
    Path("exact/MANIFEST.json").unlink()  # as in a folder of another program
    assert main(["convert", "exact", "fourth", "--to", "mqa", "--allow-loss"]) == 0
    assert "is left out of the certificate" in capfd.readouterr().err
    assert Certificate.read(Path("fourth")).earlier == []


def test_an_export_that_converts_names_the_conversion_before():
    heads = GroupedConfig(n_query_head=2, n_kv_head=2, head_dim=8, rope=RopeConfig())
    rehead.save(build(llama_shaped(heads, vocab_size=31, n_embd=16, n_hidden=24)), "model")
    assert main(["convert", "model", "lossy", "--to", "mqa", "--allow-loss"]) == 0
    assert main(["export", "lossy", "stock", "--format", "deepseek_v3"]) == 0
    made = Certificate.read(Path("stock"))
    assert made.exact
    assert made.earlier == history(Certificate.read(Path("lossy")))


def test_an_exact_latent_that_is_smaller_than_asked_for(capfd):
    wide = [
        "model.n_embd=12",
        "model.n_query_head=2",
        "model.n_layer=1",
        "trainer.max_iters=0",
        "model.head_dim=9",
    ]
    Path("text.txt").write_text(TEXT * 12)
    assert main(["train", "data.path=text.txt", "data.block_size=16", "system.work_dir=run", *wide]) == 0
    capfd.readouterr()
    assert main(["convert", "run", "out", "--to", "mla", "--kv-fraction", "1"]) == 0
    assert "(33.33 %: an exact latent needs less than the 100 % asked for)" in capfd.readouterr().out
