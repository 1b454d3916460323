"""Scanned or unrolled layers, with or without remat: the same results, the same layout, different programs."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.qwen2_moe import Qwen2MoeConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.linear import Linear
from jaxlm.models.scan import segments
from jaxlm.models.stacks import LayerKind

SCANNED = [(True, keep) for keep in ("none", "cheap", "full", ("query", "attention", "mlp"))]
UNROLLED = [(False, keep) for keep in ("none", "full")]
VARIANTS = SCANNED + UNROLLED


LAYERS = 2


def variant(config, scan, keep):
    return dataclasses.replace(config, scan_layers=scan, gradient_checkpointing=keep, num_layers=LAYERS)


def loss(model, inputs, key=None):
    return (model.logits(model.hidden(inputs, key=key).final).array ** 2).mean()


def num_matrix_products(block, keep, num_bodies):
    """The expected count for a forward and backward pass with `num_bodies` compiled layers.

    A layer has its linear maps and attention's two products, once forward and twice backward, and attention's scores once
    more. Values that are not saved are recomputed: all linear maps except the last, whose result the backward pass does
    not need, and attention's two products, of which the scores are already recomputed. The head adds three.
    """
    is_linear = lambda x: isinstance(x, Linear)  # noqa: E731
    linear = sum(map(is_linear, jax.tree.leaves(block, is_leaf=is_linear)))
    ups = linear - 5  # 4 of attention, 1 down
    again = {"none": 0, "cheap": 0, "full": linear - 1 + 1}.get(keep, linear - 1 - 1 - ups)
    return num_bodies * (3 * (linear + 2) + 1 + again) + 3


@pytest.mark.slow
def test_variants_are_different_programs_with_the_same_results(tiny, built, as_inputs):
    inputs = as_inputs(np.random.default_rng(0).integers(0, 40, size=(2, 16)))
    results = []
    for scan, keep in VARIANTS[::2] if isinstance(tiny, Gpt2Config) else VARIANTS:  # the loop is the same
        model = built(variant(tiny, scan, keep))
        lowered = jax.jit(jax.value_and_grad(loss)).lower(model, inputs)
        program = lowered.compile()
        assert ("stablehlo.while" in lowered.as_text()) == scan
        wanted = num_matrix_products(model.body.layers.stacked, keep, 1 if scan else LAYERS)
        count = program.as_text().count(" dot(")
        # Unrolled on CPU, XLA eliminates the recomputation of attention's scores.
        assert count == wanted or (not scan and keep != "full" and count == wanted - LAYERS)
        results.append(program(model, inputs))
    value, gradient = results[0]
    for other_value, other_gradient in results[1:]:
        np.testing.assert_allclose(other_value, value, rtol=1e-6)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)


def test_variants_share_one_layout(tiny):
    def leaves(config):
        shapes = jax.eval_shape(lambda key: config.build(vocab_axis(40), key=key), jax.random.key(0))
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)]

    first, *others = [leaves(variant(tiny, *v)) for v in VARIANTS]
    assert all(other == first for other in others)


def test_every_parameter_of_the_body_has_a_leading_layer_axis(tiny, built):
    model = built(variant(tiny, True, "full"))
    is_named = lambda x: isinstance(x, hax.NamedArray)  # noqa: E731
    leaves = jax.tree.leaves(model.body.layers, is_leaf=is_named)
    assert leaves
    assert all(is_named(leaf) and leaf.axes[0] == hax.Axis("layers", LAYERS) for leaf in leaves)
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


@pytest.mark.slow
def test_the_loop_saves_no_parameters_for_the_backward_pass(tiny, built, as_inputs):
    inputs = as_inputs(np.zeros((2, 16), int))
    for keep in ("none", "cheap", "full"):
        model = built(variant(tiny, True, keep))
        forward = next(e for e in jax.make_jaxpr(jax.grad(loss))(model, inputs).eqns if e.primitive.name == "scan")
        results = [v.aval.shape for v in forward.outvars]
        results.remove((2, 16, 32))  # the residual stream itself
        parameters = {leaf.shape for leaf in jax.tree.leaves(model.body.layers)}
        assert results
        assert not parameters & set(results)
        if keep == "full":
            assert results == [(LAYERS, 2, 16, 32)], "the input of each layer and nothing else"


@pytest.mark.slow
def test_building_can_be_traced_and_depends_only_on_the_key(tiny):
    build = jax.jit(lambda key: tiny.build(vocab_axis(40), key=key))
    shapes = jax.eval_shape(build, jax.random.key(0))
    model, again, other = (build(jax.random.key(k)) for k in (0, 0, 1))
    assert jax.tree.structure(shapes) == jax.tree.structure(model)
    for leaf, same, shape in zip(*map(jax.tree.leaves, (model, again, shapes)), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        np.testing.assert_array_equal(leaf, same)
    assert not np.array_equal(model.tokens.weight.array, other.tokens.weight.array)
    layers = model.body.layers.stacked.attn.q_proj.weight.array
    assert not np.array_equal(layers[0], layers[1])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("aaaaaa", ["a*6"]),
        ("abababa", ["ab*3", "a*1"]),
        ("aaabaaabaaab", ["aaab*3"]),
        ("aaaaaabbb", ["a*6", "b*3"]),
        ("aBBBBBBB", ["a*1", "B*7"]),  # a dense layer, then experts
        ("aBaBaBaB", ["aB*4"]),
        ("BBBaBBBBBa", ["B*3", "a*1", "B*5", "a*1"]),
        ("aBBaB", ["a*1", "B*2", "a*1", "B*1"]),  # stacks share a segment only if they take turns
    ],
)
def test_layers_are_divided_into_few_scans(layers, expected):
    """Lower case is one stack, upper case the other; letters are kinds of layers."""
    turns = [(int(letter.isupper()), LayerKind(window=ord(letter))) for letter in layers]
    found = segments(turns, start=7)
    letters = lambda part: "".join(chr(kind.window) for _, kind in part)  # noqa: E731
    assert [f"{letters(segment.pattern)}*{segment.repeats}" for segment in found] == expected
    assert "".join(letters(segment.pattern) * segment.repeats for segment in found) == layers
    assert [segment.start for segment in found] == [7, *(segment.stop for segment in found[:-1])]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_layers_that_take_turns_compile_once_for_all_periods(step, as_inputs):
    """The program does not grow with the number of layers, forward and backward."""

    def operations(num_layers):
        config = Qwen2MoeConfig(
            **{"seq_len": 16, "hidden_dim": 16, "intermediate_dim": 8, "num_heads": 2, "num_kv_heads": 1},
            **{"num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 8},
            decoder_sparse_step=step,
            dense_intermediate_dim=24,
            num_layers=num_layers,
            scan_layers=True,
        )
        model = jax.eval_shape(lambda key: config.build(vocab_axis(40), key=key), jax.random.key(0))
        text = jax.jit(jax.grad(loss)).lower(model, as_inputs(np.zeros((2, 16), int))).as_text()
        return text.count("stablehlo.dot_general")

    assert operations(2 * step) == operations(4 * step)


@pytest.mark.slow
def test_dropout_needs_a_key_and_differs_between_keys(built, as_inputs):
    config = Gpt2Config(seq_len=16, hidden_dim=32, num_layers=1, num_heads=4)
    inputs = as_inputs(np.zeros((2, 16), int))
    step = jax.jit(loss)
    plain = step(built(config), inputs)
    for field in ("embed_pdrop", "resid_pdrop", "attn_pdrop"):
        dropping = built(dataclasses.replace(config, **{field: 0.5}))
        assert step(dropping, inputs) == plain
        values = {float(step(dropping, inputs, jax.random.key(k))) for k in (1, 2)}
        assert len(values | {float(plain)}) == 3, field
