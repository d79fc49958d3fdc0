"""What a conversion kept and what it cost, computed by the same code for all of them."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rehead.checkpoint.files.strict import strict_json
from rehead.config import GPTConfig, encode
from rehead.conversion.base import Converted, Step
from rehead.conversion.bounds import bounded
from rehead.conversion.events import Earlier, Healing
from rehead.conversion.fit.moments import attentions
from rehead.conversion.fit.teaching import Taught
from rehead.conversion.texts import SELF, Passage
from rehead.data import IGNORE, Ids, shown
from rehead.errors import ConfigError, InvalidInput
from rehead.fields import require_types
from rehead.measure import kv_bytes_per_token, parameters
from rehead.measure.environment import environment
from rehead.measure.fidelity import compare
from rehead.model import LanguageModel, evaluating
from rehead.system.allocator import keeping_freed_memory
from rehead.tokenizer import Tokenizer

CERTIFICATE, FORMAT = "conversion.json", "rehead-certificate-1"
LARGEST = 16 * 2**20
"""Bytes of a certificate, at most."""
RANDOM = "random tokens"
MEASURED = {"tokens", "max_error", "relative_error", "kl", "argmax_flips"}
"""What `logits` has at least."""
NOTHING = 1e-20
"""A share of energy below this is rounding, not loss."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text by its name and tokens: how many, the sha256 of their ids, and how many of them were read.

    `name` is that of the file or folder, `self` of text sampled from the model, `ids` where Python gave ids. `bytes`
    and `text_sha256` are of what the ids decode to, in UTF-8, where a tokenizer could tell. `length` is that of its
    windows; None means the certificate's. `bos` is the token that each window begins with, if any."""

    name: str
    tokens: int
    sha256: str
    read: int
    bytes: int | None = None
    text_sha256: str = ""
    length: int | None = None
    bos: int | None = None

    @classmethod
    def of(cls, passage: Passage, limit: int, length: int = 1) -> "Text":
        """Describe a passage of which whole windows of `length` are read, at most `limit` tokens or one window."""
        ids = passage.ids
        read = min(max(1, limit // length) * length, len(ids))
        return cls(name=passage.name, tokens=len(ids), sha256=passage.sha256, read=read, bos=passage.bos)

    def decoded(self, ids: Ids, tokenizer: Tokenizer | None) -> "Text":
        """Return the description with `bytes` and `text_sha256`; unchanged without a tokenizer or of a sampled text."""
        if tokenizer is None or self.name == SELF:
            return self
        text = tokenizer.decode(ids).encode()
        return replace(self, bytes=len(text), text_sha256=hashlib.sha256(text).hexdigest())


def require_different(calibration: Sequence[Text], test: Text | None) -> None:
    """Refuse to measure a conversion on a text it was fitted to."""
    if test is not None and test.sha256 in [text.sha256 for text in calibration]:
        raise ConfigError(
            "calibration and test text are the same: the loss would look better than it is. Give another text to "
            "test on."
        )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. `lost_energy` is the share of the keys' and values' energy that approximations dropped, by the moments
    their method uses, and of what rotations matter; `output_error` the RMS difference of the attention's output from
    the source's on the same inputs, relative to the source's RMS, over the first batch compared; `taught` the same
    before and after it was taught, on windows of the calibration it did not learn from and its inputs in the result."""

    steps: list[str]
    methods: list[str]
    why: list[str]
    source: str
    result: str
    kv_numbers: list[int]
    lost_energy: float
    output_error: float
    taught: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Saved as conversion.json beside the model, and for people as CONVERSION.md.

    `compared_on` says what the logits were compared on: a text, or random tokens, which say little. `exact` is True
    where every step is exact by its promise, or changed no weight of the keys and values beyond rounding. `logits` are
    compared as in `rehead.measure.fidelity`, on the `test` text or, without one, on random tokens; `loss` is in nats
    per token of the test text. Pairs are before and after. `calibration` is what approximations were fitted to; the
    windows of all texts have `length` tokens, unless a text has its own. `held_out` is True where the test text is a
    part held out of what the model was fitted or healed to, and so of its kind. `teach` is the number of passes in
    which the source's attentions taught. `earlier` are the conversions that made the source, the oldest first: no other
    figure has their losses in it. `source_sha256` are of the source's files of weights.
    """

    format: str = FORMAT
    exact: bool
    layers: list[Layer]
    source: dict[str, Any]
    result: dict[str, Any]
    logits: dict[str, float]
    loss: list[float] | None
    kv_bytes_per_token: list[int]
    parameters: list[int]
    dtype: str
    calibration: list[Text]
    test: Text | None
    held_out: bool
    length: int
    seed: int
    environment: dict[str, str | int]
    teach: int = 0
    healing: list[Healing] = field(default_factory=list)
    compared_on: str = ""
    earlier: list[Earlier] = field(default_factory=list)
    source_sha256: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Certificate":
        """Read the certificate in a converted model's folder. Raises InvalidInput if it is missing or damaged."""
        path = folder / CERTIFICATE
        try:
            table = bounded(strict_json(path, LARGEST))
            parts = {
                "layers": [Layer(**layer) for layer in table["layers"]],
                "calibration": [Text(**text) for text in table["calibration"]],
                "test": None if table["test"] is None else Text(**table["test"]),
                "healing": [Healing(**healing) for healing in table.get("healing", [])],
                "earlier": [Earlier(**one) for one in table.get("earlier", [])],
            }
            certificate = cls(**table | parts)
            certificate._require_whole()
        except (ValueError, TypeError, KeyError) as error:  # InvalidInput and ConfigError are ValueErrors
            raise InvalidInput(f"{path} is not a conversion certificate ({error!s:.200}).") from error
        return certificate

    def _require_whole(self) -> None:
        """Refuse what was not written by `to_json`: another format, other types, fewer numbers."""
        if self.format != FORMAT:
            raise InvalidInput(f"format {self.format!r:.40}, expected {FORMAT!r}")
        texts = [*self.calibration, *([] if self.test is None else [self.test])]
        for part in (self, *self.layers, *texts, *self.healing, *self.earlier):
            require_types(part)
        pairs: list[Sequence[float | None] | None] = [self.loss, self.kv_bytes_per_token, self.parameters]
        pairs += [pair for layer in self.layers for pair in (layer.kv_numbers, layer.taught)]
        pairs += [pair for healing in self.healing for pair in (healing.kl, healing.loss)]
        pairs += [pair for one in self.earlier for pair in (one.loss, one.kv_bytes_per_token)]
        if not self.layers or any(pair is not None and len(pair) != 2 for pair in pairs):
            raise InvalidInput("without layers, or with figures that are not a pair: before and after")
        if self.kv_bytes_per_token[0] < 1:
            raise InvalidInput(f"kv_bytes_per_token={self.kv_bytes_per_token}: its source caches nothing")
        if missing := MEASURED - self.logits.keys():
            raise InvalidInput(f"its logits lack {sorted(missing)[0]}")

    @property
    def ends(self) -> tuple[str, str]:
        """Return the attention before and after: the first layer's, and whether other layers have others."""
        pairs = [(layer.source, layer.result) for layer in self.layers]
        before, after = (
            names[0] + ", and others" * (len({*names}) > 1) for names in zip(*pairs, strict=True)
        )
        return before, after

    def to_json(self) -> str:
        """Return the text of conversion.json."""
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """The steps taken on one layer, with their methods and errors."""

    steps: Sequence[Step]
    methods: Sequence[str]
    converted: Sequence[Converted]
    taught: Taught | None = None

    def after(self, method: str, done: Converted) -> "LayerRecord":
        """Return the record with one more step; its weights are not kept."""
        converted = [*self.converted, replace(done, weights={})]
        return replace(self, methods=[*self.methods, method], converted=converted)

    @property
    def lost(self) -> float:
        """Share of the energy that all steps together dropped."""
        total = 0.0
        for one in self.converted:
            total += min(one.lost, 1) * (1 - total)
        return total

    @property
    def fitted(self) -> bool:
        """Whether a method of a step reads a calibration text."""
        return any(step.is_fitted(method) for step, method in zip(self.steps, self.methods, strict=True))

    @property
    def exact(self) -> bool:
        """Whether every step promises exactness, or changed no weight beyond rounding."""
        pairs = zip(self.steps, self.converted, strict=True)
        return all(step.promise.exact or one.residual <= NOTHING for step, one in pairs)


def certify(
    source: LanguageModel,
    result: LanguageModel,
    records: Sequence[LayerRecord],
    blocks: Sequence[tuple[Tensor, Tensor]],
    *,
    calibration: Sequence[Text],
    test: Text | None,
    held_out: bool,
    length: int,
    seed: int,
    teach: int = 0,
) -> Certificate:
    """Measure `result` on `blocks`, those of the test text or random ones, and return its certificate."""
    before, after = source.config, result.config
    assert isinstance(before, GPTConfig)
    assert isinstance(after, GPTConfig)
    errors = output_errors(source, result, blocks[:1])
    with keeping_freed_memory():
        logits = asdict(compare(source, result, shown(blocks, "comparing with the source")))
    losses = logits.pop("losses")
    layers = [
        Layer(
            steps=[step.name for step in record.steps],
            methods=[method for method in record.methods if method],
            why=[step.promise.why for step in record.steps],
            source=old.describe(),
            result=new.describe(),
            kv_numbers=[old.kv_numbers(), new.kv_numbers()],
            lost_energy=record.lost,
            output_error=error,
            taught=None if record.taught is None else [record.taught.before, record.taught.after],
        )
        for record, old, new, error in zip(records, before.attention, after.attention, errors, strict=True)
    ]
    dtype = result.head.weight.dtype
    return Certificate(
        exact=all(record.exact for record in records),
        layers=layers,
        source=encode(before),
        result=encode(after),
        logits=logits,
        loss=None if test is None else list(losses),
        kv_bytes_per_token=[kv_bytes_per_token(config, dtype) for config in (before, after)],
        parameters=[parameters(config) for config in (before, after)],
        dtype=str(dtype).removeprefix("torch."),
        calibration=list(calibration),
        test=test,
        held_out=held_out,
        length=length,
        seed=seed,
        teach=teach,
        environment=environment(result.device),
        compared_on=RANDOM if test is None else "text",
    )


@torch.no_grad()
def output_errors(
    source: LanguageModel, result: LanguageModel, blocks: Sequence[tuple[Tensor, Tensor]]
) -> list[float]:
    """Return the relative RMS error of every layer's attention; source and result both get the source's inputs."""
    pairs = list(zip(attentions(source), attentions(result), strict=True))
    sums = torch.zeros(len(pairs), 2, dtype=torch.float64)
    hooks, counts = ExitStack(), torch.ones(0, dtype=torch.bool)
    for index, (old, new) in enumerate(pairs):

        def note(
            _: Any, args: tuple[Tensor, ...], output: Tensor, index: int = index, new: Any = new
        ) -> None:
            both = torch.stack([new(args[0]) - output, output])[:, counts].double()
            sums[index] += both.square().sum(dim=(1, 2)).cpu()

        hooks.enter_context(old.register_forward_hook(note))
    with hooks, evaluating(source, result):
        for ids, targets in blocks:
            counts = (targets != IGNORE).to(source.device)  # not what pads the last window
            source.hidden(ids.to(source.device))
    return [float((error / total).sqrt()) if total else 0.0 for error, total in sums]
