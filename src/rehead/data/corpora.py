"""Texts that are known by name."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.request import urlopen

from rehead.data.files import resource, write_whole
from rehead.errors import IntegrityError
from rehead.registry import Registry

CORPORA: Registry[Callable[[Path], Iterable[str]]] = Registry("corpus")
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@CORPORA.add("python-docs")
def _python_docs(cache_dir: Path) -> Iterable[str]:
    """Return the help topics of the running Python, without a download; they differ between versions."""
    from pydoc_data.topics import topics

    return ["\n\n".join(topics[name] for name in sorted(topics))]


@CORPORA.add("shakespeare")
def _shakespeare(cache_dir: Path) -> Iterable[str]:
    """Return Karpathy's tiny Shakespeare, 1,115,394 characters: downloaded once, verified on every use."""
    file = cache_dir / "tinyshakespeare.txt"
    by_hand = f"save {SHAKESPEARE} by hand and give it as data.path"
    with resource("cannot fetch data.name=shakespeare", by_hand):
        if cached := file.exists():
            data = file.read_bytes()
        else:
            with urlopen(SHAKESPEARE, timeout=30) as reply:
                data = reply.read(2 << 20)
        if (actual := hashlib.sha256(data).hexdigest()) != SHAKESPEARE_SHA256:
            where = f"{str(file) if cached else SHAKESPEARE!r} has sha256 {actual}, not {SHAKESPEARE_SHA256}"
            raise IntegrityError(f"{where}: {'delete it' if cached else by_hand}.")
        if not cached:
            write_whole(file, [data])
    return [data.decode()]
