"""XLA flags of the test suite: it compiles a lot and computes little."""

import importlib.metadata

# Half of the compile time is LLVM's optimization.
_FLAGS = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
# Half of the rest lowers fusions through MLIR. Newer jaxlib versions have no alternative, and XLA refuses unknown flags.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS["xla_cpu_use_fusion_emitters"] = "false"


def flags_for(num_devices: int, given: str = "") -> str:
    """`given` with the suite's flags added, except those that it sets itself."""
    flags = {"xla_force_host_platform_device_count": str(num_devices), **_FLAGS}
    return " ".join([given, *(f"--{flag}={value}" for flag, value in flags.items() if flag not in given)]).strip()
