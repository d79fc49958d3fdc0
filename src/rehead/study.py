"""Several variants of one run, trained, measured alike and set side by side."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from rehead import checkpoint
from rehead.config import RunOptions, flags
from rehead.data.files import write_whole
from rehead.errors import ConfigError, InvalidInput
from rehead.generation import stream
from rehead.measure import cache_bytes, decode_speed, kv_bytes_per_token, parameters
from rehead.measure.environment import environment
from rehead.measure.memory import held_cache_bytes
from rehead.model import LanguageModel
from rehead.registry import nearest
from rehead.tokenizer import Tokenizer
from rehead.training import train

Record = dict[str, Any]
Watch = Callable[[Iterable[Record], int, str], Iterable[Record]]
FORM = {"about": str, "run": dict, "variants": dict, "prompt": str, "new_tokens": int}
"""What a preset file holds."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a study trains: a common run, and by name what each variant changes in it."""

    name: str
    about: str
    run: Record
    variants: dict[str, Record]
    prompt: str
    new_tokens: int

    @classmethod
    def read(cls, name: str) -> "Preset":
        """A preset that comes with rehead, by name, or a YAML file of the same form."""
        shipped = {entry.name.removesuffix(".yaml"): entry for entry in files("rehead.presets").iterdir()}
        shipped = {key: entry for key, entry in shipped.items() if entry.name.endswith(".yaml")}
        file = shipped.get(name, Path(name))
        if not file.is_file():
            raise InvalidInput(f"no preset and no file {name!r}.{nearest(name, sorted(shipped))}")
        try:
            table = flags.parse(file.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError) as error:
            raise InvalidInput(f"{name} is no preset: {' '.join(str(error).split()):.200}") from error
        if not isinstance(table, dict) or table.keys() != FORM.keys():
            held = ", ".join(map(str, table)) if isinstance(table, dict) else type(table).__name__
            raise InvalidInput(f"{name} is no preset: it holds {held:.100}. Write {', '.join(FORM)}.")
        for key, kind in FORM.items():
            if type(table[key]) is not kind or table[key] == {}:
                raise InvalidInput(f"{name}: {key}={table[key]!r:.80}: expected {kind.__name__}.")
        table["variants"] = {str(variant): changes or {} for variant, changes in table["variants"].items()}
        return cls(name=Path(name).stem, **table)

    def work_dir(self, changes: list[str]) -> Path:
        """Where all of it goes: the user's system.work_dir, or runs/NAME."""
        place = {"system": {"work_dir": f"runs/{self.name}"}}
        return Path(flags.read(changes, tables=(place, self.run)).system.work_dir)

    def options(self, variant: str, changes: list[str]) -> RunOptions:
        """The run of one variant, with the user's flags on top, in a folder of its own."""
        resume = {"trainer": {"resume": True}}
        options = flags.read(changes, tables=(resume, self.run, self.variants[variant]))
        folder = self.work_dir(changes) / variant.lower().replace(" ", "-")
        return replace(options, system=replace(options.system, work_dir=str(folder)))


def study(preset: Preset, changes: list[str], watch: Watch) -> Record:
    """Train every variant (those that are done are not trained again), measure it; write results.json.

    `watch` is given each variant's records to show. Returns what results.json holds. Whatever is
    wrong with the options of any variant is raised before the first is trained.
    """
    runs = {variant: preset.options(variant, changes) for variant in preset.variants}
    for variant, options in runs.items():
        try:
            options.model.resolve(options.data.vocab_size or 256, options.data.block_size)
        except ConfigError as error:
            raise ConfigError(f"{variant}: {error}") from error
        if not options.data.val_fraction:
            raise ConfigError("data.val_fraction=0 leaves a study no loss to compare. Use 0.1.")
    results = []
    for variant, options in runs.items():
        for _ in watch(train(options), options.trainer.max_iters, variant):
            pass
        results.append({"variant": variant, **measure(Path(options.system.work_dir), preset)})
    document = {
        "study": preset.name,
        "about": " ".join(preset.about.split()),
        "command": shlex.join(["rehead", "study", "--preset", preset.name, *changes]),
        "environment": environment(),
        "variants": results,
    }
    text = json.dumps(document, indent=1, ensure_ascii=False)
    write_whole(preset.work_dir(changes) / "results.json", [text.encode()])
    return document


def measure(run: Path, preset: Preset) -> Record:
    """Everything the table shows of one trained variant, read from its run folder or measured on it."""
    lines = list(_metrics(run))
    folder = checkpoint.resolve(run)
    model, tokenizer = checkpoint.load(folder), Tokenizer.load(folder)
    n_token = model.config.block_size
    step_seconds = sorted(line["seconds"] for line in lines if "seconds" in line)
    return {
        "val_loss": lines[-1]["val_loss"],
        "train_loss": lines[-1]["train_loss"],
        "curve": [
            [line["step"], line["val_loss"]] for line in lines if "val_loss" in line and "event" not in line
        ],
        "text_sha256": lines[0]["text_sha256"],
        "parameters": parameters(model.config),
        "kv_bytes_per_token": kv_bytes_per_token(model.config),
        "context": n_token,
        "cache_bytes_predicted": cache_bytes(model.config, n_token),
        "cache_bytes_held": held_cache_bytes(model, n_token),
        "seconds_per_step_median": step_seconds[len(step_seconds) // 2] if step_seconds else None,
        "tokens_per_second_cached": decode_speed(model, n_token - 1, use_cache=True),
        "tokens_per_second_uncached": decode_speed(model, n_token - 1, use_cache=False),
        "sample": _sample(model, tokenizer, preset),
    }


def _metrics(run: Path) -> Iterator[Record]:
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _sample(model: LanguageModel, tokenizer: Tokenizer, preset: Preset) -> str:
    prompt = torch.from_numpy(tokenizer.encode(preset.prompt))
    tokens = stream(model, [prompt], preset.new_tokens, 0.8, seed=0)
    return preset.prompt + "".join(tokenizer.stream(int(token) for token in tokens))
