"""Tokenizers of other people: what the `tokenizers` library writes, read as `transformers` reads it."""

import json
import shutil
from functools import cache

import pytest
import tokenizers as hf
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rehead.cli import main
from rehead.data import tokenize
from rehead.errors import InvalidInput
from rehead.tokenizer import Tokenizer
from rehead.tokenizer import tokenizer as module

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
TEXT = "the cat sat on the mat. to be, or not to be: that's the question\nété 👩‍👩‍👧 naïve don't Zoo\n" * 4
SPECIAL = ["[UNK]", "<s>", "</s>", "[PAD]"]
PROMPTS = ["to be, or [UNK] not <s> the <extra> Zoo", " the  mat .\n", "don't you? été", "", "\t漢字 👩‍👧"]


def characters():
    """As many write one for `transformers`: a WordLevel with an unknown token and no more."""
    vocab = [*SPECIAL, *sorted(set(TEXT) - {"é"})]
    inner = hf.Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocab)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def words():
    """No decoder: words are joined by blanks."""
    inner = hf.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return inner


def unigram():
    inner = hf.Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return inner


def wordpiece():
    inner = hf.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    inner.train_from_iterator([TEXT], trainer)
    inner.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return inner


def bytes_merged():
    inner = hf.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=letters, special_tokens=SPECIAL, show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.add_tokens(["<extra>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return inner


def suffixed():
    """The first GPT's: `</w>` ends a word."""
    inner = hf.Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    return inner


def sentencepiece():
    """Llama 2's: "▁" for a blank, bytes for what is unknown."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁tobe", "▁t", "▁to"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "o")]
    inner = hf.Tokenizer(models.BPE(vocab, merges, unk_token="[UNK]", fuse_unk=True, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
    fallback = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    inner.decoder = decoders.Sequence(fallback)
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    inner.add_special_tokens(SPECIAL)
    return inner


KINDS = {
    make.__name__: make
    for make in (characters, words, unigram, wordpiece, bytes_merged, suffixed, sentencepiece)
}
every = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(kind): what `save_pretrained` writes."""

    @cache
    def written(kind):
        inner = KINDS[kind]()
        names = {"unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]"}
        there = {name: token for name, token in names.items() if inner.token_to_id(token) is not None}
        place = tmp_path_factory.mktemp(kind)
        PreTrainedTokenizerFast(tokenizer_object=inner, **there).save_pretrained(place)
        return place

    return written


@pytest.fixture(scope="module")
def ours(folder):
    return cache(lambda kind: Tokenizer.load(folder(kind)))


@pytest.fixture(scope="module")
def theirs(folder):
    return cache(lambda kind: AutoTokenizer.from_pretrained(folder(kind)))


@every
def test_ids_and_text_are_those_of_transformers(kind, ours, theirs):
    own, other = ours(kind), theirs(kind)
    added = 0
    for text in PROMPTS:
        ids = own.encode(text, special_tokens=True).tolist()
        assert ids == other(text)["input_ids"]
        assert own.decode(ids) == other.decode(ids)
        plain = own.encode(text).tolist()
        assert plain == other(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert own.decode(plain) == other.decode(plain)
        added += ids != plain
    assert added  # a special token that is spelled is read as one, and as text
    assert own.encode("").tolist() == []
    assert own.vocab_size == len(other)


@every
@given(data=st.data())
@settings(max_examples=60)
def test_any_ids_are_decoded_as_by_transformers_and_streamed_to_the_same_text(kind, ours, theirs, data):
    own = ours(kind)
    ids = data.draw(st.lists(st.integers(0, own.vocab_size - 1), max_size=25))
    whole = own.decode(ids)
    assert whole == theirs(kind).decode(ids)
    pieces = list(own.stream(iter(ids)))
    assert "".join(pieces) == whole
    cut = data.draw(st.integers(0, len(ids)))
    before = own.decode(ids[:cut])
    if whole.startswith(before) and not before.endswith("\ufffd") and "<0x" not in str(own.to_json()):
        assert before + "".join(own.stream(iter(ids[cut:]), after=ids[:cut])) == whole


@every
@given(data=st.data())
@settings(max_examples=30)
def test_ids_of_a_padded_vocabulary_have_no_text_anywhere(kind, ours, theirs, data):
    own = ours(kind)
    known = data.draw(st.lists(st.integers(0, own.vocab_size - 1), max_size=8))
    ids = data.draw(st.permutations([*known, own.vocab_size, own.vocab_size + 700]))
    with pytest.warns(UserWarning, match="2 ids are not in the tokenizer's vocabulary"):
        assert own.decode(ids) == theirs(kind).decode(ids)
    with pytest.warns(UserWarning, match="2 ids are not in the tokenizer's vocabulary"):
        assert "".join(own.stream(ids)) == own.decode([i for i in ids if i < own.vocab_size])


@every
def test_what_is_written_again_is_the_same_tokenizer(kind, ours, theirs, tmp_path):
    (tmp_path / "tokenizer.json").write_text(ours(kind).to_json(), encoding="utf-8")
    again = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [again.encode(text).ids for text in PROMPTS] == [
        theirs(kind)(text)["input_ids"] for text in PROMPTS
    ]


@every
def test_a_text_in_chunks_has_the_ids_of_the_whole(kind, ours, tmp_path):
    tokens = tokenize(
        ["to be, or not", " to be:\nthat's the", " question\nthe", "\n"], ours(kind), tmp_path / "ids"
    )
    assert (
        tokens.ids.tolist() == ours(kind).encode("to be, or not to be:\nthat's the question\nthe\n").tolist()
    )


def test_what_the_tokenizer_does_not_know_is_counted(ours, tmp_path):
    """Losses over many [UNK] look good and mean nothing."""
    with pytest.warns(UserWarning, match=r"2 of 4 tokens are '\[UNK\]'"):
        tokenize(["et漢é"], ours("characters"), tmp_path / "a")
    with pytest.warns(UserWarning, match=r"1 of 2 tokens are '\[UNK\]'"):
        tokenize(["漢"], ours("unigram"), tmp_path / "b")
    tokenize(["漢"], ours("sentencepiece"), tmp_path / "c")


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="[UNK]"),
        models.WordPiece({"a": 0}, unk_token="[UNK]"),
        models.Unigram([("a", 0.0)]),
    ],
    ids=repr,
)
def test_a_text_that_a_vocabulary_cannot_say_is_refused(model):
    tokenizer = Tokenizer.from_json(hf.Tokenizer(model).to_str())
    assert tokenizer.encode("a").tolist() == [0]
    with pytest.raises(
        InvalidInput, match=r"cannot read this text: .*(unk_id|UNK).*\. Leave out what .* lacks"
    ):
        tokenizer.encode("b")


