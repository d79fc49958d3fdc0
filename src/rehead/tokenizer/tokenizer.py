"""Text to ids and back, from one file: `tokenizer.json`, as Hugging Face writes it.

rehead trains the kinds in `kinds.py` and reads whatever the `tokenizers` library reads.
"""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from operator import index
from pathlib import Path
from typing import Literal, SupportsIndex

import numpy as np
import tokenizers as hf
from jaxtyping import Int64
from tokenizers import models

from rehead.checkpoint import read_config
from rehead.checkpoint.files.strict import require_few_tables, require_regular
from rehead.errors import ConfigError, InvalidInput
from rehead.tokenizer.growth import require_modest
from rehead.tokenizer.guard import encoding, guard
from rehead.tokenizer.kinds import KINDS, MAX_VOCAB, UNITS, characters, single_bytes, valid_text
from rehead.tokenizer.unread import FILE, missing

MAX_BYTES = 64 << 20  # of that file
AGAIN = "Save it again with `tokenizers`"

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # Llama's spelling of a byte


class Tokenizer:
    """A vocabulary of one `kind`: char, byte, bpe, wordlevel, wordpiece or unigram.

    Its largest id is `vocab_size` - 1. A tokenizer trained here gives every text back to the letter; a
    downloaded one does what its file says, as `transformers` does, but never truncates or pads.
    """

    def __init__(self, inner: hf.Tokenizer, kind: str) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        vocab = inner.get_vocab()
        self.kind, self._inner, self._ids = kind, inner, frozenset(vocab.values())
        self.vocab_size = max(self._ids, default=-1) + 1
        if not 0 < self.vocab_size <= MAX_VOCAB:
            why = f"a {FILE} of {self.vocab_size} tokens: it has 1 to {MAX_VOCAB}"
            raise InvalidInput(f"{why}. Train on another text, or save it again with `tokenizers`.")
        if kind == "char":  # code point to id; the last entry is for all beyond
            self._table = np.full(max(map(ord, vocab)) + 2, -1, dtype=np.int64)
            self._table[list(map(ord, vocab))] = list(vocab.values())
        elif kind == "byte":
            self._table = np.arange(256)

    def encode(
        self, text: str, after: str = "", *, special_tokens: bool | Literal["read"] = False
    ) -> Int64[np.ndarray, "N"]:
        """Return the ids (N,) of `text`, or, where `after` is the text just before it, its ids as a continuation.

        With `special_tokens=True` the ids are those of `transformers`: special tokens written out in the text are
        recognised, and those that the file puts around a text are added. "read" recognises them but adds none; False
        reads everything as plain text.
        Raises InvalidInput when the vocabulary lacks a character, or a character is half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise InvalidInput(f"text is {text!r:.40} ({type(text).__name__}): expected one text (str).")
        if after:
            head, ids = self.encode(after), self.encode(after + text)
            if np.array_equal(ids[: len(head)], head):
                return ids[len(head) :]
        if self.kind not in UNITS:
            inner = self._reading_special if special_tokens else self._inner
            return np.array(encoding(inner, valid_text(text), special_tokens is True).ids, dtype=np.int64)
        codec, dtype = UNITS[self.kind]
        units = np.frombuffer(valid_text(text).encode(codec), dtype=dtype)
        ids = np.asarray(self._table[np.minimum(units, len(self._table) - 1)])
        if (ids < 0).any():
            unseen = [repr(chr(unit)) for unit in np.unique(units[ids < 0])]
            raise InvalidInput(
                f"characters not in the vocabulary of {self.vocab_size}: {', '.join(unseen[:10])} "
                f"({len(unseen)} in all). Leave them out, or train with data.tokenizer=byte, which takes any "
                "text."
            )
        return ids

    @cached_property
    def _reading_special(self) -> hf.Tokenizer:
        """The same tokenizer, reading special tokens. The library has a switch for it, which threads would share."""
        return hf.Tokenizer.from_str(self.to_json())

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of ids (N,); bytes that are not UTF-8 become U+FFFD.

        An id without a token, as models with a padded vocabulary may draw, has no text, which a
        warning reports. Raises InvalidInput for a negative id, and for anything but whole numbers.
        """
        numbers = _numbers(ids)
        known = self._known(numbers)
        self._warn_of_unknown(len(numbers) - len(known))
        return self._text(known)

    def token(self, id: int | None) -> str:
        """Return how the vocabulary spells an id, such as `Ġthe`; nothing for one without a token."""
        return "" if id is None else self._added.get(id) or self._inner.id_to_token(id) or ""

    @cached_property
    def _added(self) -> dict[int, str]:
        """Tokens that are no part of the model; `id_to_token` gives them as a normalizer makes them, `▁<s>`."""
        return {id: token.content for id, token in self._inner.get_added_tokens_decoder().items()}

    def id_of(self, token: str) -> int | None:
        """Return the id of a token spelled as in the vocabulary, such as `</s>`; None if there is none."""
        return self._inner.token_to_id(token)

    @property
    def bos(self) -> int | None:
        """The id that the file puts before a text (`encode(..., special_tokens=True)`); None for none or several."""
        texts = (self._text([id]) for id in self.ordinary_ids.tolist())
        found = encoding(self._inner, next(filter(self._has_ids, texts), ""), True)
        begins = list(takewhile(lambda part: part is None, found.sequence_ids))
        if len(begins) > 1:
            tokens = " ".join(found.tokens[: len(begins)])
            warnings.warn(
                f"the tokenizer puts several tokens before a text ({tokens:.80}): no window of a text begins with "
                "them, so losses are those of texts without them",
                stacklevel=2,
            )
        return found.ids[0] if len(begins) == 1 else None

    def _has_ids(self, text: str) -> bool:
        """Return False for the text of a bare "▁", which is empty, and of a "<pad>" that is cut into unknown words."""
        n = 0
        with suppress(InvalidInput):
            n = len(self.encode(text))
        return n > 0

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the file calls special; they have no text of their own in a generated one."""
        return frozenset(id for id, token in self._inner.get_added_tokens_decoder().items() if token.special)

    @property
    def ordinary_ids(self) -> Int64[np.ndarray, "N"]:
        """Ids of all other tokens (N,), in order."""
        return np.array(sorted(self._ids - self.special_ids), dtype=np.int64)

    def pieces(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Return the text of each of ids (N,) as in the middle of a text; part of a character is U+FFFD."""
        found = []
        for token in ids:  # twice, as some decoders treat a first token apart
            found.append(self._text(self._known([token, token]))[len(self._text(self._known([token]))) :])
        return found

    def stream(self, ids: Iterable[SupportsIndex], after: Iterable[SupportsIndex] = ()) -> Iterator[str]:
        """Yield the text of ids as they come: pieces of full code points that add up to `decode(ids)`.

        Where `ids` continue others, give these as `after`: some decoders treat a first token apart (which
        is why the last ids shown are kept). Held back: a character whose last byte is still to come, and
        a run of Llama's byte tokens, which is text only if all of it is.
        """
        shown = self._known(after)
        held: list[int] = []
        text = ""
        n_unknown = 0
        for token in ids:
            new = self._known([token])
            if not new:
                n_unknown += 1
                continue
            held += new
            before, whole = self._text(shown), self._text(shown + held)
            text = whole[len(before) :]
            byte = _BYTE_TOKEN.fullmatch(self.token(held[-1]))
            if text and not text.endswith("\ufffd") and not byte and whole.startswith(before):
                yield text
                shown, held, text = held, [], ""
        if text:
            yield text
        self._warn_of_unknown(n_unknown)

    def _text(self, ids: Sequence[int]) -> str:
        with guard("the tokenizer cannot decode these ids", "Use another tokenizer"):
            return self._inner.decode(ids, skip_special_tokens=False)

    def _known(self, ids: Iterable[SupportsIndex]) -> list[int]:
        """Return those of ids that have a token."""
        numbers = _numbers(ids)
        if numbers and min(numbers) < 0:
            raise InvalidInput(
                f"id {min(numbers)} is below 0: ids are 0 to {self.vocab_size - 1}. Leave it out."
            )
        return [i for i in numbers if i in self._ids]

    def _warn_of_unknown(self, n_unknown: int) -> None:
        if n_unknown:
            these, have = ("id is", "has") if n_unknown == 1 else ("ids are", "have")
            warnings.warn(
                f"{n_unknown} {these} not in the tokenizer's vocabulary of {self.vocab_size} and {have} no text: the "
                "model's vocabulary is larger, or these are another tokenizer's ids",
                stacklevel=3,
            )

    @property
    def unknown_id(self) -> int | None:
        """Id of the token for characters the vocabulary lacks, if there is one."""
        if isinstance(self._inner.model, models.Unigram):
            unknown = json.loads(self.to_json())["model"]["unk_id"]
            return None if unknown is None else int(unknown)
        token = self._inner.model.unk_token
        return None if token is None else self._inner.token_to_id(token)

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`, for `from_json` and for `tokenizers.Tokenizer.from_file`."""
        return self._inner.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str, name: str = FILE) -> "Tokenizer":
        """Return a tokenizer from the text of a `tokenizer.json`; `name` is the file's in errors.

        Raises InvalidInput when it is not one, or would cut the same text differently each time.
        """
        with guard(f"{name} is not a usable {FILE}", AGAIN):
            require_few_tables(text)
            inner = hf.Tokenizer.from_str(text)
            require_modest(text, name)
            vocab = inner.get_vocab()
            tokens = sorted(vocab, key=lambda token: vocab[token])
            if len(set(vocab.values())) != len(vocab):
                raise InvalidInput(f"{name} gives several tokens one id: download it again.")
            if getattr(inner.model, "dropout", None):
                raise InvalidInput(
                    f"{name} has dropout={inner.model.dropout}: the same text would get other ids each time. Set "
                    '"dropout": null in it.'
                )
            kind = type(inner.model).__name__.lower()
            # The library writes out all ids below a larger one.
            if max(vocab.values(), default=0) < len(vocab):
                if kind == "bpe" and len(vocab) == 256 and inner.to_str() == single_bytes().to_str():
                    kind = "byte"
                if set(map(len, tokens)) == {1} and inner.to_str() == characters(tokens).to_str():
                    kind = "char"
            return cls(inner, kind)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder, or a `tokenizer.json`. Raises InvalidInput when it is not one.

        In a model folder, all ids must be below the model's vocab_size, except those of special tokens such as Gemma
        3's for images, which plain text never has.
        """
        with guard(f"{path} is not a usable {FILE}", AGAIN):
            file = path / FILE if path.is_dir() else path
            if not file.is_file():
                raise missing(file)
            require_regular(file)
            if (size := file.stat().st_size) > MAX_BYTES:
                raise InvalidInput(f"{str(file)!r} has {size} bytes: a {FILE} has {MAX_BYTES} at most.")
            found = cls.from_json(file.read_text(encoding="utf-8"), str(file))
        if file != path and (path / "config.json").is_file():
            size = read_config(path).vocab_size
            if beyond := sorted(i for i in found._ids - found.special_ids if i >= size):
                raise InvalidInput(
                    f"{file} has ids up to {beyond[-1]}, the model beside it vocab_size={size}: the model has no "
                    f"embedding for {found.token(beyond[0])!r:.40} (id {beyond[0]}). Download both again, or save the "
                    "model after resize_token_embeddings."
                )
        return found


def train(kind: str, text: str | Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Train a tokenizer of one of `KINDS` on a text, whole or in chunks.

    `vocab_size` is for bpe alone: at most this many tokens, the 256 bytes included (a short text may not
    have as many pairs to merge). Raises ConfigError when it is missing there, or given for another kind.
    """
    if vocab_size is not None and kind in UNITS:
        rule = f"data.vocab_size={vocab_size}: the size of a {kind} vocabulary cannot be chosen"
        raise ConfigError(f"{rule}. Leave it out, or use data.tokenizer=bpe.")
    chunks = [text] if isinstance(text, str) else text
    return Tokenizer(KINDS[kind](map(valid_text, chunks), vocab_size), kind)


def _numbers(ids: Iterable[SupportsIndex]) -> list[int]:
    try:
        if not isinstance(ids, str):
            return [index(i) for i in ids]
    except (TypeError, ValueError):
        pass  # raised below
    raise InvalidInput(f"ids are {ids!r:.40} ({type(ids).__name__}): expected whole numbers, (N,).")
