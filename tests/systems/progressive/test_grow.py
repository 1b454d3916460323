"""Grown models: what they compute at first, the config that describes them, which moments go on, and what trains."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.engine.entry import Before, StateBuilder
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.glm4 import Glm4Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.gpt_neox import GptNeoxConfig
from jaxlm.interop.hf.families.granite import GraniteConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.olmo2 import Olmo2Config
from jaxlm.interop.hf.families.qwen2 import Qwen2Config
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.models.base import vocab_axis
from jaxlm.models.flops import matrix_operations
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.drop_layers import DropLayersConfig
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.quantize import QuantizeConfig
from jaxlm.systems.progressive.surgery import GrowConfig, SplitAtConfig
from tests.engine import helpers
from tests.engine.helpers import F32, VOCAB, arrays, batch, one_device, phase

SIZES = {"seq_len": 16, "hidden_dim": 32, "num_heads": 4}
GQA = {**SIZES, "intermediate_dim": 48, "num_kv_heads": 2}
LLAMA = LlamaConfig(**GQA, num_layers=2)
# Gemma 2 has norms behind attention and MLP, with weights that are differences from 1, and layers that alternate; OLMo 2 has
# no other norms; NeoX's blocks are parallel; Granite scales what they add.
FAMILIES = {
    "llama": LLAMA,
    "gemma2": Gemma2Config(**GQA, num_layers=3, head_dim=8, sliding_window=3),
    "qwen2": Qwen2Config(**GQA, num_layers=3, sliding_window=3, max_window_layers=2),
    "olmo2": Olmo2Config(**SIZES, intermediate_dim=48, num_layers=2),
    "gpt2": Gpt2Config(**SIZES, num_layers=2),
    "gpt_neox": GptNeoxConfig(**SIZES, intermediate_dim=48, num_layers=2, use_parallel_residual=True),
    "mixtral": MixtralConfig(**GQA, num_layers=2, num_experts=4),
    "granite": GraniteConfig(**GQA, num_layers=2, residual_multiplier=0.5),
    "glm4": Glm4Config(**GQA, num_layers=2, head_dim=8),
}
IN_CI = ("gemma2", "mixtral")
every = pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
ENDS = pytest.mark.parametrize("at", ["append", "prepend"])
KEY = jax.random.key(1)


def outputs(model, inputs):
    hidden = model.hidden(inputs).final
    return hidden.array, model.logits(hidden).array


def read(as_inputs):
    ids = np.random.default_rng(0).integers(0, 40, size=(2, 16))
    return as_inputs(ids, np.broadcast_to(np.arange(16), (2, 16)), np.ones((2, 16), int))


@pytest.mark.slow
@every
def test_new_layers_do_not_change_the_outputs_and_begin_to_train(name, built, as_inputs):
    model, inputs = built(FAMILIES[name]), read(as_inputs)

    @jax.jit
    def compared():
        before, found = outputs(model, inputs), []
        for at in ("append", "prepend"):
            grown = GrowConfig(3, at).apply(model, key=KEY)
            new = rf"^body\.{len(grown.body.stacks) - 1 if at == 'append' else 0}\.layers"
            free, frozen = tree.partition(grown, tree.select(grown, [new]))

            def loss(free, frozen=frozen):
                return jnp.mean(outputs(eqx.combine(free, frozen, is_leaf=tree.is_named), inputs)[1] ** 2)

            gradient = sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(jax.grad(loss)(free)))
            found.append((outputs(grown, inputs), gradient))
        return before, found

    before, found = compared()
    for after, gradient in found:
        for expected, output in zip(before, after, strict=True):
            np.testing.assert_allclose(output, expected, atol=1e-6 * np.abs(expected).max())
        assert gradient > 1e-6


@pytest.mark.slow
@ENDS
def test_layers_that_start_as_the_identity_change_no_bit(at, built, as_inputs):
    model, inputs = built(LLAMA), read(as_inputs)
    with jax.disable_jit():
        before = outputs(model, inputs)
        for expected, found in zip(before, outputs(GrowConfig(2, at).apply(model, key=KEY), inputs), strict=True):
            np.testing.assert_array_equal(found, expected)
        different = outputs(GrowConfig(2, at, "random").apply(model, key=KEY), inputs)
        assert np.abs(different[1] - before[1]).max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
@ENDS
def test_the_changed_config_describes_the_model(at, name):
    config, surgery = FAMILIES[name], GrowConfig(3, at)
    changed = surgery.changed(config)
    changed.check()
    make = lambda config: config.build(vocab_axis(40), key=jax.random.key(0))  # noqa: E731
    grown = jax.eval_shape(lambda: surgery.apply(make(config), key=KEY))
    kinds = config.rotated_kinds
    layers = range(config.num_layers + 3) if at == "append" else range(-3, config.num_layers)
    assert grown.body.kinds_by_layer == tuple(kinds[layer % len(kinds)] for layer in layers)
    merged, expected = (
        jax.eval_shape(lambda m: merge_surgeries(m, [surgery]), grown),
        jax.eval_shape(lambda: make(changed)),
    )
    assert jax.tree.structure(merged) == jax.tree.structure(expected)
    assert jax.tree.leaves(merged) == jax.tree.leaves(expected)


@pytest.mark.slow
def test_models_grow_at_both_ends_and_again(built):
    """Stacks are in the order of their layers, the old leaves keep their bits, and all are joined at the end."""
    surgeries = [GrowConfig(1, "append", "random"), GrowConfig(2, "prepend", "random"), GrowConfig(3, "append")]
    models = [built(LLAMA)]
    for number, surgery in enumerate(surgeries):
        models.append(surgery.apply(models[-1], key=jax.random.key(number)))
    body = models[-1].body
    assert [stack.Layers.size for stack in body.stacks] == [2, 2, 1, 3]
    assert [stack.generation for stack in body.stacks] == [2, 0, 1, 3]
    assert [stack.final_norm is not None for stack in body.stacks] == [False, False, False, True]
    query = "layers.stacked.attn.q_proj.weight"
    by_path = [dict(tree.leaves(model)) for model in models]
    whole = dict(tree.leaves(merge_surgeries(models[-1], surgeries)))[f"body.{query}"].array
    np.testing.assert_array_equal(whole[2:4], by_path[0][f"body.{query}"].array)
    np.testing.assert_array_equal(whole[4:5], by_path[1][f"body.1.{query}"].array)
    np.testing.assert_array_equal(whole[:2], by_path[2][f"body.0.{query}"].array)
    split = SplitAtConfig(1).apply(models[-1], key=KEY)
    assert eqx.tree_equal(
        merge_surgeries(split, [*surgeries, SplitAtConfig(1)]), merge_surgeries(models[-1], surgeries)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("at", "sources"), [("append", [0, 1, 0]), ("prepend", [1, 0, 1])])
def test_copied_layers_repeat_the_model(at, sources, built):
    model = built(LLAMA)
    grown = GrowConfig(3, at, "copy").apply(model, key=KEY)
    new = grown.body.stacks[1 if at == "append" else 0]
    for (path, found), (_, old) in zip(
        tree.leaves(new.layers.stacked), tree.leaves(model.body.layers.stacked), strict=True
    ):
        np.testing.assert_array_equal(found.array, np.asarray(old.array)[sources], err_msg=path)


@pytest.mark.slow
@ENDS
def test_moments_of_old_layers_go_on_and_new_ones_start_at_zero(at):
    first = phase(trainable=("attn", "final_norm", "^head"))
    second = phase(index=1, surgeries=(GrowConfig(1, at),), start=20, end=40, carries_optimizer=True)
    builder = StateBuilder(helpers.MODEL, vocab_axis(VOCAB), 0, F32, (first, second))
    before = jax.jit(lambda: builder.initial_state(first))()
    numbered = lambda path, leaf: leaf + len(path) if ".mu." in path or ".nu." in path else leaf  # noqa: E731
    before = dataclasses.replace(before, opt_state=tree.map_leaves(numbered, before.opt_state))
    after = jax.jit(lambda: builder.entry(second).state(Before.of(before, second)))()
    old = {path: leaf for path, leaf in tree.leaves(before.opt_state) if ".mu." in path or ".nu." in path}
    new = dict(tree.leaves(after.opt_state))
    number, other = ("0", "1") if at == "append" else ("1", "0")
    for path, leaf in old.items():
        norm = path.replace("body.final_norm", "body.1.final_norm")
        np.testing.assert_array_equal(
            new.pop(norm.replace("body.layers", f"body.{number}.layers")).array, leaf.array, err_msg=path
        )
    rest = {path: leaf for path, leaf in new.items() if ".mu." in path}
    assert {path for path in rest if f"body.{other}.layers" in path}
    assert all(not np.asarray(leaf.array).any() for leaf in rest.values())
    models = [dict(tree.leaves(state.model)) for state in (before, after)]
    for path, leaf in models[0].items():
        norm = path.replace("body.final_norm", "body.1.final_norm")
        np.testing.assert_array_equal(models[1][norm.replace("body.layers", f"body.{number}.layers")].array, leaf.array)


def traced(at, trainable):
    grown = phase(surgeries=(GrowConfig(2, at),), trainable=trainable)
    builder = StateBuilder(helpers.MODEL, vocab_axis(VOCAB), 0, F32, (grown,))
    where, state = one_device(), builder.abstract_state(grown)
    with where.use():
        step = make_train_step(grown, where, F32, state)
        return step.trace(state, {}, batch(arrays(0), where), FlagSync.abstract(where)), state


@pytest.mark.slow
def test_a_frozen_trunk_costs_what_it_must():
    """Below the new stack, it has no backward pass; above it, no gradient of weights. It has no optimizer state in either
    case."""
    tokens, layers = 16 * 16, 2
    c = helpers.MODEL
    heads = c.num_heads + c.KVHeads.size
    weights = layers * (2 * c.hidden_dim * heads * c.HeadSize.size + 3 * c.hidden_dim * c.intermediate_dim)
    head = VOCAB * c.hidden_dim
    attention = layers * 2 * 16 * 16 * 16 * c.hidden_dim
    products = {}
    for at, trainable in {
        "append": ("new_stack", "final_norm", "^head"),
        "prepend": ("new_stack",),
    }.items():
        program, state = traced(at, trainable)
        products[at] = matrix_operations(program.jaxpr.jaxpr)
        moments = [path for path, _ in tree.leaves(state.opt_state) if ".mu." in path]
        number = 1 if at == "append" else 0
        assert moments
        assert all(f"body.{number}." in path or "head" in path for path in moments)
    everything = matrix_operations(traced("append", (".*",))[0].jaxpr.jaxpr)
    # Forward and twice as much backward; attention has two products forward and five backward.
    assert everything - products["append"] == 2 * 2 * tokens * weights + 5 * attention
    assert everything - products["prepend"] == 2 * tokens * (weights + head)


MOE = Qwen3MoeConfig(**GQA, num_layers=4, head_dim=8, num_experts=4, decoder_sparse_step=2, dense_intermediate_dim=24)
REFUSED = {
    "structures": (
        MOE,
        [GrowConfig(2)],
        "the layers of this model are of several structures.* start from such a model",
    ),
    "scaled by number": (
        Gpt2Config(**SIZES, num_layers=2, scale_attn_by_inverse_layer_idx=True),
        [GrowConfig(2)],
        "the scale of a layer depends on its number",
    ),
    "norm without weights": (
        dataclasses.replace(LLAMA, hybrid_norm=True, use_layer_norm_weight=False),
        [GrowConfig(2)],
        "a norm without weights follows attention",
    ),
    "adapters": (
        LLAMA,
        [LoraConfig(rank=2), GrowConfig(2, init="copy")],
        r"init: copy: stack 0 .* because it has adapters there\. Merge the adapters .*, or set init: identity",
    ),
    "stored weights": (
        LLAMA,
        [QuantizeConfig("int8", modules=r"^body\.layers\."), LoraConfig(rank=2), GrowConfig(2, init="copy")],
        r"init: copy: stack 0 .* because its weights are stored as int8\. Grow before .*, or set init: identity",
    ),
    "dropped after": (LLAMA, [GrowConfig(2), DropLayersConfig([0])], "grow has added a stack"),
}


@pytest.mark.parametrize(("config", "surgeries", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_grow_is_refused(config, surgeries, message):
    def applied():
        model, changed = config.build(vocab_axis(40), key=KEY), config
        for surgery in surgeries:
            changed = surgery.changed(changed)
            model = surgery.apply(model, key=KEY)
        return model

    with pytest.raises(ConfigError, match=f"^surgery (grow|drop_layers): .*{message}"):
        jax.eval_shape(applied)


def planned(surgery, trainable, **keys):
    phases = [{"name": "first"}, {"name": "second", "surgery": surgery, "trainable": trainable}]
    model = {"type": "llama", **GQA, "num_layers": 2, "tie_word_embeddings": False}
    source = {"model": model, "phases": phases, "trainer": {"train_batch_size": 8, "num_train_steps": 1}, **keys}
    return make_plan(decode_run(ConfigSource(source), None), "x", 40)


def test_the_new_stack_needs_growth():
    with pytest.raises(ConfigError, match=r"phase 'second': trainable: new_stack given, but this model has not grown"):
        planned([{"type": "split_at", "layer": 1}], ["new_stack"])


def test_families_that_cannot_grow_say_why():
    nano = {"type": "nano", "num_layers": 4, "num_heads": 4, "hidden_dim": 64}
    with pytest.raises(ConfigError, match="surgery grow: layers of nano depend on their number"):
        planned([{"type": "grow", "num_layers": 1}], [".*"], model=nano)


def test_a_phase_knows_its_larger_model():
    plan = planned([{"type": "grow", "num_layers": 3}], ["new_stack"])
    assert [phase.model.num_layers for phase in plan.phases] == [2, 5]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["below", "above"])
def test_adapters_of_one_stack_merge(number, built):
    """The other stack has none, and the trunk's were there before the model grew."""
    model, lora = built(LLAMA), LoraConfig(target="q_proj", rank=2)
    surgeries = [lora, GrowConfig(1)] if number == 0 else [GrowConfig(1), LoraConfig(target=r"body\.1.*q_proj", rank=2)]
    for surgery in surgeries:
        model = surgery.apply(model, key=KEY)
    changed = tree.map_leaves(lambda path, leaf: leaf + 0.1 if path.endswith((".a", ".b")) else leaf, model)
    assert [
        bool(tree.modules(stack, type(changed.body.stacks[number].layers.stacked.attn.q_proj)))
        for stack in changed.body.stacks
    ].index(True) == number
    merged = merge_surgeries(changed, surgeries)
    assert jax.tree.structure(merged) == jax.tree.structure(built(dataclasses.replace(LLAMA, num_layers=3)))


@pytest.mark.slow
@ENDS
def test_exports_are_plain_models_with_more_layers(at, built, tmp_path):
    surgery = GrowConfig(2, at, "random")
    grown = merge_surgeries(surgery.apply(built(LLAMA), key=KEY), [surgery])
    changed = surgery.changed(LLAMA)
    save_folder(tmp_path, grown, changed, one_device(), dtype=np.float32, files={}, special_ids={})
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
    assert "the same" in verify_folder(tmp_path, grown, changed, one_device())
