"""A trained rotary model as MLA of several widths: rehead's targets beside published conversions, also healed.

    python benchmarks/latents.py MODEL out/latents --fit help.txt self --test help2.txt other.txt --heal 50 200

Losses in nats per token on each test text, over the source's. Of the published conversions every split of the cache is
tried on the first window of each test text, and the best one is measured on all, which favours them. With --heal, every
model is then healed on the texts it was fitted to, or on those of --heal-on, by each number of steps and each of
--seeds; the control is the source, trained on them alike. With --decode 4096, the time of a token after so many is
measured too, over the source's in alternating rounds. What is done is kept in out/latents/results.json, so that an
interrupted run resumes; the table and a picture are beside it.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from healed import control, healed
from latents_picture import Measured, draw
from published import mha2mla, transmla

import rehead
from rehead.attention import GroupedConfig
from rehead.config import GPTConfig
from rehead.conversion.blocks import CALIBRATION_TOKENS
from rehead.conversion.converter import Converter
from rehead.conversion.measured import measured_layers
from rehead.conversion.page import markdown
from rehead.conversion.sampled import sampled_once
from rehead.conversion.target import Kind, Target
from rehead.conversion.texts import SELF, Passage
from rehead.decoding import decoder
from rehead.errors import ConfigError
from rehead.measure import evaluate_text
from rehead.model import LanguageModel
from rehead.tokenizer import open_model

Made = Callable[[], LanguageModel]


def ours(
    converter: Converter, target: Kind, method: str, share: float, teach: int = 0, *, measured: bool = False
) -> LanguageModel:
    """Return the model converted by rehead, its attentions taught in `teach` passes over the texts it is fitted to.

    `measured` is `--measured-ranks`.
    """
    converter.method = method
    to, _ = measured_layers(converter, Target(to="mla", target=target, kv_fraction=share), measured, None)
    return converter.convert(to, teach=teach)[0]


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
        pairs = source.head_dim // 2
        folds = [step * 2**k for k in range(4) if step * 2**k <= pairs and pairs % (step * 2**k) == 0]
        for fold in folds if rope_dim < numbers else []:
            yield "TransMLA", rope_dim, numbers - rope_dim, fold
    for rope_dim in range(8, source.head_dim, 8):
        if source.n_kv_head * rope_dim < numbers:
            yield "MHA2MLA", rope_dim, numbers - source.n_kv_head * rope_dim, 0


def arms(
    converter: Converter, source: GroupedConfig, share: float, teach: int
) -> Iterator[tuple[str, str, Made]]:
    """Yield kind, details and a function that makes the model.

    Published conversions know no biases, no norms on queries and keys, and no heads of which a part rotates.
    """
    yield "SVD of the weights, keys rebuilt", "", partial(ours, converter, "rebuilt", "svd", share)
    assert source.rope is not None
    known = source.qk_norm_eps is None and not source.qkv_bias and source.rope.partial_rotary_factor == 1
    for kind, rope_dim, rank, fold in splits(source, share) if known else ():
        if kind == "TransMLA":
            yield kind, f"{rank} + {rope_dim}, fold {fold}", partial(theirs, converter, rope_dim, rank, fold)
        else:
            yield (
                kind,
                f"{rank} + {source.n_kv_head} x {rope_dim}",
                partial(theirs, converter, rope_dim, rank),
            )
    for target in ("canonical", "uneven", "rebuilt"):
        with suppress(ConfigError):  # a rotary part without norms in its heads, and with something beside it
            Target(to="mla", target=target, kv_fraction=share).attention(source, converter.config.n_embd)
            for passes in sorted({0, teach}):
                name = f"rehead, {target}" + f", taught in {passes} passes" * bool(passes)
                yield name, "", partial(ours, converter, target, "weighted", share, passes)
            if target == "uneven":
                name = "rehead, uneven, its width measured"
                yield name, "", partial(ours, converter, target, "weighted", share, measured=True)


class Bench:
    """The models' losses on the test texts, each measured once and kept in a file."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.file = given, given.out / "results.json"
        self.done: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        names = ("model", "fit", "test", "tokens", "length", "heal_on", "heal_tokens")
        of = {name: getattr(given, name) for name in names}
        if self.done.setdefault("of", of) != of:
            raise SystemExit(f"{self.file} is of {self.done['of']}: choose another folder")
        opened = open_model(given.model, dtype=torch.float32)
        self.model, self.tokenizer = opened.model, opened.require_tokenizer()
        self.fit = self.passages(given.fit, given.tokens, 0)
        self.tests = [self.ids(name, given.windows * given.length + 1) for name in given.test]
        lesson = self.passages(given.heal_on, given.heal_tokens, 1) if given.heal_on else self.fit
        self.lesson = given.out / "heal.txt"
        self.lesson.write_text(
            "\n".join(self.tokenizer.decode(text.ids) for text in lesson), encoding="utf-8"
        )

    def passages(self, names: list[str], tokens: int, seed: int) -> list[Passage]:
        """Return equally many tokens of each text; `self` is sampled from the source."""
        share, length = tokens // len(names), self.given.length
        return [
            sampled_once(self.model, share, length, seed)
            if name == SELF
            else Passage(name=name, ids=self.ids(name, share + 1))
            for name in names
        ]

    def ids(self, name: str, most: int) -> np.ndarray:
        """Return the first tokens of a text."""
        return np.asarray(self.tokenizer.encode(Path(name).read_text(encoding="utf-8")))[:most]

    def losses(self, key: str, make: Made, windows: int | None = None) -> list[float]:
        """Return the loss on each test text of the model that `make` returns."""
        windows = windows or self.given.windows
        key = f"{key}, {windows} windows"
        if key not in self.done:
            one, length = make(), self.given.length
            texts = [ids[: windows * length + 1] for ids in self.tests]
            self.done[key] = [evaluate_text(one, ids, length=length).loss for ids in texts]
            self.file.write_text(json.dumps(self.done, indent=1))
            print(key, [round(loss, 4) for loss in self.done[key]], flush=True)
        return self.done[key]

    def best(self, key: str, several: list[tuple[str, Made]]) -> tuple[str, Made]:
        """Return the details and the function of the model with the least loss on the first window of each text."""
        if len(several) == 1:
            return several[0]
        return min(several, key=lambda one: sum(self.losses(f"{key} {one[0]}", one[1], 1)))

    def time(self, key: str, make: Made) -> float | None:
        """Return the time of a token after --decode tokens over the source's."""
        if not self.given.decode:
            return None
        key = f"{key}, a token after {self.given.decode}"
        if key not in self.done:
            with tempfile.TemporaryDirectory() as place:  # read again, its weights are in memory
                rehead.save(make(), Path(place, "model"))
                self.done[key] = decoded(rehead.load(Path(place, "model")), self.model, self.given.decode)
            self.file.write_text(json.dumps(self.done, indent=1))
            print(key, round(self.done[key], 3), flush=True)
        return float(self.done[key])

    def row(
        self, key: str, make: Made, heal: Callable[[LanguageModel, int, list[str]], LanguageModel]
    ) -> tuple[list[list[list[float]]], float | None]:
        """Return the losses over the source's, as made and after each number of steps, by text and seed; and a time."""
        given, cells = self.given, []
        base = self.losses("source", lambda: self.model)
        kept = cache(make)

        def after(steps: int, flags: list[str]) -> LanguageModel:
            return heal(kept(), steps, flags)

        for steps in [0, *given.heal]:
            runs = [self.losses(key, kept)] if steps == 0 else []
            for seed in given.seeds if steps else []:
                flags = [*given.flags, f"system.seed={seed}"]
                name = f"{key}, healed {steps} steps, seed {seed}"
                runs.append(self.losses(name, partial(after, steps, flags)))
            by_text = zip(zip(*runs, strict=True), base, strict=True)
            cells.append([[loss - before for loss in losses] for losses, before in by_text])
        return cells, self.time(key, kept)


