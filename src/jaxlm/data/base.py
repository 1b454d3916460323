"""The interfaces of a source of text and of a stream of training batches."""

import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.values.logged import Activity

Log = Callable[[str], None]
TRAIN, VALIDATION = "train", "validation"
"""The splits of a source."""


def given(**keys: Any) -> dict[str, Any]:
    """The keys that are not null. What they change is part of the data's identity only if they are set."""
    return {name: value for name, value in keys.items() if value is not None}


def by_source(value: int | dict[str, int] | None) -> dict[str, int]:
    """Source name -> number. The only source of a section without `configs` has no name."""
    return {"": value} if isinstance(value, int) else value or {}


class DataSource(abc.ABC):
    """Files of documents that a URL resolves to, local or remote. The attributes are known before anything is copied.

    Attributes:
        name: used in fingerprints; relative to the URL.
        num_bytes: size of the files; None if the server does not report it.
        has_records: whether the files hold records, with the text under a key.
        identity: equal for equal content of a single remote file, as far as the server reports it; None for other sources.
    """

    name: str
    num_bytes: int | None
    has_records: bool
    identity: str | None = None

    @abc.abstractmethod
    def is_local(self, mirror: Path) -> bool:
        """Tells whether `files` has nothing to copy: the source is local, or the mirror has a copy."""

    @abc.abstractmethod
    def paths(self, mirror: Path) -> list[tuple[str, Path]]:
        """Names and local paths that `files` returns. Only for sources that are local, or have an `identity`."""

    @abc.abstractmethod
    def files(self, mirror: Path, log: Log) -> list[tuple[str, Path]]:
        """Names and local paths of the files. Remote files are copied into the folder `mirror` first.

        Raises:
            ConfigError: the server does not respond, or the remote file has changed.
        """


class Batches(abc.ABC):
    """An endless stream of batches whose position can be saved and restored.

    Attributes:
        refreshes_as: what the time of the next `refresh` counts as.
    """

    refreshes_as = Activity.ROLLOUT

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next batch, on the devices. Does not block if it is prefetched. Re-raises errors of the background thread."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """The position after the last batch returned. It is the same on every process and for any number of processes."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a position returned by `state`, in O(1)."""

    @abc.abstractmethod
    def skip(self, num_steps: int) -> None:
        """Leaves out the data of the next steps, in O(1). The steps that follow keep their numbers and batch sizes."""

    @abc.abstractmethod
    def records(self, step: int) -> str:
        """Describes which data made up the batch of a step (counted from 0, at most the newest), for debugging."""

    @abc.abstractmethod
    def read_ahead(self) -> None:
        """Starts prefetching. Called when the step of the newest batch has been dispatched, so it delays nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops background threads."""

    def due(self, step: int) -> bool:
        """Tells whether the batch of a step (counted from 0) needs `refresh` before: the current weights make it."""
        return False

    def refresh(self, model: Any, step: int) -> None:
        """Makes the batches of a step, and maybe of those that follow it. Called between steps, if `due`.

        Args:
            model: the one that trains, in the dtypes and with the sharding of its parameters. The next step overwrites it.

        Raises:
            ConfigError: on all processes, if they cannot be made.
        """
        raise AssertionError("these batches do not depend on the weights")

    def metrics(self) -> Mapping[str, float]:
        """Returns what the host knows of the batch that was returned last, by name. The step's metrics contain it."""
        return {}
