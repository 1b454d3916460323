"""What layers compute one by one, against blocks that are called by hand, and gradients against those of single layers."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, HEAD_SIZE, HEADS, LAYERS, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen2_moe import Qwen2MoeConfig
from jaxlm.models.attention.api import AttentionMask
from jaxlm.models.base import EMBEDDING, Inputs, layer_tap, vocab_axis
from jaxlm.models.distillation.layerwise import layer_errors as eager_errors
from jaxlm.models.distillation.layerwise import layer_streams as eager_streams
from jaxlm.models.stacks import layer_contexts
from tests.objectives.test_next_token import a_batch
from tests.tiers import one_of

SIZES: dict[str, Any] = {"seq_len": 12, "hidden_dim": 16, "num_layers": 3, "num_heads": 4}
LLAMA = LlamaConfig(**SIZES, intermediate_dim=24, num_kv_heads=2)
GPT2 = Gpt2Config(**SIZES)
# Layers with and without experts take turns, so that there are two stacks.
TURNS = Qwen2MoeConfig(
    **SIZES,
    intermediate_dim=8,
    num_kv_heads=2,
    decoder_sparse_step=2,
    dense_intermediate_dim=24,
    num_experts=2,
    num_experts_per_token=1,
    shared_expert_intermediate_dim=8,
)


layer_streams = jax.jit(eager_streams, static_argnames="target")
layer_errors = jax.jit(eager_errors, static_argnames=("target", "own_inputs"))


def filled(config, seed):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: config.build(vocab_axis(23), key=key), jax.random.key(0))

    def leaf(s):
        if jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.asarray(rng.normal(0, 0.4, s.shape), s.dtype)
        return jnp.zeros(s.shape, s.dtype)

    return jax.tree.map(leaf, shapes)


def inputs():
    batch = a_batch(rows=3)
    return Inputs(batch.tokens, batch.positions, batch.segment_ids)


def by_hand(model, x, layer):
    """(block, context) of a layer."""
    body = model.body
    number = body.stack_of_layer[layer]
    place = body.layer_numbers[number].index(layer)
    stack = body.stacks[number]
    block = jax.tree.map(lambda leaf: leaf[LAYERS, place], stack.layers.stacked, is_leaf=tree.is_named)
    mask = AttentionMask.of(x)
    return block, layer_contexts([body.kinds_by_layer[layer]], x, mask, "reference")[0]


@eqx.filter_jit
def attended(block, x, context):
    return block.attn(block.attn_norm(x), context, None)[0]


@eqx.filter_jit
def passed(block, x, context, layer):
    return block(x, context, None, index=hax.named(layer, ()), key=None)[0]


def all_taps(model, x):
    names = (EMBEDDING, *map(layer_tap, range(model.body.num_layers)))
    taps = jax.jit(lambda model: model.hidden(x, taps=names).taps)(model)
    return [taps[name] for name in names]


def same(ours, theirs, tolerance=2e-5):
    ours = ours.rearrange(theirs.axes).array
    np.testing.assert_allclose(ours, theirs.array, atol=tolerance * float(jnp.abs(theirs.array).max()))


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, GPT2, TURNS], ids=["llama", "gpt2", "two stacks"])
def test_streams_are_those_of_a_pass_through_all_layers(config):
    check_streams(config)


def check_streams(config):
    model, x = filled(config, 0), inputs()
    streams, of_attention = layer_streams(model, x, "residual"), layer_streams(model, x, "attention")
    taps = all_taps(model, x)
    for layer in range(3):
        same(streams.inputs[LAYERS, layer], taps[layer])
        same(streams.targets[LAYERS, layer], taps[layer + 1])
        block, context = by_hand(model, x, layer)
        same(of_attention.targets[LAYERS, layer], attended(block, taps[layer], context))


@pytest.mark.slow
def test_mixing_is_the_softmax_that_attention_multiplies_values_with():
    check_mixing(LLAMA)


def check_mixing(config):
    model, x = filled(config, 0), inputs()
    mixing = layer_streams(model, x, "mixing").targets
    taps = all_taps(model, x)
    real = np.asarray(x.segment_ids.array) != 0
    for layer in range(3):
        block, context = by_hand(model, x, layer)
        normed = block.attn_norm(taps[layer])
        values = block.attn.v_proj(normed)  # {batch, position, kv_heads, head_size}
        weights = mixing[LAYERS, layer].rearrange((BATCH, POSITION, HEADS, HEAD_SIZE)).array
        sums = np.asarray(weights.sum(-1))
        np.testing.assert_allclose(sums[real], 1, atol=1e-6)
        by_head = jnp.repeat(values.rearrange((BATCH, POSITION, "kv_heads", HEAD_SIZE)).array, 2, axis=2)
        mixed = hax.named(jnp.einsum("bqhk,bkhd->bqhd", weights, by_head), (BATCH, POSITION, HEADS, HEAD_SIZE))
        same(block.attn.o_proj(mixed), attended(block, taps[layer], context))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["attention", "residual", "mixing"])
def test_a_layer_is_at_no_distance_from_itself(target):
    model, x = filled(LLAMA, 0), inputs()
    streams = layer_streams(model, x, target)
    for own_inputs in (False, True):
        errors = layer_errors(model, x, streams, target, own_inputs=own_inputs)
        assert float(errors.absolute.array.max()) < 1e-6 * 15


@pytest.mark.slow
@pytest.mark.parametrize("target", ["attention", "residual"])
def test_errors_are_means_over_features_summed_over_tokens_that_are_not_padding(target):
    teacher, student, x = filled(LLAMA, 0), filled(LLAMA, 1), inputs()
    streams = layer_streams(teacher, x, target)
    errors = layer_errors(student, x, streams, target)
    real = np.asarray(x.segment_ids.array != 0)
    for layer in range(3):
        block, context = by_hand(student, x, layer)
        stream, targets = streams.inputs[LAYERS, layer], np.asarray(streams.targets[LAYERS, layer].array)
        attention = target == "attention"
        ours = attended(block, stream, context) if attention else passed(block, stream, context, jnp.int32(layer))
        difference = (np.asarray(ours.rearrange((BATCH, POSITION, "embed")).array) - targets) * real[..., None]
        np.testing.assert_allclose(errors.absolute.array[layer], np.abs(difference).mean(-1).sum(), rtol=1e-4)
        np.testing.assert_allclose(errors.squared.array[layer], (difference**2).sum(), rtol=1e-4)
        np.testing.assert_allclose(errors.size.array[layer], ((targets * real[..., None]) ** 2).sum(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", one_of([TURNS, LLAMA]), ids=["two stacks", "llama"])
@pytest.mark.parametrize("target", one_of(["residual", "attention"]))
def test_the_gradient_of_all_layers_together_is_that_of_each_layer_alone(config, target):
    teacher, student, x = filled(config, 0), filled(config, 1), inputs()
    streams = layer_streams(teacher, x, target)
    floats, rest = tree.partition(student, jax.tree.map(tree.is_inexact, student, is_leaf=tree.is_named))

    def total(floats, current):
        model = eqx.combine(floats, rest, is_leaf=tree.is_named)
        return jnp.sum(layer_errors(model, x, streams, target, current=current).absolute.array)

    gradient_of = jax.jit(jax.grad(total))
    together = dict(tree.leaves(gradient_of(floats, None)))
    alone = [dict(tree.leaves(gradient_of(floats, jnp.int32(layer)))) for layer in range(3)]
    for path, gradient in together.items():
        added = sum(np.asarray(tree.raw(one[path])) for one in alone)
        largest = max(1.0, float(np.abs(tree.raw(gradient)).max()))
        np.testing.assert_allclose(tree.raw(gradient), added, atol=1e-6 * largest)
        number = 0 if config is LLAMA else int(path.split(".")[1]) if path.startswith("body.") else 0
        if "layers" in path:
            for layer, one in enumerate(alone):
                numbers = student.body.layer_numbers[number]
                others = [place for place, at in enumerate(numbers) if at != layer]
                assert not np.asarray(tree.raw(one[path]))[others].any(), (path, layer)


@pytest.mark.slow
def test_a_layer_that_reads_its_own_models_streams_is_compared_with_the_teachers():
    target = "residual"
    teacher, student, x = filled(LLAMA, 0), filled(LLAMA, 1), inputs()
    streams, ours = layer_streams(teacher, x, target), layer_streams(student, x, target)
    errors = layer_errors(student, x, streams, target, own_inputs=True)
    real = np.asarray(x.segment_ids.array != 0)[..., None]
    for layer in range(3):
        difference = np.asarray((ours.targets - streams.targets)[LAYERS, layer].array) * real
        np.testing.assert_allclose(errors.absolute.array[layer], np.abs(difference).mean(-1).sum(), rtol=1e-4)
        single = layer_errors(student, x, streams, target, own_inputs=True, current=jnp.int32(layer))
        np.testing.assert_allclose(single.absolute.array[layer], errors.absolute.array[layer], rtol=1e-5)
        assert not np.delete(np.asarray(single.absolute.array), layer).any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 2}, "the teacher has 3 layers and the model 2"),
        ({"hidden_dim": 24}, "the teacher's residual stream is 16 wide, and the model's 24"),
    ],
)
def test_other_sizes_than_the_teachers_are_refused(sizes, message):
    x = inputs()
    streams = jax.eval_shape(lambda: layer_streams(filled(LLAMA, 0), x, "residual"))
    student = filled(LlamaConfig(**SIZES | sizes, intermediate_dim=24, num_kv_heads=2), 0)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda streams: layer_errors(student, x, streams, "residual"), streams)
