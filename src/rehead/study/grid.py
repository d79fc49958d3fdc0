"""A preset and a user's flags as the list of jobs they mean, each one run of one variant."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from rehead.checkpoint import families
from rehead.config import GPTConfig, ModelConfig, RunOptions, flags
from rehead.conversion import methods
from rehead.conversion.export.deepseek import Engine
from rehead.conversion.folder import read_plannable
from rehead.conversion.texts import SELF
from rehead.data import CORPORA
from rehead.errors import ConfigError
from rehead.study.job import Job, written
from rehead.study.preset import Flags, Preset, Variant
from rehead.training.heal import DEFAULTS

SEED, PLACE = "system.seed", "system.work_dir"


def jobs(preset: Preset, changes: list[str], fraction: float = 1.0) -> list[Job]:
    """Every job of a study, seed by seed, each after the one it starts from.

    A list, in `changes` or in the preset, where its key takes none, gives one variant per entry; lists of
    `system.seed` give the same variants once more. `fraction` is the share of all runs' iterations that
    is made. Whatever is wrong with the options of any job is raised here.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction}: the share of all iterations. Use a number above 0 up to 1.")
    told = flags.values(changes)
    run = {PLACE: f"runs/{preset.name}", SEED: RunOptions().system.seed, **preset.run, **told}
    _require_one_place(run[PLACE], preset)
    seeds = run[SEED] if isinstance(run[SEED], list) else [run[SEED]]
    grid = _Grid(preset, told, Path(run[PLACE]), fraction)
    found = [job for seed in seeds for job in grid.jobs({**run, SEED: seed})]
    folders = [job.folder for job in found]
    for job in found:
        if folders.count(job.folder) > 1:
            raise ConfigError(f"{job.variant!r} and another would both go to {job.folder}: name them apart.")
    return found


def _require_one_place(place: Any, preset: Preset) -> None:
    """Refuse several folders, and a variant that names one: the study makes a folder for each below its own."""
    if not isinstance(place, str):
        raise ConfigError(
            f"{PLACE}={written(place)}: a study goes to one folder, which has one of its own for every variant. Use "
            f"{PLACE}=runs/{preset.name}, for example."
        )
    for name, variant in preset.variants.items():
        if PLACE in variant.flags:
            raise ConfigError(
                f"{name}: {PLACE}={written(variant.flags[PLACE])}: a variant goes to a folder in the study's. Give "
                f"{PLACE} to the whole study instead."
            )


