"""One model of a study: how it is made, from what, and where."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rehead.config import RunOptions
from rehead.conversion import Wish
from rehead.study.preset import Flags


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
            f"{group}.{key}={written(value)}"
            for group, keys in table.items()
            for key, value in keys.items()
            if value != default[group][key]
        ]
        return shlex.join(["rehead", "train", *told])


def written(value: Any) -> str:
    """A value as a flag has it."""
    return value if isinstance(value, str) else json.dumps(value)
