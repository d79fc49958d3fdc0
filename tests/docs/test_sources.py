"""docs/sources.md: every question of the four documents is there. Every command there and in the tutorials runs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers

from rehead import tokenizer
from rehead.cli import main
from rehead.study import Preset, jobs

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sources.md").read_text(encoding="utf-8")
TUTORIALS = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "tutorials").glob("*.md"))]
COMMANDS = list(
    dict.fromkeys(re.findall(r"(?:^\$ |`)(rehead \w+ [^`\n]+)", "\n".join([PAGE, *TUTORIALS]), re.MULTILINE))
)
TEXT = "O God, O God! How weary, stale, flat and unprofitable. Hope is a waking dream and\n"
TINY = ["model.n_layer=1", "model.n_embd=24", "trainer.batch_size=2", "trainer.eval_batches=1"]


def test_every_question_and_every_slip_has_its_row():
    rows = {
        code
        for cell in re.findall(r"^\| ([A-E][\w, ]*?) \|", PAGE, re.MULTILINE)
        for code in cell.split(", ")
    }
    numbers = {"A": 17, "B": 25, "C": 8, "E": 27}
    assert rows == {f"{letter}{n + 1}" for letter, many in numbers.items() for n in range(many)}


@pytest.fixture(scope="module")
def somewhere(tmp_path_factory):
    """A folder with what the commands name: the text, two runs and their latent, a GPT-2 folder."""
    place = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        torch.set_default_dtype(torch.float32)
        Path("input.txt").write_text(TEXT * 60)
        train = ["train", "data.path=input.txt", "data.block_size=16", "trainer.max_iters=2", *TINY]
        assert main([*train, "model.rope=True", "model.n_kv_head=2", "system.work_dir=out/run"]) == 0
        assert main([*train, "system.work_dir=out/plain"]) == 0
        words = tokenizer.train("bpe", TEXT, 280)
        sizes = {"n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 512}
        config = transformers.GPT2Config(vocab_size=words.vocab_size, **sizes, bos_token_id=0, eos_token_id=0)
        transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
        (quiz,) = re.findall(r"```yaml\n(.*?)```", "".join(TUTORIALS), re.DOTALL)
        Path("quiz.yaml").write_text(quiz)
        Path("gpt2/tokenizer.json").write_text(words.to_json())
    return place


def smaller(words):
    """The same command on a small model for two iterations, and a few tokens."""
    words = [re.sub(r"max_iters=\d+", "max_iters=2", word) for word in words]
    for flag in ("--max-new-tokens", "--new-tokens", "--batch"):
        if flag in words:
            words[words.index(flag) + 1] = "9"
    if words[0] == "train":
        words += TINY
    return words


RUNS = {made: command for command in COMMANDS for made in re.findall(r"system\.work_dir=(\S+)", command)}


def make_runs_before(words):
    """Run the commands that make the runs `words` name, if no test of this process has."""
    for word in words:
        made = word.split("=")[-1]
        if made in RUNS and not word.startswith("system.work_dir") and not Path(made).exists():
            before = shlex.split(RUNS[made])[1:]
            make_runs_before(before)
            assert main(smaller(before)) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command, somewhere, monkeypatch, capfd):
    monkeypatch.chdir(somewhere)
    torch.set_default_dtype(torch.float32)
    words = ["out/run" if word == "MODEL" else word for word in shlex.split(command)[1:]]
    make_runs_before(words)
    if words[0] == "study":  # tests/study runs presets; here the flags must fit
        found = jobs(Preset.read(words[2]), words[3:], 1.0)
        assert len(found) == {"homework": 20, "grid": 4}[words[2]]
    else:
        assert main(smaller(words)) == 0, capfd.readouterr().err
