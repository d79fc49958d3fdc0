"""The texts of a conversion from files, from a run, or from the model itself."""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from rehead.checkpoint import read_at
from rehead.checkpoint.files.strict import require_regular
from rehead.checkpoint.find import is_run, run_data
from rehead.conversion.blocks import CALIBRATION_TOKENS
from rehead.conversion.certificate import Text, require_different
from rehead.conversion.finite import require_finite
from rehead.conversion.sampled import sampled_once
from rehead.conversion.texts import SELF, Passage
from rehead.data import TOKENS, Ids, Source, evaluation_blocks, named, read_ids, split, tokenize
from rehead.errors import InvalidInput, NumericError, ReheadError
from rehead.tokenizer import FILE, OpenedModel, Tokenizer

log = logging.getLogger("rehead")
HELD_OUT = 0.1
"""Share at the end of each calibration text that is measured on where no test text is given."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to fit to and to measure on; either may be missing. `held_out`: the second is cut from the first."""

    calibration: Sequence[Passage] = ()
    test: Passage | None = None
    held_out: bool = False


def least_tokens(length: int) -> int:
    """Return the size of the shortest text whose held out part has a window of `length`, and the token after it."""
    return next(n for n in count(int(length / HELD_OUT)) if n - int(n * (1 - HELD_OUT)) > length)


def require_texts(
    source: Path, length: int, calibration: Sequence[str | Path], test: str | Path | None
) -> None:
    """Refuse texts that `Reader` would refuse from their first tokens: no weights are read for it.

    Raises InvalidInput for a text that is too short, or has characters that the tokenizer of `source` does not know
    among its first tokens, and where there is no tokenizer.
    """
    files = [str(text) for text in calibration if str(text) != SELF]
    if test is None and not files:
        return
    tokenizer = _require_tokenizer(source, read_at(source, _tokenizer_in))
    if test is not None:
        ids = _first(named(test, "--test"), "test", tokenizer, 2)
        next(evaluation_blocks(ids, 1, 1))
    for file in files:
        least = least_tokens(length) if test is None else 1
        ids = _first(named(file, "--calibration"), "calibration", tokenizer, least)
        if test is None:
            _held_back(file, Passage(name=file, ids=ids), length)


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if os.path.lexists(folder / FILE) else None