def spread(over: Sequence[float]) -> str:
    """Return the mean of the runs and, of several, half of their range."""
    half = (max(over) - min(over)) / 2
    return f"{sum(over) / len(over):+.3f}" + (f" ± {half:.3f}" if len(over) > 1 else "")


@torch.no_grad()
def decoded(
    one: LanguageModel, source: LanguageModel, n_past: int, rounds: int = 15, n_new: int = 16
) -> float:
    """Return the median time of a token after `n_past` random ones, over that of `source`, in alternating rounds."""
    past = torch.randint(source.config.vocab_size, (1, n_past), generator=torch.Generator().manual_seed(0))
    arms = []
    for model in (one, source):
        kept = model.new_cache(1, n_past + (rounds + 1) * n_new)
        model(past, cache=kept)
        arms.append((decoder(model), kept, list[float]()))
    for _ in range(rounds + 1):  # the first round warms up
        for step, kept, times in arms:
            begun = time.perf_counter()
            for number in range(n_new):
                step(past[:, number], kept)
            times.append(time.perf_counter() - begun)
    ours, theirs = (times[1:] for _, _, times in arms)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def as_cells(row: Measured) -> list[str]:
    """Return a row of the table."""
    losses = [" / ".join(map(spread, by_text)) for by_text in row.losses]
    return [
        f"{row.share:.4g}",
        row.kind,
        row.split,
        *losses,
        *([] if row.time is None else [f"{row.time:.2f}"]),
    ]


