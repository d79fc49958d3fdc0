"""Every field of the config.json of every family and variant, with extreme values one at a time.

`python extremes.py 40` reads every fortieth and prints as JSON how many those were, and what was wrong (see fuzz.py).
A config is read as `load` does, beside weights of the good one, and as `plan` does.
"""

import copy
import json
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from corpus import CONFIG, LATENT, LLAMA  # beside this file
from families_corpus import GOOD, SMALL, config
from fuzz import typed, wrong

import rehead
from rehead.attention import variants
from rehead.checkpoint import families, own, read_config
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.base import Fields
from rehead.config import GPTConfig, ModelOptions, encode
from rehead.model import build

VALUES = (
    "0", "-1", "1", "2147483648", "9223372036854775808", "1e400", '"8"', "true", "null", "2.5", "NaN", "[]", "{}",
    "10000000", "1000000000", "1e-320", "1e308",
)  # fmt: skip
"""As they are written in JSON."""
HERE = "the value goes here"
MARK = json.dumps(HERE)
LENGTH = {"factor": 2.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": LENGTH | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": LENGTH
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5},
    "longrope": {"short_factor": [1.0] * 3, "long_factor": [1.0] * 3, "attention_factor": 1.0},
}


class Noted(Fields):
    """Notes the keys that are asked for."""

    asked: set[str]

    def look(self, name: str, *given: Any, **more: Any) -> Any:
        self.__dict__.setdefault("asked", set()).add(name)
        return super().look(name, *given, **more)

    def expect(self, name: str, *allowed: Any) -> Any:
        self.__dict__.setdefault("asked", set()).add(name)
        return super().expect(name, *allowed)


def stock_table(kind: str) -> dict[str, Any]:
    """A good config.json of a family, with every key that it writes or asks for; null stands for a missing one."""
    if kind == "gpt2":
        table = {
            "model_type": kind,
            "vocab_size": 11,
            "n_positions": 16,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
        }
    elif kind in ("minicpm3", "youtu"):
        table = {"model_type": kind, **SMALL, **LATENT, "num_key_value_heads": 4}
    else:
        table = config(kind) if kind in GOOD else CONFIG | {"model_type": kind}
    fields = Noted(table, "config.json")
    table = table | families[kind].write(families[kind].read(fields))
    return table | dict.fromkeys(fields.asked - table.keys())


def tables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Good configs by name; a key whose value is null may not accept null."""
    for kind in families:
        yield kind, stock_table(kind)
    for kind, keys in ROPES.items():
        yield f"llama {kind}", CONFIG | {"rope_theta": 500.0, "rope_scaling": {"rope_type": kind, **keys}}
    llama = LLAMA.resolve(11, 16)
    assert isinstance(llama, GPTConfig)
    seen = set()
    for kind in variants:
        for name, attention in variants[kind].examples().items():
            table = native(replace(llama, n_embd=60, attention=(attention,) * 2))
            if (keys := tuple(places(table))) not in seen:
                seen.add(keys)
                yield f"native {name}", table
    yield "native experts", native(stock.read_config(config("deepseek_v3"), "config.json"))
    yield "native rnn", native(ModelOptions(type="rnn", n_embd=8).resolve(11, 16))


def native(made: Any) -> dict[str, Any]:
    return {"format": "rehead-1", **encode(made), "dtype": "float32"}


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON value, of a list only the first one's."""
    keys = value if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else ()
    for key in keys:
        yield (key,)
        yield from ((key, *path) for path in places(value[key]))


def put(table: dict[str, Any], path: tuple[Any, ...], text: str) -> str:
    """The JSON of a table with `text` at `path`."""
    table = copy.deepcopy(table)
    inner: Any = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = HERE
    return json.dumps(table).replace(MARK, text)


def cases() -> Iterator[tuple[str, str, str]]:
    """Base, name and text of every config with one extreme value."""
    for base, table in tables():
        for path in places(table):
            for text in VALUES:
                yield base, f"{base} {'.'.join(map(str, path))}={text}", put(table, path, text)


def write_weights(folder: Path, table: dict[str, Any]) -> None:
    """Write weights that fit a good config."""
    given = {name: value for name, value in table.items() if value is not None or "format" in table}
    (folder / "config.json").write_text(json.dumps(given))
    torch.manual_seed(0)
    model = build(read_config(folder)).float()
    if "format" in table:
        own.write(model, folder, {})
    else:
        stock.write(model, folder, families[table["model_type"]], {})


def load(folder: Path) -> None:
    rehead.load(folder)


def plan(folder: Path) -> None:
    typed("plan", str(folder), "--json")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    warnings.simplefilter("ignore")
    chosen = list(cases())[:: int(sys.argv[1])]
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        for base, table in tables():
            Path(place, base).mkdir()
            write_weights(Path(place, base), table)
        load(Path(place, "llama"))  # imports take their time
        plan(Path(place, "llama"))
        for base, name, text in chosen:
            folder = Path(place, base)
            (folder / "config.json").write_text(text)
            Path("input").write_text(f"{name}\n{text}")
            for read in (load, plan):
                fault = wrong(read, folder)
                if fault:
                    faults[f"{read.__name__}: {name}"] = fault
    print(json.dumps({"inputs": len(chosen), "wrong": faults}, indent=1))
