"""Turns a preset and a user's flags into a list of jobs, each one run of one variant."""

import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

from rehead.checkpoint import families
from rehead.config import GPTConfig, ModelConfig, RunOptions, flags
from rehead.conversion import methods
from rehead.conversion.export.engines import Engine
from rehead.conversion.export.fit import Asked, require_fit
from rehead.conversion.folder import read_plannable
from rehead.conversion.texts import SELF
from rehead.data import CORPORA
from rehead.errors import ConfigError
from rehead.study.job import Job, written
from rehead.study.preset import Flags, Preset, Variant
from rehead.training.heal import DEFAULTS

LONGEST, BEGINNING = 255, 100
"""Bytes of a folder's name, at most, and what is left of a longer one."""
SEED, PLACE, FOLDER = "system.seed", "system.work_dir", "model.folder"


def jobs(preset: Preset, changes: list[str], fraction: float = 1.0) -> list[Job]:
    """Return every job of a study, seed by seed, each after the one it starts from.

    A list, in `changes` or in the preset, makes one variant per entry, unless its key takes a list. A list
    of `system.seed` repeats all variants. `fraction` is the share of each run's iterations to train. Raises
    ConfigError for wrong options of any job.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"fraction={fraction} is not a share of the iterations. Use a number above 0, at most 1."
        )
    given = flags.values(changes)
    run = {PLACE: f"runs/{preset.name}", SEED: RunOptions().system.seed, **preset.run, **given}
    _require_one_place(run[PLACE], given, preset)
    seeds = run[SEED] if isinstance(run[SEED], list) else [run[SEED]]
    grid = _Grid(preset, given, Path(run[PLACE]), fraction)
    planned = [job for seed in seeds for job in grid.jobs({**run, SEED: seed})]
    folders = [job.folder for job in planned]
    for job in planned:
        if folders.count(job.folder) > 1:
            raise ConfigError(
                f"{job.variant!r} and another variant would both be written to {job.folder}: rename one of them."
            )
    return planned


def _require_one_place(place: Any, given: Flags, preset: Preset) -> None:
    """Raise ConfigError for several folders, a variant that sets its folder, and one source in place of several."""
    if not isinstance(place, str):
        raise ConfigError(
            f"{PLACE}={written(place)}: a study has one folder, with a subfolder for every variant. Use "
            f"{PLACE}=runs/{preset.name}, for example."
        )
    sources = [name for name, variant in preset.variants.items() if variant.source is not None]
    if FOLDER in given and len(sources) > 1:
        raise ConfigError(
            f"{FOLDER}={written(given[FOLDER])} would replace each of {', '.join(sources)}: write their folders in the "
            "preset."
        )
    for name, variant in preset.variants.items():
        if PLACE in variant.flags:
            raise ConfigError(
                f"{name}: {PLACE}={written(variant.flags[PLACE])}: a variant is written to a subfolder of the study. "
                f"Set {PLACE} for the whole study instead."
            )


@dataclass(frozen=True)
class _Grid:
    preset: Preset
    given: Flags
    place: Path
    fraction: float

    def jobs(self, run: Flags) -> list[Job]:
        """Return the jobs of one seed, each parent before its children."""
        by_name: dict[str, list[Job]] = {}
        for name, variant in self.preset.variants.items():
            own = {key: value for key, value in variant.flags.items() if key not in self.given}
            by_name[name] = [
                self._job(name, variant, chosen, label, parent)
                for parent in ([None] if variant.start is None else by_name[variant.start])
                for chosen, label in _choices({**self._base(run, variant, parent), **own})
            ]
        planned = [job for several in by_name.values() for job in several]
        for key, value in self.given.items():
            if key.startswith("model.") and not any(key in job.flags for job in planned):
                raise ConfigError(
                    f"{key}={written(value)}: no variant of {self.preset.file} is made from flags. Leave it out."
                )
        return planned

    def _base(self, run: Flags, variant: Variant, parent: Job | None) -> Flags:
        """Return the flags that a variant's own flags override."""
        if variant.source is not None:  # its folder says what the model is
            return {key: value for key, value in run.items() if not key.startswith("model.") or key == FOLDER}
        if parent is None:
            return run
        if not variant.heal:
            return parent.flags
        given = {key: value for key, value in parent.flags.items() if key in self.given}
        return parent.flags | {f"trainer.{key}": value for key, value in DEFAULTS.items()} | given

    def _job(self, name: str, variant: Variant, chosen: Flags, label: str, parent: Job | None) -> Job:
        choice = ", ".join(filter(None, ("" if parent is None else parent.choice, label)))
        title = ", ".join(filter(None, (name, choice)))
        if not title:
            raise ConfigError(
                "a study needs at least two variants: give a flag several values, like model.n_kv_head=[1,2,3]."
            )
        settings = chosen | {PLACE: str(self.place / _folder(title) / f"seed-{chosen[SEED]}")}
        if parent is not None and parent.follows_flags and not variant.heal:
            settings["model.pretrained_folder"] = str(parent.model)
        elif parent is not None:
            settings = {key: value for key, value in settings.items() if not key.startswith("model.")}
            settings[FOLDER] = str(parent.model)
        if variant.source is not None:
            settings[FOLDER] = os.path.expanduser(str(self.given.get(FOLDER, variant.source)))
        if variant.heal:
            if parent is None or parent.convert is None or parent.parent is None:
                raise ConfigError(
                    f"{title}: only a converted model can be healed. Set from: to a conversion."
                )
            settings["trainer.teacher"] = str(parent.parent.model)
        if variant.kind in ("converted", "exported"):
            settings.pop("model.pretrained_folder", None)
        try:
            job = Job(
                variant=title,
                of=name,
                choice=choice,
                flags=chosen,
                options=self._options(settings),
                kind=variant.kind,
                about=variant.about,
                parent=parent,
                convert=variant.convert,
                export=variant.export,
            )
            _check(job)
            for key, why in job.options.unused().items():
                if isinstance(self.given.get(key), list):
                    raise ConfigError(f"{key}={written(self.given[key])} has no effect {why}")
        except ConfigError as error:
            named = str(error).removeprefix("model.").startswith(title)  # such as n_kv_head=5
            raise ConfigError(str(error) if named else f"{title}: {error}") from error
        return job

    def _options(self, settings: Flags) -> RunOptions:
        """Return the options; errors name flags of the user as they were typed."""
        typed = [
            f"{key}={written(value)}" for key, value in settings.items() if key in self.given and key != PLACE
        ]
        table: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            if key not in self.given or key == PLACE:
                group, _, rest = key.partition(".")
                table.setdefault(group, {})[rest] = value
        options = flags.read(typed, tables=(table,), source=self.preset.file)
        shorter = {
            key: math.ceil(getattr(options.trainer, key) * self.fraction)
            for key in ("max_iters", "warmup_iters")
        }
        return replace(options, trainer=replace(options.trainer, **shorter))


