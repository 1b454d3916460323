"""Rows whose tokens are in another order, or shared by eight devices, train and score as in the order of the text."""

import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.sharding import AttentionWork, ContextSharding, Layout
from jaxlm.core.tracing import tracing
from jaxlm.core.values.batch_types import GroupBatch, LabeledBatch, MaskedBatch, PairBatch, TokenBatch, UnpairedBatch
from jaxlm.core.values.permutation import in_text_order
from jaxlm.data.batch import BatchSpec, Column, Columns, shifted_columns, token_columns
from jaxlm.evals.batches import text_columns
from jaxlm.evals.loss import LossMeter
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig, vocab_axis
from jaxlm.models.distillation.layerwise import layer_streams
from jaxlm.models.rope import DynamicRotary
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.custom import CustomTargets
from jaxlm.objectives.distill import Distill
from jaxlm.objectives.dpo import Dpo
from jaxlm.objectives.kto import Kto
from jaxlm.objectives.next_token import NextToken, score_batch
from jaxlm.objectives.reward import RewardObjective
from jaxlm.surgery.fp8 import Fp8Config
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.reward_head import RewardHeadConfig
from jaxlm.systems.nanochat.lookup import LookupConfig
from jaxlm.systems.nanochat.model import NanoConfig
from jaxlm.systems.progressive.losses import Diffusion
from jaxlm.systems.rl.grpo import Grpo
from jaxlm.systems.upcycle.blockwise import Blockwise
from jaxlm.systems.upcycle.dba import DbaConfig
from tests.engine.helpers import F32, one_device
from tests.tiers import one_of

LENGTH, ROWS, VOCAB = 64, 2, 32
POS = hax.Axis("position", LENGTH)
SIZES = {"seq_len": LENGTH, "hidden_dim": 32, "num_layers": 4, "num_heads": 4}
LLAMA = LlamaConfig(**SIZES, intermediate_dim=32, num_kv_heads=2)
LAST_LAYERS = LlamaConfig(**{**SIZES, "num_layers": 2}, intermediate_dim=32, num_kv_heads=2)
NANO = NanoConfig(
    **SIZES, num_kv_heads=2, smear_channels=24, window_pattern="SL", lookup=LookupConfig([1], allocation="uniform")
)
MIXTRAL = MixtralConfig(**SIZES, intermediate_dim=16, num_kv_heads=2, num_experts=4, num_experts_per_token=2)
LONG = LlamaConfig(**SIZES, intermediate_dim=32, num_kv_heads=2, rope=DynamicRotary(original_max_position_embeddings=8))
TWO_PARTS = DbaConfig(
    **{**SIZES, "num_layers": 2},
    intermediate_dim=32,
    num_kv_heads=2,
    sem_dim=32,
    geo_dim=32,
    rope_semantic=True,
    rope=LONG.rope,
)
BIDIRECTIONAL = dataclasses.replace(LLAMA, use_bidirectional_attention=True)


@functools.cache
def layout(config: ModelConfig, balance: str) -> Layout:
    """Eight devices that share each row: with gathered keys for `zigzag`, in a ring for `blocks`."""
    built = jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
    sizes = {axis.name: axis.size for _, leaf in tree.leaves(built) for axis in leaf.axes}
    axes = {"gather" if balance == "zigzag" else "ring": ("context",)}
    context = ContextSharding(**axes, balance=balance, work=AttentionWork(((None, 2), (20, 2))))
    shape = mesh_shape(8, context={"context": 8})
    return make_layout(shape, AxisMappings("batch", ("embed",), (), {}, {}), sizes, None, context)


