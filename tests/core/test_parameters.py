"""What modules say of their parameters: who decides, what is judged without them, and what stays float32."""

from contextlib import nullcontext
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import (
    FLOAT32_VECTOR,
    VECTOR,
    DeclaresParameters,
    Parameter,
    described,
    float32_paths,
    matrix,
)
from jaxlm.core.precision import PrecisionConfig, PrecisionRuleConfig, parse_precision
from jaxlm.models.linear import Linear
from jaxlm.models.norms import RMSNorm
from jaxlm.optim.averaging import Ema
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import parameter_groups
from jaxlm.surgery.quantize import QuantizeConfig
from tests.engine.helpers import TinyRun, arrays, one_device, phase

Embed, Heads, Window = Axis("embed", 6), Axis("value_heads", 4), Axis("window", 4)


class Mixer(DeclaresParameters):
    """Has a parameter of every kind, and an array of which it says nothing."""

    proj: Linear
    A_log: NamedArray
    conv: NamedArray
    loose: NamedArray

    @staticmethod
    def init() -> "Mixer":
        weight = hax.ones((Heads, Embed))
        proj = Linear(weight, hax.ones(Heads), Embed, Heads)
        return Mixer(proj, hax.full(Heads, 1.001), hax.ones((Heads, Window)), hax.ones((Heads, Window)))

    def parameters(self) -> dict[str, Parameter]:
        # The innermost module decides about `proj.weight`.
        return {"A_log": FLOAT32_VECTOR, "conv": VECTOR, "proj.weight": VECTOR}


class Model(eqx.Module):
    layers: list[Mixer]
    norm: RMSNorm


def model() -> Model:
    return Model([Mixer.init(), Mixer.init()], RMSNorm.init(Embed, 1e-6))


def test_the_innermost_module_decides_and_names_and_axes_decide_for_the_rest():
    of_layer = {
        "proj.weight": matrix([Heads], [Embed]),
        "proj.bias": VECTOR,
        "A_log": FLOAT32_VECTOR,
        "conv": VECTOR,
        "loose": matrix([Heads], [Window]),
    }
    expected = {f"layers.{n}.{name}": one for n in range(2) for name, one in of_layer.items()}
    assert described(model()) == {**expected, "norm.weight": VECTOR}
    assert float32_paths(model()) == {"layers.0.A_log", "layers.1.A_log"}


def test_a_masked_parameter_is_still_declared():
    masked = tree.map_leaves(lambda path, leaf: None if path.endswith("A_log") else leaf, model())
    assert float32_paths(masked) == float32_paths(model())


def test_what_is_declared_without_a_matrix_neither_decays_nor_is_one():
    (decaying,) = [g for g in parameter_groups(model(), AdamConfig(weight_decay=0.1)) if g.weight_decay]
    assert set(decaying.paths) == {f"layers.{n}.{name}" for n in range(2) for name in ("proj.weight", "loose")}


@pytest.mark.parametrize(
    ("mp", "stored", "computed"),
    [
        ("p=bf16,c=bf16", "float32", "float32"),
        ("p=f32,c=f16", "float32", "float32"),
        ("f32", "float32", "float32"),
        (PrecisionConfig("bf16", [PrecisionRuleConfig("conv", params="f32")]), "float32", "float32"),
        (PrecisionConfig("bf16", [PrecisionRuleConfig("A_log|conv", compute="f16")]), "float32", "float32"),
        (PrecisionConfig("f32", [PrecisionRuleConfig("layers", "bf16", "bf16")]), "float32", "float32"),
    ],
)
def test_a_declared_parameter_stays_float32_whatever_the_rules_say(mp, stored, computed):
    precision = parse_precision(mp)
    for cast, expected, usual in (
        (precision.cast_to_params, stored, precision.params),
        (precision.cast_to_compute, computed, precision.compute),
    ):
        after = cast(model())
        assert {after.layers[0].A_log.dtype.name, after.layers[1].A_log.dtype.name} == {expected}
        assert after.norm.weight.dtype == usual


def test_a_rule_that_matches_only_declared_parameters_is_refused():
    for rule, refused in (("A_log", True), ("A_log|norm", False)):
        precision = parse_precision(PrecisionConfig("f32", [PrecisionRuleConfig(rule, compute="bf16")]))
        with (
            pytest.raises(ConfigError, match=r"matches only parameters .*layers\.0\.A_log")
            if refused
            else nullcontext()
        ):
            precision.check([model()])


def test_the_plan_shows_them_if_they_differ_from_the_rest():
    rows = [text for name, text in parse_precision("bf16").rows(model(), jax.devices()[0]) if name == "precision"]
    assert rows == [
        "params bfloat16, compute bfloat16",
        "A_log: float32 (8 parameters in 2 arrays, as the model declares)",
    ]
    assert len([name for name, _ in parse_precision("f32").rows(model(), jax.devices()[0]) if name == "precision"]) == 1


def test_merged_weights_take_the_dtype_of_the_others():
    stored: Any = QuantizeConfig(kind="int8").merge
    linear = Linear(hax.ones((Heads, Embed)), None, Embed, Heads)
    weight = QuantizeConfig(kind="int8")._stored(linear, linear.weight)
    held = eqx.tree_at(lambda m: m.layers[0].proj.weight, model(), weight)
    merged = stored(parse_precision("bf16").cast_to_params(held))
    assert merged.layers[0].proj.weight.dtype == jnp.bfloat16


@pytest.mark.slow
def test_training_in_bfloat16_moves_them_in_float32(monkeypatch):
    """An update of 1e-5 is lost in bfloat16. The average and the optimizer's state are float32 as everywhere."""
    monkeypatch.setattr(RMSNorm, "parameters", lambda self: {"weight": FLOAT32_VECTOR})
    one = phase(optimizer=AdamConfig(learning_rate=1e-5, warmup=0), averages={"ema": Ema()})
    run = TinyRun(one_device(), one, parse_precision("bf16"))
    before = {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(run.state.model)}
    run.step(arrays(0))
    after = dict(tree.leaves(run.state.model))
    norms = [path for path in before if "norm" in path]
    assert norms
    for path in norms:
        assert after[path].dtype == jnp.float32
        np.testing.assert_allclose(np.abs(np.asarray(after[path].array) - before[path]), 1e-5, rtol=0.1)
    assert all(leaf.dtype == jnp.bfloat16 for path, leaf in after.items() if path not in norms)
    for part in (run.state.opt_state, run.state.slots):
        assert all(leaf.dtype != jnp.bfloat16 for _, leaf in tree.leaves(part))
