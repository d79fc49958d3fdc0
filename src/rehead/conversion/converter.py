"""A whole model into another, in memory, with its certificate."""

import copy
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rehead.attention import AttentionConfig
from rehead.checkpoint.files.deferred import in_memory
from rehead.config import GPTConfig, encode
from rehead.conversion.arguments import (
    nothing_to_learn,
    require_heads,
    require_passes,
    require_seed,
    require_source,
    require_text,
)
from rehead.conversion.base import Converted, Statistics, require_method
from rehead.conversion.blocks import (
    CALIBRATION_TOKENS,
    TEST_TOKENS,
    blocks_of,
    measured_blocks,
    random_blocks,
    require_windows,
)
from rehead.conversion.certificate import Certificate, LayerRecord, Text, certify, require_different
from rehead.conversion.finite import require_finite, require_holds
from rehead.conversion.fit import teaching
from rehead.conversion.fit.layerwise import gather
from rehead.conversion.fit.moments import attentions
from rehead.conversion.frequencies import are_open, is_choice, require_rotation, with_frequencies
from rehead.conversion.kept import Kept, Order
from rehead.conversion.layers import Layers, with_layers
from rehead.conversion.search import path
from rehead.conversion.target import Target, layers_of
from rehead.conversion.texts import Passage, passage, passages
from rehead.conversion.told import without_lessons
from rehead.conversion.unfinished import digest
from rehead.data import Batch, Ids
from rehead.measure.length import text_length
from rehead.model import GPT, LanguageModel
from rehead.stages import staged


def convert(
    model: LanguageModel,
    to: str | AttentionConfig | Sequence[AttentionConfig] | GPTConfig,
    *,
    method: str | None = None,
    calibration: Ids | Tensor | Sequence[Any] | str | None = None,
    test: Ids | Tensor | Sequence[int] | None = None,
    length: int | None = None,
    teach: int = 0,
    seed: int = 0,
    bos: int | None = None,
    scratch: Path | None = None,
    **options: Any,
) -> tuple[LanguageModel, Certificate]:
    """Turn every layer of a GPT into the attention asked for; the source is left as it is.

    `to` is a config for all layers, one per layer, a model config, or a name: mha, gqa, mqa, mla or reduced, with the
    fields of `Target` (`n_kv_head`, `kv_rank`, `kv_fraction`, `target`, `rope_dim`, `head_map`, `rope_layout`) beside
    it. `calibration` and `test` are token ids (N,); approximations fit themselves to the first, the certificate
    measures on the second (without it, logits on random tokens). Instead of ids, `calibration` may be "self", a text
    sampled from the model, or a list of texts, read in equal shares. Windows have `length` tokens (2,048, or fewer if
    the model reads fewer) and begin with `bos`, the token that a tokenizer puts before a text, if given. `method` is
    one of `rehead.conversion.methods()`, by default the best that the texts allow. In `teach` passes over the
    calibration, inexact attentions learn from the source's, layer by layer. With `scratch`, new weights stay in a new
    folder there, as with `in_memory=False` in `rehead.load`.

    Raises ConfigError where no conversion leads there, NumericError for weights that are not finite.
    """
    require_source(model)
    require_seed(seed)
    config, window = require_heads(model), text_length(model.config, length)
    layers = layers_of(config, to, options)
    measured = None if test is None else passage(test, model, bos)
    texts = passages(calibration, model, CALIBRATION_TOKENS, window, seed, bos)
    own = None if scratch is None else Path(tempfile.mkdtemp(prefix="convert-", dir=scratch))
    converter = Converter(model, method, texts, length=window, seed=seed, scratch=own)
    converter.require_lessons(teach)
    if isinstance(to, str):
        layers = converter.attentions(Target(to=to, **options))
    return converter.convert(layers, measured, teach=teach)


