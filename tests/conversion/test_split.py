"""How many numbers of an uneven cache rotate, found by measuring: against brute force, and as typed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rehead
from rehead.attention import GroupedConfig
from rehead.cli import main
from rehead.conversion.converter import Converter
from rehead.conversion.measured import measured_layers
from rehead.conversion.split import TRIAL_TOKENS, _descent, _halves, _widths, best_split
from rehead.conversion.target import Target
from rehead.conversion.texts import Passage
from rehead.errors import ConfigError
from rehead.measure.fidelity import compare
from rehead.model import build
from small import llama_shaped

VOCAB, LENGTH = 23, 16


@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 8))
def test_the_lowest_point_of_a_valley_is_found(many, lowest, start):
    """Whatever the start, and without trying the far side."""
    lowest, start = lowest % many, start % many
    widths, tried = [2 * index + 2 for index in range(many)], []

    def lost(width):
        tried.append(width)
        return abs(widths.index(width) - lowest)

    *_, best = found = list(_descent(widths, widths[start], lost))
    assert best == widths[lowest]
    assert len(found) == len(tried) == len(set(tried)) <= abs(lowest - start) + 3


def test_windows_are_fitted_to_or_measured_on():
    """Of each text, also where a batch is a window."""
    for rows in ([4, 3], [1, 1, 1], [1, 5]):
        windows = iter(torch.arange(sum(rows)))
        blocks = [(torch.stack([next(windows) for _ in range(n)])[:, None],) * 2 for n in rows]
        halves = [torch.cat([inputs for inputs, _ in half]).flatten().tolist() for half in _halves(blocks)]
        assert sorted([*halves[0], *halves[1]]) == list(range(sum(rows)))
        assert abs(len(halves[0]) - len(halves[1])) <= len(rows)


@pytest.fixture
def model():
    """Two layers whose first frequencies matter far more than the others, in both heads."""
    torch.manual_seed(4)
    heads = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=8, rope=True)
    model = build(
        llama_shaped(*[heads] * 2, vocab_size=VOCAB, block_size=LENGTH, n_embd=24, n_hidden=32)
    ).eval()
    for layer in model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            rows = projection.weight.data.view(-1, 8, 24)
            rows[:, [0, 4, 1, 5]] *= 10
    return model


def text(n, seed):
    return Passage(name=f"text {seed}", ids=np.random.default_rng(seed).integers(VOCAB, size=n))


@pytest.mark.parametrize("share", [0.5, 0.4375])
def test_the_width_is_that_of_the_least_change(share, model):
    target = Target(to="mla", target="uneven", kv_fraction=share)
    converter = Converter(model, None, [text(2000, 1), text(900, 2)], length=LENGTH)
    usual, widths = _widths(converter, target)
    assert usual in widths
    assert len(widths) > 2
    fit, measured = _halves(converter.read(TRIAL_TOKENS))
    changes = {}
    for width in widths:
        trial = Converter(model, None, length=LENGTH)
        trial.blocks = fit
        wanted = Target(to="mla", target="uneven", kv_fraction=share, rope_dim=width)
        changes[width] = compare(model, trial.follow(trial.attentions(wanted))[0], measured).kl
    found, read = best_split(converter, target)
    assert read == TRIAL_TOKENS
    best = min(changes, key=changes.__getitem__)
    assert [layer.qk_rope_head_dim for layer in found] == [best] * 2
    assert (best == usual) == (share == 0.5)
    assert sum(layer.kv_numbers() for layer in found) <= share * 2 * 32
    # and the frequencies are those chosen on all of the text
    wanted = Target(to="mla", target="uneven", kv_fraction=share, rope_dim=best)
    assert list(found) == list(converter.attentions(wanted))


def test_a_model_whose_cache_holds_all_rotations_keeps_them(model):
    target = Target(to="mla", target="uneven", kv_fraction=1.0)
    converter = Converter(model, None, [text(500, 1)], length=LENGTH)
    assert [one.qk_rope_head_dim for one in best_split(converter, target)[0]] == [16, 16]


def test_what_cannot_rotate_is_refused_where_a_study_converts_what_it_has_just_made(gpt):
    """No config told it before: `measured_layers` does."""
    plain = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
    converter = Converter(gpt(plain), None, [text(500, 1)], length=LENGTH)
    for asked in ({"target": "uneven"}, {"rope_layout": "interleaved"}):
        with pytest.raises(ConfigError, match="none of its layers rotates its keys"):
            measured_layers(converter, Target(to="mla", kv_fraction=0.5, **asked), True, None)


def test_as_typed(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("fit.txt").write_text("the quick brown fox jumps over it " * 90)
    tokenizer = rehead.tokenizer.train("char", Path("fit.txt").read_text())
    options = rehead.config.ModelOptions(
        shape="llama", n_layer=2, n_embd=24, n_query_head=4, n_kv_head=2, head_dim=8
    )
    rehead.save(
        build(options.resolve(tokenizer.vocab_size, 16)),
        "model",
        files={"tokenizer.json": tokenizer.to_json()},
    )
    words = [
        "--to",
        "mla",
        "--target",
        "uneven",
        "--kv-fraction",
        "0.5",
        "--calibration",
        "fit.txt",
        "--allow-loss",
        "--json",
    ]
    assert main(["convert", "model", "made", *words, "--measured-ranks"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    made = rehead.load("made").config.attention[0]
    assert made.kv_numbers() == 16
    assert certificate["calibration"]
    for more, said in (
        (
            ["--rope-dim", "4", "--measured-ranks"],
            "--measured-ranks finds how many numbers rotate. Leave it out, or",
        ),
        (
            ["--target", "canonical", "--measured-ranks"],
            "--measured-ranks is for latents with rebuilt keys. Leave out",
        ),
    ):
        base = [word for word in words if word != "uneven" or "canonical" not in more]
        line = base if "canonical" not in more else [word for word in base if word != "--target"]
        assert main(["convert", "model", "other", *line, *more]) == 2
        assert said in capsys.readouterr().err
    Path("short.txt").write_text("the quick brown f")
    short = ["short.txt" if word == "fit.txt" else word for word in words]
    capsys.readouterr()
    assert main(["convert", "model", "other", *short, "--measured-ranks", "--test", "fit.txt"]) == 2
    assert "measured on half of the text, which has one window" in capsys.readouterr().err
    words[words.index("--kv-fraction")] = "--max-loss"
    assert main(["convert", "model", "other", *words]) == 2
    assert "--max-loss is for latents with rebuilt keys. Leave out --target uneven" in capsys.readouterr().err
