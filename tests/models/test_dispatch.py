"""Ways in which devices exchange the tokens of experts, against each other, one device and a loop over tokens."""

import dataclasses
import functools
import itertools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.products.matmul import arranged
from jaxlm.core.tracing import tracing
from jaxlm.interop.hf.families.gpt_oss import GptOssConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.moe import Experts
from jaxlm.models.remat import remat
from tests.engine.helpers import AXES, one_device
from tests.tiers import one_of

SIZES: dict[str, Any] = {"hidden_dim": 16, "intermediate_dim": 24, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
NUM_EXPERTS = 8
TOKENS = (Axis("batch", 8), Axis("position", 16), Axis("embed", 16))
BACKENDS = ("gather", "padded", "ragged")
CASES = {
    "even": {},
    "one expert": {"push": (3,)},  # all tokens choose it first
    "none": {"push": (0, 1, 2, 4, 5, 6, 7)},  # expert 3 has none
    "k 1": {"k": 1},
    "k E": {"k": NUM_EXPERTS},
    "biases": {"k": 4, "kind": GptOssConfig},
}


def layout(num_devices: int):
    """`num_devices` devices share both the batch and the experts; the others shard the features of experts."""
    mappings = AxisMappings("batch", ("embed",), ("mlp", "heads"), {"experts": "data"}, {})
    return make_layout(mesh_shape(8, model=8 // num_devices), mappings, {**AXES, "experts": 8, "mlp": 24})


@functools.lru_cache
def experts_of(k: int = 2, push: tuple[int, ...] = (), kind: Any = MixtralConfig) -> Experts:
    config = kind(seq_len=16, num_experts=NUM_EXPERTS, num_experts_per_token=k, initializer_range=0.3, **SIZES)
    experts = with_biases(jax.jit(lambda: config.block(key=jax.random.key(0)).mlp)())
    # Of one normalized share, the gradient is a sum that cancels.
    experts = dataclasses.replace(experts, routing=dataclasses.replace(experts.routing, normalised=k > 1))
    if not push:
        return experts
    # The first feature of every token is large.
    weight = experts.router.weight
    assert isinstance(weight, hax.NamedArray)
    first = jnp.zeros(weight.array.shape).at[jnp.asarray(push), 0].set(5.0)
    assert [axis.name for axis in weight.axes] == ["routes", "embed"]
    router = dataclasses.replace(experts.router, weight=hax.named(weight.array + first, weight.axes))
    return dataclasses.replace(experts, router=router)


def with_biases(experts: Experts) -> Experts:
    """With random values in place of zeros."""
    names = [
        name for name in ("router", "gate_proj", "up_proj", "down_proj") if getattr(experts, name).bias is not None
    ]
    layers = {name: getattr(experts, name) for name in names}
    keys = jax.random.split(jax.random.key(3), 4)
    biases = {name: hax.random.normal(key, layers[name].bias.axes) for name, key in zip(names, keys, strict=False)}
    changed = {name: dataclasses.replace(layer, bias=biases[name]) for name, layer in layers.items()}
    return dataclasses.replace(experts, **changed)


def inputs() -> tuple[hax.NamedArray, hax.NamedArray]:
    x = hax.random.normal(jax.random.key(1), TOKENS)
    x = hax.named(x.array.at[..., 0].set(2.0), TOKENS)
    segment_ids = np.ones((8, 16), np.int32)
    segment_ids[:3, -5:] = 0
    return x, hax.named(jnp.asarray(segment_ids), TOKENS[:2])


def layers_of(experts: Experts):
    into, out_of = ("embed", "mlp"), ("mlp", "embed")
    return ((experts.gate_proj, into), (experts.up_proj, into), (experts.down_proj, out_of))


def computed(where, experts: Experts, policy: str = "none", **options):
    """The loss, the gradients of tokens and weights, and the router's statistics. Args: policy: of remat."""
    x, segment_ids = inputs()
    is_token = hax.named((segment_ids.array != 0).astype(jnp.float32), segment_ids.axes)

    def loss(x, experts):
        out, stats = remat(policy, experts, scan=False)(x, segment_ids)
        ids = experts.routing(experts.router(x), segment_ids).ids
        return hax.sum(hax.sin(out) ** 2 * is_token).scalar(), (stats, out * is_token, ids)

    with where.use(), tracing(**options):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, experts)


@functools.lru_cache
def alone(name: str):
    return computed(one_device(), experts_of(**CASES[name]))


def check_same(found, expected) -> None:
    ((loss, (stats, _, ids)), gradients), ((wanted, (reference, _, chosen)), derivatives) = found, expected
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    np.testing.assert_array_equal(ids.array, chosen.array)
    np.testing.assert_array_equal(stats.chosen.array, reference.chosen.array)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(derivatives), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "num_devices", "name"),
    one_of([(b, d, n) for n in CASES for d in (8, 2, 4) for b in ("in parts", *BACKENDS[::-1])], but=2),
)
def test_all_ways_compute_the_same_as_one_device(backend, num_devices, name):
    ways = {"expert_dispatch": backend} if backend in BACKENDS else {"expert_dispatch": "padded", "expert_parts": 4}
    experts = dataclasses.replace(experts_of(**CASES[name]), **ways)
    policy = "none" if backend in BACKENDS else "attention"
    check_same(computed(layout(num_devices), experts, policy), alone(name))


