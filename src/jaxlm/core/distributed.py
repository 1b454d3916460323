"""Connecting the processes of a multi-process run, with timeouts for lost processes."""

import contextlib
import glob
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


# jax's own heartbeat timeout, as a multiple of the configured one: engine/peers.py should notice first, and say why.
_JAX_TIMEOUT_FACTOR = 3
_SILENT_S = 20.0  # until a process that waits for the others says so


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a multi-process run connect. SLURM, TPU pods and Open MPI are detected automatically.

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

    def join(self) -> None:
        """Connects this process to the others, if the configuration or the environment describes any."""
        explicit = (self.coordinator_address, self.num_processes, self.process_id)
        for name in ("initialization_timeout", "heartbeat_timeout", "shutdown_timeout"):
            if getattr(self, name) < timedelta(seconds=1):
                raise ConfigError(f"trainer.distributed.{name}: {getattr(self, name)} given, 1s or more expected")
        if any(value is not None for value in explicit) and None in explicit:
            raise ConfigError(
                f"trainer.distributed: coordinator_address {self.coordinator_address}, num_processes {self.num_processes},"
                f" process_id {self.process_id} given. They go together: set all three or none"
            )
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
        # jax would otherwise handle SIGTERM itself; the run has its own handler, which saves a checkpoint first.
        jax.config.update("jax_enable_preemption_service", False)
        with self._saying_that_it_waits():
            jax.distributed.initialize(
                self.coordinator_address,
                self.num_processes,
                self.process_id,
                local_device_ids=self._devices(),
                initialization_timeout=round(self.initialization_timeout.total_seconds()),
                heartbeat_timeout_seconds=round(self.heartbeat_timeout.total_seconds() * _JAX_TIMEOUT_FACTOR),
                shutdown_timeout_seconds=round(self.shutdown_timeout.total_seconds()),
            )

    @contextlib.contextmanager
    def _saying_that_it_waits(self) -> Iterator[None]:
        """Before they have connected, a process cannot learn that another one has failed: that one's output says why."""
        line = (
            "still waiting for the other processes of the run to connect. If one of them has failed, its output says why;"
            f" this one gives up after {self.initialization_timeout.total_seconds():g} s"
            " (trainer.distributed.initialization_timeout)"
        )
        timer = threading.Timer(_SILENT_S, lambda: print(line, file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _check_address(self) -> None:
        host, _, port = str(self.coordinator_address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"trainer.distributed.coordinator_address: '{self.coordinator_address}' given, host:port expected, such as"
                " 10.0.0.1:1234"
            )
        if self.num_processes is not None and self.process_id is not None and self.process_id >= self.num_processes:
            raise ConfigError(
                f"trainer.distributed.process_id: {self.process_id} given, 0 to {self.num_processes - 1} expected, because"
                f" num_processes is {self.num_processes}"
            )

    def _devices(self) -> list[int] | None:
        if isinstance(self.local_device_ids, int):
            return [self.local_device_ids]
        if self.local_device_ids is None and self.coordinator_address is None:
            return slurm_devices(os.environ) if detect_launcher(os.environ) == "SLURM" else None
        return self.local_device_ids


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