def main() -> None:
    """Convert, heal, measure and write a table."""
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
    parser.add_argument("--only", nargs="+", default=[], help="the conversions of these names, and source")
    parser.add_argument(
        "--teach", type=int, default=0, help="passes: every target of rehead also taught layer by layer"
    )
    parser.add_argument("--heal", type=int, nargs="*", default=[], help="numbers of steps")
    parser.add_argument("--heal-on", nargs="+", default=[], help="texts, or self, drawn anew")
    parser.add_argument("--heal-tokens", type=int, default=98_304, help="of all texts of --heal-on together")
    parser.add_argument("--decode", type=int, default=0, help="tokens before the one that is timed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the healing")
    parser.add_argument("--flags", nargs="*", default=[], help="of the healing, as trainer.batch_size=2")
    given = parser.parse_args()
    given.flags.append(f"data.block_size={given.length}")
    given.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(given)
    assert isinstance(bench.model.config, GPTConfig)
    source = bench.model.config.attention[0]
    assert isinstance(source, GroupedConfig)

    def taught(one: LanguageModel, steps: int, flags: list[str]) -> LanguageModel:
        return healed(one, bench.tokenizer, given.model, bench.lesson, steps, flags)

    def trained(_: LanguageModel, steps: int, flags: list[str]) -> LanguageModel:
        return control(given.model, bench.lesson, steps, flags)

    rows = []
    if not given.only or "source" in given.only:
        rows.append(Measured(1.0, "source (control)", "", *bench.row("source", lambda: bench.model, trained)))
    with tempfile.TemporaryDirectory() as scratch:
        converter = Converter(bench.model, None, bench.fit, length=given.length, scratch=Path(scratch))
        known = {kind for share in given.shares for kind, *_ in arms(converter, source, share, given.teach)}
        if unknown := set(given.only) - known - {"source"}:
            raise SystemExit(f"--only {unknown}: no such conversion. Use some of {sorted(known)}, or source.")
        for share in given.shares:
            candidates: dict[str, list[tuple[str, Made]]] = {}
            for kind, details, make in arms(converter, source, share, given.teach):
                if given.only and kind not in given.only:
                    continue
                candidates.setdefault(kind, []).append((details, make))
            for kind, several in candidates.items():
                details, make = bench.best(f"{share} {kind}", several)
                key = f"{share} {kind} {details}".strip()
                rows.append(Measured(share, kind, details, *bench.row(key, make, taught)))
    names = " / ".join(Path(name).stem for name in given.test)
    steps = [f"{names}, {steps} steps" for steps in given.heal]
    timed = [f"token after {given.decode:,}"] if given.decode else []
    table = markdown(["cache", "conversion", "split", names, *steps, *timed], map(as_cells, rows))
    draw(rows, [0, *given.heal], given.decode, given.out / "latents.png")
    base = bench.losses("source", lambda: bench.model)
    (given.out / "table.md").write_text(f"Source: {base}\n\n{table}\n\nrehead {rehead.__version__}\n")
    print(table)


if __name__ == "__main__":
    main()
