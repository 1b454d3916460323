"""Parameter groups: who updates what, against optimizers combined by hand; and which parameters are matrices."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import declared
from jaxlm.models.base import ModelConfig, vocab_axis
from jaxlm.models.flax.config import FlaxConfig
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import build_optimizer, group_names, group_schedules, parameter_groups
from jaxlm.optim.matrices import matrix_paths
from jaxlm.optim.muon import MuonConfig
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode, dump
from jaxlm.reading.yaml import ConfigSource, parse_value
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.lora_layers import AdapterSize, LoraLinear
from tests.engine.helpers import TinyRun, layout, one_device, phase
from tests.engine.helpers import arrays as tokens
from tests.models.test_flax import EXAMPLES
from tests.optim.test_family import (
    STEPS,
    adam_direction,
    arrays,
    config_of,
    curvature,
    flat,
    kron_layer,
    model,
    orthogonal,
    soap_layer,
    stepper,
    trained,
)
from tests.small_runs import MODELS, Tree

# Every kind of key: another type, another rate and schedule, other betas, another decay.
FOUR = [
    {"match": r"^head\.", "learning_rate": 3e-3, "beta2": 0.8, "lr_schedule": "constant", "weight_decay": 0.0},
    {"match": r"^q\.", "type": "muon", "learning_rate": 0.05, "weight_decay": 0.02, "momentum": 0.9},
    {"match": "norm|head", "type": "lion", "learning_rate": 1e-4, "lr_schedule": "linear", "min_lr_ratio": 0.0},
]


def linear(rate: float, low: float):
    return lambda step: rate * (1 - (1 - low) * step / STEPS)


def muon_by_hand(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum, and singular values from NumPy's float64 decomposition, one matrix per layer."""

    def directions(updates, state, params=None):
        layers = np.asarray(updates["q.weight"], np.float64).reshape(2, 6, 4)
        found = np.stack([orthogonal(layer, 5) for layer in layers]).reshape(2, 2, 3, 4) * np.sqrt(6 / 4)
        return {**updates, "q.weight": jnp.asarray(found, jnp.float32)}, state

    orthogonalize = optax.GradientTransformation(lambda params: optax.EmptyState(), directions)
    return optax.chain(optax.trace(momentum, nesterov=True), orthogonalize)


@pytest.mark.slow
def test_four_groups_match_multi_transform_written_by_hand():
    config = config_of("adam", lr_schedule="linear", groups=FOUR)
    by_hand = optax.chain(
        optax.clip_by_global_norm(1.0),  # of all parameters together
        optax.multi_transform(
            {
                "head": optax.chain(optax.scale_by_adam(0.9, 0.8), optax.scale_by_learning_rate(3e-3)),
                "q": optax.chain(
                    muon_by_hand(0.9),
                    optax.add_decayed_weights(0.02),
                    optax.scale_by_learning_rate(linear(0.05, 0.1)),
                ),
                "norm": optax.chain(optax.scale_by_lion(0.9, 0.95), optax.scale_by_learning_rate(linear(1e-4, 0.0))),
                "rest": optax.chain(
                    optax.scale_by_adam(0.9, 0.95),
                    optax.add_decayed_weights(0.1),
                    optax.scale_by_learning_rate(linear(1e-2, 0.1)),
                ),
            },
            {"head.weight": "head", "q.weight": "q", "norm.weight": "norm", "mix": "rest"},
        ),
    )
    mix = np.random.default_rng(9).normal(size=(3, 4))
    whole = lambda seed: model(arrays(seed, 2.0)) | {"mix": jnp.asarray(mix * (seed + 1), jnp.float32)}  # noqa: E731
    raw = lambda params: {path: jnp.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(params)}  # noqa: E731

    params = whole(0)
    ours = build_optimizer(config, parameter_groups(params, config), STEPS)
    update = jax.jit(lambda g, state, params: ours.update(g, state, params, curvature=curvature()))
    expected: Any = raw(params)
    state, expected_state = ours.init(params), by_hand.init(expected)
    for number in range(STEPS):
        updates, state = update(whole(number + 1), state, params)
        params = optax.apply_updates(params, updates)
        changes, expected_state = by_hand.update(raw(whole(number + 1)), expected_state, expected)
        expected = optax.apply_updates(expected, changes)
    for path, value in raw(params).items():
        np.testing.assert_allclose(value, expected[path], atol=3e-6, rtol=1e-5, err_msg=path)


