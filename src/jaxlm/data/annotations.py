"""What models said about the training examples of a source, on disk: each example is annotated once.

<folder of the source>/annotations/<digest of the key>/block-N.npy    one record per example, a field for each column
                                                       cache.json     the key, counts, and checksums

A cache is built in `<digest>.building` and renamed when it is complete. Blocks are complete or absent, so an interrupted
build resumes where it stopped.
"""

import contextlib
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import haliax as hax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.atomic_io import atomic_file, commit_folder, folder_lock, remove_leftovers
from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.bounded_read import read_bytes
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Batches, Log
from jaxlm.data.batch import BatchSpec, Column, Columns
from jaxlm.data.cache.cache_dir import disk_full_errors, writable_folder
from jaxlm.data.data import Data
from jaxlm.data.examples import Examples, WrappedExamples

_METADATA, _PLAN = "cache.json", "plan.json"
_PREFIX = "annotations."  # of the names of the columns in a batch
Key = Mapping[str, Any]


@dataclass(frozen=True)
class AnnotationFolder:
    """The cache of a source's training examples: its place on disk, and the inputs that it must be made from.

    Attributes:
        made_from: everything that determines the annotations. Plain JSON.
        block_size: examples in a block, if it is built now.
    """

    examples: Examples
    made_from: Key
    block_size: int

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(_json(self.made_from)).hexdigest()[:16]
        return self.examples.cache.folder.parent / "annotations" / digest

    @property
    def num_blocks(self) -> int:
        return -(-len(self.examples) // self.block_size)

    @property
    def _building(self) -> Path:
        return self.path.with_name(f"{self.path.name}.building")

    def indices(self, number: int) -> np.ndarray:
        """The indices of the examples of a block."""
        return np.arange(number * self.block_size, min((number + 1) * self.block_size, len(self.examples)))

    @contextlib.contextmanager
    def prepared(self, log: Log) -> Iterator[list[int]]:
        """Locks the folder, and yields the numbers of the blocks that are missing; none if the cache is complete.

        The blocks of an interrupted build are kept if it was made from the same and had the same block size.
        """
        with folder_lock(writable_folder(self.path.parent), log), disk_full_errors(self.path):
            if self.path.exists():
                yield []
                return
            if not self._can_go_on():
                shutil.rmtree(self._building, ignore_errors=True)
                self._building.mkdir()
                with atomic_file(self._building / _PLAN) as path:
                    path.write_bytes(self._plan)
            yield [number for number in range(self.num_blocks) if not self._is_done(number)]

    def to_build(self) -> tuple[int, int]:
        """The number of examples in missing blocks, and the bytes on disk that `prepared` frees: those of an interrupted
        build that cannot go on."""
        if self._can_go_on():
            missing = (number for number in range(self.num_blocks) if not self._is_done(number))
            return sum(len(self.indices(number)) for number in missing), 0
        return len(self.examples), sum(map(_num_bytes, self._building.glob("*")))

    def _can_go_on(self) -> bool:
        """Whether an interrupted build was made from the same and had the same block size."""
        try:
            return read_bytes(self._building / _PLAN) == self._plan
        except FileNotFoundError:
            return False

    def _is_done(self, number: int) -> bool:
        return _block_path(self._building, number).is_file()

    @property
    def _plan(self) -> bytes:
        return _json({"made_from": self.made_from, "block_size": self.block_size})

    def write(self, number: int, columns: Mapping[str, np.ndarray]) -> None:
        """Writes a block. Args: columns: path -> values of its examples, [examples, ...]."""
        num_examples = len(next(iter(columns.values())))
        block = np.empty(num_examples, [(path, values.dtype, values.shape[1:]) for path, values in columns.items()])
        for path, values in columns.items():
            block[path] = values
        target = _block_path(self._building, number)
        remove_leftovers(target)
        with atomic_file(target) as path, path.open("wb") as file:
            np.save(file, block)

    def finish(self) -> None:
        """Makes the cache visible, once all of its blocks are written. Does nothing if it is visible already."""
        if self.path.exists():
            return
        paths = (_block_path(self._building, number) for number in range(self.num_blocks))
        metadata = {
            "made_from": self.made_from,
            "num_examples": len(self.examples),
            "block_size": self.block_size,
            "crc32": [zlib.crc32(path.read_bytes()) for path in paths],
        }
        with atomic_file(self._building / _METADATA) as path:
            path.write_bytes(_json(metadata))
        (self._building / _PLAN).unlink()
        commit_folder(self._building, self.path)

    def open(self) -> "AnnotationCache":
        """Opens the complete cache. Raises `ConfigError` if it is incomplete or was made from other inputs."""
        try:
            metadata = json.loads(read_bytes(self.path / _METADATA))
            made_from, block_size, crc32 = metadata["made_from"], metadata["block_size"], metadata["crc32"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(self.path / _METADATA, f"it cannot be read: {error!r}") from error
        if _json(made_from) != _json(self.made_from):
            changed = [key for key in {**made_from, **self.made_from} if made_from.get(key) != self.made_from.get(key)]
            raise ConfigError(
                f"the annotations in {self.path} were made from other inputs ({', '.join(changed)} differ). Delete this"
                " folder to build them again"
            )
        for number in range(len(crc32)):
            if not _block_path(self.path, number).is_file():
                raise _damaged(_block_path(self.path, number), "the file is missing")
        return AnnotationCache(self.path, block_size, tuple(crc32))


class AnnotationCache:
    """An open cache. A block is checked when it is first read."""

    def __init__(self, folder: Path, block_size: int, crc32: Sequence[int]):
        self._folder, self._block_size, self._crc32 = folder, block_size, crc32
        self._blocks: dict[int, np.ndarray] = {}

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Structured [len(indices)]: the records of some examples. Raises `ConfigError` if a block is damaged."""
        blocks, rows = np.divmod(indices, self._block_size)
        records = np.empty(len(indices), self._block(int(blocks[0])).dtype)
        for block in np.unique(blocks):
            records[blocks == block] = self._block(int(block))[rows[blocks == block]]
        return records

    def _block(self, number: int) -> np.ndarray:
        if number not in self._blocks:
            path = _block_path(self._folder, number)
            if zlib.crc32(np.memmap(path, np.uint8, mode="r").data) != self._crc32[number]:
                raise _damaged(path, "its checksum does not match its content")
            self._blocks[number] = np.load(path, mmap_mode="r")
        return self._blocks[number]


class Annotations(Protocol):
    """The annotations of a source."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Structured [len(indices)]: the records of some examples."""
        ...


class OpensAnnotations(Protocol):
    """A place of annotations: a complete cache, or one that will be."""

    def open(self) -> Annotations:
        """The annotations. They may be read once they are made."""
        ...


class AwaitedAnnotations:
    """The annotations of a source that the model that trains makes before the first batch (`AskingBatches`)."""

    def __init__(self):
        self.cache: Annotations | None = None

    def open(self) -> "AwaitedAnnotations":
        return self

    def read(self, indices: np.ndarray) -> np.ndarray:
        assert self.cache is not None, "refresh comes first"
        return self.cache.read(indices)


class AskingBatches(Batches):
    """Batches with annotations that the model that trains has to make first. It never changes what it would say.

    Args:
        ask: makes the annotations. Gets the model, as in `Batches.refresh`.
    """

    def __init__(self, batches: Batches, ask: Callable[[Any], None]):
        self._batches, self._ask = batches, ask
        self._is_asked = False

    def due(self, step: int) -> bool:
        return not self._is_asked or self._batches.due(step)

    def refresh(self, model: Any, step: int) -> None:
        if not self._is_asked:
            self._ask(model)
            self._is_asked = True
        if self._batches.due(step):
            self._batches.refresh(model, step)

    def __next__(self) -> Any:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return self._batches.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._batches.restore(state)

    def skip(self, num_steps: int) -> None:
        self._batches.skip(num_steps)

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


def with_annotations(data: Data, folders: Mapping[str, OpensAnnotations], template: Any) -> Data:
    """The data whose batches have annotations.

    Args:
        folders: source name -> the complete cache of its training examples, or what will have it.
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

    train = {name: AnnotatedExamples(data.train[name], folder.open(), dtypes) for name, folder in folders.items()}
    return replace(data, train=train, spec=BatchSpec(make, {**data.spec.columns, **columns}))


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _block_path(folder: Path, number: int) -> Path:
    return folder / f"block-{number}.npy"


def _num_bytes(path: Path) -> int:
    """The size of a file; 0 if another process has just removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}. The annotations are damaged: delete {path.parent} to build them again")
