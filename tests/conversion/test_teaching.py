"""Attentions that learn from those of the source: by Adam written out, layer by layer."""

import copy
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.checkpoint.files.deferred import Deferred
from rehead.conversion.fit import teaching
from rehead.conversion.fit.moments import attentions
from rehead.conversion.fit.teaching import teach
from rehead.data import IGNORE, evaluation_blocks
from rehead.errors import InvalidInput, ReheadError
from rehead.stages import listening

GQA = GroupedConfig(n_query_head=6, n_kv_head=3, head_dim=4, rope=RopeConfig())
pytestmark = pytest.mark.heavy
PASSES, LENGTH = 2, 16


def blocks_of(ids, length=LENGTH, batch=3):
    return list(evaluation_blocks(ids, length, batch))


def cut(model, rank=5):
    """The model as MLA by a plain truncated SVD of the weights."""
    result, _ = rehead.convert(model, to="mla", kv_rank=rank, method="svd")
    return result


def written_out(source, result, which, blocks, passes, seed):
    """Every layer's inputs from whole forward passes; Adam with its moments as in the paper."""
    errors = {}
    windows = [
        (ids[None], (t != IGNORE)) for batch, targets in blocks for ids, t in zip(batch, targets, strict=True)
    ]
    measured = list(range(7, len(windows), 8)) or [len(windows) - 1]
    learned = [i for i in range(len(windows)) if i not in measured]
    for index in sorted(which):
        pairs = []
        for ids, counts in windows:
            seen = []
            for model in (source, result):
                hooks = [
                    attentions(model)[index].register_forward_hook(
                        lambda _, args, output, seen=seen: seen.append((args[0], output))
                    )
                ]
                with torch.no_grad():
                    model(ids)
                hooks[0].remove()
            pairs.append((seen[1][0], seen[0][1], counts))
        pupil = copy.deepcopy(attentions(result)[index]).double()

        def error(rows, pupil=pupil, pairs=pairs):
            with torch.no_grad():
                off = sum(
                    (pupil(x) - y)[:, counts].square().sum() for x, y, counts in (pairs[i] for i in rows)
                )
            return math.sqrt(
                off / sum(y[:, counts].square().sum() for _, y, counts in (pairs[i] for i in rows))
            )

        before, start = error(measured), copy.deepcopy(pupil.state_dict())
        matrices = [weight for weight in pupil.parameters() if weight.ndim == 2]
        rates = [4e-3 * weight.detach().square().mean().sqrt() for weight in matrices]
        first, second = ([torch.zeros_like(weight) for weight in matrices] for _ in range(2))
        noise, step = np.random.default_rng([seed, index]), 0
        steps = passes * len(learned)
        for _ in range(passes):
            for i in noise.permutation(learned):
                x, y, counts = pairs[i]
                loss = (pupil(x) - y)[:, counts].square().sum() / y[:, counts].square().sum()
                gradients = torch.autograd.grad(loss, matrices)
                share = min(1, (step + 1) / 4) * (1 + math.cos(math.pi * step / steps)) / 2
                step += 1
                for k, gradient in enumerate(gradients):
                    first[k] = 0.9 * first[k] + 0.1 * gradient
                    second[k] = 0.95 * second[k] + 0.05 * gradient**2
                    size = (second[k] / (1 - 0.95**step)).sqrt() + 1e-8
                    change = share * rates[k] * (first[k] / (1 - 0.9**step)) / size
                    matrices[k].data -= change
        after = error(measured)
        if after >= before:
            pupil.load_state_dict(start)
            after = before
        attentions(result)[index].load_state_dict(pupil.state_dict())
        errors[index] = before, after
    return errors


@pytest.fixture
def pair(gpt, words):
    """A source, its rough conversion, and a text whose last window is not full."""
    source = gpt(GQA, n_layer=3, n_step=5)
    return source, cut(source), blocks_of(words(230))


def taught(source, result, blocks, folder, which=(0, 1, 2), passes=PASSES, seed=4):
    return teach(source, result, which, blocks, folder, passes=passes, seed=seed)


KINDS = {
    "rope": GQA,
    "biases": replace(GQA, qkv_bias=True, rope=None),
    "window": replace(GQA, window=5),
    "normed": replace(GQA, qk_norm_eps=1e-6),
}


LONG = ("biases", "window")


