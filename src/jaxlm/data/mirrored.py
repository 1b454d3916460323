"""Sources whose text is not on the local disk: a copy is made once, in the folder `mirror` beside the caches."""

import abc
import hashlib
from pathlib import Path

from jaxlm.data.base import Show, Source
from jaxlm.data.durable import locked, prepared


class MirroredSource(Source):
    """A source that is read through a copy of its own. Several processes that want it at once make it once."""

    @property
    def num_bytes(self) -> int | None:
        """See `Source.num_bytes`."""
        return None

    @property
    def has_records(self) -> bool:
        """See `Source.has_records`."""
        return True

    @abc.abstractmethod
    def _place(self, mirror: Path) -> Path:
        """The copy: a file, or a folder."""

    @abc.abstractmethod
    def _make(self, place: Path, show: Show) -> None:
        """Makes the copy, which appears at once and whole."""

    def _parts(self, place: Path) -> list[tuple[str, Path]]:
        """What `files` returns of a copy."""
        return [(self.name, place)]

    def is_here(self, mirror: Path) -> bool:
        """See `Source.is_here`."""
        return self._place(mirror).is_file()

    def files(self, mirror: Path, show: Show) -> list[tuple[str, Path]]:
        """See `Source.files`."""
        place = self._place(mirror)
        if not self.is_here(mirror):
            with locked(prepared(place.parent), show):
                if not self.is_here(mirror):  # another process may have been faster
                    self._make(place, show)
        return self._parts(place)


def folder_of(identity: str) -> str:
    """The name of a copy's folder: another one when what identifies the source is another."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
