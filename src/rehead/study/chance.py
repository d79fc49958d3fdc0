"""How often seeds alone make two means differ."""

import math
from collections.abc import Sequence
from statistics import fmean

LEVEL = 0.05
"""A difference is claimed if variants of equal means would show as large a one less often than this."""


def chance(base: Sequence[float], other: Sequence[float]) -> float:
    """Return how often samples of equal means differ by as much as these: Student's t-test, both sides (Student, 1908).

    Both spread alike. A sample of one value is that of a model that does not depend on a seed, and known. With no
    freedom left, two single values, the answer is 1.
    """
    samples = [sample for sample in (base, other) if len(sample) > 1]
    freedom = sum(len(sample) - 1 for sample in samples)
    difference = fmean(other) - fmean(base)
    if not freedom or not difference:
        return 1.0
    variance = sum((value - fmean(sample)) ** 2 for sample in samples for value in sample) / freedom
    error = math.sqrt(variance * sum(1 / len(sample) for sample in samples))
    return _beyond(difference / error, freedom) if error else 0.0


def corrected(chances: Sequence[float]) -> list[float]:
    """Return chances of several comparisons, corrected for their number (Holm, 1979).

    Of sets of comparisons in which nothing differs, one in 20 has a corrected chance below 0.05.
    """
    order = sorted(range(len(chances)), key=chances.__getitem__)
    found, least = [1.0] * len(chances), 0.0
    for rank, at in enumerate(order):
        found[at] = least = max(least, min(1.0, (len(chances) - rank) * chances[at]))
    return found


def _beyond(t: float, freedom: int) -> float:
    """Return the probability that Student's t is at least as far from 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    term = math.cos(angle) if freedom % 2 else 1.0
    total = 0.0
    for k in range(freedom % 2 + 1, freedom, 2):
        total, term = total + term, term * math.cos(angle) ** 2 * k / (k + 1)
    within = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + within) if freedom % 2 else within))
