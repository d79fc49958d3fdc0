"""The conversions that made a model, from the certificate in its folder."""

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rehead.checkpoint import read_at
from rehead.checkpoint.find import run_options
from rehead.config import ModelConfig, decode
from rehead.config.differing import DROPOUT, differing
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.events import Earlier
from rehead.conversion.source import weights_sha256
from rehead.errors import InvalidInput, ReheadError


def conversion_of(folder: Path) -> Certificate | None:
    """Return the certificate in a folder; None without one. Raises InvalidInput for a damaged one."""
    return Certificate.read(folder) if (folder / CERTIFICATE).is_file() else None


def exported_of(source: Path, folder: Path) -> Certificate | None:
    """Return the certificate of the model in `folder`, which an export of `source` reads.

    Warns of a healing that has not written one.
    """
    certificate, run = conversion_of(folder), None
    if certificate is None:
        with suppress(ReheadError):  # options of another version
            run = run_options(source)
    if run is not None and run.trainer.teacher is not None:
        warnings.warn(
            f"{source} learnt from {run.trainer.teacher}, but has no {CERTIFICATE}, which a healing writes after its "
            "last step: the export does not say what a conversion changed. An unfinished healing goes on with "
            "trainer.resume=True",
            stacklevel=3,
        )
    return certificate


def is_source(config: ModelConfig, certificate: Certificate) -> bool:
    """Whether what a certificate's conversion began with is of this config, whatever dropout it was trained with."""
    return not differing(decode(ModelConfig, certificate.source, CERTIFICATE), config, DROPOUT)


def has_its_weights(model: Path, certificate: Certificate) -> bool:
    """Whether a model's weights are those that a conversion began with; True if its certificate cannot tell."""
    return not certificate.source_sha256 or read_at(model, weights_sha256) == certificate.source_sha256


def after(before: Certificate | None, made: Certificate) -> Certificate:
    """Return `made` with the conversions behind its source as `earlier`, from the source's certificate `before`."""
    return made if before is None else replace(made, earlier=history(before))


def earlier_of(folder: Path) -> list[Earlier]:
    """Return the conversions that made the model in a folder, the oldest first; warn of those that are not exact."""
    try:
        before = conversion_of(folder)
    except InvalidInput as error:
        warnings.warn(
            f"the conversion that made the source is left out of the certificate: {error}", stacklevel=4
        )
        return []
    found = [] if before is None else history(before)
    if lossy := [one for one in found if not one.exact]:
        steps = "; ".join(f"{one.source} to {one.result}, KL {one.kl:.2e} nats" for one in lossy)
        warnings.warn(
            f"the source was itself converted ({steps}): the figures of this conversion do not include that "
            "loss",
            stacklevel=4,
        )
    return found


def history(certificate: Certificate) -> list[Earlier]:
    """Return the conversions up to and including the one that a certificate describes, the oldest first."""
    source, result = certificate.ends
    last = Earlier(
        source=source,
        result=result,
        exact=certificate.exact,
        kl=certificate.logits["kl"],
        loss=certificate.loss,
        kv_bytes_per_token=certificate.kv_bytes_per_token,
        healed=sum(one.steps for one in certificate.healing),
    )
    return [*certificate.earlier, last]
