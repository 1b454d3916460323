"""Mixtures of experts: grouped products, router losses, and experts sharded over devices."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.models.base import vocab_axis
from jaxlm.models.families.mixtral import MixtralConfig
from jaxlm.models.moe import Grouping, RouterStats, num_active
from jaxlm.optim.adam import AdamConfig
from tests.engine.helpers import AXES, TinyRun, arrays, one_device, phase

CONFIG = MixtralConfig(
    seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    num_experts=8,
    initializer_range=0.2,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.01,
)


@pytest.mark.parametrize("num_rows", [37, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 300))])
def test_grouped_products_equal_ragged_dot(num_rows):
    """Values and gradients, with empty groups and rows that are in no group."""
    rng = np.random.default_rng(num_rows)
    group = jnp.asarray(rng.choice([-1, 0, 2, 3, 5, 9], num_rows))
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((num_rows, 6), (6, 6, 5)))
    order = np.argsort(np.where((group >= 0) & (group < 6), group, 6), kind="stable")
    sizes = jnp.asarray([int(np.sum(group == g)) for g in range(6)])
    weight = jnp.asarray(rng.normal(size=(num_rows, 5)), jnp.float32)

    def ours(x, w):
        grouping = Grouping.of(group, 6)
        out = grouping.unsorted(grouping.dot(grouping.sorted(x), w))
        return jnp.sum(out * weight), out

    def ragged(x, w):
        inside = jnp.arange(num_rows)[:, None] < sizes.sum()
        out = jnp.where(inside, jax.lax.ragged_dot(x[order], w, sizes), 0)[np.argsort(order)]
        return jnp.sum(out * weight), out

    (found, expected) = (jax.value_and_grad(f, (0, 1), has_aux=True)(x, w) for f in (ours, ragged))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def mesh(model: int, tensor_parallel: tuple[str, ...], **both: str):
    axes = {**AXES, "experts": 8}
    return make_layout(mesh_shape(8, model=model), AxisMappings("batch", ("embed",), tensor_parallel, both, {}), axes)


LAYOUTS = {
    "experts 2 x fsdp 4": lambda: mesh(2, ("experts", "heads")),
    "fsdp 8": lambda: mesh(1, ()),
    "mlp 2 x fsdp 4": lambda: mesh(2, ("mlp", "heads")),
    "experts over data 8": lambda: mesh(1, (), experts="data"),
    "experts over data 4, mlp over 2": lambda: mesh(2, ("mlp", "heads"), experts="data"),
}


@pytest.fixture(scope="module")
def alone():
    return trained(one_device())


def trained(where):
    # Epsilon is above the gradients' rounding errors, which must not cause full-size steps.
    adam = AdamConfig(learning_rate=1e-2, warmup=0, epsilon=1e-4)
    run = TinyRun(where, phase(optimizer=adam), model=CONFIG)
    metrics = [run.step(arrays(step)) for step in range(3)]
    return metrics, [(path, np.asarray(leaf.array)) for path, leaf in tree.leaves(run.state.model)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_on_eight_devices_equals_training_on_one(alone, name):
    (metrics, parameters), (expected, wanted) = trained(LAYOUTS[name]()), alone
    for step, reference in zip(metrics, expected, strict=True):
        for key in ("train/objective", "train/loss", "train/router/balance_loss", "train/router/z_loss"):
            assert step[key] == pytest.approx(reference[key], rel=1e-5), key
        assert step["train/router/max_load"] == pytest.approx(reference["train/router/max_load"], rel=1e-6)
        added = 0.1 * step["train/router/balance_loss"] + 0.01 * step["train/router/z_loss"]
        assert step["train/objective"] == pytest.approx(step["train/loss"] + added, rel=1e-5)
    for (path, ours), (_, theirs) in zip(parameters, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=path)


def test_the_balance_loss_equals_transformers():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 24, 5)).astype(np.float32)
    real = rng.random((4, 6)) < 0.7
    chosen = np.stack([np.bincount(np.argsort(-l[real.ravel()])[:, :2].ravel(), minlength=5) for l in logits])
    softmax = np.asarray(jax.nn.softmax(logits))[:, real.ravel()]
    Layers, Expert = Axis("layers", 3), Axis("routes", 5)
    sums = RouterStats(
        hax.named(jnp.asarray(chosen, jnp.float32), (Layers, Expert)),
        hax.named(jnp.asarray(softmax.sum(axis=1)), (Layers, Expert)),
        hax.zeros(Layers),
        hax.full(Layers, float(real.sum())),
        balance_weight=0.5,
        z_weight=0.0,
        num_chosen=2,
    )
    found = sums.aux_losses()["router/balance_loss"]
    mask = torch.tensor(real).float()
    expected = theirs(tuple(torch.tensor(l) for l in logits), 5, 2, mask)
    assert float(found.sum.mean()) == pytest.approx(expected.item(), rel=1e-5)
    assert found.coefficient == 0.5


def test_flops_count_only_the_chosen_experts():
    """Mixtral 8x7B: 46.7e9 parameters, of which 12.9e9 are active per token (Jiang et al. 2024, section 1)."""
    config = MixtralConfig(seq_len=4096)
    model = jax.eval_shape(lambda: config.build(vocab_axis(32000), key=jax.random.key(0)))
    assert tree.num_parameters(model) / 1e9 == pytest.approx(46.7, abs=0.05)
    assert num_active(model) / 1e9 == pytest.approx(12.9, abs=0.05)
    embedding, norms = 32000 * 4096, 65 * 4096
    matrices = num_active(model) - embedding - norms
    assert config.flops_per_token(32000).palm == 6 * matrices + 12 * 32 * 4096 * 4096
    more = dataclasses.replace(config, num_experts=16).flops_per_token(32000).palm
    assert more - config.flops_per_token(32000).palm == 6 * 32 * 8 * 4096  # only the routers grow
