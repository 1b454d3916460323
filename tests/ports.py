"""Ports for servers that other processes start."""

import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

# Below the range from which Linux takes the ports of outgoing connections, so that none of them takes a port meanwhile.
_FIRST, _LAST = 12_000, 31_999
_held: list[IO[str]] = []


@functools.cache
def _choices() -> random.Random:
    return random.Random(os.getpid())


def reserved_port() -> int:
    """A free port of this machine that no other test process gets, until this process ends."""
    folder = Path(tempfile.gettempdir()) / "jaxlm-test-ports"
    folder.mkdir(mode=0o777, exist_ok=True)
    while True:
        port = _choices().randint(_FIRST, _LAST)
        lock = (folder / str(port)).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as free:
                free.bind(("", port))  # a server may listen on all addresses, or on any other
        except OSError:  # another process has it
            lock.close()
            continue
        _held.append(lock)
        return port
