"""The processes of a run: joining them, waiting for them, talking about process 0."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jaxlm.core.errors import ConfigError

T = TypeVar("T")


def configure_jax(options: Mapping[str, Any]) -> None:
    """Sets options of jax itself. Call it before anything of jax is used.

    Raises:
        ConfigError: jax has no such option, or not such a value.
    """
    for name, value in options.items():
        if name == "jax_compilation_cache_dir":
            raise ConfigError("trainer.jax_config.jax_compilation_cache_dir: say trainer.compilation_cache_dir instead")
        try:
            jax.config.update(name, value)
        except (AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"trainer.jax_config.{name}: {value!r} given; jax {jax.__version__} says: {error}"
            ) from error


@dataclass(frozen=True)
class DistributedConfig:
    """How several processes find each other. SLURM, TPU pods and Open MPI are recognised without any of it.

    Attributes:
        coordinator_address: `host:port` of process 0.
        num_processes: how many processes there are.
        process_id: this one's number, from 0.
        local_device_ids: the devices of this process; None means all that it sees.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: list[int] | None = None

    def join(self) -> None:
        """Connects this process to the others, if the configuration names any; otherwise does nothing."""
        if self.coordinator_address is None and self.num_processes is None and self.process_id is None:
            return
        if self.coordinator_address is None or self.num_processes is None or self.process_id is None:
            raise ConfigError(
                "trainer.distributed: coordinator_address, num_processes and process_id go together, given were "
                f"{self.coordinator_address}, {self.num_processes}, {self.process_id}"
            )
        if jax.distributed.is_initialized():
            return
        # jax would otherwise take SIGTERM for itself; the run has its own handler, which saves first.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            self.coordinator_address, self.num_processes, self.process_id, local_device_ids=self.local_device_ids
        )


def is_main_process() -> bool:
    """Whether this process is the one that prints, logs and decides on time."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def broadcast_from_main(values: np.ndarray) -> np.ndarray:
    """Process 0's small array, on every process."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def everywhere(holds: bool) -> bool:
    """Whether something holds on every process; each must ask."""
    if jax.process_count() == 1:
        return holds
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(holds))))


def main_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0, then on all others: what it builds on disk is there when they look for it."""
    if is_main_process():
        made = make()
        barrier("main first")
        return made
    barrier("main first")
    return make()
