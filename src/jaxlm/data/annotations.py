"""What models said about the training examples of a source, on disk. Each example is annotated once.

<folder of the source>/annotations/<digest of the key>/block-N/records.npy    one record per example, a field for each column
                                                               indices.npy    the indices of these examples

Only examples that steps read are annotated. A later run that reads others adds blocks for them. A block is an artifact that
never changes, so an interrupted build resumes where it stopped.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import haliax as hax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.safe_io import folder_lock, remove_leftovers
from jaxlm.core.values.logged import Activity
from jaxlm.data.base import Batches, Log
from jaxlm.data.batch import BatchSpec, Column, Columns
from jaxlm.data.cache.artifacts import METADATA, Artifact, Artifacts, Files, Key, Kind, digest, writable_folder
from jaxlm.data.data import Data
from jaxlm.data.examples import Examples, WrappedExamples

_PREFIX = "annotations."  # of the names of the columns in a batch
_BLOCK = "block-"
_RECORDS, _INDICES = "records", "indices"
_MAX_OPEN = 64  # blocks; each open one takes a descriptor
BLOCK: Kind[Artifact] = Kind("block of annotations", lambda stored: stored)


@dataclass(frozen=True)
class AnnotationFolder:
    """Annotations of a source's training examples: their place on disk, and the inputs that they must be made from.

    Attributes:
        made_from: everything that determines the annotations. Plain JSON.
    """

    examples: Examples
    made_from: Key

    @property
    def path(self) -> Path:
        return self.examples.cache.folder.parent / "annotations" / digest(self.made_from)

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """bool: which of some examples have no annotations."""
        blocks = [BLOCK.at(self.path / name).array(_INDICES) for name in self.blocks()]
        return ~np.isin(indices, np.concatenate(blocks)) if blocks else np.ones(len(indices), bool)

    @contextlib.contextmanager
    def locked(self, log: Log) -> Iterator[None]:
        """Locks the folder to write to it, and creates it. Deletes what an interrupted build has left of a block."""
        with folder_lock(writable_folder(self.path.parent), log):
            remove_leftovers(writable_folder(self.path) / "*")
            yield

    def write(self, indices: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Adds a block. Hold the lock when you call it.

        Args:
            indices: int64 [examples].
            columns: path -> values of these examples, [examples, ...].
        """
        records = np.empty(len(indices), [(path, values.dtype, values.shape[1:]) for path, values in columns.items()])
        for path, values in columns.items():
            records[path] = values

        def make(made: Files) -> Key:
            made.put_array(_RECORDS, records)
            made.put_array(_INDICES, indices)
            return {}

        number = 1 + max((int(name.removeprefix(_BLOCK)) for name in self.blocks()), default=-1)
        Artifacts(self.path).open_or_make(BLOCK, self.made_from, make, lambda _: None, name=f"{_BLOCK}{number}")

    def blocks(self) -> list[str]:
        """The names of the blocks that are there."""
        names = [path.parent.name for path in self.path.glob(f"{_BLOCK}*/{METADATA}")]
        return sorted(name for name in names if name.removeprefix(_BLOCK).isdecimal())

    def has(self, block: str) -> bool:
        """Tells whether a block is there. A process may see it before it is listed (NFS)."""
        return (self.path / block / METADATA).is_file()

    def open(self, blocks: Sequence[str]) -> "AnnotationCache":
        """Opens some blocks. Raises `ConfigError` if they are damaged or were made from other inputs."""
        return AnnotationCache([BLOCK.at(self.path / name, self.made_from) for name in blocks])


