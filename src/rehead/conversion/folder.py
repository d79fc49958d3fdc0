"""A model folder into another one, with the certificate beside the weights."""

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rehead.attention import AttentionConfig
from rehead.checkpoint import load, native, publish, read_at, stock
from rehead.checkpoint.find import is_run
from rehead.config import ModelConfig, flags
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.convert import Converter, block_length, convert
from rehead.conversion.page import PAGE, page
from rehead.conversion.ranks import Allocation
from rehead.conversion.target import Wish
from rehead.data import TOKENS, Ids, Source, read_ids, source_of, split, tokenize
from rehead.errors import InvalidInput, ReheadError, UsageError
from rehead.model import LanguageModel
from rehead.model.allocator import return_freed_memory
from rehead.tokenizer import Tokenizer

HELD_OUT = 0.1
"""Of a calibration text, at its end, to measure on where no test text is given."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What to fit to and what to measure on; either may be missing."""

    calibration: Ids | None = None
    test: Ids | None = None


def convert_folder(
    source: Path,
    destination: Path,
    wish: Wish,
    *,
    method: str | None = None,
    calibration: Path | None = None,
    test: Path | None = None,
    measured_ranks: bool = False,
    max_loss: float | None = None,
    allow_loss: bool = False,
    seed: int = 0,
) -> Certificate:
    """Convert the model in `source` and write it, with conversion.json and CONVERSION.md, to `destination`.

    Without texts, a run folder's own is used: its training part to fit to, its validation part to
    measure on. Raises UsageError for a lossy result without `allow_loss`, with the loss it would have;
    then, as after any failure, nothing is left at `destination`.
    """
    require_apart(source, destination)
    return_freed_memory()
    with publish(destination) as aside:
        model, tokenizer, special = read_at(
            source,
            lambda place: (load(place, in_memory=False), tokenizer_of(place), stock.special_ids(place)),
        )
        with tempfile.TemporaryDirectory(dir=aside) as folder:
            scratch = Path(folder)
            texts = _texts(source, model, tokenizer, calibration, test, scratch)
            converter = Converter(model, method, texts.calibration, scratch)
            to = _layers(converter, wish, texts, measured_ranks, max_loss)
            result, certificate = convert(
                model,
                to,
                method=method,
                calibration=texts.calibration,
                test=texts.test,
                seed=seed,
                scratch=scratch,
            )
        if not (certificate.exact or allow_loss):
            raise UsageError(_refusal(certificate, can_read=tokenizer is not None))
        files = {CERTIFICATE: certificate.to_json(), PAGE: page(certificate)}
        if tokenizer is not None:
            files["tokenizer.json"] = tokenizer.to_json()
        native.write(result, aside, files, special)
    return certificate


def read_plannable(path: Path) -> ModelConfig:
    """The config of a model or run folder, of a config.json, or of a YAML file of training options."""
    if path.suffix in (".yaml", ".yml"):
        options = flags.read([], (path,))
        return options.model.resolve(options.data.vocab_size or 256, options.data.block_size)
    return native.read_config(path) if path.is_file() else read_at(path, native.read_config)


def require_apart(source: Path, destination: Path) -> None:
    """Refuse to write where the source is."""
    here, there = source.resolve(), destination.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(
            f"{destination} is {source}, or one lies in the other: the source is never touched. Choose another "
            "folder for the result."
        )


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder, if it has one."""
    return Tokenizer.load(folder) if os.path.lexists(folder / "tokenizer.json") else None


def _texts(
    source: Path,
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    calibration: Path | None,
    test: Path | None,
    scratch: Path,
) -> Texts:
    if tokenizer is None:
        if calibration or test:
            raise InvalidInput(
                f"{source} has no tokenizer.json: its texts cannot be read. Leave the texts out."
            )
        return Texts()

    def ids(text: Source, name: str) -> Ids:
        try:
            return tokenize(text, tokenizer, scratch / name).ids
        except InvalidInput as error:
            raise InvalidInput(f"the {name} text: {error}") from error

    if calibration is None and test is None:
        return _own_texts(source, model, tokenizer, ids)
    held = None if test is None else ids(Source(path=test), "test")
    if calibration is None:
        return Texts(calibration=_own_texts(source, model, tokenizer, ids).calibration, test=held)
    fitted = ids(Source(path=calibration), "calibration")
    if held is not None:
        return Texts(calibration=fitted, test=held)
    try:
        parts = split(fitted, block_length(model.config), HELD_OUT)
    except InvalidInput as error:
        raise InvalidInput(
            f"{calibration} is too short to hold a tenth of it back to measure on: give a longer one, or --test TEXT."
        ) from error
    return Texts(calibration=parts.train, test=parts.val)


def _own_texts(
    source: Path, model: LanguageModel, tokenizer: Tokenizer, ids: Callable[[Source, str], Ids]
) -> Texts:
    """The two parts of the text a run was trained on: the tokens it keeps, wherever the text is now."""
    config = source / "config.yaml"
    if not is_run(source):
        return Texts()
    try:
        data = flags.read([], (config,)).data
        kept = source / TOKENS
        read = read_ids(kept, tokenizer) if kept.exists() else ids(source_of(data), "text")
        parts = split(read, block_length(model.config), data.val_fraction)
    except ReheadError as error:
        warnings.warn(
            f"the run's own text cannot be read, so nothing is measured on it: {error}", stacklevel=2
        )
        return Texts()
    return Texts(calibration=parts.train, test=parts.val if len(parts.val) else None)


def _layers(
    converter: Converter, wish: Wish, texts: Texts, measured: bool, max_loss: float | None
) -> Sequence[AttentionConfig]:
    """The attention wished for each layer: all alike, or each with a rank of its own."""
    if not measured and max_loss is None:
        return [wish.target(layer, converter.config.n_embd) for layer in converter.config.attention]
    if texts.calibration is None:
        raise UsageError("ranks are measured on a text: give --calibration TEXT.")
    if wish.to != "mla" or wish.kv_rank is not None or (wish.kv_fraction is None) == (max_loss is None):
        raise UsageError("ranks are measured for --to mla with either --kv-fraction or --max-loss.")
    allocation = Allocation(converter, texts.calibration, wish.n_kv_head)
    if max_loss is not None:
        return allocation.at_loss(max_loss)
    assert wish.kv_fraction is not None
    return allocation.within(wish.kv_fraction)


def _refusal(certificate: Certificate, *, can_read: bool) -> str:
    logits = certificate.logits
    flips = f"{100 * logits['argmax_flips']:.1f} % of the likeliest tokens change, KL {logits['kl']:.2e} nats"
    loss = ""
    if certificate.loss is not None:
        before, after = certificate.loss
        loss = f"the loss would go from {before:.4f} to {after:.4f} nats per token, "
    how = ""
    if certificate.loss is None:
        how = " on random tokens" + ("; give --calibration TEXT for a better one" if can_read else "")
    return f"this conversion is lossy: {loss}{flips}{how}. Nothing was written. Accept it with --allow-loss."
