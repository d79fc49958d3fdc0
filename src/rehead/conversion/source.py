"""The files that a model's weights are read from, hashed, so that a change in the meantime is noticed."""

import os
from pathlib import Path

from rehead.checkpoint.files.deferred import origins
from rehead.checkpoint.files.opened import changed
from rehead.checkpoint.files.publish import MANIFEST, recorded
from rehead.checkpoint.files.shards import Shards
from rehead.model import LanguageModel


def weights_sha256(folder: Path) -> list[str]:
    """Return the sha256 of the files with a model's weights, in the order of their names."""
    return list(Shards(folder).digests().values())


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
