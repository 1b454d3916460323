"""Dtypes by parameter path: which rule decides, what is stored and computed in which dtype, and refused rules."""

from types import SimpleNamespace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from jaxlm.core import precision, tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepStats
from jaxlm.core.precision import DynamicLossScale, PrecisionConfig, Unscaled, parse_precision
from jaxlm.models.base import Inputs
from jaxlm.models.layers import activation_dtype
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation.options import StepOptions
from jaxlm.session.resume_checks import SavedRun, changes, computing_facts, config_changes
from jaxlm.session.startup import describe
from tests.engine.helpers import VOCAB
from tests.small_runs import tree as run_tree

ROUTER = {"match": r"\.router\.", "compute": "float32"}


def plan_of(*rules: dict[str, str], model: str = "llama", default: str = "p=f32,c=bfloat16", **sections: Any) -> Plan:
    config = run_tree(model, **sections)
    config["trainer"]["mp"] = {"default": default, "rules": list(rules)}
    return make_plan(decode_run(ConfigSource(config), None), "x", VOCAB)


def dtypes(plan: Plan) -> dict[str, tuple[str, str]]:
    """Path -> storage and compute dtype, as they are in the state and as the step casts them."""
    model = plan.state_builder.abstract_state(plan.phases[-1]).model
    compute = dict(tree.leaves(jax.eval_shape(plan.precision.cast_to_compute, model)))
    return {path: (leaf.dtype.name, compute[path].dtype.name) for path, leaf in tree.leaves(model)}


def test_the_first_rule_that_matches_decides():
    up = {"match": r"mlp\.up", "params": "bfloat16", "compute": "float32"}
    found = dtypes(plan_of(up, {"match": r"mlp\.", "params": "bfloat16"}, {"match": "norm", "compute": "f32"}))
    expected = {
        "up_proj": ("bfloat16", "float32"),
        "gate_proj": ("bfloat16", "bfloat16"),
        "down_proj": ("bfloat16", "bfloat16"),
        "norm": ("float32", "float32"),
    }
    for path, dtype in found.items():
        name = next((name for name in expected if name in path), None)
        assert dtype == (("float32", "bfloat16") if name is None else expected[name]), path


def test_a_section_without_rules_is_the_short_form():
    assert plan_of().precision == parse_precision("p=f32,c=bfloat16")


def test_rules_see_the_parameters_that_surgery_adds():
    """The base is stored in 16 bits, and the adapters, which train, in 32."""
    lora = [{"name": "p", "surgery": [{"type": "lora", "rank": 2, "target": "attn"}], "trainable": [r"\.[ab]$"]}]
    found = dtypes(plan_of({"match": r"\.[ab]$", "params": "f32", "compute": "bf16"}, default="bf16", phases=lora))
    assert {dtype for path, dtype in found.items() if path.endswith((".a", ".b"))} == {("float32", "bfloat16")}
    assert {dtype for path, dtype in found.items() if not path.endswith((".a", ".b"))} == {("bfloat16", "bfloat16")}


