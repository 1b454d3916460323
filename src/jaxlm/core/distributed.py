"""How the processes of a run find each other, and notice that one of them is gone."""

import glob
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import jax

from jaxlm.core.errors import ConfigError

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(frozen=True)
class DistributedConfig:
    """How several processes find each other. SLURM, TPU pods and Open MPI are recognised without any of it.

    Attributes:
        coordinator_address: `host:port` of process 0.
        num_processes: how many processes there are.
        process_id: this one's number, from 0.
        local_device_ids: the devices of this process; null means all that it sees, and under SLURM its share of
            CUDA_VISIBLE_DEVICES.
        initialization_timeout: how long to wait until all processes are there.
        heartbeat_timeout: how long a process may be silent before all others stop with a message.
        shutdown_timeout: how long a process that is done waits for the others.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: int | list[int] | None = None
    initialization_timeout: timedelta = timedelta(minutes=5)
    heartbeat_timeout: timedelta = timedelta(seconds=100)
    shutdown_timeout: timedelta = timedelta(minutes=5)

    def join(self) -> None:
        """Connects this process to the others, if the configuration or the environment names any.

        Raises:
            ConfigError: the configuration names them in part, or a timeout is no time.
        """
        by_hand = (self.coordinator_address, self.num_processes, self.process_id)
        for name in ("initialization_timeout", "heartbeat_timeout", "shutdown_timeout"):
            if getattr(self, name) < timedelta(seconds=1):
                raise ConfigError(f"trainer.distributed.{name}: {getattr(self, name)} given, 1s and more expected")
        if any(value is not None for value in by_hand) and None in by_hand:
            raise ConfigError(
                "trainer.distributed: coordinator_address, num_processes and process_id go together, given were "
                f"{self.coordinator_address}, {self.num_processes}, {self.process_id}"
            )
        if (None in by_hand and detected(os.environ) is None) or jax.distributed.is_initialized():
            return
        # jax would otherwise take SIGTERM for itself; the run has its own handler, which saves first.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            self.coordinator_address,
            self.num_processes,
            self.process_id,
            local_device_ids=self._devices(),
            initialization_timeout=round(self.initialization_timeout.total_seconds()),
            heartbeat_timeout_seconds=round(self.heartbeat_timeout.total_seconds()),
            shutdown_timeout_seconds=round(self.shutdown_timeout.total_seconds()),
        )

    def _devices(self) -> list[int] | None:
        if isinstance(self.local_device_ids, int):
            return [self.local_device_ids]
        if self.local_device_ids is None and self.coordinator_address is None:
            return slurm_devices(os.environ) if detected(os.environ) == "SLURM" else None
        return self.local_device_ids


def detected(environment: Mapping[str, str]) -> str | None:
    """The launcher that started several processes of this run, by the variables that it sets; None where none did."""
    if all(name in environment for name in _SLURM) and int(environment["SLURM_NTASKS"]) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    on_tpu_machine = bool(glob.glob("/dev/accel*")) and importlib.util.find_spec("libtpu") is not None
    several_hosts = "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    if several_hosts or int(environment.get("MEGASCALE_NUM_SLICES", "1")) > 1 or on_tpu_machine:
        return "TPU"
    return None


def slurm_devices(environment: Mapping[str, str]) -> list[int] | None:
    """This task's share of the GPUs that the tasks of its node see together; all, where it sees only its own.

    jax itself would take one GPU a task, whatever their number.
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
