"""Checkpoints on a disk that all processes share: written to a hidden folder, sealed with checksums, then renamed."""

import contextlib
import errno
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import all_processes, broadcast_from_main, main_only, same_on_all_processes
from jaxlm.core.safe_io import free_path, fsync, read_bytes, remove
from jaxlm.core.stores import BRIEFLY_S, retried
from jaxlm.engine.checkpoint.lease import LeaseCheck, check_unlocked, locked_file
from jaxlm.engine.checkpoint.manifest import (
    ABANDONED,
    DAMAGED,
    UNFINISHED,
    CheckpointName,
    find_checkpoints,
    replaced_by,
    seal,
    verify,
)
from jaxlm.engine.checkpoint.store import ARRAYS, CURSOR, Checkpoint, CheckpointFolder

_TOKEN_BYTES = 16
_NUM_ATTEMPTS = 20
_VISIBLE_AFTER_S = 10.0  # a network file system may show changes to other machines a few seconds later


@dataclass(frozen=True)
class LocalCheckpoint(Checkpoint):
    """A finished checkpoint on a disk."""

    path: Path

    @property
    def location(self) -> Path:
        return self.path

    @property
    def arrays(self) -> str:
        return str(self.path.absolute() / ARRAYS)  # Orbax accepts absolute paths only

    def read(self, file: str) -> bytes:
        return read_bytes(self.path / file)

    def verify(self, below: str = "") -> None:
        verify(self.path, below)

    @contextlib.contextmanager
    def local(self, below: str) -> Iterator[Path]:
        yield self.path / below


