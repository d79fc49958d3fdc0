"""The panels of a study's report, from its document."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rehead.report.chart import Chart, Look, Marker, Panel, Series
from rehead.report.text import harmless
from rehead.study.claims import beats

Record = dict[str, Any]
MARKERS: dict[str, Marker] = {"trained": "circle", "converted": "diamond", "healed": "star"}
FLAT = 0.05
"""Values within this share of each other are called flat."""


ALONE = (
    "Attention alone: scores, softmax and sums of values in all layers, forward and backward, without projections; "
    "of memory what they keep for the backward pass beside queries, keys and values. Full bars: as computed here. "
    "Pale: with the (length x length) scores of every head written out, as the homework's starter does, whose "
    "attention_computation_time and attention_computation_memory probe the forward part. Every query head has its "
    "own scores, however many share a KV head: a flat curve is expected in both."
)


class Figures:
    """Draws the variants of one document, each with the same look everywhere."""

    def __init__(self, document: Record) -> None:
        self.variants: dict[str, Record] = {one["variant"]: one for one in document["variants"]}
        self.of_one_model = document["conversion"] is not None
        self.looks = {name: Look.of(index) for index, name in enumerate(self.variants)}

    def panel(self, kind: str, of: Sequence[str]) -> Panel | None:
        """One of PANELS for the variants `of`; None where they have nothing to show there."""
        found: Panel = getattr(self, kind)([self.variants[name] for name in of])
        drawn = [chart for chart in found.charts if chart.series]
        return replace(found, charts=drawn) if drawn else None

    def loss(self, variants: Sequence[Record]) -> Panel:
        """Losses over steps: validation as a line, over several seeds their mean and span; training dotted."""
        series = []
        for one in variants:
            for key, faint in ((1, True), (2, False)):
                x, mean, low, high = _over_seeds(one["runs"], key)
                if x:
                    series.append(
                        Series(
                            name=one["variant"], x=x, y=mean, low=[] if faint else low, high=[] if faint else high,
                            look=self.looks[one["variant"]], faint=faint,
                        )
                    )  # fmt: skip
        notes = [
            "Lines: validation loss. Dotted: training loss, without dropout, on as many blocks. Step 0 is left out."
        ]
        if any(len(one["runs"]) > 1 for one in variants):
            notes.append("Of several seeds the line is the mean, the band from the lowest to the highest.")
        if any(one["steps_before"] for one in variants):
            notes.append("A variant that continues another begins at the step which that one had reached.")
        if len({one["length"] for one in variants}) > 1:
            lengths = ", ".join(f"{harmless(one['variant'])} ({one['length']:,})" for one in variants)
            notes.append(f"Each loss is that of the variant's own block length in tokens: {lengths}.")
        chart = Chart(kind="lines", x="optimizer steps", y="loss (nats per token)", series=series)
        return Panel(name="loss", title="Loss over training", charts=[chart], notes=notes)

    def frontier(self, variants: Sequence[Record]) -> Panel:
        """Validation loss against KV bytes per token."""
        names = [one["variant"] for one in variants]
        series = [
            self._point([self.variants[one["from"]], one], one, faint=True)
            for one in variants
            if one["from"] in names
        ]
        series += [self._point([one], one) for one in variants]
        notes = [
            "Lower and further left is better. Circles were trained, diamonds converted, stars healed; a dotted line "
            "leads from what a variant was made of.",
            *([] if self.of_one_model else [said_of_frontier(variants)]),
        ]
        chart = Chart(
            kind="points",
            x="KV cache, bytes per token of a whole context",
            y="validation loss (nats per token)",
            series=series,
            log_x=True,
        )
        return Panel(name="frontier", title="Which attention for how many bytes", charts=[chart], notes=notes)

    def memory(self, variants: Sequence[Record]) -> Panel:
        """KV cache, weights, activations and peak, each by its name."""
        trained = [one for one in variants if one["costs"]["memory"]]
        parts = [
            ("KV cache", "MiB, one sequence", [(one, one["costs"]["cache_bytes_held"]) for one in variants]),
            ("Weights", "MiB", [(one, 4 * one["costs"]["parameters_counted"]) for one in variants]),
            (
                "Activations",
                "MiB, one training step",
                [(one, one["costs"]["memory"]["activations"]) for one in trained],
            ),
            ("Peak", "MiB, one training step", [(one, one["costs"]["memory"]["peak"]) for one in trained]),
        ]
        charts = [self._bars(title, unit, pairs, 2**20) for title, unit, pairs in parts]
        alone = self._attention(
            [one for one in trained if "attention" in one["costs"]["memory"]],
            "MiB kept in one training step",
            lambda one, key: [one["costs"]["memory"][key] / 2**20],
        )
        charts.insert(2, alone)
        kept = [one["costs"]["memory"]["activations"] for one in trained]
        flat = len(kept) > 1 and max(kept) - min(kept) <= FLAT * max(kept)
        notes = [
            "KV cache: held after a whole context, in generation. Activations: what the forward pass keeps for the "
            "backward pass. Peak: all tensors at the fullest moment of a training step: weights, gradients, "
            "optimizer moments, activations and what is computed meanwhile; without Python's and torch's own memory.",
            "Fewer KV heads shrink the cache and, a little, the weights. They do not shrink the activations: every "
            "query head still has its own row of scores and its own output, so a flat curve is expected there, and a "
            "peak that hardly moves." + (" Here the activations are flat." if flat else ""),
            *([ALONE] if alone.series else []),
        ]
        return Panel(
            name="memory",
            title="Memory, by what holds it",
            charts=charts,
            notes=notes,
        )

    def speed(self, variants: Sequence[Record]) -> Panel:
        """Time per training step, tokens per second with and without a cache."""
        timed = [one for one in variants if "seconds_per_step" in one["costs"]]
        steps = [self._bar(one, "", [1000 * v for v in one["costs"]["seconds_per_step"]]) for one in timed]
        both = "tokens_per_second_uncached" in variants[0]["costs"]
        ways = {"cached": "cached", "uncached": "uncached"} if both else {"cached": ""}
        decode = [
            self._bar(one, name, one["costs"][f"tokens_per_second_{how}"], pale=how == "uncached")
            for one in variants
            for how, name in ways.items()
        ]
        lengths = variants[0]["costs"]["input_lengths"]
        notes = [
            "Medians, and the span, of rounds in which every variant has its turn, so that what slows the machine "
            "slows all. Decoding: greedy, one sequence, from one token to the context's end.",
        ]
        if "uncached" in lengths:
            notes.append(
                "Pale bars: without a cache. Tokens that went through the first model for each new one: with a cache "
                f"{_list(lengths['cached'])}, without {_list(lengths['uncached'])}."
            )
        if slow := rebuilding(variants):
            notes.append(slow)
        alone = self._attention(
            [one for one in timed if "seconds_of_attention" in one["costs"]],
            "milliseconds of a training step",
            lambda one, key: [1000 * value for value in one["costs"][f"seconds_of_{key}"]],
        )
        if alone.series:
            notes.append(ALONE)
        charts = [
            Chart(kind="bars", title="Training step", x="milliseconds", y="", series=steps),
            alone,
            Chart(kind="bars", title="Decoding", x="tokens per second", y="", series=decode),
        ]
        return Panel(name="speed", title="Time", charts=charts, notes=notes)

    def _attention(
        self, variants: Sequence[Record], unit: str, values: Callable[[Record, str], list[float]]
    ) -> Chart:
        """What attention itself takes, as it is computed and with the scores written out."""
        ways = {"attention": "as computed", "attention_scores_kept": "scores written out"}
        series = [
            self._bar(one, word, values(one, key), pale=key != "attention")
            for one in variants
            for key, word in ways.items()
        ]
        return Chart(kind="bars", title="Attention alone", x=unit, y="", series=series)

    def _point(self, path: Sequence[Record], one: Record, *, faint: bool = False) -> Series:
        losses = [place["val_loss"] for place in path]
        return Series(
            name=one["variant"],
            x=[per_token(place) for place in path],
            y=[loss[0] for loss in losses],
            low=[] if faint else [loss[1] for loss in losses],
            high=[] if faint else [loss[2] for loss in losses],
            look=self.looks[one["variant"]],
            marker=MARKERS[one["kind"]],
            faint=faint,
        )

    def _bars(self, title: str, unit: str, pairs: Iterable[tuple[Record, int]], scale: int) -> Chart:
        series = [self._bar(one, "", [size / scale]) for one, size in pairs]
        return Chart(kind="bars", title=title, x=unit, y="", series=series)

    def _bar(self, one: Record, name: str, values: Sequence[float], *, pale: bool = False) -> Series:
        """A bar of one value, or of [middle, lowest, highest]."""
        look = self.looks[one["variant"]]
        low, high = [[value] for value in values[1:]] or ((), ())
        return Series(name=name, x=[values[0]], y=[one["variant"]], low=low, high=high, look=look, pale=pale)


def per_token(variant: Record) -> float:
    """Bytes the cache of a whole context holds, divided by its length: less than a token's where windows are full."""
    return variant["costs"]["cache_bytes_held"] / variant["costs"]["context"]


