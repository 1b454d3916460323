"""Splitting changes no number: parameters, outputs, gradients, decoding and exports equal those of the whole model.

A frozen lower stack has no optimizer state, and the step does not compute its gradient.
"""

import itertools

import equinox as eqx
import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.engine.watch import WatchConfig, split_watched
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.flops import matrix_operations
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.unstacked import Generator
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import LoraConfig
from jaxlm.systems.progressive.surgery import SplitAtConfig
from tests.engine import helpers
from tests.engine.helpers import F32, MESHES, VOCAB, TinyRun, arrays, batch, layout, one_device, phase

SIZES = {"seq_len": 32, "hidden_dim": 32, "num_heads": 4}
GQA = {**SIZES, "intermediate_dim": 48, "num_kv_heads": 2}
# Name -> (configuration, where to cut). GPT-2's scores depend on the layer's number, Gemma 2's layers alternate.
MODELS = {
    "gpt2": (Gpt2Config(**SIZES, num_layers=4, scale_attn_by_inverse_layer_idx=True, resid_pdrop=0.5), 3),
    "llama": (LlamaConfig(**GQA, num_layers=2), 1),
    "gemma2": (Gemma2Config(**GQA, num_layers=5, head_dim=8, sliding_window=3), 1),
    "mixtral": (MixtralConfig(**GQA, num_layers=3, num_experts=4, sliding_window=5), 2),
}
IN_CI = ("gemma2", "mixtral")
every = pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in MODELS]
)


def split(model, *layers):
    for layer in layers:
        model = SplitAtConfig(layer).apply(model, key=jax.random.key(1))
    return model


def unsplit(leaves):
    """Path in a model with one stack -> array, with the layers of all stacks joined."""
    joined = {}
    for path, leaf in leaves:
        name = (
            path
            if not path.startswith("body.")
            else "body" + path.removeprefix("body").lstrip(".0123456789").join([".", ""])
        )
        joined.setdefault(name, []).append(np.asarray(leaf.array))
    return {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in joined.items()}


def inputs_of(as_inputs):
    """A whole row, and a row with two documents and padding."""
    segments = np.ones((2, 32), int)
    segments[1, 10:25], segments[1, 25:] = 2, 0
    positions = np.broadcast_to(np.arange(32), (2, 32)).copy()
    positions[1, 10:] -= 10
    return as_inputs(np.random.default_rng(0).integers(0, 40, size=(2, 32)), positions, segments)


def loss(model, inputs, key):
    hidden = model.hidden(inputs, key=key)
    auxiliary = sum(aux.sum.mean() for aux in hidden.aux.values())
    return (model.logits(hidden.final).array ** 2).mean() + auxiliary, hidden.aux


@pytest.mark.slow
@every
def test_parameters_outputs_and_gradients_are_those_of_the_whole_model(name, built, as_inputs):
    config, layer = MODELS[name]
    whole = built(config)
    upper = split(whole, layer)
    paths = {path for path, _ in tree.leaves(upper) if path.startswith("body.")}
    assert {path.split(".")[1] for path in paths} == {"0", "1"}
    assert {path for path in paths if "final_norm" in path} == {
        f"body.1.{path.removeprefix('body.')}" for path, _ in tree.leaves(whole) if path.startswith("body.final_norm")
    }
    before, after = unsplit(tree.leaves(whole)), unsplit(tree.leaves(upper))
    assert before.keys() == after.keys()
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array, err_msg=path)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (expected, aux), gradient = run(whole, inputs_of(as_inputs), jax.random.key(3))
    (value, split_aux), split_gradient = run(upper, inputs_of(as_inputs), jax.random.key(3))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert aux.keys() == split_aux.keys()
    for metric in aux:
        np.testing.assert_allclose(split_aux[metric].sum.mean(), aux[metric].sum.mean(), rtol=1e-6)
    wanted = unsplit(tree.leaves(gradient))
    for path, array in unsplit(tree.leaves(split_gradient)).items():
        near = 1e-5 * np.abs(wanted[path]).max() + 1e-7
        np.testing.assert_allclose(array, wanted[path], rtol=1e-4, atol=near, err_msg=path)


