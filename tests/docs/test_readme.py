"""What the README and the pages beside it say, run."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from rehead.checkpoint import families
from rehead.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ["model.n_layer=1", "trainer.batch_size=2", "trainer.eval_batches=1", "trainer.sample_tokens=4"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    """An empty folder with two texts, in which commands run in float32."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text("O God, O God! How weary, stale, flat and unprofitable\n" * 60)
    Path("other.txt").write_text("How weary, O God, unprofitable, flat and stale\n" * 60)


def commands(block):
    """Each command of a console block with the output printed below it."""
    for part in block.strip().split("$ ")[1:]:
        command, _, output = part.partition("\n")
        yield shlex.split(command), output.strip()


def test_every_command_runs_and_prints_what_is_shown(somewhere, capsys):
    """The model has one layer, trains for two iterations and writes 9 tokens; nothing else is changed."""
    ran = 0
    for words, shown in (pair for block in blocks("console") for pair in commands(block)):
        assert words[0] == "rehead"
        words = [re.sub(r"max_iters=\d+", "max_iters=2", word) for word in words[1:]]
        words = [
            "9" if before == "--max-new-tokens" else word
            for before, word in zip(["", *words], words, strict=False)
        ]
        if words[0] == "train" and not shown:
            words += SMALL
        status = main(words)
        printed = capsys.readouterr()
        assert (status == 0) == (not shown), printed.err
        if shown:
            assert printed.err.strip() == shown
        ran += 1
    assert ran == 14


@pytest.mark.parametrize("row", re.findall(r"^\| [^|]+ \| (`'?model.*) \|$", README, re.MULTILINE))
def test_every_flag_in_the_table_resolves(row):
    from rehead.config.flags import read

    for flags in re.findall(r"`([^`]+)`", row):
        read(shlex.split(flags)).model.resolve(65, 256)


def test_python_examples_run(somewhere, capsys):
    """After the first run of the page, with one layer and two iterations; nothing else is changed."""
    (first, _) = next(
        pair for block in blocks("console") for pair in commands(block) if pair[0][1] == "train"
    )
    assert main([*[re.sub(r"max_iters=\d+", "max_iters=2", word) for word in first[1:]], *SMALL]) == 0
    capsys.readouterr()
    seen = {}
    for code in blocks("python"):
        names = {}
        exec(compile(code, "README.md", "exec"), names)
        seen[code.split()[1]] = capsys.readouterr().out, names
    attentions, _ = seen["torch"]
    assert attentions.split() == [
        "gqa",
        str(4 * 64 * 2 * 64 * 4),
        "bytes",
        "mla",
        str(4 * 100 * 64 * 4),
        "bytes",
    ]
    text, names = seen["pathlib"]
    assert text.startswith("O God, O God! How weary, stale")
    assert len(text) == 30 + 100 + 1
    assert names["logits"].shape == (1, 30, names["tokenizer"].vocab_size)
    assert Path("out/half/config.json").is_file()
    assert names["certificate"].exact is False


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_map_of_rooms_is_the_tree():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = {
        entry.name
        for entry in (ROOT / "src" / "rehead").iterdir()
        if not entry.name.startswith(("_", "py.typed"))
    }
    missing = {name for name in tree if name.removesuffix(".py") not in re.findall(r"\w+", page)}
    assert not missing


FAMILIES = {
    "gpt2": "GPT-2", "gpt_neox": "GPT-NeoX", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE", "smollm3": "SmolLM3", "phi3": "Phi-3", "olmo2": "OLMo2", "granite": "Granite",
    "glm": "GLM and", "glm4": "GLM-4", "gemma2": "Gemma 2", "gemma3_text": "and 3 (text)",
    "deepseek_v2": "DeepSeek-V2", "deepseek_v3": "or V3", "youtu": "Youtu", "minicpm3": "MiniCPM3",
}  # fmt: skip


def test_every_family_is_listed():
    assert FAMILIES.keys() == set(families)
    (listed,) = re.findall(r"Hugging Face folder of (.*?), or a Hub model", README, re.DOTALL)
    assert not [name for name in FAMILIES.values() if name not in " ".join(listed.split())]