@pytest.mark.parametrize(
    "attention",
    [pytest.param(kind, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, kind in KINDS.items()],
)
def test_as_adam_written_out(attention, gpt, words, tmp_path):
    source = gpt(attention, n_layer=3, n_step=5)
    result, blocks = cut(source), blocks_of(words(150))
    expected = copy.deepcopy(result)
    errors = written_out(source, expected, (0, 2), blocks, PASSES, 4)
    found = taught(source, result, blocks, tmp_path, (2, 0))
    assert list(found) == [0, 2]
    for index, (before, after) in errors.items():
        assert (found[index].before, found[index].after) == pytest.approx((before, after), rel=1e-9)
    assert errors[0][1] < errors[0][0]
    changed = [
        name
        for name, weight in result.named_parameters()
        if not torch.equal(weight, cut(source).get_parameter(name))
    ]
    assert changed
    assert all(".0." in name or ".2." in name for name in changed)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(
            result.get_parameter(name).detach() + 0, weight.detach(), rtol=1e-7, atol=1e-9
        )


def test_other_text_order_or_passes_give_others(pair, tmp_path, words):
    source, result, blocks = pair
    all_of_them = []
    for i, (text, changed) in enumerate(
        [(blocks, {}), (blocks, {"seed": 5}), (blocks, {"passes": 3}), (blocks_of(words(230, seed=1)), {})]
    ):
        one, folder = copy.deepcopy(result), tmp_path / str(i)
        folder.mkdir()
        taught(source, one, text, folder, **{"passes": 4} | changed)
        all_of_them.append(torch.cat([(weight.detach() + 0).flatten() for weight in one.parameters()]))
    for i in range(1, len(all_of_them)):
        assert not torch.equal(all_of_them[0], all_of_them[i])


@pytest.mark.parametrize("n_token", [230, 120])  # 120: the window held out is padded, too
def test_padding_teaches_nothing(n_token, pair, words, tmp_path):
    """The tokens after the end of a text are not learned from or measured on, whatever they are."""
    source, result, _ = pair
    blocks = blocks_of(words(n_token))
    other = [(ids.masked_fill(targets == IGNORE, 3), targets) for ids, targets in blocks]
    assert any(not torch.equal(ids, same) for (ids, _), (same, _) in zip(blocks, other, strict=True))
    (tmp_path / "other").mkdir()
    one = taught(source, copy.deepcopy(result), blocks, tmp_path)
    assert one == taught(source, copy.deepcopy(result), other, tmp_path / "other")


@pytest.mark.parametrize("rate", [1e3, 1e200])  # the latter ends in NaN
def test_what_learns_nothing_stays_as_it_was(rate, pair, tmp_path, monkeypatch):
    source, result, blocks = pair
    monkeypatch.setattr(teaching, "RATE", rate)
    before = {name: weight.detach().clone() for name, weight in result.named_parameters()}
    found = taught(source, result, blocks, tmp_path)
    assert all(one.before == one.after for one in found.values())
    for name, weight in result.named_parameters():
        assert torch.equal(weight.detach() + 0, before[name])


def test_half_precision_learns_in_float32(gpt, words, tmp_path):
    """The weights come back in bfloat16, and the error after is theirs."""
    source = gpt(GQA, n_step=5).to(torch.bfloat16)
    result, blocks = cut(source), blocks_of(words(230))
    found = taught(source, result, blocks, tmp_path, (0, 1))
    assert {weight.dtype for weight in result.parameters()} == {torch.bfloat16}
    assert found[0].after < found[0].before
    again = teach(source, result, (0,), blocks, _folder(tmp_path, "again"), passes=1)
    assert again[0].before == pytest.approx(found[0].after, rel=1e-5)


def _folder(path, name):
    (path / name).mkdir()
    return path / name


def test_one_window_is_too_few(pair, tmp_path):
    source, result, _ = pair
    ids = np.arange(12) % 29
    with pytest.raises(InvalidInput, match="the calibration is a single window"):
        taught(source, result, blocks_of(ids), tmp_path)


def test_steps_are_counted(pair, tmp_path, monkeypatch):
    """Also those of layers that were done before, for which nothing is read again."""
    source, result, blocks = pair
    for _ in range(2):
        seen = []
        with listening(seen.append):
            taught(source, copy.deepcopy(result), blocks, tmp_path)
        assert seen[0].title == "teaching the attentions"
        assert seen[-1].done == seen[-1].total == 3 * PASSES * (len(blocks) * 3 - 1)
        monkeypatch.setattr(teaching, "_write", None)


def test_nothing_is_left_but_the_weights(pair, tmp_path):
    source, result, blocks = pair
    taught(source, result, blocks, tmp_path, (1,))
    assert [place.name for place in tmp_path.iterdir()] == ["taught-1"]
    assert all(not weight.requires_grad for weight in attentions(result)[1].parameters())


class StoppedError(Exception):
    pass


def test_stopped_anywhere_it_goes_on(pair, tmp_path, monkeypatch):
    """Before every file that gets its name: the same weights at the end, and no layer is taught twice."""
    source, result, blocks = pair
    names, steps, stop_at = [], [], [None]
    for module, function in ((os, "replace"), (Path, "rename")):
        original = getattr(module, function)

        def noting(old, new, original=original):
            if len(names) == stop_at[0]:
                raise StoppedError
            names.append(Path(new).name)
            return original(old, new)

        monkeypatch.setattr(module, function, noting)
    learn = teaching._learn
    monkeypatch.setattr(teaching, "_learn", lambda *given: (steps.append(1), learn(*given))[1])
    whole = copy.deepcopy(result)
    expected = taught(source, whole, blocks, _folder(tmp_path, "whole"), (0, 2), 1)
    places, n_taught = list(names), len(steps)
    assert len(places) > 8
    for k in range(len(places)):
        names.clear(), steps.clear()
        one, folder, stop_at[0] = copy.deepcopy(result), _folder(tmp_path, str(k)), k
        with pytest.raises(StoppedError):
            taught(source, one, blocks, folder, (0, 2), 1)
        stop_at[0], one = None, copy.deepcopy(result)
        assert taught(source, one, blocks, folder, (0, 2), 1) == expected
        again = [name for name in places if names.count(name) > 1]
        assert set(again) <= {f"outputs-{place[-1]}" for place in places[k : k + 1]}
        assert len(steps) <= n_taught + 1
        for name, weight in whole.named_parameters():
            assert torch.equal(weight.detach() + 0, one.get_parameter(name) + 0)
        assert sorted(place.name for place in folder.iterdir()) == ["taught-0", "taught-2"]


# Through `rehead.convert`


def test_convert_teaches_what_is_lossy(gpt, words):
    """A layer that is converted exactly is left alone; the certificate says what each learned."""
    source = gpt(GQA, n_layer=2, n_step=5)
    exact, _ = rehead.convert(source, to="mla")
    lossy, _ = rehead.convert(source, to="mla", kv_rank=5)
    layers = [exact.config.attention[0], lossy.config.attention[0]]
    given = {"calibration": words(230), "test": words(150, seed=1), "length": LENGTH}
    plain, before = rehead.convert(source, layers, **given)
    result, after = rehead.convert(source, layers, **given, teach=4)
    assert (before.teach, after.teach) == (0, 4)
    assert [layer.taught for layer in before.layers] == [None, None]
    assert after.layers[0].taught is None
    assert after.layers[1].taught[1] < after.layers[1].taught[0]
    assert after.layers[1].output_error != before.layers[1].output_error
    assert after.loss[0] == before.loss[0]
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, result.get_parameter(name)) == ("layers.1.self_attn" not in name)


def test_pooled_heads_learn(gpt, words):
    source = gpt(GQA, n_step=5)
    _, certificate = rehead.convert(
        source, to="mqa", method="mean", calibration=words(230), length=LENGTH, teach=4
    )
    for layer in certificate.layers:
        assert layer.taught[1] < layer.taught[0]
    assert [text.name for text in certificate.calibration] == ["ids"]  # the method itself reads none


def test_weights_in_a_scratch_folder(gpt, words, tmp_path):
    """The same as in memory; another target, method, text, seed or model in the same folder learns anew."""
    source = gpt(GQA, n_step=5)
    given = {"calibration": words(230), "length": LENGTH, "teach": 2}
    words_of_another = {"calibration": words(230, seed=1)}
    changes = [{}, {"kv_rank": 6}, {"method": "whitened"}, words_of_another, {"seed": 1}, {"length": 6}]
    for source, change in [(source, change) for change in changes] + [(gpt(GQA, n_step=6), {})]:
        given = {"kv_rank": 5, "method": "svd"} | given | change
        kept, certificate = rehead.convert(source, to="mla", scratch=tmp_path, **given)
        result, same = rehead.convert(source, to="mla", **given)
        assert certificate == same
        assert not any(isinstance(weight, Deferred) for weight in result.parameters())
        for name, weight in kept.named_parameters():
            assert torch.equal(weight.detach() + 0, result.get_parameter(name))


def test_a_tied_model_in_its_files_learns_and_is_saved(gpt, words, tmp_path):
    """Only what was taught is read into memory; the rest stays in the files, tied."""
    rehead.save(gpt(GQA, tie_embeddings=True, n_step=5).float(), tmp_path / "model")
    source = rehead.load(tmp_path / "model", in_memory=False)
    result, _ = rehead.convert(source, to="mla", kv_rank=5, calibration=words(230), length=LENGTH, teach=1)
    assert isinstance(result.head.weight, Deferred)
    rehead.save(result, tmp_path / "taught")
    again = rehead.load(tmp_path / "taught")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(again(ids), result(ids), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("passes", "options", "message"),
    [
        (-1, {}, "teach=-1. Give the number of passes over the calibration, 0 for none."),
        (True, {}, "teach=True. Give the number of passes"),
        (2, {"calibration": None}, "teach=2 without a text to learn from. Give a calibration text."),
        (
            2,
            {"kv_rank": None},
            "teach=2: this conversion is exact, so there is nothing to learn. Leave it out.",
        ),
    ],
)
def test_refused(passes, options, message, gpt, words):
    given = {"kv_rank": 5, "calibration": words(60), "length": LENGTH} | options
    with pytest.raises(ReheadError) as raised:
        rehead.convert(gpt(GQA), to="mla", **given, teach=passes)
    assert message in str(raised.value)


def test_latents_of_latents_learn(gpt, words):
    mla = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False)
    _, certificate = rehead.convert(
        gpt(mla, n_step=5), to="mla", kv_rank=6, calibration=words(230), length=LENGTH, teach=4
    )
    assert all(layer.taught[1] < layer.taught[0] for layer in certificate.layers)