def test_every_parameter_is_in_one_row_of_the_first_entry_that_matches():
    config = config_of("muon", groups=FOUR)
    params = model(arrays(0)) | {"mix": jnp.zeros((3, 4)), "extra": jnp.zeros(3)}
    groups = parameter_groups(params, config)
    assert {g.name: (g.paths, g.owner, g.weight_decay, g.as_matrices) for g in groups} == {
        "head: others, decay": (("head.weight",), 0, 0.0, False),
        "q: matrices, decay": (("q.weight",), 1, 0.02, True),
        "norm_head: no decay": (("norm.weight",), 2, 0.0, False),  # head is taken
        "rest: matrices, decay": (("mix",), None, 0.1, True),
        "rest: others, decay": (("extra",), None, 0.1, False),
    }
    assert sum(g.num_parameters for g in groups) == tree.num_parameters(params)


def test_names_are_words_and_unique_and_schedules_belong_to_them():
    entries = [{"match": r"^a\."}, {"match": "a", "learning_rate": 0.5}, {"match": ".*", "lr_schedule": "constant"}]
    config = config_of("adam", groups=entries)
    assert group_names(config) == ["a", "a_1", "group_2"]
    rates = {name: float(schedule(STEPS)) for name, schedule in group_schedules(config, STEPS).items()}
    assert rates == pytest.approx({"a": 1e-3, "a_1": 0.05, "group_2": 1e-2})


def test_entries_inherit_type_and_keys_and_their_dump_reads_back():
    outer = {
        "beta1": 0.7,
        "weight_decay": 0.3,
        "lr_schedule": {"type": "polynomial", "power": 2.0},
        "max_grad_norm": 0.5,
    }
    entries = [{"match": "a", "beta1": 0.6}, {"match": "b", "type": "muon", "weight_decay": 0.0}]
    config: Any = config_of("adam", **outer, groups=entries)
    same, muon = config.groups
    assert same == dataclasses.replace(config, beta1=0.6, groups=[], match="a")
    inherited = {key: getattr(config, key) for key in ("beta1", "lr_schedule", "learning_rate", "max_grad_norm")}
    assert muon == MuonConfig(**inherited, weight_decay=0.0, warmup=0, match="b")
    assert (config.nesterov, muon.nesterov) == (False, True)  # not set, so each type has its own default
    saved = parse_value(dump(config))
    assert saved["groups"][0] == {"type": "adam", "beta1": 0.6, "match": "a"}
    assert decode(OptimizerConfig, ConfigSource(saved)) == config


def test_phases_inherit_groups_and_entries_inherit_from_their_phase():
    run = decode_run(
        ConfigSource(
            {
                "optimizer": {"learning_rate": 0.1, "groups": [{"match": "x", "beta1": 0.5}]},
                "phases": [{"name": "a"}, {"name": "b", "optimizer": {"learning_rate": 0.2}}],
            }
        ),
        "run",
    )
    rates = [phase.optimizer and phase.optimizer.groups[0].learning_rate for phase in run.phases]
    assert rates == [None, 0.2]
    assert decode(RunConfig, ConfigSource(parse_value(dump(run)))) == run


