"""XLA flags of the test suite: it compiles a lot and computes little."""

import importlib.metadata

# Half of the compile time is LLVM's optimization.
_FLAGS = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
# Half of the rest lowers fusions through MLIR. Newer jaxlib versions have no alternative, and XLA refuses unknown flags.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS["xla_cpu_use_fusion_emitters"] = "false"


def flags_for(num_devices: int, xla_flags: str = "") -> str:
    """`xla_flags` with the suite's flags added, except those that it sets itself."""
    flags = {"xla_force_host_platform_device_count": str(num_devices), **_FLAGS}
    return " ".join(
        [xla_flags, *(f"--{flag}={value}" for flag, value in flags.items() if flag not in xla_flags)]
    ).strip()
