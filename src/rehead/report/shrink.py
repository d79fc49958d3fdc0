"""Reports how one model changed as its KV cache was shrunk: rows, findings and a chart of a study's document."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from rehead.report.chart import Chart, Look, Panel, Series
from rehead.report.figures import MARKERS, rebuilding
from rehead.report.table import show
from rehead.report.text import inert, sanitise, wrapped

Record = dict[str, Any]
HEADER = ("variant", "made", "KV B", "share", "loss", "tok/s")
SAMPLE, MOST_SAMPLE, NAME = 74, 1000, 24
"""Characters of a sample with its name on the terminal, of a sample on the page, and of a name that aligns samples."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant. `over` is its loss minus the source's, [mean, lowest, highest] over the seeds.

    The source is the first variant, even if a variant was made from another one. Losses and sizes come from the
    certificates; single figures are those of the first seed. `kv_bytes` is the size of a token's cache in the number
    format of the source. `over` is None for the source, and for a variant measured on another text than the first.
    `exact` is the same function as the source, up to rounding. `measured_against` is the variant that the certificate
    compares with; `direct` says whether that variant is the source or exact.
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
    exact: bool
    direct: bool
    measured_against: str | None
    certificate: Record | None
    variant: Record


def rows(document: Record) -> list[Row]:
    """Return a row for the source, then for each variant, in the study's order."""
    variants = document["variants"]
    made = next(variant for variant in variants if _certificate(variant) is not None)
    first = made["runs"][0]["certificate"]
    size, whole = first["kv_bytes_per_token"][0], _numbers(first, 0)
    result: list[Row] = []
    for index, variant in enumerate(variants):
        certificate, known = _certificate(variant), {row.name: row for row in result}
        compared = _measured_against(variant, known)
        direct = compared is None or compared.exact
        alike = (
            certificate is not None and _text(certificate) == _text(first) and certificate["loss"] is not None
        )
        kept = whole if certificate is None else _numbers(certificate, 1)
        losses = first["loss"] if certificate is None else certificate["loss"]
        result.append(
            Row(
                name=variant["variant"],
                how=how(variant),
                about=variant["about"],
                look=Look.of(index),
                kv_bytes=size * kept // whole,
                share=kept / whole,
                loss=None if losses is None else losses[0 if certificate is None else 1],
                over=_over(variant, made) if alike else None,
                tokens_per_second=variant["costs"]["tokens_per_second_cached"][0],
                exact=direct and (certificate is None or certificate["exact"]),
                direct=direct,
                measured_against=None if compared is None else compared.name,
                certificate=certificate,
                variant=variant,
            )
        )
    return result


def how(variant: Record) -> str:
    """Describe in a few words how a variant was made."""
    if variant["kind"] == "converted":
        options = variant["convert"]
        sizes = {
            "kv_fraction": lambda size: percent(size),
            "kv_rank": lambda size: f"rank {size}",
            "n_kv_head": lambda size: f"{size} KV heads",
        }
        given = [describe(options[key]) for key, describe in sizes.items() if options.get(key) is not None]
        return ", ".join([f"converted to {options.get('to') or 'the same'}", *given])
    if variant["kind"] == "given":
        return "given"
    return f"{variant['kind']}, {variant['runs'][0]['steps']:,} steps"


def findings(variants: Sequence[Row]) -> list[str]:
    """Return the findings; all losses are of one source on one text, so they can be compared."""
    slow = rebuilding([row.variant for row in variants])
    return [*_free(variants), *_rivals(variants), *_healed(variants), *([slow] if slow else [])]


def chart(variants: Sequence[Row]) -> Panel:
    """Plot the loss over the source against the bytes per token of the cache."""
    by_name = {row.name: row for row in variants}
    series = []
    for row in variants:
        parent = by_name.get(row.variant["from"] or "")
        path = [] if parent is None else [(end.kv_bytes, _height(end)) for end in (parent, row)]
        if path and all(height is not None for _, height in path):
            x, y = zip(*path, strict=True)
            series.append(Series(name=row.name, x=x, y=y, look=row.look, faint=True))
    for row in variants:
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
        faint="from the model it was made from",
    )
    notes = [
        "Lower and further left is better. The circle is the source, diamonds were converted, stars healed after "
        "conversion; a dotted line connects a variant with the model it was made from."
    ]
    return Panel(name="shrink", title="Loss against KV cache", charts=[drawn], notes=notes)


def source_line(document: Record) -> str:
    """Describe the source in a line."""
    first = rows(document)[0]
    text = f"{sanitise(first.name, 60)}: {document['conversion']['architecture']}; {first.how}"
    certificate = next(record for row in rows(document) if (record := row.certificate) is not None)
    if first.loss is None:
        return text + "."
    return f"{text}; loss {first.loss:.4f} nats per token on {certificate['logits']['tokens']:,} held-out tokens."


def span(values: Sequence[float]) -> str:
    """Format a difference over several seeds: its mean and range."""
    mean, low, high = (round(value, 4) + 0.0 for value in values)
    return f"{mean:+.4f}" if low == high else f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def percent(share: float) -> str:
    """Format a share with three digits, such as 12.5 %, or more before the point."""
    return f"{100 * share:.3g} %" if share < 9.995 else f"{100 * share:,.0f} %"


