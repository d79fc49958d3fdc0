"""No claim between unlike things, none that the seeds do not bear (seeds B23)."""

import pytest

from rehead.study.claims import beats, claim, unlike


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
    assert not beats(other, BASE, lambda one: one["size"])


def test_every_reason_is_given():
    other = variant("X", [1.0], steps=1400, length=64, text="b", blocks=2)
    assert len(unlike(BASE, other)) == 4
    assert unlike(BASE, other)[-1] == "1,400 steps, not 600"


def test_different_lengths_are_compared_at_the_longest_common_one():
    grown = variant("Grown", [1.5, 1.6], length=256, l128=[1.8, 1.9])
    found = claim(BASE, grown)
    assert (found["length"], found["shorter"], found["told_apart"]) == (128, True, True)
    assert found["difference"] == pytest.approx(-0.2)
    both = claim(grown, variant("Other", [1.7, 1.8], length=256, l128=[9, 9]))
    assert (both["length"], both["shorter"]) == (256, False)
    assert both["difference"] == pytest.approx(0.2)


def test_the_seeds_of_a_given_model_are_no_repetitions():
    given = variant("Given", [2.0, 2.0], kind="given")
    two = claim(given, variant("Other", [1.0, 1.0], kind="given"))
    assert (two["seeds"], two["told_apart"]) == (1, False)
    trained = claim(given, variant("Trained", [1.0, 1.1]))
    assert (trained["seeds"], trained["told_apart"]) == (2, True)
    assert not claim(given, variant("Once", [1.0]))["told_apart"]


def test_what_beats_is_no_larger_and_told_apart_below():
    size = {"bytes_of": lambda one: one["size"]}
    below, equal = variant("X", [1.8, 1.9], size=100), variant("X", [1.8, 2.05], size=50)
    assert beats(below, BASE, **size)
    assert not beats(BASE, below, **size)
    assert not beats(equal, BASE, **size)
    assert not beats(variant("X", [1.0, 1.1], size=101), BASE, **size)
    assert not beats(variant("X", [1.0]), variant("Y", [2.0]), **size)  # one seed tells nothing apart
