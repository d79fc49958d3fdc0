"""Measures every model of a study with its KV cache in several number formats."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rehead.conversion.blocks import measured_blocks
from rehead.conversion.reading import Reader
from rehead.conversion.texts import SELF
from rehead.data import Batch
from rehead.data.files import write_whole
from rehead.measure import cache_bytes, evaluate, kv_bytes_per_token
from rehead.measure.kv_dtype import kv_dtypes
from rehead.measure.length import text_length
from rehead.model import LanguageModel
from rehead.stages import staged
from rehead.study.begun import read
from rehead.study.job import Job, one_source
from rehead.study.preset import Preset
from rehead.study.work import load, validation_blocks
from rehead.tokenizer import open_model

Record = dict[str, Any]
FILE, FORMAT = "kv_dtype.json", 2
"""Losses of another format are measured again."""
TOKENS = 16_384
"""Tokens read of the text of conversions, at most; windows are spread evenly over it."""


def known_formats(preset: Preset, jobs: Sequence[Job]) -> Record | None:
    """Return what `measure_formats` returned; None if there is nothing, or a job or the formats have changed since."""
    if not preset.kv_dtype:
        return {}
    known = read(jobs[0].place / FILE)
    return known["variants"] if known is not None and known.get("of") == _described(preset, jobs) else None


def measure_formats(preset: Preset, jobs: Sequence[Job]) -> Record:
    """Measure the variants for which a question shows `kv_dtype`; write and return their records, by name.

    A record has, by format, `kv_bytes_per_token` and the `cache_bytes` of a full context, `losses` of each seed
    (nats per token, the text read with the cache in this format), and in `unable` why a format is impossible. Losses
    of "" are those without rounding. Models of one source read the text that the first conversion was measured
    on, others the validation text.
    """
    asked = _asked(preset, jobs)
    found: Record = {}
    held_out: dict[int, list[Batch]] = {}
    for job in staged(asked, "measuring cache formats", len(asked), "models"):
        model, conversion = load(job), _first_conversion(jobs, _seed(job))
        if conversion is not None and conversion.seed not in held_out:
            held_out[conversion.seed] = _blocks_of(conversion)
        blocks = held_out[conversion.seed] if conversion is not None else list(validation_blocks(job))
        record = found.setdefault(job.variant, _sizes(model, job.length, preset.kv_dtype))
        for name in ("", *record["kv_bytes_per_token"]):
            loss, _ = evaluate(model, blocks, kv_dtypes[name]() if name else None)
            record["losses"].setdefault(name, []).append(loss)
    known = {"of": _described(preset, jobs), "variants": found}
    write_whole(jobs[0].place / FILE, [json.dumps(known).encode()])
    return found


def _asked(preset: Preset, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs whose variants a question shows with their formats, and their one source if they have one."""
    shown = [question.of for question in preset.questions if "kv_dtype" in question.show]
    names = {name for of in shown for name in of} if preset.questions else set(preset.variants)
    source = one_source(jobs)
    names |= set() if source is None else {source.of}
    return [job for job in jobs if job.of in names and job.export is None]


def _described(preset: Preset, jobs: Sequence[Job]) -> Record:
    """Return everything that the results depend on."""
    models = [[job.variant, job.description()] for job in _asked(preset, jobs)]
    conversion = _first_conversion(jobs, jobs[0].seed)
    text = None if conversion is None else conversion.description()
    described = {"format": FORMAT, "formats": preset.kv_dtype, "models": models, "text": text}
    return dict(json.loads(json.dumps(described)))


def _sizes(model: LanguageModel, n_token: int, names: Sequence[str]) -> Record:
    """Return the sizes of a cache in every format that is possible, and why the others are not."""
    kinds = {name: kv_dtypes[name]() for name in names}
    unable = {name: fault for name, kind in kinds.items() if (fault := kind.fault(model.config))}
    able = {name: kind for name, kind in kinds.items() if name not in unable}
    return {
        "context": n_token,
        "kv_bytes_per_token": {name: kv_bytes_per_token(model.config, kind) for name, kind in able.items()},
        "cache_bytes": {name: cache_bytes(model.config, n_token, dtype=kind) for name, kind in able.items()},
        "unable": unable,
        "losses": {},
    }


def _seed(job: Job) -> int:
    """Return the seed of the conversion that a job descends from, or its own: healing may have another."""
    while job.convert is None and job.parent is not None:
        job = job.parent
    return job.seed


def _first_conversion(jobs: Sequence[Job], seed: int) -> Job | None:
    """Return the first conversion with this seed if all variants are of one source."""
    if one_source(jobs) is None:
        return None
    return next((job for job in jobs if job.convert is not None and job.seed == seed), None)


def _blocks_of(conversion: Job) -> list[Batch]:
    """Return blocks of the text that a conversion was measured on."""
    assert conversion.parent is not None
    source, reading = conversion.parent.model, conversion.reading
    opened = open_model(source, in_memory=False)
    length = text_length(opened.model.config, folder=source)
    test, fitted = reading.get("test"), reading.get("calibration", ())
    files = [text for text in fitted if text != SELF] or fitted
    with TemporaryDirectory() as scratch:
        reader = Reader(source, opened, length, conversion.seed, Path(scratch))
        held = reader.texts(files if test is None else (), test).test
        assert held is not None, "the study has a text"
        return measured_blocks(opened.model, held, length, TOKENS)