class AnnotationCache:
    """Annotations that are on disk. The records of a block are checked when they are first read."""

    def __init__(self, blocks: Sequence[Artifact]):
        self._stored = blocks
        parts = [block.array(_INDICES) for block in blocks]
        indices = np.concatenate([np.zeros(0, np.int64), *parts])
        order = np.argsort(indices, kind="stable")
        self._indices = indices[order]
        self._blocks = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]
        self._rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(part)) for part in parts)])[order]
        self._checked: set[int] = set()
        self._open: dict[int, np.ndarray] = {}

    def stored(self, indices: np.ndarray) -> np.ndarray:
        """bool: which of some examples have annotations."""
        return self._found(indices)[1]

    def _found(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds some examples among those that are stored: their places, and bool: which of them are."""
        places = np.searchsorted(self._indices, indices)  # not np.isin, which reads the indices of all stored examples
        found = places < len(self._indices)
        found[found] = self._indices[places[found]] == indices[found]
        return places, found

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Structured [len(indices)]: the records of some examples.

        Raises:
            ConfigError: a block is damaged.
            LookupError: an example has none, because no step reads it. Batches that are prefetched beyond the last step, and
                never used, may ask for it.
        """
        places, found = self._found(indices)
        if not found.all():
            raise LookupError(f"example {indices[~found][0]} has no annotations")
        blocks, rows = self._blocks[places], self._rows[places]
        records = np.empty(len(indices), self._block(int(blocks[0])).dtype)
        for block in np.unique(blocks):
            records[blocks == block] = self._block(int(block))[rows[blocks == block]]
        return records

    def _block(self, number: int) -> np.ndarray:
        if number not in self._open:
            records = self._stored[number].array(_RECORDS, is_checked=number in self._checked)
            self._checked.add(number)
            if len(self._open) >= _MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[number] = records
        return self._open[number]


class Annotations(Protocol):
    """The annotations of a source."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Structured [len(indices)]: the records of some examples."""
        ...


class AwaitedAnnotations:
    """The annotations of a source, which are made before the first batch (`AskingBatches`)."""

    def __init__(self):
        self.cache: Annotations | None = None

    def read(self, indices: np.ndarray) -> np.ndarray:
        assert self.cache is not None, "refresh comes first"
        return self.cache.read(indices)


class AskingBatches(Batches):
    """Batches whose annotations are made before the first batch, and again after a jump to another position.

    Args:
        ask: makes them. Gets the model, as in `Batches.refresh`, the step, and the number of its first example in the
            stream. The model's answers must never change.
    """

    refreshes_as = Activity.ANNOTATION

    def __init__(self, batches: Batches, ask: Callable[[Any, int, int], None]):
        self._batches, self._ask = batches, ask
        self._is_asked = False

    def due(self, step: int) -> bool:
        return not self._is_asked or self._batches.due(step)

    def refresh(self, model: Any, step: int) -> None:
        if not self._is_asked:
            self._ask(model, step, int(self._batches.state()["examples"]))
            self._is_asked = True
        if self._batches.due(step):
            self._batches.refresh(model, step)

    def __next__(self) -> Any:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return self._batches.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._batches.restore(state)
        self._is_asked = False

    def skip(self, num_steps: int) -> None:
        self._batches.skip(num_steps)
        self._is_asked = False

    def records(self, step: int) -> str:
        return self._batches.records(step)

    def read_ahead(self) -> None:
        self._batches.read_ahead()

    def close(self) -> None:
        self._batches.close()

    def metrics(self) -> Mapping[str, float]:
        return self._batches.metrics()


class AnnotatedExamples(WrappedExamples):
    """Examples with their annotations.

    Args:
        cache: annotations by index of the example.
        dtypes: of the columns, by name.
    """

    def __init__(self, examples: Examples, cache: Annotations, dtypes: Mapping[str, np.dtype]):
        super().__init__(examples)
        self._annotations, self._dtypes = cache, dtypes

    def read(self, indices: np.ndarray) -> Columns:
        records = self._annotations.read(indices)
        # numpy reads back bytes where it does not know the dtype, such as bfloat16.
        annotations = {name: records[name].view(self._dtypes[name]) for name in records.dtype.names or ()}
        return self._examples.read(indices) | {_PREFIX + name: values for name, values in annotations.items()}


def with_annotations(data: Data, annotations: Mapping[str, Annotations], template: Any) -> Data:
    """The data whose batches have annotations.

    Args:
        annotations: source name -> those of its training examples.
        template: the annotations of a batch {microbatch, batch, ...}, for their structure, dtypes and axes.
    """
    dtypes = {path: leaf.dtype for path, leaf in tree.leaves(template)}
    leaves = {_PREFIX + path: leaf for path, leaf in tree.leaves(template)}
    columns = {
        name: Column(leaf.dtype, tuple(axis for axis in leaf.axes if axis.name not in (MICROBATCH, BATCH)))
        for name, leaf in leaves.items()
    }

    def make(**arrays: hax.NamedArray) -> Any:
        annotations = tree.map_leaves(lambda path, _: arrays[_PREFIX + path], template)
        batch = data.spec.make(**{name: column for name, column in arrays.items() if name not in columns})
        return replace(batch, annotations=annotations)

    train = {name: AnnotatedExamples(data.train[name], read, dtypes) for name, read in annotations.items()}
    return replace(data, train=train, spec=BatchSpec(make, {**data.spec.columns, **columns}))
