"""The folder that a model is read from: its files, hashed, so that a change is noticed, and the conversions before."""

import os
import warnings
from pathlib import Path

from rehead.checkpoint.files.deferred import origins
from rehead.checkpoint.files.opened import changed
from rehead.checkpoint.files.publish import MANIFEST, recorded
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.history import Earlier, history
from rehead.errors import InvalidInput
from rehead.model import LanguageModel


class Source:
    """The files of a model that was loaded from `folder` with `in_memory=False`; their `digests` as they are now.

    Raises IntegrityError if they are not those that the folder's manifest records.
    """

    def __init__(self, model: LanguageModel, folder: Path) -> None:
        self._readers = origins(model)
        self.digests = self._now()
        if os.path.lexists(folder / MANIFEST):
            files = recorded(folder)
            self._require({place: files[place.name][1] for place in self.digests})

    def require_unchanged(self) -> None:
        """Raise IntegrityError if a file has changed since `digests` were computed."""
        self._require(self._now())

    def _now(self) -> dict[Path, str]:
        return {place: digest for reader in self._readers for place, digest in reader.digests().items()}

    def _require(self, others: dict[Path, str]) -> None:
        for place, digest in self.digests.items():
            if others[place] != digest:
                raise changed(place)


def earlier_of(folder: Path) -> list[Earlier]:
    """Return the conversions that made the model in a folder, the oldest first; warn of those that are not exact."""
    if not (folder / CERTIFICATE).is_file():
        return []
    try:
        found = history(Certificate.read(folder))
    except InvalidInput as error:
        warnings.warn(
            f"the conversion that made the source is left out of the certificate: {error}", stacklevel=4
        )
        return []
    if lossy := [one for one in found if not one.exact]:
        steps = "; ".join(f"{one.source} to {one.result}, KL {one.kl:.2e} nats" for one in lossy)
        warnings.warn(
            f"the source was itself converted ({steps}): what is measured now is without that loss",
            stacklevel=4,
        )
    return found
