"""The surgery fp8: which layers it selects, what it leaves as it is, and what the training step computes with it."""

import dataclasses
import re

import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import SKIPPED
from jaxlm.core.precision import parse_precision
from jaxlm.core.tracing import tracing
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.flax.config import FlaxConfig
from jaxlm.objectives.next_token import score_batch
from jaxlm.optim.sophia_h import SophiaHConfig
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.fp8 import Fp8Config, describe_products, linear_layers
from jaxlm.surgery.lora import LoraConfig
from tests.engine.helpers import MESHES, MODEL, TinyRun, arrays, batch, layout, one_device, phase
from tests.tiers import one_of

KEY = jax.random.key(0)
SIZES = {"seq_len": 16, "hidden_dim": 256, "intermediate_dim": 512, "num_layers": 3, "num_heads": 8}
SMALL = Fp8Config(min_features=16)
BF16 = parse_precision("p=f32,c=bfloat16")


def shapes(config, vocab=1024):
    return jax.eval_shape(lambda: config.build(vocab_axis(vocab), key=KEY))


def selected(model):
    return {path.removeprefix("body.layers.stacked.") for path, shape in linear_layers(model).items() if shape.fp8}


def in_fp8(config, vocab=1024, **keys):
    return Fp8Config(**keys).apply(shapes(config, vocab), key=KEY)


MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
ATTENTION = {"attn.q_proj", "attn.o_proj"}
KEYS = {"attn.k_proj", "attn.v_proj"}


@pytest.mark.parametrize(
    ("config", "vocab", "keys", "expected"),
    [
        (LlamaConfig(**SIZES), 1024, {}, MLP | ATTENTION | KEYS | {"head"}),
        # 64 features of keys and values are too few
        (LlamaConfig(**SIZES, num_kv_heads=2), 1024, {}, MLP | ATTENTION | {"head"}),
        (LlamaConfig(**SIZES, num_kv_heads=2), 1024, {"min_features": 64}, MLP | ATTENTION | KEYS | {"head"}),
        # 520 is not divisible by 16
        (LlamaConfig(**{**SIZES, "intermediate_dim": 520}), 1024, {}, ATTENTION | KEYS | {"head"}),
        (LlamaConfig(**SIZES), 1000, {}, MLP | ATTENTION | KEYS),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), 1024, {"exclude": "mlp"}, ATTENTION | KEYS | {"head"}),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), 1024, {"exclude": "head|_proj$"}, None),
        (LlamaConfig(**SIZES), 1024, {"exclude": r"^head$|\.[kv]_proj"}, MLP | ATTENTION),
    ],
)
def test_selects_layers_by_size_and_path(config, vocab, keys, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="no linear layer has at least min_features: 128"):
            in_fp8(config, vocab, **keys)
    else:
        assert selected(in_fp8(config, vocab, **keys)) == expected


def test_counts_the_layers_of_a_stack():
    config = LlamaConfig(**{**SIZES, "num_layers": 24}, num_kv_heads=2)
    assert describe_products(shapes(config)) is None
    found = describe_products(in_fp8(config))
    assert found == f"{24 * 5 + 1} linear layers in fp8 (tensorwise), {24 * 2} in the compute dtype"


def test_routers_and_experts_stay_as_they_are():
    moe = Qwen3MoeConfig(**{**SIZES, "intermediate_dim": 128}, num_kv_heads=8, num_experts=128)
    assert selected(in_fp8(moe)) == ATTENTION | KEYS | {"head"}


def test_changes_no_parameter_and_merging_undoes_it():
    model = shapes(LlamaConfig(**SIZES))
    changed = Fp8Config("rowwise").apply(model, key=KEY)
    for (path, before), (same, after) in zip(tree.leaves(model), tree.leaves(changed), strict=True):
        assert path == same
        assert tree.raw(before) is tree.raw(after)
    assert jax.tree.structure(changed) != jax.tree.structure(model)
    assert jax.tree.structure(merge_surgeries(changed, [Fp8Config("rowwise")])) == jax.tree.structure(model)


def test_goes_with_other_surgeries_in_any_order():
    lora = LoraConfig(target="attn", rank=2)
    plain = shapes(LlamaConfig(**SIZES))

    def applied(model, surgeries):
        for surgery in surgeries:
            model = surgery.apply(model, key=KEY)
        return model

    for surgeries in ([lora, Fp8Config()], [Fp8Config(), lora]):
        model = jax.eval_shape(lambda model, them=tuple(surgeries): applied(model, them), plain)
        assert "22 linear layers in fp8" in describe_products(model)
        merged = jax.eval_shape(lambda model, them=tuple(surgeries): merge_surgeries(model, them), model)
        assert jax.tree.structure(merged) == jax.tree.structure(plain)


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (LlamaConfig(**SIZES), {"exclude": "mpl"}, r"exclude: 'mpl' matches no linear layer\. Closest names: .*mlp"),
        (LlamaConfig(**SIZES), {"exclude": "("}, r"surgery fp8: exclude: '\(' is not a valid regular expression"),
        (
            LlamaConfig(**{**SIZES, "hidden_dim": 64}),
            {},
            r"min_features: 128 input and output.*The model has: .*q_proj 64 x 64.*lower min_features",
        ),
        (
            FlaxConfig(seq_len=16, factory="examples.nnx_model:make", kwargs={"width": 32, "depth": 1}),
            {},
            "The model has: no linear layers of jaxlm. Remove the surgery",
        ),
    ],
)
def test_invalid_keys_and_unsuitable_models_are_refused(config, keys, message):
    with pytest.raises(ConfigError, match=message):
        in_fp8(config, 1024, **keys)


