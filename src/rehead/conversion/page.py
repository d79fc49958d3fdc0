"""CONVERSION.md: the certificate in Markdown."""

import re
from collections.abc import Iterable, Sequence

from rehead.conversion.blocks import BATCH_TOKENS
from rehead.conversion.certificate import Certificate, Layer, Text
from rehead.conversion.texts import SELF

PAGE = "CONVERSION.md"

MARKUP = re.compile(r"[\\`*\[\]<>|&#~!]|(?<![^\W_])_|_(?![^\W_])")
"""What means something to Markdown or HTML inside a line: an underscore only where no word goes on beyond it."""


def escaped(text: object) -> str:
    """Return a string of a file as one line of Markdown that shows it and does nothing else."""
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", " ".join(str(text).split()))


def page(certificate: Certificate) -> str:
    """Return the certificate as Markdown."""
    first = certificate.layers[0]
    kinds = {(layer.source, layer.result) for layer in certificate.layers}
    others = "" if len(kinds) == 1 else ", and others (below)"
    parts = [
        "# Conversion",
        f"From **{escaped(first.source)}** to **{escaped(first.result)}**{others}. "
        + ("**Exact**: the same function but for rounding." if certificate.exact else "**Approximate.**"),
        *_earlier(certificate),
        markdown(("", "before", "after"), _figures(certificate)),
        *_experts(certificate),
        "## How far the predictions moved",
        _measured(certificate),
        markdown(("", ""), _logits(certificate)),
        "## What was done to each layer" + (", before it was healed" if certificate.healing else ""),
        *_layers(certificate),
        "Why: "
        + "; ".join(dict.fromkeys(escaped(why) for layer in certificate.layers for why in layer.why))
        + "."
        if any(layer.why for layer in certificate.layers)
        else "Nothing had to change.",
        "## Where",
        _where(certificate),
    ]
    if certificate.healing:
        header = ("steps", "tokens per step", "KL to the source", "loss")
        parts[-2:-2] = ["## Healing", markdown(header, _healing(certificate))]
    return "\n\n".join(parts) + "\n"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figures(certificate: Certificate) -> list[tuple[str, str, str]]:
    old, new = certificate.kv_bytes_per_token
    rows = [
        ("KV cache, bytes per token", f"{old:,}", f"{new:,}"),
        ("KV cache, share of the source's", "100 %", f"{100 * new / old:.4g} %"),
        ("parameters", *(f"{size:,}" for size in certificate.parameters)),
    ]
    if certificate.loss is not None:
        rows.insert(0, ("loss, nats per token", *(f"{loss:.4f}" for loss in certificate.loss)))
    return [(name, before, after) for name, before, after in rows]


def _earlier(certificate: Certificate) -> list[str]:
    """Return a table of the conversions that made the source, whose losses are in no other figure."""
    if not certificate.earlier:
        return []
    rows = [
        (
            f"{escaped(one.source)} to {escaped(one.result)}",
            "exact" if one.exact else "approximate",
            f"{one.kl:.3g}",
            "" if one.loss is None else f"{one.loss[0]:.4f} to {one.loss[1]:.4f}",
            " to ".join(f"{size:,}" for size in one.kv_bytes_per_token),
            f"{one.healed:,}",
        )
        for one in certificate.earlier
    ]
    header = ("conversion", "", "KL to its source", "loss", "KV bytes per token", "healed, steps")
    return [
        "The source was itself made by conversions, the oldest first. What they lost is in no other figure here:",
        markdown(header, rows),
    ]


def _experts(certificate: Certificate) -> list[str]:
    if certificate.source.get("experts") is None:
        return []
    healed = " Healing left them so." if certificate.healing else ""
    return [
        f"Experts and their routers are those of the source: a conversion changes the attention only.{healed}"
    ]


def _measured(certificate: Certificate) -> str:
    if certificate.test is None:
        return "Compared on random tokens, since no text was given."
    text = (
        f"Compared on {certificate.logits['tokens']:,} tokens of {_named(certificate.test)}, "
        f"in windows of {certificate.length:,}."
    )
    if not certificate.held_out:
        text += " Whether it overlaps with what the model was trained on is not checked."
    elif not (certificate.calibration or certificate.healing):
        text += " It is held out of a text that nothing was fitted to."
    else:
        text += (
            " It is held out of what was fitted to, so of its kind: on other kinds of text more may be lost."
        )
    return text