@pytest.mark.slow
def test_kinds_follow_the_layers(built):
    """A cut inside the period of Gemma's alternating layers; and cutting again counts layers over the whole model."""
    body = built(MODELS["gemma2"][0]).body
    for layers in ((1,), (2,), (1, 4), (4, 1), (3, 1, 2)):
        cut = split(built(MODELS["gemma2"][0]), *layers).body
        assert cut.kinds_by_layer == body.kinds_by_layer
        assert [numbers[0] for numbers in cut.layer_numbers] == [0, *sorted(layers)]
        assert [stack.final_norm is None for stack in cut.stacks] == [True] * len(layers) + [False]
    assert len(split(built(MODELS["gemma2"][0]), 1).body.stacks[0].kinds) == 1


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [None, pytest.param("int8", marks=pytest.mark.soak)])
# The caches of the others have nothing that these two have not.
@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "mixtral"))]
)
def test_decoding_with_a_cache_gives_the_same_tokens(name, cache_dtype, built):
    """Stacked and unstacked layers, rows of different lengths."""
    config, layer = MODELS[name]
    whole, upper = built(config), split(built(config), layer)
    prompts, options = [[1, 2, 3, 4, 5, 6], [7]], GenerationConfig(12, temperature=0.0, cache_dtype=cache_dtype)
    expected = generate_tokens(Generator.of(whole), prompts, options)
    assert generate_tokens(Generator.of(upper), prompts, options) == expected, "unstacked"
    stacked = generate_tokens(Generator(upper, upper), prompts, options)
    assert stacked == generate_tokens(Generator(whole, whole), prompts, options)


