"""The command line as a user meets it: exit status, one line of error, one JSON document."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rehead.cli import main
from rehead.cli.entry import _normalise_flag
from rehead.config.flags import OPTIONS

TINY = [
    "model.n_layer=1",
    "model.n_embd=12",
    "trainer.batch_size=2",
    "trainer.eval_batches=1",
    "trainer.max_iters=2",
]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("O God, O God! How weary, stale, flat\n" * 20)


@pytest.fixture
def model(capfd):
    """A trained run in out/x."""
    assert main(["train", "data.path=text.txt", "data.block_size=16", "system.work_dir=out/x", *TINY]) == 0
    capfd.readouterr()
    return "out/x"


HOMEWORK = [
    "data.block_size=128",
    "system.work_dir=out/new_chargpt",
    "model.n_query_head=6",
    "model.n_kv_head=3",
    "model.rope=True",
    "trainer.max_iters=1",
    "trainer.device=cpu",
]


@pytest.mark.parametrize("dashes", ["", "--"])
def test_b17_the_homeworks_flags(dashes, capfd):
    small = ["data.path=text.txt", "trainer.batch_size=1", "trainer.eval_batches=1", "trainer.sample_every=0"]
    Path("text.txt").write_text("O God, O God! How weary\n" * 90)
    assert main(["train", *(dashes + flag for flag in HOMEWORK + small), "--json"]) == 0
    out = capfd.readouterr().out
    assert json.loads(out)["step"] == 1
    config = json.loads(Path("out/new_chargpt/checkpoints/step-000001/config.json").read_text())
    assert (config["attention"][0]["variant"], config["attention"][0]["n_kv_head"]) == ("gqa", 3)
    assert len(config["attention"][0]["layers"]) == 6
    assert config["attention"][0]["rope"]["theta"] == 10000


def test_json_is_one_document_and_nothing_else(model, capfd):
    for command in (
        ["generate", model, "--prompt", "O", "--max-new-tokens", "4", "--json"],
        ["eval", model, "--data", "text.txt", "--json"],
        ["env", "--json"],
    ):
        assert main(command) == 0
        out = capfd.readouterr().out
        assert len(out.splitlines()) == 1
        assert isinstance(json.loads(out), dict)


def text_of(capfd, *arguments):
    assert main(["generate", *arguments, "--max-new-tokens", "20"]) == 0
    return capfd.readouterr().out


@pytest.mark.parametrize(
    "how", [["--temperature", "0"], ["--temperature", "0.9", "--top-k", "5", "--seed", "3"]]
)
def test_several_prompts_are_each_alone_with_and_without_cache(model, capfd, how):
    prompts = ["O God", "H", "weary, stale"]
    alone = [text_of(capfd, model, "--prompt", prompt, *how).rstrip("\n") for prompt in prompts]
    assert all(text.startswith(prompt) for text, prompt in zip(alone, prompts, strict=True))
    many = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert text_of(capfd, model, *many, *how).rstrip("\n") == "\n---\n".join(alone)
    assert text_of(capfd, model, "--prompt", prompts[0], *how, "--no-cache").rstrip("\n") == alone[0]


def test_eval_is_the_mean_over_the_text(model, capfd):
    assert main(["eval", model, "--data", "text.txt", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    n_byte = len(Path("text.txt").read_bytes())
    assert result["tokens"] == n_byte - 1
    assert result["perplexity"] == pytest.approx(
        torch.tensor(result["loss"], dtype=torch.float64).exp().item()
    )
    bits = (
        result["loss"] * result["tokens"] / torch.log(torch.tensor(2.0, dtype=torch.float64)).item() / n_byte
    )
    assert result["bits_per_byte"] == pytest.approx(bits)


def test_eval_says_that_it_reads_what_was_trained_on(model, capfd):
    Path("held-out.txt").write_text("weary God! flat, O How stale\n" * 20)
    Path("both").mkdir()
    Path("both/a.txt").write_text(Path("held-out.txt").read_text() + Path("text.txt").read_text())
    Path("copy").mkdir()
    shutil.copytree("out/x/checkpoints/step-000002", "copy/model")
    convert = ["convert", model, "converted", "--to", "mla", "--kv-fraction", "0.2", "--allow-loss", "--json"]
    assert main(convert) == 0  # fitted to the training part of the run's own text
    capfd.readouterr()
    for folder, data, seen in (
        ("converted", "text.txt", True),
        ("converted", "held-out.txt", None),
        (model, "text.txt", True),
        (model, "both", True),
        ("out/x/checkpoints/step-000002", "text.txt", True),
        (model, "held-out.txt", False),
        ("copy/model", "text.txt", None),
    ):
        assert main(["eval", folder, "--data", data, "--json"]) == 0
        printed = capfd.readouterr()
        assert json.loads(printed.out)["contains_training_text"] is seen
        said = f"rehead: warning: {data} contains text that {folder} was trained on or fitted to: "
        said += "expect a higher loss on other text.\n"
        assert printed.err == (said if seen else "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_eval_shows_its_progress_on_a_terminal(model, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main(["eval", model, "--data", "text.txt", "--batch-size", "8"]) == 0
    shown = sys.stderr.getvalue()
    assert "eval" in shown
    assert "100%" in shown
    assert "0:00:00" in shown  # is left


REFUSED = [
    (["trian"], 2, ["trian", "train"]),
    (["train", "model.nkv_head=3"], 2, ["nkv_head", "n_kv_head"]),
    (["train", "--model.rope", "True"], 2, ["model.rope has no value", "write model.rope=True, with a ="]),
    (["train", "model.n_kv_head=4"], 2, ["n_kv_head=4", "[1, 2, 3, 6]"]),
    (["train", "model.n_query_head=5"], 2, ["n_query_head=5", "192"]),
    (["train", "trainer.device=cuda:99"], 2, ["cuda", "cpu"]),
    (["train", "data.path=nowhere.txt"], 3, ["nowhere.txt", "data.path"]),
    (["train", "data.path=empty.txt"], 3, ["empty.txt", "0 tokens"]),
    (["train", "data.path=latin.txt"], 3, ["latin.txt", "UTF-8", "byte 3"]),
    (["train", "data.path=text.txt", "data.block_size=700"], 3, ["701", "data.block_size=73"]),
    (["train", "--config", "nowhere.yaml"], 3, ["nowhere.yaml", "YAML"]),
    (["generate", "nowhere", "--prompt", "O"], 3, ["nowhere", "folder"]),
    (["generate", ".", "--prompt", "O"], 3, ["text.txt", "config.json"]),
    (["generate", "out/x", "--prompt", "Zorro"], 3, ["'Z'", "data.tokenizer=byte"]),
    (["generate", "out/x", "--prompt", ""], 2, ["empty"]),
    (["generate", "out/x", "--prompt", "O" * 17], 2, ["17", "16"]),
    (["generate", "out/x", "--prompt", "O", "--temperature", "-1"], 2, ["-1", "0"]),
    (["generate", "out/x", "--prompt", "O", "--top-p", "2"], 2, ["--top-p 2", "at most 1"]),
    (["generate", "out/x"], 2, ["prompt"]),
    (["eval", "out/x", "--data", "nowhere.txt"], 3, ["nowhere.txt"]),
    *(
        (command, 3, ["mine is a work folder of minGPT", "model.pt is a pickle", "rehead train", "args.txt"])
        for command in (
            ["generate", "mine", "--prompt", "O"],
            ["eval", "mine/model.pt", "--data", "text.txt"],
            ["plan", "mine"],
            ["convert", "mine", "new", "--to", "mqa"],
            ["train", "data.path=text.txt", "data.block_size=16", "model.pretrained_folder=mine"],
        )
    ),
    (
        ["train", "system.work_dir=out/x", "data.path=text.txt"],
        3,
        ["already holds a run", "trainer.resume=True"],
    ),
]


def test_every_mistake_is_one_line_with_value_and_remedy(model, capfd):
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    Path("mine").mkdir()
    for name in ("model.pt", "config.json", "args.txt", "train_logs.json"):
        Path("mine", name).write_text('{"model": {"model_type": "gpt"}}')
    for arguments, status, named in REFUSED:
        assert main(arguments) == status, arguments
        printed = capfd.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1, printed.err
        assert len(printed.err) <= 400, printed.err
        assert all(part in printed.err for part in named), printed.err


def test_a_mistake_leaves_nothing_in_the_way():
    assert main(["train", "data.path=text.txt", "data.block_size=900", "system.work_dir=out/y", *TINY]) == 3
    assert main(["train", "data.path=text.txt", "data.block_size=16", "system.work_dir=out/y", *TINY]) == 0


def test_a_bug_of_ours_is_logged(model, capfd, monkeypatch):
    monkeypatch.setattr("rehead.generation.stream", lambda *a, **k: 1 / 0)
    assert main(["generate", model, "--prompt", "O"]) == 8
    line = capfd.readouterr().err.strip()
    log = Path(line.rsplit(" ", 1)[1].rstrip("."))
    assert "ZeroDivisionError" in log.read_text()
    log.unlink()


def test_ctrl_c_outside_training(model, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rehead.generation.stream", stopped)
    assert main(["generate", model, "--prompt", "O"]) == 130


@pytest.mark.process
def test_python_m_rehead_and_a_closed_pipe():
    done = subprocess.run(
        f"{sys.executable} -m rehead train --print-config | head -1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "system:\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "x", "--context", "1.7"],
        ["convert", "a", "b", "--kv-rank=1.5"],
        ["generate", "a", "--top-k", "2.0"],
        ["bench", "a", "--prompt-lengths", "16", "64.7"],
        ["bench", "a", "--prompt-lengths", "16", "--batch", "1", "8", "8.5"],
        ["inspect", "a", "--text", "1.5", "--max-tokens", "10.7"],
    ],
)
def test_a_fraction_is_no_whole_number(words, capsys):
    assert main(words) == 2
    assert f"{words[-1].split('=')[-1]}: expected a whole number" in capsys.readouterr().err


def test_a_path_after_a_number_is_a_path(capsys):
    assert main(["plan", "--context", "16", "no.such/model.d"]) == 3
    assert "no.such/model.d" in capsys.readouterr().err


def test_every_flag_may_have_dashes():
    for group, options in OPTIONS.items():
        for name in options:
            assert _normalise_flag(f"--{group}.{name}=~/x") == f"{group}.{name}=~/x"
