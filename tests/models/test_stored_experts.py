"""Experts whose weights are stored in few bits, against the floats that the weights stand for."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.experts import grouped_products
from jaxlm.models.moe import Experts
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.quantize import QuantizeConfig
from tests.engine.helpers import one_device
from tests.models.test_moe import LAYOUTS

SIZES = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
CONFIG = MixtralConfig(seq_len=16, num_experts=8, initializer_range=0.2, **SIZES)
AXES = (Axis("batch", 8), Axis("position", 16), Axis("embed", 64))
KEY = jax.random.key(0)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def x() -> hax.NamedArray:
    return hax.random.normal(jax.random.key(1), AXES)


@functools.lru_cache
def stored(kind: str) -> Experts:
    experts = jax.jit(lambda: CONFIG.block(key=KEY).mlp)()
    surgery = QuantizeConfig(kind=kind)
    layers = {name: getattr(experts, name) for name in PROJECTIONS}
    store = jax.jit(lambda layer: dataclasses.replace(layer, weight=surgery._stored(layer, layer.weight)))
    return dataclasses.replace(experts, **{name: store(layer) for name, layer in layers.items()})


def output_and_gradient(where, experts: Experts, x: hax.NamedArray):
    def loss(x, experts):
        out, _ = experts(x, hax.ones(AXES[:2], jnp.int32))
        return hax.sum(hax.sin(out)).scalar(), out.array

    with where.use():
        (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x, experts)
    return np.asarray(out), np.asarray(gradient.array)


def check_same(found, expected, rtol: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "platform"),
    [
        ("nf4", "cpu"),
        *(case for case in (("nf4", "tpu"), ("nvfp4", "cpu"), ("mxfp4", "cpu"), ("int8", "cpu"))),
    ],
)
def test_products_and_gradients_are_those_of_the_floats(kind, platform, x, monkeypatch):
    monkeypatch.setattr(grouped_products, "current_platform", lambda: platform)  # the path of TPUs computes on CPUs too
    few = stored(kind)
    floats = QuantizeConfig().merge(few)
    assert jax.tree.structure(floats) == jax.tree.structure(jax.eval_shape(lambda: CONFIG.block(key=KEY).mlp))
    check_same(output_and_gradient(one_device(), few, x), output_and_gradient(one_device(), floats, x), 1e-5)


@pytest.mark.slow
def test_experts_on_eight_devices_compute_the_same(x):
    few = stored("nf4")
    check_same(
        output_and_gradient(LAYOUTS["experts over data 8"](), few, x), output_and_gradient(one_device(), few, x), 1e-5
    )


@pytest.mark.slow
def test_features_of_experts_in_four_bits_cannot_be_sharded(x):
    message = r"mlp in trainer\.tensor_parallel_axes\), but blocks of scales cannot be cut"
    with pytest.raises(ConfigError, match=message):
        output_and_gradient(LAYOUTS["mlp 2 x fsdp 4"](), stored("nf4"), x)

    def plan(kind: str, *sharded: str):
        upper = {"name": "p", "surgery": [{"type": "quantize", "kind": kind}], "trainable": ["^head"]}
        trainer = {"train_batch_size": 8, "num_train_steps": 1, "model_axis_size": 2, "fsdp_axis": None}
        trainer["tensor_parallel_axes"] = [*sharded]
        model = {"type": "mixtral", "seq_len": 16, "num_experts": 8, **SIZES}
        make_plan(decode_run(ConfigSource({"model": model, "phases": [upper], "trainer": trainer}), None), "x", 64)

    with pytest.raises(ConfigError, match=message):
        plan("nf4", "mlp")
    plan("nf4", "experts")
    plan("int8", "mlp")


@pytest.mark.slow
def test_a_loop_over_layers_does_not_save_their_floats():
    """Forward and backward: what a further layer adds to the memory is a small part of the floats of its experts."""
    arrays, structure = jax.tree.flatten(stored("nf4"))

    def loss(x, stacked):
        def layer(x, arrays):
            out, _ = jax.tree.unflatten(structure, arrays)(x, hax.ones(x.axes[:2], jnp.int32))
            return x + out, None

        return hax.sum(jax.lax.scan(layer, x, stacked)[0]).scalar()

    def memory(num_layers: int) -> int:
        stacked = [jax.ShapeDtypeStruct((num_layers, *array.shape), array.dtype) for array in arrays]
        x = hax.zeros((AXES[0].resize(1), *AXES[1:]))
        return jax.jit(jax.grad(loss)).lower(x, stacked).compile().memory_analysis().temp_size_in_bytes

    floats = 4 * 3 * stored("nf4").up_proj.weight.size
    assert (memory(8) - memory(4)) / 4 < 0.2 * floats
