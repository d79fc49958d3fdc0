"""Loss of a model on a text."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rehead.config import ModelOptions, RNNConfig
from rehead.data import evaluation_blocks
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.measure import cache_bytes, evaluate, evaluate_text, logits, quality
from rehead.measure.length import text_length
from rehead.measure.quality import scores
from rehead.model import both_seen, build

V, BLOCK, LENGTH = 29, 8, 61  # 7 full blocks of targets, and 4 more
TEXT = np.random.default_rng(0).integers(V, size=LENGTH)


@pytest.fixture
def model():
    model = build(ModelOptions(n_layer=1, n_embd=12, embd_pdrop=0.5).resolve(V, BLOCK))
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.5)
    return model


def plain(model):
    """Every token but the first, predicted once from its block."""
    model.eval()
    ids, losses = torch.from_numpy(TEXT), []
    for start in range(0, LENGTH - 1, BLOCK):
        stop = min(start + BLOCK, LENGTH - 1)
        logits = model(ids[None, start:stop])[0]
        losses.append(F.cross_entropy(logits, ids[start + 1 : stop + 1], reduction="none"))
    return torch.cat(losses)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_loss_is_the_mean_over_every_token_whatever_the_batch(model, batch_size):
    losses = plain(model)
    loss, count = evaluate(model, evaluation_blocks(TEXT, BLOCK, batch_size))
    assert count == len(losses) == LENGTH - 1
    assert loss == pytest.approx(losses.mean().item(), rel=1e-6)


def test_padding_does_not_count(model):
    """The last block's 4 tokens weigh as much as any others, its filling nothing."""
    blocks = list(evaluation_blocks(TEXT, BLOCK, 8))
    loss, count = evaluate(model, blocks)
    filled = [(inputs.where(targets != -100, 7), targets) for inputs, targets in blocks]
    assert evaluate(model, filled) == (loss, count)
    counting = [(inputs, targets.where(targets != -100, 0)) for inputs, targets in blocks]
    assert evaluate(model, counting)[1] == 64
    assert evaluate(model, counting)[0] != loss
    per_batch = [evaluate(model, [(i, t)])[0] for i, t in evaluation_blocks(TEXT, BLOCK, 1)]
    assert np.mean(per_batch) != pytest.approx(loss, rel=1e-4)  # a mean of means is another number


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_its_mode(model, training):
    model.train(training)
    first, second = (evaluate(model, evaluation_blocks(TEXT, BLOCK, 3)) for _ in range(2))
    assert first == second  # no dropout, though it trains
    assert model.training == model.embd_dropout.training == training
    with pytest.raises(IndexError):
        evaluate(model, [(torch.full((1, 2), V), torch.zeros(1, 2, dtype=torch.long))])
    assert model.training == training


def test_no_gradients_and_no_random_numbers(model):
    before = torch.get_rng_state()
    evaluate(model.train(), evaluation_blocks(TEXT, BLOCK, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


def test_half_precision_is_summed_in_full(model):
    exact = evaluate(model, evaluation_blocks(TEXT, BLOCK, 3))[0]
    assert evaluate(model.bfloat16(), evaluation_blocks(TEXT, BLOCK, 3))[0] == pytest.approx(exact, rel=2e-2)


def test_an_untrained_model_knows_nothing():
    model = build(ModelOptions(n_layer=2, n_embd=48).resolve(V, BLOCK))
    loss, _ = evaluate(model, evaluation_blocks(TEXT, BLOCK, 8))
    assert loss == pytest.approx(math.log(V), rel=0.05)


@pytest.mark.parametrize("blocks", [[], [(torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2), -100))]])
def test_nothing_to_predict_is_refused(model, blocks):
    with pytest.raises(InvalidInput, match="0 tokens to evaluate: the text needs at least two"):
        evaluate(model, blocks)


@pytest.mark.parametrize("network", ["bidirectional", "both seen"])
def test_what_is_no_language_model_has_no_loss(network):
    config = RNNConfig(
        vocab_size=V, block_size=8, n_embd=3, n_layer=1, n_hidden=4, n_output=V, direction="bidirectional"
    )
    with pytest.raises(UsageError, match=r"not a language model|cannot generate text"):
        evaluate(both_seen() if network == "both seen" else build(config), evaluation_blocks(TEXT, BLOCK, 3))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_caches_are_counted_where_they_are_rounded(model, kv_dtype, monkeypatch):
    """Each block has one of all layers, in the dtype of the weights."""
    asked = []
    monkeypatch.setattr(quality, "require_memory", lambda _, parts, *__: asked.append(parts))
    evaluate_text(model, TEXT, length=BLOCK, batch_size=3, kv_dtype=kv_dtype)
    kept = 3 * cache_bytes(model.config, BLOCK, dtype=torch.float64)
    assert [parts.get("cache") for parts in asked] == [None if kv_dtype is None else kept]


def test_scores():
    result = scores(math.log(8), 50, 100)
    assert result == {
        "loss": math.log(8),
        "perplexity": pytest.approx(8),
        "bits_per_byte": pytest.approx(1.5),  # 50 tokens of 3 bits in 100 bytes
        "tokens": 50,
    }


def test_a_byte_model_of_chance_has_8_bits_per_byte():
    assert scores(math.log(256), 1000, 1000)["bits_per_byte"] == pytest.approx(8)


def test_perplexity_stays_finite():
    assert math.isfinite(scores(10_000.0, 1, 1)["perplexity"])


