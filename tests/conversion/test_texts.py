"""What a conversion is fitted to: several texts in equal shares, also the model's own; how long a window is."""

import json

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig
from rehead.conversion import sampled as sampled_module
from rehead.conversion.blocks import CALIBRATION_TOKENS
from rehead.conversion.converter import Converter
from rehead.conversion.sampled import sampled_once
from rehead.conversion.texts import SELF, Passage, passages, sampled
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.generation import generate

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
LOSSY = {"to": "mla", "kv_rank": 7}


def test_text_of_the_model_itself(gpt):
    """Windows of random first tokens, each as `generate` draws it; the same again, other with another seed."""
    model = gpt(GQA)
    text = sampled(model, 100, 16, seed=3)
    assert text.name == SELF
    rows = text.ids.reshape(6, 16)  # whole windows, at most 100 tokens
    assert len(set(rows[:, 0].tolist())) > 1
    seeds = (np.random.SeedSequence(3).generate_state(6, np.uint64) % 2**32).tolist()
    for row, seed in zip(rows, seeds, strict=True):
        alone = generate(model, torch.from_numpy(row[None, :1].copy()), 15, seed=seed)
        assert alone[0].tolist() == row.tolist()
    assert np.array_equal(sampled(model, 100, 16, seed=3).ids, text.ids)
    assert not np.array_equal(sampled(model, 100, 16, seed=4).ids, text.ids)
    assert len(sampled(model, 5, 16, seed=3).ids) == 16  # one window at least


def test_text_of_weights_that_lie_in_a_file(gpt, tmp_path):
    """They are brought into memory to be decoded with, and stay where they are in the model."""
    rehead.save(gpt(GQA), tmp_path / "model")
    deferred = rehead.load(tmp_path / "model", in_memory=False)
    kinds = [type(weight.data) for weight in deferred.parameters()]
    found = sampled(deferred, 100, 16, seed=3)
    assert np.array_equal(found.ids, sampled(gpt(GQA), 100, 16, seed=3).ids)
    assert [type(weight.data) for weight in deferred.parameters()] == kinds


def test_equal_shares(gpt, words):
    """Of two texts half of the windows each, however long they are; of one text all."""
    model = gpt(GQA)
    first, other = (Passage(name="words", ids=words(n)) for n in (400, 2000))
    both = Converter(model, calibration=[first, other]).read(160)
    rows = torch.cat([ids for ids, _ in both])
    assert len(rows) == 10
    assert (
        sum(any(np.array_equal(row, first.ids[at : at + 16]) for at in range(0, 400, 16)) for row in rows)
        >= 5
    )
    assert sum(len(ids) for ids, _ in Converter(model, calibration=[other]).read(160)) == 10


@pytest.mark.heavy
def test_a_list_of_texts_and_the_model_itself(gpt, words):
    """In Python; and the same to the bit when it is done again."""
    model = gpt(GQA, n_step=20, std=0.2)
    texts = [words(300), SELF, torch.from_numpy(words(200, seed=2))]
    results = [rehead.convert(model, calibration=texts, test=words(90, seed=5), **LOSSY) for _ in range(2)]
    for one, other in zip(*(result.parameters() for result, _ in results), strict=True):
        assert torch.equal(one, other)
    found = results[0][1].calibration
    share = CALIBRATION_TOKENS // 3
    assert [text.name for text in found] == ["ids", "self", "ids"]
    assert [text.tokens for text in found] == [300, share // 16 * 16, 200]
    assert [text.read for text in found] == [300, share // 16 * 16, 200]
    assert results[0][1].held_out is False
    _, plain = rehead.convert(model, calibration=words(300).tolist(), **LOSSY)  # numbers are one text
    assert [text.tokens for text in plain.calibration] == [300]


def test_another_seed_draws_other_labels(gpt, words):
    model = gpt(GQA)
    one, other, again = (
        rehead.convert(model, calibration=words(60), seed=seed, **LOSSY)[0].layers[0].self_attn
        for seed in (0, 1, 0)
    )
    weight = "kv_a_proj_with_mqa"
    assert not torch.equal(getattr(one, weight).weight, getattr(other, weight).weight)
    assert torch.equal(getattr(one, weight).weight, getattr(again, weight).weight)


MISTAKES = {
    "a path": ("fit.txt", UsageError, "calibration='fit.txt': give token ids, or 'self'"),
    "a path in a list": ([np.arange(9), "fit.txt"], UsageError, "calibration='fit.txt'"),
    "no whole numbers": (
        np.linspace(0, 3, 50),
        InvalidInput,
        r"a text of float64 and shape \(50,\): token ids are whole numbers",
    ),
    "rows": (
        np.zeros((2, 9), dtype=int),
        InvalidInput,
        r"shape \(2, 9\): token ids are whole numbers, \(N,\)",
    ),
    "nothing": ([], InvalidInput, "a text of float64"),
    "another vocabulary": (np.arange(40), InvalidInput, "vocab_size=29"),
}


@pytest.mark.parametrize(("calibration", "error", "says"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_no_text(calibration, error, says, gpt):
    with pytest.raises(error, match=says):
        passages(calibration, gpt(GQA), 100, 16, 0)


def test_windows_of_a_length(gpt, words):
    """In calibration, test and the certificate; the sink stands at the start of each."""
    model = gpt(GQA)
    _, certificate = rehead.convert(model, calibration=words(200), test=words(90, seed=1), length=5, **LOSSY)
    assert certificate.length == 5
    assert certificate.logits["tokens"] == 89
    _, other = rehead.convert(model, calibration=words(200), test=words(90, seed=1), **LOSSY)
    assert other.length == 16
    assert other.loss != certificate.loss
    assert {ids.shape[1] for ids, _ in Converter(model, length=5, calibration=[]).read(90)} <= {5}
    for length in (0, -1, 17):
        with pytest.raises(
            ConfigError, match=rf"length={length}: .*reads at most block_size=16 .*Use 1 to 16"
        ):
            rehead.convert(model, calibration=words(200), length=length, **LOSSY)


def test_a_long_model_is_read_in_windows_of_2048(gpt, words):
    model = gpt(GQA, n_layer=1, block_size=4096)
    assert rehead.convert(model, test=words(50), **LOSSY)[1].length == 2048
    assert json.loads(rehead.convert(model, **LOSSY)[1].to_json())["logits"]["tokens"] == 2 * 2048


def test_a_text_sampled_before_is_read_again(gpt, monkeypatch, tmp_path):
    """By the same model and arguments; a damaged file is none. A quick one is not kept."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model, drawn = gpt(GQA), []
    draw = sampled_module.sampled
    monkeypatch.setattr(sampled_module, "sampled", lambda *given: drawn.append(given) or draw(*given))
    first = sampled_once(model, 100, 16, 3)
    sampled_once(model, 100, 16, 3)
    assert len(drawn) == 2
    monkeypatch.setattr(sampled_module, "LONG", 0)
    for _ in range(3):
        assert np.array_equal(sampled_once(model, 100, 16, 3).ids, first.ids)
    assert len(drawn) == 3
    assert not np.array_equal(sampled_once(model, 100, 16, 4).ids, first.ids)
    assert not np.array_equal(sampled_once(gpt(GQA, seed=2), 100, 16, 3).ids, first.ids)
    assert len(drawn) == 5
    for damaged in (b"", b"not an array"):
        for file in tmp_path.rglob("*.npy"):
            file.write_bytes(damaged)
        assert np.array_equal(sampled_once(model, 100, 16, 3).ids, first.ids)
    assert len(drawn) == 7