REFUSED = {
    "nothing": (
        [{"match": "roter", "compute": "f32"}],
        r"rules\.0\.match: 'roter' matches no parameter\. Closest.*router",
    ),
    "hidden": (
        [{"match": "mlp", "compute": "f32"}, ROUTER],
        r"rules\.1\.match: .* earlier rules .*router.* before them",
    ),
    "empty": ([{"match": "mlp"}], r"rules\.0\.params: none of params, compute given, at least one expected"),
    "dtype": ([{"match": "mlp", "compute": "f31"}], r"rules\.0\.compute: 'f31' has the dtype 'f31'\. Allowed: f32, "),
    "storage": (
        [{"match": "mlp", "params": "f16"}],
        r"rules\.0\.params: 'f16' stores parameters in float16.*Use float32",
    ),
    "pattern": ([{"match": "mlp(", "params": "bf16"}], r"rules\.0\.match: 'mlp\(' is not a valid regular expression"),
    "wide": ([{"match": "mlp", "params": "f64"}], r"rules\.0\.params: 'f64' needs 64-bit arrays"),
    "key": ([{"match": "mlp", "storage": "f32"}], r"rules\.0\.storage: no such key.*Allowed: match, params, compute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rules(name):
    rules, message = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"trainer\.mp\.{message}"):
        plan_of(*rules, model="mixtral")


def test_the_default_of_a_section_is_checked_like_the_short_form():
    for mp in ("p=f32,c=bf17", {"default": "p=f32,c=bf17"}):
        key = "trainer.mp" if isinstance(mp, str) else "trainer.mp.default"
        with pytest.raises(ConfigError, match=rf"{key}: 'p=f32,c=bf17' has the dtype 'bf17'"):
            make_plan(decode_run(ConfigSource(run_tree() | {"trainer": {"mp": mp}}), None), "x", VOCAB)


def test_float16_in_one_rule_scales_the_loss_and_is_float32_in_second_derivatives():
    plain, half = plan_of(ROUTER, model="mixtral").precision, plan_of({"match": "mlp", "compute": "f16"}).precision
    assert (plain.loss_scale, half.loss_scale) == (Unscaled(), DynamicLossScale())
    assert plain.for_second_derivatives == plain
    assert half.for_second_derivatives.loss_scale == Unscaled()
    assert half.for_second_derivatives.of({})("mlp").compute == jnp.float32
    assert half.for_second_derivatives.compute == jnp.bfloat16


def test_the_start_up_table_shows_each_rule_and_what_follows_it():
    rows = [text for name, text in describe(plan_of(ROUTER, model="mixtral")) if name == "precision"]
    assert rows == [
        "params float32, compute bfloat16",
        r"\.router\.: params float32, compute float32 (256 parameters in 1 arrays)",
    ]


def test_the_loss_scale_doubles_after_good_steps_and_halves_after_a_bad_one():
    """The rule of torch.amp.GradScaler: the interval restarts after each change."""
    scale = DynamicLossScale(initial=16.0, growth_interval=3)
    slot, scales = scale.init_slot(), []
    for is_finite in (True,) * 7 + (False,) + (True,) * 4:
        slot = scale.judge(
            slot, StepStats(jnp.ones(()), jnp.ones(()), jnp.asarray(is_finite), jnp.ones(()), {}, {})
        ).slot
        scales.append(float(slot.scale))
    assert scales == [16, 16, 32, 32, 32, 64, 64, 32, 32, 32, 64, 64]


def test_activations_have_the_dtype_of_the_embedding():
    """So a rule about the embedding also changes what attention is chosen for."""
    plan = plan_of({"match": "^tokens", "compute": "f32"})
    axes = (Axis("batch", 2), Axis("position", 16))
    ids = hax.NamedArray(jax.ShapeDtypeStruct((2, 16), jnp.int32), axes)

    def hidden(model: Any, ids: Any) -> Any:
        return plan.precision.cast_to_compute(model).hidden(Inputs(ids, ids, ids)).final

    model = plan.state_builder.abstract_initial_model
    assert jax.eval_shape(hidden, model, ids).dtype == jnp.float32
    for policy, dtype in ((plan.precision, jnp.float32), (plan_of().precision, jnp.bfloat16)):
        assert activation_dtype(jax.eval_shape(policy.cast_to_compute, model)) == dtype


def test_a_changed_rule_is_told_when_a_run_resumes():
    before, now = plan_of(ROUTER, model="mixtral").config, plan_of(model="mixtral").config
    (line,) = config_changes(SavedRun("", before), now, 0)
    assert line.startswith("trainer.mp.rules: [{'match': '\\\\.router\\\\.'")
    assert line.endswith(" -> [] (changes what follows: numbers have a different precision from here)")


SAPPHIRE_RAPIDS = frozenset({"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"})
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


def gpu(name: str, capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", device_kind=name, compute_capability=capability)


# Device; instructions and jaxlib of a CPU -> the dtype that products are computed in, and a part of the reason.
AUTOMATIC: dict[str, tuple[Any, frozenset[str], tuple[int, ...], str, str]] = {
    "AMX": (CPU, SAPPHIRE_RAPIDS, (0, 12, 0, 1), "bfloat16", "has amx_bf16, and jaxlib 0.12.0.1 uses it"),
    "AMX that this jaxlib does not use": (CPU, SAPPHIRE_RAPIDS, (0, 10, 2), "float32", "jaxlib 0.12 and later use it"),
    "AVX-512": (CPU, SAPPHIRE_RAPIDS - {"amx_bf16"}, (0, 12), "bfloat16", "has avx512_bf16, and jaxlib 0.12 uses it"),
    "AVX2": (CPU, frozenset({"avx2"}), (0, 12, 0, 1), "float32", "the processor has neither amx_bf16 nor avx512_bf16"),
    "Hopper": (gpu("NVIDIA H100", "9.0"), frozenset(), (0, 10, 2), "bfloat16", "NVIDIA H100 has matrix units"),
    "Volta": (gpu("Tesla V100", "7.0"), frozenset(), (0, 10, 2), "float32", "Tesla V100 has no matrix units"),
    "TPU": (SimpleNamespace(platform="tpu", device_kind="TPU v5p"), frozenset(), (0, 10, 2), "bfloat16", "TPU v5p has"),
}


@pytest.fixture
def processor(monkeypatch):
    def is_now(instructions: frozenset[str], version: tuple[int, ...]) -> None:
        monkeypatch.setattr("jaxlib.version.__version_info__", version)
        monkeypatch.setattr(precision, "_instructions", lambda: instructions)

    return is_now


@pytest.mark.parametrize("name", AUTOMATIC)
def test_auto_computes_in_bfloat16_where_that_is_faster(name, processor):
    device, instructions, version, compute, reason = AUTOMATIC[name]
    processor(instructions, version)
    precision = parse_precision("auto", device)
    assert (precision.params, precision.compute) == (jnp.float32, compute)
    assert reason in precision.reason
    assert str(precision).endswith(f"compute {compute} (auto: {precision.reason})")
    assert parse_precision(PrecisionConfig("auto"), device) == precision


def test_a_misspelled_auto_is_told_about_auto():
    for mp in ("atuo", PrecisionConfig("atuo")):
        with pytest.raises(ConfigError, match=r"trainer\.mp.*: 'atuo' has the dtype 'atuo'\. Allowed: auto, f32"):
            parse_precision(mp)


def test_the_start_says_what_bfloat16_would_be(processor):
    """Of `auto`, in its own row. Of named dtypes, if the processor has the instructions."""
    processor(SAPPHIRE_RAPIDS, (0, 12, 0, 1))
    rows = dict(describe(plan_of(default="auto")))
    assert rows["precision"].startswith("params float32, compute bfloat16 (auto: the processor has amx_bf16")
    assert "bfloat16" not in rows
    named = dict(describe(plan_of(default="f32")))
    assert named["precision"] == "params float32, compute float32"
    assert named["bfloat16"] == "the processor has amx_bf16, and jaxlib 0.12.0.1 uses it (trainer.mp: auto)"
    processor(frozenset(), (0, 12, 0, 1))
    assert "bfloat16" not in dict(describe(plan_of(default="f32")))


def test_another_processor_is_told_when_a_run_with_auto_resumes(processor):
    processor(SAPPHIRE_RAPIDS, (0, 12, 0, 1))
    config = plan_of(default="auto").config
    facts = computing_facts(config, StepOptions.of("cpu", {}))
    processor(frozenset(), (0, 12, 0, 1))
    (line,) = changes(SavedRun("s", config, environment=facts), config, StepOptions.of("cpu", {}), 5, 80)
    assert line.startswith("precision: params float32, compute bfloat16 (auto: ")
    assert line.endswith("nor avx512_bf16) (changes what follows: numbers have a different precision from here)")
    assert "precision" not in computing_facts(plan_of(default="f32").config, StepOptions.of("cpu", {}))
