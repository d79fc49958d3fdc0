"""One model of a study: how it is made, from what, and where."""

import json
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
TARGET_OPTIONS = {field.name for field in fields(Target)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model of a study: how it is made, and where.

    `variant` is what it is called in the report: `of`, the preset's name for it, and `choice`, what it and
    its parents took of lists, in words. `about` is what the preset says of it. `options` train it or, where
    it is not trained, say on what it is measured. `parent` is what it starts from. `convert` and `export`
    are options of those commands.
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
        if self.kind == "given":
            return Path(str(self.options.model.folder))
        return self.folder if self.is_trained else self.folder / "model"

    @property
    def is_trained(self) -> bool:
        """Whether it is a run."""
        return self.kind in ("trained", "healed")

    @property
    def steps_before(self) -> int:
        """Optimizer steps its weights have behind them when it begins."""
        parent = self.parent
        if parent is None:
            return 0
        return parent.steps_before + (parent.options.trainer.max_iters if parent.is_trained else 0)

    @property
    def length(self) -> int:
        """Tokens of the blocks it is trained and measured on."""
        return self.options.data.block_size

    @property
    def lengths(self) -> list[int]:
        """Block sizes its loss is measured at: its own, and the shorter ones it grew from."""
        before = [] if self.parent is None else self.parent.lengths
        return sorted({self.length, *(length for length in before if length < self.length)})

    @property
    def follows_flags(self) -> bool:
        """Whether flags describe its model; any other is what its folder says."""
        return self.kind == "trained" and (self.parent is None or self.parent.follows_flags)

    @property
    def target(self) -> Target:
        """What a conversion is to give."""
        return Target(**{key: value for key, value in (self.convert or {}).items() if key in TARGET_OPTIONS})

    @property
    def reading(self) -> dict[str, Any]:
        """How and on which texts it is converted: options of `rehead convert` beyond the target.

        In the name of a text, `{source}` is the folder of the model all began with. A source that is not a
        run names no text of its own; it is fitted to the study's text, of which the last tenth is held out.
        """
        told = {key: value for key, value in (self.convert or {}).items() if key not in TARGET_OPTIONS}
        root = self
        while root.parent is not None:
            root = root.parent
        if isinstance(told.get("calibration"), str):
            told["calibration"] = [told["calibration"]]
        if "calibration" in told:
            told["calibration"] = [text.replace(SOURCE, str(root.model)) for text in told["calibration"]]
        if "test" in told:
            told["test"] = told["test"].replace(SOURCE, str(root.model))
        own = root.is_trained or is_run(root.model)
        if not own and not {"calibration", "test"} & set(told):
            data = self.options.data
            told["calibration"] = [data.path or data.name or EMBEDDED]
        return told

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
        told: dict[str, Any] = {"options": table, "convert": self.convert, "heal": self.kind == "healed"}
        if self.export is not None:
            told["export"] = self.export
        if self.kind == "given":
            told["source"] = _stamp(checkpoint.resolve(self.model))
        return told | {"from": None if self.parent is None else self.parent.description()}

    def command(self) -> str:
        """The command that makes it by itself, once its parent is there; of a given model, what shows its cost."""
        if self.kind == "given":
            return shlex.join(["rehead", "plan", str(self.model)])
        if self.parent is not None and self.kind == "exported":
            words = ["rehead", "export", str(self.parent.model), str(self.model)]
            return shlex.join([*words, *_flags(self.export or {})])
        if self.parent is not None and self.kind == "converted":
            words = ["rehead", "convert", str(self.parent.model), str(self.model), "--allow-loss"]
            target = {key: value for key, value in (self.convert or {}).items() if key in TARGET_OPTIONS}
            return shlex.join([*words, *_flags(target | self.reading | {"seed": self.seed})])
        default, table = asdict(RunOptions()), asdict(self.options)
        table["trainer"]["resume"] = default["trainer"]["resume"]
        words = ["rehead", "train"]
        if self.kind == "healed" and self.parent is not None and self.parent.parent is not None:
            teacher = self.parent.parent.model
            words = ["rehead", "heal", str(self.parent.model), f"--teacher={teacher}"]
            default["trainer"] |= DEFAULTS
            default["data"]["block_size"] = None  # the model's own, unless told
            del table["model"]["folder"], table["trainer"]["teacher"]
            if not is_run(teacher) and not self.parent.parent.is_trained:
                table["data"]["name"] = self.options.data.name or (
                    None if self.options.data.path else EMBEDDED
                )
        told = [
            f"{group}.{key}={written(value)}"
            for group, keys in table.items()
            for key, value in keys.items()
            if value != default[group][key]
        ]
        return shlex.join([*words, *told])


def one_source(jobs: Sequence[Job]) -> Job | None:
    """The first model of the variant that all others were converted, healed or exported from.

    None where there is no such variant, as where several were trained: then variants are compared, and not
    what became of one model.
    """
    first = jobs[0]
    made = [job for job in jobs if job.variant != first.variant]
    alone = all(job.parent is not None and job.kind != "trained" for job in made)
    return first if made and alone and first.parent is None else None


def written(value: Any) -> str:
    """A value as a flag has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _flags(told: Flags) -> list[str]:
    """Options of a command as typed; a list is an option given several times."""
    return [
        f"--{key.replace('_', '-')}={one}"
        for key, value in told.items()
        for one in (value if isinstance(value, list) else [value])
    ]


def _stamp(folder: Path) -> dict[str, Any]:
    """What tells a model folder from another, or from itself after it was written again."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    return {
        "folder": str(folder.resolve()),
        "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
    }
