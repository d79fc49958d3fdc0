import json
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rehead.errors import ConfigError, InvalidInput
from rehead.tokenizer import FILE, KINDS, Tokenizer, train
from rehead.tokenizer import tokenizer as module
from rehead.tokenizer.guard import guard

HARD = "nul\0 tab\t cr\r\n \x85 \u2028 \x1c é e\u0301 שלום 👩‍👩‍👧 𝄞 \ufeff \ufffd"
SAMPLE = "to be, or not to be:\nthat is the question.\n\n" * 3 + HARD

texts = st.text(max_size=60)
hard_texts = st.lists(st.sampled_from(HARD), max_size=40).map("".join)


@cache
def trained(kind):
    return train(kind, SAMPLE, 300 if kind == "bpe" else None)


@cache
def gpt2():
    """As `openai-community/gpt2`: bytes, an added special token, no <unk>."""
    inner = hf.Tokenizer.from_str(trained("bpe").to_json())
    inner.add_special_tokens(["<|endoftext|>"])
    return Tokenizer.from_json(inner.to_str())


@cache
def llama():
    """As Llama 2: no pre-tokenizer, "▁" for a blank and before every text, bytes for what is unknown."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "o",
        "b",
        "e",
        "▁t",
        "▁to",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "o")]
    inner = hf.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return Tokenizer.from_json(inner.to_str())


EVERY = {**{kind: lambda kind=kind: trained(kind) for kind in KINDS}, "gpt2": gpt2, "llama": llama}


@pytest.mark.parametrize("kind", list(KINDS))
@given(text=texts | hard_texts)
@example(text="")
@example(text=HARD)
@settings(max_examples=60)
def test_a_text_comes_back_to_the_letter(kind, text):
    tokenizer = train("char", text or "x") if kind == "char" else trained(kind)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("kind", list(KINDS))
@given(text=hard_texts)
@settings(max_examples=40)
def test_the_stock_library_gives_the_same_ids(kind, text):
    stock = hf.Tokenizer.from_str(trained(kind).to_json())
    ids = trained(kind).encode(text)
    assert stock.encode(text).ids == ids.tolist()
    assert stock.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_file_is_loaded_as_the_kind_that_was_saved(kind, tmp_path):
    (tmp_path / FILE).write_text(trained(kind).to_json(), encoding="utf-8")
    for path in (tmp_path, tmp_path / FILE):
        loaded = Tokenizer.load(path)
        assert (loaded.kind, loaded.vocab_size) == (kind, trained(kind).vocab_size)
        assert loaded.to_json() == trained(kind).to_json()
        assert loaded.encode(SAMPLE).tolist() == trained(kind).encode(SAMPLE).tolist()
    stock = hf.Tokenizer.from_file(str(tmp_path / FILE))
    assert stock.encode(SAMPLE).ids == loaded.encode(SAMPLE).tolist()


def test_a_character_is_its_rank_and_a_byte_is_itself():
    assert train("char", "banana\n").encode("nab\n").tolist() == [3, 1, 2, 0]
    assert trained("byte").encode("é\0A").tolist() == [0xC3, 0xA9, 0, 65]
    assert trained("byte").vocab_size == 256


def test_bpe_merges_up_to_the_size_asked_for():
    assert trained("bpe").vocab_size == 300
    assert 256 < train("bpe", "ab", 300).vocab_size < 260
    assert len(trained("bpe").encode(SAMPLE)) < len(SAMPLE.encode())


@pytest.mark.parametrize("kind", list(KINDS))
def test_training_from_chunks_is_training_from_the_whole(kind):
    size = 300 if kind == "bpe" else None
    lines = re.split(r"(?<=[a-z])(?=\n| )", SAMPLE)
    assert len(lines) > 20
    assert train(kind, iter(lines), size).to_json() == trained(kind).to_json()


@pytest.mark.parametrize(("around", "begins"), [("<s> $A </s>", True), ("$A </s>", False), (None, False)])
@pytest.mark.parametrize("kind", ["char", "bpe", "words without <unk>"])
def test_the_token_before_every_text(kind, around, begins):
    """As the file says it, whatever it can read; one after the text is none."""
    inner = (
        hf.Tokenizer(models.WordLevel({"7": 0}))
        if kind[0] == "w"
        else hf.Tokenizer.from_str(trained(kind).to_json())
    )
    inner.add_special_tokens(["<s>", "</s>"])
    if around:
        special = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
        inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    found = Tokenizer.from_json(inner.to_str())
    assert found.bos == (inner.token_to_id("<s>") if begins else None)
    assert trained("byte").bos is None


@pytest.mark.parametrize(("around", "begins"), [("<s> $A </s>", True), ("$A </s>", False)])
def test_the_token_before_every_text_where_the_first_one_has_none(around, begins):
    """A bare "▁", the first piece of many vocabularies, is no text: every special token would be before it."""
    vocabulary = [("<s>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -1.0), ("b", -1.0)]
    inner = hf.Tokenizer(models.Unigram(vocabulary, unk_id=0))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    found = Tokenizer.from_json(inner.to_str())
    assert found.decode([2]) == ""
    assert found.bos == (0 if begins else None)


@pytest.mark.parametrize("first", ["<pad>", "7"])
def test_the_token_before_every_text_where_the_first_one_cannot_be_read(first):
    """As "<pad>" of a vocabulary without an unknown token, whose text is cut into words that it lacks."""
    inner = hf.Tokenizer(models.WordLevel({first: 0, "8": 1}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    found = Tokenizer.from_json(inner.to_str())
    assert (found.bos, found.encode("8").tolist()) == (2, [1])


def test_threads_read_special_tokens_each_in_its_way():
    inner = hf.Tokenizer.from_str(trained("bpe").to_json())
    inner.add_special_tokens(["<s>"])
    found, failed = Tokenizer.from_json(inner.to_str()), []

    def read(way):
        alone = found.encode("<s>a", special_tokens=way).tolist()
        failed.extend(
            now for _ in range(2000) if (now := found.encode("<s>a", special_tokens=way).tolist()) != alone
        )
        return alone

    with ThreadPoolExecutor(4) as threads:
        plain, special, again, third = threads.map(read, [False, True, "read", False])
    assert not failed
    assert (len(special), again, third) == (2, special, plain)
    assert len(plain) > 2


def test_of_several_tokens_before_a_text_none_is_taken():
    """As GLM-4's [gMASK] <sop>: the first alone is a text that the model never sees."""
    inner = hf.Tokenizer.from_str(trained("bpe").to_json())
    inner.add_special_tokens(["[gMASK]", "<sop>"])
    special = [(token, inner.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    inner.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=special)
    with pytest.warns(UserWarning, match=r"puts several tokens before a text \(\[gMASK\] <sop>\)"):
        assert Tokenizer.from_json(inner.to_str()).bos is None


@pytest.mark.parametrize("tokenizer", EVERY)
def test_special_tokens_in_a_text_are_plain_text(tokenizer):
    text = "<|endoftext|><s><unk>"
    tokenizer = train("char", text) if tokenizer == "char" else EVERY[tokenizer]()
    ids = tokenizer.encode(text)
    assert len(ids) > 10
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("tokenizer", EVERY)
@given(data=st.data())
@settings(max_examples=80)
def test_streaming_adds_up_to_the_whole(tokenizer, data):
    tokenizer = EVERY[tokenizer]()
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(
        st.lists(any_id, max_size=25) | hard_texts.map(lambda text: tokenizer.encode(text).tolist())
    )
    pieces = list(tokenizer.stream(iter(ids)))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all(pieces)
    prompt = tokenizer.encode("to be")
    continued = "".join(tokenizer.stream(iter(ids), after=prompt))
    assert "to be" + continued == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("tokenizer", ["byte", "bpe", "gpt2", "llama"])
def test_streaming_shows_full_code_points_only(tokenizer):
    text = "été 👩‍👩‍👧𝄞 to be"
    pieces = list(EVERY[tokenizer]().stream(EVERY[tokenizer]().encode(text)))
    assert len(pieces) > 5
    assert "\ufffd" not in "".join(pieces)


def test_streaming_is_not_late_and_ends_with_what_is_left():
    ids = [0x41, 0xC3, 0xA9, 0x42, 0xE2, 0x82]
    seen = []

    def source():
        for i in ids:
            seen.append(i)
            yield i

    stream = trained("byte").stream(source())
    assert (next(stream), len(seen)) == ("A", 1)
    assert (next(stream), len(seen)) == ("é", 3)
    assert next(stream) == "B"
    assert list(stream) == ["\ufffd"]


@pytest.mark.parametrize("tokenizer", EVERY)
def test_a_continuation_has_the_ids_it_has_in_the_whole(tokenizer):
    tokenizer = EVERY[tokenizer]()
    whole = tokenizer.encode("to be to be to")
    parts = [tokenizer.encode("to be"), tokenizer.encode(" to be to", after="e")]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_a_continuation_that_merges_with_what_is_before_loses_nothing():
    tokenizer = trained("bpe")
    assert len(tokenizer.encode("be")) == 1
    assert tokenizer.decode(tokenizer.encode("e", after="b")) == "e"


def test_unseen_characters_are_named():
    tokenizer = train("char", "abc")
    message = (
        r"^characters not in the vocabulary of 3: '\\n', '\\u2028', '😀' \(3 in all\)\..*data\.tokenizer=byte"
    )
    with pytest.raises(InvalidInput, match=message):
        tokenizer.encode("a😀\u2028\nbb😀")
    with pytest.raises(InvalidInput, match=r"'l', 'm' \(15 in all\)"):
        tokenizer.encode("abcdefghijklmnopqr")


@pytest.mark.parametrize("tokenizer", EVERY)
def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(InvalidInput, match=r"lone surrogate '\\ud83d' at character 1 .* UTF-8"):
        EVERY[tokenizer]().encode("t\ud83d")


@pytest.mark.parametrize("kind", list(KINDS))
def test_half_a_surrogate_pair_is_refused_in_training(kind):
    with pytest.raises(InvalidInput, match="lone surrogate"):
        train(kind, "t\ud83d", 300 if kind == "bpe" else None).encode("t\ud83d")


def test_a_negative_id_is_refused():
    with pytest.raises(InvalidInput, match=r"id -1 is below 0: ids are 0 to 299\. Leave it out"):
        trained("bpe").decode([5, -1])


@pytest.mark.parametrize("tokenizer", [*EVERY, "hole"])
def test_an_id_without_a_token_has_no_text_and_a_warning_says_so(tokenizer):
    """Models with a padded vocabulary draw such ids."""
    hole = Tokenizer.from_json(hf.Tokenizer(models.BPE({"a": 0, "b": 7}, [])).to_str())
    tokenizer = hole if tokenizer == "hole" else EVERY[tokenizer]()
    known = [7, 0] if tokenizer is hole else tokenizer.encode("to be").tolist()
    unknown = [3, 8, 2**40] if tokenizer is hole else [tokenizer.vocab_size, 2**40, 10**6]
    mixed = [unknown[0], *known, unknown[1], *known, unknown[2]]
    told = "3 ids are not in the tokenizer's vocabulary of .* these are another tokenizer's ids"
    with pytest.warns(UserWarning, match=told):
        assert tokenizer.decode(mixed) == tokenizer.decode(known + known)
    with pytest.warns(UserWarning, match=told):
        assert "".join(tokenizer.stream(mixed, after=known)) == "".join(
            tokenizer.stream(known + known, after=known)
        )
    with pytest.warns(UserWarning, match="^1 id is not in the tokenizer's vocabulary of .* and has no text"):
        assert tokenizer.decode(known + unknown[:1]) == tokenizer.decode(known)
    assert tokenizer.pieces(unknown) == ["", "", ""]


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_size_is_refused_where_it_would_be_ignored(kind):
    with pytest.raises(ConfigError, match=rf"vocab_size=300: the size of a {kind} .*data\.tokenizer=bpe"):
        train(kind, "abc", 300)


@pytest.mark.parametrize("size", [None, 255, 1 << 30])
def test_bpe_needs_a_size(size):
    with pytest.raises(ConfigError, match=rf"data\.vocab_size={size}: bpe needs one in 256\.\."):
        train("bpe", "abc", size)


def test_an_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown tokenizer 'bype'.*char, byte, bpe"):
        train("bype", "abc")


def test_stock_files_load_as_bpe():
    assert (gpt2().kind, gpt2().vocab_size) == ("bpe", 301)
    assert llama().kind == "bpe"
    ids = llama().encode("to é")
    assert ids.tolist() == [264, 258, 2 + 0xC3, 2 + 0xA9]
    assert llama().decode(ids) == "to é"


def test_a_file_cannot_cut_texts_short():
    inner = hf.Tokenizer.from_str(gpt2().to_json())
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    assert len(Tokenizer.from_json(inner.to_str()).encode(HARD)) > 9
    assert len(Tokenizer.from_json(inner.to_str()).encode("t")) == 1


def changed(kind, **model):
    content = json.loads(trained(kind).to_json())
    content["model"].update(model)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "EOF"),
        ("{", "EOF"),
        ("null", "null"),
        ("[]", "sequence"),
        ("{}", "Model missing"),
        ("[" * 1_000_000, "sequence"),
        ('{"model":' + '{"a":' * 100_000, "recursion"),
        ('{"version":"9","model":{"type":"BPE","vocab":{},"merges":[]}}', "version"),
        ('{"model":{"type":"Nope"}}', "did not match"),
        ('{"model":{"type":"BPE","vocab":{"a":-1},"merges":[]}}', "-1"),
        ('{"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}', "out of vocabulary"),
        ('{"model":{"type":"BPE","vocab":{},"merges":[]}}', "json of 0 tokens"),
        ('{"model":{"type":"BPE","vocab":{"a":4000000000},"merges":[]}}', "json of 4000000001 tokens"),
        (
            json.dumps(
                {
                    "model": {
                        "type": "BPE",
                        "vocab": {f"t{i}": i or 4_000_000_000 for i in range(256)},
                        "merges": [],
                    }
                }
            ),
            "json of 4000000001 tokens",
        ),
        (changed("bpe", dropout=0.5), r"dropout=0\.5: .* other ids each time\. Set \"dropout\": null"),
        (b"\xff\xfe{}", "utf-8"),
    ],
)
def test_a_malformed_file_is_refused_by_name(content, message, tmp_path):
    file = tmp_path / FILE
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert FILE in str(caught.value)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 2**19
    )  # KiB: an id of 4 billion takes none
    assert "\n" not in str(caught.value)


