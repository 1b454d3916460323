"""The guide's mesh keys on eight devices: resulting meshes and mappings, errors and warnings."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import mesh_shape
from jaxlm.plan.batches import plan_batches
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.mesh import plan_mesh
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.engine import helpers

MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "intermediate_dim": 32}


def plan_of(**trainer: Any) -> Plan:
    tree = {"model": {**MODEL, "num_kv_heads": 4}, "trainer": {"train_batch_size": 16, **trainer}}
    return make_plan(decode_run(ConfigSource(tree), None), "x", 64)


def mappings(**trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layout = plan_of(**trainer).layout
    return dict(layout.compute), dict(layout.parameter)


# From the guide's table: devices, model axis, replicas, batch, per device -> mesh, microbatch, microbatches, evaluation.
DIVISIONS = [
    ((1, 1, 1, 32, -1), ((1, 1, 1), 32, 1, 32)),
    ((8, 1, 1, 512, -1), ((1, 8, 1), 512, 1, 512)),
    ((8, 1, 1, 512, 4), ((1, 8, 1), 32, 16, 32)),
    ((8, 2, 1, 512, 4), ((1, 4, 2), 16, 32, 16)),
    ((8, 8, 1, 512, 4), ((1, 1, 8), 4, 128, 4)),
    ((8, 2, 2, 64, 2), ((2, 2, 2), 8, 8, 8)),
    ((8, 1, 1, -1, 4), ((1, 8, 1), 32, 1, 32)),
    ((8, 1, 1, 4, -1), ((1, 8, 1), 8, 1, 8)),
    ((8, 1, 1, 4, 4), ((1, 8, 1), 8, 1, 8)),
]
INDIVISIBLE = [
    ((8, 1, 1, 100, -1), "train_batch_size: 100.*96, 104"),
    ((8, 1, 1, 12, -1), "train_batch_size: 12.*8 devices.*Nearest valid sizes: 8, 16"),
    ((8, 1, 1, 512, 5), "per_device_parallelism: 5.*Allowed: 1, 2, 4, 8"),
    ((6, 4, 1, 512, -1), "model_axis_size.*6 devices. Allowed products: 1, 2, 3, 6"),
]


def divided(devices: int, model: int, replica: int, batch: int, per_device: int, key: str = "per_device_parallelism"):
    shape = mesh_shape(devices, replica=replica, model=model)
    trainer = decode(TrainerConfig, ConfigSource({"train_batch_size": batch, key: per_device}))
    batches = plan_batches(trainer, shape.replica * shape.data)
    sizes = (shape.replica, shape.data, shape.model)
    return sizes, batches.train.first.microbatch, batches.train.first.num_microbatches, batches.eval


@pytest.mark.parametrize(("given", "expected"), DIVISIONS)
@pytest.mark.trap("D5")
def test_how_the_batch_divides_over_devices(given, expected):
    assert divided(*given) == expected
    assert divided(*given, key="per_device_train_parallelism") == expected


@pytest.mark.parametrize(("given", "named"), INDIVISIBLE)
def test_batches_that_do_not_divide_are_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        divided(*given)


@pytest.mark.trap("D4")
def test_per_device_train_parallelism_is_an_alias():
    """The guide's table says per_device_train_parallelism, its example per_device_parallelism."""
    both = TrainerConfig(per_device_parallelism=2, per_device_train_parallelism=2)
    assert both.parallelism == 2
    with pytest.raises(ConfigError, match=r"per_device_parallelism: 2 .*per_device_train_parallelism: 4"):
        _ = replace(both, per_device_train_parallelism=4).parallelism


BATCH = {"batch": ("replica", "data")}


def test_mappings_of_the_axis_keys():
    assert mappings() == (BATCH, {**BATCH, "embed": "data"})
    tensor = {"mlp": "model", "heads": "model", "kv_heads": "model"}
    assert mappings(tensor_parallel_axes=["mlp", "heads"]) == (BATCH | tensor, BATCH | tensor | {"embed": "data"})
    assert mappings(fsdp_axis=None) == (BATCH, BATCH)
    both = {"tensor_parallel_axes": ["mlp"], "fsdp_axis": "mlp", "model_axis_size": 2}
    assert mappings(**both) == (BATCH | {"mlp": "model"}, BATCH | {"mlp": "data"})
    resources = {"batch": "data", "vocab": "model", "mlp": "model", "heads": "model"}
    advanced = {"axis_resources": resources, "parameter_axis_resources": {"embed": "data"}, "model_axis_size": 2}
    compute = resources | BATCH
    assert mappings(**advanced) == (compute, compute | {"embed": "data"})


@pytest.mark.trap("D6")
def test_compute_axis_resources_extend_the_compute_mapping():
    """The guide documents compute_axis_resources; Levanter has no such key."""
    compute, parameter = mappings(compute_axis_resources={"mlp": "model"}, model_axis_size=2)
    assert compute == BATCH | {"mlp": "model"}
    assert parameter == BATCH | {"embed": "data"}


