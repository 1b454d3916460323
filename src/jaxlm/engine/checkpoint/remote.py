"""Folders of checkpoints at URLs.

Object stores have no rename, so a checkpoint there is complete once it contains `checksums.json`. That file is uploaded
last and deleted first.
"""

import base64
import functools
import itertools
import os
import posixpath
import shutil
from pathlib import Path
from typing import Any

from jaxlm.core.safe_io import read_stored
from jaxlm.core.stores import check_size, names_below, open_store, probe_name, put_folder
from jaxlm.engine.checkpoint.manifest import (
    ABANDONED,
    CHECKSUMS,
    DAMAGED,
    SHA256,
    UNFINISHED,
    CheckpointName,
    digest_of,
    in_order,
    is_temporary,
    pinned_by,
    verify,
)
from jaxlm.engine.checkpoint.store import CURSOR

_ASIDE = (f"{CHECKSUMS}{DAMAGED}", f"{CHECKSUMS}{ABANDONED}")


class RemoteFolder:
    """A folder of checkpoints at a URL. Methods raise whatever the store raises."""

    def __init__(self, url: str):
        """Raises: ConfigError: fsspec has no implementation for the URL; the message says what to install."""
        self.url = url.rstrip("/")
        self._fs, self._root = open_store(self.url, "checkpoint")

    def make(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def probe(self) -> None:
        """Writes a small file and deletes it again, to check permissions."""
        path = f"{self._root}/{probe_name()}{UNFINISHED}"
        self._fs.pipe_file(path, b"jaxlm")
        self._fs.rm_file(path)

    def checkpoints(self) -> list[CheckpointName]:
        """The complete checkpoints, oldest first."""
        return [name for name in self._checkpoint_names() if self._fs.exists(self._marker(name.text))]

    def names(self) -> list[str]:
        return [name.text for name in self.checkpoints()]

    def folders(self) -> list["RemoteFolder"]:
        """The subfolders that are not checkpoints."""
        return [RemoteFolder(f"{self.url}/{n}") for n in self._children() if CheckpointName.parse(n) is None]

    def replaced_by(self, name: str) -> list[str]:
        """The temporary checkpoints older than `name`, without those that it pins."""
        pinned = pinned_by(functools.partial(self.read, name, CURSOR))
        older = itertools.takewhile(lambda other: other != name, self.names())
        replaced = (old for old in older if old not in pinned)
        return [old for old in replaced if is_temporary(functools.partial(self.read, old, CURSOR))]

    def files(self, name: str) -> dict[str, str | None]:
        """Relative path -> MD5 in hexadecimal, for each file of a checkpoint; None if the store keeps no MD5 of a file."""
        self._fs.invalidate_cache()
        root = f"{self._root}/{name}"
        infos: dict[str, Any] = self._fs.find(root, detail=True)
        sums = {posixpath.relpath(path, root): info.get("md5Hash") for path, info in infos.items()}
        sums = {file: md5 for file, md5 in sums.items() if file not in (CHECKSUMS, *_ASIDE)}
        return {file: md5 and base64.b64decode(md5).hex() for file, md5 in sorted(sums.items())}

    def read(self, name: str, file: str) -> bytes:
        return read_stored(self._fs, f"{self._root}/{name}/{file}")

    def digest(self, name: str, file: str, kind: str = SHA256) -> str:
        with self._fs.open(f"{self._root}/{name}/{file}", "rb") as opened:
            return digest_of(opened, kind)

    def write(self, name: str, file: str, content: bytes) -> None:
        path = f"{self._root}/{name}/{file}"
        self._fs.pipe_file(path, content)
        check_size(self._fs, path, len(content))

    def set_aside(self, name: str, suffix: str) -> str:
        """Hides a complete checkpoint without deleting it, and returns the path of the renamed `checksums.json`.

        `clear` deletes it when a checkpoint of this name is saved again.

        Args:
            suffix: DAMAGED or ABANDONED.
        """
        renamed = f"{CHECKSUMS}{suffix}"
        self.write(name, renamed, self.read(name, CHECKSUMS))
        self._fs.rm_file(self._marker(name))
        return f"{name}/{renamed}"

    def remove_unfinished(self) -> None:
        """Deletes checkpoints that were only partly uploaded or partly deleted."""
        for name in set(self._checkpoint_names()) - set(self.checkpoints()):
            if not any(self._fs.exists(f"{self._root}/{name.text}/{renamed}") for renamed in _ASIDE):
                self._fs.rm(f"{self._root}/{name.text}", recursive=True)

    def upload(self, checkpoint: Path) -> None:
        """Uploads a finished local checkpoint. It becomes visible with its last file."""
        name = checkpoint.name
        self.clear(name)
        put_folder(self._fs, checkpoint, f"{self._root}/{name}", CHECKSUMS)

    def clear(self, name: str) -> None:
        """Deletes a checkpoint, complete or not, if it exists."""
        if name in self._children():
            self.delete(name)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, its marker first, so that it never looks complete while it is being deleted."""
        if self._fs.exists(self._marker(name)):
            self._fs.rm_file(self._marker(name))
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def download(self, name: str, folder: Path) -> Path:
        """Downloads a checkpoint to `folder`. Raises `DamagedError` if its files are not what was saved."""
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

    def _checkpoint_names(self) -> list[CheckpointName]:
        return sorted(filter(None, map(CheckpointName.parse, self._children())))

    def _children(self) -> list[str]:
        return names_below(self._fs, self._root)

    def _marker(self, name: str) -> str:
        return f"{self._root}/{name}/{CHECKSUMS}"


def find_remote(url: str, *, of_runs: bool = True) -> list[tuple[RemoteFolder, str]]:
    """Complete checkpoints at a URL, fewest steps first, each as (run's folder, name).

    The URL may be that of a checkpoint, a run's folder or, with `of_runs`, a folder of runs.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    if CheckpointName.parse(last) and last in RemoteFolder(parent).names():
        return [(RemoteFolder(parent), last)]
    folder = RemoteFolder(url)
    runs = [folder, *(folder.folders() if of_runs else [])]
    return in_order([(name, (run, name)) for name in run.names()] for run in runs)
