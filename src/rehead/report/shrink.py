"""What became of one model when its KV cache was made smaller: rows, sentences and a chart from a study's document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from rehead.report.chart import Chart, Look, Panel, Series
from rehead.report.figures import MARKERS, rebuilding
from rehead.report.table import show
from rehead.report.text import harmless, wrapped

Record = dict[str, Any]
HEADER = ("variant", "made", "KV B", "share", "loss", "tok/s")
SAMPLE, MOST_SAMPLE = 74, 1000
"""Characters of each text and its name on the terminal, and of the text on the page."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant. `over` is its loss above the source's, [mean, lowest, highest] over the seeds.

    Losses and bytes are those of the certificates (the source's are in each of them), of the first seed
    where one is shown. `over` is None for the source, and where it was measured on another text than
    the first.
    """

    name: str
    how: str
    about: str
    look: Look
    kv_bytes: int
    share: float
    loss: float | None
    over: Sequence[float] | None
    tokens_per_second: float
    certificate: Record | None
    variant: Record


def rows(document: Record) -> list[Row]:
    """The source, then all that was made of it, in the study's order."""
    variants = document["variants"]
    certificates = [found for one in variants if (found := _certificate(one)) is not None]
    first = certificates[0]
    before = first["kv_bytes_per_token"][0]
    made = []
    for index, one in enumerate(variants):
        found = _certificate(one)
        alike = found is not None and _text(found) == _text(first) and found["loss"] is not None
        size = before if found is None else found["kv_bytes_per_token"][1]
        losses = first["loss"] if found is None else found["loss"]
        made.append(
            Row(
                name=one["variant"],
                how=how(one),
                about=one["about"],
                look=Look.of(index),
                kv_bytes=size,
                share=size / before,
                loss=None if losses is None else losses[0 if found is None else 1],
                over=_over(one) if alike else None,
                tokens_per_second=one["costs"]["tokens_per_second_cached"][0],
                certificate=found,
                variant=one,
            )
        )
    return made


def how(variant: Record) -> str:
    """How a variant was made, in a few words."""
    if variant["kind"] == "converted":
        told = variant["convert"]
        sizes = {
            "kv_fraction": lambda size: percent(size),
            "kv_rank": lambda size: f"rank {size}",
            "n_kv_head": lambda size: f"{size} KV heads",
        }
        found = [say(told[key]) for key, say in sizes.items() if told.get(key) is not None]
        return ", ".join([f"converted to {told.get('to') or 'the same'}", *found])
    if variant["kind"] == "given":
        return "as it was given"
    return f"{variant['kind']}, {variant['runs'][0]['steps']:,} steps"


def findings(made: Sequence[Row]) -> list[str]:
    """What may be said: all losses are of one source on one text, so that they compare like for like."""
    slow = rebuilding([row.variant for row in made])
    return [*_free(made), *_rivals(made), *_healed(made), *([slow] if slow else [])]


def chart(made: Sequence[Row]) -> Panel:
    """Loss over the source against the bytes a token leaves in the cache."""
    by_name = {row.name: row for row in made}
    series = []
    for row in made:
        parent = by_name.get(row.variant["from"] or "")
        path = [] if parent is None else [(one.kv_bytes, _height(one)) for one in (parent, row)]
        if path and all(height is not None for _, height in path):
            x, y = zip(*path, strict=True)
            series.append(Series(name=row.name, x=x, y=y, look=row.look, faint=True))
    for row in made:
        height = _height(row)
        if height is not None:
            low, high = ([row.over[1]], [row.over[2]]) if row.over is not None else ([height], [height])
            series.append(
                Series(
                    name=row.name, x=[row.kv_bytes], y=[height], low=low, high=high, look=row.look,
                    marker=MARKERS.get(row.variant["kind"], "circle"),
                )
            )  # fmt: skip
    drawn = Chart(
        kind="points",
        x="KV cache, bytes per token",
        y="loss over the source (nats per token)",
        series=series,
        log_x=True,
        named=True,
    )
    notes = [
        "Lower and further left is better. The circle is the source, diamonds were converted, stars healed after "
        "that; a dotted line leads from what a variant was made of."
    ]
    return Panel(name="shrink", title="Loss against KV cache", charts=[drawn], notes=notes)


def source_line(document: Record) -> str:
    """The source, in a line."""
    first = rows(document)[0]
    text = f"{harmless(first.name, 60)}: {document['conversion']['architecture']}; {first.how}"
    certificate = next(one for row in rows(document) if (one := row.certificate) is not None)
    if first.loss is None:
        return text + "."
    return f"{text}; loss {first.loss:.4f} nats per token on {certificate['logits']['tokens']:,} tokens held out."


def span(values: Sequence[float]) -> str:
    """A difference over several seeds: its mean and what it spans."""
    mean, low, high = (round(value, 4) + 0.0 for value in values)
    return f"{mean:+.4f}" if low == high else f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def percent(share: float) -> str:
    """A share in three digits: 12.5 %."""
    return f"{100 * share:.3g} %"


def texts(found: Any) -> str:
    """The text of a certificate, or several, or none, in words."""
    if not found:
        return "random text, since none was given"
    several = found if isinstance(found, list) else [found]
    return "; ".join(
        f"{one.get('name', 'a text')} ({one['read']:,} of its {one['tokens']:,} tokens, sha256 {one['sha256'][:12]}...)"
        for one in several
    )


def present(document: Record) -> None:
    """Print every variant beside the source, what may be said, and how the same words are continued."""
    made = rows(document)
    cells = [
        (
            harmless(row.name, 24),
            row.how,
            f"{row.kv_bytes:,}",
            percent(row.share),
            _loss(row),
            f"{row.tokens_per_second:,.0f}",
        )
        for row in made
    ]
    notes = (
        "KV bytes per token, over all layers. Losses in nats per token, of the source and above it, on one text that "
        "nothing was fitted to; exact is the same function but for rounding. tok/s: greedy, one sequence, medians."
    )
    show(document["about"], HEADER, cells, notes, texts=(0, 1))
    console = Console()
    for finding in findings(made):
        print(wrapped(finding, console))
    print()
    wide = max(len(harmless(row.name, 24)) for row in made)
    for row in made:
        words = " ".join(harmless(row.variant["runs"][0]["sample"], MOST_SAMPLE).split())
        print(f"{harmless(row.name, 24):{wide}}  {words[: SAMPLE - wide]}...")
    print()


def proof(export: Record) -> str:
    """What reading an export back has shown."""
    return (
        f"{export['architecture']}, read back by {export['reader']}: over {export['tokens']:,} tokens no logit differs "
        f"by more than {export['max_error']:.1e}, and {100 * export['same_choice']:.4g} % of the likeliest tokens "
        "are the same"
    )


def _loss(row: Row) -> str:
    if row.certificate is None:
        return "" if row.loss is None else f"{row.loss:.4f}"
    if row.certificate["exact"]:
        return "exact"
    return "?" if row.over is None else span(row.over)


def _certificate(variant: Record) -> Record | None:
    found: Record | None = variant["runs"][0]["certificate"]
    return found


def _text(certificate: Record) -> Any:
    return None if certificate["test"] is None else certificate["test"]["sha256"]


def _over(variant: Record) -> list[float]:
    values = [after - before for run in variant["runs"] for before, after in [run["certificate"]["loss"]]]
    return [sum(values) / len(values), min(values), max(values)]


def _height(row: Row) -> float | None:
    if row.certificate is None:
        return 0.0
    return None if row.over is None else row.over[0]


def _free(made: Sequence[Row]) -> Iterator[str]:
    for row in made:
        if row.certificate is not None and row.certificate["exact"] and row.share < 1:
            share = percent(row.share)
            yield f"{harmless(row.name)} keeps every logit, but for rounding, with {share} of the KV cache."


def _rivals(made: Sequence[Row]) -> Iterator[str]:
    """Approximations of one size side by side."""
    lossy = [row for row in made if row.over is not None and row.variant["kind"] == "converted"]
    for size in sorted({row.kv_bytes for row in lossy}, reverse=True):
        several = sorted(
            (row for row in lossy if row.kv_bytes == size), key=lambda row: row.over[0] if row.over else 0.0
        )
        if len(several) > 1:
            said = ", ".join(f"{span(row.over)} ({harmless(row.name)})" for row in several if row.over)
            yield f"{percent(several[0].share)} of the KV cache costs, in nats per token: {said}."


def _healed(made: Sequence[Row]) -> Iterator[str]:
    by_name = {row.name: row for row in made}
    for row in made:
        parent = by_name.get(row.variant["from"] or "")
        if row.variant["kind"] == "healed" and parent and parent.over and row.over:
            yield (
                f"{row.variant['runs'][0]['steps']:,} steps of healing bring {harmless(parent.name)} from "
                f"{span(parent.over)} to {span(row.over)} nats per token over the source."
            )
