"""Options of the compiler, one table a platform. What the user's `XLA_FLAGS` name is left to the user.

They go to each compilation and not into the environment, so that they hold for the training step alone and need not be set
before jax starts. An option is in the table only with a reason; docs/howto/watch.md has the same table.
"""

import os
from collections.abc import Mapping

Options = dict[str, bool | int | str]

TABLE: Mapping[str, Options] = {
    # Fast math, wider vectors, oneDNN, other schedulers: nothing measurable or slower.
    "cpu": {},
    # Starts collectives early and waits for them late; off by default in XLA. Without effect on one device.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "tpu": {},
}


def compiler_options(platform: str) -> Options:
    """The table's options for a platform, without those that `XLA_FLAGS` sets."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    named = {flag.lstrip("-").partition("=")[0] for flag in flags}
    return {name: value for name, value in TABLE[platform].items() if name not in named}