@pytest.mark.slow
def test_what_is_recomputed_has_the_choices_of_the_forward_pass():
    """If rounding changes the router's logits, and with them which rows are whose."""
    experts, calls, (x, segment_ids) = experts_of(k=1), itertools.count(), inputs()

    class Changing(type(experts.routing)):
        def __call__(self, logits, segment_ids):
            places = jax.pure_callback(lambda: np.int32(next(calls)), jax.ShapeDtypeStruct((), jnp.int32))
            return super().__call__(hax.named(jnp.roll(logits.array, places, axis=-1), logits.axes), segment_ids)

    changing = dataclasses.replace(experts, routing=Changing(1, True, 0.0, 0.0))  # all shares are 1

    def gradients(policy):
        def loss(x, experts):
            return hax.sum(hax.sin(remat(policy, experts, scan=False)(x, segment_ids)[0])).scalar()

        return jax.tree.leaves(jax.grad(loss, (0, 1))(x, changing))

    expected = gradients("none")
    assert next(calls) == 1
    calls = itertools.count()
    for ours, theirs in zip(gradients("attention"), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))
    assert next(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", one_of(["ragged", "padded"]))
def test_second_derivatives_are_those_of_one_device(backend):
    """Along a direction: the derivative of the gradient of the tokens."""
    x, segment_ids = inputs()
    direction = hax.random.normal(jax.random.key(2), TOKENS)

    def curvature(where, experts):
        loss = lambda x: hax.sum(hax.sin(experts(x, segment_ids)[0])).scalar()  # noqa: E731
        with where.use(), tracing(twice_differentiable=True):
            return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (direction,))[1])(x).array

    # Padding goes to experts on one device, and to none with an exchange.
    found = curvature(layout(4), dataclasses.replace(experts_of(), expert_dispatch=backend))
    expected = curvature(one_device(), dataclasses.replace(experts_of(), expert_dispatch=backend))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


def kept(name: str, backend: str, capacity: float, num_devices: int) -> np.ndarray:
    """Which choices a loop over the tokens keeps, bool [tokens, k]."""
    experts, (x, segment_ids) = experts_of(**CASES[name]), inputs()
    ids = np.asarray(experts.routing(experts.router(x), segment_ids).ids.array).reshape(128, -1)
    is_kept, is_token = np.zeros(ids.shape, bool), segment_ids.array.reshape(-1) != 0
    of_device, of_pair, copies = np.zeros(8, int), np.zeros((8, 8), int), np.zeros((8, 8), int)
    local, k = 128 // num_devices, ids.shape[1]
    most_copies = min(local, int(np.ceil(capacity * local * (1 - (1 - 1 / num_devices) ** k))))
    for token in np.flatnonzero(is_token):
        sender, devices = token // local, ids[token] // (NUM_EXPERTS // num_devices)
        for choice, device in enumerate(devices):
            if backend == "padded":
                is_kept[token, choice] = of_pair[sender, device] < np.ceil(capacity * local * k / num_devices)
                of_pair[sender, device] += 1
            else:
                is_kept[token, choice] = of_device[device] < np.ceil(capacity * 128 * k / num_devices)
                of_device[device] += 1
        if backend == "padded":
            for device in set(devices[is_kept[token]]):
                copies[sender, device] += 1
                is_kept[token] &= (devices != device) | (copies[sender, device] <= most_copies)
    return is_kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "num_devices", "name", "capacity"),
    one_of(
        [(b, d, n, c) for n, c in (("one expert", 1.0), ("even", 1.0)) for d in (4, 8) for b in BACKENDS[::-1]], but=2
    ),
)
def test_a_capacity_drops_what_a_loop_over_tokens_drops(backend, num_devices, name, capacity):
    """The outputs are the sums over the choices that are kept, with the shares of all, and the others are counted."""
    experts, (x, segment_ids) = experts_of(**CASES[name]), inputs()
    limited = dataclasses.replace(experts, expert_dispatch=backend, expert_capacity=capacity)
    (_, (stats, out, _)), _ = computed(layout(num_devices), limited)
    is_kept, is_token = kept(name, backend, capacity, num_devices), np.asarray(segment_ids.array).reshape(-1) != 0
    routes = experts.routing(experts.router(x), segment_ids)
    ids, shares = (np.asarray(a.array).reshape(128, -1) for a in (routes.ids, routes.shares))
    assert float(stats.dropped.array) == np.sum(~is_kept[is_token]) > 0
    weights = (arranged(p.weight, ("experts", *names)) for p, names in layers_of(experts))
    gate, up, down = (np.asarray(weight, np.float64) for weight in weights)
    expected, tokens = np.zeros((128, 16)), np.asarray(x.array, np.float64).reshape(128, 16)
    for token, choice in zip(*np.nonzero(is_kept), strict=True):
        expert, a = ids[token, choice], tokens[token]
        hidden = a @ gate[expert]
        expected[token] += shares[token, choice] * ((hidden / (1 + np.exp(-hidden)) * (a @ up[expert])) @ down[expert])
    np.testing.assert_allclose(
        np.asarray(out.array).reshape(128, 16), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )
