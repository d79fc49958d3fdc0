"""A trained rotary model as MLA of several widths: rehead's targets beside published conversions, without healing.

    python benchmarks/latents.py MODEL out/latents --fit help.txt self --test help2.txt other.txt

Losses in nats per token on each test text, over the source's. Of the published conversions every split of the cache is
tried on the first window of each test text, and the best one is measured on all, which favours them. What is done is
kept in out/latents/results.json, so that an interrupted run resumes; the table is beside it.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from published import mha2mla, transmla

import rehead
from rehead.attention import GroupedConfig
from rehead.config import GPTConfig
from rehead.conversion.blocks import CALIBRATION_TOKENS
from rehead.conversion.converter import Converter
from rehead.conversion.page import markdown
from rehead.conversion.sampled import sampled_once
from rehead.conversion.target import Kind, Target
from rehead.conversion.texts import SELF, Passage
from rehead.measure import evaluate_text
from rehead.model import LanguageModel
from rehead.tokenizer import open_model

Made = Callable[[], LanguageModel]


def ours(converter: Converter, target: Kind, method: str, share: float) -> LanguageModel:
    """Return the model converted by rehead."""
    converter.method = method
    result, _ = converter.follow(converter.attentions(Target(to="mla", target=target, kv_fraction=share)))
    return result


def theirs(converter: Converter, rope_dim: int, rank: int, fold: int | None = None) -> LanguageModel:
    """Return the model converted by TransMLA, or without a `fold` by MHA2MLA."""
    seen = converter.statistics(["inputs"])
    if fold is None:
        return mha2mla(converter.model, seen, rope_dim, rank)
    return transmla(converter.model, seen, rope_dim, rank, fold)


def splits(source: GroupedConfig, share: float) -> Iterator[tuple[str, int, int, int]]:
    """Yield kind, rotary width, rank and fold of every published conversion of this cache."""
    numbers = int(share * source.kv_numbers())
    for rope_dim in (source.head_dim // 4, source.head_dim // 2, source.head_dim):
        step = source.head_dim // rope_dim
        folds = [step * 2**k for k in range(4) if step * 2**k <= source.head_dim // 2]
        for fold in folds if rope_dim < numbers else []:
            yield "TransMLA", rope_dim, numbers - rope_dim, fold
    for rope_dim in range(8, source.head_dim, 8):
        if source.n_kv_head * rope_dim < numbers:
            yield "MHA2MLA", rope_dim, numbers - source.n_kv_head * rope_dim, 0


def arms(converter: Converter, source: GroupedConfig, share: float) -> Iterator[tuple[str, str, Made]]:
    """Yield kind, details and a function that makes the model."""
    yield "SVD of the weights, keys rebuilt", "", partial(ours, converter, "rebuilt", "svd", share)
    for kind, rope_dim, rank, fold in splits(source, share):
        if kind == "TransMLA":
            yield kind, f"{rank} + {rope_dim}, fold {fold}", partial(theirs, converter, rope_dim, rank, fold)
        else:
            yield (
                kind,
                f"{rank} + {source.n_kv_head} x {rope_dim}",
                partial(theirs, converter, rope_dim, rank),
            )
    yield "rehead, uneven", "", partial(ours, converter, "uneven", "weighted", share)
    yield "rehead, rebuilt", "", partial(ours, converter, "rebuilt", "weighted", share)


def main() -> None:
    """Convert, measure and write a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--fit", nargs="+", required=True, help="texts, or self")
    parser.add_argument("--test", nargs="+", required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.375, 0.25])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=6, help="read of each test text, at most")
    parser.add_argument(
        "--tokens", type=int, default=CALIBRATION_TOKENS, help="of all texts to fit to together"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "results.json"
    done = json.loads(file.read_text()) if file.exists() else {}
    opened = open_model(given.model, dtype=torch.float32)
    model, tokenizer = opened.model, opened.require_tokenizer()
    assert isinstance(model.config, GPTConfig)
    source = model.config.attention[0]
    assert isinstance(source, GroupedConfig)
    share_of_each = given.tokens // len(given.fit)

    def text(name: str, most: int) -> np.ndarray:
        return np.asarray(tokenizer.encode(Path(name).read_text(encoding="utf-8")))[:most]

    fit = [
        sampled_once(model, share_of_each, given.length, 0)
        if name == SELF
        else Passage(name=name, ids=text(name, share_of_each + 1))
        for name in given.fit
    ]
    tests = {name: text(name, given.windows * given.length + 1) for name in given.test}

    def measured(one: LanguageModel, windows: int) -> list[float]:
        most = windows * given.length + 1
        return [evaluate_text(one, ids[:most], length=given.length).loss for ids in tests.values()]

    def result(key: str, make: Made, windows: int = given.windows) -> list[float]:
        key = f"{key}, {windows} windows"
        if key not in done:
            done[key] = measured(make(), windows)
            file.write_text(json.dumps(done, indent=1))
            print(key, [round(loss, 4) for loss in done[key]], flush=True)
        return done[key]

    base = result("source", lambda: model)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        converter = Converter(model, None, fit, length=given.length, scratch=Path(scratch))
        for share in given.shares:
            candidates: dict[str, list[tuple[str, Made]]] = {}
            for kind, details, make in arms(converter, source, share):
                candidates.setdefault(kind, []).append((details, make))
            for kind, several in candidates.items():
                tried = {
                    details: sum(result(f"{share} {kind} {details}", make, 1))
                    for details, make in (several if len(several) > 1 else [])
                }
                details, make = min(several, key=lambda one: tried.get(one[0], 0.0))
                losses = result(f"{share} {kind} {details}".strip(), make)
                over = [loss - before for loss, before in zip(losses, base, strict=True)]
                rows.append([f"{share:.1%}", kind, details, *(f"{x:+.3f}" for x in over)])
    table = markdown(["cache", "conversion", "split", *(Path(name).stem for name in tests)], rows)
    (given.out / "table.md").write_text(f"Source: {base}\n\n{table}\n\nrehead {rehead.__version__}\n")
    print(table)


if __name__ == "__main__":
    main()
