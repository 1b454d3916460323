"""The machines of a run: joining the processes, arranging the devices, talking about process 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxlm.core.axes import BATCH, DATA, HEADS, KV_HEADS, MESH_AXES, MODEL, REPLICA
from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.sharding import Layout

T = TypeVar("T")
MeshAxes = str | tuple[str, ...]


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


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes.

    Attributes:
        replica: groups that hold the whole model each (HSDP's outer axis).
        data: devices that share one copy of the parameters (FSDP).
        model: devices that share each layer's computation (tensor parallel).
    """

    replica: int
    data: int
    model: int

    @property
    def batch_ways(self) -> int:
        """Over how many devices the batch is spread."""
        return self.replica * self.data

    def __str__(self) -> str:
        return f"replica {self.replica} x data {self.data} x model {self.model}"


def mesh_shape(num_devices: int, *, replica: int, model: int) -> MeshShape:
    """What is left for `data` on `num_devices` devices.

    Raises:
        ConfigError: replica x model does not divide the devices.
    """
    for name, size in (("replica_ici_axis_size", replica), ("model_axis_size", model)):
        if size < 1:
            raise ConfigError(f"trainer.{name}: {size} given, 1 or more expected")
    if num_devices % (replica * model):
        divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
        raise ConfigError(
            f"trainer.model_axis_size x trainer.replica_ici_axis_size = {model} x {replica} = {replica * model} does not"
            f" divide the {num_devices} devices. Allowed products: {', '.join(map(str, divisors))}"
        )
    return MeshShape(replica, num_devices // (replica * model), model)


@dataclass(frozen=True)
class AxisMappings:
    """The guide's axis keys: which logical axes go where.

    Attributes:
        batch: the logical axis that is spread over `replica` and `data`; None spreads nothing.
        fsdp: logical axes whose parameters rest spread over `data`.
        tensor_parallel: logical axes that are spread over `model` in parameters and computation.
        shared: further entries of both mappings.
        parameter: further entries of the parameter mapping.
    """

    batch: str | None
    fsdp: tuple[str, ...]
    tensor_parallel: tuple[str, ...]
    shared: Mapping[str, MeshAxes]
    parameter: Mapping[str, MeshAxes]


def make_layout(
    shape: MeshShape, mappings: AxisMappings, logical_axes: Mapping[str, int], devices: Sequence[Any] | None = None
) -> Layout:
    """Arranges all devices of all processes (or `devices`) and writes out both mappings.

    Order: `shared`, then tensor parallel, then the batch axis; the parameter mapping starts from that, then takes
    `parameter`, then FSDP, which wins. `heads` under tensor parallel takes `kv_heads` along where those divide.

    Args:
        logical_axes: the model's parameter axes and their sizes, to catch names that do not exist and sizes that do
            not divide.

    Raises:
        ConfigError: an unknown logical or mesh axis, or a size that its mesh axes do not divide.
    """
    sizes: dict[str, int] = dict(zip(MESH_AXES, (shape.replica, shape.data, shape.model), strict=True))
    compute: dict[str, MeshAxes] = dict(mappings.shared)
    compute.update(dict.fromkeys(mappings.tensor_parallel, MODEL))
    if HEADS in mappings.tensor_parallel and logical_axes.get(KV_HEADS, 1) % shape.model == 0:
        compute.setdefault(KV_HEADS, MODEL)
    if mappings.batch is not None:
        compute[mappings.batch] = (REPLICA, DATA)
    parameter = {**compute, **mappings.parameter, **dict.fromkeys(mappings.fsdp, DATA)}
    for mapping in (compute, parameter):
        _check_mapping(mapping, sizes, logical_axes)
    grid = np.asarray(jax.devices() if devices is None else devices).reshape(tuple(sizes.values()))
    mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return Layout(mesh, parameter, compute)


def _check_mapping(mapping: Mapping[str, MeshAxes], sizes: Mapping[str, int], logical_axes: Mapping[str, int]) -> None:
    for axis, target in mapping.items():
        if axis != BATCH and axis not in logical_axes:
            raise ConfigError(
                f"trainer: the axis mappings name the logical axis '{axis}', which the model does not have."
                f" Its axes: {', '.join(sorted(logical_axes))}"
            )
        ways = 1
        for name in (target,) if isinstance(target, str) else target:
            if name not in sizes:
                raise ConfigError(f"trainer: '{axis}' is mapped to '{name}'. Mesh axes: {', '.join(sizes)}")
            ways *= sizes[name]
        if axis in logical_axes and logical_axes[axis] % ways:
            raise ConfigError(
                f"trainer: '{axis}' has size {logical_axes[axis]}, which the {ways} devices of mesh axis {target} do not"
                f" divide. Change the model's size, the mesh, or the mapping"
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


def main_only(act: Callable[[], T]) -> T | None:
    """Calls `act` on process 0 while the others wait; they get None.

    Raises:
        BaseException: what `act` raises, on process 0.
        ConfigError, PeerError: the same message, on all others: they end with it instead of waiting for what never comes.
    """
    if jax.process_count() == 1:
        return act()
    made, news = None, np.zeros(_NEWS_BYTES, np.uint8)
    if is_main_process():
        try:
            made = act()
        except BaseException as failure:
            broadcast_from_main(_news_of(failure))
            raise
    told = broadcast_from_main(news)
    if told[0] != _ALL_WELL:
        raise _failure_told(told)
    return made


def main_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0, then on all others: what it builds on disk is there when they look for it.

    Raises:
        BaseException: what `make` raises, where it does.
        ConfigError, PeerError: on all other processes, which would otherwise wait for that one.
    """
    made = main_only(make)
    if jax.process_count() > 1:
        try:
            made = made if is_main_process() else make()
        except BaseException:
            everywhere(False)
            raise
        if not everywhere(True):
            raise PeerError("another process has failed; its own output says why")
    return cast(T, made)


# What process 0 tells the others: one byte for the kind, then text.
_NEWS_BYTES = 4096
_ALL_WELL, _CONFIG, _OTHER = range(3)


def _news_of(failure: BaseException) -> np.ndarray:
    kind = _CONFIG if isinstance(failure, ConfigError) else _OTHER
    text = str(failure) if kind == _CONFIG else f"{type(failure).__name__}: {failure}"
    raw = bytes([kind]) + text.encode()[: _NEWS_BYTES - 1]
    return np.frombuffer(raw.ljust(_NEWS_BYTES, b"\0"), np.uint8)


def _failure_told(news: np.ndarray) -> Exception:
    text = "process 0: " + news[1:].tobytes().rstrip(b"\0").decode(errors="ignore")
    return ConfigError(text) if news[0] == _CONFIG else PeerError(text)
