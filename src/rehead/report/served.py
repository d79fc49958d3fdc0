"""Prints in which number formats a model can be served."""

from collections.abc import Sequence

from rehead.measure.served import COMPUTED, Verdict
from rehead.report.table import show

FEW = 256
"""Tokens below which a verdict says how few they were."""
HEADER = ("format", "KL", "loss", "tokens\nchanged", "KL, computed\nin it", "verdict")


def present(title: str, verdicts: Sequence[Verdict]) -> None:
    """Print a table and a line per format."""
    show(
        title,
        HEADER,
        [_row(verdict) for verdict in verdicts],
        "KL: the mean divergence from the predictions of the exact weights, in nats. loss: its change in nats per "
        "token. tokens changed: their likeliest successor differs. computed in it: as engines do in 16 bits, on "
        f"{COMPUTED:,} tokens or one block.",
        texts=(0, 5),
    )
    for verdict in verdicts:
        print(line(verdict))


def line(verdict: Verdict) -> str:
    """Return the verdict in a sentence."""
    rows = ", ".join(
        f"{100 * share:.3g} % of the rows of {name.removesuffix('.weight')}"
        for name, share in verdict.lost.items()
    )
    few = f", on {counted(verdict.tokens)} only" if verdict.kl is not None and verdict.tokens < FEW else ""
    if verdict.problem is not None:
        lost = f" It loses {rows}." if rows else ""
        return f"{verdict.dtype}: NOT SAFE{few}: {verdict.problem}{lost}"
    if rows:
        return (
            f"{verdict.dtype}: safe on this text{few}. It loses {rows}, which did not matter here: check a text "
            "like those you will serve, with --data."
        )
    return f"{verdict.dtype}: safe{few}"


def counted(tokens: int) -> str:
    """Return a number of tokens in words."""
    return f"{tokens:,} token{'s' * (tokens != 1)}"


def _row(verdict: Verdict) -> tuple[str, ...]:
    word = "safe" if verdict.safe else "NOT SAFE"
    if verdict.kl is None or verdict.loss is None or verdict.loss_exact is None:
        return (verdict.dtype, "-", "-", "-", "-", word)
    computed = "" if verdict.kl_computed is None else f"{verdict.kl_computed:.2g}"
    change = f"{verdict.loss - verdict.loss_exact:+.4f}"
    return (verdict.dtype, f"{verdict.kl:.2g}", change, f"{verdict.argmax_flips:.2%}", computed, word)
