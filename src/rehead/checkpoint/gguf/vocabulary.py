"""What a GGUF file says of a tokenizer.json: tokens, merges, a pre-tokenizer, and which tokens begin and end a text.

llama.cpp looks up the code that cuts a text by the pre-tokenizer's name. So only pre-tokenizers known to cut alike
(`tokenizer.CUTS`) are written; others are refused.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

import tokenizers as hf

from rehead.checkpoint.gguf.tokenizer import CONTROL, CUTS, ENDS, OWN
from rehead.checkpoint.huggingface.base import Table
from rehead.errors import ConfigError

log = logging.getLogger("rehead")
NORMAL, UNUSED = 1, 5
"""Types of tokens, beside those that are matched before pre-tokenization."""
NEVER = "ÿ"
"""How byte-level BPE spells the byte 255, which no text in UTF-8 has."""
OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
)
"""Fields of BPE that GGUF cannot represent."""
STRIPS = ("lstrip", "rstrip", "single_word")
WAY = "Export a Hugging Face folder (without --format gguf), or train with data.tokenizer=bpe."


def vocabulary(text: str, n_token: int, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys `tokenizer.ggml.*` for the text of a tokenizer.json and a model of `n_token` tokens.

    `special` are the ids that begin, end and pad a text, by their keys in config.json. Raises ConfigError for a
    tokenizer that llama.cpp does not have.
    """
    table = json.loads(text)
    inner = hf.Tokenizer.from_str(text)
    if table["model"]["type"] == "WordLevel":
        found = _by_bytes([token.encode() for token in _spelled(inner, n_token)])
    elif table["model"]["type"] == "BPE":
        found = _byte_level(table, inner, n_token)
    else:
        raise _refused(f"a {table['model']['type']} model")
    ids = _special_ids(special, inner, found)
    found |= {name: index for name, index in ids.items() if index is not None}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def tell_unwritten(text: str) -> None:
    """Warn of what `vocabulary` leaves out of a tokenizer.json."""
    normalizer = json.loads(text)["normalizer"]
    if normalizer:
        log.warning(
            "llama.cpp does not normalize a text before reading it (%s): give it text that is normalized.",
            normalizer["type"],
        )