@pytest.mark.parametrize("cap", [None, 2.0])
def test_logits_in_pieces_are_the_same(model, cap, monkeypatch):
    """Of any number of rows at once; neither a cap nor an RNN's output function is lost."""
    uncapped, model.config = (
        evaluate(model, evaluation_blocks(TEXT, BLOCK, 8)),
        replace(model.config, logit_softcap=cap),
    )
    assert (evaluate(model, evaluation_blocks(TEXT, BLOCK, 8)) == uncapped) == (cap is None)
    assert evaluate(model, evaluation_blocks(TEXT, BLOCK, 8))[0] == pytest.approx(
        plain(model).mean().item(), rel=1e-6
    )
    blocks = list(evaluation_blocks(TEXT, BLOCK, 8))
    whole = evaluate(model, blocks)
    monkeypatch.setattr(logits, "LOGITS", 3 * V)
    assert evaluate(model, blocks) == pytest.approx(whole, rel=1e-6)
    network = build(
        RNNConfig(
            vocab_size=V,
            block_size=BLOCK,
            n_embd=5,
            n_layer=1,
            n_hidden=7,
            n_output=V,
            output_activation="slide",
        )
    )
    wanted = F.cross_entropy(network(blocks[0][0]).flatten(0, 1), blocks[0][1].flatten(), ignore_index=-100)
    assert evaluate(network, blocks)[0] == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (7, 1), (5, 4), (8, 7), (1, 1)])
@pytest.mark.parametrize("n_token", [61, 9, 8, 2])
def test_a_stride_predicts_every_token_once_from_the_first_block_that_has_it(model, length, stride, n_token):
    model.eval()
    ids, losses = torch.from_numpy(TEXT[:n_token]), []
    for target in range(1, n_token):
        block = max(0, -(-(target - length) // stride))  # the first that reaches so far
        log = model(ids[None, block * stride : target])[0, -1].log_softmax(-1)
        losses.append(-log[ids[target]].item())
    found = evaluate_text(model, TEXT[:n_token], length=length, stride=stride, batch_size=3)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (found.tokens, found.length, found.stride) == (n_token - 1, length, stride)


def test_what_is_no_stride_or_no_text_of_the_model(model):
    for stride in (0, 6):
        with pytest.raises(
            ConfigError, match=rf"stride={stride}: blocks of 5 tokens would leave some out. Use 1 to 5"
        ):
            evaluate_text(model, TEXT, length=5, stride=stride)
    with pytest.raises(InvalidInput, match=f"vocab_size={V}"):
        evaluate_text(model, [1, V])
    with pytest.raises(InvalidInput, match="a text of 1 token leaves"):
        evaluate_text(model, [1])


def test_a_length_nobody_gave(tmp_path):
    def config(block_size):
        return ModelOptions(n_layer=1).resolve(V, block_size)

    assert text_length(config(128)) == 128
    assert text_length(config(131_072)) == 2048
    assert text_length(config(131_072), folder=tmp_path) == 2048, "not a run"
    (tmp_path / "config.yaml").write_text("system:\ndata:\n  block_size: 4096\nmodel:\ntrainer:\n")
    assert text_length(config(131_072), folder=tmp_path) == 4096
    assert text_length(config(131_072), folder=tmp_path / "checkpoints/step-000001") == 4096
    assert text_length(config(1000), folder=tmp_path) == 1000
    assert text_length(config(131_072), 100_000, tmp_path) == 100_000
    for length in (0, 129, True):
        with pytest.raises(ConfigError, match=rf"length={length}: .* block_size=128 .*Use 1 to 128"):
            text_length(config(128), length)


@pytest.mark.parametrize("stride", [None, 3])
def test_a_text_shorter_than_a_block_is_not_padded(model, stride, monkeypatch):
    """Nor are more rows counted than there are blocks; the result is that of the block as asked for."""
    asked, blocks = [], []
    monkeypatch.setattr(quality, "require_memory", lambda work, *_: asked.append(work))
    whole = evaluate(model, evaluation_blocks(TEXT[:6], BLOCK, 1))
    monkeypatch.setattr(
        quality, "evaluate", lambda model, read, _: blocks.extend(read) or evaluate(model, blocks)
    )
    found = evaluate_text(model, TEXT[:6], length=BLOCK, stride=stride, batch_size=40)
    assert (found.loss, found.tokens) == (pytest.approx(whole[0]), 5)
    assert (found.length, found.stride) == (BLOCK, stride or BLOCK)
    assert [inputs.shape for inputs, _ in blocks] == [(1, 5)]
    assert asked == ["reading 1 x 5 tokens at once"]
    n_block = sum(len(inputs) for inputs, _ in evaluation_blocks(TEXT, BLOCK, 40, stride=stride))
    evaluate_text(model, TEXT, length=BLOCK, stride=stride, batch_size=40)
    assert asked[1:] == [f"reading {n_block} x 8 tokens at once"]
    with pytest.raises(ConfigError, match=r"stride=9: blocks of 8 tokens would leave some out"):
        evaluate_text(model, TEXT[:6], length=BLOCK, stride=9)


@pytest.mark.parametrize("ids", [torch.tensor([3.7, 1.2, 4.9]), torch.ones(3) > 0, ["to be", "or not"]])
def test_what_are_no_ids_is_not_scored(model, ids):
    with pytest.raises(InvalidInput, match=r"token ids of dtype .*: expected whole numbers"):
        evaluate_text(model, ids)
