"""What is said of a conversion that is done: warnings of its texts, and the refusal of a loss."""

import warnings
from dataclasses import replace

from rehead.conversion.certificate import Certificate
from rehead.conversion.reading import Texts


def tell_fitted(texts: Texts) -> None:
    """Warn of a test text that begins with what was fitted to, as the whole text of a run does."""
    test = texts.test
    if test is None:
        return
    for text in texts.calibration:
        if replace(test, ids=test.ids[: len(text.ids)]).sha256 == text.sha256:
            warnings.warn(
                f"the test text begins with {text.name}, which was fitted to: the loss looks better than it is",
                stacklevel=3,
            )


def without_lessons(teach: int) -> int:
    """Return 0, with a warning that measured ranks leave nothing to teach."""
    warnings.warn(f"the ranks that were chosen are exact: teach={teach} has nothing to learn", stacklevel=3)
    return 0


def tell_loss(most: float, before: float, after: float) -> None:
    """Warn if the loss on the test text rises by more than `most`, which bounds it on the calibration text only."""
    if after - before > most:
        warnings.warn(
            f"--max-loss {most:g} holds on the calibration text; on the test text the loss rises by "
            f"{after - before:.4f} nats per token",
            stacklevel=3,
        )


def tell_unread(certificate: Certificate) -> None:
    """Warn that a calibration text was given to methods that do not use one."""
    methods = ", ".join(dict.fromkeys(method for layer in certificate.layers for method in layer.methods))
    measured = " It is only measured on the part held out of it." if certificate.held_out else ""
    warnings.warn(
        f"method {methods} does not use a text: nothing was fitted to the calibration.{measured}",
        stacklevel=3,
    )


def refusal(certificate: Certificate, *, can_read: bool) -> str:
    """Return the refusal of a lossy conversion that was not allowed to lose anything."""
    logits = certificate.logits
    flips = f"{100 * logits['argmax_flips']:.2f} % of the likeliest tokens change, KL {logits['kl']:.2e} nats"
    loss = how = ""
    if certificate.loss is None:
        how = " on random tokens" + ("; give --calibration TEXT to measure on text" if can_read else "")
    else:
        loss = "the loss would go from {:.4f} to {:.4f} nats per token, ".format(*certificate.loss)
    return f"this conversion is lossy: {loss}{flips}{how}. Nothing was written. Accept it with --allow-loss."
