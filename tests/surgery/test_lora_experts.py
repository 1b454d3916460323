"""Adapters of experts, against the same experts with the changes added to their weights."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.models.base import vocab_axis
from jaxlm.models.moe import num_active
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.lora_layers import AdapterSize, LoraExperts
from tests.engine.helpers import one_device
from tests.models.test_moe import LAYOUTS
from tests.models.test_stored_experts import AXES, CONFIG, KEY, PROJECTIONS, stored
from tests.tiers import one_of


def output_and_gradients(where, experts, adapters, x, *, merge: bool):
    """The output, and gradients with respect to the inputs, A and B."""

    def loss(x, adapters, experts):
        layers = {name: dataclasses.replace(layer, base=getattr(experts, name)) for name, layer in adapters.items()}
        if merge:
            layers = {name: layer.merged() for name, layer in layers.items()}
        out, _ = dataclasses.replace(experts, **layers)(x, hax.ones(AXES[:2], jnp.int32))
        return hax.sum(hax.sin(out)).scalar(), out.array

    with where.use():
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, adapters, experts)
    return [np.asarray(array) for array in (out, *jax.tree.leaves(gradients))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"),
    one_of(
        [
            ("experts over data 4, mlp over 2", None),
            ("mlp 2 x fsdp 4", None),
            ("experts 2 x fsdp 4", "int8"),
            ("experts over data 8", "nf4"),
        ]
    ),
)
def test_products_and_gradients_are_those_of_merged_experts(layout, kind):
    experts = jax.jit(lambda: CONFIG.block(key=KEY).mlp)() if kind is None else stored(kind)
    rng = np.random.default_rng(0)
    adapters = {}
    for name in PROJECTIONS:
        layer = LoraExperts.sized(getattr(experts, name), [AdapterSize(3, 0.7)], key=KEY)
        busy = lambda leaf: hax.named(jnp.asarray(rng.normal(0, 0.1, leaf.array.shape), jnp.float32), leaf.axes)  # noqa: E731
        adapters[name] = dataclasses.replace(layer, base=None, a=busy(layer.a), b=busy(layer.b))
    x = hax.random.normal(jax.random.key(1), AXES)
    found = output_and_gradients(LAYOUTS[layout](), experts, adapters, x, merge=False)
    expected = output_and_gradients(one_device(), experts, adapters, x, merge=True)
    assert len(found) == 2 + 6
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def test_parameters_of_adapters_that_are_active():
    """Rank 3 in layer 1 alone. Two of eight experts are active."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    plain = jax.eval_shape(lambda: config.build(vocab_axis(16), key=KEY))
    lora = LoraConfig(target=None, experts="down_proj", rank=3, layers_to_transform=[1])
    adapted = jax.eval_shape(lambda: lora.apply(config.build(vocab_axis(16), key=KEY), key=KEY))
    assert tree.num_parameters(adapted) - tree.num_parameters(plain) == 8 * 3 * (96 + 64)
    assert num_active(adapted) - num_active(plain) == 2 * 3 * (96 + 64)
