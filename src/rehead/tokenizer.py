"""Text to ids and back: three kinds of vocabulary, one file (`tokenizer.json`, as Hugging Face reads it).

char: each character of the training text is a token, as in the homework. byte: each UTF-8 byte is,
and its value is its id; any text, 256 ids. bpe: bytes merged by frequency, as GPT-2; any text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import SupportsInt

import numpy as np
import tokenizers as hf
from jaxtyping import Int64
from tokenizers import decoders, models, pre_tokenizers, trainers

from rehead.checkpoint import read_config
from rehead.checkpoint.shards import require_regular
from rehead.errors import ConfigError, InvalidInput, ReheadError
from rehead.registry import Registry

FILE = "tokenizer.json"
MAX_BYTES = 64 << 20  # of that file
MAX_VOCAB = 4 << 20  # tokens
KINDS: Registry[Callable[[Iterable[str], int | None], hf.Tokenizer]] = Registry("tokenizer")

_UNITS = {"char": ("utf-32-le", "<u4"), "byte": ("utf-8", "u1")}  # where a token is one unit of an encoding
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # Llama's spelling of a byte


class Tokenizer:
    """A vocabulary of one `kind`, ids 0 to `vocab_size` - 1.

    Special tokens are never added, and their text in a prompt is plain text. A tokenizer trained here
    gives every text back to the letter; a downloaded one does what its file says, without truncation.
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

    def encode(self, text: str, after: str = "") -> Int64[np.ndarray, "N"]:
        """The ids of `text`, or, where `after` is the text just before it, its ids as a continuation.

        InvalidInput when a character is not in the vocabulary, or is half of a surrogate pair.
        """
        if after:
            head, ids = self.encode(after), self.encode(after + text)
            if np.array_equal(ids[: len(head)], head):
                return ids[len(head) :]
        if self.kind not in _UNITS:
            with _guard("the tokenizer"):
                encoding = self._inner.encode(_sound(text), add_special_tokens=False)
            return np.array(encoding.ids, dtype=np.int64)
        codec, dtype = _UNITS[self.kind]
        units = np.frombuffer(_sound(text).encode(codec), dtype=dtype)
        ids = np.asarray(self._table[np.minimum(units, len(self._table) - 1)])
        if (ids < 0).any():
            unseen = [repr(chr(unit)) for unit in np.unique(units[ids < 0])]
            raise InvalidInput(
                f"not in the vocabulary of {self.vocab_size}: {', '.join(unseen[:10])} ({len(unseen)} characters "
                "in all). Leave them out, or train with data.tokenizer=byte, which takes any text."
            )
        return ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids (N,); bytes that are not UTF-8 become U+FFFD. InvalidInput on an unknown id."""
        numbers = [int(i) for i in ids]
        if unknown := set(numbers) - self._ids:
            raise InvalidInput(
                f"id {min(unknown)} is not in the vocabulary of {self.vocab_size} tokens: "
                f"decode with the {FILE} that the ids were made with."
            )
        with _guard("the tokenizer"):
            return self._inner.decode(numbers, skip_special_tokens=False)

    def pieces(self, ids: Iterable[SupportsInt]) -> list[str]:
        """What each of ids (N,) says in the middle of a text; part of a character is U+FFFD."""
        found = []
        for token in ids:  # twice, as some decoders treat a first token apart
            found.append(self.decode([token, token])[len(self.decode([token])) :])
        return found

    def stream(self, ids: Iterable[SupportsInt], after: Iterable[SupportsInt] = ()) -> Iterator[str]:
        """The text of ids as they come: pieces of full code points that add up to `decode(ids)`.

        Where `ids` continue others, give these as `after`: some decoders treat a first token apart (which
        is why the last ids shown are kept). Held back: a character whose last byte is still to come, and
        a run of Llama's byte tokens, which is text only if all of it is.
        """
        shown = [int(i) for i in after]
        held: list[int] = []
        text = ""
        for token in ids:
            held.append(int(token))
            text = self.decode(shown + held)[len(self.decode(shown)) :]
            byte = _BYTE_TOKEN.fullmatch(self._inner.id_to_token(held[-1]) or "")
            if text and not text.endswith("\ufffd") and not byte:
                yield text
                shown, held, text = held, [], ""
        if text:
            yield text

    def to_json(self) -> str:
        """The text of a `tokenizer.json`, for `from_json` and for `tokenizers.Tokenizer.from_file`."""
        return self._inner.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str, name: str = FILE) -> "Tokenizer":
        """A tokenizer from the text of a `tokenizer.json`; `name` is the file's in errors.

        InvalidInput when it is not one, or its model is neither BPE nor a character vocabulary of ours.
        """
        with _guard(name):
            inner = hf.Tokenizer.from_str(text)
            vocab = inner.get_vocab()
            tokens = sorted(vocab, key=lambda token: vocab[token])
            if len(set(vocab.values())) != len(vocab):
                raise InvalidInput(f"{name} gives several tokens one id: download it again.")
            if isinstance(inner.model, models.BPE) and not inner.model.dropout:
                ours = len(vocab) == 256 and inner.to_str() == _bytes().to_str()
                return cls(inner, "byte" if ours else "bpe")
            if set(map(len, tokens)) == {1} and inner.to_str() == _characters(tokens).to_str():
                return cls(inner, "char")
        raise InvalidInput(
            f"{name} holds {type(inner.model).__name__}, which rehead does not read: "
            "use BPE without dropout, or characters as rehead writes them."
        )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a model folder, or of a `tokenizer.json` itself. InvalidInput when it is none.

        In a model folder it may not have more tokens than the model.
        """
        with _guard(str(path)):
            file = path / FILE if path.is_dir() else path
            if not file.is_file():
                raise InvalidInput(f"no file {str(file)!r}: give a {FILE}, or a folder that has one.")
            require_regular(file)
            if (size := file.stat().st_size) > MAX_BYTES:
                raise InvalidInput(f"{str(file)!r} has {size} bytes: a {FILE} has {MAX_BYTES} at most.")
            found = cls.from_json(file.read_text(encoding="utf-8"), str(file))
        if file != path and (path / "config.json").is_file():
            size = read_config(path).vocab_size
            if found.vocab_size > size:
                raise InvalidInput(
                    f"{file} has ids up to {found.vocab_size - 1}, the model beside it vocab_size={size}: it is "
                    "another model's. Download both again."
                )
        return found


