"""Folders of checkpoints behind URLs: a checkpoint there is committed by its last file.

An object store has no rename, so a checkpoint there is whole once `checksums.json` is among its files: that is uploaded
last, and deleted first.
"""

import base64
import functools
import itertools
import operator
import os
import posixpath
import shutil
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.integrity import CHECKSUMS, SHA256, digest_of, verify
from jaxlm.engine.checkpoint.manifest import DAMAGED, UNFINISHED, CheckpointName, is_temporary
from jaxlm.engine.checkpoint.store import CURSOR

_DAMAGED = f"{CHECKSUMS}{DAMAGED}"


def is_url(path: str) -> bool:
    """Whether a path is not of the local file system."""
    return "://" in path


class RemoteFolder:
    """A folder of checkpoints behind a URL.

    Attributes:
        url: of the folder.
    """

    def __init__(self, url: str):
        """Raises: ConfigError: fsspec has no implementation for it; says what to install."""
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url}: {error}. For s3:// install s3fs, for gs:// gcsfs") from error
        self._root = root.rstrip("/")

    def make(self) -> None:
        """Makes the folder, where the store knows folders; raises whatever the store raises."""
        self._fs.makedirs(self._root, exist_ok=True)

    def probe(self, name: str = "probe") -> None:
        """Writes a small file and deletes it again; raises whatever the store raises."""
        path = f"{self._root}/{name}{UNFINISHED}"
        self._fs.pipe_file(path, b"jaxlm")
        self._fs.rm_file(path)

    def checkpoints(self) -> list[CheckpointName]:
        """The checkpoints that are whole, oldest first."""
        return [name for name in self._named() if self._fs.exists(self._marker(name.text))]

    def names(self) -> list[str]:
        """Their names, as text."""
        return [name.text for name in self.checkpoints()]

    def folders(self) -> list["RemoteFolder"]:
        """The folders in this one that are no checkpoints."""
        return [RemoteFolder(f"{self.url}/{n}") for n in self._children() if CheckpointName.parse(n) is None]

    def replaced_by(self, name: str) -> list[str]:
        """The temporary ones that are older than a checkpoint."""
        older = itertools.takewhile(lambda other: other != name, self.names())
        return [old for old in older if is_temporary(functools.partial(self.read, old, CURSOR))]

    def files(self, name: str) -> dict[str, str | None]:
        """A checkpoint's files by their path in it, and the MD5 in hexadecimal that the store says of each, if it does."""
        self._fs.invalidate_cache()
        root = f"{self._root}/{name}"
        found: dict[str, Any] = self._fs.find(root, detail=True)
        sums = {posixpath.relpath(path, root): info.get("md5Hash") for path, info in found.items()}
        kept = {file: md5 for file, md5 in sums.items() if file not in (CHECKSUMS, _DAMAGED)}
        return {file: md5 and base64.b64decode(md5).hex() for file, md5 in sorted(kept.items())}

    def read(self, name: str, file: str) -> bytes:
        """A file of a checkpoint."""
        return self._fs.cat_file(f"{self._root}/{name}/{file}")

    def digest(self, name: str, file: str, kind: str = SHA256) -> str:
        """A checksum of a file of a checkpoint, which is read for it."""
        with self._fs.open(f"{self._root}/{name}/{file}", "rb") as opened:
            return digest_of(opened, kind)

    def write(self, name: str, file: str, content: bytes) -> None:
        """Writes a small file of a checkpoint."""
        path = f"{self._root}/{name}/{file}"
        self._fs.pipe_file(path, content)
        self._check_size(path, len(content))

    def set_aside(self, name: str) -> str:
        """Makes a whole checkpoint invisible and deletes nothing; `clear` does, when its name is taken again.

        Returns:
            The path of what was its last file.
        """
        self.write(name, _DAMAGED, self.read(name, CHECKSUMS))
        self._fs.rm_file(self._marker(name))
        return f"{name}/{_DAMAGED}"

    def remove_unfinished(self) -> None:
        """Deletes what was uploaded in part, or deleted in part."""
        for name in set(self._named()) - set(self.checkpoints()):
            if not self._fs.exists(f"{self._root}/{name.text}/{_DAMAGED}"):
                self._fs.rm(f"{self._root}/{name.text}", recursive=True)

    def upload(self, checkpoint: Path) -> None:
        """Copies a finished local checkpoint; nobody sees it before all of it is there."""
        name = checkpoint.name
        self.clear(name)
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != CHECKSUMS]
        for path in files:
            self._put(path, f"{self._root}/{name}/{path.relative_to(checkpoint).as_posix()}")
        self._put(checkpoint / CHECKSUMS, self._marker(name))

    def clear(self, name: str) -> None:
        """Deletes what lies under the name of a checkpoint, whole or not, if anything does."""
        if name in self._children():
            self.delete(name)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, so that no half-deleted one is ever taken for whole."""
        if self._fs.exists(self._marker(name)):
            self._fs.rm_file(self._marker(name))
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def download(self, name: str, folder: Path) -> Path:
        """Copies a checkpoint to `folder` and verifies it there.

        Raises:
            DamagedError: its files are not what was saved.
        """
        unfinished = folder / f"{name}{UNFINISHED}"
        shutil.rmtree(unfinished, ignore_errors=True)
        root = f"{self._root}/{name}"
        for path in self._fs.find(root):
            local = unfinished / posixpath.relpath(path, root)
            local.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(path, str(local))
        verify(unfinished)
        final = folder / name
        shutil.rmtree(final, ignore_errors=True)
        os.rename(unfinished, final)
        return final

    def _put(self, local: Path, remote: str) -> None:
        self._fs.makedirs(posixpath.dirname(remote), exist_ok=True)
        self._fs.put_file(str(local), remote)
        self._check_size(remote, local.stat().st_size)

    def _check_size(self, remote: str, size: int) -> None:
        arrived = self._fs.info(remote)["size"]
        if arrived != size:
            raise OSError(f"{remote}: {arrived} bytes arrived of {size}")

    def _named(self) -> list[CheckpointName]:
        return sorted(name for name in map(CheckpointName.parse, self._children()) if name is not None)

    def _children(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found: list[Any] = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [posixpath.basename(str(path).rstrip("/")) for path in found]

    def _marker(self, name: str) -> str:
        return f"{self._root}/{name}/{CHECKSUMS}"


def find_remote(url: str, *, of_runs: bool = True) -> list[tuple[RemoteFolder, str]]:
    """Whole checkpoints where a URL points, least steps first.

    Args:
        of_runs: whether a folder of runs is meant, too; else a checkpoint or a run's folder alone.
    """
    above, _, last = url.rstrip("/").rpartition("/")
    if CheckpointName.parse(last) and last in RemoteFolder(above).names():
        return [(RemoteFolder(above), last)]
    local = RemoteFolder(url)
    found = [(name, run) for run in (local, *(local.folders() if of_runs else [])) for name in run.checkpoints()]
    return [(run, name.text) for name, run in sorted(found, key=operator.itemgetter(0))]