class Converter:
    """Converts one model, any number of times. Its weights are checked once, and its statistics gathered once.

    What is in `scratch` must be of the same model, calibration, length and seed: it is used again.
    """

    def __init__(
        self,
        model: LanguageModel,
        method: str | None = None,
        calibration: Sequence[Passage] = (),
        *,
        length: int | None = None,
        seed: int = 0,
        scratch: Path | None = None,
    ) -> None:
        self.config = require_heads(model)
        assert isinstance(model, GPT)
        self.model, self.method, self.scratch = model, method, scratch
        self.calibration, self.seed = calibration, seed
        self.length = text_length(self.config, length)
        require_windows(model, self.length)
        require_finite(model)
        self.blocks = self.read(CALIBRATION_TOKENS)
        self._statistics: dict[str, list[Statistics]] = {}

    def attentions(self, target: Target) -> Sequence[AttentionConfig]:
        """Return the attention that replaces each layer's; of an uneven target, the frequencies are chosen here."""
        layers = self.config.attention
        wanted = [target.attention(layer, self.config.n_embd) for layer in layers]
        require_rotation(target, layers)
        if target.target != "uneven" or not any(map(are_open, layers, wanted)):
            return wanted
        paths = [path(layer, to, self.config.n_embd) for layer, to in zip(layers, wanted, strict=True)]
        require_method(self.method, [step for steps in paths for step in steps])  # before minutes are spent
        fitted = any(map(is_choice, layers, wanted)) and self.blocks and self.method != "svd"
        seen = self.statistics(["turns"]) if fitted else [Statistics()] * len(layers)
        return with_frequencies(self.model, wanted, seen)

    def read(self, limit: int) -> list[Batch]:
        """Return equal shares of all calibration texts, at most `limit` tokens together."""
        share = limit // max(1, len(self.calibration))
        parts = [blocks_of(self.model, text.ids, share, self.length, text.bos) for text in self.calibration]
        return [block for part in parts for block in part]

    def convert(
        self,
        targets: Sequence[AttentionConfig],
        test: Passage | None = None,
        *,
        held_out: bool = False,
        ranked_on: int = 0,
        teach: int = 0,
        kept: Kept | None = None,
    ) -> tuple[LanguageModel, Certificate]:
        """Return the model with `targets` for attentions, and its certificate: on `test`, or on random tokens.

        `held_out` says that `test` is a part of a calibration text; `targets` were chosen on `ranked_on` tokens of the
        calibration. `teach` is the number of passes over it in which lossy attentions learn from the source's.
        Layers are taken from `kept`, and put there.
        """
        calibration = self._described(CALIBRATION_TOKENS)
        measured, blocks = None, random_blocks(self.config, self.seed, self.length)
        if test is not None:
            measured = Text.of(test, TEST_TOKENS, self.length)
            blocks = measured_blocks(self.model, test, self.length)
        require_different(calibration, measured)
        shared, records = self.follow(targets, kept)
        if teach and ranked_on and all(record.exact for record in records):
            teach = without_lessons(teach)
        if teach:
            records = self._taught(shared, records, teach)
        if not any(record.fitted or record.taught for record in records):
            calibration = self._described(ranked_on)
        result = copy.deepcopy(shared)
        return result, certify(
            self.model,
            result,
            records,
            blocks,
            calibration=calibration,
            test=measured,
            held_out=held_out,
            length=self.length,
            seed=self.seed,
            teach=teach,
        )

    def _described(self, limit: int) -> list[Text]:
        """Describe the calibration texts, of which at most `limit` tokens are read together; none if that is 0."""
        share = limit // max(1, len(self.calibration))
        return [Text.of(text, share, self.length) for text in self.calibration if limit]

    def follow(
        self, targets: Sequence[AttentionConfig], kept: Kept | None = None
    ) -> tuple[GPT, list[LayerRecord]]:
        """Return the model with `targets` for attentions, sharing all other weights with the source.

        All layers take their first step together, then their second, so that an approximation further
        on looks at the model as it then is.
        """
        paths = [path(*pair, self.config.n_embd) for pair in zip(self.config.attention, targets, strict=True)]
        require_method(self.method, [step for steps in paths for step in steps])
        layers: Layers = [
            (config, {name: weight.detach().cpu() for name, weight in one.named_parameters()})
            for config, one in zip(self.config.attention, attentions(self.model), strict=True)
        ]
        records = [LayerRecord(steps=steps, methods=[], converted=[]) for steps in paths]
        dtype = self.model.head.weight.dtype
        for turn in range(max(map(len, paths))):
            at = {index: steps[turn] for index, steps in enumerate(paths) if turn < len(steps)}
            chosen = {i: step.method(self.method, calibrated=bool(self.blocks)) for i, step in at.items()}
            readers = {index for index, step in at.items() if step.is_fitted(chosen[index])}
            needs = {need for i in readers for need in at[i].conversion.methods[chosen[i]]}
            readers -= {index for index in readers if kept is not None and kept.has(turn, index)}
            found = self._gather(layers, turn, needs, kept) if readers else []
            orders = [
                Order(
                    turn=turn,
                    index=index,
                    step=step,
                    method=chosen[index],
                    weights=layers[index][1],
                    seen=found[index] if index in readers else Statistics(),
                    dtype=dtype if step is paths[index][-1] else torch.float64,
                )
                for index, step in at.items()
            ]
            taken = self._take(orders) if kept is None else kept.take(orders)
            for index, done in staged(taken, "converting", len(at), "layers"):
                if at[index] is paths[index][-1]:
                    require_holds(done.weights, dtype, f"layers.{index}.self_attn")
                layers[index] = at[index].result, done.weights
                records[index] = records[index].after(chosen[index], done)
        return with_layers(self.model, layers), records

    def _take(self, orders: Sequence[Order]) -> Iterator[tuple[int, Converted]]:
        """Take steps in memory or, with `scratch`, in a file that is deleted with the last of its weights."""
        for order in orders:
            if self.scratch is None:
                yield order.index, order.take()
                continue
            with tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as folder:
                yield from Kept(Path(folder)).take([order])

    def require_lessons(self, passes: int) -> None:
        """Refuse an invalid number of passes, or passes without a text."""
        require_passes(passes)
        require_text(passes, self.blocks)
        if passes:
            teaching.require_windows(self.blocks)

    def _taught(self, result: GPT, records: Sequence[LayerRecord], passes: int) -> list[LayerRecord]:
        """Teach the attentions that are not exact, in place, and return the records with their errors."""
        lossy = [index for index, record in enumerate(records) if not record.exact]
        if not lossy:
            raise nothing_to_learn(passes)
        made_of = [encode(result.config), [record.methods for record in records], passes]
        with self._kept(f"teaching-{digest(made_of)}") as folder:
            errors = teaching.teach(
                self.model, result, lossy, self.blocks, folder, passes=passes, seed=self.seed
            )
            if self.scratch is None:  # the folder is about to go
                for index in lossy:
                    in_memory(attentions(result)[index])
        return [replace(record, taught=errors.get(index)) for index, record in enumerate(records)]

    def kept(self, targets: Sequence[AttentionConfig], n_process: int) -> Kept:
        """Return the place of a conversion's layers in `scratch`."""
        assert self.scratch is not None
        made_of = [encode(replace(self.config, attention=tuple(targets))), self.method]
        return Kept.only(self.scratch, made_of, n_process)

    def statistics(self, needs: Collection[str]) -> list[Statistics]:
        """Return the statistics of every layer of the source; gathered once."""
        name = "-".join(sorted(set(needs) & {"pair", "turns"})) or "inputs"
        if name not in self._statistics:
            with self._kept(name) as folder:
                self._statistics[name] = self._seen(self.model, needs, folder)
        return self._statistics[name]

    def _gather(
        self, layers: Layers, turn: int, needs: Collection[str], kept: Kept | None
    ) -> list[Statistics]:
        """Return the statistics of every layer as it is in this turn, kept beside the layers that are."""
        if not self.blocks:
            return [Statistics()] * len(layers)
        if turn == 0:
            return self.statistics(needs)
        name = None if kept is None else f"{kept.folder.name}/seen-{turn}-{'-'.join(sorted(needs))}"
        with self._kept(name) as folder:
            return self._seen(with_layers(self.model, layers), needs, folder)

    @contextmanager
    def _kept(self, name: str | None) -> Iterator[Path]:
        """Yield a folder in `scratch` that is kept for next time or, without `scratch` or a name, a temporary one."""
        if self.scratch is None or name is None:
            with tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
        else:
            (self.scratch / name).mkdir(parents=True, exist_ok=True)
            yield self.scratch / name

    def _seen(self, model: GPT, needs: Collection[str], folder: Path) -> list[Statistics]:
        texts = max(1, len(self.calibration))
        return gather(model, self.blocks, folder, needs=needs, seed=self.seed, n_text=texts)
