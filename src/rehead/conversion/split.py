"""How many numbers of an uneven cache should rotate: the best of a few widths, as measured."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rehead.attention import AttentionConfig, LatentConfig
from rehead.conversion.converter import Converter
from rehead.conversion.frequencies import are_open
from rehead.conversion.target import Target
from rehead.data import Batch
from rehead.errors import ConfigError, UsageError
from rehead.measure.fidelity import compare
from rehead.stages import staged

SHARES = (1 / 6, 1 / 4, 1 / 3, 5 / 12, 1 / 2, 2 / 3)
"""Parts of the cache that are tried for the rotary part."""
TRIAL_TOKENS = 16_384
"""Tokens read to try a width, of all texts together: half of the windows to fit to, the others to measure on."""


def best_split(converter: Converter, target: Target) -> tuple[Sequence[AttentionConfig], int]:
    """Return the attentions of an uneven `target` with a rotary width that changes the predictions little.

    Also returns the number of tokens that were read for it: none where there is one width.

    Widths are tried from the usual one upwards, then downwards, as long as the KL to the source falls. For each, the
    model is converted on one half of the windows and measured on the other. Raises UsageError for a single window.
    """
    usual, widths = _widths(converter, target)
    fit, measured = _halves(converter.read(TRIAL_TOKENS))
    if not measured:
        raise UsageError(
            "a rotary width is measured on half of the text, which has one window. Give a longer --calibration, or a "
            "smaller --length."
        )
    if len(widths) == 1:
        return converter.attentions(target), 0
    with tempfile.TemporaryDirectory(dir=converter.scratch, ignore_cleanup_errors=True) as folder:
        trial = Converter(
            converter.model,
            converter.method,
            length=converter.length,
            seed=converter.seed,
            scratch=Path(folder),
        )
        trial.blocks = fit

        def lost(width: int) -> float:
            made, _ = trial.follow(trial.attentions(replace(target, rope_dim=width)))
            return compare(converter.model, made, measured).kl

        *_, best = staged(_descent(widths, usual, lost), "trying how many numbers rotate", None, "widths")
    return converter.attentions(replace(target, rope_dim=best)), TRIAL_TOKENS


def _widths(converter: Converter, target: Target) -> tuple[int, list[int]]:
    """Return the usual rotary width, and those that can be tried, in order."""
    config = converter.config

    def made(rope_dim: int | None) -> list[LatentConfig]:
        wanted = replace(target, rope_dim=rope_dim)
        pairs = ((layer, wanted.attention(layer, config.n_embd)) for layer in config.attention)
        return [one for layer, one in pairs if are_open(layer, one) and isinstance(one, LatentConfig)]

    first = made(None)[0]
    total, widths = first.kv_lora_rank + first.qk_rope_head_dim, {first.qk_rope_head_dim}
    for width in {2 * round(share * total / 2) for share in SHARES}:
        try:
            made(width)
        except ConfigError:  # more than rotate, or nothing left for the latent
            continue
        widths.add(width)
    return first.qk_rope_head_dim, sorted(widths)


def _descent(widths: Sequence[int], start: int, lost: Callable[[int], float]) -> Iterator[int]:
    """Yield the best width so far after each that was tried."""
    best, least = start, lost(start)
    yield best
    for step in (1, -1):
        index = widths.index(best) + step
        while 0 <= index < len(widths):
            found = lost(widths[index])
            if found < least:
                best, least = widths[index], found
            yield best
            if best != widths[index]:
                break
            index += step
        if best != start:
            return


def _halves(blocks: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return every second window, and the others."""
    halves: tuple[list[Batch], list[Batch]] = [], []
    for inputs, targets in blocks:
        if len(inputs) == 1:
            min(halves, key=len).append((inputs, targets))
            continue
        for first, half in enumerate(halves):
            half.append((inputs[first::2], targets[first::2]))
    return halves
