"""Builds the panels of a study's report from its document."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rehead.report import kv_dtype as formats
from rehead.report.chart import Chart, Look, Marker, Panel, Series
from rehead.report.text import sanitise
from rehead.study.claims import beaten

Record = dict[str, Any]
MARKERS: dict[str, Marker] = {
    "given": "circle",
    "trained": "circle",
    "converted": "diamond",
    "healed": "star",
}
FLAT = 0.05
"""Values within this share of each other are called flat."""
ALONE = (
    "Attention alone: scores, softmax and sums of values in all layers, forward and backward, without projections; "
    "memory is what they save for the backward pass besides queries, keys and values. Full bars: as computed here. "
    "Pale: with the (length x length) scores of every head written out, as in the starter code of CMU 10-423's "
    "homework, whose attention_computation_time and attention_computation_memory measure the forward part. Every query "
    "head has its own scores, however many heads share a KV head: expect a flat curve in both, but for copies of keys "
    "and values beside written scores."
)


class Figures:
    """Builds panels of the variants of one document, each variant with the same look everywhere."""

    def __init__(self, document: Record) -> None:
        self.variants: dict[str, Record] = {variant["variant"]: variant for variant in document["variants"]}
        self.of_one_model = document["conversion"] is not None
        self.looks = {name: Look.of(index) for index, name in enumerate(self.variants)}

    def panel(self, kind: str, of: Sequence[str]) -> Panel | None:
        """Return one of PANELS for the variants `of`; None if it would have neither a chart nor a table."""
        panel: Panel = getattr(self, kind)([self.variants[name] for name in of])
        charts = [chart for chart in panel.charts if chart.series]
        return replace(panel, charts=charts) if charts or panel.header else None

    def loss(self, variants: Sequence[Record]) -> Panel:
        """Plot losses over steps: validation as a line, with mean and range over seeds; training dotted."""
        series, is_cut = [], False
        for variant in variants:
            for key, faint in ((1, True), (2, False)):
                x, mean, low, high = _over_seeds(variant["runs"], key)
                if x:
                    is_cut |= x[0] > 0 and all(run["curve"][0][0] == 0 for run in variant["runs"])
                    series.append(
                        Series(
                            name=variant["variant"], x=x, y=mean, low=[] if faint else low, high=[] if faint else high,
                            look=self.looks[variant["variant"]], faint=faint,
                        )
                    )  # fmt: skip
        notes = [
            "Lines: validation loss. Dotted: training loss, without dropout, on the same number of blocks."
        ]
        if is_cut:
            notes.append("Step 0 is left out.")
        if any(len(variant["runs"]) > 1 for variant in variants):
            notes.append("With several seeds the line is their mean and the band their range.")
        if any(variant["steps_before"] for variant in variants):
            notes.append("A variant that continues another starts at the step that one had reached.")
        if len({variant["length"] for variant in variants}) > 1:
            lengths = ", ".join(
                f"{sanitise(variant['variant'])} ({variant['length']:,})" for variant in variants
            )
            notes.append(f"Each loss is measured at the variant's own block length in tokens: {lengths}.")
        chart = Chart(
            kind="lines",
            x="optimizer steps",
            y="loss (nats per token)",
            series=series,
            faint="training loss",
        )
        return Panel(name="loss", title="Loss over training", charts=[chart], notes=notes)

    def frontier(self, variants: Sequence[Record]) -> Panel:
        """Plot validation loss against KV bytes per token."""
        names = [variant["variant"] for variant in variants]
        series = [
            self._point([self.variants[variant["from"]], variant], variant, faint=True)
            for variant in variants
            if variant["from"] in names
        ]
        series += [self._point([variant], variant) for variant in variants]
        notes = [
            "Lower and further left is better. Circles were given or trained, diamonds converted, stars healed; a "
            "dotted line connects a variant with the model it was made from.",
            *([] if self.of_one_model else [frontier_note(variants)]),
        ]
        chart = Chart(
            kind="points",
            x="KV cache, bytes per token of a full context",
            y="validation loss (nats per token)",
            series=series,
            log_x=True,
            faint="from the model it was made from",
        )
        return Panel(name="frontier", title="Which attention for how many bytes", charts=[chart], notes=notes)

    def kv_dtype(self, variants: Sequence[Record]) -> Panel:
        """Plot loss against the bytes of the cache in several number formats."""
        source = next(iter(self.variants.values())) if self.of_one_model else None
        return formats.panel(variants, source=source, first_look=len(self.variants))

    def memory(self, variants: Sequence[Record]) -> Panel:
        """Plot KV cache, weights, activations and peak memory."""
        trained = [variant for variant in variants if variant["costs"]["memory"]]
        parts = [
            (
                "KV cache",
                "MiB, one sequence",
                [(variant, variant["costs"]["cache_bytes_held"]) for variant in variants],
            ),
            (
                "Weights",
                "MiB",
                [(variant, variant["costs"]["weight_bytes"]) for variant in variants],
            ),
            (
                "Activations",
                "MiB, one training step",
                [(variant, variant["costs"]["memory"]["activations"]) for variant in trained],
            ),
            (
                "Peak",
                "MiB, one training step",
                [(variant, variant["costs"]["memory"]["peak"]) for variant in trained],
            ),
        ]
        charts = [self._bars(title, unit, pairs, 2**20) for title, unit, pairs in parts]
        alone = self._attention(
            [variant for variant in trained if "attention" in variant["costs"]["memory"]],
            "MiB kept in one training step",
            lambda variant, key: [variant["costs"]["memory"][key] / 2**20],
        )
        charts.insert(2, alone)
        activations = [variant["costs"]["memory"]["activations"] for variant in trained]
        flat = len(activations) > 1 and max(activations) - min(activations) <= FLAT * max(activations)
        notes = [
            "KV cache: held after a full context, in generation. Activations: what the forward pass saves for the "
            "backward pass. Peak: all tensors at the peak of a training step: weights, also those of a teacher, "
            "gradients, optimizer moments, activations and temporary results, without the memory of Python and torch.",
            "Fewer KV heads shrink the cache and, a little, the weights. Of the activations only the keys and values "
            "shrink: every query head still has its own row of scores and its own output, so expect a curve that is "
            "nearly flat there, and a peak that falls little."
            + (" Here the activations are flat." if flat else ""),
            *([ALONE] if alone.series else []),
        ]
        return Panel(
            name="memory",
            title="Memory, by what holds it",
            charts=charts,
            notes=notes,
        )

    def speed(self, variants: Sequence[Record]) -> Panel:
        """Plot time per training step, and tokens per second with and without a cache."""
        timed = [variant for variant in variants if "seconds_per_step" in variant["costs"]]
        steps = [
            self._bar(variant, "", [1000 * v for v in variant["costs"]["seconds_per_step"]])
            for variant in timed
        ]
        both = "tokens_per_second_uncached" in variants[0]["costs"]
        ways = {"cached": "cached", "uncached": "uncached"} if both else {"cached": ""}
        decode = [
            self._bar(variant, name, variant["costs"][f"tokens_per_second_{how}"], pale=how == "uncached")
            for variant in variants
            for how, name in ways.items()
        ]
        lengths = variants[0]["costs"]["input_lengths"]
        notes = [
            "Medians and ranges over rounds in which the variants take turns, so that a slow phase of the machine "
            "affects all of them. Decoding: greedy, one sequence, from one token to the end of the context.",
        ]
        if "uncached" in lengths:
            notes.append(
                "Pale bars: without a cache. Tokens that went through the first model for each new token: with a cache "
                f"{_list(lengths['cached'])}, without {_list(lengths['uncached'])}."
            )
        if slow := rebuilding(variants):
            notes.append(slow)
        alone = self._attention(
            [variant for variant in timed if "seconds_of_attention" in variant["costs"]],
            "milliseconds of a training step",
            lambda variant, key: [1000 * value for value in variant["costs"][f"seconds_of_{key}"]],
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
        """Plot the cost of attention alone, as it is computed and with all scores stored."""
        ways = {"attention": "as computed", "attention_scores_kept": "scores written out"}
        series = [
            self._bar(variant, word, values(variant, key), pale=key != "attention")
            for variant in variants
            for key, word in ways.items()
        ]
        return Chart(kind="bars", title="Attention alone", x=unit, y="", series=series)

    def _point(self, path: Sequence[Record], variant: Record, *, faint: bool = False) -> Series:
        losses = [place["val_loss"] for place in path]
        return Series(
            name=variant["variant"],
            x=[per_token(place) for place in path],
            y=[loss[0] for loss in losses],
            low=[] if faint else [loss[1] for loss in losses],
            high=[] if faint else [loss[2] for loss in losses],
            look=self.looks[variant["variant"]],
            marker=MARKERS[variant["kind"]],
            faint=faint,
        )

    def _bars(self, title: str, unit: str, pairs: Iterable[tuple[Record, int]], scale: int) -> Chart:
        series = [self._bar(variant, "", [size / scale]) for variant, size in pairs]
        return Chart(kind="bars", title=title, x=unit, y="", series=series)

    def _bar(self, variant: Record, name: str, values: Sequence[float], *, pale: bool = False) -> Series:
        """Return a bar of one value, or of [median, lowest, highest]."""
        look = self.looks[variant["variant"]]
        low, high = [[value] for value in values[1:]] or ((), ())
        return Series(
            name=name, x=[values[0]], y=[variant["variant"]], low=low, high=high, look=look, pale=pale
        )


def per_token(variant: Record) -> float:
    """Return the cache bytes of a full context divided by its length, which is less once a window is full."""
    return variant["costs"]["cache_bytes_held"] / variant["costs"]["context"]


def frontier(variants: Sequence[Record]) -> list[str]:
    """Return the names that no other variant beats (`study.claims.beaten`), by bytes; none with one seed each."""
    if min(len(variant["runs"]) for variant in variants) < 2:
        return []
    unbeaten = [
        variant
        for variant in variants
        if not beaten(variant, [other for other in variants if other is not variant], per_token)
    ]
    return [
        variant["variant"]
        for variant in sorted(unbeaten, key=lambda variant: (per_token(variant), variant["val_loss"][0]))
    ]


def rebuilding(variants: Sequence[Record]) -> str | None:
    """Return a note on variants that decode slowly because they rebuild keys; None if there are none."""
    names = [sanitise(variant["variant"]) for variant in variants if variant["costs"].get("rebuilds_keys")]
    if not names:
        return None
    return (
        f"{'; '.join(names)}: for every new token, rotary keys are rebuilt from the latents of the whole context. The "
        "cache is smaller, but each token costs more as the context grows."
    )


def frontier_note(variants: Sequence[Record]) -> str:
    """Return what the seeds allow to claim about the frontier."""
    if min(len(variant["runs"]) for variant in variants) < 2:
        return "One seed each: the points show measurements, without a claim which of them is better."
    names = ", ".join(map(sanitise, frontier(variants)))
    return (
        f"On the frontier: {names}. One variant beats another if it needs no more bytes and its losses are lower, "
        "after as many steps on the same text and length, by more than seeds alone explain."
    )


def _over_seeds(runs: Sequence[Record], key: int) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the steps that all runs evaluated (of more than two, not step 0), and mean, lowest and highest value."""
    by_step = [{point[0]: point[key] for point in run["curve"] if point[key] is not None} for run in runs]
    steps = sorted(set(by_step[0]).intersection(*by_step[1:])) if by_step else []
    if len(steps) > 2 and steps[0] == 0:
        del steps[0]  # its loss is so high that the others would look equal
    values = [[points[step] for points in by_step] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) + ", ..."
