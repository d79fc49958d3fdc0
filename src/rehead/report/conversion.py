"""Prints a plan and a certificate on the terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from rehead.conversion import Certificate
from rehead.conversion.events import Healing
from rehead.conversion.page import PAGE
from rehead.conversion.plan import Plan, Row
from rehead.conversion.variants import share
from rehead.report.table import show
from rehead.report.text import inert

PARTS = ("variant", "K+V parameters", "output projection", "projection FLOPs", "score and sum FLOPs")
HEADER = ("variant", "KV B/\ntoken", "share", "cache", "parameters", "FLOPs/step", "read/step", "conversion")
LEAST_NEEDED = (2, 3, 5, 4, 6)
"""Columns that a narrow terminal leaves out, from the last on: share, cache, FLOPs, parameters, bytes read."""


def present_plan(plan: Plan) -> None:
    """Print the table of all variants with the reasons below it, the advice, and notes."""
    title = f"{plan.rows[0].variant}: context {plan.context:,}, batch {plan.batch_size}, {plan.dtype}"
    if plan.kv_dtype != plan.dtype:
        title += f", cache in {plan.kv_dtype}"
    header, full = list(HEADER), plan.rows[0].gpu_kv_bytes_per_token
    if plan.tp > 1:
        title += f", what one of {plan.tp} GPUs caches"
        header[1], header[3] = "KV B/\ntoken, GPU", "cache, GPU"
        header[5], header[6] = "FLOPs/\nstep, all", "read/\nstep, all"
    show(title, header, [_row(row, full) for row in plan.rows], texts=(0, 7), optional=LEAST_NEEDED)
    console = Console(highlight=False, markup=False)
    for line in _ways(plan.rows):
        console.print(_filled(inert(line), console.width, "  "))
    for line in ("", plan.advice, *plan.notes):
        console.print(_filled(inert(line), console.width, ""))


def present_parts(plan: Plan) -> None:
    """Print the parts of the first layer's attention, for every variant."""
    rows = [
        (
            row.variant,
            f"{row.layer.kv_parameters:,}",
            f"{row.layer.output_projection[0]:,} x {row.layer.output_projection[1]:,}",
            f"{row.layer.projection_flops:,}",
            f"{row.layer.attention_flops:,}",
        )
        for row in plan.rows
        if row.layer is not None
    ]
    if not rows:
        return
    notes = "Per sequence. A multiply-add is 2 FLOPs; the causal mask is ignored."
    show(f"One layer's attention over {plan.context:,} tokens", PARTS, rows, notes)


def present_certificate(
    certificate: Certificate, folder: Path, asked: float | None = None, *, measured: bool = False
) -> None:
    """Print a conversion's certificate in a few lines.

    `asked` is the share of the cache that was asked for; `measured` ranks come from a few that were tried per layer.
    """
    before, after = certificate.ends
    logits = certificate.logits
    kind = "exact" if certificate.exact else "approximate"
    if certificate.exact and logits["argmax_flips"]:
        kind += f"; what changes below is the rounding of the new weights to {certificate.dtype}"
    print(f"{before} -> {after}: {kind}")
    print(sizes(certificate, None if asked is None else _reached(certificate, asked, measured)))
    if certificate.loss is not None:
        old, new = certificate.loss
        print(
            f"loss          {old:.4f} -> {new:.4f} nats per token ({round(new - old, 4) + 0.0:+.4f}"
            f"{_uncertain(logits)})"
        )
    print(predictions(certificate))
    if certificate.healing and (line := _healed(certificate.healing[-1])):
        print(line)
    print(f"certificate   {folder / PAGE}")


def _uncertain(logits: dict[str, float]) -> str:
    """Return the standard error of the loss's change where it is worth a word; older certificates have none."""
    error = round(logits.get("change_error", 0.0), 4)
    return f", standard error {error:.4f}" if error else ""


def _healed(healing: Healing) -> str:
    """Return the line that says what the last healing brought or cost; empty where the text before was another."""
    before, after = healing.kl
    if before is None:
        return ""
    return f"healed        KL {before:.2e} nats before, {after:.2e} after {healing.steps:,} steps"


def sizes(certificate: Certificate, part: str | None = None) -> str:
    """Return what becomes of the KV cache, its share also in other words, and of the number of parameters."""
    before, after = certificate.kv_bytes_per_token
    part = part or share(after, before)
    text = f"KV cache      {before:,} -> {after:,} bytes per token, {certificate.dtype} ({part})"
    old, new = certificate.parameters
    if new != old:
        text += f"\nparameters    {old:,} -> {new:,} ({round(100 * (new / old - 1), 1) + 0.0:+} %)"
    return text


def predictions(certificate: Certificate) -> str:
    """Return the line that says by how much predictions change."""
    logits, where = certificate.logits, "random tokens"
    if certificate.test is not None:
        where = "a held-out text" if certificate.held_out else certificate.test.name
    return (
        f"predictions   KL {logits['kl']:.2e} nats, {100 * logits['argmax_flips']:.2f} % of the likeliest tokens "
        f"change, logits less their mean within {logits['max_error']:.1e} "
        f"({_percent(logits['relative_error'])} of the largest; on {where})"
    )


def _percent(share: float) -> str:
    """Return a share in per cent, with two digits or, above 100 %, none after the point."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"


def _reached(certificate: Certificate, asked: float, measured: bool = False) -> str:
    """Return the new cache as a share of the source's, and why it is not the one asked for."""
    before, after = certificate.kv_bytes_per_token
    reached, wanted = (f"{100 * share:.4g} %" for share in (after / before, asked))
    if reached == wanted:
        return reached
    if certificate.exact:
        return f"{reached}: an exact latent needs less than the {wanted} asked for"
    if measured:
        return f"{reached}: the measured ranks nearest below the {wanted} asked for"
    rank = after * len(certificate.layers) / sum(layer.kv_numbers[1] for layer in certificate.layers)
    if asked * before - after > rank:  # the bytes of one number more in every layer
        return f"{reached}: its latent needs less than the {wanted} asked for"
    return f"{reached}: {wanted} rounded {'down' if after < asked * before else 'up'} to a whole rank"


def _ways(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how rows are made, and what is to be known about them; those of which it is the same together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        makes = row.verdict in ("exact", "approximate")
        command = f" ({row.command})" if makes and row.command else ""
        if command or row.why:
            alike.setdefault((command, row.why), []).append(row.variant)
    for (command, why), variants in alike.items():
        yield f"{'; '.join(variants)}{command}{f': {why}' if why else ''}"


def _filled(line: str, width: int, indent: str) -> str:
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def _row(row: Row, full: int) -> tuple[str, ...]:
    return (
        row.variant,
        f"{row.gpu_kv_bytes_per_token:,}",
        share(row.gpu_kv_bytes_per_token, full) if full else "",
        _bytes(row.gpu_cache_bytes),
        f"{row.parameters:,}",
        f"{row.decode_flops / 1e6:,.1f} M"
        if row.decode_flops < 1e12
        else f"{row.decode_flops / 1e12:,.2f} T",
        _bytes(row.decode_bytes),
        row.verdict,
    )


def _bytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"
