"""A model folder converted into another, with the certificate beside the weights."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from rehead.checkpoint import own, publish, read_at, read_without_weights
from rehead.checkpoint.hub import CARD
from rehead.config import GPTConfig, ModelConfig, flags
from rehead.conversion.arguments import (
    nothing_to_learn,
    require_apart,
    require_heads,
    require_passes,
    require_seed,
)
from rehead.conversion.base import Step, require_method
from rehead.conversion.certificate import CERTIFICATE, Certificate, Text
from rehead.conversion.converter import Converter
from rehead.conversion.frequencies import require_rotation
from rehead.conversion.history import earlier_of
from rehead.conversion.measured import (
    measured_layers,
    require_measurable,
    require_rebuilt,
)
from rehead.conversion.origin import carried
from rehead.conversion.page import PAGE, page
from rehead.conversion.reading import Reader, require_texts
from rehead.conversion.search import path
from rehead.conversion.serving import tell_classless
from rehead.conversion.source import Source
from rehead.conversion.target import Target
from rehead.conversion.texts import SELF
from rehead.conversion.told import refusal, tell_fitted, tell_loss, tell_unread
from rehead.conversion.unfinished import fingerprint, note_result, place_of, unfinished
from rehead.data import named
from rehead.errors import ConfigError, InvalidInput, ReheadError, UsageError
from rehead.measure.environment import environment
from rehead.measure.length import text_length
from rehead.system.allocator import return_freed_memory
from rehead.tokenizer import open_model

STEPS = 3
"""Raised when a step's result changes: layers that are kept from before are then made again."""


class FolderConverter:
    """Converts a model folder any number of times; the folder, its texts and their statistics are read once.

    `scratch` is a folder that must exist as long as this is used; statistics in it, of the same model and texts, are
    used again. Each `calibration` is a file, a folder, one of the corpora `rehead.data` knows by name, or `self`,
    a text sampled from the model. Without texts, a run folder's own is used: its training part to fit to, its
    validation part to measure on; of any other model, `self`, if something `fits` itself to a text. Warns if the
    source was made by a conversion that is not exact.
    """

    def __init__(
        self,
        source: Path,
        scratch: Path,
        *,
        method: str | None = None,
        calibration: Sequence[str | Path] = (),
        test: str | Path | None = None,
        length: int | None = None,
        seed: int = 0,
        device: str = "cpu",
        fits: bool = False,
    ) -> None:
        require_seed(seed)
        window = text_length(read_at(source, own.read_config), length, source)
        require_texts(source, window, calibration, test)
        opened = open_model(source, device=device, in_memory=False)
        opened.tell_unread()
        self.source, self.tokenizer = source, opened.tokenizer
        self.carried = opened.texts() | {CARD: carried(source, opened.folder)}
        self.earlier, files = earlier_of(opened.folder), fingerprint(opened.folder)
        opened.require_standing()
        self.read = Source(opened.model, opened.folder)
        require_heads(opened.model)
        self.texts = Reader(source, opened, window, seed, scratch).texts(calibration, test, fits=fits)
        self.named = bool(calibration)
        made_of = {
            "source": files,
            "weights": list(self.read.digests.values()),
            "texts": [asdict(Text.of(text, len(text.ids))) for text in self.texts.calibration],
            "length": window,
            "seed": seed,
            "environment": environment(opened.model.device),
            "steps": STEPS,
        }
        self.converter = Converter(
            opened.model,
            method,
            self.texts.calibration,
            length=window,
            seed=seed,
            scratch=place_of(scratch, **made_of),
        )

    def convert(
        self,
        aside: Path,
        target: Target,
        *,
        measured_ranks: bool = False,
        max_loss: float | None = None,
        allow_loss: bool = False,
        teach: int = 0,
        n_process: int = 1,
    ) -> Certificate:
        """Write the converted model into the folder `aside`; for the rest see `convert_folder`.

        Raises IntegrityError if a file of the source has changed since it was opened.
        """
        self.converter.require_lessons(teach)
        tell_classless(self.converter.config, target)
        to, ranked_on = measured_layers(self.converter, target, measured_ranks, max_loss)
        kept = self.converter.kept(to, n_process)
        result, certificate = self.converter.convert(
            to, self.texts.test, held_out=self.texts.held_out, ranked_on=ranked_on, teach=teach, kept=kept
        )
        if not (certificate.exact or allow_loss or max_loss is not None):
            raise UsageError(refusal(certificate, can_read=self.tokenizer is not None))
        digests = list(self.read.digests.values())
        certificate = replace(self._decoded(certificate), earlier=self.earlier, source_sha256=digests)
        if certificate.calibration:
            tell_fitted(self.texts)
        if self.named and not certificate.calibration and not certificate.exact:
            tell_unread(certificate)
        if max_loss is not None and certificate.loss is not None:
            tell_loss(max_loss, *certificate.loss)
        files = {CERTIFICATE: certificate.to_json(), PAGE: page(certificate), **self.carried}
        own.write(result, aside, files)
        self.read.require_unchanged()
        return certificate

    def _decoded(self, certificate: Certificate) -> Certificate:
        """Return the certificate with what the tokenizer tells of its test text."""
        if certificate.test is None or self.texts.test is None:
            return certificate
        return replace(certificate, test=certificate.test.decoded(self.texts.test.ids, self.tokenizer))


