"""What the page "Which models" promises of every family: packed documents, rows that devices share, adapters."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxlm.core import tree
from jaxlm.core.sharding import ContextSharding, Layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.engine.state import shardings
from jaxlm.models.base import Inputs, ModelConfig, vocab_axis
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.objectives.next_token import NextToken
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.lora import LoraConfig
from tests.engine.helpers import layout
from tests.small_runs import MODELS
from tests.tiers import one_of

VOCAB, LENGTH = 61, 48
DOCUMENTS = (5, 1, 19, 16)  # 7 tokens of padding follow
KINDS = [name for name in MODELS if name != "flax"]
IN_CI = ("qwen3_5_moe", "gemma3", "glm4_moe")
"""The families of which CI compares devices and adapters: recurrent layers and windows, with and without experts. How
devices share a row of the first is in tests/models/test_gated_delta_net.py."""
MOSTLY_BY_HAND = one_of([*IN_CI, *(kind for kind in KINDS if kind not in IN_CI)], but=len(IN_CI))
SHOWN = ["glm4_moe_lite", "deepseek_v3", "mistral4"]  # tests/models/test_mixers.py
pytestmark = pytest.mark.slow


@functools.cache
def model_of(kind):
    """A model with N(0, 0.3) in every parameter."""
    config = decode(ModelConfig, ConfigSource(MODELS[kind] | {"seq_len": LENGTH}))
    model = jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
    leaves = tree.leaves(model)
    keys = dict(zip((path for path, _ in leaves), jax.random.split(jax.random.key(0), len(leaves)), strict=True))
    return tree.map_leaves(lambda path, leaf: hax.random.normal(keys[path], leaf.axes) * 0.3, model)


def inputs_of(ids, documents=DOCUMENTS):
    """One row with these documents, then padding."""
    segments, positions = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32)
    end = sum(documents)
    segments[:end] = np.repeat(np.arange(1, len(documents) + 1), documents)
    positions[:end] = np.concatenate([np.arange(size) for size in documents])
    axes = (hax.Axis("batch", 1), hax.Axis("position", LENGTH))
    return Inputs(*(hax.named(jnp.asarray(a)[None], axes) for a in (ids, positions, segments)))


@jax.jit
def final(model, inputs):
    return model.hidden(inputs).final.array[0]


IDS = np.random.default_rng(1).integers(0, VOCAB, LENGTH).astype(np.int32)


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in SHOWN), *one_of(SHOWN, but=0)])
def test_a_packed_document_is_that_document(kind):
    model = model_of(kind)
    together = np.asarray(final(model, inputs_of(IDS)))
    start = 0
    for size in DOCUMENTS:
        ids = np.concatenate([IDS[start : start + size], np.zeros(LENGTH - size, np.int32)])
        alone = np.asarray(final(model, inputs_of(ids, (size,))))[:size]
        packed = together[start : start + size]
        np.testing.assert_allclose(packed, alone, rtol=0, atol=2e-6 * np.abs(alone).max())
        start += size
    other = IDS.copy()
    other[5] += 1  # the second document
    changed = np.abs(np.asarray(final(model, inputs_of(other % VOCAB))) - together).max(axis=-1)
    assert changed[5] > 0
    # Experts of other tokens are computed in the same products, in another order.
    tolerance = 1e-6 if tree.modules(model, ExpertLinear) else 0.0
    assert changed[:5].max() <= tolerance
    assert changed[6 : sum(DOCUMENTS)].max() <= tolerance


@pytest.mark.parametrize("method", ["gather", pytest.param("heads", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", one_of([*IN_CI[1:], *(kind for kind in KINDS if kind not in IN_CI[1:])], but=2))
def test_devices_that_share_a_row_compute_what_one_does(kind, method):
    model, inputs = model_of(kind), inputs_of(IDS)
    sizes = (8, 1) if method == "gather" else (4, 2)
    context = ContextSharding(gather=("context",)) if method == "gather" else ContextSharding(heads=("context",))
    mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), ("context", "data"), axis_types=(AxisType.Auto,) * 2)
    mapping = {"position": context.axes}

    def gradients(model, inputs):
        shown = (inputs.segment_ids.array[0] > 0)[:, None]

        def loss(model):
            hidden = model.hidden(inputs).final.array[0]
            return jnp.sum(jnp.where(shown, jnp.sin(3 * hidden), 0.0)) / LENGTH

        return jax.value_and_grad(loss)(model)

    expected, wanted = jax.jit(gradients)(model, inputs)
    with Layout(mesh, mapping, mapping, context).use():
        loss, found = jax.jit(lambda model, inputs: gradients(model, inputs))(model, inputs)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    largest = max(float(np.abs(leaf.array).max()) for _, leaf in tree.leaves(wanted))
    for (path, ours), (_, theirs) in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        # A key bias shifts all scores of a query equally, so its gradient is 0: only rounding, on both sides.
        near = 1e-5 * max(float(np.abs(theirs.array).max()), 1e-2 * largest)
        np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=near, err_msg=path)


@pytest.mark.parametrize("shards", one_of([{"model": 2}, {}]), ids=["tp 2 x fsdp 4", "fsdp 8"])
@pytest.mark.parametrize("kind", one_of(["qwen3_5_moe", "glm4_moe_lite", "gpt_oss", "glm4_moe", "gemma4"], but=2))
def test_eight_devices_compute_what_one_does(kind, shards):
    """Eight packed rows: the training loss and its gradients, with N(0, 0.1) in every parameter: larger weights would make
    1e-5 of other rounding in the sums over rows."""
    model = tree.map_leaves(lambda _, leaf: leaf / 3, model_of(kind))
    rng, where = np.random.default_rng(2), layout(**shards)
    rows = [inputs_of(rng.integers(0, VOCAB, LENGTH), tuple(rng.permutation(DOCUMENTS))) for _ in range(8)]
    inputs = jax.tree.map(lambda *each: hax.concatenate("batch", each), *rows, is_leaf=tree.is_named)
    following = hax.roll(inputs.tokens, -1, "position")
    same = hax.roll(inputs.segment_ids, -1, "position") == inputs.segment_ids
    mask = (same & (inputs.segment_ids != 0)).astype(jnp.float32)
    batch = TokenBatch(inputs.tokens, following, mask, inputs.segment_ids, inputs.positions)

    def loss(model, batch):
        return NextToken().terms(model, batch, None, key=None)[0]["loss"].mean()

    expected, wanted = jax.jit(jax.value_and_grad(loss))(model, batch)
    with where.use():
        sharded = jax.device_put(model, shardings(model, where))
        found, gradients = jax.jit(jax.value_and_grad(lambda *given: loss(*given)))(sharded, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, ours), (_, theirs) in zip(tree.leaves(gradients), tree.leaves(wanted), strict=True):
        near = 1e-5 * float(np.abs(theirs.array).max())
        np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=near, err_msg=path)


@pytest.mark.parametrize("kind", MOSTLY_BY_HAND)
def test_every_linear_layer_takes_an_adapter(kind):
    model, inputs = model_of(kind), inputs_of(IDS)
    experts = r"(gate|up|down)_proj" if tree.modules(model, ExpertLinear) else None
    surgery = LoraConfig(target=r"attn|mlp", experts=experts, rank=2)
    adapted = surgery.apply(model, key=jax.random.key(1))
    np.testing.assert_allclose(final(adapted, inputs), final(model, inputs), rtol=0, atol=1e-6)
    linear = [path for path, _ in tree.modules_by_path(model.body, Linear) if not path.endswith("router")]
    assert sum(path.endswith(".b") for path, _ in tree.leaves(adapted)) >= len(linear)
    moved = tree.map_leaves(lambda path, leaf: leaf + 0.1 if path.endswith(".b") else leaf, adapted)
    merged = surgery.merge(moved)
    assert tree.leaves(merged)[0][0] == tree.leaves(model)[0][0]
    np.testing.assert_allclose(final(merged, inputs), final(moved, inputs), rtol=1e-4, atol=1e-4)
