"""The command line as it is typed: help at any width, examples that run, what is no command."""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest
import torch
from gguf_files import model, write  # of tests/checkpoint

from rehead.cli import main
from rehead.cli.entry import app
from rehead.cli.options import read_options
from rehead.config import RunOptions
from rehead.conversion.export.push import Push, Pushed

SCRIPT = [str(Path(sys.executable).with_name("rehead"))]
MODULE = [sys.executable, "-m", "rehead"]
COMMANDS = sorted(name for name in app if not name.startswith("-"))
SMALL = [
    "model.n_layer=1",
    "model.n_embd=24",
    "trainer.batch_size=2",
    "trainer.eval_batches=1",
    "trainer.max_iters=1",
]


def typed(start, *words, width=80):
    done = subprocess.run(
        [*start, *words], capture_output=True, text=True, env={**os.environ, "COLUMNS": str(width)}
    )
    assert all(len(line) <= width for line in done.stdout.splitlines()), done.stdout
    return done.returncode, done.stdout, done.stderr


@pytest.mark.process
@pytest.mark.parametrize("start", [SCRIPT, MODULE], ids=["script", "module"])
def test_what_a_newcomer_types_first(start):
    status, shown, err = typed(start, "--help")
    assert (status, err) == (0, "")
    assert all(re.search(rf"^  {command}\b", shown, re.MULTILINE) for command in COMMANDS)
    assert typed(start, "-h") == (0, shown, "")
    assert typed(start, "help") == (0, shown, "")
    assert typed(start) == (2, shown, "")
    assert typed(start, "--version") == (0, f"{__import__('rehead').__version__}\n", "")
    status, narrow, err = typed(start, "--help", width=40)
    assert (status, err, narrow.split()) == (0, "", shown.split())  # the same words


@pytest.mark.process
@pytest.mark.parametrize(
    ("word", "hint"), [("nonsense", ""), ("pln", "Did you mean 'plan'? "), ("--json", "")]
)
def test_what_is_no_command(word, hint):
    status, shown, err = typed(SCRIPT, word)
    assert (status, shown) == (2, "")
    assert (
        err == f"rehead: unknown command {word!r}. {hint}Known: {', '.join(COMMANDS)}. See rehead --help.\n"
    )


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    status, wide, err = typed(SCRIPT, command, "--help")
    assert (status, err) == (0, "")
    assert wide.startswith(f"Usage: rehead {command}")
    assert f"\n    rehead {command} " in wide.replace("\n    rehead env\n", "\n    rehead env \n")
    status, narrow, err = typed(SCRIPT, command, "-h", width=40)
    assert (status, err) == (0, "")
    assert narrow.split() == wide.split()
    assert all(len(line) <= 40 for line in narrow.splitlines()), narrow


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_is_explained(command):
    for argument in app[command].assemble_argument_collection():
        explained = argument.parameter.help or argument.parameter.group[0].help_formatter
        assert explained, f"{command}: {argument.name}"


@pytest.mark.process
def test_help_needs_no_torch():
    code = f"""
import sys
from rehead.cli import main
for words in ["--help"], ["--version"], *([one, "--help"] for one in {COMMANDS}):
    assert main(words) == 0
assert not {{"torch", "numpy", "yaml"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def examples():
    for command in COMMANDS:
        found = re.findall(r"^ {4,}(rehead .*)$", app[command].help, re.MULTILINE)
        assert found, f"{command} has no example"
        yield from (
            line for line in found if "--tasks" not in line
        )  # tests/serving/test_lm_eval.py runs that


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the text and the models that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    with contextlib.chdir(folder):
        torch.set_default_dtype(torch.float32)
        Path("input.txt").write_text("O God, O God! Hope is a waking dream and, flat and unprofitable\n" * 60)
        text = ["data.path=input.txt", *SMALL]
        assert main(["train", *text, "system.work_dir=out/run", "model.n_kv_head=3", "model.rope=True"]) == 0
        llama = ["model.shape=llama", "model.n_kv_head=2", "model.bias=False"]
        assert main(["train", *text, "system.work_dir=out/llama", *llama]) == 0
        lossy = ["--to", "mla", "--kv-fraction", "0.5", "--allow-loss"]
        assert main(["convert", "out/run", "out/mla", *lossy]) == 0
        write(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), model("llama"), "llama", "Q4_1")
        yield folder


@pytest.mark.parametrize("line", list(examples()))
def test_every_example_runs_as_shown(line, place, monkeypatch, capsys):
    """Training takes two steps of one layer, and nothing is written where something is."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(place)
    words = shlex.split(line)[1:]
    if words[0] in ("train", "study"):
        words += [*SMALL, f"system.work_dir=out/{words[0]}", "trainer.sample_every=0"]
        words += ["data.path=input.txt"] if "data.path=input.txt" not in words else []
        words += ["data.block_size=16"]
    if words[0] == "heal":
        words = [re.sub(r"max_iters=\d+", "max_iters=2", word) for word in words]
        words += ["trainer.batch_size=2", "trainer.eval_batches=1"]
    if words[0] == "convert":
        words[2] = "out/converted"
    if "--push" in words:  # tests/conversion/test_push.py uploads
        monkeypatch.setattr(Push, "run", lambda push, progress: Pushed(url=push.name, commit="0"))
    assert main(words) == 0, capsys.readouterr().err


