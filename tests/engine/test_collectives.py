"""Communication in a step: the compiled program's collectives against a table derived from the model."""

import math
from collections import Counter

import pytest

from jaxlm.core import tree
from jaxlm.hardware.hlo import Collective
from tests.engine.helpers import EVERY_MESH, MESHES, MODEL, TinyRun, arrays, layout
from tests.hardware.helpers import collectives


def unit_shapes(run: TinyRun) -> Counter[tuple[str, tuple[int, ...]]]:
    """(layer or other, shape) of each parameter during computation: gathered, except over the tensor-parallel axis."""
    num_shards = {axis: run.where.mesh.shape[name] for axis, name in run.where.compute.items() if isinstance(name, str)}
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for _, leaf in tree.leaves(run.state.model):
        kind = "layer" if any(axis.name == "layers" for axis in leaf.axes) else "other"
        shape = tuple(axis.size // num_shards.get(axis.name, 1) for axis in leaf.axes if axis.name != "layers")
        found[kind, shape] += 1
    return found


def gathered(run: TinyRun) -> Counter[Collective]:
    """Layer parameters once each in the forward and backward pass (the loops' bodies); other parameters once."""
    table: Counter[Collective] = Counter()
    for (kind, shape), number in unit_shapes(run).items():
        shape, times = ((1, *shape), 2) if kind == "layer" else (shape, 1)
        table[Collective("all-gather", "f32", shape)] += number * times
    return table


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_MESH)
def test_collectives_of_a_step(name):
    run = TinyRun(layout(**MESHES[name]))
    found = collectives(run.compiled_text(arrays(0)))

    gathers = Counter({c: n for c, n in found.items() if c.kind == "all-gather"})
    assert gathers == (Counter() if name == "ddp 8" else gathered(run))
    largest = max((math.prod(c.shape) for c in gathers), default=0)
    one_layer = sum(math.prod(shape) * n for (kind, shape), n in unit_shapes(run).items() if kind == "layer")
    assert largest <= one_layer

    # Each gradient is reduced once. (On CPUs, the partitioner's sums are all-reduces that are sliced afterwards.)
    summed = Counter({c.shape: n for c, n in found.items() if c.kind == "all-reduce" and c.dtype == "f32" and c.shape})
    for (_, shape), number in unit_shapes(run).items():
        if shape != (64, 32) or name == "ddp 8":
            assert summed[shape] == sum(n for (_, s), n in unit_shapes(run).items() if s == shape), (shape, number)
    # The head's gradient is reduced directly into its storage sharding.
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    data = run.where.mesh.shape["data"]
    assert scattered == ([] if name == "ddp 8" else [Collective("reduce-scatter", "f32", (64, 32 // data))])

    # Activations move only under tensor parallelism: after attention and MLP, in forward, recomputation and backward.
    moved = {c for c in found if c.shape[-2:] == (MODEL.seq_len, MODEL.hidden_dim)}
    assert {c.kind for c in moved} == ({"all-reduce"} if name.startswith("tp") else set())
    assert not {c for c in found if c.kind in ("all-to-all", "collective-permute")}
