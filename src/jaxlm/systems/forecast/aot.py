"""Compiles ahead of time (AOT) with the real compilers of TPUs and NVIDIA GPUs that are not attached.

TPUs need `libtpu`; GPUs need jax's CUDA plugin and its libraries (the extra `gpu`). Fused attention for GPUs cannot be
self-tested there, so it is assumed to be correct. jax queries the compute capability of the attached GPU, so its query
functions are replaced while tracing.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import current_device
from jaxlm.core.tracing import tracing
from jaxlm.hardware.topologies import Cuda, Topology

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def has_compiler(topology: Topology) -> bool:
    """Tells whether the compiler for these devices is installed. Does not initialize jax."""
    if topology.chip.platform == "tpu":
        return is_installed("libtpu")
    return topology.chip.cuda is not None and any(map(is_installed, CUDA_PLUGINS))


def aot_devices(topology: Topology) -> tuple[Sequence[Any], str]:
    """Devices that programs can be compiled for, but not run on, and the name of their compiler.

    The compiler must be installed. Raises `ConfigError` if it does not start, or does not support these devices.
    """
    from jax.experimental import topologies

    cuda = topology.chip.cuda
    try:
        if cuda is None:
            name, options = topology.compiler_name, {"platform": "tpu", "topology_name": topology.compiler_name}
        else:
            hosts, cards = topology.hosts
            name, target = cuda.name, _gpu_target_config(topology, cuda)
            options = {"platform": "cuda", "target_config": target, "topology": f"1x{hosts}x{cards}"}
        description = topologies.get_topology_desc(**options)
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--topology {topology.name}: the compiler for it is installed but does not start ({reason})."
            " Repair the installation, or uninstall it to use simulated devices"
        ) from error
    return description.devices, f"{name}, ahead of time"


def is_installed(module: str) -> bool:
    """Tells whether a module can be imported. Imports only its package."""
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def _gpu_target_config(topology: Topology, cuda: Cuda) -> str:
    """The GPU as XLA's `GpuTargetConfigProto` in protobuf text format."""
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        raise ImportError("jax finds no modules of the CUDA plugin")
    cudnn, runtime = cuda_versions.cudnn_get_version(), cuda_versions.cuda_runtime_get_version()
    major, minor = cuda.capability
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          threads_per_core_limit: 2048
          shared_memory_per_block: 49152
          shared_memory_per_core: {cuda.shared_memory << 10}
          shared_memory_per_block_optin: {(cuda.shared_memory - 1) << 10}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          core_count: {cuda.processors}
          fpus_per_core: {cuda.lanes}
          clock_rate_ghz: {cuda.clock_ghz}
          memory_bandwidth: {topology.chip.memory_bandwidth:.0f}
          device_memory_size: {topology.chip.memory:.0f}
          l2_cache_size: {cuda.l2_cache << 20}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {cudnn // 10000} minor: {cudnn // 100 % 100} patch: {cudnn % 100} }}
        runtime_version {{ major: {runtime // 1000} minor: {runtime % 1000 // 10} }}
        device_description_str: "{cuda.name}"
    """


@contextlib.contextmanager
def compiling_for_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Traces the code inside for a GPU of this compute capability that is not attached."""
    from jax._src.cudnn import fused_attention_stablehlo as fused
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    def parse(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    replacements = {
        "check_compute_capability": lambda minimum: capability >= parse(minimum),
        "is_cuda_compute_capability_equal": lambda other: capability == parse(other),
    }
    of_device = {"jax": SimpleNamespace(**{**vars(jax), "devices": lambda: [current_device()]})}
    replaced = [(fused, replacements), (transposed_ragged_dot_mgpu, of_device)]
    originals = [(module, {name: getattr(module, name) for name in values}) for module, values in replaced]
    for module, values in replaced:
        _set_attributes(module, values)
    try:
        with tracing(assume_kernels=True):
            yield
    finally:
        for module, values in originals:
            _set_attributes(module, values)


def _set_attributes(module: ModuleType, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(module, name, value)