class LocalFolder(CheckpointFolder):
    """A folder of one run's checkpoints on a disk."""

    def __init__(self, path: Path, *, delete_temporary: bool = True, key: str = "base_path"):
        """Args:
        delete_temporary: whether a new checkpoint replaces the temporary ones.
        key: the key of `trainer.checkpointer` that sets the folder.
        """
        self.location: Path = path
        self._key = key
        self._delete_temporary = delete_temporary
        self._newest: str | None = None  # the last one that this process has committed
        self._device: int | None = None  # of the disk of the folder

    def open(self, log: Callable[[str], None]) -> None:
        """Checks that all processes see the same checkpoints. `prepare` checks that they also see new files."""
        for _ in range(_NUM_ATTEMPTS):
            if same_on_all_processes(" ".join(checkpoint.name for checkpoint in self.checkpoints())):
                return
            time.sleep(_VISIBLE_AFTER_S / _NUM_ATTEMPTS)
        raise self._not_shared()

    def checkpoints(self) -> Sequence[LocalCheckpoint]:
        return [LocalCheckpoint(path) for path in find_checkpoints(self.location)]

    def names(self) -> list[str]:
        return [checkpoint.name for checkpoint in self.checkpoints()]

    def find(self, name: str) -> LocalCheckpoint:
        return LocalCheckpoint(self.location / name)

    def set_aside(self, name: str) -> str:
        return self._rename(name, DAMAGED)

    def abandon(self, name: str) -> str:
        return self._rename(name, ABANDONED)

    def _rename(self, name: str, suffix: str) -> str:
        target = free_path(self.location / f"{name}{suffix}")
        os.rename(self.location / name, target)
        return target.name

    def prepare(self) -> None:
        token = np.frombuffer(os.urandom(_TOKEN_BYTES), np.uint8)
        main_only(lambda: self._prepare(token.tobytes()))
        self._check_shared(broadcast_from_main(token).tobytes())
        main_only(self._probe.unlink)

    def check_free(self) -> None:
        try:
            check_unlocked(self._lock, f"save to {self.location.absolute()}")
        except OSError as error:
            raise self._unwritable(error) from error

    def locked(self, log: Callable[[str], None]) -> contextlib.AbstractContextManager[LeaseCheck]:
        return locked_file(self._lock, f"save to {self.location.absolute()}", self._unwritable)

    def begin(self, name: str, files: Mapping[str, bytes]) -> None:
        retried(self._check_place, BRIEFLY_S)
        folder = self._unfinished(name)
        for leftover in filter(Path.exists, (folder, self._deleted(name))):
            retried(functools.partial(remove, leftover), BRIEFLY_S)
        for file, content in files.items():
            retried(functools.partial(_write, folder / file, content), BRIEFLY_S)

    def arrays(self, name: str) -> str:
        return str(self._unfinished(name).absolute() / ARRAYS)  # Orbax accepts absolute paths only

    def commit(self, name: str) -> None:
        seal(self._unfinished(name))
        final, replaced = self.location / name, self._deleted(name)
        if final.exists():
            os.rename(final, replaced)
        try:
            retried(lambda: os.rename(self._unfinished(name), final), BRIEFLY_S)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        retried(lambda: fsync(self.location), BRIEFLY_S)
        self._newest = name
        with contextlib.suppress(OSError):  # the next save does it
            retried(self.tidy, BRIEFLY_S)

    def tidy(self) -> None:
        for path in self.location.glob(f"*{UNFINISHED}"):
            remove(path)
        if self._newest is None or not self._delete_temporary:
            return
        for old in replaced_by(self._newest, self.names(), lambda name: read_bytes(self.location / name / CURSOR)):
            renamed = self._deleted(old)  # first, so that a partly deleted checkpoint is never visible
            os.rename(self.location / old, renamed)
            remove(renamed)

    def _check_place(self) -> None:
        """Raises `OSError` if the folder is gone with its disk: what is below the mount point is then on a different disk.

        If only the folder is gone, it is made again.
        """
        there = next(path for path in (self.location.absolute(), *self.location.absolute().parents) if path.exists())
        device = there.stat().st_dev
        if self._newest is not None and (self.location / self._newest).is_dir():
            self._device = device  # mounted again, maybe under another number
        if self._device not in (None, device):
            raise OSError(errno.ENODEV, "the disk of this folder is no longer mounted", str(self.location))

    def _prepare(self, token: bytes) -> None:
        try:
            self.location.mkdir(parents=True, exist_ok=True)
            self._device = self.location.stat().st_dev
            for path in self.location.iterdir():
                if CheckpointName.parse(path.name) is not None and not path.is_dir():
                    raise ConfigError(f"{path}: a file with the name of a checkpoint. Move it away")
            self.tidy()
            self._probe.write_bytes(token)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"trainer.checkpointer.{self._key}: cannot write to {self.location.absolute()} ({error}). Set it to a"
            " writable folder, or free up disk space"
        )

    def _check_shared(self, token: bytes) -> None:
        """Raises `ConfigError` if a process sees another disk: checkpoints would lack its arrays."""
        deadline = time.monotonic() + _VISIBLE_AFTER_S
        while not (is_visible := self._sees(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not all_processes(is_visible):
            raise self._not_shared()

    def _not_shared(self) -> ConfigError:
        return ConfigError(
            f"trainer.checkpointer.{self._key}: the folder {self.location.absolute()} is not the same on all processes, but"
            " every process writes its part of a checkpoint there. Use a folder on a disk that all processes share, or set"
            " base_path to a gs:// URL, which needs no shared disk"
        )

    def _sees(self, token: bytes) -> bool:
        try:
            return read_bytes(self._probe) == token
        except OSError:
            return False

    @property
    def _probe(self) -> Path:
        return self.location / f"probe{UNFINISHED}"

    @property
    def _lock(self) -> Path:
        return self.location.with_name(f".{self.location.name}.lock")

    def _unfinished(self, name: str) -> Path:
        return self.location / f"{name}{UNFINISHED}"

    def _deleted(self, name: str) -> Path:
        """Returns where a checkpoint is moved before it is deleted: not `_unfinished`, where the new one is saved."""
        return self.location / f"deleted-{name}{UNFINISHED}"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
