"""Answers to prompts: as greedy generation writes them, up to what stops them."""

import pytest
import torch

import rehead
from rehead.config import ModelOptions
from rehead.errors import InvalidInput, ResourceError
from rehead.measure.answers import Sampling, Writer
from rehead.measure.forecast import MASK_BYTES, generation_bytes
from rehead.model import build
from rehead.tokenizer import train

LENGTH, NEW = 24, 9
PROMPTS = ["ab", "badge", "cafe" * 8, "d"]


@pytest.fixture
def writer():
    torch.manual_seed(1)
    tokenizer = train("char", "abcdefg")
    model = build(ModelOptions(n_layer=2, n_embd=24).resolve(7, LENGTH)).eval()
    for weight in model.parameters():
        weight.data *= 5
    return Writer(model=model, tokenizer=tokenizer, length=LENGTH, ends=frozenset(), silent=frozenset())


def ids(writer, prompts=PROMPTS):
    return [writer.tokenizer.encode(prompt).tolist() for prompt in prompts]


def generated(writer, prompt):
    """What `rehead.generate` writes after the end of a prompt that leaves room for it."""
    kept = torch.tensor(prompt[-(LENGTH - NEW) :])
    return writer.tokenizer.decode(rehead.generate(writer.model, kept, NEW, 0)[len(kept) :])


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_greedy_answers_are_those_of_generate(writer, batch_size):
    found = writer.answers(ids(writer), Sampling(max_new_tokens=NEW), batch_size)
    assert found == [generated(writer, prompt) for prompt in ids(writer)]
    assert {len(text) for text in found} == {NEW}


def test_a_stop_ends_a_text_and_is_not_in_it(writer):
    whole = [generated(writer, prompt) for prompt in ids(writer)]
    stops = (whole[0][3:5], whole[1][6])
    found = writer.answers(ids(writer), Sampling(max_new_tokens=NEW, stops=stops))
    for text, expected in zip(found, whole, strict=True):
        assert text == min((expected.partition(stop)[0] for stop in stops), key=len)
    assert len(found[0]) <= 3


def test_an_id_that_ends_a_text_ends_it_in_its_row_alone(writer):
    whole = [generated(writer, prompt) for prompt in ids(writer)]
    end = writer.tokenizer.encode(whole[1][2])[0]
    ending = Writer(**{**vars(writer), "ends": frozenset([int(end)])})
    found = ending.answers(ids(writer), Sampling(max_new_tokens=NEW))
    assert found == [text.partition(whole[1][2])[0] for text in whole]


def test_special_tokens_have_no_text(writer):
    whole = [generated(writer, prompt) for prompt in ids(writer)]
    silent = Writer(**{**vars(writer), "silent": frozenset([2])})
    assert silent.answers(ids(writer), Sampling(max_new_tokens=NEW)) == [
        text.replace("c", "") for text in whole
    ]


def test_nothing_is_read_after_all_have_ended(writer, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "rehead.measure.answers.stream",
        lambda model, prompts, *_, **__: (
            steps.append(1) or torch.zeros(len(prompts), dtype=torch.long) for _ in range(9)
        ),
    )
    assert writer.answers(ids(writer), Sampling(max_new_tokens=NEW, stops=("aa",))) == [""] * 4
    assert len(steps) == 2


def test_a_prompt_needs_room(writer):
    with pytest.raises(InvalidInput, match="24 new tokens leave no room for a prompt in 24"):
        writer.answers(ids(writer), Sampling(max_new_tokens=LENGTH))


def test_as_many_prompts_at_once_as_suit_the_memory(writer, monkeypatch):
    sizes = []
    batch = Writer._batch
    monkeypatch.setattr(
        Writer, "_batch", lambda self, prompts, how: sizes.append(len(prompts)) or batch(self, prompts, how)
    )
    parts = generation_bytes(writer.model.config, 1, LENGTH - NEW, NEW, writer.model.head.weight.dtype)
    one = sum(parts.values()) + MASK_BYTES * (LENGTH - NEW) ** 2
    for free, wanted in ((2 * 16 * one, [16, 4]), (2 * 3 * one, [3] * 6 + [2])):
        sizes.clear()
        monkeypatch.setattr("rehead.measure.answers.free_memory", lambda device, free=free: free)
        writer.answers(ids(writer, PROMPTS * 5), Sampling(max_new_tokens=NEW))
        assert sizes == wanted
    monkeypatch.setattr("rehead.system.memory.free_memory", lambda device: one - 1)
    with pytest.raises(ResourceError, match=r"an answer after 15 tokens .*Use a smaller --length"):
        writer.answers(ids(writer), Sampling(max_new_tokens=NEW))


def test_a_stop_that_is_a_special_token_ends_a_text(writer):
    """Its text is never looked at: it has none."""
    whole = [generated(writer, prompt) for prompt in ids(writer)]
    stop = whole[1][3]
    silent = Writer(**{**vars(writer), "silent": frozenset(writer.tokenizer.encode(stop).tolist())})
    found = silent.answers(ids(writer), Sampling(max_new_tokens=NEW, stops=(stop, "no token")))
    assert found == [text.partition(stop)[0] for text in whole]
    assert len(found[1]) <= 3


def test_a_batch_size_that_does_not_fit_is_refused(writer, monkeypatch):
    """No more rows count than there are prompts."""
    parts = generation_bytes(
        writer.model.config, 4, LENGTH - NEW, NEW, writer.model.head.weight.dtype, ragged=True
    )
    monkeypatch.setattr("rehead.system.memory.free_memory", lambda device: sum(parts.values()))
    assert len(writer.answers(ids(writer), Sampling(max_new_tokens=NEW), 99)) == 4
    with pytest.raises(
        ResourceError, match=r"^5 answers after 15 tokens .*Use a smaller --batch-size or --length"
    ):
        writer.answers(ids(writer, [*PROMPTS, "e"]), Sampling(max_new_tokens=NEW), 99)