def _named(text: Text) -> str:
    name, first = escaped(text.name), "a random token" if text.bos is None else "that token"
    if name == SELF:
        name = f"self (sampled from the source, at temperature 1, each window after {first})"
    begins = "" if text.bos is None else f"; each window begins with token {text.bos}"
    return f"{name} (sha256 of its ids {escaped(text.sha256[:12])}...{begins})"


def _logits(certificate: Certificate) -> list[tuple[str, str]]:
    logits = certificate.logits
    rows = [
        ("largest error of a logit, less the token's mean", f"{logits['max_error']:.3g}"),
        ("relative to the largest logit, less the mean", f"{logits['relative_error']:.3g}"),
        ("KL divergence from the source, nats per token", f"{logits['kl']:.3g}"),
        ("likeliest token is another", f"{100 * logits['argmax_flips']:.3g} %"),
    ]
    if certificate.loss is not None and "change_error" in logits:  # which older certificates lack
        words = "standard error of the loss's change, as if tokens were independent"
        rows.append((words, f"{logits['change_error']:.2g}"))
    return rows


def _layers(certificate: Certificate) -> list[str]:
    """Return what the columns of the table of layers mean, and the table."""
    words = (
        "Lost energy is the share of the keys' and values' energy that was dropped, as the method weighs it; output "
        "error the attention's RMS error on the same inputs, relative to its output, over at most the "
        f"first {BATCH_TOKENS:,} tokens compared, or one window."
    )
    if any("keep-rotations" in layer.steps for layer in certificate.layers):
        words += " Where keep-rotations is among the steps, lost energy has the share of what rotations matter, too."
    header = ["layer", "numbers per token", "steps", "lost energy", "output error"]
    rows = [_layer(index, layer) for index, layer in enumerate(certificate.layers)]
    if certificate.teach:
        words += (
            f" Taught is that error before and after the attention learned from the source's, in {certificate.teach} "
            "passes, on windows of the calibration held out of them and the inputs it gets in the converted model."
        )
        header.append("taught")
        for row, layer in zip(rows, certificate.layers, strict=True):
            row.append(
                "no" if layer.taught is None else " to ".join(f"{error:.2e}" for error in layer.taught)
            )
    return [words, markdown(header, rows)]


def _layer(index: int, layer: Layer) -> list[str]:
    before, after = layer.kv_numbers
    methods = f" ({escaped(', '.join(layer.methods))})" if layer.methods else ""
    return [
        str(index),
        f"{before} to {after}",
        (" -> ".join(map(escaped, layer.steps)) or "none") + methods,
        f"{layer.lost_energy:.2e}",
        f"{layer.output_error:.2e}",
    ]


def _healing(certificate: Certificate) -> list[tuple[str, ...]]:
    def change(pair: Sequence[float | None]) -> str:
        return " to ".join("?" if one is None else f"{one:.5g}" for one in pair)

    return [
        (str(one.steps), f"{one.batch_tokens:,}", change(one.kl), change(one.loss))
        for one in certificate.healing
    ]


def _where(certificate: Certificate) -> str:
    facts = ", ".join(f"{escaped(name)} {escaped(value)}" for name, value in certificate.environment.items())
    texts: dict[int, list[str]] = {}
    for text in certificate.calibration:
        part = f"{text.read:,} of the {text.tokens:,} tokens of {_named(text)}"
        texts.setdefault(text.length or certificate.length, []).append(part)
    windows = [f"{', and '.join(parts)}, in windows of {length:,}" for length, parts in texts.items()]
    fitted = ", and ".join(windows) or "no text"
    sums = ", ".join(f"{escaped(one[:12])}..." for one in certificate.source_sha256)
    source = f" The source's weights have the sha256 {sums}." if sums else ""
    kept = f"seed {certificate.seed}; weights and activations in {escaped(certificate.dtype)}"
    return f"Fitted to {fitted}; {kept}; {facts}.{source}"
