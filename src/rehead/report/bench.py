"""Prints a benchmark on the terminal."""

from collections.abc import Sequence

from rehead.measure.bench import Case, Times
from rehead.report.table import show

SPEED = (
    "prompt",
    "batch",
    "prefill ms",
    "of roof",
    "decode ms/step",
    "of roof",
    "tok/s\ncached",
    "tok/s\nuncached",
    "tok/s\nratio",
    "forwarded\ncached",
    "forwarded\nuncached",
)
MEMORY = (
    "prompt",
    "batch",
    "cache MB\npredicted",
    "cache MB\nheld",
    "peak MB",
    "read GB/s",
    "of MB",
    "GFLOP/s",
)


def present(title: str, cases: Sequence[Case]) -> None:
    """Print two tables: speed, and memory with the machine's roofline."""
    first = cases[0]
    show(
        f"{title}: {first.new_tokens} new tokens",
        SPEED,
        [_speed(case) for case in cases],
        "Median over the rounds, minimum to maximum in brackets. tok/s: new tokens over the time of the prompt and of "
        "decoding. forwarded: tokens per sequence that went through the "
        "model, each token once with a cache, the whole text at each step without. of roof: the least time that the "
        "machine needs for the same bytes and FLOPs, divided by the measured time.",
        texts=(),
        keys=2,
    )
    show(
        "Memory, and the roofline of this machine, measured in the same rounds",
        MEMORY,
        [_memory(case) for case in cases],
        "cache: after the last token. peak: all tensors during prefill, including weights and the whole cache. "
        "read: a block of the size that one decoded token reads, from the processor's caches if it fits. "
        "1 MB is 10^6 bytes.",
        texts=(),
        keys=2,
    )
    if not all(case.same_tokens for case in cases):
        print("the tokens differ with and without a cache: two of them were almost equally likely")


def _speed(case: Case) -> tuple[str, ...]:
    cached, uncached = case.cached, case.uncached
    return (
        f"{case.prompt_length:,}",
        str(case.batch_size),
        _milliseconds(cached.prefill),
        _share(case.prefill_share),
        _milliseconds(cached.decode),
        _share(case.decode_share),
        _digits(cached.tokens_per_second),
        _digits(uncached.tokens_per_second),
        f"{cached.tokens_per_second / uncached.tokens_per_second:.1f}",
        f"{cached.forwarded:,}",
        f"{uncached.forwarded:,}",
    )


def _memory(case: Case) -> tuple[str, ...]:
    return (
        f"{case.prompt_length:,}",
        str(case.batch_size),
        f"{case.cache_bytes_predicted / 1e6:,.3f}",
        f"{case.cache_bytes_held / 1e6:,.3f}",
        f"{case.peak_bytes / 1e6:,.1f}",
        f"{case.roofline.read / 1e9:,.1f}",
        f"{case.read_bytes / 1e6:,.1f}",
        f"{case.roofline.matmul / 1e9:,.0f}",
    )


def _milliseconds(times: Times) -> str:
    low, middle, high = (_digits(1000 * seconds) for seconds in (times.least, times.median, times.most))
    return f"{middle} ({low}-{high})"


def _digits(number: float) -> str:
    """Format three digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _share(times: Times) -> str:
    return f"{100 * times.median:.0f} %"
