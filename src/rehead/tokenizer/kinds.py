"""The kinds of tokenizer that rehead trains.

char: each character of the training text is a token. byte: each UTF-8 byte is a token, and its value is its
id; any text, 256 ids. bpe: bytes merged by frequency, as GPT-2; any text.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, trainers

from rehead.errors import ConfigError, InvalidInput
from rehead.registry import Registry

MAX_VOCAB = 4 << 20
"""Tokens of any vocabulary, at most."""
UNITS = {"char": ("utf-32-le", "<u4"), "byte": ("utf-8", "u1")}
"""Kinds whose tokens are units of an encoding: the encoding, and the unit as a NumPy type."""
KINDS: Registry[Callable[[Iterable[str], int | None], hf.Tokenizer]] = Registry("tokenizer")


@KINDS.add("char")
def _train_char(text: Iterable[str], vocab_size: int | None) -> hf.Tokenizer:
    return characters(sorted(set(chain.from_iterable(text))))


@KINDS.add("byte")
def _train_byte(text: Iterable[str], vocab_size: int | None) -> hf.Tokenizer:
    return single_bytes()


@KINDS.add("bpe")
def _train_bpe(text: Iterable[str], vocab_size: int | None) -> hf.Tokenizer:
    if vocab_size is None or not 256 <= vocab_size <= MAX_VOCAB:
        raise ConfigError(f"data.vocab_size={vocab_size}: bpe needs one in 256..{MAX_VOCAB}, such as 1024.")
    inner = _byte_level(models.BPE())
    bytes_first = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=bytes_first, show_progress=False)
    inner.train_from_iterator(text, trainer)
    return inner


def characters(letters: Sequence[str]) -> hf.Tokenizer:
    """Make one token of each of these characters; its id is its place in the list."""
    inner = hf.Tokenizer(models.WordLevel({char: i for i, char in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def single_bytes() -> hf.Tokenizer:
    """Make one token of each byte, its value being its id, without merges.

    GPT-2 spells a byte as its Latin-1 character if that prints, else from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = sorted(set(range(256)) - printable)
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    return _byte_level(models.BPE(vocab, []))


def _byte_level(model: models.BPE) -> hf.Tokenizer:
    inner = hf.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def valid_text(text: str) -> str:
    """Return the text. Raises InvalidInput for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"the lone surrogate {text[error.start]!r} at character {error.start}"
        raise InvalidInput(f"{where} is not text: read the source as UTF-8, or leave it out.") from None
    return text
