"""A job of a study: one model, how it is made, and where."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rehead import checkpoint
from rehead.checkpoint.find import is_run
from rehead.config import RunOptions
from rehead.conversion import Target
from rehead.data.text import EMBEDDED
from rehead.study.preset import Flags, Kind
from rehead.training.heal import DEFAULTS

SOURCE = "{source}"
LONGEST, BEGINNING = 255, 100
"""Bytes of a folder's name, at most, and what is left of a longer one."""
TARGET_OPTIONS = {field.name for field in fields(Target)}
FITTING_OPTIONS = {"measured_ranks", "teach"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model of a study: how it is made, and where.

    `variant` is its name in the report. It joins `of`, its name in the preset, and `choice`, the entries of lists
    chosen for it and its parents, in words. `about` is the preset's description. `options` train the model; if it
    is not trained, they give the text it is measured on. `parent` is the job it starts from. `convert` and
    `export` are options of those commands.
    """

    variant: str
    of: str
    choice: str = ""
    flags: Flags
    options: RunOptions
    kind: Kind = "trained"
    about: str = ""
    parent: "Job | None" = None
    convert: Flags | None = None
    export: Flags | None = None

    @property
    def seed(self) -> int:
        """Return the seed of batches and fresh weights."""
        return self.options.system.seed

    @property
    def folder(self) -> Path:
        """Return the folder of the model and its measurements."""
        return Path(self.options.system.work_dir)

    @property
    def place(self) -> Path:
        """Return the folder of the whole study."""
        return self.folder.parents[1]

    @property
    def model(self) -> Path:
        """Return the path that other commands take to load the model."""
        if self.kind == "given":
            return Path(str(self.options.model.folder))
        return self.folder if self.is_trained else self.folder / "model"

    @property
    def is_trained(self) -> bool:
        """Return True if it is a run of `rehead train` or `rehead heal`."""
        return self.kind in ("trained", "healed")

    @property
    def steps_before(self) -> int:
        """Return the optimizer steps of its weights before it begins."""
        parent = self.parent
        if parent is None:
            return 0
        return parent.steps_before + (parent.options.trainer.max_iters if parent.is_trained else 0)

    @property
    def length(self) -> int:
        """Return the block size it is trained and measured with."""
        return self.options.data.block_size

    @property
    def lengths(self) -> list[int]:
        """Return the block sizes its loss is measured at: its own, and shorter ones of its parents."""
        before = [] if self.parent is None else self.parent.lengths
        return sorted({self.length, *(length for length in before if length < self.length)})

    @property
    def follows_flags(self) -> bool:
        """Return True if flags describe the model; otherwise its folder does."""
        return self.kind == "trained" and self.options.model.folder is None

    @property
    def target(self) -> Target:
        """Return the target of a conversion."""
        return Target(**self._converted(TARGET_OPTIONS))

    @property
    def fitting(self) -> dict[str, Any]:
        """Return what a conversion does with its text besides: ranks measured, attentions taught."""
        return self._converted(FITTING_OPTIONS)

    def _converted(self, options: set[str]) -> dict[str, Any]:
        return {key: value for key, value in (self.convert or {}).items() if key in options}

    @property
    def reading(self) -> dict[str, Any]:
        """Return the method and texts of a conversion, as `rehead convert` takes them.

        In the name of a text, `{source}` is the folder of the model at the root. A model that is not a run has no
        text of its own; its conversion is fitted to the study's text, of which the last tenth is held out.
        """
        options = self._converted({"method", "calibration", "test", "length"})
        root = self
        while root.parent is not None:
            root = root.parent
        if isinstance(options.get("calibration"), str):
            options["calibration"] = [options["calibration"]]
        if "calibration" in options:
            options["calibration"] = [
                os.path.expanduser(text.replace(SOURCE, str(root.model))) for text in options["calibration"]
            ]
        if "test" in options:
            options["test"] = os.path.expanduser(options["test"].replace(SOURCE, str(root.model)))
        own = self.parent is not None and (self.parent.is_trained or is_run(self.parent.model))
        if not own and not {"calibration", "test"} & set(options):
            data = self.options.data
            options["calibration"] = [data.path or data.name or EMBEDDED]
        return options

    def description(self) -> dict[str, Any]:
        """Return all that determines the model, without paths of the study; equal descriptions give equal models."""
        table = asdict(self.options)
        del table["system"]["work_dir"], table["trainer"]["resume"]
        stamps: dict[str, Any] = {}
        for group, key, of_study in (
            ("model", "pretrained_folder", self.parent is not None),
            ("model", "folder", self.parent is not None or self.kind == "given"),
            ("trainer", "teacher", self.kind == "healed"),
        ):
            place = table[group].pop(key)
            if place is not None and not of_study:
                table[group][key] = str(Path(place).resolve()) if Path(place).exists() else place
                if Path(place).is_dir():
                    stamps[f"{group}.{key}"] = _stamp(checkpoint.resolve(Path(place)))
        described: dict[str, Any] = {"options": table, "convert": self.convert, "heal": self.kind == "healed"}
        if stamps:
            described["stamps"] = stamps
        if self.export is not None:
            described["export"] = self.export
        if self.kind == "given":
            described["source"] = _stamp(checkpoint.resolve(self.model))
        return described | {"from": None if self.parent is None else self.parent.description()}

    def command(self) -> str:
        """Return the command that makes the model once its parent exists; for a given model, `rehead plan`."""
        if self.kind == "given":
            return shlex.join(["rehead", "plan", str(self.model)])
        if self.parent is not None and self.kind == "exported":
            words = ["rehead", "export", str(self.parent.model), str(self.model)]
            return shlex.join([*words, *_flags(self.export or {})])
        if self.parent is not None and self.kind == "converted":
            words = ["rehead", "convert", str(self.parent.model), str(self.model), "--allow-loss"]
            options = self._converted(TARGET_OPTIONS) | self.reading | self.fitting | {"seed": self.seed}
            return shlex.join([*words, *_flags(options)])
        default, table = asdict(RunOptions()), asdict(self.options)
        table["trainer"]["resume"] = default["trainer"]["resume"]
        words = ["rehead", "train"]
        if self.kind == "healed" and self.parent is not None and self.parent.parent is not None:
            teacher = self.parent.parent.model
            words = ["rehead", "heal", str(self.parent.model), f"--teacher={teacher}"]
            default["trainer"] |= DEFAULTS
            default["data"]["block_size"] = None  # the model's own, unless given
            default["trainer"]["batch_size"] = None  # follows from it
            del table["model"]["folder"], table["trainer"]["teacher"]
            if not self.parent.parent.is_trained:
                table["data"]["name"] = self.options.data.name or (
                    None if self.options.data.path else EMBEDDED
                )
        unused = self.options.unused()  # shared with other variants, and refused alone
        changed = [
            f"{group}.{key}={written(value)}"
            for group, keys in table.items()
            for key, value in keys.items()
            if value != default[group][key] and f"{group}.{key}" not in unused
        ]
        return shlex.join([*words, *changed])


def one_source(jobs: Sequence[Job]) -> Job | None:
    """Return the first job if all other variants were made from its variant, one or more of them by a conversion.

    Returns None otherwise, for example if several variants were trained: the report then compares variants
    instead of showing what became of one model.
    """
    first = jobs[0]
    others = [job for job in jobs if job.variant != first.variant]
    derived = all(job.parent is not None and job.kind != "trained" for job in others)
    converted = any(job.convert is not None for job in others)
    return first if derived and converted and first.parent is None else None


def firsts(jobs: Sequence[Job]) -> list[Job]:
    """Return the first job of every variant that is compared, which exports are not."""
    compared = [job for job in jobs if job.export is None]
    return list({job.variant: job for job in reversed(compared)}.values())[::-1]


def folder_of(place: Path, title: str, seed: int) -> Path:
    """Return the folder of a job in that of its study."""
    return place / _named(title) / f"seed-{seed}"


def _named(title: str) -> str:
    """Return a title as the name of a folder; of a long one its beginning, and what tells it from others."""
    name = re.sub(r"[^\w.=]+", "-", title.lower()).strip("-.") or "variant"
    whole = name.encode()
    if len(whole) <= LONGEST:
        return name
    return f"{whole[:BEGINNING].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:8]}"


def written(value: Any) -> str:
    """Return a value as it is written in a flag."""
    return value if isinstance(value, str) else json.dumps(value)


def _flags(options: Flags) -> list[str]:
    """Return options of a command as typed; a list repeats its option, and True is the option alone."""
    return [
        f"--{key.replace('_', '-')}" + f"={each}" * (each is not True)
        for key, value in options.items()
        for each in (value if isinstance(value, list) else [value])
        if each is not False
    ]


def _stamp(folder: Path) -> dict[str, Any]:
    """Return a stamp that identifies a model folder and changes when its model is written again."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and _of_model(file.name)]
    return {
        "folder": str(folder.resolve()),
        "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
    }


def _of_model(name: str) -> bool:
    """Return True for a file that may be part of a model, as no text about it and no hidden file is."""
    return not name.startswith(".") and not name.lower().endswith(".md")


def same_source(one: Any, other: Any) -> bool:
    """Compare two stamps of a description; older ones have all files of a folder."""
    return _counted(one) == _counted(other)


def _counted(stamp: Any) -> Any:
    if stamp is None:
        return None
    return stamp["folder"], {name: when for name, when in stamp["files"].items() if _of_model(name)}
