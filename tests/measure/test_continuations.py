"""Log-likelihoods of continuations: against one text at a time, in float64."""

import pytest
import torch

from rehead.config import ModelOptions, RNNConfig
from rehead.errors import InvalidInput, NumericError, UsageError
from rehead.measure import continuations
from rehead.measure.continuations import loglikelihoods
from rehead.model import build

LENGTH = 11
PAIRS = [
    ([3], [5]),
    ([3], [6]),  # read once with the one above
    ([3, 5], [1, 2, 7]),
    ([3, 5, 1], [2, 7]),  # the same text, cut elsewhere
    ([1, 4, 9, 2, 8], [0]),
    (list(range(12)), [4, 4]),  # longer than the model reads: the beginning goes
    ([7], list(range(11))),  # as long as can be
    ([2, 2], [12, 12, 12]),
]


@pytest.fixture(params=["gpt", "rnn"])
def model(request):
    torch.manual_seed(4)
    made = build(ModelOptions(type=request.param, n_layer=2, n_embd=12).resolve(13, LENGTH)).eval()
    for weight in made.parameters():
        weight.data *= 6
    return made


@torch.no_grad()
def one_at_a_time(model, context, continuation):
    whole = [*context, *continuation]
    total, greedy = 0.0, True
    for place in range(len(context), len(whole)):
        first = max(0, len(whole) - 1 - LENGTH)
        logits = model(torch.tensor([whole[first:place]]))[0, -1]
        total += float(logits.log_softmax(-1)[whole[place]])
        greedy &= int(logits.argmax()) == whole[place]
    return total, greedy


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_every_continuation_is_as_if_alone(model, batch_size):
    greedy = []  # a continuation that the model would write
    for _ in range(3):
        greedy.append(int(model(torch.tensor([[4, 4, *greedy]]))[0, -1].argmax()))
    pairs = [*PAIRS, ([4, 4], greedy)]
    found = loglikelihoods(model, pairs, LENGTH, batch_size)
    for pair, (log, is_greedy) in zip(pairs, found, strict=True):
        expected = one_at_a_time(model, *pair)
        assert log == pytest.approx(expected[0], abs=1e-6)
        assert is_greedy == expected[1]
    assert found[-1][1]
    assert not all(is_greedy for _, is_greedy in found)


def test_equal_inputs_are_read_once(model, monkeypatch):
    read = []
    of = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids: read.append(ids) or of(ids))
    loglikelihoods(model, PAIRS[:4], LENGTH)
    (ids,) = read
    assert ids.tolist() == [[3, 5, 1, 2], [3, 0, 0, 0]]


def test_large_vocabularies_are_scored_in_parts(model, monkeypatch):
    whole = loglikelihoods(model, PAIRS, LENGTH)
    parts = continuations.in_parts
    monkeypatch.setattr(continuations, "in_parts", lambda width, *rows: parts(width, *rows, most=2 * width))
    for (log, greedy), (expected, same) in zip(loglikelihoods(model, PAIRS, LENGTH), whole, strict=True):
        assert log == pytest.approx(expected)
        assert greedy == same


def test_nothing_asked_is_nothing_said(model):
    assert loglikelihoods(model, [], LENGTH) == []


@pytest.mark.parametrize("pair", [([3], []), ([], [3]), ([3], [1] * (LENGTH + 1))])
def test_what_cannot_be_scored_is_refused(model, pair):
    said = f"a continuation of {len(pair[1])} tokens after a context of {len(pair[0])}: a model that reads 11 tokens"
    with pytest.raises(InvalidInput, match=said):
        loglikelihoods(model, [pair], LENGTH)


def test_what_has_read_the_answer_is_refused():
    both = RNNConfig(
        vocab_size=13,
        block_size=LENGTH,
        n_embd=3,
        n_layer=1,
        n_hidden=4,
        n_output=13,
        direction="bidirectional",
    )
    with pytest.raises(UsageError, match="is not a language model"):
        loglikelihoods(build(both), PAIRS, LENGTH)


def test_a_damaged_model_is_refused(model):
    model.head.weight.data[0] = torch.nan
    with pytest.raises(NumericError, match="not finite"):
        loglikelihoods(model, PAIRS, LENGTH)