@dataclass(frozen=True)
class _Grid:
    preset: Preset
    told: Flags
    place: Path
    fraction: float

    def jobs(self, run: Flags) -> list[Job]:
        """The jobs of one seed, a parent before its children."""
        found: dict[str, list[Job]] = {}
        for name, variant in self.preset.variants.items():
            own = {key: value for key, value in variant.flags.items() if key not in self.told}
            found[name] = [
                self._job(name, variant, chosen, label, parent)
                for parent in ([None] if variant.start is None else found[variant.start])
                for chosen, label in _choices({**self._base(run, variant, parent), **own})
            ]
        return [job for several in found.values() for job in several]

    def _base(self, run: Flags, variant: Variant, parent: Job | None) -> Flags:
        """What a variant's own flags come on top of."""
        if parent is None:
            return run
        if not variant.heal:
            return parent.flags
        told = {key: value for key, value in parent.flags.items() if key in self.told}
        return parent.flags | {f"trainer.{key}": value for key, value in DEFAULTS.items()} | told

    def _job(self, name: str, variant: Variant, chosen: Flags, label: str, parent: Job | None) -> Job:
        choice = ", ".join(filter(None, ("" if parent is None else parent.choice, label)))
        title = ", ".join(filter(None, (name, choice)))
        if not title:
            raise ConfigError(
                "one variant is no study: give a key several values, like model.n_kv_head=[1,2,3]."
            )
        made = chosen | {PLACE: str(self.place / _folder(title) / f"seed-{chosen[SEED]}")}
        if parent is not None and parent.follows_flags and not variant.heal:
            made["model.pretrained_folder"] = str(parent.model)
        elif parent is not None:
            made = {key: value for key, value in made.items() if not key.startswith("model.")}
            made["model.folder"] = str(parent.model)
        if variant.source is not None:
            folder = Path(str(self.told.get("model.folder", variant.source))).expanduser()
            made = {key: value for key, value in made.items() if not key.startswith("model.")}
            made["model.folder"] = str(folder)
        if variant.heal:
            if parent is None or parent.convert is None or parent.parent is None:
                raise ConfigError(f"{title}: only a conversion is healed, by the model it was made of.")
            made["trainer.teacher"] = str(parent.parent.model)
        if variant.kind in ("converted", "exported"):
            made.pop("model.pretrained_folder", None)
        try:
            job = Job(
                variant=title,
                of=name,
                choice=choice,
                flags=chosen,
                options=self._options(made),
                kind=variant.kind,
                about=variant.about,
                parent=parent,
                convert=variant.convert,
                export=variant.export,
            )
            _check(job)
        except ConfigError as error:
            raise ConfigError(f"{title}: {error}") from error
        return job

    def _options(self, made: Flags) -> RunOptions:
        """The flags as options, those of the user named as they were given."""
        told = [f"{key}={written(value)}" for key, value in made.items() if key in self.told and key != PLACE]
        table: dict[str, dict[str, Any]] = {}
        for key, value in made.items():
            if key not in self.told or key == PLACE:
                group, _, rest = key.partition(".")
                table.setdefault(group, {})[rest] = value
        options = flags.read(told, tables=(table,), source=self.preset.file)
        shorter = {
            key: math.ceil(getattr(options.trainer, key) * self.fraction)
            for key in ("max_iters", "warmup_iters")
        }
        return replace(options, trainer=replace(options.trainer, **shorter))


def _choices(table: Flags) -> Iterator[tuple[Flags, str]]:
    """The table once per combination of entries of its lists, and what was chosen, in words."""
    lists = {
        key: value for key, value in table.items() if isinstance(value, list) and not _takes_list(key, value)
    }
    for entries in product(*lists.values()):
        chosen = dict(zip(lists, entries, strict=True))
        label = ", ".join(f"{key.partition('.')[2]}={written(value)}" for key, value in chosen.items())
        yield table | chosen, label


def _takes_list(key: str, value: list[Any]) -> bool:
    """Whether the list is the key's own value; a list of such lists is several."""
    return key == "model.layers" and not any(isinstance(entry, list) for entry in value)


def _check(job: Job) -> None:
    """Refuse, before anything is trained, what could not be."""
    options = job.options
    if not options.data.val_fraction:
        raise ConfigError("data.val_fraction=0 leaves a study no loss to compare. Use 0.1.")
    if job.convert is not None:
        method = job.convert.get("method")
        if method not in (None, *methods()):
            raise ConfigError(f"method={method!r} is unknown. Use one of {', '.join(methods())}.")
        for text in [*job.reading.get("calibration", ()), *filter(None, [job.reading.get("test")])]:
            if text != SELF and text not in CORPORA and not Path(text).exists():
                raise ConfigError(f"convert: no text at {text!r}. Give a file or folder that is there.")
        config = config_of(job.parent)
        if isinstance(config, GPTConfig):
            for layer in config.attention:
                job.target.attention(layer, config.n_embd)
    elif job.export is not None:
        for key, known in (("format", ("auto", *families)), ("for", get_args(Engine))):
            if job.export.get(key, known[0]) not in known:
                raise ConfigError(f"export: {key}={job.export[key]!r}. Use one of {', '.join(known)}.")
    else:
        config_of(job)


def config_of(job: Job | None) -> ModelConfig | None:
    """The model that flags describe or that is there; the vocabulary is the text's, which is not read here."""
    if job is not None and job.kind == "given":
        return read_plannable(job.model)
    if job is None or not job.follows_flags:
        return None
    data = job.options.data
    return job.options.model.resolve(data.vocab_size or 256, data.block_size)


def _folder(title: str) -> str:
    """A title as the name of a folder."""
    return re.sub(r"[^\w.=]+", "-", title.lower()).strip("-.") or "variant"
