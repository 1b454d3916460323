"""A step that asks a teacher: the same numbers on every mesh, and the teacher keeps its buffers."""

from functools import lru_cache

import jax
import numpy as np
import pytest

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.engine.state import place_state
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.distill import Distill
from jaxlm.optim.sophia_h import SophiaHConfig
from tests.engine.helpers import AXES, VOCAB, TinyRun, arrays, layout, one_device, phase
from tests.tiers import one_of

TEACHER = LlamaConfig(
    seq_len=16, hidden_dim=48, intermediate_dim=64, num_layers=3, num_heads=4, num_kv_heads=2, initializer_range=0.3
)
OBJECTIVES = {
    "vocabulary": Distill(divergence="js", beta=0.3, temperature=2.0),
    "top k": Distill(divergence="reverse_kl", top_k=24),
}


@lru_cache
def vocabulary_sharded():
    """Tensor parallelism with a sharded vocabulary."""
    shape = mesh_shape(len(jax.devices()), replica=1, model=2)
    return make_layout(shape, AxisMappings("batch", ("embed",), ("mlp", "heads", "vocab"), {}, {}), AXES)


def teacher_on(where):
    build = lambda: TEACHER.build(vocab_axis(VOCAB), key=jax.random.key(3))  # noqa: E731
    with where.use():
        return {"teacher": place_state(build, jax.eval_shape(build), where)}


def trained(where, objective, num_microbatches=1, **changes):
    run = TinyRun(where, phase(objective=objective, **changes), refs=teacher_on(where))
    return [run.step(arrays(seed), num_microbatches) for seed in range(3)], run


SOAK = pytest.mark.soak
MESHES = [
    ("vocabulary", "two microbatches"),
    ("top k", "vocabulary sharded"),
    pytest.param("vocabulary", "vocabulary sharded", marks=SOAK),
    pytest.param("top k", "two microbatches", marks=SOAK),
    pytest.param("vocabulary", "fsdp 8", marks=SOAK),  # that mesh is also the one of two microbatches
    pytest.param("top k", "fsdp 8", marks=SOAK),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), one_of(MESHES))
def test_every_mesh_gives_the_numbers_of_one_device(name, mesh):
    expected, _ = trained(one_device(), OBJECTIVES[name])
    where = vocabulary_sharded() if mesh == "vocabulary sharded" else layout()
    found, _ = trained(where, OBJECTIVES[name], 2 if mesh == "two microbatches" else 1)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for metric in ours:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-5), metric


@pytest.mark.slow
def test_the_student_approaches_its_teacher_which_never_changes():
    run = TinyRun(one_device(), phase(objective=Distill(weight=1.0)), refs=teacher_on(one_device()))
    divergences = [run.step(arrays(0))["train/divergence"] for _ in range(8)]
    assert divergences[-1] < 0.8 * divergences[0]
    for before, after in zip(jax.tree.leaves(teacher_on(one_device())), jax.tree.leaves(run.refs), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.slow
def test_second_derivatives_ask_the_teacher_too():
    found, _ = trained(one_device(), OBJECTIVES["vocabulary"], optimizer=SophiaHConfig(learning_rate=1e-3, warmup=0))
    assert all(np.isfinite(list(metrics.values())).all() for metrics in found)
