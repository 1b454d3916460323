"""Eight simulated devices for the whole suite; tests of one device build their own mesh or process."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and compute little: without LLVM's optimisations they take little more than half of the time.
for flag, value in {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --{flag}={value}"


def pytest_collection_modifyitems(items):
    """The longest first: whole runs of the command, which wait for each other least when they start early."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/runs/"))
