"""Keeps arrays that follow from the tokens of a cache on disk: computed once, read from then on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np

from jaxlm.data.base import Log
from jaxlm.data.cache.artifacts import Artifact, Artifacts, Files, Key, Kind, is_writable

Arrays = Mapping[str, np.ndarray]
T = TypeVar("T")


@dataclass(frozen=True)
class Derived(Generic[T]):
    """A kind of artifact that is computed in memory.

    Attributes:
        write: writes what was computed. Returns its facts.
    """

    kind: Kind[T]
    write: Callable[[Files, T], Key]

    def open_or_compute(self, folder: Path, made_from: Key, compute: Callable[[], T], log: Log) -> T:
        """Opens what was made from this key, and computes it first if it does not exist or is damaged.

        Args:
            folder: where the artifacts are. If it cannot be written, what is computed stays in memory.

        Raises:
            ConfigError: the disk is full.
        """
        store = Artifacts(folder)
        if (found := store.find(self.kind, made_from)) is not None:
            return found
        if not is_writable(folder):
            return compute()
        return store.open_or_make(self.kind, made_from, lambda made: self.write(made, compute()), log)


def _write_arrays(made: Files, arrays: Arrays) -> Key:
    for name, array in arrays.items():
        made.put_array(name, array)
    return {}


def _read_arrays(stored: Artifact) -> Arrays:
    return {name: np.array(array) for name, array in stored.arrays().items()}


ARRAYS: Derived[Arrays] = Derived(Kind("arrays", _read_arrays, remade=True), _write_arrays)


@dataclass(frozen=True)
class RowIndex:
    """Rows of pieces. A piece is a range of tokens of the cache, in one document.

    Attributes:
        firsts: int64 [rows + 1], the first piece of each row, then the number of pieces.
        starts: int64 [pieces], the first token of each piece.
        lengths: int32 [pieces], tokens in each piece.
        num_cuts: how often a document was cut.
        num_dropped_tokens: how many tokens are in no row.
        waiting: int64 [documents, 2], start and length of those that wait for the rows after these; None if none do.
    """

    firsts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_cuts: int
    num_dropped_tokens: int
    waiting: np.ndarray | None = None

    is_endless: ClassVar[bool] = False

    @property
    def first_pass(self) -> "RowIndex":
        """The rows of the first pass over the documents."""
        return self

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those that it has, by name."""
        arrays = {"firsts": self.firsts, "starts": self.starts, "lengths": self.lengths}
        return arrays if self.waiting is None else arrays | {"waiting": self.waiting}

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The starts and lengths of the pieces of some rows, and how many pieces each row has."""
        first, counts = self.firsts[rows], self.firsts[rows + 1] - self.firsts[rows]
        pieces = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return self.starts[pieces], self.lengths[pieces], counts


def _read_index(stored: Artifact) -> RowIndex:
    counts = {name: stored.metadata[name] for name in _COUNTS}
    return RowIndex(**stored.arrays(), **counts)


def _write_index(made: Files, index: RowIndex) -> Key:
    _write_arrays(made, index.arrays)
    return {name: getattr(index, name) for name in _COUNTS}


_COUNTS = ("num_cuts", "num_dropped_tokens")
ROW_INDEX = Derived(Kind("row index", _read_index, frozenset(_COUNTS), remade=True), _write_index)
