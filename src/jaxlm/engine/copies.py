"""Local copies of checkpoints behind URLs that Orbax cannot read."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.reaching import reaching
from jaxlm.engine.integrity import CHECKSUMS, DamagedError, verify
from jaxlm.engine.remote import RemoteFolder, find_remote


def staging_folder(staging_dir: Path, url: str) -> Path:
    """Where the copies of a folder behind a URL lie."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return staging_dir / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def fetched(remote: RemoteFolder, name: str, folder: Path) -> Path:
    """The local copy of a checkpoint, copied now where it is not here, is another one's, or is damaged.

    Raises:
        DamagedError: the files over there are not what was saved.
    """
    local = folder / name
    if (local / CHECKSUMS).is_file() and (local / CHECKSUMS).read_bytes() == remote.read(name, CHECKSUMS):
        with contextlib.suppress(DamagedError):
            verify(local)
            return local
    return remote.download(name, folder)


def staged(url: str, staging_dir: Path, *, of_runs: bool = True) -> list[Path]:
    """A local copy of the newest whole checkpoint where a URL points.

    Args:
        of_runs: see `find_remote`.

    Raises:
        ConfigError: the store cannot be read, the local folder not be written, or the checkpoint is damaged.
    """
    with copying(url, staging_dir):
        found = find_remote(url, of_runs=of_runs)
        if not found:
            return []
        remote, name = found[-1]
        folder = staging_folder(staging_dir, remote.url)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return [fetched(remote, name, folder)]
        except DamagedError as damage:
            raise ConfigError(f"{remote.url}/{name} is damaged: {damage}. Name another one") from damage


@contextlib.contextmanager
def copying(store: str, folder: Path) -> Iterator[None]:
    """Around what copies between a store and the local folder that stands for it.

    Raises:
        ConfigError: one of them has failed; says which.
    """
    advice = "Check the address, the network and your credentials"
    try:
        with reaching(lambda reason: ConfigError(f"{store} cannot be used ({reason}). {advice}"), here=folder):
            yield
    except OSError as error:  # of the local side
        raise ConfigError(
            f"trainer.checkpointer.staging_dir: {folder}, where checkpoints behind URLs are staged, cannot be used"
            f" ({error}). What is in the store is whole. Make room or change permissions, or name another folder"
        ) from error