def test_every_option_is_explained_and_as_it_is():
    """What help reads from the source is what the dataclasses are."""
    told = {(one.group, one.name): one for one in read_options()}
    kinds = {int: "INT", float: "NUMBER", bool: "BOOL", str: "TEXT", dict: "TABLE", list: "LIST"}
    groups = {field.name: field.type for field in dataclasses.fields(RunOptions)}
    fields = {(group, one.name): one for group, kind in groups.items() for one in dataclasses.fields(kind)}
    assert list(told) == list(fields)
    for key, field in fields.items():
        option, kind = told[key], field.type
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        assert option.meaning, key
        assert option.default, f"{key}: say what None means, in [default: ...]"
        assert field.default is None or option.default == str(field.default), key
        if option.choices:
            several = get_origin(kind) is list
            kind = get_args(kind)[0] if several else kind
            assert (option.kind, option.choices) == ("LIST" if several else "CHOICE", get_args(kind)), key
        else:
            assert option.kind == kinds[get_origin(kind) or kind], key


def test_defaults_that_follow_from_others_are_what_help_says():
    told = {one.name: one.default for one in read_options() if one.group == "model"}
    gpt = RunOptions().model.resolve(11, 8)
    assert (
        told["n_layer"]
        == f"{gpt.n_layer}; rnn: {dataclasses.replace(RunOptions().model, type='rnn').resolve(11, 8).n_layer}"
    )
    (rotary,) = set(dataclasses.replace(RunOptions().model, rope=True).resolve(11, 8).attention)
    assert (told["rope_theta"], told["rope_layout"]) == (f"{rotary.rope.theta:.0f}", rotary.rope.layout)
    additive = dataclasses.replace(RunOptions().model, score="additive").resolve(11, 8).attention[0]
    assert told["score_width"] == str(additive.score.width)
    latent = dataclasses.replace(RunOptions().model, attention="mla", rope=True).resolve(11, 8).attention[0]
    head_dim = latent.qk_nope_head_dim
    assert (told["qk_nope_head_dim"], head_dim) == ("head_dim", 192 // 6)
    assert (told["kv_lora_rank"], latent.kv_lora_rank) == ("4 head_dim", 4 * head_dim)
    assert (told["qk_rope_head_dim"].partition(",")[0], latent.qk_rope_head_dim) == (
        "half head_dim",
        head_dim // 2,
    )
    assert (told["n_hidden"].partition(";")[0], gpt.n_hidden) == ("4 n_embd", 4 * 192)


def test_a_default_is_written_as_it_is_typed(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert "sequences at once [default: 1]" in text
    assert "(1,)" not in text


def test_what_takes_long_says_how_long(capsys):
    for command, said in (
        ("train", "With the defaults, training takes about 13 minutes on 2 CPU cores."),
        ("study", "demo takes about 3 minutes and frontier 33; homework takes 35 with"),
        ("convert", "24,576 tokens takes about 6 minutes on one CPU core; sampling self takes 2 or 3 more"),
    ):
        assert main([command, "--help"]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