def test_a_layer_has_only_one_recipe():
    model = in_fp8(LlamaConfig(**SIZES), exclude="mlp")
    with pytest.raises(ConfigError, match="q_proj is already computed in fp8"):
        Fp8Config("rowwise").apply(model, key=KEY)
    both = Fp8Config("rowwise", exclude="attn|head").apply(model, key=KEY)
    assert describe_products(both) == (
        "13 linear layers in fp8 (tensorwise), 9 linear layers in fp8 (rowwise), 0 in the compute dtype"
    )


# --- The training step ------------------------------------------------------------------------------------------------


def run(where, *surgeries, precision=BF16, model=MODEL, **changes):
    return TinyRun(where, phase(surgeries=surgeries, **changes), precision, model)


def losses(tiny, num_steps, **keys):
    return [tiny.step(arrays(seed), **keys) for seed in range(num_steps)]


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_trains_almost_as_without(recipe):
    """The curves of 40 steps, in which the loss falls from 4.2."""
    plain, quantized = (run(one_device(), *surgery) for surgery in ((), (dataclasses.replace(SMALL, recipe=recipe),)))
    exact, found = (np.asarray([metrics["train/loss"] for metrics in losses(r, 40)]) for r in (plain, quantized))
    assert exact[-1] < 0.8 * exact[0]
    assert np.abs(found / exact - 1)[0] > 1e-6
    assert np.abs(found / exact - 1).max() < 0.02


F32 = parse_precision("f32")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", one_of(["tensorwise", "rowwise"]))
@pytest.mark.parametrize("name", one_of(["tp 2 x fsdp 4", *(name for name in MESHES if name != "tp 2 x fsdp 4")]))
def test_eight_devices_compute_what_one_does(name, recipe):
    """In float32, so that only the order of additions differs. A rounding to fp8 that it tips is as large as 1/16."""
    surgery = dataclasses.replace(SMALL, recipe=recipe)
    one, eight = (run(where, surgery, precision=F32) for where in (one_device(), layout(**MESHES[name])))
    for first, expected in zip(losses(eight, 3), losses(one, 3), strict=True):
        for key in ("train/loss", "grad/norm/total"):
            assert first[key] == pytest.approx(expected[key], rel=2e-4)


def with_policy(policy):
    return run(one_device(), SMALL, precision=F32, model=dataclasses.replace(MODEL, gradient_checkpointing=policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", one_of(["none", "full"]))
def test_remat_changes_only_rounding(policy):
    cheap = run(one_device(), SMALL, precision=F32)
    for found, expected in zip(losses(with_policy(policy), 2), losses(cheap, 2), strict=True):
        assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-5)
        assert found["grad/norm/total"] == pytest.approx(expected["grad/norm/total"], rel=2e-4)


@pytest.mark.slow
def test_inputs_are_saved_in_fp8_and_weights_are_not():
    """The stacks of all layers' arrays that the loop over layers writes: [layers, batch, position, features]."""

    def stacks(tiny):
        return set(re.findall(r"\bu8\[2,([\d,]+)\]", tiny.compiled_text(arrays(0))))

    saved, cheap = stacks(with_policy("none")), stacks(run(one_device(), SMALL, precision=F32))
    assert saved >= {"16,16,32", "16,16,64"}  # inputs of q_proj and down_proj
    assert not any(shape.startswith("16,16,") for shape in cheap)
    assert not {"4,8,32", "32,4,8", "64,32", "32,64"} & (saved | cheap)  # the weights of attention and MLP


def rows():
    return jax.tree.map(lambda column: column["microbatch", 0], batch(arrays(0), one_device()), is_leaf=tree.is_named)


def hidden_states(model, quantized_products):
    inputs = Inputs(rows().tokens, rows().positions, rows().segment_ids)
    with tracing(quantized_products=quantized_products):
        return np.asarray(jax.jit(lambda model: model.hidden(inputs).final.array)(model))


@pytest.mark.slow
def test_evaluations_are_not_quantized():
    """Their program is that of the merged model. That of the step is not."""
    model = run(one_device(), SMALL).state.model
    scores = lambda model: jax.jit(score_batch).lower(model, rows()).as_text()  # noqa: E731
    assert scores(model) == scores(merge_surgeries(model, [SMALL]))
    assert not np.array_equal(hidden_states(model, True), hidden_states(model, False))
    assert "f8e4m3fn" in run(one_device(), SMALL).compiled_text(arrays(0))


@pytest.mark.slow
def test_an_optimizer_with_second_derivatives():
    optimizer = SophiaHConfig(learning_rate=1e-3, warmup=0, update_interval=2)
    found = losses(run(one_device(), SMALL, optimizer=optimizer), 4)
    assert all(metrics[SKIPPED] == 0 for metrics in found)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped():
    tiny = run(one_device(), SMALL)
    poison = lambda path, leaf: leaf * np.inf if "up_proj" in path else leaf  # noqa: E731
    tiny.state = dataclasses.replace(tiny.state, model=tree.map_leaves(poison, tiny.state.model))
    assert tiny.step(arrays(0))[SKIPPED] == 1


@pytest.mark.slow
def test_each_layer_of_a_stack_has_scales_of_its_own():
    """Powers of two that cancel, in one layer. With a common scale, the weights of its first product would become 0."""
    model = run(one_device(), SMALL).state.model
    factors = {"up_proj": 2.0**-20, "down_proj": 2.0**20}

    def scaled(path, leaf):
        factor = next((factor for name, factor in factors.items() if name in path), 1.0)
        return hax.named(leaf.array.at[1].multiply(factor), leaf.axes) if factor != 1.0 else leaf

    changed = tree.map_leaves(scaled, model)
    np.testing.assert_array_equal(hidden_states(changed, True), hidden_states(model, True))
