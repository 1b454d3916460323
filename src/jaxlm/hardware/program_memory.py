"""The memory that a compiled program needs."""

import math

import jax


def bytes_per_device(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    assert array.sharding is not None, "all arrays of a plan have one"
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def planned_bytes(call: jax.stages.Compiled) -> int | None:
    """Memory per device that a program needs; None if the compiler does not report it."""
    memory = call.memory_analysis()
    return memory and (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def host_bytes(call: jax.stages.Compiled) -> int:
    """Memory of the host per device that a program needs; 0 on CPUs, and if the compiler does not report it."""
    memory = call.memory_analysis()
    if memory is None:
        return 0
    return (
        memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes
    )


def argument_bytes(call: jax.stages.Compiled) -> int | None:
    """Memory per device of what a program is given; None if the compiler does not report it."""
    memory = call.memory_analysis()
    return memory and memory.argument_size_in_bytes
