"""A text as a stream of chunks that tokenize as the whole would."""

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
"""The corpus of a run that names none: the standard library's documentation, nothing to download."""
USUAL = "input.txt"
"""What a text is mostly called, which is not taken unasked."""
_BORDERS = [
    re.compile(f"(?s).*{border}") for border in (r"[^\W_](?=[\r\n])", r"[^\W_](?=[ \t])", r"\S(?=\s)")
]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text, read anew by each iteration, which gives its `chunks` of `chunk` characters or more.

    `path` is a UTF-8 file, or a folder: its *.txt and *.md files at any depth, in the order of their
    relative paths, with a blank line ("\\n\\n") between. `name` is one of `CORPORA`. Line ends stay, a
    byte order mark goes. `option` is what the user gives the path with, for messages. InvalidInput for
    a text that is not there, not UTF-8, or blank.
    """

    path: Path | None = None
    name: str | None = None
    cache_dir: Path = field(default_factory=cache_folder)  # for downloads
    chunk: int = CHUNK
    option: str = "data.path"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.name is None):
            rule = f"data.path={self.path} and data.name={self.name}: a text comes from one of them"
            raise ConfigError(f"{rule}. Give a path, or a name in {', '.join(CORPORA)}.")
        if self.name is not None:
            CORPORA[self.name]

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
    """Which text the flags of a run name, and why where they name none."""
    if options.path is not None:
        return options.path
    if options.name is not None:
        return f"the corpus {options.name}"
    beside = ""
    if Path(USUAL).is_file():
        beside = f" ({USUAL} lies here: data.path={USUAL} takes it)"
    return f"Python's help texts, as neither data.path nor data.name is given{beside}"


def source_of(options: DataOptions) -> Source:
    """The text that the flags of a run name."""
    if options.path is None and options.name is None:
        return Source(name=EMBEDDED)
    return Source(path=None if options.path is None else Path(options.path), name=options.name)


def named(text: str | Path, option: str) -> Source:
    """The file or folder `text` or, where nothing lies there, the corpus of that name."""
    if str(text) in CORPORA and not Path(text).exists():
        return Source(name=str(text))
    return Source(path=Path(text), option=option)


def chunks(parts: Iterable[str], size: int = CHUNK, limit: int = 4 * CHUNK) -> Iterator[str]:
    """A text in parts, regrouped into chunks of `size` characters or more that tokenize as in the whole.

    A chunk ends with a letter or digit before a line end or, failing that, a blank: GPT-2, Llama 3 and
    DeepSeek never join these. Where `limit` characters have no such place it ends before any white
    space, and where they have none of that, anywhere; then a token or two may differ.
    """
    held = ""
    for part in parts:
        held += part
        if len(held) >= size:
            borders = _BORDERS if len(held) >= limit else _BORDERS[:2]
            cut = next((found.end() for border in borders if (found := border.match(held))), 0)
            cut = cut or len(held) * (len(held) >= limit)
            if cut:
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held
