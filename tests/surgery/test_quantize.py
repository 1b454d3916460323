"""The surgery quantize: which layers it stores, that they never train, memory, meshes, and QLoRA on top of it."""

import dataclasses
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.precision import parse_precision
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.engine.entry import Before, StateBuilder
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.flax.config import FlaxConfig
from jaxlm.plan.mesh import check_phase
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.lora_layers import LoraLinear
from jaxlm.surgery.quantize import QuantizeConfig, describe_stored
from tests.engine.helpers import F32, VOCAB, TinyRun, arrays, batch, layout, one_device, phase
from tests.tiers import one_of

KEY = jax.random.key(0)
MODEL = LlamaConfig(seq_len=16, hidden_dim=192, intermediate_dim=256, num_layers=2, num_heads=4, num_kv_heads=2)
ADAPTERS = (r"\.[ab]$",)
# Two kinds, and layers whose inputs are one axis and two.
QLORA = (
    QuantizeConfig(modules="up_proj"),
    QuantizeConfig(kind="nvfp4", modules="o_proj"),
    LoraConfig(target="o_proj|up_proj", rank=4),
)
EXPERTS = MixtralConfig(
    seq_len=16, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=4
)


def shapes(config=MODEL):
    return jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=KEY))


def applied(*surgeries, config=MODEL):
    def make(model):
        for surgery in surgeries:
            model = surgery.apply(model, key=KEY)
        return model

    return jax.eval_shape(make, shapes(config))


def stored(model):
    return {path.removesuffix(".weight"): weight for path, weight in tree.modules_by_path(model, StoredWeight)}


def short(paths):
    return {path.removeprefix("body.layers.stacked.") for path in paths}


LINEAR = {f"attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("surgery", "config", "expected"),
    [
        (QuantizeConfig(), MODEL, LINEAR),
        (QuantizeConfig(kind="nvfp4", modules="attn"), MODEL, {name for name in LINEAR if "attn" in name}),
        (QuantizeConfig(kind="int8", modules="head|q_proj"), MODEL, {"head", "attn.q_proj"}),
        (QuantizeConfig(kind="bfloat16"), EXPERTS, LINEAR),
        (QuantizeConfig(kind="nvfp4"), EXPERTS, LINEAR),
    ],
    ids=["all", "modules", "head", "experts", "experts in four bits"],
)
def test_the_layers_that_are_stored(surgery, config, expected):
    model = applied(surgery, config=config)
    assert {path.replace("experts.", "mlp.") for path in short(stored(model))} == expected
    assert {weight.form for weight in stored(model).values()} == {surgery.kind}
    floats = {leaf.dtype.name for path, leaf in tree.leaves(model) if not re.search(r"proj|head", path)}
    assert floats == {"float32"}
    assert tree.num_parameters(model) == tree.num_parameters(shapes(config))
    assert describe_stored(model).startswith(
        f"{sum(w.size for w in stored(model).values()):,} parameters in {surgery.kind}"
    )


