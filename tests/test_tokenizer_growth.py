"""Steps of a tokenizer.json that make gigabytes of a text, or search it for ever, are refused; those in use are not."""

import base64
import json
import struct

import pytest

from rehead.errors import InvalidInput
from rehead.tokenizer import Tokenizer, train

BASE = json.loads(train("bpe", "abc abc " * 9, 259).to_json())
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BERT = {"type": "BertNormalizer"} | dict.fromkeys(
    ["clean_text", "handle_chinese_chars", "strip_accents", "lowercase"], True
)
WORDS = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}


def read(**parts):
    return Tokenizer.from_json(json.dumps(BASE | parts), "it")


def normalized(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def cut(*steps):
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


def joined(*steps):
    return {"decoder": {"type": "Sequence", "decoders": list(steps)}}


def replaces(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


def splits(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def mapping(*texts):
    """A precompiled map, as of SentencePiece: a trie without entries, and the texts that it would map to."""
    blob = struct.pack("<I", 1024) + bytes(1024) + "\0".join(texts).encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


GROWS = {
    "text after text": normalized(*[replaces("aa", String="a")] * 8),
    "a longer text": normalized(replaces("b" * 300, String="aa")),
    "nothing": normalized(replaces("b" * 200, String="")),
    "a pattern that may match nothing": normalized(replaces("b" * 200, Regex="a*")),
    "bytes of bytes": normalized(*[{"type": "ByteLevel"}] * 4),
    "bytes of bytes of words": cut(*[BYTES] * 4),
    "blanks before blanks": cut(splits("."), *[WORDS] * 8),
    "a map": normalized(mapping("a", "b" * 129)),
    "blanks around blanks": normalized(*[BERT] * 5),
    "a decoder": joined(*[replaces("aa", String="a")] * 8),
    "sequences in sequences": normalized(*[normalized(*[replaces("aa", String="a")] * 2)["normalizer"]] * 4),
    "a beginning": normalized({"type": "Prepend", "prepend": "a" * 1025}),
    "a beginning that grows": normalized(
        {"type": "Prepend", "prepend": "a" * 600}, replaces("aa", String="a")
    ),
}


@pytest.mark.parametrize("name", GROWS)
def test_what_makes_a_text_much_longer_is_refused(name):
    with pytest.raises(
        InvalidInput, match=r"it: its [a-z_]+ may make a text .* rehead allows 128 times and 1,024"
    ):
        read(**GROWS[name])


ENDLESS = {
    "groups in groups": (cut(splits("(" * 9 + "a*" + ")*" * 9)), "9 groups in each other"),
    "a long pattern": (cut(splits("a*" * 2049)), "4,098 characters"),
    "a replaced one": (normalized(replaces("a", Regex="((((((((((a*)*)*)*)*)*)*)*)*)*)*")), "10 groups"),
    "many steps": (normalized(*[{"type": "NFKD"}] * 65), "65 steps"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_may_search_for_ever_is_refused(name):
    parts, says = ENDLESS[name]
    with pytest.raises(InvalidInput, match=says):
        read(**parts)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
USED = {
    "Llama 2": normalized({"type": "Prepend", "prepend": "▁"}, replaces("▁", String=" ")),
    "Llama 3": cut(splits(LLAMA3), BYTES | {"add_prefix_space": False, "use_regex": False}),
    "ALBERT": normalized(
        replaces('"', String="``"), replaces('"', String="''"), {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Lowercase"}, mapping("صلى الله عليه وسلم"), replaces(" ", Regex=" {2,}"),
    ),
    "T5": cut({"type": "WhitespaceSplit"}, WORDS),
    "DeepSeek": cut(splits(r"\p{N}{1,3}"), splits("[一-龥぀-ゟ゠-ヿ]+"), splits(LLAMA3), BYTES),
    "BERT": {"normalizer": BERT},
    "Gemma's decoder": joined(replaces(" ", String="▁"), {"type": "ByteFallback"}, {"type": "Fuse"}),
    "brackets that group nothing": cut(splits(r"[(((((((((]|\(\(\(\(\(\(\(\(\(")),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_what_is_in_use_is_read(name):
    tokenizer = read(**USED[name])
    assert tokenizer.decode(tokenizer.encode("abc abc")).strip()


TOO_MUCH = {
    "a text, again and again": (
        {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 65,
                            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                            "special_tokens": {}}},
        "65 pieces",
    ),
    "very many special tokens": (
        {"post_processor": {"type": "Sequence", "processors": [
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}], "pair":
             [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
             "special_tokens": {"a": {"id": "a", "ids": [0] * 1025, "tokens": ["a"] * 1025}}}]}},
        "1,025 ids",
    ),
    "a long token": ({"model": {"type": "WordLevel", "vocab": {"a" * 70_000: 0, "b": 1}, "unk_token": "b"}}, "70,000"),
    "a long piece": (
        {"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                   "vocab": [["b", 0.0], ["a" * 70_000, -1.0]]}},
        "70,000",
    ),
    "long words": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]",
                   "continuing_subword_prefix": "##", "max_input_chars_per_word": 2**40}},
        "max_input_chars_per_word=",
    ),
    "parts of no length": (cut({"type": "FixedLength", "length": 0}), "parts of no length"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_takes_gigabytes_or_minutes_is_refused(name):
    parts, words = TOO_MUCH[name]
    with pytest.raises(InvalidInput, match=words):
        Tokenizer.from_json(json.dumps(BASE | {"added_tokens": []} | parts), "it")


def test_a_file_of_empty_tables_is_refused():
    with pytest.raises(InvalidInput, match="tables and lists, more than 1,000,000"):
        Tokenizer.from_json(
            json.dumps(BASE).replace('"version"', '"x": [' + "{}," * 10**6 + '1], "version"', 1), "it"
        )


def test_defaults_and_other_models_are_none_of_these():
    assert read(**cut({"type": "FixedLength", "length": 5}))
    assert read(model=BASE["model"] | {"max_input_chars_per_word": None})
