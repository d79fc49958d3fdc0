"""Turns a preset and a user's flags into a list of jobs, each one run of one variant."""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

from rehead.config import RunOptions, flags
from rehead.errors import ConfigError, UsageError
from rehead.study.check import check
from rehead.study.job import Job, folder_of, written
from rehead.study.preset import Flags, Preset, Variant
from rehead.training.heal import DEFAULTS

SEED, PLACE, FOLDER = "system.seed", "system.work_dir", "model.folder"
MEASURING = ("trainer.batch_size", "trainer.eval_batches", "trainer.device")
"""Options of training that also decide how a model is measured."""


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
    for job in planned:
        same = [other for other in planned if other.folder == job.folder]
        if len(same) > 1 and len({other.of for other in same}) == 1:
            raise ConfigError(
                f"{job.variant!r} with seed {job.seed} is there twice: a list names the same value again. Name it once."
            )
        if len(same) > 1:
            raise ConfigError(
                f"{job.variant!r} and another variant would both be written to {job.folder}: rename one of them."
            )
    if replaced := overridden(preset, planned):
        _require_unlike(preset, planned, replaced)
        warnings.warn(
            f"{replaced}: the study compares other variants than {preset.file} describes", stacklevel=2
        )
    return planned


def overridden(preset: Preset, planned: Sequence[Job]) -> str:
    """Return the flags that take the place of what variants of the preset set, in words; "" without any."""
    found = dict[str, dict[str, str]]()
    for job in planned:
        for key, own in preset.variants[job.of].flags.items():
            if not isinstance(own, list) and job.flags.get(key, own) != own:
                place = found.setdefault(f"{key}={written(job.flags[key])}", {})
                place[job.of] = f"{job.of} ({written(own)})"
    return "; ".join(
        f"{flag} takes the place of what {', '.join(of.values())} set" for flag, of in found.items()
    )


def _require_unlike(preset: Preset, planned: Sequence[Job], replaced: str) -> None:
    """Raise ConfigError if flags that took the place of what variants set have made two of them equal."""
    first = dict[str, Job]()
    for job in planned:
        other = first.setdefault(repr(job.description()), job)
        if other.of != job.of and any(preset.variants[one.of].flags for one in (other, job)):
            raise ConfigError(
                f"{replaced}, which makes {other.variant!r} and {job.variant!r} equal. Leave it out. --fraction trains "
                "a share of every variant's iterations."
            )


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


def _without_heads(flags: Flags) -> Flags:
    """Return the flags of a variant; an RNN has no heads, whatever their number in the others."""
    is_rnn = flags.get("model.type") == "rnn"
    return {key: value for key, value in flags.items() if not is_rnn or key != "model.n_query_head"}


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
                for chosen, label in _choices(_without_heads({**self._base(run, variant, parent), **own}))
            ]
        planned = [job for several in by_name.values() for job in several]
        for key, value in self.given.items():
            reasons = [job.options.unused().get(key, "") for job in planned if job.is_trained]
            if reasons and all(reasons):
                raise ConfigError(f"{key}={written(value)} has no effect {reasons[0]}")
            if key.startswith("model.") and not any(key in job.flags for job in planned):
                raise ConfigError(
                    f"{key}={written(value)}: no variant of {self.preset.file} is made from flags. Leave it out."
                )
        return planned

    def _base(self, run: Flags, variant: Variant, parent: Job | None) -> Flags:
        """Return the flags that a variant's own flags override."""
        if variant.source is not None:  # its folder says what the model is
            _require_no_training(run, variant.source)
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
        if parent is not None and (variant.heal or not parent.follows_flags):
            _require_no_shape(title, variant, parent)
        settings = chosen | {PLACE: str(folder_of(self.place, title, chosen[SEED]))}
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
            check(job)
            for key, why in job.options.unused().items():
                if isinstance(self.given.get(key), list):
                    raise ConfigError(f"{key}={written(self.given[key])} has no effect {why}")
        except UsageError as error:
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


def _require_no_training(run: Flags, source: str) -> None:
    """Raise ConfigError for several values of an option of training, which make equal variants of a given model."""
    for key, value in run.items():
        several = isinstance(value, list) and not _takes_list(key, value)
        if several and key.startswith("trainer.") and key not in MEASURING:
            raise ConfigError(
                f"{key}={written(value)}: {source} is given, not trained, and would be the same for every value. Write "
                "the list in a variant that is trained."
            )


def _require_no_shape(title: str, variant: Variant, parent: Job) -> None:
    """Raise ConfigError for flags of a model in a variant whose model is that of a folder."""
    for key, value in variant.flags.items():
        if key.startswith("model."):
            raise ConfigError(
                f"{title}: {key}={written(value)} has no effect: the model is that of {parent.variant}. Leave it out, "
                "or convert that in another variant."
            )
