"""What every mixer has to do, in a model with it: documents, caches, loops, recomputation, devices.

A new mixer is one more entry of `MODELS`.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.sharding import AxisType, Mesh

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.sharding import ContextSharding, Layout
from jaxlm.engine.state import shardings
from jaxlm.interop.hf.families.gemma4 import Gemma4Config
from jaxlm.interop.hf.families.glm4_moe_lite import Glm4MoeLiteConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen3_5 import Qwen35Config
from jaxlm.models.base import Inputs
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator, stack, unstack
from jaxlm.models.mixers.base import Mixer
from jaxlm.plan.context.choice import Rows
from tests.engine.helpers import layout
from tests.models.recurrent import RecurrentConfig
from tests.tiers import one_of

SIZES = {"seq_len": 208, "hidden_dim": 16, "intermediate_dim": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
STATES = {"num_state_heads": 2, "num_value_heads": 4, "state_key_dim": 8, "state_value_dim": 8, "attention_interval": 2}
LATENTS = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_DENSE = {"mlp_only_layers": [0, 1, 2, 3], "dense_intermediate_dim": 24}
# Two layers give keys and values to two others.
SHARED = {
    "head_dim": 4,
    "global_head_dim": 8,
    "num_global_kv_heads": 1,
    "sliding_window": 40,
    "sliding_window_pattern": 2,
}
SHARED |= {"num_kv_shared_layers": 2, "double_wide_mlp": True, "layer_input_dim": 6, "keys_are_values": False}
MODELS = {
    "attention": LlamaConfig(**SIZES),
    "latent attention": Glm4MoeLiteConfig(
        **{key: size for key, size in SIZES.items() if key != "num_kv_heads"}, **LATENTS, **_DENSE
    ),
    "recurrent": RecurrentConfig(**SIZES),
    "shared keys": Gemma4Config(**SIZES, **SHARED),
    "gated delta net": Qwen35Config(**SIZES, head_dim=8, **STATES),
}
# With a fast decay, nothing is left to leak into another document. Scalars below 1 and small embeddings leave little of what
# earlier layers add, and rounding grows from layer to layer.
REPLACED = {"A_log": np.log(0.05), "layer_scalar": 1.0}
EMBEDDINGS, LARGER = "tokens.weight", 5.0
CASES = pytest.mark.parametrize("name", MODELS)
ONE = pytest.mark.parametrize("name", one_of(reversed(MODELS)))
TWO = pytest.mark.parametrize("name", one_of(reversed(MODELS), but=2))
LENGTHS = (1, 3, 63, 64, 65)
PADDING = 6  # in front, and behind

# Of gradients: sums over tokens, or over layers too, of terms that cancel. At most 2.4e-6 and 1.2e-6 measured.
ROUNDING = {"gated delta net": 4e-6, "shared keys": 2e-6}


@pytest.fixture
def initial(built):
    """The model of a config, with random parameters."""

    def changed(path, leaf):
        value = REPLACED.get(path.rpartition(".")[2])
        return leaf * (LARGER if path == EMBEDDINGS else 1.0) if value is None else hax.full_like(leaf, value)

    return lambda config: tree.map_leaves(changed, built(config))


def inputs_of(rows, length, before=0):
    """One row for each list of documents. Args: before: padding in front of them."""
    columns = np.zeros((3, len(rows), length), np.int32)
    for row, documents in enumerate(rows):
        at = before
        for number, document in enumerate(documents, 1):
            values = document, np.arange(len(document)), number
            for column, value in zip(columns, values, strict=True):
                column[row, at : at + len(document)] = value
            at += len(document)
    axes = (Axis(BATCH, len(rows)), Axis(POSITION, length))
    return Inputs(*(hax.named(jnp.asarray(column), axes) for column in columns))


def documents(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 40, length) for length in LENGTHS]


@eqx.filter_jit
def final(model, inputs, cache=None):
    hidden = model.hidden(inputs, cache=cache)
    return hidden.final.rearrange((BATCH, POSITION, ...)).array, hidden.cache


@pytest.mark.slow
@CASES
def test_documents_of_a_row_are_as_alone(name, initial):
    model, texts = initial(MODELS[name]), documents()
    packed = np.asarray(final(model, inputs_of([texts], sum(LENGTHS) + 2 * PADDING, PADDING))[0][0])
    alone = np.asarray(final(model, inputs_of([[text] for text in texts], max(LENGTHS)))[0])
    starts = PADDING + np.cumsum([0, *LENGTHS])
    scale = np.abs(packed).max()
    for row, (start, length) in enumerate(zip(starts, LENGTHS, strict=False)):
        error = np.abs(packed[start : start + length] - alone[row, :length]).max()
        assert error <= 1e-6 * scale, f"document {row}: {error / scale}"


@CASES
def test_a_document_changes_no_bit_of_another(name, initial):
    model, texts = initial(MODELS[name]), documents()
    changed = [*texts[:2], (texts[2] + 1) % 40, *texts[3:]]
    one, other = (
        np.asarray(final(model, inputs_of([rows], sum(LENGTHS) + 2 * PADDING, PADDING))[0][0])
        for rows in (texts, changed)
    )
    start = PADDING + sum(LENGTHS[:2])
    own = np.zeros(len(one), bool)
    own[start : start + LENGTHS[2]] = True
    real = np.arange(len(one)) - PADDING
    others = ~own & (real >= 0) & (real < sum(LENGTHS))
    np.testing.assert_array_equal(one[others], other[others])
    assert np.abs(one[own] - other[own]).max() > 1e-2


@pytest.mark.slow
@CASES
def test_tokens_may_be_in_another_order_or_stay_in_that_of_the_text(name, initial):
    """Two devices share the row. Of a mixer that reads no other order, the plan of context parallelism says so."""
    model, read = initial(MODELS[name]), inputs_of([documents()], 208, PADDING)
    if not all(mixer.takes_order for mixer in tree.modules(model, Mixer)):
        data: Any = SimpleNamespace(batch_spec=lambda _: SimpleNamespace(takes_order=True), corpus=mock.Mock())
        phases: Any = mock.Mock(phases=[mock.Mock(model=model.config)])
        phases.abstract_state.return_value.model = model
        assert "read tokens in the order of the text" in str(Rows.of(phases, [data]).fixed_order)
        return
    order = np.random.default_rng(0).permutation(208).astype(np.int32)
    moved = jax.tree.map(lambda leaf: NamedArray(leaf.array[:, order], leaf.axes), read, is_leaf=tree.is_named)
    moved = dataclasses.replace(moved, order=NamedArray(jnp.asarray(order)[None], read.tokens.axes))
    expected = np.asarray(final(model, read)[0])[:, order]
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("context",), axis_types=(AxisType.Auto,))
    shared = ContextSharding(gather=("context",), balance="blocks")
    with Layout(mesh, {}, {POSITION: "context"}, shared).use():
        found = np.asarray(final(model, moved)[0])
    real = np.asarray(moved.segment_ids.array) != 0
    np.testing.assert_allclose(found[real], expected[real], atol=1e-6 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_grows_gives_what_the_whole_row_gives(name, initial):
    """Rows of different lengths, with padding in front and between the parts; layers in stacks and separate."""
    model, texts = initial(MODELS[name]), documents()[2:4]
    whole = np.asarray(final(model, inputs_of([[text] for text in texts], 64))[0])
    cache = jax.jit(lambda model: model.init_cache(Axis(BATCH, 2), 32, jnp.float32))(model)
    parts, at, apart = (6, 3, 1, 1), 0, None
    for size in parts:
        padded = 8 if size > 1 else 1
        part = inputs_of([[text[at : at + size]] for text in texts], padded, padded - size)
        moved = np.where(np.asarray(part.segment_ids.array) != 0, np.asarray(part.positions.array) + at, 0)
        part = dataclasses.replace(part, positions=NamedArray(jnp.asarray(moved, jnp.int32), part.positions.axes))
        if size == 1 and apart is None:
            apart = jax.jit(unstack)((model, cache))
        out, cache = final(model, part, cache)
        np.testing.assert_allclose(out[:, -size:], whole[:, at : at + size], atol=2e-6 * np.abs(whole).max())
        if apart is not None:
            steps, separate = final(apart[0], part, apart[1])
            np.testing.assert_allclose(steps, out, atol=2e-6 * np.abs(whole).max())
            apart = apart[0], separate
        at += size
    assert apart is not None
    for one, other in zip(jax.tree.leaves(jax.jit(stack)(apart[1])), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@CASES
def test_the_rows_of_a_cache_can_be_repeated(name, initial):
    """By the names of their axes alone, whatever a layer keeps."""
    model, text = initial(MODELS[name]), documents()[2]
    cache = model.init_cache(Axis(BATCH, 1), 32, jnp.float32)
    _, cache = final(model, inputs_of([[text[:9]]], 9), cache)
    repeated = jax.tree.map(
        lambda leaf: hax.concatenate(BATCH, [leaf] * 3) if tree.is_named(leaf) else leaf, cache, is_leaf=tree.is_named
    )
    following = inputs_of([[text[9:10]]] * 3, 1)
    following = dataclasses.replace(following, positions=following.positions + 9)
    one = jax.tree.map(lambda leaf: leaf[BATCH, 0:1], following, is_leaf=tree.is_named)
    expected, found = final(model, one, cache)[0], final(model, following, repeated)[0]
    np.testing.assert_allclose(found, np.repeat(expected, 3, axis=0), atol=1e-6 * np.abs(expected).max())


@pytest.mark.slow
@ONE
def test_a_text_does_not_depend_on_its_batch(name, initial):
    """Greedy, with prompts of different lengths."""
    generator, prompts = Generator.of(initial(MODELS[name])), [[3, 1, 4, 1, 5, 9], [2, 6], [5]]
    config = GenerationConfig(12, temperature=0.0)
    together = generate_tokens(generator, prompts, config)
    assert together == [generate_tokens(generator, [prompt], config)[0] for prompt in prompts]
    stacked = Generator(generator.model, generator.model)
    assert together == generate_tokens(stacked, prompts, config)


@pytest.mark.slow
@ONE
def test_loops_and_recomputation_change_nothing(name, initial, monkeypatch):
    """Outputs are bitwise the same with recomputation. Gradients are sums in another order: each is as near to float64."""
    config, read = MODELS[name], inputs_of([documents()], 208, PADDING)

    def loss(model):
        hidden = model.hidden(read).final
        return jnp.sum(jnp.sin(jnp.where(read.segment_ids.array[..., None] != 0, hidden.array, 0)))

    def gradient(dtype, **keys):
        model = jax.tree.map(lambda leaf: leaf.astype(dtype), initial(dataclasses.replace(config, **keys)))
        found = eqx.filter_jit(eqx.filter_grad(loss))(model)
        return {path: np.asarray(leaf.array) for path, leaf in tree.leaves(found)}

    ways = [{"scan_layers": True}, {"scan_layers": True, "gradient_checkpointing": "full"}, {"scan_layers": False}]
    ways = [{"gradient_checkpointing": "none"} | way for way in ways]
    hidden, again, unrolled = (np.asarray(final(initial(dataclasses.replace(config, **way)), read)[0]) for way in ways)
    np.testing.assert_array_equal(again, hidden)
    np.testing.assert_allclose(unrolled, hidden, atol=1e-6 * np.abs(hidden).max())
    single = [gradient(jnp.float32, **way) for way in ways]
    with jax.enable_x64(True), monkeypatch.context() as patch:
        patch.setattr(jnp, "float32", jnp.float64)  # to which a model casts what needs digits
        double = gradient(jnp.float64, **ways[0])
    for path, wanted in double.items():
        assert wanted.dtype == np.float64
        near = ROUNDING.get(name, 1e-6) * np.abs(wanted).max()
        for found in single:
            np.testing.assert_allclose(found[path], wanted, rtol=0, atol=near, err_msg=path)


@pytest.mark.soak
@ONE
@pytest.mark.parametrize("shards", one_of([{"model": 2}, {}]), ids=["tp 2 x fsdp 4", "fsdp 8"])
def test_eight_devices_compute_what_one_does(name, shards, initial):
    model, rows = initial(MODELS[name]), [documents(seed) for seed in range(8)]
    read = inputs_of(rows, 208, PADDING)
    real = np.asarray(read.segment_ids.array) != 0

    def total(model, read):
        hidden = model.hidden(read).final.rearrange((BATCH, POSITION, ...)).array
        return jnp.sum(jnp.sin(hidden) * real[..., None]), hidden

    compute = eqx.filter_value_and_grad(total, has_aux=True)
    (_, expected), gradients = eqx.filter_jit(compute)(model, read)
    meshes = layout(**shards)
    with meshes.use():
        sharded = jax.device_put(model, shardings(model, meshes))
        (_, found), of_shards = eqx.filter_jit(compute)(sharded, read)
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5 * np.abs(expected).max())
    for (path, leaf), (_, other) in zip(tree.leaves(gradients), tree.leaves(of_shards), strict=True):
        np.testing.assert_allclose(other.array, leaf.array, atol=1e-5 * float(jnp.abs(leaf.array).max()), err_msg=path)