def packed(seed: int, *shape: int) -> Columns:
    """Rows of several documents, and padding at their end: [*shape, LENGTH]."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(int(np.prod(shape))):
        sizes = rng.multinomial(LENGTH - 5, rng.dirichlet([1.0] * 4)) + 1
        segments = np.pad(np.repeat(np.arange(1, 5), sizes), (0, 1))
        positions = np.concatenate([*map(np.arange, sizes), [0]])
        ids = rng.integers(0, VOCAB, LENGTH + 1)
        mask = np.append(segments[1:] == segments[:-1], False) * (segments != 0)
        rows.append((ids[:-1] * (segments != 0), ids[1:] * mask, mask, segments, positions))
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    arrays = (np.reshape(np.stack(column), (*shape, LENGTH)) for column in zip(*rows, strict=True))
    return {
        name: a.astype(np.float32 if name == "loss_mask" else np.int32) for name, a in zip(names, arrays, strict=True)
    }


def completions(seed: int, *shape: int) -> Columns:
    """One document a row, of another length each, whose end is a completion."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(LENGTH // 2, LENGTH + 1, shape)[..., None]
    at = np.arange(LENGTH + 1)
    inside = at < sizes
    ids = rng.integers(0, VOCAB, (*shape, LENGTH + 1)).astype(np.int32) * inside
    return shifted_columns(ids, inside, inside & (at >= sizes - rng.integers(4, 20, shape)[..., None]))


def batch_of(spec: BatchSpec[Any], columns: Columns, where: Layout) -> Any:
    read = lambda rows: {name: column[rows].copy() for name, column in columns.items()}  # noqa: E731
    return spec.assemble(read, (hax.Axis("batch", ROWS),), where)


TOKENS = BatchSpec(TokenBatch, token_columns(POS)), packed(0, ROWS)
SIDES = hax.Axis("pair", 2), hax.Axis("group", 3)
PAIRS = BatchSpec(PairBatch.of, token_columns(SIDES[0], POS)), completions(1, ROWS, 2)
REWARDS = {"rewards": Column(np.float32, SIDES[1:]), "sampler_logps": Column(np.float32, (SIDES[1], POS))}
GROUPS = (
    BatchSpec(GroupBatch.of, {**token_columns(SIDES[1], POS), **REWARDS}),
    {
        **completions(2, ROWS, 3),
        "rewards": np.random.default_rng(2).normal(size=(ROWS, 3)).astype(np.float32),
        "sampler_logps": -np.random.default_rng(3).exponential(3, (ROWS, 3, LENGTH)).astype(np.float32),
    },
)
UNPAIRED = (
    BatchSpec(
        UnpairedBatch.of,
        {**token_columns(POS), **{f"mismatched_{n}": c for n, c in token_columns(POS).items()}}
        | {"labels": Column(np.float32, ())},
    ),
    {
        **completions(4, ROWS),
        **{f"mismatched_{name}": column for name, column in completions(5, ROWS).items()},
        "labels": np.asarray([0.0, 1.0], np.float32),
    },
)
OF_ROWS = {"mask_fractions": np.float32, "mask_ids": np.int32, "rates": np.float32}
MASKED = (
    BatchSpec(
        MaskedBatch,
        {
            **token_columns(POS),
            "maskable": Column(np.float32, (POS,)),
            **{n: Column(d, ()) for n, d in OF_ROWS.items()},
        },
    ),
    {
        **(rows := packed(6, ROWS)),
        "maskable": (rows["segment_ids"] != 0).astype(np.float32),
        "mask_fractions": np.asarray([0.3, 0.6], np.float32),
        "mask_ids": np.full(ROWS, VOCAB - 1, np.int32),
        "rates": np.asarray([1.5, 3.0], np.float32),
    },
)
LABELED = BatchSpec(LabeledBatch, token_columns(POS)), packed(7, ROWS)