def train(kind: str, text: str | Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer of one of `KINDS` from a text, whole or in chunks.

    `vocab_size` is for bpe alone: at most so many tokens, the 256 bytes included (a short text may not
    have as many pairs to merge). ConfigError when it is missing there, or given for another kind.
    """
    if vocab_size is not None and kind in _UNITS:
        rule = f"data.vocab_size={vocab_size}: a {kind} vocabulary has the size it has"
        raise ConfigError(f"{rule}. Leave it out, or use data.tokenizer=bpe.")
    chunks = [text] if isinstance(text, str) else text
    return Tokenizer(KINDS[kind](map(_sound, chunks), vocab_size), kind)


@KINDS.add("char")
def _train_char(text: Iterable[str], vocab_size: int | None) -> hf.Tokenizer:
    return _characters(sorted(set(chain.from_iterable(text))))


@KINDS.add("byte")
def _train_byte(text: Iterable[str], vocab_size: int | None) -> hf.Tokenizer:
    return _bytes()


@KINDS.add("bpe")
def _train_bpe(text: Iterable[str], vocab_size: int | None) -> hf.Tokenizer:
    if vocab_size is None or not 256 <= vocab_size <= MAX_VOCAB:
        raise ConfigError(f"data.vocab_size={vocab_size}: bpe needs one in 256..{MAX_VOCAB}, such as 1024.")
    inner = _byte_level(models.BPE())
    bytes_first = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=bytes_first, show_progress=False)
    inner.train_from_iterator(text, trainer)
    return inner


def _characters(characters: Sequence[str]) -> hf.Tokenizer:
    inner = hf.Tokenizer(models.WordLevel({char: i for i, char in enumerate(characters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _bytes() -> hf.Tokenizer:
    """No merges. GPT-2 spells a byte as its Latin-1 character if that prints, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = sorted(set(range(256)) - printable)
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    return _byte_level(models.BPE(vocab, []))


def _byte_level(model: models.BPE) -> hf.Tokenizer:
    inner = hf.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _sound(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"the lone surrogate {text[error.start]!r} at character {error.start}"
        raise InvalidInput(f"{where} is not text: read the source as UTF-8, or leave it out.") from None
    return text


@contextmanager
def _guard(name: str) -> Iterator[None]:
    """Names the file in what the library raises, a Rust panic included (which is no Exception)."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ReheadError | MemoryError | KeyboardInterrupt | SystemExit):
            raise
        why = str(error).partition("\n")[0]
        raise InvalidInput(
            f"{name} is not a usable {FILE}: {why}. Save it again with `tokenizers`."
        ) from None
