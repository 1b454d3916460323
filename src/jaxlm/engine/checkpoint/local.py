"""Checkpoints on a disk that all processes see: written to a hidden folder, sealed, and then renamed."""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import all_processes, broadcast_from_main, main_only, same_on_all_processes
from jaxlm.engine.checkpoint.integrity import seal, verify
from jaxlm.engine.checkpoint.manifest import DAMAGED, UNFINISHED, find_checkpoints, is_temporary
from jaxlm.engine.checkpoint.store import ARRAYS, CURSOR, Checkpoint, CheckpointFolder, SaveError

_TOKEN_BYTES = 16
_LOOKS = 20
_VISIBLE_AFTER_S = 10.0  # a network's disk may be seen by others a few seconds later


@dataclass(frozen=True)
class LocalCheckpoint(Checkpoint):
    """A finished checkpoint on a disk.

    Attributes:
        path: its folder.
    """

    path: Path

    @property
    def place(self) -> Path:
        """Its path."""
        return self.path

    @property
    def arrays(self) -> str:
        """On the disk; Orbax takes absolute paths only."""
        return str(self.path.absolute() / ARRAYS)

    def read(self, file: str) -> bytes:
        """From the disk."""
        return (self.path / file).read_bytes()

    def verify(self, below: str = "") -> None:
        """Reads every file."""
        verify(self.path, below)

    @contextlib.contextmanager
    def local(self, below: str) -> Iterator[Path]:
        """The folder itself."""
        yield self.path / below


class LocalFolder(CheckpointFolder):
    """A folder of one run's checkpoints on a disk."""

    def __init__(self, path: Path, *, delete_temporary: bool = True, key: str = "base_path"):
        """Args:
        delete_temporary: whether a new checkpoint replaces the temporary ones.
        key: of `trainer.checkpointer`, that names the folder.
        """
        self._path = path
        self._key = key
        self._delete_temporary = delete_temporary

    @property
    def place(self) -> Path:
        """Its path."""
        return self._path

    @property
    def write_errors(self) -> tuple[type[Exception], ...]:
        """Those of a disk; `ValueError` is how TensorStore says that it is full."""
        return (OSError, ValueError)

    def __str__(self) -> str:
        return str(self._path)

    def open(self, log: Callable[[str], None]) -> None:
        """Shows that all processes see the same checkpoints; that they see what is written, `prepare` shows."""
        for _ in range(_LOOKS):
            if same_on_all_processes(" ".join(checkpoint.name for checkpoint in self.checkpoints())):
                return
            time.sleep(_VISIBLE_AFTER_S / _LOOKS)
        raise self._not_shared()

    def checkpoints(self) -> Sequence[LocalCheckpoint]:
        """By their names alone."""
        return [LocalCheckpoint(path) for path in find_checkpoints(self._path)]

    def set_aside(self, name: str) -> str:
        """Renames it."""
        for number in range(1, 1_000_000):
            aside = self._path / (f"{name}{DAMAGED}" + (f".{number}" if number > 1 else ""))
            if not aside.exists():
                break
        os.rename(self._path / name, aside)
        return aside.name

    def prepare(self) -> None:
        """On several processes, also shows that all of them see the same folder."""
        token = np.frombuffer(os.urandom(_TOKEN_BYTES), np.uint8)
        main_only(lambda: self._prepare(token.tobytes()))
        self._check_shared(broadcast_from_main(token).tobytes())
        main_only(self._probe.unlink)

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        """Writes to a hidden folder."""
        folder = self._unfinished(name)
        shutil.rmtree(folder, ignore_errors=True)
        for file, content in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def arrays(self, name: str) -> str:
        """On the disk; Orbax takes absolute paths only."""
        return str(self._unfinished(name).absolute() / ARRAYS)

    def commit(self, name: str) -> None:
        """Seals it, and gives it its name."""
        seal(self._unfinished(name))
        others = [checkpoint for checkpoint in self.checkpoints() if checkpoint.name != name]
        superseded = [old for old in others if is_temporary(functools.partial(old.read, CURSOR))]
        final = self._path / name
        if final.exists():
            self._remove(final)
        os.rename(self._unfinished(name), final)
        for old in superseded if self._delete_temporary else []:
            self._remove(old.path)

    def _prepare(self, token: bytes) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            for path in self._path.glob(f"*{UNFINISHED}"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._probe.write_bytes(token)
        except OSError as error:
            raise SaveError(f"the checkpoint folder {self._path.absolute()} cannot be written to: {error}") from error

    def _check_shared(self, token: bytes) -> None:
        """Raises `ConfigError` where a process sees another disk: no checkpoint would have its arrays."""
        deadline = time.monotonic() + _VISIBLE_AFTER_S
        while not (seen := self._sees(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not all_processes(seen):
            raise self._not_shared()

    def _not_shared(self) -> ConfigError:
        return ConfigError(
            f"trainer.checkpointer.{self._key}: the folder {self._path.absolute()} is not the same for all processes, and"
            " each writes its part of a checkpoint. Name one on a disk that all of them see, or give base_path a gs://"
            " address, which needs none"
        )

    def _sees(self, token: bytes) -> bool:
        try:
            return self._probe.read_bytes() == token
        except OSError:
            return False

    @property
    def _probe(self) -> Path:
        return self._path / f"probe{UNFINISHED}"

    def _unfinished(self, name: str) -> Path:
        return self._path / f"{name}{UNFINISHED}"

    def _remove(self, path: Path) -> None:
        """Deletes a checkpoint so that no half-deleted one is ever visible."""
        if path.exists():
            doomed = path.with_name(f"deleted-{path.name}{UNFINISHED}")  # not the name of what is being saved
            os.rename(path, doomed)
            shutil.rmtree(doomed)