def _require_tokenizer(source: Path, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of `source`. Raises InvalidInput where it has none."""
    if tokenizer is None:
        raise InvalidInput(
            f"{source} has no {FILE}, so it cannot read a text. Leave out --calibration and --test, or write one "
            "there with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers."
        )
    return tokenizer


def _first(text: Source, job: str, tokenizer: Tokenizer, least: int) -> Ids:
    """Return the first `least` tokens of a text or more, or all of a shorter one."""
    found, last = np.empty(0, dtype=np.int64), ""
    with _about(job):
        for chunk in text:
            found, last = np.concatenate([found, tokenizer.encode(chunk, after=last)]), chunk[-1:]
            if len(found) >= least:
                break
    return found


@contextmanager
def _about(job: str) -> Iterator[None]:
    """Say in an error which text it is about."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"the {job} text: {error}") from error


def _held_back(path: str, text: Passage, length: int) -> tuple[Passage, Passage]:
    """Return a calibration text without its last tenth, and that tenth, which has a window of `length`."""
    try:
        parts = split(text.ids, length, HELD_OUT)
    except InvalidInput as error:
        tenth = len(text.ids) - int(len(text.ids) * (1 - HELD_OUT))
        smaller = f", or --length {tenth - 1}" if tenth > 2 else ""
        raise InvalidInput(
            f"the last tenth of {path}, {tenth:,} of {len(text.ids):,} tokens, is held out to measure on: less "
            f"than one window of {length:,} tokens and the token after it. Give a text of at least "
            f"{least_tokens(length):,} tokens, --test TEXT{smaller}."
        ) from error
    return replace(text, ids=parts.train), replace(text, ids=parts.val, name=f"the last tenth of {text.name}")


@dataclass(frozen=True)
class Reader:
    """Encodes texts, for the model `opened` at `source`, in windows of `length` tokens.

    Windows begin with the token that its tokenizer puts before a text, as every text does that the model is given.
    """

    source: Path
    opened: OpenedModel
    length: int
    seed: int
    scratch: Path

    @property
    def bos(self) -> int | None:
        """The token that each window begins with."""
        return None if self.opened.tokenizer is None else self.opened.tokenizer.bos

    def texts(
        self, calibration: Sequence[str | Path], test: str | Path | None, *, fits: bool = False
    ) -> Texts:
        """Return the named texts: files, folders, corpora, and `self`. A run's own text replaces missing ones.

        Where something `fits` itself to a text and there is none, `self` is taken. Raises ConfigError for a test text
        that is fitted to.
        """
        found = self._found(calibration, test, fits)
        whole = [
            Text.of(text, len(text.ids)) for text in (*found.calibration, found.test) if text is not None
        ]
        if found.test is not None:
            require_different(whole[:-1], whole[-1])
        return found

    def _found(self, calibration: Sequence[str | Path], test: str | Path | None, fits: bool) -> Texts:
        names = list(dict.fromkeys(map(str, calibration)))
        files = [name for name in names if name != SELF]
        if files or test is not None:
            _require_tokenizer(self.source, self.opened.tokenizer)
        held = None if test is None else self._read(named(test, "--test"), "test", Path(test).name)
        own = self._own() if not files and (held is None or not names) else Texts()
        if not names:
            if own.calibration or not fits:
                return own if held is None else Texts(calibration=own.calibration, test=held)
            better = "" if self.opened.tokenizer is None else ". --calibration TEXT fits to what it will read"
            log.info("no calibration text: fitting to one sampled from the model (self)%s", better)
            names = [SELF]
        share = CALIBRATION_TOKENS // len(names)
        found = {
            name: self._read(named(name, "--calibration"), "calibration", Path(name).name, place)
            for place, name in enumerate(files)
        }
        tails = []
        for name in files if held is None else []:
            found[name], tail = _held_back(name, found[name], self.length)
            tails.append(tail)
        if len(files) < len(names):  # last, as it takes minutes
            found[SELF] = self._sampled(share, self.seed)
        if held is not None:
            return Texts(calibration=list(found.values()), test=held)
        if tails:
            ids = tails[0].ids if len(tails) == 1 else np.concatenate([tail.ids for tail in tails])
            held = Passage(name=" and ".join(tail.name for tail in tails), ids=ids, bos=self.bos)
        else:
            if own.test is not None:
                return Texts(calibration=list(found.values()), test=own.test)
            held = self._sampled(share // 10, self.seed + 1)
        return Texts(calibration=list(found.values()), test=held, held_out=True)

    def _sampled(self, tokens: int, seed: int) -> Passage:
        tokenizer, bos = self.opened.tokenizer, self.bos
        begins = None if tokenizer is None or bos is not None else tokenizer.ordinary_ids
        try:
            return sampled_once(self.opened.model, tokens, self.length, seed, bos, begins)
        except NumericError:
            require_finite(self.opened.model)  # which names the weight
            raise

    def _read(self, text: Source, job: str, name: str, place: int = 0) -> Passage:
        """Return a text, the one at `place` of a job; a resumed conversion puts its tokens where they were."""
        assert self.opened.tokenizer is not None
        store = self.scratch / f"text-{job}-{place}"
        with _about(job):
            ids = tokenize(text, self.opened.tokenizer, store).ids
        return Passage(name=name, ids=ids, bos=self.bos)

    def _own(self) -> Texts:
        """Return both parts of the text a run was trained on, from the tokens in its folder.

        The file that its config.yaml names is not read: a folder from elsewhere could name any file of this machine.
        """
        if self.opened.tokenizer is None or not is_run(self.source):
            return Texts()
        try:
            data = run_data(self.source)
            assert data is not None
            require_regular(self.source / TOKENS)
            whole = read_ids(self.source / TOKENS, self.opened.tokenizer)
            parts = split(whole, self.length, data.val_fraction)
        except ReheadError as error:
            warnings.warn(
                f"the run's own text cannot be read, so nothing is measured on it: {error}", stacklevel=2
            )
            return Texts()
        fitted = Passage(name="the training part of the run's text", ids=parts.train, bos=self.bos)
        held = replace(fitted, name="the validation part of the run's text", ids=parts.val)
        some = len(parts.val) > 0
        return Texts(calibration=[fitted], test=held if some else None, held_out=some)
