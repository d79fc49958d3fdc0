"""A preset and a user's flags as the list of jobs they mean, each one run of one variant."""

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rehead.config import GPTConfig, ModelConfig, RunOptions, flags
from rehead.conversion import Wish, methods
from rehead.errors import ConfigError
from rehead.study.preset import Flags, Preset, Variant
from rehead.training.heal import DEFAULTS

SEED, PLACE = "system.seed", "system.work_dir"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model of a study: how it is made, and where.

    `variant` is what it is called in the report, `of` the preset's name for it. `options` train it or,
    where it is converted, say on what it is measured. `parent` is what it starts from.
    """

    variant: str
    of: str
    flags: Flags
    options: RunOptions
    parent: "Job | None" = None
    convert: Flags | None = None
    heal: bool = False

    @property
    def seed(self) -> int:
        """What its batches and fresh weights are drawn from."""
        return self.options.system.seed

    @property
    def folder(self) -> Path:
        """Where its model and all that is measured on it lie."""
        return Path(self.options.system.work_dir)

    @property
    def place(self) -> Path:
        """The folder of the whole study."""
        return self.folder.parents[1]

    @property
    def model(self) -> Path:
        """What other commands take to read it."""
        return self.folder if self.convert is None else self.folder / "model"

    @property
    def kind(self) -> str:
        """How it came about, in a word."""
        if self.convert is not None:
            return "converted"
        return "healed" if self.heal else "trained"

    @property
    def steps_before(self) -> int:
        """Optimizer steps its weights have behind them when it begins."""
        parent = self.parent
        if parent is None:
            return 0
        return parent.steps_before + (parent.options.trainer.max_iters if parent.convert is None else 0)

    @property
    def follows_flags(self) -> bool:
        """Whether flags describe its model; what was once converted is what its folder says."""
        return self.convert is None and not self.heal and (self.parent is None or self.parent.follows_flags)

    @property
    def wish(self) -> Wish:
        """What a conversion is to give."""
        return Wish(**{key: value for key, value in (self.convert or {}).items() if key != "method"})

    def description(self) -> dict[str, Any]:
        """All that decides what comes out, without the places; equal descriptions give equal models."""
        table = asdict(self.options)
        for group, key in (
            ("system", "work_dir"),
            ("model", "pretrained_folder"),
            ("model", "folder"),
            ("trainer", "teacher"),
            ("trainer", "resume"),
        ):
            del table[group][key]
        parent = None if self.parent is None else self.parent.description()
        return {"options": table, "convert": self.convert, "heal": self.heal, "from": parent}

    def command(self) -> str:
        """The command that makes it by itself, once its parent is there."""
        if self.convert is not None and self.parent is not None:
            words = ["convert", str(self.parent.model), str(self.model), "--allow-loss"]
            words += [f"--{key.replace('_', '-')}={value}" for key, value in self.convert.items()]
            return shlex.join(["rehead", *words])
        default, table = asdict(RunOptions()), asdict(self.options)
        table["trainer"]["resume"] = default["trainer"]["resume"]
        told = [
            f"{group}.{key}={_written(value)}"
            for group, keys in table.items()
            for key, value in keys.items()
            if value != default[group][key]
        ]
        return shlex.join(["rehead", "train", *told])


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
    seeds = run[SEED] if isinstance(run[SEED], list) else [run[SEED]]
    grid = _Grid(preset, told, Path(str(run[PLACE])), fraction)
    found = [job for seed in seeds for job in grid.jobs({**run, SEED: seed})]
    folders = [job.folder for job in found]
    for job in found:
        if folders.count(job.folder) > 1:
            raise ConfigError(f"{job.variant!r} and another would both go to {job.folder}: name them apart.")
    return found


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
        inherited = "" if parent is None else parent.variant.removeprefix(parent.of).removeprefix(", ")
        title = ", ".join(filter(None, (name, inherited, label)))
        if not title:
            raise ConfigError(
                "one variant is no study: give a key several values, like model.n_kv_head=[1,2,3]."
            )
        made = chosen | {
            PLACE: str(self.place / _folder(title) / f"seed-{chosen[SEED]}"),
            "trainer.resume": True,
        }
        if parent is not None and parent.follows_flags and not variant.heal:
            made["model.pretrained_folder"] = str(parent.model)
        elif parent is not None:
            made = {key: value for key, value in made.items() if not key.startswith("model.")}
            made["model.folder"] = str(parent.model)
        if variant.heal:
            if parent is None or parent.convert is None or parent.parent is None:
                raise ConfigError(f"{title}: only a conversion is healed, by the model it was made of.")
            made["trainer.teacher"] = str(parent.parent.model)
        if variant.convert is not None:
            made.pop("model.pretrained_folder", None)
        try:
            job = Job(
                variant=title,
                of=name,
                flags=chosen,
                options=self._options(made),
                parent=parent,
                convert=variant.convert,
                heal=variant.heal,
            )
            _check(job)
        except ConfigError as error:
            raise ConfigError(f"{title}: {error}") from error
        return job

    def _options(self, made: Flags) -> RunOptions:
        """The flags as options, those of the user named as they were given."""
        told = [
            f"{key}={_written(value)}" for key, value in made.items() if key in self.told and key != PLACE
        ]
        table: dict[str, dict[str, Any]] = {}
        for key, value in made.items():
            if key not in self.told or key == PLACE:
                group, _, rest = key.partition(".")
                table.setdefault(group, {})[rest] = value
        options = flags.read(told, tables=(table,))
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
        label = ", ".join(f"{key.partition('.')[2]}={_written(value)}" for key, value in chosen.items())
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
        config = _config(job.parent)
        if isinstance(config, GPTConfig):
            for layer in config.attention:
                job.wish.target(layer, config.n_embd)
    elif job.follows_flags:
        _config(job)


def _config(job: Job | None) -> ModelConfig | None:
    """The model that flags describe; its vocabulary is the text's, which is not read here."""
    if job is None or not job.follows_flags:
        return None
    data = job.options.data
    return job.options.model.resolve(data.vocab_size or 256, data.block_size)


def _folder(title: str) -> str:
    """A title as the name of a folder."""
    return re.sub(r"[^\w.=]+", "-", title.lower()).strip("-.") or "variant"


def _written(value: Any) -> str:
    """A value as a flag has it."""
    return value if isinstance(value, str) else json.dumps(value)