def test_limits_hold_for_every_kind(tmp_path, monkeypatch):
    deep = '{"type":"Sequence","normalizers":[' * 200 + "]}" * 200
    inner = json.loads(words().to_str())
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(inner).replace(json.dumps(inner["normalizer"]), deep))
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: .*recursion.*Save it again"):
        Tokenizer.load(tmp_path)
    file.write_text(words().to_str())
    monkeypatch.setattr(module, "MAX_VOCAB", 5)
    with pytest.raises(InvalidInput, match=r"of \d+ tokens: it has 1 to 5"):
        Tokenizer.load(tmp_path)


@pytest.fixture(scope="module")
def padded(folder, ours, tmp_path_factory):
    """A stock Llama beside each tokenizer, its vocabulary 64 ids larger, as Qwen's are."""

    @cache
    def model(kind, more=64):
        place = tmp_path_factory.mktemp(f"padded-{kind}")
        config = transformers.LlamaConfig(
            vocab_size=ours(kind).vocab_size + more,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).float().save_pretrained(place)
        theirs = AutoTokenizer.from_pretrained(folder(kind))
        theirs.save_pretrained(place)
        (place / "text.txt").write_text("to be, or not to be\n" * 80)
        return place

    return model


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("kind", ["characters", "unigram", "bytes_merged"])
def test_every_command_takes_such_a_folder(kind, padded, ours, tmp_path, capsys):
    model, text = str(padded(kind)), str(padded(kind) / "text.txt")
    flags = ["--max-new-tokens", "60", "--seed", "1"]
    for extra in ([], ["--prompt", "be"]):
        assert main(["generate", model, "--prompt", "to be", *flags, *extra]) == 0
        out = capsys.readouterr()
        assert out.out.startswith("to be")
        assert "ids are not in the tokenizer's vocabulary" in out.err
    assert main(["eval", model, "--data", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] > 0
    small = [f"data.path={text}", "data.block_size=16", "trainer.batch_size=2", "trainer.sample_every=1"]
    healed = [
        "heal",
        model,
        "--teacher",
        str(shutil.copytree(model, tmp_path / "teacher")),
        *small,
        "trainer.max_iters=1",
        f"system.work_dir={tmp_path}/heal",
    ]
    assert main(healed) == 0
    assert main(["convert", model, str(tmp_path / "mqa"), "--to", "mqa", "--allow-loss"]) == 0
    assert main(["generate", str(tmp_path / "mqa"), "--prompt", "to be", *flags]) == 0
    assert Tokenizer.load(tmp_path / "mqa").to_json() == ours(kind).to_json()


@pytest.mark.filterwarnings("always")
def test_a_run_may_start_from_one(padded, tmp_path, capsys):
    place = padded("words")
    shape = ["model.shape=llama", "model.n_layer=1", "model.n_query_head=2", "model.n_embd=24"]
    run = [
        f"model.pretrained_folder={place}",
        f"data.path={place / 'text.txt'}",
        f"system.work_dir={tmp_path}/run",
    ]
    sizes = ["data.block_size=32", "trainer.batch_size=2", "trainer.max_iters=1"]
    widths = ["model.n_hidden=40", "model.tie_embeddings=True"]
    code = main(["train", *shape, *widths, *run, *sizes])
    assert code == 0, capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("said", [None, "right"])
def test_an_export_writes_several_texts_as_each_alone(said, padded, tmp_path):
    """Padded on the left, as by Llama's own class and not by the general one, unless the source's file says a side."""
    place = shutil.copytree(padded("bytes_merged", 0), tmp_path / "source")
    file = place / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": said}))
    assert main(["export", str(place), str(tmp_path / "stock")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stock")
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert tokenizer.padding_side == (said or "left")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    texts = ["to", "the question: don't, or not"]

    def written(*texts):
        batch = tokenizer(list(texts), padding=True, return_tensors="pt")
        return model.generate(**batch, max_new_tokens=8, do_sample=False)[:, -8:].tolist()

    alone = [*written(texts[0]), *written(texts[1])]
    assert (written(*texts) == alone) == (said is None)


def test_a_special_token_beyond_the_embedding_stands_in_no_text(padded, tmp_path, capsys):
    """As Gemma 3's 1B has one for images, id 262144 of as many tokens."""
    place = tmp_path / "model"
    shutil.copytree(padded("words", 0), place)
    inner = hf.Tokenizer.from_file(str(place / "tokenizer.json"))
    size = inner.get_vocab_size()
    inner.add_special_tokens(["<image>"])
    assert inner.token_to_id("<image>") == size
    inner.save(str(place / "tokenizer.json"))
    assert main(["generate", str(place), "--prompt", "to be", "--max-new-tokens", "3"]) == 0
    assert main(["convert", str(place), str(tmp_path / "mqa"), "--to", "mqa", "--allow-loss"]) == 0
    capsys.readouterr()
    assert Tokenizer.load(tmp_path / "mqa").encode("<image>").max() < size
    inner.add_tokens(["more"])
    inner.save(str(place / "tokenizer.json"))
    assert main(["generate", str(place), "--prompt", "to be"]) == 3
    assert f"has no embedding for 'more' (id {size + 1})" in capsys.readouterr().err


def test_a_vocabulary_larger_than_the_embedding_is_refused_by_name(padded, capsys):
    place = padded("words", -3)
    assert main(["generate", str(place), "--prompt", "to be"]) == 3
    said = capsys.readouterr().err
    assert "vocab_size=" in said
    assert "no embedding for '" in said
    assert "Download both again" in said
