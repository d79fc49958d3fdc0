"""No claim between unlike things, none that the seeds do not bear (seeds B23)."""

import random
from itertools import product
from statistics import fmean, stdev

import pytest

from rehead.study.chance import LEVEL, chance, corrected
from rehead.study.claims import beaten, claim, claims, unlike


def variant(name, losses, *, steps=600, length=128, text="a", blocks=64, size=100, kind="trained", **at):
    """Losses by seed at `length`; of other lengths under `at`, as l128=[...]."""
    runs = [{"val_loss_at": {str(length): loss}} for loss in losses]
    for key, values in at.items():
        for run, value in zip(runs, values, strict=True):
            run["val_loss_at"][key[1:]] = value
    on = {"text": {"path": text}, "blocks": blocks}
    return {
        "variant": name, "steps": steps, "length": length, "on": on, "runs": runs, "size": size, "kind": kind,
    }  # fmt: skip


BASE = variant("Base", [2.0, 2.1])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (variant("X", [1.0, 1.1], steps=400), "400 steps, not 600"),
        (variant("X", [1.0, 1.1], length=256), "blocks of 256 tokens, not 128"),
        (variant("X", [1.0, 1.1], text="b"), "another text or tokenizer"),
        (variant("X", [1.0, 1.1], blocks=32), "validated on 32 blocks, not 64"),
    ],
)
def test_unlike_variants_are_not_compared(other, why):
    assert unlike(BASE, other) == [why]
    assert claim(BASE, other) == {"variant": "X", "against": "Base", "unlike": [why]}
    assert not beaten(BASE, [other], lambda one: one["size"])


def test_every_reason_is_given():
    other = variant("X", [1.0], steps=1400, length=64, text="b", blocks=2)
    assert len(unlike(BASE, other)) == 4
    assert unlike(BASE, other)[-1] == "1,400 steps, not 600"


def test_different_lengths_are_compared_at_the_longest_common_one():
    grown = variant("Grown", [1.5, 1.6], length=256, l128=[1.6, 1.7])
    found = claim(BASE, grown)
    assert (found["length"], found["shorter"], found["told_apart"]) == (128, True, True)
    assert found["difference"] == pytest.approx(-0.4)
    both = claim(grown, variant("Other", [1.7, 1.8], length=256, l128=[9, 9]))
    assert (both["length"], both["shorter"]) == (256, False)
    assert both["difference"] == pytest.approx(0.2)


def test_a_conversion_without_chance_has_no_repetitions():
    """Its losses are equal for all seeds: no spread, and no probability that one would make."""
    given = variant("Given", [2.0] * 3, kind="given")
    made = variant("Made", [2.0 + 1e-7] * 3, kind="converted")
    found = claim(given, made)
    assert (found["told_apart"], found["p"], found["seeds"]) == (False, 1.0, 1)
    trained = claim(variant("Trained", [1.0, 1.01, 0.99]), made)
    assert (trained["told_apart"], trained["seeds"]) == (True, 3)
    assert trained["p"] == chance([1.0, 1.01, 0.99], [2.0 + 1e-7])


def test_no_probability_is_negative():
    for n, power in product(range(2, 17), range(12)):
        sample = [0.0, 1.0] * n
        assert 0 <= chance(sample, [value + 10.0**power for value in sample]) < 1


def test_the_seeds_of_a_given_model_are_no_repetitions():
    given = variant("Given", [2.0, 2.0], kind="given")
    two = claim(given, variant("Other", [1.0, 1.0], kind="given"))
    assert (two["seeds"], two["told_apart"]) == (1, False)
    trained = claim(given, variant("Trained", [1.0, 1.1]))
    assert (trained["seeds"], trained["told_apart"]) == (2, True)
    assert not claim(given, variant("Once", [1.0]))["told_apart"]


def test_what_beats_is_no_larger_and_told_apart_below():
    size = {"bytes_of": lambda one: one["size"]}
    below, equal = variant("X", [1.4, 1.5], size=100), variant("X", [1.8, 1.99], size=50)
    assert beaten(BASE, [equal, below], **size)
    assert not beaten(below, [BASE], **size)
    assert not beaten(BASE, [equal], **size)
    assert not beaten(BASE, [variant("X", [1.0, 1.1], size=101)], **size)
    assert not beaten(variant("Y", [2.0]), [variant("X", [1.0])], **size)  # one seed tells nothing apart
    assert not beaten(BASE, [], **size)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (6, 2.4469), (10, 2.2281)],
)
def test_chance_is_that_of_the_table_of_student_s_t(freedom, t):
    """Of the values that are exceeded once in 20 times; beside a known value, and of two samples."""
    draw = random.Random(freedom).gauss
    values = [draw(0, 1) for _ in range(freedom + 1)]
    known = fmean(values) + t * stdev(values) / len(values) ** 0.5
    assert chance(values, [known]) == chance([known], values) == pytest.approx(LEVEL, rel=1e-3)
    if freedom % 2 == 0:
        one, other = ([draw(0, 1) for _ in range(freedom // 2 + 1)] for _ in range(2))
        error = ((stdev(one) ** 2 + stdev(other) ** 2) / len(one)) ** 0.5
        moved = [value - fmean(other) + fmean(one) - t * error for value in other]
        assert chance(one, moved) == pytest.approx(LEVEL, rel=1e-3)


def test_equal_variants_are_told_apart_once_in_20_times():
    draw, n = random.Random(0).gauss, 4000
    found = sum(chance([draw(0, 1), draw(0, 1)], [draw(0, 1), draw(0, 1)]) < LEVEL for _ in range(n))
    assert found / n == pytest.approx(LEVEL, abs=0.015)


def test_a_correction_claims_what_holm_s_procedure_does():
    """Of m chances in order, the k-th is claimed below LEVEL / (m + 1 - k) if all before it are."""
    draw = random.Random(0).random
    for m in [*range(12)] * 200:
        chances = [draw() ** 3 / 5 for _ in range(m)]
        claimed, left = set(), sorted(range(m), key=chances.__getitem__)
        while left and chances[left[0]] < LEVEL / len(left):
            claimed.add(left.pop(0))
        assert {at for at, p in enumerate(corrected(chances)) if p < LEVEL} == claimed
        assert all(p <= q <= 1 for p, q in zip(chances, corrected(chances), strict=True))


def test_a_study_of_many_equal_variants_claims_something_once_in_20_times():
    draw, n = random.Random(0).gauss, 600

    def study():
        made = [variant(str(name), [draw(2, 0.1) for _ in range(3)]) for name in range(8)]
        return [claim(made[0], other) for other in made[1:]], claims(made[0], made[1:])

    alone, together = zip(*(study() for _ in range(n)), strict=True)
    assert sum(any(verdict["told_apart"] for verdict in one) for one in alone) / n > 3 * LEVEL
    assert sum(any(verdict["told_apart"] for verdict in one) for one in together) / n < LEVEL + 0.02


def test_what_is_not_comparable_is_no_comparison():
    near, far = variant("X", [1.7, 1.8]), variant("Y", [1.0, 1.1], steps=400)
    assert claims(BASE, [far, near]) == [claim(BASE, far), claim(BASE, near)]
    assert claims(BASE, [near, near])[0]["p"] == 2 * claim(BASE, near)["p"]


def test_seeds_that_do_not_matter():
    """Two values without a spread, as of a model of one seed, differ or do not."""
    assert chance([2.0, 2.0], [2.0, 2.0]) == chance([2.0], [1.0]) == 1
    assert chance([2.0, 2.0], [1.0, 1.0]) == 0
