"""Says who holds a run's folder: a locked file on a disk, or a lease where there are no locks.

A second start prints who holds it. A folder in a store, or on a disk without locks, has a lease:

    <folder>/lease-N.json    who holds the folder, and a count that the holder raises every INTERVAL_S

The highest N holds the folder. A start takes it by creating the next number, and never writes the object of another one. So
a process that was paused for long, whose lease was taken meanwhile, undoes nothing when it goes on: it finds a higher
number before it saves again.

GCS and S3 let only one client create an object. Where a store cannot do this, the last of several starts at the same moment
holds the folder, and the others find its token before they save.
"""

import contextlib
import errno
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from jaxlm.core.errors import ConfigError, say
from jaxlm.core.safe_io import NoLocksError, lock, open_regular, parse_json
from jaxlm.core.stores import is_url, names_below, open_store, storage_errors

LeaseCheck = Callable[[], object]
"""Raises `LeaseLostError` if another start of the run has taken the folder."""

_NOWHERE = ""


@dataclass(frozen=True)
class Holder:
    """A process that holds a run's folder.

    Attributes:
        since: when it took the folder, in UTC.
        machine: ID of the installed system; hosts may share a name.
        boot: ID of the machine's start.
        pids: ID of the numbering of processes, which containers have of their own.
        started: when the process started, in the kernel's ticks; a number of a process is used again.
    """

    pid: int
    host: str
    since: str
    machine: str
    boot: str
    pids: str
    started: str

    @classmethod
    def this_process(cls) -> "Holder":
        pid = os.getpid()
        return cls(
            pid,
            platform.node(),
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            _read("/etc/machine-id"),
            _read("/proc/sys/kernel/random/boot_id"),
            _pid_namespace(),
            _started(pid),
        )

    @classmethod
    def from_json(cls, text: bytes) -> "Holder | None":
        """None if the text is something else."""
        try:
            return cls(**json.loads(text)["holder"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def to_json(self, **more: int | str) -> bytes:
        return json.dumps({"holder": asdict(self), **more}).encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def has_ended(self) -> bool:
        """Tells whether it is certain that the process has ended: it ran on this machine, and is gone."""
        this_process = Holder.this_process()
        if _NOWHERE in (self.boot, this_process.boot) or self.host != this_process.host:
            return False
        if self.boot != this_process.boot:
            return self.machine == this_process.machine != _NOWHERE
        return self.pids == this_process.pids and self.started != _started(self.pid)


class LeaseLostError(Exception):
    """Another start of the run has taken its folder, because this process did not answer for too long."""


def all_held(checks: Iterable[LeaseCheck]) -> LeaseCheck:
    """Makes one check of several."""
    checks = list(checks)
    return lambda: [check_lease() for check_lease in checks]


def held_by(holder: object, what: str) -> ConfigError:
    """The error of a start that finds a run at work. Args: what: both would do, such as `save to PATH`."""
    return ConfigError(
        f"this run is already being trained ({holder}): both would {what}. Wait until it ends, stop it, or set another"
        " trainer.id"
    )


def _started(pid: int) -> str:
    """Returns when the process started; empty if there is none, or if it only waits for its parent to notice its end."""
    _, _, fields = _read(f"/proc/{pid}/stat").rpartition(")")
    state, *others = fields.split() or ["X"]
    return _NOWHERE if state in "XZ" else others[18]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return _NOWHERE


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return _NOWHERE


INTERVAL_S = 15.0
_LOST_AFTER = 2.5  # intervals without a heartbeat
_POLLS = 10  # per interval, while watching another holder
_NAME = re.compile(r"lease-(\d+)\.json")


class Lease:
    """The lease on one folder. Only process 0 of a run takes it."""

    def __init__(self, url: str, log: Callable[[str], None], refusal: Callable[[object], ConfigError] | None = None):
        """Args: refusal: the error if a process that is alive, its argument, holds the lease."""
        self._refusal = refusal or (lambda holder: held_by(holder, f"save to {url}"))
        self._url = url
        self._log = log
        self._fs, self._root = open_store(url, "checkpoint")
        self._holder = Holder.this_process()
        self._token = os.urandom(8).hex()
        self._number = 0
        self._beat = 0
        self._ended = threading.Event()

    @contextlib.contextmanager
    def held(self) -> Iterator[LeaseCheck]:
        """Holds the lease while the context is open.

        Raises:
            ConfigError: a process that is alive holds it.
            OSError: the disk of the folder fails.
        """
        unusable = lambda reason: ConfigError(  # noqa: E731
            f"trainer.checkpointer.base_path: cannot write to {self._url} ({reason}). Check the network and your credentials,"
            " or that the folder is writable"
        )
        with storage_errors(unusable, local=None if is_url(self._url) else Path(self._url)):
            self._take()
        renewing = threading.Thread(target=self._renew, name="jaxlm-lease", daemon=True)
        renewing.start()
        try:
            yield self._check
        finally:
            self._ended.set()
            renewing.join(timeout=INTERVAL_S)
            with contextlib.suppress(Exception):  # a lease that stays is taken over by the next start
                if self._is_own(self._number):
                    self._fs.rm_file(self._path(self._number))

    def _take(self) -> None:
        while True:
            number = self._newest()
            if number and (content := self._read(number)):
                self._wait_for_end(number, content)
            self._create(number + 1)
            if self._newest() == number + 1 and self._read(number + 1) == self._content():
                self._number = number + 1
                break
        for older in (number for number in self._numbers() if number < self._number):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(older))

    def _create(self, number: int) -> None:
        path, content = self._path(number), self._content()
        try:
            self._fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            pass  # another start was faster
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            self._fs.pipe_file(path, content)  # some servers of the S3 protocol cannot create exclusively

    def _wait_for_end(self, number: int, content: bytes) -> None:
        """Returns when the holder has certainly ended, has left, or was silent for too long. Raises if it is alive."""
        holder = Holder.from_json(content) or "a process of another version"
        if isinstance(holder, Holder) and holder.has_ended():
            self._log(f"{self._url} was held by {holder}, which has ended: taken over")
            return
        timeout_s = _LOST_AFTER * INTERVAL_S
        self._log(f"{self._url} is held by {holder}: watching for {timeout_s:.0f} s whether it is alive")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            time.sleep(INTERVAL_S / _POLLS)
            now = self._read(number)
            if now is None:
                return
            if now != content:
                raise self._refusal(holder)
        self._log(f"{self._url} was held by {holder}, which has sent no heartbeat for {timeout_s:.0f} s: taken over")

    def _renew(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            with contextlib.suppress(Exception):  # clients raise their own types; the next heartbeat may succeed
                if not self._is_own(self._newest()):
                    return
                self._beat += 1
                self._fs.pipe_file(self._path(self._number), self._content())

    def _check(self) -> None:
        try:
            newest = self._newest()
            if self._is_own(newest):
                return
            taken_by = self._read(newest) if newest >= self._number else None
        except Exception:  # the store does not answer: then the save fails by itself
            return
        holder = Holder.from_json(taken_by) if taken_by else None
        raise LeaseLostError(
            f"another start of this run has taken {self._url} ({holder or 'it has ended since'}), because this process,"
            f" which held it since {self._holder.since}, was paused or cut off from the store for more than"
            f" {_LOST_AFTER * INTERVAL_S:.0f} s. This process ends without saving; the other one continues the run"
        )

    def _is_own(self, number: int) -> bool:
        return number == self._number and _token_of(self._read(number)) in (None, self._token)

    def _newest(self) -> int:
        """The highest number; 0 if there is none."""
        return max(self._numbers(), default=0)

    def _numbers(self) -> set[int]:
        matches = map(_NAME.fullmatch, names_below(self._fs, self._root))
        return {int(match[1]) for match in matches if match}

    def _read(self, number: int) -> bytes | None:
        try:
            return self._fs.cat_file(self._path(number))
        except FileNotFoundError:
            return None

    def _content(self) -> bytes:
        return self._holder.to_json(token=self._token, beat=self._beat)

    def _path(self, number: int) -> str:
        return f"{self._root}/lease-{number}.json"


def _token_of(content: bytes | None) -> str | None:
    """None if it cannot be read: some stores show a file while it is written."""
    try:
        return parse_json(content or b"")["token"]
    except (ValueError, TypeError, KeyError):
        return None


_MAX_HOLDER = 10_000  # bytes of the name of a process
# A dry run that looks whether a run is being trained locks its file for a moment, and the name of a process is in the file a
# moment after it has locked it.
_TRIES, _AGAIN_S = 10, 0.1


@contextlib.contextmanager
def locked_file(
    path: Path,
    what: str,
    unwritable: Callable[[OSError], ConfigError],
    refusal: Callable[[object, str], ConfigError] = held_by,
) -> Iterator[LeaseCheck]:
    """Locks a file, which is created if it is missing. The kernel releases it when the process ends, however it ends.

    If the file system has no locks, as some network file systems, a lease in a folder beside the file takes its place.

    Args:
        what: as of `held_by`.
        unwritable: the error if the file cannot be created.
        refusal: the error if another process has locked it.
    """
    with contextlib.ExitStack() as closing:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context(open(path, "a+b"))
            check_lease = lambda: None  # noqa: E731 - nobody else can take a lock
            try:
                holder = _lock(file)
            except NoLocksError:
                lease = path.absolute().with_name(f"{path.name}.lease")
                lease.mkdir(exist_ok=True)
                holding = Lease(str(lease), say, lambda holder: refusal(holder, what)).held()
                holder, check_lease = None, closing.enter_context(holding)
            if holder is not None:
                raise refusal(holder, what)
            file.truncate(0)
            file.write(str(Holder.this_process()).encode())
            file.flush()
        except OSError as error:
            raise unwritable(error) from error
        try:
            yield check_lease
        finally:
            with contextlib.suppress(OSError):  # the disk is gone, and its locks with it
                file.truncate(0)  # nobody holds it


def _lock(file: IO[bytes], *, shared: bool = False) -> str | None:
    """Locks a file. Returns None, or who has locked it already."""
    for attempt in range(_TRIES):
        try:
            lock(file, shared=shared)
            return None
        except BlockingIOError:
            file.seek(0)
            if attempt and (holder := file.read(_MAX_HOLDER).decode(errors="replace").strip()):
                return holder
        time.sleep(_AGAIN_S)
    return "by another process"


def check_unlocked(path: Path, what: str) -> None:
    """Raises `ConfigError` if another process has locked a file, or if it is unknown. Args: what: as of `held_by`."""
    # Without locks there may be a lease, but whether its holder is alive takes half a minute to see.
    with contextlib.suppress(FileNotFoundError, NoLocksError), open_regular(path) as file:
        if (holder := _lock(file, shared=True)) is not None:
            raise held_by(holder, what)