def convert_folder(
    source: Path,
    destination: Path,
    target: Target,
    *,
    method: str | None = None,
    calibration: Sequence[str | Path] = (),
    test: str | Path | None = None,
    length: int | None = None,
    measured_ranks: bool = False,
    max_loss: float | None = None,
    allow_loss: bool = False,
    teach: int = 0,
    seed: int = 0,
    resume: bool = False,
    n_process: int = 1,
    device: str = "cpu",
) -> Certificate:
    """Convert the model in `source` and write it, with conversion.json and CONVERSION.md, to `destination`.

    Intermediate results are kept in DESTINATION.unfinished; after an interruption or a kill, `resume` continues from
    them, with the same bytes. For the texts see `FolderConverter`; a model that is not a run is fitted to text of its
    own making (`self`) where none is given and a step can use one. `teach` is the number of passes over the
    calibration in which approximate attentions learn from the source's. `n_process` layers are converted at a time,
    each in a process of its own, with the same bytes. On `device` the models read the texts, one layer at a time;
    layers are converted on the CPU. `max_loss` bounds the loss on the calibration text; a result that loses more on
    the test text is written all the same, with a warning. Raises UsageError, naming the loss, for a lossy result
    without `max_loss` or `allow_loss`; then, as after any error, nothing is left at `destination`.
    """
    require_apart(source, destination)
    require_seed(seed)
    require_passes(teach)
    files = [text for text in calibration if str(text) != SELF]
    for option, texts in (("--calibration", files), ("--test", [test] if test is not None else [])):
        for text in texts:
            named(text, option).require()
    measured = measured_ranks or max_loss is not None
    if measured:
        require_measurable(target, max_loss)
    steps = _require_sensible(source, target, length, method, measured=measured, teach=teach)
    fits = (
        measured or teach > 0 or any(step.is_fitted(step.method(method, calibrated=True)) for step in steps)
    )
    return_freed_memory()
    with unfinished(destination, resume=resume) as scratch, publish(destination) as aside:
        opened = FolderConverter(
            source,
            scratch,
            method=method,
            calibration=calibration,
            test=test,
            length=length,
            seed=seed,
            device=device,
            fits=fits,
        )
        certificate = opened.convert(
            aside,
            target,
            measured_ranks=measured_ranks,
            max_loss=max_loss,
            allow_loss=allow_loss,
            teach=teach,
            n_process=n_process,
        )
        note_result(scratch, certificate.to_json())
        return certificate


def read_plannable(path: Path) -> ModelConfig:
    """Return the config of a model or run folder, of a config.json, or of a YAML file of training options."""
    if path.suffix in (".yaml", ".yml"):
        options = flags.read([], (path,))
        return options.model.resolve(options.data.vocab_size or 256, options.data.block_size)
    if path.is_file() and path.suffix != ".json":
        first = f" Make a folder of it first: rehead import {path} FOLDER" if path.suffix == ".gguf" else ""
        raise InvalidInput(
            f"{path} is a file: expected a model or run folder, a config.json, or a YAML of options.{first}"
        )
    return read_without_weights(path, partial(own.read_config, sizes_only=True))


def plannable_dtype(path: Path) -> torch.dtype:
    """Return the dtype of what `read_plannable` reads; float32 where nothing names one, or weights cannot be read."""
    if path.suffix in (".yaml", ".yml"):
        return torch.float32
    try:
        found = read_without_weights(path, own.read_dtype)
    except ReheadError:  # damaged weights: a plan needs none
        found = None
    return found or torch.float32


def require_convertible(
    config: GPTConfig, target: Target, method: str | None, *, measured: bool = False, teach: int = 0
) -> list[Step]:
    """Return the steps of all layers.

    Refuses what no steps lead to, a method that none of them has, and measuring or teaching where nothing is lost.
    """
    require_rotation(target, config.attention)
    layers = {layer: target.attention(layer, config.n_embd) for layer in config.attention}
    steps = [step for layer, to in layers.items() for step in path(layer, to, config.n_embd)]
    require_method(method, steps)
    if measured:
        require_rebuilt(config.attention)
    elif teach and all(step.promise.exact for step in steps):
        raise nothing_to_learn(teach)
    return steps


def _require_sensible(
    source: Path, target: Target, length: int | None, method: str | None, *, measured: bool, teach: int
) -> list[Step]:
    """Return the steps of all layers; none for a model that is refused later.

    Refuses, and warns of, what the source's config tells, before its weights are looked over and a text is sampled.
    """
    config = read_at(source, own.read_config)
    if not isinstance(config, GPTConfig):
        return []
    if text_length(config, length, source) < 2:
        raise ConfigError("length=1: no token of such a window has another before it. Use 2 or more.")
    steps = require_convertible(config, target, method, measured=measured, teach=teach)
    tell_classless(config, target)
    return steps
