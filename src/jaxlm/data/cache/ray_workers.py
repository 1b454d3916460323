"""Tokenizing on a Ray cluster: each part of a cache is a task, which Ray gives to another worker where one dies.

Reading and writing stay with process 0, so only the cache's text and tokens travel, and no machine needs the files.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import all_processes, broadcast_from_main, is_main_process, main_only
from jaxlm.data.base import Log
from jaxlm.data.cache.workers import EncodingPool, Workers
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import Encoder, TokenizedText
from jaxlm.data.tokenizer.tokenizer import Tokenizer

_CONNECT_S = 10
_STOP_S = 20
_RETRIES = 5  # of a part whose workers die; more is no accident
_ADDRESS, _TOKEN = "RAY_ADDRESS", "RAY_AUTH_TOKEN"
# One thread a task, as many tasks as cores.
_IN_WORKERS = {"RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


class ClusterAddress(NamedTuple):
    """What a machine needs to join a cluster.

    Attributes:
        address: `host:port`.
        token: that its members know each other by; empty where each has it from elsewhere.
    """

    address: str
    token: str


@dataclass(frozen=True)
class RayConfig:
    """A Ray cluster to tokenize on. jaxlm must be installed on its machines.

    Attributes:
        address: `host:port` of a cluster that is running; null takes the environment's RAY_ADDRESS, or starts one.
        start_workers: let the machines of the run's other processes join the cluster while it tokenizes.
        auto_start_cluster: start a cluster on process 0's machine where there is no address; false tokenizes in process 0
            then.
    """

    address: str | None = None
    start_workers: bool = True
    auto_start_cluster: bool = True

    @property
    def is_wanted(self) -> bool:
        """Whether there is a cluster to tokenize on, or may be one."""
        return self._running is not None or self.auto_start_cluster

    @contextlib.contextmanager
    def cluster(self, log: Log, *, shared: bool) -> Iterator["RayWorkers"]:
        """The cluster, started where none is running, and then stopped again.

        Args:
            shared: whether other machines are to join.

        Raises:
            ConfigError: it cannot be reached or started.
        """
        running = self._running
        with _said_of(running):
            if running is not None:
                _knock(running)
            import ray
            import ray.exceptions
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of a change to come
        token = ""
        if shared and running is None:
            token = os.environ.setdefault(_TOKEN, secrets.token_hex(32))
        before = signal.getsignal(signal.SIGTERM)
        try:
            with _said_of(running, ray.exceptions.RayError), warnings.catch_warnings():
                # Ray forks only to start its own programs at once, which is safe beside jax's threads.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                # Of the workers' output nothing is wanted here: what fails comes back as an exception.
                where: dict[str, Any] = {"address": running}
                if running is None:
                    where = {"address": "local", "include_dashboard": False}
                ray.init(
                    **where,
                    runtime_env={"env_vars": _IN_WORKERS},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            cores = int(ray.cluster_resources().get("CPU", 0))
            address = ray.get_runtime_context().gcs_address
            log(f"ray: tokenizing on {address} ({'started' if running is None else 'found'}), {cores} cores")
            yield RayWorkers(ClusterAddress(address, token))
        finally:
            ray.shutdown()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray takes it for itself

    @property
    def _running(self) -> str | None:
        return self.address or os.environ.get(_ADDRESS)


@contextlib.contextmanager
def _said_of(address: str | None, *kinds: type[Exception]) -> Iterator[None]:
    """Around what connects: its failures, and these kinds of them, as a message."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError, *kinds) as error:
        what = (
            "trainer.ray: a cluster cannot be started"
            if address is None
            else f"trainer.ray.address: '{address}' cannot be reached"
        )
        raise ConfigError(
            f"{what} ({type(error).__name__}: {error}). Leave trainer.ray out to tokenize in this process"
        ) from error


def _knock(address: str) -> None:
    """Raises `OSError` soon where nobody is there: Ray itself would ask for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


class RayWorkers(Workers):
    """The workers of a cluster that this process is connected to."""

    def __init__(self, meeting: ClusterAddress):
        """Args: meeting: what others need to join it."""
        self.meeting = meeting

    @contextlib.contextmanager
    def encoding(self, encoder: Encoder) -> Iterator[EncodingPool]:
        import ray
        import ray.exceptions

        shared = ray.put(encoder)
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_encode)
        at_once = 1 + int(ray.cluster_resources().get("CPU", 1))

        def ask(contents: Sequence[Any]) -> list[TokenizedText | None]:
            try:
                return ray.get(task.remote(shared, contents))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise ConfigError(
                    f"trainer.ray: the cluster could not tokenize a part of the data in {_RETRIES + 1} attempts:"
                    f" {type(error).__name__}: {error}. What is finished stays: start again, or leave trainer.ray out"
                ) from error

        with ThreadPoolExecutor(at_once) as waiting:
            yield EncodingPool(lambda contents: waiting.submit(ask, contents), at_once)


def _encode(encoder: Encoder, contents: Sequence[Any]) -> list[TokenizedText | None]:
    return encoder.encode(contents)


@contextlib.contextmanager
def join_cluster(meeting: ClusterAddress) -> Iterator[subprocess.Popen[bytes]]:
    """Has this machine's cores work for a cluster until the block ends."""
    environment = dict(os.environ)
    if meeting.token:
        environment[_TOKEN] = meeting.token
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", meeting.address, "--block"]
    none = subprocess.DEVNULL
    node = subprocess.Popen(command, env=environment, stdin=none, stdout=none, stderr=none)
    try:
        yield node
    finally:
        node.terminate()
        try:
            node.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


_MEETING_BYTES = 512


def tokenize_on_ray(
    ray: RayConfig | None, sections: Sequence[DataConfig], tokenizer: Tokenizer, seq_len: int, log: Log
) -> None:
    """Makes the caches that are not there. Without a cluster nothing: they are then made where they are opened.

    Raises:
        ConfigError: the cluster cannot be had, or the data cannot be tokenized.
    """
    if ray is None or not ray.is_wanted:
        return
    if all_processes(not is_main_process() or all(section.is_tokenized() for section in sections)):
        return
    shared = ray.start_workers and jax.process_count() > 1
    with contextlib.ExitStack() as stack:
        cluster = main_only(lambda: stack.enter_context(ray.cluster(log, shared=shared)))
        if shared:
            meeting = _broadcast_address(None if cluster is None else cluster.meeting)
            if cluster is None:
                stack.enter_context(join_cluster(meeting))

        def make() -> None:
            assert cluster is not None, "only process 0 has it, and only that one makes caches"
            for section in sections:
                section.open(tokenizer, seq_len, log, cluster)

        main_only(make)


def _broadcast_address(meeting: ClusterAddress | None) -> ClusterAddress:
    """Process 0's meeting, on every process."""
    text = json.dumps(meeting).encode() if meeting is not None else b""
    news = np.frombuffer(text.ljust(_MEETING_BYTES), np.uint8)
    return ClusterAddress(*json.loads(broadcast_from_main(news).tobytes()))