# Name -> objective, model, data; surgery.
CASES: dict[str, tuple[ObjectiveConfig, ModelConfig, tuple[BatchSpec[Any], Columns], Any]] = {
    "llama": (NextToken(), LLAMA, TOKENS, None),
    "noise": (NextToken(neftune_alpha=5.0), LAST_LAYERS, TOKENS, None),
    "nano": (NextToken(), NANO, TOKENS, None),
    "gpt2": (NextToken(), Gpt2Config(**SIZES), TOKENS, None),
    "lengths of documents": (NextToken(), LONG, TOKENS, None),
    "two parts of scores": (NextToken(), TWO_PARTS, TOKENS, None),
    "experts": (NextToken(), MIXTRAL, TOKENS, None),
    "adapters": (NextToken(), LAST_LAYERS, TOKENS, LoraConfig(rank=4)),
    "fp8": (NextToken(), LAST_LAYERS, TOKENS, Fp8Config(min_features=16)),
    "masked": (Diffusion(), BIDIRECTIONAL, MASKED, None),
    "labels": (CustomTargets(), LAST_LAYERS, LABELED, None),
    "pairs": (Dpo(ld_alpha=0.5), LAST_LAYERS, PAIRS, None),
    "reward": (RewardObjective(), LAST_LAYERS, PAIRS, RewardHeadConfig()),
    "groups": (Grpo(top_entropy=0.5), LAST_LAYERS, GROUPS, None),
    "unpaired": (Kto(), LAST_LAYERS, UNPAIRED, None),
    "teacher": (Distill(hidden=0.5), LAST_LAYERS, TOKENS, None),
    "layers": (Blockwise(target="mixing"), LAST_LAYERS, TOKENS, None),
}

TRAINABLE = {"layers": r"attn\.[qk]_"}


def random_model(config: ModelConfig, surgery: Any, seed: int) -> LanguageModel:
    """Initial weights may be 0. Args: seed: of the others."""
    model = config.build(vocab_axis(VOCAB), key=jax.random.key(0))
    model = model if surgery is None else surgery.apply(model, key=jax.random.key(1))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    rng = np.random.default_rng(seed)
    return eqx.combine(jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), arrays), rest)


def loss_and_gradient(name: str, batch: Any, where: Layout, config: ModelConfig | None = None) -> tuple[Any, Any, Any]:
    """The loss of a batch, its metrics and the gradient of the model, on the devices of a layout."""
    objective, usual, _, surgery = CASES[name]
    model, other = (random_model(config or usual, surgery, seed) for seed in (0, 1))
    trains = lambda path, leaf: bool(re.search(TRAINABLE.get(name, ""), path)) and tree.is_inexact(leaf)  # noqa: E731
    arrays, rest = tree.partition(model, tree.map_leaves(trains, model))
    if hasattr(batch, "with_row_keys"):
        batch = objective.prepare_batch(batch, jax.random.key(2))

    def total(arrays, batch):
        model = eqx.combine(arrays, rest, is_leaf=tree.is_named)
        slot = objective.init_slot(arrays)
        annotated = objective.annotate({"initial": other, "teacher": other}, batch)
        with tracing(quantized_products=True):  # as in a step
            terms, metrics, _ = objective.terms(model, annotated, slot, key=None)
        weights = objective.weights(batch)
        means = {name: metric.mean() for name, metric in metrics.items() if hasattr(metric, "mean")}
        return sum(term.total / weights[name] for name, term in terms.items()), means

    with where.use():
        (loss, metrics), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays, batch)
    return float(loss), metrics, {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(gradient)}


@functools.cache
def of_text(name: str) -> tuple[Any, Any, Any]:
    spec, columns = CASES[name][2]
    return loss_and_gradient(name, batch_of(spec, columns, one_device()), one_device())


def check(found: tuple[Any, Any, Any], name: str) -> None:
    loss, metrics, gradient = of_text(name)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    for metric, value in metrics.items():
        np.testing.assert_allclose(found[1][metric], value, rtol=1e-4, atol=1e-5, err_msg=metric)
    assert gradient.keys() == found[2].keys()
    for path, leaf in gradient.items():
        np.testing.assert_allclose(found[2][path], leaf, rtol=0, atol=1e-5 * max(1.0, np.abs(leaf).max()), err_msg=path)


