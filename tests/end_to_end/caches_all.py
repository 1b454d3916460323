"""`jaxlm.train` that keeps every compiled program, however little time its compilation took."""

import sys

import jax

from jaxlm import train
from jaxlm.session import dry_run


def keeping(folder, enable=train.enable_compilation_cache):
    enable(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


if __name__ == "__main__":
    train.enable_compilation_cache = dry_run.enable_compilation_cache = keeping
    sys.exit(train.main())
