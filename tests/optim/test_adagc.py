"""AdaGC against the paper's algorithm in float64, tensor by tensor; its state when models grow, and on eight devices."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.engine.entry import _map_models
from jaxlm.models.base import vocab_axis
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.clipping import AdaGc, AdaGcState
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.stored_state import EightBit
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.drop_layers import DropLayersConfig
from tests.engine.helpers import MODEL, VOCAB, layout
from tests.optim.helpers import AXES, WITHIN, Arrays, Updates, as_model, flat, numbers

PLAIN: Any = {"learning_rate": 1e-2, "lr_schedule": "constant", "warmup": 0, "max_grad_norm": None}


def norms(gradient: Arrays) -> Arrays:
    return {
        path: np.sqrt((g.astype(np.float64) ** 2).sum(axis=WITHIN[path], keepdims=True)) for path, g in gradient.items()
    }


def by_hand(config: AdaGc, gradients: list[Arrays]) -> tuple[list[Arrays], Arrays]:
    """The clipped gradients of each step and the last running norms, in float64. No gradient is 0."""
    means: dict[str, Any] = {}
    variances: dict[str, Any] = {}
    given = []
    for t, gradient in enumerate(gradients):
        norm = norms(gradient)
        total = np.sqrt(sum((n**2).sum() for n in norm.values()))
        scale = {}
        for path, n in norm.items():
            mean, variance = means.get(path), variances.get(path)
            if t < config.warmup:
                h = min(config.lambda_abs / total, 1.0) if config.mode == "paper" else 1.0
            elif mean is None or variance is None:
                h = 1.0
            elif config.mode == "paper":
                h = np.minimum(config.lambda_rel * mean / n, 1)
            else:
                h = np.minimum((mean + config.threshold * np.sqrt(variance)) / n, 1)
            clipped = scale[path] = h * np.ones_like(n)
            clipped = clipped * n
            if mean is None:
                means[path], variances[path] = clipped, np.zeros_like(n)
            elif config.mode == "paper":
                later = config.beta * mean + (1 - config.beta) * clipped
                means[path] = np.minimum(mean, clipped) if t < config.warmup else later
            else:
                rate = max(1 / (t + 1), 1 - config.beta)
                means[path] = (1 - rate) * mean + rate * clipped
                variances[path] = (1 - rate) * variance + rate * (1 - rate) * (clipped - mean) ** 2
        given.append({path: scale[path] * g for path, g in gradient.items()})
    return given, means


def clipping(config: AdaGc) -> tuple[Any, AdaGcState]:
    """The compiled transformation of gradients, and its first state."""
    transformation = config.build()
    return jax.jit(transformation.update), transformation.init(as_model(numbers(0)))


@pytest.mark.parametrize(
    "config",
    [
        AdaGc(),
        AdaGc(mode="zscore", threshold=0.5, beta=0.9, warmup=20),
        pytest.param(AdaGc(lambda_rel=1.3, lambda_abs=0.5, beta=0.5, warmup=0), marks=pytest.mark.slow),
        pytest.param(AdaGc(mode="zscore", warmup=2), marks=pytest.mark.slow),
    ],
    ids=lambda config: f"{config.mode}, {config.warmup}",
)
def test_200_steps_match_the_algorithm_in_float64(config):
    sizes = np.random.default_rng(1).lognormal(sigma=1.0, size=200)
    gradients = [numbers(t, float(size)) for t, size in enumerate(sizes)]
    update, state = clipping(config)
    expected, last = by_hand(config, gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        found, state = update(as_model(gradient), state)
        for path, array in flat(found).items():
            np.testing.assert_allclose(array, wanted[path], rtol=2e-5, atol=1e-7, err_msg=path)
    for path, norm in flat(state.norm).items():
        np.testing.assert_allclose(norm, last[path].reshape(norm.shape), rtol=2e-5, err_msg=path)


def test_the_state_has_one_number_for_each_layer_and_each_expert():
    _, state = clipping(AdaGc())
    shapes = {path: array.shape for path, array in flat(state.norm).items()}
    assert shapes == {"q.weight": (3,), "up.weight": (3, 2), "norm.weight": (3,), "head.weight": (), "plain": ()}
    assert state.variance is None


def test_norms_of_1_1_1_10():
    """Warmup of one step with a norm of 1, then spikes: to 1.05, and the running norm to 1.001."""
    update, state = clipping(AdaGc(lambda_abs=100.0, warmup=1))
    size = norms(numbers(1))
    one = {path: (g / size[path]).astype(np.float32) for path, g in numbers(1).items()}
    _, state = update(as_model(one), state)
    for factor, given, running in ((1, 1, 1), (1, 1, 1), (10, 1.05, 1.001)):
        clipped, state = update(as_model({path: g * np.float32(factor) for path, g in one.items()}), state)
        for path, array in flat(clipped).items():
            np.testing.assert_allclose(norms({path: array})[path], given, rtol=1e-6)
            cosine = (array * one[path]).sum(axis=WITHIN[path]) / given
            np.testing.assert_allclose(cosine, 1, rtol=1e-6)
        assert all(np.allclose(norm, running, rtol=1e-6) for norm in flat(state.norm).values())


def test_the_warmup_clips_the_global_norm_and_remembers_the_smallest_norms():
    config = AdaGc(lambda_abs=0.5, warmup=3)
    update, state = clipping(config)
    smallest: dict[str, Any] = {}
    for t, size in enumerate((3.0, 0.1, 1.0)):
        clipped, state = update(as_model(numbers(t, size)), state)
        found = norms(flat(clipped))
        assert np.sqrt(sum((n**2).sum() for n in found.values())) <= 0.5 * (1 + 1e-6)
        smallest = {path: np.minimum(n, smallest.get(path, np.inf)) for path, n in found.items()}
    for path, norm in flat(state.norm).items():
        np.testing.assert_allclose(norm, smallest[path].reshape(norm.shape), rtol=1e-6)
    spike, _ = update(as_model(numbers(9, 1000.0)), state)
    for path, n in norms(flat(spike)).items():
        np.testing.assert_allclose(n, config.lambda_rel * smallest[path], rtol=1e-6)


def test_a_spike_in_one_layer_leaves_the_others_as_they_are():
    update, state = clipping(AdaGc(warmup=2, lambda_abs=100.0))
    for _ in range(2):
        _, state = update(as_model(numbers(1)), state)
    spiked = numbers(1)
    spiked["q.weight"][2] *= 1000
    clipped, after = update(as_model(spiked), state)
    usual, usual_after = update(as_model(numbers(1)), state)
    for path, array in flat(clipped).items():
        expected = flat(usual)[path]
        same = slice(2) if path == "q.weight" else slice(None)
        np.testing.assert_array_equal(array[same], expected[same])
    np.testing.assert_array_equal(flat(after.norm)["q.weight"][:2], flat(usual_after.norm)["q.weight"][:2])
    np.testing.assert_allclose(flat(clipped)["q.weight"][2], 1.05 * numbers(1)["q.weight"][2], rtol=1e-5)


def test_a_tensor_without_gradient_is_left_out():
    """The matrices `a` of adapters have no gradient in the first step. A limit of 0 would never let them move."""
    update, state = clipping(AdaGc(warmup=1, lambda_abs=100.0))
    without = numbers(1)
    without["up.weight"][0, 1] = 0
    _, state = update(as_model(without), state)
    np.testing.assert_array_equal(flat(state.count)["up.weight"], [[1, 0], [1, 1], [1, 1]])
    clipped, state = update(as_model(numbers(1)), state)
    np.testing.assert_allclose(flat(clipped)["up.weight"], numbers(1)["up.weight"], rtol=1e-6)
    before = flat(state.norm)["up.weight"]
    _, state = update(as_model(without), state)
    np.testing.assert_array_equal(flat(state.norm)["up.weight"][0, 1], before[0, 1])


CLIPPED = {**PLAIN, "max_grad_norm": 0.3}
CONFIGS: dict[str, OptimizerConfig] = {
    "adam": AdamConfig(**PLAIN),
    "clipped": AdamConfig(**CLIPPED),
    "8bit": AdamConfig(**PLAIN, state=EightBit(min_size=256)),
    "groups": AdamConfig(**CLIPPED, groups=[AdamConfig(**CLIPPED, match="head", beta1=0.5)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8bit", "groups", *(n for n in ("adam", "clipped"))])
def test_an_optimizer_sees_the_clipped_gradients(name):
    """Its updates are those of the same optimizer that is given gradients clipped by hand."""
    config = CONFIGS[name]
    adagc = AdaGc(warmup=2)
    gradients = [numbers(t, 100.0 if t == 5 else 1.0) for t in range(7)]
    entries = [replace(entry, adagc=adagc) for entry in config.groups]  # which inherit it
    with_adagc, without = Updates(replace(config, adagc=adagc, groups=entries)), Updates(config)
    for gradient, clipped in zip(gradients, by_hand(adagc, gradients)[0], strict=True):
        found = with_adagc.step(gradient)
        expected = without.step({path: array.astype(np.float32) for path, array in clipped.items()})
        for path, array in found.items():
            np.testing.assert_allclose(array, expected[path], atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_eight_devices_clip_as_one():
    config = AdamConfig(**PLAIN, adagc=AdaGc(warmup=2))
    one, eight = Updates(config), Updates(config, where=layout())
    assert len(eight.model["q"].weight.array.sharding.device_set) == 8
    for t in range(5):
        gradient = numbers(t, 100.0 if t == 3 else 1.0)
        expected, found = one.step(gradient), eight.step(gradient)
        assert all(np.abs(found[path] - expected[path]).max() <= 1e-6 for path in AXES)
    expected, found = one.state_of(AdaGcState).norm, eight.state_of(AdaGcState).norm
    for path, norm in flat(found).items():
        np.testing.assert_allclose(norm, flat(expected)[path], rtol=1e-6)


def test_norms_go_where_the_layers_of_a_model_go():
    """When a model loses layers between phases with `carry_optimizer`."""
    check_moved_norms([(DropLayersConfig(layers=[1]), {"body.": [1, 3]})])


def check_moved_norms(expected: list[tuple[Any, dict[str, list[float]]]]) -> None:
    """Moves the norms of a model of three layers. Args: expected: surgery -> paths of stacks -> numbers of their layers."""
    model = jax.eval_shape(
        lambda key: replace(MODEL, num_layers=3).build(vocab_axis(VOCAB), key=key), jax.random.key(0)
    )
    state = jax.eval_shape(AdaGc(mode="zscore").build().init, model)

    def numbered(leaf: Any) -> Any:
        layers = leaf.shape[:1] if leaf.shape else ()
        return jnp.arange(1, 1 + (layers[0] if layers else 1), dtype=leaf.dtype).reshape(leaf.shape)

    state = jax.tree.map(numbered, state)
    for surgery, stacks in expected:
        moved = _map_models(lambda node, by=surgery: by.moved(node, None), state)
        for part in (moved.count, moved.norm, moved.variance):
            leaves = [(path, leaf) for path, leaf in tree.leaves(part) if "q_proj" in path]
            assert leaves
            for path, leaf in leaves:
                wanted = next(numbers for prefix, numbers in stacks.items() if path.startswith(prefix))
                np.testing.assert_array_equal(leaf.array, wanted, err_msg=f"{surgery}: {path}")


def test_bfloat16_gradients_keep_their_dtype_and_norms_are_float32():
    update, state = clipping(AdaGc(warmup=0))
    _, state = update(as_model(numbers(1), jnp.bfloat16), state)
    clipped, state = update(as_model(numbers(1, 10.0), jnp.bfloat16), state)
    for (path, leaf), (_, norm) in zip(tree.leaves(clipped), tree.leaves(state.norm), strict=True):
        assert (leaf.dtype, norm.dtype) == (jnp.bfloat16, jnp.float32)
        expected = 1.05 * norms(flat(as_model(numbers(1), jnp.bfloat16)))[path]
        np.testing.assert_allclose(norms({path: np.asarray(tree.raw(leaf))})[path], expected, rtol=4e-3)


def config_of(**keys: Any) -> OptimizerConfig:
    return decode(RunConfig, ConfigSource({"optimizer": keys})).optimizer


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"adagc": {"threshold": 2.0}},
            r"optimizer\.adagc\.threshold: 2\.0 given without mode: zscore, but mode is paper",
        ),
        ({"adagc": {"mode": "zscore", "lambda_rel": 2.0}}, r"optimizer\.adagc\.lambda_rel: 2\.0 given"),
        ({"adagc": {"mode": "zscore", "warmup": 1}}, r"optimizer\.adagc\.warmup: 1 given, at least 2 expected"),
        ({"adagc": {"lambda_rel": 1.0}}, r"optimizer\.adagc\.lambda_rel: 1\.0 given, a finite number above 1"),
    ],
)
def test_keys_without_effect_are_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        config_of(**keys)


def test_an_entry_of_groups_has_no_clipping_of_its_own():
    entry = {"match": "head", "adagc": {"warmup": 5}}
    with pytest.raises(ConfigError, match=r"optimizer\.groups\.0\.adagc: .* all parameters together"):
        Updates(config_of(groups=[entry]))
