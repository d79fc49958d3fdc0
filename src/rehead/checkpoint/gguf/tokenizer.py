"""Converts the vocabulary in a GGUF file to a tokenizer.json.

A GGUF file only names its pre-tokenizer (`tokenizer.ggml.pre`), whose regular expressions are in llama.cpp's source.
The pre-tokenizers supported here are copied from the models' own tokenizer.json.
"""

from collections.abc import Callable
from typing import Any

import tokenizers as hf
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from rehead.checkpoint.files.writing import json_text
from rehead.checkpoint.gguf.file import File
from rehead.checkpoint.huggingface.base import Table
from rehead.checkpoint.huggingface.stock import TOKENIZER
from rehead.errors import InvalidInput, ReheadError
from rehead.registry import Registry

CONTROL, OWN = 3, 4
"""Types of tokens that are matched before pre-tokenization: control tokens and user-defined ones."""
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The tokens that end a text."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CUTS: Registry[Callable[[hf.Tokenizer], None]] = Registry("pre-tokenizer")


@CUTS.add("gpt-2")
def _gpt2(inner: hf.Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


@CUTS.add("smollm")
def _smollm(inner: hf.Tokenizer) -> None:
    """Split off every digit, then split as GPT-2 does."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@CUTS.add("llama-bpe")
def _llama3(inner: hf.Tokenizer) -> None:
    """Split with Llama 3's expression; a piece that is itself a token is kept without applying merges."""
    inner.pre_tokenizer = _expression(LLAMA3)
    inner.model.ignore_merges = True


@CUTS.add("qwen2")
def _qwen2(inner: hf.Tokenizer) -> None:
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = _expression(QWEN2)


def _expression(cut: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"), bytes_only])


class Vocabulary:
    """The keys `tokenizer.ggml.*` of a file, for a model of `vocab_size` tokens.

    Raises InvalidInput for an unknown kind of vocabulary or pre-tokenizer, and for lists that do not match
    each other.
    """

    def __init__(self, file: File, vocab_size: int) -> None:
        self.file = file
        kind = self._take("model", str)
        if kind != "gpt2":
            raise self._wrong(
                f"model={kind!r:.40}: rehead reads 'gpt2', BPE over bytes. Its tokens would differ"
            )
        if self._take("add_space_prefix", bool, False):
            raise self._wrong("add_space_prefix=True: rehead reads BPE that does not change a text first")
        self.tokens = self._texts("tokens")
        self.merges = self._texts("merges")
        types = self._take("token_type", list, [1] * len(self.tokens))
        if not len(self.tokens) == len(types) == vocab_size:
            raise self._wrong(
                f"tokens has {len(self.tokens)}, token_type {len(types)}, the model {vocab_size}: these must be equal"
            )
        self.added = [
            AddedToken(token, normalized=False, special=type_ == CONTROL)
            for token, type_ in zip(self.tokens, types, strict=True)
            if type_ in (CONTROL, OWN)
        ]
        self.cut = self._take("pre", str, "default")
        if self.cut not in CUTS:
            raise self._wrong(f"pre={self.cut!r:.40}: rehead knows the pre-tokenizers {', '.join(CUTS)}")
        self.ids = {key: self._take(key, int, None) for key in (*SPECIAL.values(), *ENDS)}
        for key, token in self.ids.items():
            if token is not None and not 0 <= token < vocab_size:
                raise self._wrong(f"{key}={token}: the vocabulary ends at {vocab_size - 1}")

    def special_ids(self) -> Table:
        """Return the special ids by their keys in config.json; a list of several that end a text."""
        ends = list(dict.fromkeys(token for key in ENDS if (token := self.ids[key]) is not None))
        ids = {
            "bos_token_id": self.ids["bos_token_id"],
            "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
            "pad_token_id": self.ids["padding_token_id"],
        }
        return {key: value for key, value in ids.items() if value is not None}

    def files(self, length: int) -> dict[str, str]:
        """Return tokenizer.json, tokenizer_config.json for a context of `length` tokens, and any chat template."""
        special = {
            name: self.tokens[self.ids[key]] for name, key in SPECIAL.items() if self.ids[key] is not None
        }
        config = {
            **TOKENIZER,
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            **special,
        }
        texts = {
            "tokenizer.json": self._json(),
            "tokenizer_config.json": json_text(config),
        }
        template = self.file.facts.get("tokenizer.chat_template")
        return texts | ({"chat_template.jinja": template} if isinstance(template, str) else {})

    def _json(self) -> str:
        """Return the tokenizer as the library `tokenizers` writes it."""
        try:
            return self._tokenizer().to_str(pretty=True)
        except (ReheadError, MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are not Exceptions
            raise self._wrong(f"*: {error!s:.200}. The library `tokenizers` does not accept it") from None

    def _tokenizer(self) -> hf.Tokenizer:
        ids = {token: index for index, token in enumerate(self.tokens)}
        if len(ids) < len(self.tokens):
            raise self._wrong(f"tokens has {len(self.tokens) - len(ids)} duplicates")
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in self.merges)]
        for left, right in pairs:
            if not {left, right, left + right} <= ids.keys():
                raise self._wrong(
                    f"merges has '{left:.40} {right:.40}': both parts and their concatenation must be tokens"
                )
        inner = hf.Tokenizer(models.BPE(ids, pairs))
        CUTS[self.cut](inner)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([token for token in self.added if token.special])
        inner.add_tokens([token for token in self.added if not token.special])
        self._add_ends(inner)
        return inner

    def _add_ends(self, inner: hf.Tokenizer) -> None:
        """Add the tokens that begin and end every text, if the file requests them."""
        ends = {
            "bos_token_id": self._take("add_bos_token", bool, self.cut == "llama-bpe"),
            "eos_token_id": self._take("add_eos_token", bool, False),
        }
        added = {key: self.ids[key] for key, on in ends.items() if on}
        for key, token in added.items():
            if token is None:
                raise self._wrong(f"{key} is missing, but must be added to every text")
        begin, end = ([self.tokens[added[key]]] if key in added else [] for key in ends)
        if added:
            inner.post_processor = processors.TemplateProcessing(
                single=[*begin, "$A", *end],
                pair=[*begin, "$A", *end, *begin, "$B:1", *end],
                special_tokens=[(self.tokens[token], token) for token in added.values()],
            )

    def _take(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self.file.facts.get(f"tokenizer.ggml.{name}", default)
        if value is ...:
            raise self._wrong(f"{name} is missing: the model is unusable without a tokenizer")
        if value is not default and type(value) is not kind:
            raise self._wrong(f"{name}={value!r:.40}: expected {kind.__name__}")
        return value

    def _texts(self, name: str) -> list[str]:
        texts: list[str] = self._take(name, list)
        if not all(type(text) is str for text in texts):
            raise self._wrong(f"{name} holds something other than text")
        return texts

    def _wrong(self, why: str) -> InvalidInput:
        return InvalidInput(f"{self.file.path}: tokenizer.ggml.{why}.")