WRONG: dict[str, tuple[Any, str]] = {
    "no match": ([{"beta1": 0.5}], r"groups\.0\.match: missing"),
    "nothing matches": (
        [{"match": "haed"}],
        r"groups\.0\.match: 'haed' matches no trainable parameter\. Closest names: head\.weight",
    ),
    "taken": (
        [{"match": "q|head"}, {"match": "q"}],
        r"groups\.1\.match: 'q' matches only .* before it .*: q\.weight \(groups\.0\)\. Put it before them",
    ),
    "bad expression": ([{"match": "("}], r"groups\.0\.match: '\(' is not a valid regular expression"),
    "unknown key": ([{"match": "q", "beta3": 1}], r"groups\.0\.beta3: no such key .*Did you mean 'beta2'\?"),
    "key of another type": ([{"match": "q", "momentum": 0.9}], r"groups\.0\.momentum: no such key in .*\(type adam\)"),
    "unknown type": ([{"match": "q", "type": "moun"}], r"groups\.0\.type: 'moun' given.*Did you mean 'muon'"),
    "not a list": ({"match": "q"}, r"groups: .* given, a list"),
    "nested": ([{"match": "q", "groups": [{"match": "q"}]}], r"groups\.0\.groups: given, but groups cannot"),
    "own clipping": (
        [{"match": "q", "max_grad_norm": 0.5}],
        r"groups\.0\.max_grad_norm: 0\.5 given, but gradients are clipped",
    ),
    "own guard": ([{"match": "q", "skip_bad_steps": True}], r"groups\.0\.skip_bad_steps: True given, but a step"),
    "nan": ([{"match": "q", "learning_rate": float("nan")}], r"groups\.0\.learning_rate: nan given, a finite"),
    "inf": ([{"match": "q", "type": "muon", "adam_lr": float("inf")}], r"groups\.0\.adam_lr: inf given, a finite"),
    "inf in a section": (
        [{"match": "q", "lr_schedule": {"type": "cosine", "exponent": float("inf")}}],
        r"groups\.0\.lr_schedule\.exponent: inf given",
    ),
    "negative": (
        [{"match": "q", "weight_decay": -0.1}],
        r"groups\.0\.weight_decay: -0\.1 given, a finite number of 0 or more",
    ),
    "schedule": ([{"match": "q", "min_lr_ratio": 3.0}], r"^optimizer\.groups\.0\.min_lr_ratio: 3\.0 given"),
    "decay of norms": (
        [{"match": "norm", "weight_decay": 0.7}],
        r"groups\.0\.weight_decay: 0\.7 given, but it applies to no",
    ),
    "own mask": ([{"match": "q", "weight_decay_modules": "mlp"}], r"groups\.0\.weight_decay_modules: 'mlp' matches no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_groups_are_refused(name):
    groups, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        stepper(config_of("adam", groups=groups))


def test_match_outside_a_list_of_groups_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.match: 'q' given, but only the entries of optimizer\.groups"):
        parameter_groups(model(arrays(0)), config_of("adam", match="q"))


def test_masks_that_an_entry_inherits_need_not_match_its_own_parameters():
    config = config_of("adam", weight_decay_modules=["q"], groups=[{"match": "head"}, {"match": "norm"}])
    decays = {path: g.weight_decay for g in parameter_groups(model(arrays(0)), config) for path in g.paths}
    assert decays == {"q.weight": 0.1, "head.weight": 0.0, "norm.weight": 0.0}


def test_an_entry_that_owns_everything_leaves_nothing_to_the_rest():
    whole, alone = config_of("lion", groups=[{"match": ""}]), config_of("lion")
    with pytest.raises(ConfigError, match=r"match: missing"):
        stepper(whole)
    ours = trained(config_of("lion", groups=[{"match": "."}]), 2.0)
    for path, value in trained(alone, 2.0).items():
        np.testing.assert_array_equal(ours[path], value)


@dataclasses.dataclass(frozen=True)
class Signs(OptimizerConfig):
    """An optimizer of another package, which does not clip."""

    def build(self, groups, num_steps):
        signs = optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates))
        return optax.with_extra_args_support(optax.chain(signs, optax.scale(-self.learning_rate)))


def test_an_optimizer_of_another_package_is_an_entry_or_has_entries():
    gradient = model(arrays(1))
    inside = AdamConfig(learning_rate=0.5, max_grad_norm=None, groups=[Signs(learning_rate=0.5, match="q")])
    update = first_update(model(arrays(0)), gradient, inside)
    np.testing.assert_array_equal(update["q.weight"], np.sign(arrays(1)["q.weight"]))
    around = Signs(learning_rate=0.5, groups=[AdamConfig(match="q")])
    with pytest.raises(ConfigError, match=r"groups\.0\.max_grad_norm: 1\.0 given, but .*set it to null here"):
        first_update(model(arrays(0)), gradient, around)
    around = dataclasses.replace(around, groups=[AdamConfig(match="q", max_grad_norm=None)])
    update = first_update(model(arrays(0)), gradient, around)
    np.testing.assert_array_equal(update["head.weight"], np.sign(arrays(1)["head.weight"]))


