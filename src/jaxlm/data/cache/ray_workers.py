"""Tokenizes on a Ray cluster. Each shard of a cache is a task; if a worker dies, Ray reruns the task on another one.

Process 0 does all reading and writing. Only text and tokens are sent over the network, so workers need no access to files.
"""

import contextlib
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

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import all_processes, from_main, is_main_process, main_only
from jaxlm.data.base import Log
from jaxlm.data.cache.build import EncodingPool, Workers
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.base import Encoder
from jaxlm.data.formats.segments import TokenizedText
from jaxlm.data.tokenizer.tokenizer import Tokenizer

_CONNECT_S = 10
_STOP_S = 20
_RETRIES = 5  # of a task whose worker dies; more failures are not a coincidence
_ADDRESS, _TOKEN = "RAY_ADDRESS", "RAY_AUTH_TOKEN"
# One thread per task, and as many tasks as cores.
_IN_WORKERS = {"RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


class ClusterAddress(NamedTuple):
    """Holds what a machine needs to join a cluster."""

    address: str  # `host:port`
    token: str  # for authentication; empty if the members have it already


@dataclass(frozen=True)
class RayConfig:
    """A Ray cluster to tokenize on. jaxlm must be installed on its machines.

    Attributes:
        address: `host:port` of a running cluster; null uses the environment variable RAY_ADDRESS if it is set.
        start_workers: let the machines of the run's other processes join the cluster during tokenization.
        auto_start_cluster: start a cluster on process 0's machine if there is no address; `false` tokenizes in process 0
            instead.
    """

    address: str | None = None
    start_workers: bool = True
    auto_start_cluster: bool = True

    @property
    def uses_cluster(self) -> bool:
        """Tells whether to tokenize on a cluster, running or to be started."""
        return self._running_address is not None or self.auto_start_cluster

    @contextlib.contextmanager
    def cluster(self, log: Log, *, shared: bool) -> Iterator["RayWorkers"]:
        """Connects to the running cluster, or starts one and stops it at the end of the block.

        Args:
            shared: whether other machines will join.

        Raises:
            ConfigError: the cluster cannot be reached or started.
        """
        running = self._running_address
        with _connection_errors(running):
            if running is not None:
                _check_reachable(running)
            import ray
            import ray.exceptions
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a deprecation warning
        token = ""
        if shared and running is None:
            token = os.environ.setdefault(_TOKEN, secrets.token_hex(32))
        before = signal.getsignal(signal.SIGTERM)
        try:
            with _connection_errors(running, ray.exceptions.RayError), warnings.catch_warnings():
                # Ray only forks to exec its own programs right away, which is safe despite JAX's threads.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                # Workers' output is not forwarded: failures arrive as exceptions.
                init_options: dict[str, Any] = {"address": running}
                if running is None:
                    init_options = {"address": "local", "include_dashboard": False}
                ray.init(
                    **init_options,
                    runtime_env={"env_vars": _IN_WORKERS},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            cores = int(ray.cluster_resources().get("CPU", 0))
            address = ray.get_runtime_context().gcs_address
            log(f"ray: tokenizing on {address} ({'started' if running is None else 'already running'}), {cores} cores")
            yield RayWorkers(ClusterAddress(address, token))
        finally:
            ray.shutdown()
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray replaces the handler

    @property
    def _running_address(self) -> str | None:
        return self.address or os.environ.get(_ADDRESS)


@contextlib.contextmanager
def _connection_errors(address: str | None, *kinds: type[Exception]) -> Iterator[None]:
    """Converts failures to connect, and exceptions of `kinds`, to `ConfigError`."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError, *kinds) as error:
        problem = "trainer.ray: a cluster cannot be started"
        if address is not None:
            problem = f"trainer.ray.address: '{address}' cannot be reached"
        raise ConfigError(
            f"{problem} ({type(error).__name__}: {error}). Remove trainer.ray to tokenize in this process"
        ) from error


def _check_reachable(address: str) -> None:
    """Raises `OSError` quickly if nothing listens at the address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


class RayWorkers(Workers):
    """The workers of a cluster that this process is connected to. Other machines join it at `cluster_address`."""

    def __init__(self, cluster_address: ClusterAddress):
        self.cluster_address = cluster_address

    @contextlib.contextmanager
    def encoding(self, encoder: Encoder) -> Iterator[EncodingPool]:
        import ray
        import ray.exceptions

        encoder_ref = ray.put(encoder)
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_encode)
        max_in_flight = 1 + int(ray.cluster_resources().get("CPU", 1))

        def run_task(contents: Sequence[Any]) -> list[TokenizedText | None]:
            try:
                return ray.get(task.remote(encoder_ref, contents))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise ConfigError(
                    f"trainer.ray: the cluster failed to tokenize a shard in {_RETRIES + 1} attempts:"
                    f" {type(error).__name__}: {error}. Start again, or remove trainer.ray; finished shards are kept"
                ) from error

        with ThreadPoolExecutor(max_in_flight) as pool:
            yield EncodingPool(lambda contents: pool.submit(run_task, contents), max_in_flight)


def _encode(encoder: Encoder, contents: Sequence[Any]) -> list[TokenizedText | None]:
    return encoder.encode(contents)


@contextlib.contextmanager
def join_cluster(cluster_address: ClusterAddress) -> Iterator[subprocess.Popen[bytes]]:
    """Adds this machine to a cluster until the block ends."""
    environment = dict(os.environ)
    if cluster_address.token:
        environment[_TOKEN] = cluster_address.token
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", cluster_address.address, "--block"]
    devnull = subprocess.DEVNULL
    node = subprocess.Popen(command, env=environment, stdin=devnull, stdout=devnull, stderr=devnull)
    try:
        yield node
    finally:
        node.terminate()
        try:
            node.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


def tokenize_on_ray(
    ray: RayConfig | None, sections: Sequence[DataConfig], tokenizer: Tokenizer, seq_lens: Sequence[int], log: Log
) -> None:
    """Builds the missing caches on the cluster. Without a cluster it does nothing: caches are then built when opened.

    Args:
        seq_lens: length of the examples of each section.

    Raises:
        ConfigError: the cluster cannot be reached or started, or the data cannot be tokenized.
    """
    if ray is None or not ray.uses_cluster:
        return
    if all_processes(not is_main_process() or all(section.is_tokenized() for section in sections)):
        return
    shared = ray.start_workers and jax.process_count() > 1
    with contextlib.ExitStack() as stack:
        cluster = main_only(lambda: stack.enter_context(ray.cluster(log, shared=shared)))
        if shared:
            cluster_address = from_main(lambda: cluster and cluster.cluster_address)
            if cluster is None:
                stack.enter_context(join_cluster(ClusterAddress(*cluster_address)))

        def build_caches() -> None:
            assert cluster is not None, "only process 0 connects to the cluster, and only process 0 builds caches"
            for section, seq_len in zip(sections, seq_lens, strict=True):
                section.open(tokenizer, seq_len, log, cluster, summarize=False)

        main_only(build_caches)
