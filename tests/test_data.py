import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from rehead.data import (
    CORPORA,
    IGNORE,
    BatchSampler,
    Source,
    chunks,
    evaluation_blocks,
    require_vocabulary,
    split,
    tokenize,
)
from rehead.data import corpora as module
from rehead.errors import ConfigError, IntegrityError, InvalidInput, ResourceError
from rehead.tokenizer import KINDS, Tokenizer, train

TEXT = (
    "To be, or not to be:\r\nthat is the question!\n\n  'tis nobler in the mind? 3 1415 …\u2028é 👩‍👩‍👧\0\n"
    * 3
)
PIECES = [
    "to",
    "be",
    "é",
    "字",
    "。",
    "👩‍👧",
    "'s",
    "1",
    "99",
    "!",
    ".",
    ",",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u3000",
    "\x1c",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
texts = st.text(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=50).map("".join)


@cache
def trained(kind):
    if kind in KINDS:
        return train(kind, TEXT + "".join(PIECES), 330 if kind == "bpe" else None)
    inner = hf.Tokenizer.from_str(trained("bpe").to_json())
    if kind == "prepend":  # as Llama 2 does with every text it is given
        inner.normalizer = hf.normalizers.Prepend("_")
        return Tokenizer.from_json(inner.to_str())
    words = pre_tokenizers.Split(hf.Regex(LLAMA3), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.train_from_iterator(
        [TEXT * 3 + ".\n!\n!\n.\n"], hf.trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    return Tokenizer.from_json(inner.to_str())


def written(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Source(path=path, **options)


def everything(source):
    return "".join(source)


def ids(n):
    return np.arange(n, dtype=np.uint16)


# Reading


def test_a_file_is_read_to_the_letter(tmp_path):
    source = written(tmp_path / "a.txt", TEXT)
    assert everything(source) == TEXT
    assert everything(source) == TEXT, "again"


def test_a_byte_order_mark_goes_and_only_the_first(tmp_path):
    assert everything(written(tmp_path / "a.txt", "\ufeffa\r\n\ufeffb\r")) == "a\r\n\ufeffb\r"


def test_a_folder_is_its_texts_by_relative_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "d.md").mkdir()
    written(tmp_path / "b" / "z.txt", "two\n")
    written(tmp_path / "c.md", "\ufeffthree")
    written(tmp_path / "a.txt", "one")
    written(tmp_path / "a.py", "code")
    assert everything(Source(path=tmp_path)) == "one\n\ntwo\n\n\nthree"


@given(text=texts, size=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_reading_in_small_parts_changes_nothing(text, size):
    with tempfile.TemporaryDirectory() as folder:
        source = written(Path(folder, "a.txt"), "x" + text, chunk=size)
        assert everything(source) == "x" + text


@given(data=st.data(), text=texts, size=st.integers(1, 9), bom=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_byte_that_is_not_utf8_is_told_by_its_offset(data, text, size, bom):
    content = (b"\xef\xbb\xbf" if bom else b"") + ("x" + text).encode()
    bad = data.draw(st.sampled_from([b"\xff", b"\xe2\x82", b"\xed\xa0\x80", b"\xc3", b"\x80"]))
    starts = [i for i in range(3, len(content) + 1) if i == len(content) or content[i] & 0xC0 != 0x80]
    cut = data.draw(st.sampled_from(starts or [len(content)]))
    content = content[:cut] + bad + content[cut:]
    with pytest.raises(UnicodeDecodeError) as caught:
        content.decode()
    with tempfile.TemporaryDirectory() as folder:
        source = written(Path(folder, "a.txt"), content, chunk=size)
        with pytest.raises(
            InvalidInput, match=rf"a\.txt' is not UTF-8 at byte {caught.value.start} \(.*iconv"
        ):
            everything(source)


@pytest.mark.parametrize("encoding", ["UTF-16", "LATIN1"])
def test_the_command_for_another_encoding_converts_it(encoding, tmp_path):
    if shutil.which("iconv") is None:
        pytest.skip("no iconv")
    text = "Die Würde des Menschen ist unantastbar."
    (tmp_path / "a.txt").write_text(text, encoding=encoding)
    with pytest.raises(InvalidInput) as caught:
        everything(Source(path=tmp_path / "a.txt"))
    command = re.search(r"iconv .* UTF-8", str(caught.value))[0]
    done = subprocess.run([*command.split(), tmp_path / "a.txt"], capture_output=True, check=True)
    assert done.stdout.decode() == text


@pytest.mark.parametrize("content", ["", " \n\t\r\n", "\ufeff", "\ufeff\n"])
def test_a_blank_text_is_refused(content, tmp_path):
    source = written(tmp_path / "a.txt", content, chunk=2)
    with pytest.raises(InvalidInput, match=r"a\.txt' has 0 tokens: give data\.path"):
        everything(source)
    with pytest.raises(InvalidInput, match="0 tokens"):
        tokenize(source, trained("byte"), tmp_path / "ids.bin")
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_path_without_a_text_is_refused(tmp_path):
    for path, message in [
        (
            tmp_path / "none.txt",
            r"no text at '.*none\.txt' \(.*No such file.*: give data\.path a file or folder that exists",
        ),
        (tmp_path / "a\0b", r"no text at '.*a\\x00b' \(.*null"),
        (tmp_path / ("a" * 300), r"no text at .*too long"),
        (tmp_path / "line\nend", r"no text at '.*line\\nend'"),
        (tmp_path, r"no \*\.txt or \*\.md file in '.*: name a file with data\.path"),
    ]:
        with pytest.raises(InvalidInput, match=message) as caught:
            everything(Source(path=path))
        assert "\n" not in str(caught.value)


@pytest.mark.timeout(5, func_only=True)
def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", tmp_path):
        with pytest.raises(InvalidInput, match=r"pipe\.txt' is neither a file nor a folder: save"):
            everything(Source(path=path))


def test_links_to_folders_are_read_once(tmp_path):
    """As links to files are; one that leads back to its folder ends there."""
    for name in ("corpus/a", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "corpus/a/1.txt").write_text("one")
    (tmp_path / "elsewhere/2.txt").write_text("two")
    (tmp_path / "corpus/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/a/back").symlink_to(tmp_path / "corpus")
    assert everything(Source(path=tmp_path / "corpus")) == "one\n\ntwo"


def test_a_text_has_its_order_wherever_its_folder_lies(tmp_path, monkeypatch):
    """Whichever of a folder and a link to it the disk lists first."""
    real = os.walk
    texts = []
    for turned in (False, True):
        place = tmp_path / str(turned)
        (place / "2024").mkdir(parents=True)
        (place / "2024/x.txt").write_text("x")
        (place / "k.txt").write_text("k")
        (place / "a").symlink_to("2024")

        def walk(*given, turned=turned, **named):
            for folder, folders, files in real(*given, **named):
                folders.sort(reverse=turned)
                yield folder, folders, files

        monkeypatch.setattr(os, "walk", walk)
        texts.append(everything(Source(path=place)))
    assert texts == ["x\n\nk"] * 2


def test_a_folder_that_cannot_be_listed_is_a_lack_of_resources(tmp_path, monkeypatch):
    """Not a text that is shorter."""
    (tmp_path / "b").mkdir()
    (tmp_path / "1.txt").write_text("one")
    real = os.scandir

    def denied(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ResourceError, match=r"cannot list .*Permission denied"):
        everything(Source(path=tmp_path))


def test_a_file_that_cannot_be_read_is_a_lack_of_resources(tmp_path, monkeypatch):
    source = written(tmp_path / "a.txt", "text")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(
        ResourceError, match=r"cannot read '.*a\.txt' \(.*Permission denied\): make it readable"
    ):
        everything(source)


def test_a_source_is_one_thing():
    for options in ({}, {"path": Path("a"), "name": "python-docs"}):
        with pytest.raises(ConfigError, match=r"data\.path=.* and data\.name=.*python-docs, shakespeare"):
            Source(**options)
    with pytest.raises(ConfigError, match=r"unknown corpus 'shakespear'.*Did you mean 'shakespeare'"):
        Source(name="shakespear")


# Corpora


def test_the_embedded_corpus_is_a_real_text():
    text = everything(Source(name="python-docs"))
    assert len(text) > 300_000
    assert 'The "assert" statement\n' in text
    assert list(CORPORA) == ["python-docs", "shakespeare"]


@pytest.fixture
def shakespeare(tmp_path, monkeypatch):
    """The corpus with another text behind its address, and nothing of the network."""

    def serve(url, text="First Citizen:\n"):
        monkeypatch.setattr(module, "SHAKESPEARE", url)
        monkeypatch.setattr(module, "SHAKESPEARE_SHA256", hashlib.sha256(text.encode()).hexdigest())
        return Source(name="shakespeare", cache_dir=tmp_path / "cache")

    return serve


def test_a_download_is_kept(shakespeare, tmp_path):
    assert everything(shakespeare("data:,First%20Citizen:%0A")) == "First Citizen:\n"
    assert everything(shakespeare("data:,gone")) == "First Citizen:\n"
    assert os.listdir(tmp_path / "cache") == ["tinyshakespeare.txt"]


def test_a_download_that_is_another_text_is_refused_and_not_kept(shakespeare, tmp_path):
    with pytest.raises(
        IntegrityError, match=r"'data:,First' has sha256 .*, not .*: save data:,First by hand"
    ):
        everything(shakespeare("data:,First"))
    assert not (tmp_path / "cache").exists()


def test_a_damaged_copy_is_refused(shakespeare, tmp_path):
    source = shakespeare("data:,First%20Citizen:%0A")
    everything(source)
    (tmp_path / "cache" / "tinyshakespeare.txt").write_text("First Citizen;\n")
    with pytest.raises(IntegrityError, match=r"tinyshakespeare\.txt' has sha256 .*: delete it"):
        everything(source)


def test_no_network_says_what_to_do(shakespeare):
    with pytest.raises(ResourceError, match=r"cannot fetch data\.name=shakespeare .*by hand.*data\.path"):
        everything(shakespeare("http://127.0.0.1:1/"))


# Chunks and tokens


@pytest.mark.parametrize("kind", [*KINDS, "llama3"])
@given(text=texts, size=st.integers(1, 12), parts=st.integers(1, 7))
@example(text="to be.\nto be. to be\nbe", size=4, parts=1)
@settings(max_examples=100, deadline=None)
def test_chunks_tokenize_as_the_whole(kind, text, size, parts):
    tokenizer = train("char", text or "x") if kind == "char" else trained(kind)
    pieces = list(chunks((text[i : i + parts] for i in range(0, len(text), parts)), size))
    assert "".join(pieces) == text
    expected = tokenizer.encode(text).tolist()
    assert [i for piece in pieces for i in tokenizer.encode(piece).tolist()] == expected


def test_chunks_are_small_and_end_where_a_word_does():
    pieces = list(chunks(re.findall("(?s).{1,8}", "to be, or not to be\n" * 50), size=100))
    assert len(pieces) == 11
    assert all(piece.endswith("be") for piece in pieces[:-1])
    assert all(piece.startswith("\n") for piece in pieces[1:])


@pytest.mark.parametrize(("letter", "longest"), [("a", 40), (" ", 40), ("字。\n", 41), ("。 ", 41)])
def test_a_text_without_words_is_cut_all_the_same(letter, longest):
    text = letter * 100
    pieces = list(chunks(text, size=10, limit=40))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= longest


@given(text=st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
@settings(max_examples=60, deadline=None)
def test_whatever_the_cut_no_text_is_lost(text):
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokenize(chunks("to" + text, size=2, limit=3), trained("bpe"), Path(folder, "ids.bin"))
        assert trained("bpe").decode(tokens.ids) == "to" + text


@pytest.mark.parametrize("kind", [*KINDS, "llama3", "prepend"])
def test_tokens_are_those_of_the_text_and_say_which_it_was(kind, tmp_path):
    source = written(tmp_path / "a.txt", TEXT, chunk=20)
    tokens = tokenize(source, trained(kind), tmp_path / "new" / "ids.bin")
    assert tokens.ids.tolist() == trained(kind).encode(TEXT).tolist()
    assert isinstance(tokens.ids, np.memmap)
    assert tokens.ids.dtype == np.uint16
    assert os.listdir(tmp_path / "new") == ["ids.bin"]
    assert tokens.sha256 == hashlib.sha256((tmp_path / "a.txt").read_bytes()).hexdigest()
    assert (tokens.n_bytes, tokens.n_characters) == (len(TEXT.encode()), len(TEXT))


def test_a_large_vocabulary_takes_wider_ids(tmp_path):
    text = "".join(chr(i) for i in range(0x10000, 0x10000 + 65_537))
    tokens = tokenize([text], train("char", text), tmp_path / "ids.bin")
    assert tokens.ids.dtype == np.uint32
    assert tokens.ids[-1] == 65_536


def test_a_text_of_which_nothing_is_left_leaves_nothing(tmp_path):
    for text in ([], [""]):
        with pytest.raises(InvalidInput, match="the text has 0 tokens"):
            tokenize(text, trained("byte"), tmp_path / "tokens.bin")
    assert not list(tmp_path.iterdir())


def test_tokens_that_cannot_be_written_leave_nothing(tmp_path):
    with pytest.raises(
        ResourceError, match=r"cannot write the tokens to '.*ids\.bin' \(.*\): free some space"
    ):
        tokenize(["text"], trained("byte"), written(tmp_path / "file", "").path / "ids.bin")
    with pytest.raises(InvalidInput, match="not in the vocabulary"):
        tokenize(["ab", "c"], train("char", "ab"), tmp_path / "ids.bin")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(InvalidInput, match="0 tokens"):
        tokenize([], trained("byte"), tmp_path / "ids.bin")


def test_tokens_that_were_there_stay_until_the_new_ones_are_whole(tmp_path):
    before = tokenize(["abba"], train("char", "ab"), tmp_path / "ids.bin")
    with pytest.raises(InvalidInput, match="not in the vocabulary"):
        tokenize(["bb", "c"], train("char", "ab"), tmp_path / "ids.bin")
    tokenize(["bb"], train("char", "ab"), tmp_path / "ids.bin")
    assert before.ids.tolist() == [0, 1, 1, 0], "an older mapping keeps its file"
    assert os.listdir(tmp_path) == ["ids.bin"]


def test_ids_beyond_the_model_are_refused():
    require_vocabulary(ids(65), 65)
    with pytest.raises(
        InvalidInput, match=r"token id 65, but the model has vocab_size=65: use .*tokenizer\.json"
    ):
        require_vocabulary(ids(66), 65)


# Splits and batches


def test_a_split_keeps_the_order_and_every_token():
    train_ids, val_ids = split(ids(1000), block_size=7, val_fraction=0.1)
    assert (len(train_ids), len(val_ids)) == (900, 100)
    assert np.concatenate([train_ids, val_ids]).tolist() == list(range(1000))
    assert len(split(np.zeros(1_115_394, np.uint16), 64).train) == 1_003_854, "as nanoGPT"
    assert len(split(ids(20), block_size=19, val_fraction=0.0).val) == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=rf"data\.val_fraction={fraction} .*use 0\.1"):
        split(ids(100), 7, fraction)


def test_a_split_shorter_than_a_block_says_what_fits():
    message = (
        r"^the validation split has 90 tokens, but one block needs data\.block_size \+ 1 = 129: "
        r"use a longer text, or data\.block_size=89 or less\.$"
    )
    with pytest.raises(InvalidInput, match=message):
        split(ids(900), 128)
    split(ids(900), 89)
    with pytest.raises(
        InvalidInput, match=r"^the training split has 810 .* or data\.block_size=89 or less\.$"
    ):
        split(ids(900), 1000)


@given(block=st.integers(1, 9), extra=st.integers(-9, 3))
@settings(max_examples=60)
def test_a_text_of_any_length_is_sampled_or_refused(block, extra):
    n = max(block + extra, 0)
    if n > block:
        inputs, targets = BatchSampler(ids(n), block, 3, seed=1).next()
        assert inputs.shape == targets.shape == (3, block)
    else:
        with pytest.raises(
            InvalidInput, match=rf"the training split has {n} tokens, .* = {block + 1}: use a longer"
        ):
            BatchSampler(ids(n), block, 3, seed=1)


def test_targets_are_the_inputs_one_token_on():
    inputs, targets = BatchSampler(ids(50), block_size=7, batch_size=5, seed=3).next()
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_with_bos_every_window_begins_with_it_and_nothing_else_changes():
    inputs, targets = BatchSampler(ids(50), block_size=7, batch_size=5, seed=3).next()
    begun, same = BatchSampler(ids(50), block_size=7, batch_size=5, seed=3, bos=99).next()
    assert (begun[:, 0] == 99).all()
    assert torch.equal(begun[:, 1:], inputs[:, 1:])
    assert torch.equal(same, targets)


def test_every_window_is_drawn_the_first_and_the_last_too():
    inputs, targets = BatchSampler(ids(12), block_size=3, batch_size=400, seed=5).next()
    assert set(inputs[:, 0].tolist()) == set(range(9))
    assert targets.max() == 11


def test_a_seed_decides_and_nothing_else():
    def draw(seed):
        return BatchSampler(ids(500), 7, 5, seed).next()[0]

    before = torch.get_rng_state()
    torch.manual_seed(1)
    first = draw(2)
    torch.manual_seed(9)
    state = torch.get_rng_state()
    assert torch.equal(first, draw(2))
    assert not torch.equal(first, draw(3))
    assert torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(before)


def test_a_restored_sampler_goes_on_to_the_bit():
    sampler = BatchSampler(ids(500), 7, 5, seed=11)
    for _ in range(3):
        sampler.next()
    state = sampler.state()
    expected = [sampler.next() for _ in range(4)]
    other = BatchSampler(ids(500), 7, 5, seed=99)
    other.restore(state.clone())
    for inputs, targets in expected:
        new_inputs, new_targets = other.next()
        assert torch.equal(inputs, new_inputs)
        assert torch.equal(targets, new_targets)


def test_a_damaged_state_is_refused():
    sampler = BatchSampler(ids(500), 7, 5, seed=11)
    for state in (torch.zeros(10, dtype=torch.uint8), torch.full_like(sampler.state(), 255)):
        with pytest.raises(
            IntegrityError, match=f"sampler state of {len(state)} bytes is damaged: resume an older"
        ):
            sampler.restore(state)


@given(n=st.integers(2, 60), block=st.integers(1, 9), batch=st.integers(1, 5))
@settings(max_examples=100)
def test_every_token_but_the_first_is_predicted_once(n, block, batch):
    predicted = []
    for inputs, targets in evaluation_blocks(ids(n), block, batch):
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == block
        assert inputs.shape[0] <= batch
        counts = targets != IGNORE
        assert torch.equal(targets[counts], inputs[counts] + 1)
        assert inputs.min() >= 0
        predicted += targets[counts].tolist()
    assert predicted == list(range(1, n))


def test_a_limit_spreads_the_blocks_evenly():
    def starts(limit):
        batches = evaluation_blocks(ids(1001), 10, 4, limit)
        return [int(start) for inputs, _ in batches for start in inputs[:, 0]]

    assert starts(5) == [0, 200, 400, 600, 800]
    assert starts(7) == starts(7)
    assert starts(100) == starts(1000) == starts(None) == list(range(0, 1000, 10))
    with pytest.raises(ConfigError, match="limit=0 blocks"):
        starts(0)


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_predict_is_refused(n):
    with pytest.raises(InvalidInput, match=f"a text of {n} token{'s' * (n != 1)} leaves nothing to predict"):
        list(evaluation_blocks(ids(n), 7, 5))