def _choices(table: Flags) -> Iterator[tuple[Flags, str]]:
    """Yield the table for each combination of entries of its lists, with the choice in words."""
    lists = {
        key: value for key, value in table.items() if isinstance(value, list) and not _takes_list(key, value)
    }
    for entries in product(*lists.values()):
        chosen = dict(zip(lists, entries, strict=True))
        label = ", ".join(f"{key.partition('.')[2]}={written(value)}" for key, value in chosen.items())
        yield table | chosen, label


def _takes_list(key: str, value: list[Any]) -> bool:
    """Return True if the list is one value of the key; a list of such lists is several values."""
    group, _, name = key.partition(".")
    option = flags.OPTIONS.get(group, {}).get(name)
    kinds = () if option is None else (option.type, *get_args(option.type))
    return any(get_origin(kind) is list for kind in kinds) and not any(
        isinstance(entry, list) for entry in value
    )


def _check(job: Job) -> None:
    """Raise ConfigError, before anything is trained, for a job that would fail."""
    options = job.options
    if not options.data.val_fraction:
        raise ConfigError("data.val_fraction=0 leaves a study without a loss to compare. Use 0.1.")
    if options.data.block_size < 2:
        raise ConfigError("data.block_size=1 leaves nothing to decode. Use 2 or more.")
    if job.convert is not None:
        method = job.convert.get("method")
        if method not in (None, *methods()):
            raise ConfigError(f"method={method!r} is unknown. Use one of {', '.join(methods())}.")
        for text in [*job.reading.get("calibration", ()), *filter(None, [job.reading.get("test")])]:
            if text != SELF and text not in CORPORA and not Path(text).exists():
                raise ConfigError(f"convert: no text at {text!r}. Give a file or folder that exists.")
        config = config_of(job.parent)
        if isinstance(config, GPTConfig):
            for layer in config.attention:
                job.target.attention(layer, config.n_embd)
    elif job.export is not None:
        for key, known in (("format", ("auto", *families)), ("for", get_args(Engine))):
            if job.export.get(key, known[0]) not in known:
                raise ConfigError(f"export: {key}={job.export[key]!r}. Use one of {', '.join(known)}.")
        config = config_of(job.parent)
        if isinstance(config, GPTConfig):
            require_fit(config, Asked.of(job.export.get("format", "auto"), job.export.get("for")))
    else:
        config = config_of(job)
        if job.kind == "given" and config is not None and job.length > config.block_size:
            raise ConfigError(
                f"data.block_size={job.length}: the model in {job.model} reads at most {config.block_size} tokens at "
                f"once. Use 1 to {config.block_size}."
            )


def config_of(job: Job | None) -> ModelConfig | None:
    """Return the config of a job's model if it is known now; the vocabulary size may be a placeholder."""
    if job is not None and job.kind == "given":
        return read_plannable(job.model)
    if job is None or not job.follows_flags:
        return None
    data = job.options.data
    return job.options.model.resolve(data.vocab_size or 256, data.block_size)


def _folder(title: str) -> str:
    """Return a title as the name of a folder; of a long one its beginning, and what tells it from others."""
    name = re.sub(r"[^\w.=]+", "-", title.lower()).strip("-.") or "variant"
    whole = name.encode()
    if len(whole) <= LONGEST:
        return name
    return f"{whole[:BEGINNING].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"
