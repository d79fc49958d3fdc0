"""Tables and the progress line in narrow terminals: nothing is wider, no number is cut."""

import io
import re

import pytest
import torch
from rich.console import Console

from rehead.config import ModelOptions
from rehead.conversion.plan import plan
from rehead.report.bench import SPEED
from rehead.report.conversion import present_parts, present_plan
from rehead.report.progress import Board
from rehead.report.table import show


@pytest.mark.parametrize("width", [40, 80, 120, 250])
def test_a_plan_is_one_table_with_its_reasons_below(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    config = ModelOptions(n_layer=2, n_query_head=6, n_kv_head=3, n_embd=192, rope=True).resolve(65, 8192)
    found = plan(config, 8192, 1, torch.float32)
    present_plan(found)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    table = re.split(r"\n *\n(?=\S)", shown)[0]
    assert table.count("variant") == table.count("conversion") == shown.count("─ \n") == 1
    for name, least in (
        ("share", 80),
        ("cache", 80),
        ("FLOPs/step", 120),
        ("parameters", 120),
        ("read/step", 120),
    ):
        assert (name in table) == (width >= least)
    left_out = (
        "share, cache, parameters, FLOPs/step, read/step"
        if width < 80
        else "parameters, FLOPs/step, read/step"
    )
    assert (f"A wider terminal, or COLUMNS=160, also shows {left_out}." in " ".join(shown.split())) == (
        width < 120
    )
    words, notes = table.split(), " ".join(shown.split())
    for row in found.rows:
        assert f"{row.kv_bytes_per_token:,}" in words
        assert row.verdict in words
        assert set(row.variant.split()) <= set(words)
        made = f" ({row.command})" if row.command and row.verdict in ("exact", "approximate") else ""
        alike = [one.variant for one in found.rows if one.why == row.why] if not made else [row.variant]
        assert not row.why or f"{'; '.join(alike)}{made}: {row.why}" in notes
        assert row.why or f"{row.variant}{made}" in " ".join(shown.split())
        assert (f"{row.parameters:,}" in words) == (width >= 120)
    assert found.advice in notes


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_the_parts_of_a_plan_fit_and_have_all_their_numbers(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    config = ModelOptions(n_layer=2, n_query_head=6, n_kv_head=3, n_embd=192, rope=True).resolve(65, 8192)
    found = plan(config, 8192, 1, torch.float32)
    present_parts(found)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for row in found.rows:
        for number in (row.layer.kv_parameters, row.layer.attention_flops):
            assert f"{number:,}" in shown.split()


def test_a_benchs_table_repeats_its_first_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show("bench", SPEED, [["1,024", "16"] + ["614.5 (596.1-632.9)"] * (len(SPEED) - 2)], texts=(), keys=2)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("614.5 (596.1-632.9)") == len(SPEED) - 2
    assert shown.count("1,024") == shown.count("prompt") > 1


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_progress_keeps_steps_and_time_left(width, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    stream.isatty = lambda: True
    monkeypatch.setattr(
        "rehead.report.progress.Console",
        lambda **_: Console(file=stream, width=width, force_terminal=True, color_system=None),
    )
    with Board() as board:
        for step in range(1, 4):
            record = {"step": step, "loss": 3.1234, "val_loss": 2.9876, "seconds": 0.25}
            board.show(record, 60_000, "GQA window 32 and a very long name, seed 1")
    lines = [line for line in re.split(r"[\r\n]", stream.getvalue()) if "60000" in line]
    assert lines
    assert all(re.search(r"[0-9]/60000 +[-0-9]+:[-0-9:]+ +(loss|…|$)", line) for line in lines), lines
