"""What a conversion is fitted to: several texts in equal shares, also the model's own; how long a window is."""

import hashlib
import json

import numpy as np
import pytest
import tokenizers as hf
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing

import rehead
from rehead.attention import GroupedConfig
from rehead.checkpoint.files.deferred import materialise
from rehead.cli import main
from rehead.conversion import sampled as sampled_module
from rehead.conversion.blocks import CALIBRATION_TOKENS, blocks_of, measured_blocks, require_windows
from rehead.conversion.certificate import Text
from rehead.conversion.converter import Converter
from rehead.conversion.page import page
from rehead.conversion.sampled import sampled_once
from rehead.conversion.texts import SELF, Passage, passages, sampled
from rehead.data import IGNORE
from rehead.errors import ConfigError, InvalidInput, ResourceError, UsageError
from rehead.generation import generate
from rehead.measure.forecast import generation_bytes
from rehead.tokenizer import train

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


def test_windows_are_read_at_once_as_the_memory_is_asked_for(gpt, monkeypatch):
    """As many as have the tokens of a batch."""
    model = gpt(GQA)
    ids = np.zeros(2000, dtype=np.int64)
    monkeypatch.setattr("rehead.system.memory.free_memory", lambda device: 0)
    for most, many in ((4096, 4096 // 16), (3 * 16 + 1, 3), (1, 1)):
        monkeypatch.setattr("rehead.conversion.blocks.BATCH_TOKENS", most)
        assert max(len(block[0]) for block in blocks_of(model, ids, length=16)) == min(many, 125)
        with pytest.raises(ResourceError, match=rf"reading {many} x 16 tokens at once"):
            require_windows(model, 16)


def test_weights_that_do_not_fit_are_not_sampled_from(gpt, tmp_path, monkeypatch):
    """Nor is there room for the caches of all windows that are sampled together."""
    rehead.save(gpt(GQA), tmp_path / "model")
    taken = sum(generation_bytes(gpt(GQA).config, 6, 1, 15, torch.float64).values())
    refused = r"sampling a text .* are free\. Give a text instead of self\.$"
    monkeypatch.setattr("rehead.system.memory.free_memory", lambda device: taken)
    with pytest.raises(ResourceError, match=refused):
        sampled(rehead.load(tmp_path / "model", in_memory=False), 100, 16, seed=3)
    sampled(gpt(GQA), 100, 16, seed=3)  # which is in memory
    monkeypatch.setattr("rehead.system.memory.free_memory", lambda device: taken - 1)
    with pytest.raises(ResourceError, match=refused):
        sampled(gpt(GQA), 100, 16, seed=3)


def test_a_tied_matrix_is_read_and_counted_once(gpt, tmp_path, monkeypatch):
    read = []

    def noting(weight):
        read.append(weight.shape)
        return materialise(weight)

    for tied in (True, False):
        model = gpt(GQA, tie_embeddings=tied)
        rehead.save(model, tmp_path / f"{tied}")
        taken = sum(generation_bytes(model.config, 6, 1, 15, torch.float64).values())
        taken += sum(weight.nbytes for weight in model.parameters())
        with monkeypatch.context() as patch:
            patch.setattr("rehead.system.memory.free_memory", lambda device, taken=taken: taken)
            patch.setattr("rehead.conversion.texts.materialise", noting)
            sampled(rehead.load(tmp_path / f"{tied}", in_memory=False), 100, 16, seed=3)
        assert read.count(model.head.weight.shape) == (1 if tied else 2)
        read.clear()


def test_a_window_begins_with_a_token_that_the_model_has_learnt(gpt):
    """Ids without a token, as of a padded vocabulary, are drawn again; the other windows stay."""
    model = gpt(GQA)
    usual = sampled(model, 640, 16, seed=3).ids.reshape(40, 16)
    some = np.arange(0, model.config.vocab_size, 2)
    found = sampled(model, 640, 16, seed=3, begins=some).ids.reshape(40, 16)
    learnt = usual[:, 0] % 2 == 0
    assert 0 < learnt.sum() < 40
    assert (found[:, 0] % 2 == 0).all()
    assert (found[learnt, 0] == usual[learnt, 0]).all()


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
    "a path": ("fit.txt", UsageError, "the text 'fit.txt': give token ids, or calibration='self'"),
    "a path in a list": ([np.arange(9), "fit.txt"], UsageError, "the text 'fit.txt'"),
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
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
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


def test_windows_begin_with_the_token_before_every_text(gpt, words):
    """As if it stood in the text where each window begins: the same weights, and the loss of a loop by hand."""
    model, fit, test, bos = gpt(GQA, n_step=20, std=0.2), words(161), words(97, seed=1), 5
    edited = fit.copy()
    edited[:-1:16] = bos
    with_bos, certificate = rehead.convert(model, calibration=fit, test=test, bos=bos, **LOSSY)
    stood, _ = rehead.convert(model, calibration=edited, **LOSSY)
    without, _ = rehead.convert(model, calibration=fit, **LOSSY)
    for (name, one), same, other in zip(
        with_bos.named_parameters(), stood.parameters(), without.parameters(), strict=True
    ):
        assert torch.equal(one, same), name
        assert "kv_" not in name or not torch.equal(one, other)
    text = torch.from_numpy(test)
    inputs, targets = text[:-1].reshape(6, 16).clone(), text[1:]
    inputs[:, 0] = bos
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets)
    assert certificate.loss[0] == pytest.approx(loss.item(), rel=1e-6)
    assert [text.bos for text in (*certificate.calibration, certificate.test)] == [bos, bos]
    assert "each window begins with token 5" in page(certificate)
    rows = sampled(model, 100, 16, seed=3, bos=bos).ids.reshape(6, 16)
    assert (rows[:, 0] == bos).all()
    assert len({tuple(row) for row in rows.tolist()}) > 1


@pytest.mark.filterwarnings("ignore:the conversion was fitted to a part of this validation text")
def test_as_typed_with_a_tokenizer_that_begins_every_text(gpt, tmp_path, monkeypatch):
    """Conversions and healing read what the tokenizer says; so does the text sampled from the model."""
    monkeypatch.chdir(tmp_path)
    text = "it droppeth as the gentle rain from heaven upon the place beneath. it is twice blest. " * 30
    inner = hf.Tokenizer.from_str(train("char", text).to_json())
    inner.add_special_tokens(["<s>"])
    bos = inner.token_to_id("<s>")
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    model = gpt(GQA, vocab_size=bos + 1).float()
    rehead.save(model, tmp_path / "model", files={"tokenizer.json": inner.to_str()})
    for name in ("fit", "test"):
        (tmp_path / f"{name}.txt").write_text(text if name == "fit" else text[::-1])

    def begins(folder):
        table = json.loads((tmp_path / folder / "conversion.json").read_text())
        return [text["bos"] for text in (*table["calibration"], table["test"])]

    lossy = ["--to", "mla", "--kv-rank", "7", "--allow-loss", "--calibration", "fit.txt"]
    assert main(["convert", "model", "out", *lossy, "--calibration", "self", "--test", "test.txt"]) == 0
    assert begins("out") == [bos] * 3
    steps = ["trainer.max_iters=1", "trainer.batch_size=2", "data.path=fit.txt", "system.work_dir=healed"]
    assert main(["heal", "out", "--teacher", "model", "--teach", "1", *steps]) == 0
    run = max((tmp_path / "healed" / "checkpoints").iterdir()).relative_to(tmp_path)
    assert begins(run) == [bos] * 4
    assert main(["convert", "model", "half", *lossy]) == 0  # the last tenth is held out
    assert begins("half") == [bos] * 2


def test_no_token_after_a_sampled_window_is_measured(gpt):
    """It begins the next window, and was drawn by nobody."""
    model = gpt(GQA)
    own = sampled(model, 100, 16, seed=3)
    for _, targets in measured_blocks(model, own, 16):
        assert (targets[:, -1] == IGNORE).all()
        assert (targets[:, :-1] != IGNORE).all()
    given = Passage(name="words", ids=own.ids)
    assert any((targets[:, -1] != IGNORE).any() for _, targets in measured_blocks(model, given, 16))


def test_a_long_text_is_hashed_in_pieces(monkeypatch):
    ids = np.arange(50, dtype=np.uint16)
    whole = Text.of(Passage(name="words", ids=ids), 10)
    monkeypatch.setattr("rehead.conversion.texts.PIECE", 7)
    assert Text.of(Passage(name="words", ids=ids), 10) == whole
    assert whole.sha256 == hashlib.sha256(np.arange(50, dtype=np.int64).tobytes()).hexdigest()
