"""Eight simulated devices for the whole suite; tests of one device build their own mesh or process."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


def pytest_collection_modifyitems(items):
    """The longest first: whole runs of the command, which wait for each other least when they start early."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/runs/"))
