"""Connecting the processes of a multi-process run, with timeouts for lost processes."""

import glob
import hashlib
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from jaxlm.core.errors import EXIT_FAILED, ConfigError, say
from jaxlm.core.field_types import NonNegativeInt, PositiveInt, check_fields
from jaxlm.core.rules import Rules, ordered, together

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

# jaxlm should notice first, and say why. jax's own timeouts are later than the configured ones by this time, which gives a
# busy process time to report.
_JAX_LATER_S = 60.0
_SILENT_S = 20.0  # until a process that waits for the others says so
_own_number: list[socket.socket] = []  # open as long as this process lives


def _leave(code: int) -> NoReturn:
    """Ends the process although a thread waits inside of jax, which would abort when the interpreter ends."""
    sys.stdout.flush()
    os._exit(code)


@dataclass(frozen=True)
class DistributedConfig:
    """Says how the processes of a multi-process run connect. SLURM, TPU pods and Open MPI are detected automatically.

    Attributes:
        coordinator_address: `host:port` of process 0 (MASTER_ADDR:MASTER_PORT in PyTorch); null detects it. Set it
            together with `num_processes` and `process_id`.
        num_processes: total number of processes (WORLD_SIZE); null detects it.
        process_id: index of this process, from 0 (RANK); null detects it.
        local_device_ids: devices of this process. Null uses all visible devices; under SLURM, this task's share of
            CUDA_VISIBLE_DEVICES.
        initialization_timeout: maximum time to wait at startup until all processes have connected.
        heartbeat_timeout: time without a heartbeat after which a process counts as lost and all others stop with an error.
        shutdown_timeout: maximum time that a finished process waits for the others.
    """

    coordinator_address: str | None = None
    num_processes: PositiveInt | None = None
    process_id: NonNegativeInt | None = None
    local_device_ids: int | list[int] | None = None
    initialization_timeout: timedelta = timedelta(minutes=5)
    heartbeat_timeout: timedelta = timedelta(seconds=100)
    shutdown_timeout: timedelta = timedelta(minutes=5)
    key_rules: ClassVar[Rules] = (
        together("coordinator_address", "num_processes", "process_id"),
        ordered("process_id", "num_processes", strictly=True),
    )

    @property
    def has_several_processes(self) -> bool:
        """Tells whether the configuration or the environment describes a run of several processes."""
        if self.num_processes is not None:
            return self.num_processes > 1
        return detect_launcher(os.environ) is not None

    def join(self, failed: int | None = None) -> None:
        """Connects this process to the others, if the configuration or the environment describes any.

        Args:
            failed: exit code of this process if it has failed already, and connects only to say so.
        """
        import jax

        check_fields(self, "trainer.distributed")
        explicit = (self.coordinator_address, self.num_processes, self.process_id)
        for name in ("initialization_timeout", "heartbeat_timeout", "shutdown_timeout"):
            if getattr(self, name) < timedelta(seconds=1):
                raise ConfigError(f"trainer.distributed.{name}: {getattr(self, name)} given, 1s or more expected")
        if self.coordinator_address is not None:
            self._check_address()
        launcher = detect_launcher(os.environ)
        if None in explicit and launcher is None and self.local_device_ids is not None:
            raise ConfigError(
                "trainer.distributed.local_device_ids: given, but this is the only process of the run. Select devices with"
                " CUDA_VISIBLE_DEVICES or JAX_PLATFORMS, or set coordinator_address, num_processes and process_id too"
            )
        if (None in explicit and launcher is None) or jax.distributed.is_initialized():
            return
        if self.coordinator_address is not None:
            self._check_port_and_number()
        # jax would otherwise handle SIGTERM itself; the run has its own handler, which saves a checkpoint first.
        jax.config.update("jax_enable_preemption_service", False)
        self._connect(EXIT_FAILED if failed is None else failed)

    def _connect(self, code_if_alone: int) -> None:
        """Returns once all processes have connected. Ends the process if they have not in time, or at Ctrl-C.

        jax waits in a thread: its own end of the waiting is an abort, and the main thread would not see Ctrl-C.
        """
        import jax

        thread = ThreadPoolExecutor(1)
        connecting = thread.submit(
            jax.distributed.initialize,
            self.coordinator_address,
            self.num_processes,
            self.process_id,
            local_device_ids=self._devices(),
            initialization_timeout=round(self.initialization_timeout.total_seconds() + _JAX_LATER_S),
            # jax sends a heartbeat after each half of its timeout. A process may be killed just before one, so that half is
            # all that remains until jax aborts the others, and jaxlm must have noticed.
            heartbeat_timeout_seconds=2 * round(self.heartbeat_timeout.total_seconds() + _JAX_LATER_S),
            shutdown_timeout_seconds=round(self.shutdown_timeout.total_seconds()),
        )
        thread.shutdown(wait=False)
        limit_s = self.initialization_timeout.total_seconds()
        key = "trainer.distributed.initialization_timeout"
        try:
            if wait([connecting], min(_SILENT_S, limit_s)).done:
                return connecting.result()
            if limit_s > _SILENT_S:
                say(
                    "still waiting for the other processes of the run to connect. If one of them has failed, its output"
                    f" says why; this one gives up after {limit_s:g} s ({key})"
                )
                if wait([connecting], limit_s - _SILENT_S).done:
                    return connecting.result()
        except KeyboardInterrupt:
            say("interrupted while waiting for the other processes of the run to connect")
            _leave(128 + signal.SIGINT)
        say(
            f"error: not all processes of the run connected within {limit_s:g} s ({key}): one was not started, was killed,"
            " has failed or cannot reach the others. The output of a process that has failed says why"
        )
        _leave(code_if_alone)

    def _check_address(self) -> None:
        host, _, port = str(self.coordinator_address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"trainer.distributed.coordinator_address: '{self.coordinator_address}' given, host:port expected, such as"
                " 10.0.0.1:1234"
            )

    def _check_port_and_number(self) -> None:
        """Raises `ConfigError` for what jax answers with a crash, here or in the processes that run already: a port that is
        taken, and on Linux a process of this machine with the same number.
        """
        address, number = str(self.coordinator_address), self.process_id
        if number == 0:
            with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as port:
                # The port of a run that has just ended is free.
                port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if port.family == socket.AF_INET6:
                    port.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                problem = (
                    f"trainer.distributed.coordinator_address: '{address}' given, but process 0 cannot listen on its port."
                    " Give another port to all processes, or end what has it"
                )
                _bind(port, ("", int(address.rpartition(":")[2])), problem)
        if sys.platform == "linux":
            problem = (
                f"trainer.distributed.process_id: {number} given, but process {number} of the run at {address} runs on this"
                " machine already. Give each process its own number"
            )
            _own_number.append(socket.socket(socket.AF_UNIX))
            name = hashlib.sha256(f"{address}/{number}".encode()).hexdigest()  # names end at 108 bytes
            _bind(_own_number[-1], f"\0jaxlm/{name}", problem)

    def _devices(self) -> list[int] | None:
        if isinstance(self.local_device_ids, int):
            return [self.local_device_ids]
        if self.local_device_ids is None and self.coordinator_address is None:
            return slurm_devices(os.environ) if detect_launcher(os.environ) == "SLURM" else None
        return self.local_device_ids


def _bind(to: socket.socket, address: Any, problem: str) -> None:
    try:
        to.bind(address)
    except OSError as error:
        raise ConfigError(f"{problem} ({error.strerror})") from error


def detect_launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that started several processes of this run, detected by its environment variables; None if none did."""
    if all(name in environment for name in _SLURM) and int(environment["SLURM_NTASKS"]) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    # From v5 on, the chips of a TPU machine are VFIO devices.
    chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    on_tpu_machine = bool(chips) and importlib.util.find_spec("libtpu") is not None
    several_hosts = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    if several_hosts or int(environment.get("MEGASCALE_NUM_SLICES", "1")) > 1 or on_tpu_machine:
        return "TPU"
    return None


def slurm_devices(environment: Mapping[str, str]) -> list[int] | None:
    """This task's share of the GPUs that all tasks of its node see, or all visible GPUs if it only sees its own.

    jax would always use one GPU per task.
    """
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "")))
    if not visible or tasks is None:
        return None
    if len(visible) < int(tasks[0]):
        return list(range(len(visible)))
    share = len(visible) // int(tasks[0])
    first = int(environment["SLURM_LOCALID"]) * share
    return list(range(first, first + share))
