"""The axis names, in one place.

Logical axes name what a dimension *is*; mesh axes name which devices share it. A run maps the first onto the second
twice: once for parameters at rest, once for computation (`jaxlm.core.sharding`).
"""

from typing import Any

from jaxlm.core.imports import haliax

# Logical axes of data and activations.
MICROBATCH = "microbatch"  # one gradient-accumulation slice of a step's batch
BATCH = "batch"
POSITION = "position"
KEY_POSITION = "key_position"  # the position axis as seen by attention's keys and values
CACHE_ROW = "cache_row"  # a head of keys and values of a row, where the cache counts both as one

# Logical axes of parameters.
LAYERS = "layers"
EMBED = "embed"
MLP = "mlp"
EXPERTS = "experts"
ROUTES = "routes"  # experts as their router sees them: all of them, wherever they lie
VOCAB = "vocab"
KV_HEADS = "kv_heads"  # heads of keys and values
HEADS = "heads"  # query heads
HEAD_SIZE = "head_size"
LORA = "lora_rank"

# Mesh axes.
REPLICA = "replica"
DATA = "data"
MODEL = "model"
MESH_AXES = (REPLICA, DATA, MODEL)


def axes_of(spec: Any) -> tuple[haliax.Axis, ...]:
    """The axes of what is written as one, or as several: `Linear.In`."""
    return (spec,) if isinstance(spec, haliax.Axis) else tuple(spec)