@pytest.mark.slow
def test_a_prefix_cache_holds_every_stack(built):
    config = LlamaConfig(**{**GQA, "seq_len": 256}, num_layers=3)
    model, kept = split(built(config), 1), PrefixCache()
    generator, options = Generator.of(model), GenerationConfig(4, temperature=0.0)
    prompt = np.random.default_rng(0).integers(0, 40, 100).tolist()
    for _ in range(3):
        pieces = stream_tokens(generator, [prompt], options, every=4, prefix_cache=kept)
        found = [token for (piece,) in pieces for token in piece]
        assert found == generate_tokens(generator, [prompt], options)[0]
        prompt = [*prompt, *found, 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_merging_gives_the_whole_model_bit_for_bit(name, built):
    """Exports and sampling use the merged model. Its static fields, such as the layers' kinds, are the same too."""
    config, layer = MODELS[name]
    surgeries = [SplitAtConfig(layer)]
    if config.num_layers > 3:
        surgeries += [SplitAtConfig(2), SplitAtConfig(config.num_layers - 1)][: 1 + (layer < config.num_layers - 1)]
    whole = built(config)
    merged = merge_surgeries(split(whole, *(surgery.layer for surgery in surgeries)), surgeries)
    assert jax.tree.structure(merged) == jax.tree.structure(whole)
    for (path, found), (_, expected) in zip(tree.leaves(merged), tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(found.array, expected.array, err_msg=path)


MIXED = Qwen3MoeConfig(
    **GQA,
    **{"num_layers": 5, "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2},
    **{"decoder_sparse_step": 2, "dense_intermediate_dim": 24},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers", [*(pytest.param(one, marks=pytest.mark.soak) for one in ((1,), (4,))), (2, 4), (3, 1)]
)
def test_layers_with_and_without_experts_are_cut_into_stacks_of_each(layers, built, as_inputs):
    """Dense and expert layers alternate, also above and below the splits. Joining them again gives the same model."""
    whole = built(MIXED)
    assert whole.body.stack_of_layer == (0, 1, 0, 1, 0)
    cut = split(whole, *layers)
    for bounds in zip((0, *sorted(layers)), (*sorted(layers), 5), strict=True):
        inside = {cut.body.stack_of_layer[layer] for layer in range(*bounds)}
        outside = {number for layer, number in enumerate(cut.body.stack_of_layer) if layer not in range(*bounds)}
        assert not inside & outside, "no stack has layers on both sides of a cut"
    taps = ("layer_0", "layer_2", "layer_3", "final")
    run = eqx.filter_jit(lambda m: m.hidden(inputs_of(as_inputs), taps=taps))
    found, expected = run(cut), run(whole)
    for tap in taps:
        np.testing.assert_allclose(found.taps[tap].array, expected.taps[tap].array, rtol=1e-5, atol=1e-5)
    for name, aux in expected.aux.items():
        np.testing.assert_allclose(found.aux[name].sum.mean(), aux.sum.mean(), rtol=1e-6)
    merged = merge_surgeries(cut, [SplitAtConfig(layer) for layer in layers])
    assert jax.tree.structure(merged) == jax.tree.structure(whole)
    for (path, leaf), (_, before) in zip(tree.leaves(merged), tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(leaf.array, before.array, err_msg=path)


@pytest.mark.slow
def test_cuts_are_undone_one_by_one():
    """In all orders. After each step, the tree is the one from before the cut, so that surgeries between cuts merge too."""
    key = jax.random.key(0)
    whole = jax.eval_shape(lambda: MIXED.build(vocab_axis(40), key=key))
    for layers in itertools.permutations(range(1, 5), 3):
        models, cuts = [whole], []
        for layer in layers:
            try:
                after = jax.eval_shape(SplitAtConfig(layer).apply, models[-1], key=key)
            except ConfigError as error:
                assert "a stack already begins there" in str(error)  # noqa: PT017
                continue
            models.append(after)
            cuts.append(SplitAtConfig(layer))
        for surgery, after, before in reversed(list(zip(cuts, models[1:], models, strict=False))):
            found = jax.eval_shape(surgery.merge, after)
            axes = [[(path, leaf.axes) for path, leaf in tree.leaves(model)] for model in (found, before)]
            assert axes[0] == axes[1], (layers, surgery)
            assert jax.tree.structure(found) == jax.tree.structure(before), (layers, surgery)


@pytest.mark.slow
def test_adapters_between_two_cuts_merge(built, as_inputs):
    """The second cut is below the first one, and no layer with experts is between them."""
    whole = built(MIXED)
    between = LoraConfig(target=r"body\.[03].*(q|v)_proj", rank=2)
    cut = between.apply(split(whole, 3), key=jax.random.key(0))
    fill = lambda path, leaf: leaf + 0.1 if path.endswith((".a", ".b")) else leaf  # noqa: E731
    cut = split(tree.map_leaves(fill, cut), 2)
    merged = merge_surgeries(cut, [SplitAtConfig(3), between, SplitAtConfig(2)])
    assert jax.tree.structure(merged) == jax.tree.structure(whole)
    run = eqx.filter_jit(lambda m: m.hidden(inputs_of(as_inputs)).final.array)
    assert np.abs(run(cut) - run(whole)).max() > 1e-2
    np.testing.assert_allclose(run(merged), run(cut), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_adapters_of_layers_with_and_without_experts_merge(built, as_inputs):
    model = built(MIXED)
    adapted = LoraConfig(target=r"q_proj|mlp\.gate_proj", rank=2).apply(model, key=jax.random.key(0))
    assert {path for path, _ in tree.leaves(adapted) if path.endswith(".a")} == {
        "body.0.layers.stacked.attn.q_proj.a",
        "body.0.layers.stacked.mlp.gate_proj.a",
        "body.1.layers.stacked.attn.q_proj.a",
    }
    fill = lambda path, leaf: leaf + 0.1 if path.endswith((".a", ".b")) else leaf  # noqa: E731
    adapted = tree.map_leaves(fill, adapted)
    run = eqx.filter_jit(lambda m: m.hidden(inputs_of(as_inputs)).final.array)
    assert np.abs(run(adapted) - run(model)).max() > 1e-2
    merged = merge_surgeries(adapted, [LoraConfig()])
    np.testing.assert_allclose(run(merged), run(adapted), rtol=1e-4, atol=1e-4)


def traced(trainable, watch=None):
    """The traced step of a two-layer Llama that is cut in the middle, and its state's shapes."""
    frozen = phase(surgeries=(SplitAtConfig(1),), trainable=trainable)
    builder = StateBuilder(helpers.MODEL, vocab_axis(VOCAB), 0, F32, (frozen,))
    where, state = one_device(), builder.abstract_state(frozen)
    with where.use():
        step = make_train_step(frozen, where, F32, state, watch)
        return step.trace(state, {}, batch(arrays(0), where), FlagSync.abstract(where)), state


def weights_per_layer():
    """Weights of matrix products in a layer: queries, keys, values, output, and the MLP's three."""
    c = helpers.MODEL
    heads = c.num_heads + c.KVHeads.size
    return 2 * c.hidden_dim * heads * c.HeadSize.size + 3 * c.hidden_dim * c.intermediate_dim


@pytest.mark.slow
def test_a_frozen_lower_stack_has_no_gradient_and_no_optimizer_state():
    """Each kind of freezing saves exactly the matrix products that it makes unnecessary."""
    tokens = 16 * 16
    flops = {}
    for name, trainable in {
        "everything": (".*",),
        "not body.0": (r"body\.1", "^head", "^tokens"),
        "not body.0 and tokens": (r"body\.1", "^head"),
    }.items():
        program, state = traced(trainable)
        flops[name] = matrix_operations(program.jaxpr.jaxpr)
        moments = [path for path, _ in tree.leaves(state.opt_state) if ".mu." in path or ".nu." in path]
        assert any(".body.1." in path for path in moments)
        assert any(".body.0." in path for path in moments) == (name == "everything")
    # The lower layer's weights are multiplied once instead of three times per token.
    assert flops["everything"] - flops["not body.0"] == 2 * tokens * weights_per_layer()
    # Without trainable embeddings below it, its activations have no gradient either: weights and attention are computed
    # once. Attention has two products forward and five backward.
    saved = flops["not body.0"] - flops["not body.0 and tokens"]
    attention = 2 * 16 * 16 * 16 * helpers.MODEL.hidden_dim
    assert saved == 2 * tokens * weights_per_layer() + 5 * attention


def test_a_watched_run_names_the_stacks_and_counts_their_layers():
    watch = WatchConfig(["params", "grads"], interval=1)
    program, _ = traced((r"body\.1",), watch)
    names, _ = split_watched(jax.tree.map(lambda a: np.zeros(a.shape), program.out_info[1].watched))
    mlp = "mlp.down_proj.weight"
    assert {name for name in names if mlp in name} == {
        f"params/norm/body.0.layers.stacked.{mlp}.0",
        f"params/norm/body.1.layers.stacked.{mlp}.0",
        f"grad/norm/body.1.layers.stacked.{mlp}.0",
    }


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 4", pytest.param("fsdp 8", marks=pytest.mark.soak)])
# What is trained on one device is that of the whole model, whose step does not depend on the mesh.
@pytest.mark.parametrize("trainable", [pytest.param((".*",), marks=pytest.mark.soak), (r"body\.1", "^head")])
def test_losses_do_not_depend_on_the_mesh_and_frozen_layers_do_not_change(mesh, trainable):
    halves = phase(surgeries=(SplitAtConfig(1),), trainable=trainable)
    one, many = TinyRun(one_device(), halves), TinyRun(layout(**MESHES[mesh]), halves)
    before = {path: np.asarray(leaf.array) for path, leaf in tree.leaves(many.state.model)}
    losses = [[run.step(arrays(i), 2)["train/loss"] for i in range(4)] for run in (one, many)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for path, leaf in tree.leaves(many.state.model):
        changed = not np.array_equal(np.asarray(leaf.array), before[path])
        assert changed == (trainable == (".*",) or path.startswith(("body.1", "head"))), path


@pytest.mark.soak
def test_training_a_split_model_is_training_the_whole_one():
    whole, halves = TinyRun(one_device()), TinyRun(one_device(), phase(surgeries=(SplitAtConfig(1),)))
    for number in range(4):
        expected, found = (run.step(arrays(number))["train/loss"] for run in (whole, halves))
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_adapters_apply_to_a_stack_and_merge(built, as_inputs):
    model = split(built(LlamaConfig(**GQA, num_layers=3)), 1)
    lora = LoraConfig(target=r"body\.1.*(q_proj|mlp)", rank=2)
    adapted = lora.apply(model, key=jax.random.key(0))
    fill = lambda path, leaf: leaf + 0.1 if path.endswith((".a", ".b")) else leaf  # noqa: E731
    adapted = tree.map_leaves(fill, adapted)
    paths = [path for path, _ in tree.leaves(adapted) if path.endswith(".a")]
    assert len(paths) == 4
    assert all(path.startswith("body.1.layers.stacked.") for path in paths)
    run = eqx.filter_jit(lambda m: m.hidden(inputs_of(as_inputs)).final.array)
    assert np.abs(run(adapted) - run(model)).max() > 1e-2
    np.testing.assert_allclose(run(lora.merge(adapted)), run(adapted), rtol=1e-4, atol=1e-4)
    again = split(adapted, 2)
    assert sum(path.endswith(".a") for path, _ in tree.leaves(again)) == 8
    np.testing.assert_allclose(run(again), run(adapted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ((0,), "layer: 0 given, but the model has 3 layers. Expected 1 to 2"),
        ((3,), "layer: 3 given, but the model has 3 layers. Expected 1 to 2"),
        ((-1,), "layer: -1 given"),
        ((2, 2), "layer: 2 given, but a stack already begins there"),
    ],
)
def test_impossible_cuts_are_refused(layers, problem, built):
    with pytest.raises(ConfigError, match=problem):
        split(built(LlamaConfig(**GQA, num_layers=3)), *layers)


def test_a_model_with_nothing_to_cut_is_refused(built):
    with pytest.raises(ConfigError, match="this model has only one layer, so there is nothing to cut"):
        split(built(LlamaConfig(**GQA, num_layers=1)), 1)
    flax = pytest.importorskip("flax")
    assert flax
    from jaxlm.models.flax.config import FlaxConfig

    config = FlaxConfig(seq_len=16, factory="examples.nnx_model:make", kwargs={"width": 32, "depth": 1})
    model = jax.eval_shape(lambda: config.build(vocab_axis(40), key=jax.random.key(0)))
    with pytest.raises(ConfigError, match="this model has no stack of layers"):
        split(model, 1)
