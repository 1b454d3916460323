"""Run by test_sharding.py, as a process, on eight simulated devices: nano, as `tests/models/sharded_program.py` others."""

import sys

from jaxlm.systems.nanochat.model import NanoConfig
from tests.models.sharded_program import SIZES, main

NANO = NanoConfig(
    **{key: value for key, value in SIZES.items() if key != "initializer_range"} | {"num_layers": 8},
    num_kv_heads=2,
    smear_channels=24,
    backout=0.2,
    embed_init_std=0.1,
    head_init_std=0.1,
    gate_init_max=0.1,
    gradient_checkpointing=False,
)

if __name__ == "__main__":
    main(NANO, 15.0, sys.argv[1:])