def frontier(variants: Sequence[Record]) -> list[str]:
    """Names of those that no other beats (`study.claims.beats`), from few bytes to many; none of one seed each."""
    if min(len(one["runs"]) for one in variants) < 2:
        return []
    rest = [one for one in variants if not any(beats(other, one, per_token) for other in variants)]
    return [one["variant"] for one in sorted(rest, key=lambda one: (per_token(one), one["val_loss"][0]))]


def rebuilding(variants: Sequence[Record]) -> str | None:
    """Why some decode slowly, if any does for that reason."""
    names = [harmless(one["variant"]) for one in variants if one["costs"].get("rebuilds_keys")]
    if not names:
        return None
    return (
        f"Rotary keys are rebuilt from the latents of the whole context for every new token in {'; '.join(names)}: "
        "a smaller cache, but more work for each token, the more the longer the context."
    )


def said_of_frontier(variants: Sequence[Record]) -> str:
    """What the seeds allow to say of which variants are worth their bytes."""
    if min(len(one["runs"]) for one in variants) < 2:
        return "One seed each: the points are what was measured, and which of them is better is not claimed."
    names = ", ".join(map(harmless, frontier(variants)))
    return (
        f"Beaten by none: {names}. A variant is beaten by one of no more bytes whose losses are told apart below its "
        "own, after as many steps on the same text and length."
    )


def _over_seeds(runs: Sequence[Record], key: int) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps all runs were evaluated at, 0 left out, and the mean, lowest and highest value there."""
    by_step = [{point[0]: point[key] for point in run["curve"] if point[key] is not None} for run in runs]
    steps = sorted(set(by_step[0]).intersection(*by_step[1:])) if by_step else []
    if len(steps) > 2 and steps[0] == 0:
        del steps[0]  # far above all others, which could not be told apart beside it
    values = [[one[step] for one in by_step] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) + ", ..."