def reordered(name: str, balance: str) -> Any:
    """A batch on one device, in the order that it has on eight."""
    _, config, (spec, columns), _ = CASES[name]
    batch = batch_of(spec, columns, layout(config, balance))
    return jax.device_put(jax.tree.map(np.asarray, batch), jax.devices()[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(CASES))
def test_an_objective_does_not_depend_on_the_order_of_tokens(name):
    balance = "zigzag" if name in ("masked", "teacher", "groups") else "blocks"
    batch = reordered(name, balance)
    orders = [leaf for path, leaf in tree.leaves(batch) if path.endswith("order")]
    assert orders, "the tokens are in another order"
    assert all((np.asarray(order.array) != np.arange(LENGTH)).any() for order in orders)
    config = dataclasses.replace(CASES[name][1], attn_backend="reference")
    check(loss_and_gradient(name, batch, one_device(), config), name)


# What these read of a row, others above read too: adapters read nothing, labels are targets, and Dpo has answers of its own.
LIKE_OTHERS = ("adapters", "labels", "unpaired")
SHARED = [("llama", "zigzag"), ("llama", "blocks")]
SHARED += [
    pytest.param(name, balance, marks=() if balance == "zigzag" and name not in LIKE_OTHERS else pytest.mark.soak)
    for name in CASES
    for balance in ("zigzag", "blocks")
    if name != "llama"
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "balance"), SHARED)
def test_eight_devices_that_share_rows_have_the_gradient_of_one(name, balance):
    _, config, (spec, columns), _ = CASES[name]
    where = layout(config, balance)
    batch = batch_of(spec, columns, where)
    shard = tree.leaves(batch)[0][1].array.addressable_shards[0].data
    assert shard.shape[-1] == LENGTH // 8
    check(loss_and_gradient(name, batch, where), name)


def text_of(column: hax.NamedArray, order: hax.NamedArray | None) -> np.ndarray:
    return np.asarray(in_text_order(column, order).rearrange(("batch", "position", ...)).array)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "masked", "labels"])
def test_scores_of_tokens_are_those_of_the_text(name):
    """With the token before each, which tells whether a space was put in front of a text."""
    _, config, (spec, columns), _ = CASES[name]
    model = random_model(dataclasses.replace(config, attn_backend="reference"), None, 0)
    found = []
    for batch in (batch_of(spec, columns, one_device()), reordered(name, "zigzag")):
        with one_device().use():
            scores = jax.jit(score_batch)(model, batch)
        found.append(
            {field: text_of(getattr(scores, field), batch.order) for field in ("nats", "mask", "targets", "inputs")}
        )
    np.testing.assert_allclose(found[1].pop("nats"), found[0].pop("nats"), rtol=1e-6, atol=1e-6)
    for field, column in found[0].items():
        np.testing.assert_array_equal(found[1][field], column, err_msg=field)
    if name != "llama":
        np.testing.assert_array_equal(found[1]["inputs"][:, 1:], found[1]["targets"][:, :-1])


@pytest.mark.slow
def test_losses_of_groups_of_tokens_are_those_of_the_text():
    spec, columns = TOKENS
    model, groups = random_model(LAST_LAYERS, None, 0), np.random.default_rng(0).integers(0, 3, (ROWS, LENGTH))
    where = layout(LAST_LAYERS, "blocks")
    found = []
    for place in (one_device(), where):
        with place.use():
            meter = LossMeter(F32, score_batch, np.arange(VOCAB), 3)
            found.append(meter.measure(model, [(batch_of(spec, columns, place), jnp.asarray(groups, jnp.int32))]))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(dataclasses.astuple(ours), dataclasses.astuple(theirs), rtol=1e-5)


@pytest.mark.slow
def test_what_is_shown_or_stored_of_a_row_is_in_the_order_of_the_text():
    spec, columns = TOKENS
    plain, other = batch_of(spec, columns, one_device()), reordered("layers", "blocks")
    for ours, theirs in zip(text_columns(plain), text_columns(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model = random_model(dataclasses.replace(LAST_LAYERS, attn_backend="reference"), None, 0)
    with one_device().use():
        stored = [
            text_of(jax.jit(lambda batch: layer_streams(model, Inputs.of(batch), "mixing").targets)(batch), batch.order)
            for batch in (plain, other)
        ]
    # Of each token, the weights of the tokens that it reads.
    np.testing.assert_allclose(stored[1], stored[0], atol=1e-6)
