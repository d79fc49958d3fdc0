"""Odd terminals, closed pipes, and configs whose values no model has: as typed."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rehead
from rehead.checkpoint.own import read_config
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.errors import ReheadError
from rehead.model import build
from rehead.tokenizer import train

CONFIG = {"model_type": "llama", "vocab_size": 11, "hidden_size": 24, "intermediate_size": 40}
CONFIG |= {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    options = ModelOptions(shape="llama", n_layer=2, n_query_head=4, n_kv_head=2, n_embd=24, n_hidden=40)
    place = tmp_path_factory.mktemp("edges") / "model"
    rehead.save(
        build(options.resolve(11, 64)),
        place,
        files={"tokenizer.json": train("char", "abcdefghij ").to_json()},
    )
    return place


def test_columns_that_are_no_width_count_as_none(folder, monkeypatch, capfd):
    shown = {}
    for columns in (None, "0", "-5", "wide", "99999999999999", "", "40"):
        for name in ("COLUMNS", "LINES"):
            monkeypatch.delenv(name, raising=False)
            if columns is not None:
                monkeypatch.setenv(name, columns)
        assert main(["plan", str(folder)]) == 0
        shown[columns] = capfd.readouterr()
    assert shown.pop("40").out != shown[None].out
    assert set(shown.values()) == {(shown[None].out, "")}


@pytest.mark.process
@pytest.mark.parametrize("words", ["plan {}", "plan --help", ""])
def test_a_closed_pipe_is_no_failure(folder, words):
    """`rehead plan FOLDER | head -0`"""
    command = [sys.executable, "-m", "rehead", *words.format(folder).split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


TRAIN = (
    "train system.work_dir=run data.path=text.txt model.n_layer=1 model.n_embd=12 model.n_query_head=2 "
    "data.block_size=8 trainer.max_iters=6 trainer.eval_every=1 trainer.eval_batches=1 trainer.batch_size=2"
)


@pytest.fixture(params=["nobody reads", "full, and does not wait", "on a full disk", "closed"])
def stderr(request):
    """What a command is to have for its stderr; None to close it."""
    if request.param == "closed":
        yield None
    elif request.param == "on a full disk":
        with open("/dev/full", "w") as file:
            yield file
    else:
        reader, writer = os.pipe()
        if request.param == "nobody reads":
            os.close(reader)
        else:
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, b"x" * 4096)
        yield writer
        os.close(writer)


@pytest.mark.process
def test_a_training_whose_progress_cannot_be_written_goes_on(stderr, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    command = [sys.executable, "-m", "rehead", *TRAIN.split()]
    if stderr is None:
        command = ["bash", "-c", 'exec "$@" 2>&-', "bash", *command]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert (done.returncode, done.stdout[:22]) == (0, "done: validation loss ")
    assert (tmp_path / "run" / "checkpoints" / "step-000006").is_dir()


def test_a_run_that_has_ended_says_that_no_step_is_left(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("abcdefgh" * 100)
    said = "rehead: warning: run has reached trainer.max_iters=6: no step is left to train. Give more to go on.\n"
    for last, flags, told in (
        (6, [], False),
        (6, ["trainer.resume=True"], True),
        (7, ["trainer.resume=True"], False),
    ):
        assert main([*TRAIN.replace("max_iters=6", f"max_iters={last}").split(), *flags]) == 0
        assert (said in capfd.readouterr().err) == told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan {} --context 99999999999", "--context 99999999999. Use 1 to 16,777,216."),
        ("plan {} --batch 99999999999", "--batch 99999999999. Use 1 to 1,048,576."),
        ("eval /dev/null --data x", "/dev/null is neither a file nor a folder"),
        ("plan /dev/null", "/dev/null is neither a file nor a folder"),
    ],
)
def test_absurd_arguments(folder, words, said, capfd):
    assert main(words.format(folder).split()) in (2, 3)
    error = capfd.readouterr().err
    assert error.startswith(f"rehead: {said}")
    assert len(error.splitlines()) == 1


def test_an_empty_prompt_is_named(folder, capfd):
    assert main(["generate", str(folder), "--prompt", ""]) == 2
    said = "rehead: --prompt: the argument is empty. Give it a value of at least one character.\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps=null, which the stock class does not read"),
        ({"rope_theta": None}, "rope_theta=null"),
        ({"hidden_act": None}, "hidden_act=null"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000. Use 1 to 1024."),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0. Use 1 to 1024."),
        (
            {"intermediate_size": 10**12},
            "intermediate_size=1000000000000 is too large. Use at most 16,777,216.",
        ),
        ({"intermediate_size": 2**23}, "n_hidden=8388608 is too large. Use at most 1,048,576."),
        ({"torch_dtype": "int8"}, "torch_dtype='int8': rehead reads weights of"),
        ({"dtype": "floaty"}, "dtype='floaty': rehead reads weights of"),
    ],
)
def test_values_no_model_has(tmp_path, change, said):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ReheadError, match=said.replace(".", r"\.")):
        read_config(tmp_path)


def test_nulls_that_mean_a_default(tmp_path):
    """What transformers itself writes, or computes from other sizes."""
    nulls = dict.fromkeys(
        ["num_key_value_heads", "head_dim", "rope_scaling", "attention_bias", "mlp_bias", "pad_token_id"]
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | nulls))
    (attention, _) = read_config(tmp_path).attention
    assert (attention.n_kv_head, attention.head_dim, attention.qkv_bias) == (4, 6, False)
