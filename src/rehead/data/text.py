"""Streams a text in chunks that tokenize as the whole text would."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rehead.config import DataOptions
from rehead.data.corpora import CORPORA
from rehead.data.files import read
from rehead.errors import ConfigError, InvalidInput
from rehead.system.folders import cache_folder

CHUNK = 1 << 18  # characters
EMBEDDED = "python-docs"
"""The default corpus: the standard library's documentation, which needs no download."""
USUAL = "input.txt"
"""A usual name of a text; a file of this name is mentioned but never used by default."""
_BORDERS = [
    re.compile(f"(?s).*{border}") for border in (r"[^\W_](?=[\r\n])", r"[^\W_](?=[ \t])", r"\S(?=\s)")
]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text; each iteration reads it again and yields its `chunks` of `chunk` characters or more.

    `path` is a UTF-8 file, or a folder: its *.txt and *.md files at any depth, in the order of their
    relative paths, with a blank line ("\\n\\n") between; those that rehead wrote in models and runs are left
    out. `name` is one of `CORPORA`. Line endings are kept, a byte order mark is dropped. `option` is the
    option that gives the path, for error messages. Raises InvalidInput for a text that is missing, not UTF-8, or
    blank.
    """

    path: Path | None = None
    name: str | None = None
    cache_dir: Path = field(default_factory=cache_folder)  # for downloads
    chunk: int = CHUNK
    option: str = "data.path"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.name is None):
            rule = f"data.path={self.path} and data.name={self.name}: a run reads one text"
            raise ConfigError(f"{rule}. Give a path, or a name in {', '.join(CORPORA)}.")
        if self.name is not None:
            CORPORA[self.name]

    def require(self) -> None:
        """Raise InvalidInput if there is no text to read; what is in it is not looked at."""
        if self.path is not None:
            next(read(self.path, 1, self.option), None)

    def __iter__(self) -> Iterator[str]:
        if self.path is None:
            parts = CORPORA[str(self.name)](self.cache_dir)
        else:
            parts = read(self.path, self.chunk, self.option)
        blank = True
        for chunk in chunks(parts, self.chunk):
            blank = blank and chunk.isspace()
            yield chunk
        if blank:
            raise InvalidInput(
                f"{str(self.path)!r} has 0 tokens: give {self.option} a text that is not blank."
            )


def describe(options: DataOptions) -> str:
    """Describe the text that a run uses, and say so if it is the default."""
    if options.path is not None:
        return options.path
    if options.name is not None:
        return f"the corpus {options.name}"
    beside = ""
    if Path(USUAL).is_file():
        beside = f" (to use {USUAL} from this folder, give data.path={USUAL})"
    return f"Python's help texts, because neither data.path nor data.name is given{beside}"


def source_of(options: DataOptions) -> Source:
    """Return the text that a run uses."""
    if options.path is None and options.name is None:
        return Source(name=EMBEDDED)
    return Source(path=None if options.path is None else Path(options.path), name=options.name)


def named(text: str | Path, option: str) -> Source:
    """Return the file or folder `text` or, if it does not exist, the corpus of that name."""
    if str(text) in CORPORA and not Path(text).exists():
        return Source(name=str(text))
    return Source(path=Path(text), option=option)


def chunks(parts: Iterable[str], size: int = CHUNK, limit: int = 4 * CHUNK) -> Iterator[str]:
    """Regroup the parts of a text into chunks of `size` characters or more that tokenize as in the whole text.

    A chunk ends with a letter or digit before a line end or, failing that, before a blank: the tokenizers
    of GPT-2, Llama 3 and DeepSeek never join these. If `limit` characters have no such place, the chunk
    ends before any white space; if they have none, anywhere, and a token or two may differ.
    """
    held = ""
    for part in parts:
        held += part
        if len(held) >= size:
            borders = _BORDERS if len(held) >= limit else _BORDERS[:2]
            cut = next((match.end() for border in borders if (match := border.match(held))), 0)
            cut = cut or len(held) * (len(held) >= limit)
            if cut:
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held
