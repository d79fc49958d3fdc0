"""Healing as `rehead heal` does it, for models of any conversion, and the control: the source, trained alike."""

import subprocess
import sys
import tempfile
from pathlib import Path

import rehead
from rehead.model import LanguageModel
from rehead.tokenizer import Tokenizer
from rehead.training.heal import DEFAULTS


def healed(
    model: LanguageModel, tokenizer: Tokenizer, teacher: str, text: Path, steps: int, flags: list[str]
) -> LanguageModel:
    """Return `model` after `steps` of learning the teacher's predictions on `text`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "converted"
        rehead.save(model, folder, files={"tokenizer.json": tokenizer.to_json()})
        return _run(["heal", str(folder), "--teacher", teacher], Path(place), text, steps, flags)


def control(source: str, text: Path, steps: int, flags: list[str]) -> LanguageModel:
    """Return the source after as many steps on the same text, with the same options, but no teacher."""
    usual = [f"trainer.{name}={value}" for name, value in DEFAULTS.items() if name != "max_iters"]
    command = ["train", f"model.folder={source}", *usual]
    with tempfile.TemporaryDirectory() as place:
        return _run(command, Path(place), text, steps, flags)


def _run(command: list[str], place: Path, text: Path, steps: int, flags: list[str]) -> LanguageModel:
    out = place / "healed"
    more = [f"data.path={text}", f"system.work_dir={out}", f"trainer.max_iters={steps}"]
    subprocess.run([sys.executable, "-m", "rehead", *command, *more, *flags], check=True, capture_output=True)
    return rehead.load(out)