def texts(named: Any) -> str:
    """Describe the texts of a certificate, if it has any."""
    if not named:
        return "random text, because none was given"
    several = named if isinstance(named, list) else [named]
    return "; ".join(
        f"{text.get('name', 'a text')} ({text['read']:,} of its {text['tokens']:,} tokens, "
        f"sha256 {text['sha256'][:12]}...)"
        for text in several
    )


def present(document: Record) -> None:
    """Print every variant beside the source, the findings, and how each continues the same prompt."""
    variants = rows(document)
    cells = [
        (
            sanitise(row.name, 60),
            row.how,
            f"{row.kv_bytes:,}",
            percent(row.share),
            _loss(row),
            f"{row.tokens_per_second:,.0f}",
        )
        for row in variants
    ]
    notes = (
        "KV bytes per token, over all layers, in the source's dtype. Loss: nats per token of the source, and the "
        "difference to it, on a held-out text; exact is the same function up to rounding. tok/s: greedy, one "
        "sequence, medians."
    )
    show(document["about"], HEADER, cells, notes, texts=(0, 1))
    console = Console()
    for finding in findings(variants):
        print(wrapped(inert(finding), console))
    print()
    names = [sanitise(row.name, 60) for row in variants]
    wide = min(max(map(len, names)), NAME)
    for name, row in zip(names, variants, strict=True):
        words = " ".join(sanitise(row.variant["runs"][0]["sample"], MOST_SAMPLE).split())
        head = f"{name:{wide}}"
        print(f"{head}  {words[: max(SAMPLE - len(head), NAME)]}...")
    print()


def proof(export: Record) -> str:
    """Describe the result of reading an export back."""
    return (
        f"{export['architecture']}, read back by {export['reader']}: over {export['tokens']:,} tokens no logit differs "
        f"by more than {export['max_error']:.1e}, and {100 * export['same_choice']:.4g} % of the likeliest tokens "
        "are the same"
    )


def _loss(row: Row) -> str:
    if row.certificate is None:
        return "" if row.loss is None else f"{row.loss:.4f}"
    if row.exact:
        return "exact"
    return "?" if row.over is None else span(row.over)


def _certificate(variant: Record) -> Record | None:
    certificate: Record | None = variant["runs"][0]["certificate"]
    return certificate


def _numbers(certificate: Record, after: int) -> int:
    """Return the numbers that a token adds to the cache, of all layers, before or `after` the conversion."""
    return sum(layer["kv_numbers"][after] for layer in certificate["layers"])


def _text(certificate: Record) -> Any:
    """Return what a loss was measured on: the text and the length of its windows."""
    return None if certificate["test"] is None else (certificate["test"]["sha256"], certificate["length"])


def _measured_against(variant: Record, known: Mapping[str, Row]) -> Row | None:
    """Return the row of the model that a certificate compares with: for a healed variant, its teacher's."""
    parent = known.get(variant["from"] or "")
    if parent is None or variant["kind"] != "healed":
        return parent
    return known[parent.variant["from"]]


def _over(variant: Record, first: Record) -> list[float]:
    """Return the loss minus that of the source, which the certificates of the `first` conversion have."""
    losses = [[run["certificate"]["loss"] for run in one["runs"]] for one in (first, variant)]
    values = [after - before for (before, _), (_, after) in zip(*losses, strict=True)]
    return [sum(values) / len(values), min(values), max(values)]


def _height(row: Row) -> float | None:
    if row.certificate is None:
        return 0.0
    return None if row.over is None else row.over[0]


def _free(variants: Sequence[Row]) -> Iterator[str]:
    for row in variants:
        if row.exact and row.share < 1:
            share = percent(row.share)
            yield f"{sanitise(row.name)} keeps every logit, up to rounding, with {share} of the KV cache."


def _rivals(variants: Sequence[Row]) -> Iterator[str]:
    """Yield a comparison of approximations of equal size."""
    lossy = [row for row in variants if row.over is not None and row.variant["kind"] == "converted"]
    for size in sorted({row.kv_bytes for row in lossy}, reverse=True):
        several = sorted(
            (row for row in lossy if row.kv_bytes == size), key=lambda row: row.over[0] if row.over else 0.0
        )
        if len(several) > 1:
            losses = ", ".join(f"{span(row.over)} ({sanitise(row.name)})" for row in several if row.over)
            yield f"{percent(several[0].share)} of the KV cache costs, in nats per token: {losses}."


def _healed(variants: Sequence[Row]) -> Iterator[str]:
    by_name = {row.name: row for row in variants}
    for row in variants:
        parent = by_name.get(row.variant["from"] or "")
        if row.variant["kind"] == "healed" and parent and parent.over and row.over:
            yield (
                f"{row.variant['runs'][0]['steps']:,} steps of healing bring {sanitise(parent.name)} from "
                f"{span(parent.over)} to {span(row.over)} nats per token over the source."
            )
