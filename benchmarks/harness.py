"""Two or more ways of computing the same, timed in turns on a machine that may have other work to do.

A case has our way, its peers, and what must be equal before anything is timed. A round runs all of them once,
then once more in reverse order (A B B A); its ratio is the peer's time over ours, and what is reported is the
median over the rounds with a bootstrap interval. In every round stand, too, our own way a second time (the
control: its ratio should be 1) and a computation whose speed is the machine's ceiling, so that a share of the
ceiling is measured under the same load. A sample that other processes disturbed is taken again, a few times.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from load import Load

from rehead.measure.memory_in_use import peak_allocated
from rehead.nn.linear import Linear
from rehead.system.huge_pages import HugePages

SAMPLE_SECONDS = 0.05
"""A sample repeats what it times until it lasts about that long."""
TRIES, LONG = 3, 1.0
"""Samples taken of one arm in one place, the disturbed ones included; one of so many seconds is not taken again."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Largest difference between two ways, over the largest number; whole numbers must be equal."""


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share; `peers` is a folder with checkouts of repositories to run beside ours."""

    device: str = "cpu"
    threads: int = 1
    n_round: int = 15
    peers: Path | None = None

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Arm:
    """One way of computing something: `run` is timed, `result` (its own unless given) must equal the others'.

    With a `pid`, that process computes, and `run` returns the seconds that it took there.
    """

    run: Callable[[], Any]
    result: Callable[[], Any] | None = None
    pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Our way against its peers; a peer that is a string is absent, and the string says why.

    `at_least` are the ratios asked for, by peer. `flops` and `n_bytes` are what one run needs at the least; with
    one of them a share of the ceiling is reported, `of_ceiling` is the share asked for. `dtype` decides how equal
    the results must be and which multiplications are the ceiling.
    """

    name: str
    ours: Arm
    peers: dict[str, Arm | str]
    at_least: dict[str, float] = field(default_factory=dict)
    flops: float | None = None
    n_bytes: float | None = None
    of_ceiling: float | None = None
    dtype: torch.dtype = torch.float32
    tolerance: float | None = None

    def measure(self, setting: Setting) -> dict[str, Any]:
        """The record of this case for the JSON file and the page."""
        there = {name: arm for name, arm in self.peers.items() if isinstance(arm, Arm)}
        differences = self._differences(there)
        runs = {"ours": self.ours, "control": self.ours, **there}
        work = self.flops or self.n_bytes
        if work is not None:
            ceiling, ceiling_work = (multiply if self.flops else read)(setting, self.dtype)
            runs["ceiling"] = Arm(ceiling)
        rounds, load = take_rounds(runs, setting)
        record: dict[str, Any] = {
            "kind": "ratio",
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seconds": {name: [median(times), min(times)] for name, times in rounds.items()},
            "control": interval(ratios(rounds["control"], rounds["ours"])),
            "peers": {},
            "load": load,
        }
        for name, arm in self.peers.items():
            if isinstance(arm, str):
                record["peers"][name] = {"absent": arm}
            else:
                found = interval(ratios(rounds[name], rounds["ours"]))
                record["peers"][name] = found | {"difference": differences[name]}
            if name in self.at_least:
                record["peers"][name]["at_least"] = self.at_least[name]
        if work is not None:
            speeds = [ceiling_work / seconds for seconds in rounds["ceiling"]]
            shares = [work / ours / speed for ours, speed in zip(rounds["ours"], speeds, strict=True)]
            kind = "multiplications" if self.flops else "reading"
            record["ceiling"] = {"kind": kind, "per_second": median(speeds), "share": interval(shares)}
            if self.of_ceiling is not None:
                record["ceiling"]["at_least"] = self.of_ceiling
        return record

    def _differences(self, there: dict[str, Arm]) -> dict[str, float]:
        """How far each peer's result is from ours; an error where that is further than rounding."""
        most = TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance
        ours = (self.ours.result or self.ours.run)()
        found = {}
        for name, arm in there.items():
            theirs = (arm.result or arm.run)()
            found[name] = difference(ours, theirs)
            if not found[name] <= most:
                raise AssertionError(
                    f"{self.name}: {name} differs by {found[name]:.2g}, more than {most:.2g}"
                )
        return found


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How time and memory grow while a size doubles: `make(size)` gives what is run; `at_most` per doubling."""

    name: str
    sizes: tuple[int, ...]
    make: Callable[[int], Callable[[], Any]]
    at_most: float
    dtype: torch.dtype = torch.float32

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Time of all sizes in turns; bytes allocated at the peak of one run of each (CPU only)."""
        runs = {str(size): Arm(self.make(size)) for size in self.sizes}
        rounds, load = take_rounds(runs, setting)
        doublings = list(zip(self.sizes[:-1], self.sizes[1:], strict=True))
        record: dict[str, Any] = {
            "kind": "growth",
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "at_most": self.at_most,
            "seconds": {name: [median(times), min(times)] for name, times in rounds.items()},
            "time": {f"{a} to {b}": interval(ratios(rounds[str(b)], rounds[str(a)])) for a, b in doublings},
            "load": load,
        }
        if setting.device == "cpu":
            peaks = {size: peak_allocated(runs[str(size)].run) for size in self.sizes}
            record["bytes"] = {str(size): peak for size, peak in peaks.items()}
            record["memory"] = {f"{a} to {b}": peaks[b] / peaks[a] for a, b in doublings}
        return record


