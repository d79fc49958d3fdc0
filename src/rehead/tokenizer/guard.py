"""What the `tokenizers` library raises, as one line of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers as hf

from rehead.errors import InvalidInput, ReheadError


@contextmanager
def guard(problem: str, way: str) -> Iterator[None]:
    """Turn what the library raises into one line, Rust panics included, which are not Exceptions."""
    try:
        yield
    except (ReheadError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise  # GeneratorExit: an interrupt came as the block was being entered
    except BaseException as error:
        why = str(error).partition("\n")[0]
        raise InvalidInput(f"{problem}: {why}. {way}.") from None


def encoding(inner: hf.Tokenizer, text: str, with_special: bool) -> hf.Encoding:
    """Return what the library makes of a text, between the special tokens that the file puts around it or not."""
    way = "Leave out what its vocabulary lacks, or use another tokenizer"
    with guard("the tokenizer cannot read this text", way):
        return inner.encode(text, add_special_tokens=with_special)