def _byte_level(table: Table, inner: hf.Tokenizer, n_token: int) -> dict[str, Any]:
    model = table["model"]
    if model.get("byte_fallback"):
        raise _refused(
            "SentencePiece's BPE (byte_fallback)", "rehead writes only byte-level BPE for llama.cpp"
        )
    if odd := [name for name in OPTIONS if model.get(name)]:
        raise _refused(f"BPE with {', '.join(odd)}")
    added = {one["id"]: one for one in table["added_tokens"]}
    if odd := [one["content"] for one in added.values() if any(one[name] for name in STRIPS)]:
        raise _refused(f"tokens that take the spaces beside them, such as {odd[0]!r:.40}")
    tokens = _spelled(inner, n_token)
    known = set(inner.get_vocab().values())
    if not model["merges"] and not added and n_token == 256 == len(known):
        alphabet = _bytes_by_letter()
        return _by_bytes([bytes([alphabet[token]]) for token in tokens])
    if not model["merges"]:
        raise _refused("BPE without merges", "llama.cpp would not load it")
    return {
        "model": "gpt2",
        "pre": _cut_of(table),
        "tokens": tokens,
        "token_type": [_type(added.get(index), index in known) for index in range(n_token)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }


def _type(added: Table | None, known: bool) -> int:
    if added is not None:
        return CONTROL if added["special"] else OWN
    return NORMAL if known else UNUSED


def _spelled(inner: hf.Tokenizer, n_token: int) -> list[str]:
    """Return the token of every id of the model; an id without one gets a placeholder."""
    added = {index: token.content for index, token in inner.get_added_tokens_decoder().items()}
    return [added.get(index) or inner.id_to_token(index) or f"[PAD{index}]" for index in range(n_token)]


def _cut_of(table: Table) -> str:
    """Return the name of the pre-tokenizer that cuts as the tokenizer does."""
    ours = normalizer, cuts, ignores = _cut(table)
    other = f"a pre-tokenizer other than those of {', '.join(CUTS)}"
    for name in CUTS:
        known = hf.Tokenizer(hf.models.BPE())
        CUTS[name](known)
        if (theirs := _cut(json.loads(known.to_str()))) == ours:
            return name
        if theirs[1] == cuts:
            kind = normalizer and normalizer["type"]
            other = f"the pre-tokenizer of {name}, but normalizer={kind} and ignore_merges={ignores}"
    raise _refused(other)


def _cut(table: Table) -> tuple[Any, Any, bool]:
    """Return all that decides where a text is cut, in one form: normalizer, pre-tokenizers and `ignore_merges`."""
    steps = table["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    cuts = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    return table["normalizer"], cuts, bool(table["model"].get("ignore_merges"))


def _by_bytes(tokens: list[bytes]) -> dict[str, Any]:
    """Return a vocabulary in which every token is a character or a byte, as RWKV's, which takes the longest match.

    It has no end-of-text token; with BPE, llama.cpp would use token 11 instead. llama.cpp b11549 does not return on a
    character that the vocabulary lacks but whose first byte it has; so only ASCII and whole bytes are written.
    """
    if any(len(token) > 1 for token in tokens):
        longer = next(token for token in tokens if len(token) > 1)
        raise _refused(
            f"characters beyond ASCII, such as {longer.decode()!r:.40}",
            "llama.cpp would not end on others that begin with the same byte",
        )
    spelled = ["".join(f"\\x{byte:02x}" for byte in token) for token in tokens]
    return {"model": "rwkv", "tokens": spelled, "token_type": [NORMAL] * len(tokens)}


def _bytes_by_letter() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE encodes: GPT-2's table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _special_ids(special: Mapping[str, Any], inner: hf.Tokenizer, found: dict[str, Any]) -> dict[str, Any]:
    """Return the ids that begin, end and pad a text, and whether the first two are added to every text."""
    if found["model"] == "rwkv":
        return {}
    begin, end = _around(inner)
    ids = {name: _known(value, len(found["tokens"])) for name, value in special.items()}
    ends: list[int | None] = list(dict.fromkeys([*end, *ids.get("eos_token_id", [])])) or [
        inner.token_to_id(NEVER)
    ]
    if ends == [None]:
        raise _refused("no token that ends a text", "llama.cpp would end it at token 11")
    if len(ends) > len(ENDS):
        raise _refused(
            f"{len(ends)} tokens that end a text", f"llama.cpp would stop at {len(ENDS)} of them only"
        )
    return {
        "bos_token_id": [*begin, *ids.get("bos_token_id", []), ends[0]][0],
        **dict(zip(ENDS, ends, strict=False)),
        "padding_token_id": next(iter(ids.get("pad_token_id", [])), None),
        "add_bos_token": bool(begin),
        "add_eos_token": bool(end),
    }


def _known(value: object, n_token: int) -> list[int]:
    """Return the id or ids that a field of config.json names, without those that no token has."""
    named = value if isinstance(value, list) else [value]
    return [index for index in named if type(index) is int and 0 <= index < n_token]


def _around(inner: hf.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after every text: one each, or none."""
    inner.no_truncation()
    inner.no_padding()
    text = inner.encode("a", add_special_tokens=False).ids
    whole = inner.encode("a", add_special_tokens=True).ids
    for n_before in (0, 1):
        before, rest = whole[:n_before], whole[n_before:]
        if rest[: len(text)] == text and len(rest) - len(text) <= 1:
            return before, rest[len(text) :]
    raise _refused(f"{len(whole) - len(text)} tokens around every text")


def _refused(what: str, why: str = "llama.cpp would read texts as other tokens") -> ConfigError:
    return ConfigError(f"the tokenizer has {what}: {why}. {WAY}")