def test_a_pattern_without_end_stops_with_an_error():
    """Rust panics there, which is no `Exception` in Python."""
    inner = hf.Tokenizer.from_str(trained("bpe").to_json())
    endless = pre_tokenizers.Split(hf.Regex("(a+)+$"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([endless, inner.pre_tokenizer])
    with pytest.raises(InvalidInput, match="retry-limit"):
        Tokenizer.from_json(inner.to_str()).encode("a" * 40 + "!")


def test_what_is_no_file_or_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match=rf"no file '.*{FILE}': give"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InvalidInput, match="no file"):
        Tokenizer.load(tmp_path / "a\0b")
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(InvalidInput, match="no file"):
        Tokenizer.load(tmp_path)
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    (tmp_path / "other.json").write_text("x" * 11)
    with pytest.raises(InvalidInput, match=r"has 11 bytes: .* 10 at most"):
        Tokenizer.load(tmp_path / "other.json")


@pytest.mark.parametrize("kind", list(EVERY))
def test_a_piece_for_every_token(kind):
    tokenizer = EVERY[kind]()
    ids = tokenizer.encode("to be to")
    assert "".join(tokenizer.pieces(ids)).strip() == "to be to"
    assert len(tokenizer.pieces(ids)) == len(ids)


def test_pieces_keep_the_blank_before_a_word_and_show_part_of_a_character():
    assert llama().pieces(llama().encode("to to")) == [" to", " to"]
    assert trained("byte").pieces("né".encode()) == ["n", "\ufffd", "\ufffd"]


def test_an_interrupt_before_the_block_is_no_error_of_the_tokenizer():
    """Python then closes the context manager, and prints what that raises."""
    guarding = guard("it cannot read this text", "Use another")
    guarding.__enter__()
    guarding.gen.close()