@pytest.mark.slow
@pytest.mark.trap("T6", "D7")
def test_a_list_of_fsdp_axes_shards_by_each_axis():
    """Levanter turns the list into a string, which silently disables FSDP."""

    def spread(fsdp: Any) -> dict[str, Any]:
        layout = plan_of(fsdp_axis=fsdp).layout
        axes = helpers.MODEL.build(helpers.vocab_axis(64), key=jax.random.PRNGKey(0))
        leaves = [leaf for _, leaf in tree.leaves(axes)]
        return {str(leaf.axes): layout.parameter_sharding(leaf.axes).spec for leaf in leaves}

    whole, one, two = (str(spread(fsdp)).count("'data'") for fsdp in (None, "embed", ["embed", "mlp"]))
    assert whole == 0
    assert 0 < one == two  # every array with mlp also has embed, which takes the mesh axis first
    only_mlp = spread(["mlp"])
    assert [("mlp" in axes) == ("data" in spec) for axes, spec in only_mlp.items()] == [True] * len(only_mlp)
    _, parameter = mappings(axis_resources={"mlp": ["model"]}, parameter_axis_resources={"vocab": ["replica", "data"]})
    assert parameter["mlp"] == ("model",)
    assert parameter["vocab"] == ("replica", "data")


REFUSED = {
    "nothing on the model axis": ({"model_axis_size": 2}, "'model' has 2 devices and no logical axis.*tensor_parallel"),
    "nothing on an axis of one's own": ({"mesh": {"axes": {"data": -1, "x": 2}}}, "'x' has 2 devices"),
    "mapped to nothing": ({"axis_resources": {"mlp": []}}, "'mlp' is mapped to nothing"),
    "does not divide": ({"axis_resources": {"heads": "data"}, "fsdp_axis": None}, "'heads' has size 4.*8 devices"),
    "twice in one array": (
        {"tensor_parallel_axes": ["mlp", "embed"], "model_axis_size": 2},
        "'mlp' and 'embed' are both mapped to 'model'.*mlp.*weight has both",
    ),
    "the batch and what is computed": (
        {"axis_resources": {"embed": "data"}},
        "'batch' and 'embed' are both mapped to 'data' for computation, and what is computed with .*weight has both",
    ),
    "the batch and the inside of the MLP": (
        {"compute_axis_resources": {"mlp": "data"}},
        "'batch' and 'mlp' are both mapped to 'data' .*mlp.*weight has both",
    ),
    "the batch and the sequence": (
        {"axis_resources": {"position": "data"}},
        "'batch' and 'position' are both mapped to 'data' .*every batch has both",
    ),
    "the sequence and what is computed": (
        {"compute_axis_resources": {"position": "model"}, "tensor_parallel_axes": "mlp", "model_axis_size": 2},
        "'position' and 'mlp' are both mapped to 'model' .*mlp.*weight has both",
    ),
    "two sizes": (
        {"mesh": {"axes": {"model": -1}}, "model_axis_size": 2},
        "model_axis_size: 2 given together with mesh, which",
    ),
    "two mappings": (
        {"mesh": {"shared_mapping": {"mlp": "data"}}, "axis_resources": {"mlp": "model"}},
        "axis_resources.mlp: model given.*shared_mapping.mlp: data",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_waste_and_contradiction_are_errors(case):
    trainer, named = REFUSED[case]
    with pytest.raises(ConfigError, match=named):
        plan_of(**trainer)


def test_waste_and_overridden_keys_are_warnings():
    assert "'data': its 8 devices" in plan_of(batch_axis=None).warnings[0]
    (warning,) = plan_of(axis_resources={"batch": "data"}, replica_ici_axis_size=2).warnings
    assert warning.startswith("trainer.axis_resources.batch: data is overridden by batch_axis")
    assert plan_of(axis_resources={"batch": "data"}).warnings == ()
    (warning,) = plan_of(train_batch_size=6).warnings
    assert warning.startswith("trainer.train_batch_size: 6 sequences are fewer than the 8 devices that share the batch")


@pytest.mark.slow
def test_a_custom_mesh_with_sharded_sequences_computes_the_same():
    free = {"axes": {"data": -1, "context": 2, "model": 2}, "compute_mapping": {"position": "context"}}
    layout = plan_of(mesh=free, tensor_parallel_axes=["mlp", "heads"]).layout
    assert dict(layout.mesh.shape) == {"replica": 1, "data": 2, "context": 2, "model": 2}
    columns = helpers.arrays(0)
    found = []
    for where in (helpers.one_device(), layout):
        run = helpers.TinyRun(where)
        found.append([run.step(columns)["train/loss"] for _ in range(3)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_plan_mesh_names_unknown_axes():
    with pytest.raises(ConfigError, match=r"'data' is mapped|logical axis 'embed'"):
        plan_mesh(TrainerConfig(), {"mlp": 8}, {}, jax.devices(), lambda: pytest.fail("no rows are shared"))
