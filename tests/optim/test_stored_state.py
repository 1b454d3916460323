"""Optimizer states in 8 bits, against bitsandbytes (`bitsandbytes_vectors.py`), numpy, and arrays that are not sharded."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.pace import Pace
from jaxlm.core.products.dynamic_map import dynamic_map, nearest_codes
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.state import shardings
from jaxlm.models.base import vocab_axis
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.elementwise import AdagradConfig, AdamConfig, LionConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.optim.stored_state import EightBit, QuantizedMoment
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.engine.helpers import F32, MESHES, MODEL, VOCAB, TinyRun, arrays, layout, one_device, phase

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "bitsandbytes.json").read_text())
SIGNED = {"signed": True, "unsigned": False}
LAYERS, OUT, IN = hax.make_axes(layers=3, mlp=24, embed=40)
EIGHT_BIT = EightBit(min_size=256)


def vector(name: str, key: str, dtype: Any = np.float32) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(VECTORS[name][key]), dtype)


def moments(name: str) -> np.ndarray:
    """As in `bitsandbytes_vectors.py`, which imports torch."""
    rng = np.random.default_rng(0)
    values = (rng.normal(size=1400) * 10 ** rng.uniform(-8, 0, 1400)).astype(np.float32)
    values[512:768] = 0
    return values if SIGNED[name] else values**2


def quantized(array: Any, is_signed: bool = True) -> Any:
    return jax.jit(lambda x: QuantizedMoment.of(x, is_signed))(array)


@pytest.mark.parametrize("name", SIGNED)
def test_maps_codes_and_largest_values_are_those_of_bitsandbytes(name):
    stored = quantized(moments(name), SIGNED[name])
    np.testing.assert_array_equal(dynamic_map(SIGNED[name]), vector(name, "map"))
    np.testing.assert_array_equal(stored.absmax, vector(name, "absmax"))
    is_zero = np.arange(1400) // 256 == 2  # bitsandbytes has the code of -0.993 there, times 0
    np.testing.assert_array_equal(np.asarray(stored.codes)[~is_zero], vector(name, "codes", np.uint8)[~is_zero])
    np.testing.assert_array_equal(jax.jit(QuantizedMoment.floats)(stored), vector(name, "decoded"))


@pytest.mark.parametrize("name", SIGNED)
def test_codes_of_the_cpu_kernel_are_those_of_numbers_rounded_to_its_table(name):
    scale = np.repeat(vector(name, "absmax"), 256)[:1400]
    used = scale > 0
    scaled = moments(name)[used] * (np.float32(1) / scale[used])
    place = ((scaled + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)).astype(np.uint16)
    rounded = np.float32(-1) + (np.float32(2) * place.astype(np.float32)) / np.float32(65535)
    codes = jax.jit(partial(nearest_codes, is_signed=SIGNED[name]))(rounded)
    np.testing.assert_array_equal(codes, vector(name, "cpu_codes", np.uint8)[used])


@pytest.mark.parametrize("name", SIGNED)
def test_every_code_begins_above_the_middle_between_it_and_the_one_below(name):
    numbers = vector(name, "map")
    middles = (numbers[1:] + numbers[:-1]) / np.float32(2)
    around = np.concatenate([middles, np.nextafter(middles, np.float32(2)), np.nextafter(middles, np.float32(-2))])
    codes = jax.jit(partial(nearest_codes, is_signed=SIGNED[name]))(np.concatenate([around, numbers]))
    np.testing.assert_array_equal(codes[: len(around)], np.searchsorted(middles, around, side="left"))
    np.testing.assert_array_equal(codes[len(around) :], np.arange(256))


def test_adamw_is_torch_whose_moments_pass_through_bitsandbytes():
    rng = np.random.default_rng(VECTORS["adamw"]["seed"])
    sizes = {"even": (16, 32), "odd": (10, 30)}
    scales: Any = {name: 10 ** rng.uniform(-2, 0, shape) for name, shape in sizes.items()}
    draw = lambda scale: {k: (s * rng.normal(size=sizes[k])).astype(np.float32) for k, s in scale.items()}  # noqa: E731
    named = lambda arrays: {k: hax.named(a, (f"{k}_out", f"{k}_in")) for k, a in arrays.items()}  # noqa: E731
    params = named(draw(dict.fromkeys(sizes, 1.0)))
    rate = {"learning_rate": 1e-2, "warmup": 0, "lr_schedule": "constant", "weight_decay": 0.1}
    step, state = stepper(AdamConfig(**rate, max_grad_norm=None, state=EIGHT_BIT), params)
    for _ in range(20):
        params, state = step(params, state, named(draw(scales)))
    for name, leaf in params.items():
        expected = np.frombuffer(bytes.fromhex(VECTORS["adamw"]["after"][name]), np.float32).reshape(sizes[name])
        np.testing.assert_allclose(leaf.array, expected, rtol=1e-6, atol=1e-6)


def stepper(config: OptimizerConfig, params: Any) -> tuple[Any, Any]:
    """(params, state, gradient) -> (params, state); and the first state."""
    optimizer = build_optimizer(config, parameter_groups(params, config), 20)

    @jax.jit
    def step(params, state, gradient, **extra):
        updates, state = optimizer.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step, optimizer.init(params)


def random(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(3, 24, 40)) * 10 ** rng.uniform(-3, 0, (3, 24, 40))).astype(np.float32)


def test_blocks_are_within_layers():
    stored = quantized(hax.named(random(), (LAYERS, OUT, IN)))
    assert stored.codes.axes == (LAYERS, OUT, IN)
    assert stored.absmax.axes == (LAYERS, hax.Axis("mlp", 4))  # 960 elements
    for layer in range(3):
        alone = quantized(random()[layer].reshape(-1))
        np.testing.assert_array_equal(stored.codes.array[layer].reshape(-1), alone.codes)
        np.testing.assert_array_equal(stored.absmax.array[layer], alone.absmax)


@pytest.mark.parametrize("value", [0.0, 0.1, -2.0, 1e-40])
def test_a_constant_is_quantized_as_such(value):
    moment = hax.named(np.full((3, 24, 40), value, np.float32), (LAYERS, OUT, IN))
    constant = QuantizedMoment.constant(moment, value, is_signed=True)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, constant, quantized(moment))))


@pytest.mark.parametrize("config", [AdamConfig(), AdagradConfig(initial_accumulator_value=0.3), LionConfig()])
def test_a_new_state_is_not_computed(config):
    """XLA would fold it: seconds for a small model."""
    params: Any = {"w": {"weight": hax.named(random(), (LAYERS, OUT, IN))}}
    whole = dataclasses.replace(config, state=EIGHT_BIT)
    make = build_optimizer(whole, parameter_groups(params, whole), 20).init
    assert "reduce_max" in str(jax.make_jaxpr(lambda: QuantizedMoment.of(params["w"]["weight"], True))())
    assert "reduce_max" not in str(jax.make_jaxpr(make)(params))
    expected = dict(tree.leaves(build_optimizer(config, parameter_groups(params, config), 20).init(params)))
    for path, moment in tree.modules_by_path(make(params), QuantizedMoment):
        np.testing.assert_allclose(tree.raw(moment.floats()), expected[path].array, rtol=1e-6)


def test_blocks_keep_the_axes_that_they_need_not_cross():
    whole = hax.named(np.ones((2, 4, 8, 64, 512), np.float32), ("layers", "experts", "heads", "head_size", "embed"))
    axes = lambda leaf: tuple((axis.name, axis.size) for axis in quantized(leaf).absmax.axes)  # noqa: E731
    assert axes(whole) == (("layers", 2), ("experts", 4), ("heads", 8), ("head_size", 64), ("embed", 2))
    assert axes(whole["embed", :100]) == (
        ("layers", 2),
        ("experts", 4),
        ("heads", 8),
        ("head_size", 25),
    )
    assert axes(whole["embed", 0]) == (("layers", 2), ("experts", 4), ("heads", 2))
    assert quantized(np.ones((3, 300), np.float32)).absmax.shape == (3, 2), "the first axis may be that of layers"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp 8", "tp 2 x fsdp 4"])
def test_sharded_moments_have_the_same_bits(name):
    where, rng = layout(**MESHES[name]), np.random.default_rng(0)
    cases = {
        "blocks on several devices": ("layers", "heads", "head_size", "embed"),
        "rows that no block fits": ("layers", "embed", "mlp"),
        "blocks on one device": ("layers", "embed", "heads", "head_size"),
    }
    sizes = {"layers": 2, "heads": 4, "head_size": 8, "embed": 64, "mlp": 40}
    for case, names in cases.items():
        axes = tuple(hax.Axis(axis, 64 if axis == names[-1] == "head_size" else sizes[axis]) for axis in names)
        array = (rng.normal(size=[axis.size for axis in axes]) ** 3).astype(np.float32)
        expected = quantized(hax.named(array, axes))
        with where.use():
            moment = hax.named(jax.device_put(array, where.parameter_sharding(axes)), axes)
            places = shardings(jax.eval_shape(lambda x: QuantizedMoment.of(x, True), moment), where)
            store = jax.jit(lambda x: QuantizedMoment.of(x, True), out_shardings=places)
            stored = store(moment)
            floats = jax.jit(QuantizedMoment.floats, out_shardings=moment.array.sharding)(stored)
        np.testing.assert_array_equal(stored.codes.array, expected.codes.array, err_msg=case)
        np.testing.assert_array_equal(stored.absmax.array, expected.absmax.array, err_msg=case)
        np.testing.assert_array_equal(floats.array, jax.jit(QuantizedMoment.floats)(expected).array, err_msg=case)
        assert stored.codes.array.sharding == moment.array.sharding, case


MOMENTS = {
    "adam": {"mu": True, "nu": False},
    "lion": {"mu": True},
    "adagrad": {"sum_of_squares": False},
    "mars": {"before": True, "mu": True, "nu": False},
    "sophia-h": {"mean": True, "diagonal": True},
    "adam-mini": {"mean": True},
    "muon": {"trace": True},
    "soap": {"mean": True, "variance": False},
    "kron": {"mean": True},
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_of_matrices_are_stored_in_8_bits_and_nothing_else_is(name):
    config = decode(OptimizerConfig, ConfigSource({"type": name, "state": "8bit"}))
    model = dataclasses.replace(MODEL, hidden_dim=64, intermediate_dim=128)
    builder = StateBuilder(model, vocab_axis(VOCAB), 0, F32, (one := phase(optimizer=config, model=model),))
    state = builder.abstract_state(one).opt_state
    stored = {path for path, _ in tree.modules_by_path(state, QuantizedMoment)}
    found = {
        field: moment.is_signed
        for path, moment in tree.modules_by_path(state, QuantizedMoment)
        for field in MOMENTS[name]
        if field in path.split(".") and path.endswith(("q_proj.weight", f"q_proj.weight.{field}"))
    }
    assert found == MOMENTS[name]
    assert not any(part in path for path in stored for part in ("tokens", "norm", "left", "right"))


def test_a_group_may_keep_its_state_in_full():
    groups = [AdamConfig(match="attn"), LionConfig(match="gate|up", state=EIGHT_BIT)]
    one = phase(optimizer=AdamConfig(groups=groups, state=EIGHT_BIT))
    state = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (one,)).abstract_state(one).opt_state
    stored = [path.split(".") for path, _ in tree.modules_by_path(state, QuantizedMoment)]
    assert sorted({(path[1], path[-2]) for path in stored}) == [
        ("group_1", "gate_proj"),
        ("group_1", "up_proj"),
        ("rest", "down_proj"),
        ("rest", "head"),
    ]


def test_a_layer_that_stands_still_keeps_its_codes_and_a_new_optimizer_starts_at_zero():
    named = lambda seed: {"w": {"weight": hax.named(random(seed), (LAYERS, OUT, IN))}}  # noqa: E731
    step, fresh = stepper(LionConfig(warmup=0, state=EIGHT_BIT), named(0))
    _, before = step(named(0), fresh, named(1))
    factors = {"w.weight": jnp.array([1.0, 0.0, 0.5])}
    _, after = step(named(0), before, named(2), pace=Pace(factors, jnp.int32(1)))
    _, anew = step(named(0), before, named(2), pace=Pace(dict.fromkeys(factors, jnp.ones(3)), jnp.int32(0)))
    _, alone = step(named(0), fresh, named(2))
    for (path, old), (_, new) in zip(tree.leaves(before), tree.leaves(after), strict=True):
        if path.endswith(("codes", "absmax")):
            assert [bool(np.array_equal(old.array[n], new.array[n])) for n in range(3)] == [False, True, False], path
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, anew, alone)))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"state": "int8"}, "optimizer.state.type: 'int8' given. Allowed: 8bit, full"),
        (
            {"state": {"type": "8bit", "min_size": 255}},
            "optimizer.state.min_size: 255 given, an integer of 256 or more",
        ),
        ({"state": {"type": "full", "min_size": 256}}, r"optimizer.state.min_size: no such key .*type full"),
        (
            {"state": "8bit"},
            "no moment is stored in 8 bits: the largest trainable parameter has 2,048 elements in each",
        ),
    ],
)
def test_states_that_cannot_be_are_refused(optimizer, message):
    model = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 4}
    tree_ = {"model": model, "optimizer": optimizer, "trainer": {"train_batch_size": 8}}
    with pytest.raises(ConfigError, match=message):
        abstract_state_of(ConfigSource(tree_))


def abstract_state_of(source: ConfigSource) -> Any:
    plan = make_plan(decode_run(source, None), "run", VOCAB)
    return plan.state_builder.abstract_state(plan.phases[0])


@pytest.mark.soak
def test_eight_devices_train_like_one():
    """Gradients differ by rounding, so that a moment near the middle of two codes may get the other one. What follows differs
    by as much as losses do, but in ever more codes (0, 37, 53, 211, ... of 40,960 after each step)."""
    runs = []
    for where in (one_device(), layout()):
        run = TinyRun(where, phase(optimizer=AdamConfig(learning_rate=1e-2, warmup=0, state=EIGHT_BIT)))
        losses = [run.step(arrays(100))["train/loss"]]
        moments = tree.modules_by_path(run.state.opt_state, QuantizedMoment)
        codes = {path: np.asarray(tree.raw(moment.codes)) for path, moment in moments}
        runs.append((losses + [run.step(arrays(seed))["train/loss"] for seed in range(101, 106)], codes))
    (alone, one), (sharded, eight) = runs
    np.testing.assert_allclose(sharded, alone, rtol=1e-5)
    assert len(one) == 16
    assert sum((one[path] != eight[path]).sum() for path in one) < 1e-3 * sum(codes.size for codes in one.values())
