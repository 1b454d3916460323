"""Stores at URLs, opened with fsspec, and their errors, turned into one exception and told apart from local disk errors."""

import contextlib
import hashlib
import logging
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import MASK
from jaxlm.core.safe_io import DISK_FULL_ERRNOS

# Packages that are not named like the module in fsspec's table.
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol"}

T = TypeVar("T")

BRIEFLY_S = (0.02, 0.1, 0.5)
AT_START_S = (0.5, 1.0, 2.0)
WHILE_TRAINING_S = (*AT_START_S, 4.0, 8.0, 16.0, 32.0)
"""Pauses between the tries of `retried`."""


def is_url(path: Path | str) -> bool:
    """Tells whether a path is a URL instead of a path in the local file system."""
    return isinstance(path, str) and "://" in path


def open_store(url: str, key: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it, without a slash at the end.

    Args:
        key: the configuration key of the URL, for messages.

    Raises:
        ConfigError: its password is masked, fsspec has no implementation for the URL, it needs a package that is not
            installed, or it connects at once and cannot (ftp://, sftp://).
    """
    import fsspec
    from fsspec.registry import known_implementations

    if MASK in url:
        raise ConfigError(
            f"{key}: '{url}': jaxlm does not save passwords, and this URL was saved without its own. Give the whole URL"
        )
    protocol = url.split("://", 1)[0].split("::", 1)[0]
    with storage_errors(inaccessible(f"{key}: cannot open '{url}'")):
        try:
            fs, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            module = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
            package = _PACKAGES.get(protocol, module)
            raise ConfigError(
                f"{key}: '{url}': {protocol}:// needs a package. Run: pip install {package} ({error})"
            ) from error
        except ValueError as error:
            known = ", ".join(sorted(known_implementations))
            raise ConfigError(f"{key}: '{url}': fsspec does not support {protocol}://. It supports: {known}") from error
    return fs, path.rstrip("/")


def inaccessible(what: str) -> Callable[[str], ConfigError]:
    """Makes the error of a store for `storage_errors`. Args: what: cannot be done, such as `key: cannot read URL`."""
    return lambda reason: ConfigError(f"{what} ({reason}). Check the address, the network and your credentials")


def names_below(fs: Any, path: str) -> list[str]:
    """The names of what is in a folder of a store at this moment; none if it does not exist."""
    fs.invalidate_cache()
    try:
        return [posixpath.basename(str(child).rstrip("/")) for child in fs.ls(path, detail=False)]
    except FileNotFoundError:
        return []


def retried(call: Callable[[], T], pauses_s: Sequence[float]) -> T:
    """Calls a store until it answers, in addition to what its client library retries.

    Args:
        pauses_s: seconds to wait before each further try.

    Raises:
        Exception: what the last try raised; or the first, if nothing is there or access is denied.
    """
    for pause in pauses_s:
        try:
            return call()
        except (FileNotFoundError, PermissionError, ConfigError):
            raise
        except Exception:  # client libraries of stores raise their own types
            time.sleep(pause)
    return call()


def local_copy(folder: Path, url: str) -> Path:
    """The path in a local folder for the copy of a URL."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return folder / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def probe_name() -> str:
    """A name for a file that is written and deleted as a trial. Each start has its own: others may be at the same place."""
    return f"probe-{secrets.token_hex(4)}"


def check_store_writable(url: str, key: str) -> None:
    """Writes and deletes a small file. Raises `ConfigError` if the store does not allow it."""
    fs, path = open_store(url, key)
    advice = "Check the address, the network and your credentials, or set it to a local folder"
    with storage_errors(lambda reason: ConfigError(f"{key}: cannot write to '{url}' ({reason}). {advice}")):
        fs.makedirs(path, exist_ok=True)
        probe = f"{path}/.jaxlm-{probe_name()}"
        fs.pipe_file(probe, b"jaxlm")
        fs.rm_file(probe)


def put_file(fs: Any, local: Path, remote: str) -> None:
    """Uploads a file and checks the size of the result. Raises whatever the store raises, or `OSError`."""
    fs.makedirs(posixpath.dirname(remote), exist_ok=True)
    fs.put_file(str(local), remote)
    check_size(fs, remote, local.stat().st_size)


def put_folder(fs: Any, local: Path, remote: str, last: str) -> None:
    """Uploads a folder. Args: last: the file that is uploaded last, so that a folder at the URL that has it is complete."""
    files = sorted((path for path in local.rglob("*") if path.is_file()), key=lambda path: path == local / last)
    for path in files:
        put_file(fs, path, f"{remote}/{path.relative_to(local).as_posix()}")


def check_size(fs: Any, remote: str, size: int) -> None:
    """Raises `OSError` if an uploaded file has another size."""
    uploaded = fs.info(remote)["size"]
    if uploaded != size:
        raise OSError(f"{remote}: only {uploaded} of {size} bytes were uploaded")


@contextlib.contextmanager
def storage_errors(
    failure: Callable[[str], Exception], *, local: Path | None = None, passthrough: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Wraps calls to a remote store through fsspec, whose implementations raise exceptions of their client libraries.

    Args:
        failure: makes the exception to raise instead, from the type and message of the root cause.
        local: local side of the transfer; errors there are re-raised unchanged.
        passthrough: exception types to re-raise unchanged, as `ConfigError` always is.
    """
    if not (logger := logging.getLogger("gcsfs")).handlers:
        # Without a handler, gcsfs prints a traceback in addition to the message. Configured logging still shows it.
        logger.addHandler(logging.NullHandler())
    try:
        yield
    except (ConfigError, *passthrough):
        raise
    except Exception as error:  # client libraries of stores raise their own types
        if local is not None and is_local_failure(error, local):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise failure(f"{type(cause).__name__}: {cause}") from error


def is_local_failure(error: BaseException, folder: Path) -> bool:
    """Tells whether the local disk caused the failure of a copy between `folder` and a remote store."""
    if not isinstance(error, OSError):
        return False
    if error.errno in DISK_FULL_ERRNOS:
        return True  # errors on write carry no file name, and stores report their own quota differently
    return error.filename is not None and Path(error.filename).absolute().is_relative_to(folder.absolute())
