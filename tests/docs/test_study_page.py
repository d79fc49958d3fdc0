"""docs/study.md: its command runs, its preset is one, its files are those that are written."""

import re
import shlex
from importlib.resources import files
from pathlib import Path

import torch
import yaml

from rehead import save
from rehead.cli import main
from rehead.config import ModelOptions
from rehead.model import build
from rehead.study import Preset, jobs, one_source

PAGE = (Path(__file__).parents[2] / "docs" / "study.md").read_text(encoding="utf-8")


def test_the_preset_shown_is_one():
    text, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = {job.variant: job for job in jobs(Preset.of("mine.yaml", yaml.safe_load(text)), [])}
    assert found["Latent, healed"].parent is found["Latent"]
    assert found["Longer"].steps_before == 600


def test_the_preset_of_one_model_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = build(ModelOptions(shape="llama", n_layer=1, n_query_head=4, n_embd=16).resolve(65, 128))
    save(model, Path("out/llama"))
    for name in ("fit.txt", "held-out.txt", "input.txt"):
        Path(name).touch()
    _, text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = jobs(Preset.of("mine.yaml", yaml.safe_load(text)), [])
    assert one_source(found) is found[0]
    assert [job.kind for job in found] == ["given", "converted", "converted", "healed", "exported"]


def test_every_preset_is_listed():
    shown = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert shown == {
        file.name.removesuffix(".yaml")
        for file in files("rehead.presets").iterdir()
        if file.name.endswith(".yaml")
    }


def test_the_command_runs_and_leaves_what_is_listed(tmp_path, monkeypatch):
    """With two of the values, one layer and two iterations."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    Path("input.txt").write_text("O God, O God! How weary, stale, flat and unprofitable\n" * 80)
    (command,) = re.findall(r"```console\n\$ rehead (.*?)\n```", PAGE, re.DOTALL)
    command = command.replace("[1,2,3,6]", "[1,6]").replace("[0,1]", "[0]").replace("=600", "=2")
    small = ["model.n_layer=1", "trainer.batch_size=2", "trainer.eval_batches=1", "data.block_size=32"]
    assert main([*shlex.split(command), *small]) == 0
    for name in (
        "report.html",
        "1-loss.png",
        "results.json",
        "runs.csv",
        "curves.csv",
        "n_kv_head=6/seed-0/config.yaml",
    ):
        assert Path("runs/grid", name).is_file()