REFUSED = {
    "nothing matches": (
        QuantizeConfig(modules="nothing"),
        MODEL,
        r"modules: 'nothing' matches no linear layer\. Closest",
    ),
    "the head": (QuantizeConfig(modules="head"), MODEL, r"kind: nf4 given, but head is the head.*kind: int8"),
    "flax": (
        QuantizeConfig(),
        FlaxConfig(seq_len=16, factory="examples.nnx_model:make", kwargs={"width": 32, "depth": 1}),
        r"the model has no linear layers of jaxlm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    surgery, config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"surgery quantize: {message}"):
        applied(surgery, config=config)


def test_only_scales_of_nf4_are_quantized():
    with pytest.raises(
        ConfigError,
        match="double_quant: false given without kind: nf4, whose scales it quantizes, but",
    ):
        check_fields(QuantizeConfig(kind="int8", double_quant=False))


def test_layers_that_are_stored_already_are_refused():
    with pytest.raises(ConfigError, match=r"q_proj is already stored as nf4 by an earlier surgery"):
        applied(QuantizeConfig(), QuantizeConfig(kind="int8", modules="q_proj"))
    with pytest.raises(ConfigError, match=r"modules_to_save: 'q_proj' matches no parameter"):
        applied(QuantizeConfig(), LoraConfig(rank=2, target="v_proj", modules_to_save=["q_proj"]))
    both = stored(applied(QuantizeConfig(modules="mlp"), QuantizeConfig(kind="int8", modules="attn|head")))
    assert {weight.form for weight in both.values()} == {"nf4", "int8"}
    with pytest.raises(
        ConfigError,
        match=r"init: pissa given, but it changes the weight of .*q_proj, which is stored as nf4. Put .* before quantize",
    ):
        applied(QuantizeConfig(), LoraConfig(rank=2, target="q_proj", init="pissa"))


@pytest.mark.parametrize("kind", ["nf4", "float16"])
@pytest.mark.parametrize("pattern", [".*", r"q_proj\.base\.weight$", "mlp"])
def test_a_pattern_that_would_train_a_stored_weight_is_refused(kind, pattern):
    surgeries = (QuantizeConfig(kind=kind), LoraConfig(target="attn|mlp", rank=4))
    own = phase(model=MODEL, surgeries=surgeries, trainable=(*ADAPTERS, pattern))
    message = (
        rf"phase 'train': trainable: '{re.escape(pattern)}' matches .* stored as {kind} and cannot be trained: .*lora"
    )
    with pytest.raises(ConfigError, match=message):
        StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (own,)).abstract_state(own)


@pytest.mark.slow
def test_adapters_train_on_a_base_that_keeps_its_bits():
    run = TinyRun(one_device(), phase(model=MODEL, surgeries=QLORA, trainable=ADAPTERS), model=MODEL)
    before = jax.tree.map(np.asarray, run.state.model)
    losses = [run.step(arrays(step))["train/loss"] for step in range(4)]
    assert losses[-1] < losses[0]
    after = dict(tree.leaves(run.state.model))
    for path, leaf in tree.leaves(before):
        same = np.array_equal(tree.raw(leaf), tree.raw(after[path]))
        assert same != bool(re.search(ADAPTERS[0], path)), path
    assert not [path for path, _ in tree.leaves(run.state.opt_state) if "base" in path or "norm" in path]
    # With the values that the codes stand for, a run with floats takes the same steps.
    floats = TinyRun(one_device(), phase(model=MODEL, surgeries=QLORA[-1:], trainable=ADAPTERS), model=MODEL)
    is_stored = lambda node: isinstance(node, StoredWeight)  # noqa: E731

    @jax.jit
    def stands_for(model):
        return jax.tree.map(lambda n: n.floats(jnp.float32) if is_stored(n) else n, model, is_leaf=is_stored)

    model = stands_for(before)
    floats.state = jax.tree.map(
        jnp.asarray,
        jax.tree.unflatten(
            jax.tree.structure(floats.state),
            [
                *jax.tree.leaves((floats.state.step, floats.state.key, model, floats.state.opt_state)),
                *jax.tree.leaves((floats.state.guard, floats.state.slots)),
            ],
        ),
    )
    np.testing.assert_allclose([floats.step(arrays(step))["train/loss"] for step in range(4)], losses, rtol=1e-5)
    merged = jax.eval_shape(lambda: merge_surgeries(run.state.model, QLORA))
    assert tree.leaves(merged)[0][1].dtype == jnp.float32
    assert jax.tree.structure(merged) == jax.tree.structure(shapes())


NARROW = dataclasses.replace(MODEL, intermediate_dim=100)
BYTES = (QuantizeConfig(kind="nvfp4", modules="down_proj"), LoraConfig(target="down_proj", rank=4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "path", "uneven", "model", "surgeries"),
    one_of(
        [
            ({}, "mlp.up_proj", 3, MODEL, QLORA),
            ({"model": 2}, "mlp.up_proj", 3, MODEL, QLORA),
            ({"model": 4}, "mlp.down_proj", 50, NARROW, BYTES),
        ],
        but=2,
    ),
    ids=["3 blocks on fsdp 8", "3 blocks on tp 2 x fsdp 4", "50 bytes on tp 4 x fsdp 2"],
)
def test_eight_devices_take_the_steps_of_one(mesh, path, uneven, model, surgeries):
    """Codes are sharded. An axis of codes or scales that does not divide is on every device."""
    own, where = phase(model=model, surgeries=surgeries, trainable=ADAPTERS), layout(**mesh)
    one, eight = TinyRun(one_device(), own, model=model), TinyRun(where, own, model=model)
    check_phase(where, eight.state.model, "train")
    losses = [[run.step(arrays(step))["train/loss"] for step in range(3)] for run in (one, eight)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    expected, found = stored(one.state.model), stored(eight.state.model)
    for name, weight in found.items():
        assert not weight.codes.array.sharding.is_fully_replicated, name
        np.testing.assert_array_equal(expected[name].codes.array, weight.codes.array, err_msg=name)
    weight = found[f"body.layers.stacked.{path}.base"]
    blocks = weight.codes if uneven == 50 else weight.absmax.codes
    axis = next(axis for axis in blocks.axes if axis.size == uneven)
    assert blocks.array.sharding.shard_shape(blocks.array.shape)[blocks.axes.index(axis)] == axis.size


@pytest.mark.slow
def test_only_one_layer_exists_in_floating_point():
    """The step of eight layers needs less memory than the floats of three of them."""
    sizes = {"hidden_dim": 256, "intermediate_dim": 1024, "num_layers": 8, "num_heads": 4, "scan_layers": True}
    sizes["gradient_checkpointing"] = False
    config, lora = LlamaConfig(seq_len=16, **sizes), LoraConfig(target="attn|mlp", rank=2)
    own = phase(model=config, surgeries=(QuantizeConfig(), lora), trainable=ADAPTERS)
    builder = StateBuilder(config, vocab_axis(VOCAB), 0, F32, (own,))
    abstract, where = builder.abstract_state(own), one_device()
    step = make_train_step(own, where, F32, abstract)
    with where.use():
        lowered = step.lower(abstract, {}, batch(arrays(0, rows=2), where), FlagSync.unset(where))
        memory = lowered.compile().memory_analysis()
    one_layer = 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    assert memory.temp_size_in_bytes < 3 * one_layer


def test_dora_on_stored_weights():
    dora = applied(QuantizeConfig(), LoraConfig(target="q_proj", rank=2, use_dora=True))
    assert dict(tree.modules_by_path(dora, LoraLinear))["body.layers.stacked.attn.q_proj"].magnitude is not None


@pytest.mark.slow
def test_an_entry_continues_after_the_surgeries_that_were_done_when_the_weights_were_read():
    own = phase(model=MODEL, surgeries=QLORA, trainable=ADAPTERS)
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (own,))
    changes = QLORA[0].on_read(builder.abstract_initial_model)
    assert changes

    @jax.jit
    def entered():
        whole = builder.initial_model()
        read = tree.map_leaves(lambda path, leaf: changes[path](leaf) if path in changes else leaf, whole)
        entry = builder.entry(own)
        return entry.state(Before(whole)), entry.state(Before(read, num_applied=1))

    jax.tree.map(np.testing.assert_array_equal, *entered())


def test_half_storage_does_not_need_loss_scaling_and_float16_parameters_are_still_refused():
    with pytest.raises(ConfigError, match="stores parameters in float16"):
        parse_precision("p=float16,c=float32")
    quantized = lambda: QuantizeConfig(kind="float16").apply(MODEL.build(vocab_axis(VOCAB), key=KEY), key=KEY)  # noqa: E731
    model = jax.eval_shape(lambda: parse_precision("p=f32,c=bfloat16").cast_to_compute(quantized()))
    assert {weight.values.dtype.name for weight in stored(model).values()} == {"float16"}
    assert isinstance(model.tokens.weight, hax.NamedArray)
    assert model.tokens.weight.dtype == jnp.bfloat16


@pytest.mark.slow
def test_merged_weights_are_the_floats_that_codes_stand_for_whatever_the_dtype_of_embeddings():
    """By a rule of `trainer.mp`, frozen embeddings may be in bfloat16."""
    surgery = QuantizeConfig(modules="o_proj|up_proj", double_quant=False)

    @jax.jit
    def both():
        model = surgery.apply(MODEL.build(vocab_axis(VOCAB), key=KEY), key=KEY)
        narrow = tree.map_leaves(lambda path, leaf: leaf.astype(jnp.bfloat16) if "tokens" in path else leaf, model)
        return stored(model), merge_surgeries(narrow, (surgery,))

    weights, merged = both()
    leaves = dict(tree.leaves(merged))
    for path, weight in weights.items():
        expected = np.asarray(weight.floats(jnp.float32).array)
        assert np.any(expected != expected.astype(jnp.bfloat16).astype(np.float32)), "more than bfloat16 holds"
        np.testing.assert_array_equal(leaves[f"{path}.weight"].array, expected, err_msg=path)
    assert leaves["tokens.weight"].dtype == jnp.bfloat16
