"""What the terminal tells of a study of one model."""

import re
import shlex

import pytest

import rehead
from rehead.config import ModelOptions
from rehead.model import build
from rehead.report.progress import Board
from rehead.report.story import Story
from rehead.study import Preset, jobs


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A given model and a conversion of it, in folders with blanks."""
    monkeypatch.chdir(tmp_path)
    rehead.save(build(ModelOptions(n_layer=1, n_query_head=2, n_embd=8).resolve(9, 16)), "my model")
    (tmp_path / "held out.txt").write_text("O God")

    def plan(**more):
        variants = {
            "Source": {"source": "my model"},
            "Half": {"from": "Source", "convert": {"to": "mqa", "calibration": "self", **more}},
        }
        return jobs(
            Preset.of("p", {"about": "x", "variants": variants}),
            ["data.block_size=16", "system.work_dir=my study"],
        )

    return plan


@pytest.mark.parametrize(
    ("more", "rounded"),
    [
        ({"test": "held out.txt"}, ["eval", "HALF", "--data", "held out.txt", "--kv-dtype", "fp8"]),
        ({}, ["plan", "HALF", "--kv-dtype", "fp8"]),
    ],
)
def test_every_command_can_be_typed(planned, more, rounded, capsys):
    found = planned(**more)
    half = str(found[1].model)
    assert " " in half
    with Board() as board:
        story = Story(found, board)
        for event in ("costs", "formats"):
            story.show(found[1], {"event": event})
        story.show(found[0], {"event": "measured", "found": {"certificate": None, "val_loss": 1.0}})
    typed = [shlex.split(line) for line in re.findall(r"\$ (.*)", capsys.readouterr().err)]
    assert typed == [
        ["rehead", "bench", half],
        ["rehead", *(half if word == "HALF" else word for word in rounded)],
        ["rehead", "plan", "my model"],
        ["rehead", "plan", "my model", "--context", "16"],
    ]
