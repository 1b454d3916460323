"""The layer that predicts the token after the next one: documents, devices, adapters, FLOPs."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import ContextSharding, Layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.permutation import in_row_order, in_text_order
from jaxlm.data.row_order import row_orders
from jaxlm.engine.state import shardings
from jaxlm.interop.peft.experts import expert_tensors
from jaxlm.interop.peft.names import peft_tensors
from jaxlm.models.base import Inputs, ModelConfig, vocab_axis
from jaxlm.models.decoders.mtp import inputs_of_following, targets_of_following
from jaxlm.objectives.next_token import NextToken, check_mtp
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.lora import LoraConfig
from tests.engine.helpers import layout
from tests.models.test_every_family import DOCUMENTS, IDS, LENGTH, VOCAB, inputs_of
from tests.small_runs import MODELS

OBJECTIVE = NextToken(mtp_weight=0.3)
SOAK = pytest.param("glm4_moe", marks=pytest.mark.soak)


ONE_LAYER = {"num_layers": 1, "mlp_only_layers": [], "dense_intermediate_dim": None}


def config_of(kind, **keys):
    config: Any = decode(ModelConfig, ConfigSource(MODELS[kind] | {"seq_len": LENGTH, "mtp": True} | keys))
    return config


def model_of(kind, scale=0.3, **keys):
    """A model with N(0, scale) in every parameter."""
    model = jax.eval_shape(lambda: config_of(kind, **keys).build(vocab_axis(VOCAB), key=jax.random.key(0)))
    leaves = tree.leaves(model)
    keys = dict(zip((path for path, _ in leaves), jax.random.split(jax.random.key(0), len(leaves)), strict=True))
    return tree.map_leaves(lambda path, leaf: hax.random.normal(keys[path], leaf.axes) * scale, model)


def batch_of(inputs):
    after = hax.roll(inputs.tokens, -1, "position")
    same = hax.roll(inputs.segment_ids, -1, "position") == inputs.segment_ids
    mask = (same & (inputs.segment_ids != 0)).astype(jnp.float32)
    return TokenBatch(inputs.tokens, after, mask, inputs.segment_ids, inputs.positions)


def test_targets_are_in_the_document_of_the_token():
    """A document of n tokens has n - 2. Those of a prompt are masked as for the next token."""
    batch = batch_of(inputs_of(IDS))
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask * (hax.arange(batch.tokens.axes[1]) != 8))
    order = hax.named(np.random.default_rng(0).permutation(LENGTH)[None].astype(np.int32), batch.tokens.axes)
    moved = jax.tree.map(lambda column: in_row_order(column, order), batch, is_leaf=tree.is_named)
    expected = np.zeros(LENGTH)
    for start, size in zip(np.cumsum((0, *DOCUMENTS)), DOCUMENTS, strict=False):
        expected[start : start + size - 2] = size > 2
    expected[7] = 0  # the target of its next token is masked
    for one, back in ((batch, None), (dataclasses.replace(moved, order=order), order)):
        targets, mask = (in_text_order(column, back).array[0] for column in targets_of_following(one))
        np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(targets[expected > 0], IDS[np.flatnonzero(expected) + 2])
        read = inputs_of_following(Inputs.of(one))
        tokens, segments = (in_text_order(column, back).array[0] for column in (read.tokens, read.segment_ids))
        has_next = np.isin(np.arange(LENGTH), np.cumsum(DOCUMENTS) - 1, invert=True) & (
            np.arange(LENGTH) < sum(DOCUMENTS)
        )
        np.testing.assert_array_equal(segments > 0, has_next)
        np.testing.assert_array_equal(tokens[has_next], IDS[np.flatnonzero(has_next) + 1])
    assert float(OBJECTIVE.weights(batch)["mtp"]) == expected.sum()


@jax.jit
def hidden_of_mtp(model, inputs):
    return model.hidden_of_mtp(inputs, model.hidden(inputs).final).final.array[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", SOAK])
def test_a_packed_document_is_that_document(kind):
    model = model_of(kind)
    together, start = np.asarray(hidden_of_mtp(model, inputs_of(IDS))), 0
    for size in DOCUMENTS:
        ids = np.concatenate([IDS[start : start + size], np.zeros(LENGTH - size, np.int32)])
        alone = np.asarray(hidden_of_mtp(model, inputs_of(ids, (size,))))[: size - 1]
        np.testing.assert_allclose(
            together[start : start + size - 1], alone, rtol=0, atol=2e-6 * np.abs(together).max()
        )
        start += size
    other = IDS.copy()
    other[5] += 1  # the second document, of one token
    changed = np.abs(np.asarray(hidden_of_mtp(model, inputs_of(other % VOCAB))) - together).max(axis=-1)
    # Experts of other tokens are computed in the same products, in another order.
    assert changed[[*range(4), *range(6, 24), *range(25, 40)]].max() <= (0 if kind == "qwen3_5" else 1e-6)


def gradients(model, batch):
    def loss(model):
        terms, _, _ = OBJECTIVE.terms(model, batch, None, key=None)
        return sum(term.mean() for name, term in terms.items() if name != "auxiliary")

    return jax.value_and_grad(loss)(model)


def assert_near(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    largest = max(float(np.abs(leaf.array).max()) for _, leaf in tree.leaves(wanted[1]))
    for (path, ours), (_, theirs) in zip(tree.leaves(found[1]), tree.leaves(wanted[1]), strict=True):
        # A key bias shifts all scores of a query equally, so its gradient is 0: only rounding, on both sides.
        near = 1e-5 * max(float(np.abs(theirs.array).max()), 1e-2 * largest)
        np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=near, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards", [{"model": 2}, pytest.param({}, marks=pytest.mark.soak)], ids=["tp 2 x fsdp 4", "fsdp 8"]
)
@pytest.mark.parametrize("kind", ["glm4_moe", pytest.param("qwen3_5", marks=pytest.mark.soak)])
def test_eight_devices_compute_what_one_does(kind, shards):
    model = model_of(kind, 0.1, **(ONE_LAYER if kind == "glm4_moe" else {}))
    rng, where = np.random.default_rng(2), layout(**shards)
    rows = [inputs_of(rng.integers(0, VOCAB, LENGTH), tuple(rng.permutation(DOCUMENTS))) for _ in range(8)]
    batch = batch_of(jax.tree.map(lambda *each: hax.concatenate("batch", each), *rows, is_leaf=tree.is_named))
    wanted = jax.jit(gradients)(model, batch)
    with where.use():
        found = jax.jit(lambda *given: gradients(*given))(jax.device_put(model, shardings(model, where)), batch)
    assert_near(found, wanted)


@pytest.mark.soak
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("kind", ["qwen3_5", "glm4_moe"])
def test_devices_that_share_a_row_compute_what_one_does(kind, balance):
    model, batch = model_of(kind, 0.1), batch_of(inputs_of(IDS))
    wanted = jax.jit(gradients)(model, batch)
    context = ContextSharding(gather=("context",), balance=balance)
    if balance != "none":
        order = row_orders(balance, np.asarray(batch.segment_ids.array), 8, context.work)
        order = hax.named(order.astype(np.int32), batch.tokens.axes)
        batch = jax.tree.map(lambda column: in_row_order(column, order), batch, is_leaf=tree.is_named)
        batch = dataclasses.replace(batch, order=order)
    mesh = Mesh(np.asarray(jax.devices()).reshape(8, 1), ("context", "data"), axis_types=(AxisType.Auto,) * 2)
    with Layout(mesh, mapping := {"position": context.axes}, mapping, context).use():
        assert_near(jax.jit(lambda *given: gradients(*given))(model, batch), wanted)


def test_an_objective_that_does_not_train_the_layer_is_refused():
    model = jax.eval_shape(lambda: model_of("qwen3_5"))
    check_mtp(OBJECTIVE, model)
    check_mtp(NextToken(), tree.map_leaves(lambda path, leaf: None if path.startswith("mtp.") else leaf, model))
    with pytest.raises(ConfigError, match=r"next_token does not train this layer.*Set objective.mtp_weight"):
        check_mtp(NextToken(), model)


def test_flops_are_those_of_the_layer_its_projection_and_one_more_head():
    config = config_of("qwen3_5")
    more, flops = (dataclasses.replace(config, mtp=mtp).flops_per_token(VOCAB) for mtp in (True, False))
    d, heads, mlp = config.hidden_dim, config.num_heads * config.HeadSize.size, config.intermediate_dim
    weights = 2 * d * d + d * heads * 5 + 3 * d * mlp + VOCAB * d  # queries, keys, values, gates, outputs
    assert more.palm - flops.palm == 6 * weights + 12 * heads * LENGTH
    assert more.causal - flops.causal == 6 * weights + 6 * heads * LENGTH


def test_adapters_leave_the_layer_out():
    """And PEFT's files have the names of modules that transformers has."""
    surgery, kind = LoraConfig(rank=2, experts="mlp"), "glm4_moe"
    for table in (peft_tensors, expert_tensors):
        assert table(config_of(kind)) == table(config_of(kind, mtp=False))
    model = jax.eval_shape(lambda: surgery.apply(model_of(kind), key=jax.random.key(0)))
    adapters = [path for path, _ in tree.leaves(model) if path.endswith(".a")]
    assert any("mlp.up_proj" in path for path in adapters)
    assert not [path for path in adapters if path.startswith("mtp.")]