def test_sophia_in_a_group_sees_the_curvature_of_its_own_parameters():
    entry = {"match": r"^q\.", "type": "sophia-h", "update_interval": 1, "beta2": 0.5}
    params, state, step = stepper(config_of("adam", groups=[entry]))
    directions = curvature().direction(params | {"head": None, "norm": None}, 0)
    u, p, c = (np.asarray(part["q"].weight.array, np.float64) for part in (directions, params, model(arrays(99))))
    _, state = step(params, state, model(arrays(1)))
    diagonal = next(part.diagonal for part in state[1]["group_0"] if hasattr(part, "diagonal"))
    assert {path for path, _ in tree.leaves(diagonal)} == {"q.weight"}
    expected = 0.5 * u * (9 * p**2 * u + c * np.sum(c * u))  # u * (H u), H of q alone
    np.testing.assert_allclose(diagonal["q"].weight.array, expected, rtol=1e-4, atol=1e-5)


def newton_schulz_of_torch(matrix: np.ndarray, steps: int = 5) -> np.ndarray:
    """The iteration as published (kellerjordan.github.io/posts/muon), in torch float64."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(matrix, dtype=torch.float64)
    x = x / (x.norm() + 1e-8)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).numpy()


def first_update(params: Any, gradient: Any, config: OptimizerConfig) -> dict[str, np.ndarray]:
    """Path -> the update of the first step, divided by minus the learning rate."""
    groups = parameter_groups(params, config)
    optimizer = build_optimizer(config, groups, STEPS)
    updates = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p, curvature=curvature())[0])(
        gradient, params
    )
    return {path: -np.asarray(tree.raw(leaf)) / config.learning_rate for path, leaf in tree.leaves(updates)}


def random(axes: Any, seed: int) -> hax.NamedArray:
    return hax.named(np.random.default_rng(seed).normal(size=[axis.size for axis in axes]).astype(np.float32), axes)


MUON = MuonConfig(learning_rate=0.5, warmup=0, lr_schedule="constant", max_grad_norm=None, weight_decay=0.0)


def lora_leaves() -> tuple[Any, Any]:
    """The adapters of two stacked layers with three heads, alone, and a gradient."""
    Layers, Heads, Size, Embed = hax.make_axes(layers=2, heads=3, head_size=4, embed=6)
    base = Linear(random((Layers, Heads, Size, Embed), 0), None, Embed, (Heads, Size))
    layer = LoraLinear.sized(base, [AdapterSize(2, 1.0)], use_dora=False, dropout=0.0, key=jax.random.PRNGKey(1))
    adapters, _ = tree.partition({"q": layer}, tree.select({"q": layer}, [r"\.[ab]$"]))
    return adapters, tree.map_leaves(lambda path, leaf: random(leaf.axes, ord(path[-1])), adapters)


# {layers, outputs, inputs}
LORA_SHAPES = {"q.a": (2, 2, 6), "q.b": (2, 12, 2)}


def test_muon_orthogonalizes_lora_leaves_like_torch():
    adapters, gradient = lora_leaves()
    assert matrix_paths(adapters) == LORA_SHAPES.keys()
    update, raw = first_update(adapters, gradient, MUON), flat(gradient)
    for path, shape in LORA_SHAPES.items():
        scale = np.sqrt(max(1.0, shape[1] / shape[2]))
        for ours, matrix in zip(update[path].reshape(shape), raw[path].reshape(shape), strict=True):
            np.testing.assert_allclose(ours, scale * newton_schulz_of_torch(matrix), atol=2e-4, err_msg=path)


def test_kron_whitens_lora_leaves():
    adapters, gradient = lora_leaves()
    config: Any = config_of("kron", max_grad_norm=None, weight_decay=0.0, lr_schedule="constant", damping=0.1)
    update, raw = first_update(adapters, gradient, config), flat(gradient)
    for path, shape in LORA_SHAPES.items():
        for ours, matrix in zip(update[path].reshape(shape), raw[path].reshape(shape), strict=True):
            np.testing.assert_allclose(ours, kron_layer(matrix.astype(np.float64), {}, 1, config), rtol=1e-4, atol=1e-5)


def test_muon_treats_stacked_experts_one_by_one():
    Layers, Experts, Embed, Mlp = hax.make_axes(layers=2, experts=3, embed=4, mlp=6)
    experts = ExpertLinear(random((Layers, Experts, Embed, Mlp), 0), Embed, Mlp)
    gradient = ExpertLinear(random((Layers, Experts, Embed, Mlp), 1), Embed, Mlp)
    update = first_update({"up": experts}, {"up": gradient}, MUON)["up.weight"]
    for place in np.ndindex(2, 3):
        expected = np.sqrt(6 / 4) * orthogonal(np.asarray(gradient.weight.array[place], np.float64).T, 5).T
        np.testing.assert_allclose(update[place], expected, atol=2e-4)


@pytest.mark.slow
def test_soap_treats_stacked_experts_one_by_one():
    """An expert that is never chosen has no gradient: it does not move, and its bases stay finite."""
    axes = _, Experts, Embed, Mlp = hax.make_axes(layers=2, experts=3, embed=4, mlp=6)
    keys = {"precondition_frequency": 2, "max_grad_norm": None, "weight_decay": 0.0, "lr_schedule": "constant"}
    config: Any = config_of("soap", **keys)
    params = {"up": ExpertLinear(random(axes, 0), Embed, Mlp)}
    optimizer = build_optimizer(config, parameter_groups(params, config), STEPS)
    state, update, memories = (
        optimizer.init(params),
        jax.jit(optimizer.update),
        {place: {} for place in np.ndindex(2, 2)},
    )
    for t in range(1, STEPS + 1):
        chosen = random(axes, t) * hax.named(jnp.array([1.0, 1.0, 0.0]), Experts)
        updates, state = update({"up": ExpertLinear(chosen.rearrange(axes), Embed, Mlp)}, state, params)
        ours, gradient = flat(updates)["up.weight"], np.asarray(chosen.rearrange(axes).array, np.float64)
        for place, memory in memories.items():
            expected = -config.learning_rate * soap_layer(gradient[place].T, memory, t, config).T
            np.testing.assert_allclose(ours[place], expected, rtol=1e-4, atol=1e-6)
        assert not ours[:, 2].any()
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("kind", ["muon", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kron", "soap"))])
def test_arrays_without_names_are_matrices_by_their_number_of_axes(kind):
    named, plain = model(arrays(0)), {"w": jnp.ones((5, 3)), "v": jnp.ones(3), "tokens": jnp.ones((7, 3))}
    config: Any = config_of(kind, max_grad_norm=None, weight_decay=0.0, lr_schedule="constant")
    assert matrix_paths(named | plain) == {"q.weight", "w"}
    g = {path: jax.random.normal(jax.random.PRNGKey(i), leaf.shape) for i, (path, leaf) in enumerate(plain.items())}
    Rows, Columns = hax.make_axes(out=5, into=3)
    pair = [Linear(hax.named(w, (Rows, Columns)), None, Columns, Rows) for w in (plain["w"], g["w"])]
    expected = first_update({"w": pair[0]}, {"w": pair[1]}, config)["w.weight"]
    np.testing.assert_array_equal(first_update(plain, g, config)["w"], expected)


FLAX_KERNELS = {
    "nnx": {"blocks.0.qkv.kernel", "blocks.0.out.kernel", "blocks.0.up.kernel", "blocks.0.down.kernel"},
    "linen": {f"block_0.{name}.kernel" for name in ("query", "key", "value", "out", "up", "down")},
    "linen without names": {"block_0.up.kernel", "block_0.down.kernel"},
}


@pytest.mark.parametrize("kind", FLAX_KERNELS)
def test_muon_owns_the_kernels_of_flax(kind):
    config = EXAMPLES.get(kind) or FlaxConfig(
        factory="examples.linen_model:make", seq_len=16, kwargs={"width": 32, "depth": 1}
    )
    params = jax.eval_shape(lambda: config.build(vocab_axis(50), key=jax.random.PRNGKey(0)))
    assert matrix_paths(params) == {f"params.{path}" for path in FLAX_KERNELS[kind]}


@pytest.mark.slow
def test_the_first_side_of_a_flax_kernel_is_its_input():
    params = EXAMPLES["linen"].build(vocab_axis(50), key=jax.random.PRNGKey(0))
    gradient = tree.map_leaves(lambda path, leaf: random(leaf.axes, len(path)), params)
    update, raw = first_update(params, gradient, MUON), flat(gradient)
    for path, into in {"query": 32, "out": 32, "up": 32, "down": 128}.items():
        path = f"params.block_0.{path}.kernel"
        matrix = raw[path].reshape(into, -1).astype(np.float64)
        expected = np.sqrt(max(1.0, matrix.shape[1] / into)) * orthogonal(matrix, 5)
        np.testing.assert_allclose(update[path].reshape(into, -1), expected, atol=2e-4, err_msg=path)
    assert_is_adam = (
        adam_direction({"x": raw["params.head.kernel"]}, {}, 1, MUON)["x"] * MUON.adam_lr / MUON.learning_rate
    )
    np.testing.assert_allclose(update["params.head.kernel"], assert_is_adam, atol=1e-4)


@pytest.mark.parametrize("kind", [name for name in MODELS if name != "flax"])
def test_matrices_of_our_models_are_their_linear_layers(kind):
    """The rule for arrays whose layer declares nothing adds none, so runs from before keep their optimizer state."""
    check_matrices(MODELS[kind])


def check_matrices(model: Tree) -> None:
    config = decode(ModelConfig, ConfigSource(model))
    params = jax.eval_shape(lambda: config.build(vocab_axis(50), key=jax.random.PRNGKey(0)))
    layers = [(path, layer) for cls in (Linear, ExpertLinear) for path, layer in tree.modules_by_path(params, cls)]
    assert matrix_paths(params) == {f"{path}.weight" for path, layer in layers if not layer.weight.has_axis("vocab")}
    check_declared(params)


def check_declared(params: Any) -> None:
    """Nothing about a parameter of our own models follows from its name."""
    undeclared = [path for path, leaf in tree.leaves(params) if tree.is_inexact(leaf) and path not in declared(params)]
    assert not undeclared


GROUPS = [
    {"match": "^tokens", "learning_rate": 1e-2, "beta2": 0.99},
    {"match": "norm", "learning_rate": 1e-3, "lr_schedule": "constant", "warmup": 0},
    {"match": "attn|mlp", "type": "muon", "learning_rate": 3e-3, "weight_decay": 0.01},
]


@pytest.mark.slow
def test_a_run_of_four_groups_is_the_same_on_eight_devices():
    config = config_of("adam", groups=GROUPS)
    runs = [TinyRun(where, phase(optimizer=config)) for where in (one_device(), layout(model=2))]
    found = [[run.step(tokens(number % 4)) for number in range(12)] for run in runs]
    losses = [[metrics["train/loss"] for metrics in run] for run in found]
    assert losses[0][-1] < losses[0][0] - 0.5
    for sharded in losses[1:]:
        np.testing.assert_allclose(sharded, losses[0], rtol=1e-5)
    rates = {name: value for name, value in found[0][0].items() if name.startswith("optim/")}
    expected = {"": 1e-2, "/tokens": 1e-2, "/norm": 1e-3, "/attn_mlp": 3e-3}
    assert rates == pytest.approx({f"optim/learning_rate{name}": rate for name, rate in expected.items()})
    rows = parameter_groups(runs[0].state.model, config)
    assert {row.owner for row in rows} == {0, 1, 2, None}


@pytest.mark.soak
def test_sophia_as_a_group_trains_with_lora_and_muon_beside_it():
    adapters = (LoraConfig(target="attn", rank=2),)
    entries = [{"match": "mlp", "type": "sophia-h", "learning_rate": 3e-3, "update_interval": 3}]
    own = phase(optimizer=config_of("muon", groups=entries), surgeries=adapters, trainable=(r"\.[ab]$", "mlp"))
    runs = [TinyRun(where, own) for where in (one_device(), layout())]
    losses = [[run.step(tokens(0))["train/loss"] for _ in range(8)] for run in runs]
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_run_without_groups_keeps_its_state():
    config = AdamConfig(weight_decay=0.1)
    params = model(arrays(0))
    groups = parameter_groups(params, config)
    ours, own = (o.init(params) for o in (build_optimizer(config, groups, STEPS), config.build(groups, STEPS)))
    assert jax.tree.structure(ours) == jax.tree.structure(own)
    assert {g.name for g in groups} == {"decay", "no decay"}


def test_the_class_of_an_entry_need_not_have_the_keys_of_all_parameters_together():
    config = AdamConfig(max_grad_norm=0.5, groups=[Signs(learning_rate=0.5, match="q")])
    params = model(arrays(0))
    assert parameter_groups(params, config)
    with pytest.raises(ConfigError, match=r"groups\.0\.max_grad_norm: 1\.0 given, but gradients are clipped"):
        parameter_groups(params, AdamConfig(max_grad_norm=0.5, groups=[AdamConfig(match="q", max_grad_norm=1.0)]))