def take_rounds(runs: dict[str, Arm], setting: Setting) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each arm in every round, and how much else the machine did meanwhile."""
    repeats = {name: _calibrate(run, setting) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    load, again = Load(*{arm.pid for arm in runs.values() if arm.pid is not None}), 0
    gc.collect()
    gc.disable()
    try:
        for _ in range(setting.n_round):
            spent = dict.fromkeys(runs, 0.0)
            for name in [*runs, *reversed(runs)]:
                seconds, tries = _sample(runs[name], repeats[name], setting)
                spent[name] += seconds / 2
                again += tries - 1
            for name, seconds in spent.items():
                times[name].append(seconds)
            gc.collect()
    finally:
        gc.enable()
    return times, load.since() | {"samples_again": again, "rounds": setting.n_round}


def _calibrate(arm: Arm, setting: Setting) -> int:
    """How often `run` has to be repeated for a sample, after a run that does not count."""
    seconds = []
    for _ in range(3):
        seconds.append(_timed(arm, 1, setting)[0])
        if seconds[-1] > 1:
            break
    return max(1, math.ceil(SAMPLE_SECONDS / min(seconds)))


def _sample(arm: Arm, repeats: int, setting: Setting) -> tuple[float, int]:
    """Seconds of one run, the least disturbed of up to `TRIES` samples; how many were taken."""
    best = math.inf
    for tried in range(1, TRIES + 1):
        load = Load(*([] if arm.pid is None else [arm.pid]))
        seconds, wall = _timed(arm, repeats, setting)
        best = min(best, seconds / repeats)
        if wall > LONG or not load.disturbed(seconds, setting.threads):
            return seconds / repeats, tried
    return best, TRIES


def _timed(arm: Arm, repeats: int, setting: Setting) -> tuple[float, float]:
    """Seconds that count of `repeats` runs, by the clock of the process that computes; seconds that passed here."""
    start = time.perf_counter()
    told = [arm.run() for _ in range(repeats)]
    setting.synchronise()
    wall = time.perf_counter() - start
    return wall if arm.pid is None else sum(told), wall


def multiply(setting: Setting, dtype: torch.dtype) -> tuple[Callable[[], Any], float]:
    """A square matrix product, and its FLOPs."""
    n = 8192 if setting.device == "cuda" else 1024
    a, layer = torch.randn(n, n), Linear(n, n, bias=False)
    a, layer = a.to(setting.device, dtype), layer.to(setting.device, dtype).requires_grad_(False)
    return torch.no_grad()(lambda: layer(a)), 2.0 * n**3


def read(setting: Setting, dtype: torch.dtype) -> tuple[Callable[[], Any], float]:
    """A sum over more than any cache holds, and its bytes."""
    data = torch.ones(1 << (30 if setting.device == "cuda" else 26), device=setting.device)
    if setting.device == "cpu":
        data = HugePages().keep(data)
    return data.sum, float(data.nbytes)


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference of two tensors over the largest number; 0 or infinity for whole numbers."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / ours.abs().max())


def ratios(times: list[float], base: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(times, base, strict=True)]


def interval(values: list[float], n_resample: int = 2000) -> dict[str, float]:
    """Median and its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(n_resample))
    low, high = medians[int(0.025 * n_resample)], medians[int(0.975 * n_resample)]
    return {"median": median(values), "low": low, "high": high}


def clear(ratio: dict[str, float], control: dict[str, float]) -> bool:
    """Whether a difference is one: the interval without 1, and three times what the control spreads."""
    spread = max(abs(math.log(control[end])) for end in ("low", "high"))
    outside = not ratio["low"] <= 1 <= ratio["high"]
    return outside and abs(math.log(ratio["median"])) > 3 * spread


Cases = Iterator[Case | Growth]
