"""The next-token objective: its sums, which do not depend on how a batch is split."""

import functools
import json
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis, with_traits
from jaxlm.models.loss import next_token_sums
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.next_token import NextToken

CONFIG = LlamaConfig(seq_len=12, hidden_dim=16, intermediate_dim=24, num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def model():
    return a_model()


def a_model():
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: CONFIG.build(vocab_axis(23), key=key), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.4, s.shape), s.dtype), shapes)


def a_batch(rows=4, length=12, seed=0):
    """Two documents per row and padding at the end, with unequal masks."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 23, size=(rows, length))
    segments = np.repeat([[1, 2, 0]], rows, 0).repeat([5, 5, length - 10], 1)
    positions = np.concatenate([np.arange(5), np.arange(5), np.zeros(length - 10)])[None].repeat(rows, 0)
    mask = (rng.random((rows, length)) < rng.random((rows, 1))) & (segments > 0)
    columns = [tokens, np.roll(tokens, -1, 1), mask, segments, positions]
    dtypes = [jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32]
    axes = (Axis("batch", rows), Axis("position", length))
    return TokenBatch(*(hax.named(jnp.asarray(c, d), axes) for c, d in zip(columns, dtypes, strict=True)))


@functools.partial(jax.jit, static_argnums=0)
def terms_of(objective, model, batch):
    return objective.terms(model, batch, None, key=None)


@functools.partial(jax.jit, static_argnums=(2, 3))
def reference(model, batch, z, smoothing):
    """Every term from the model's logits, computed from the definition."""
    logits = model.logits(model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final).array
    log_p, lse = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(log_p, batch.targets.array[..., None], axis=-1)[..., 0]
    m = batch.loss_mask.array
    plain, z_loss = -(m * picked).sum(), (m * z * lse**2).sum()
    smoothed = -(m * ((1 - smoothing) * picked + smoothing * log_p.mean(-1))).sum()
    entropy = -(m * (jnp.exp(log_p) * log_p).sum(-1)).sum()
    correct = (m * (logits.argmax(-1) == batch.targets.array)).sum()
    return smoothed + z_loss, plain, z_loss, correct, m.sum(), entropy


@pytest.mark.slow
@pytest.mark.parametrize(("z", "smoothing"), [(0.0, 0.0), (1e-2, 0.1)])
def test_terms_and_metrics_match_the_definition(model, z, smoothing):
    batch = a_batch()
    objective = NextToken(z_loss_weight=z, label_smoothing=smoothing, log_entropy=z > 0)
    terms, metrics, slot = terms_of(objective, model, batch)
    total, plain, z_loss, correct, weight, entropy = reference(model, batch, z, smoothing)
    assert slot is None
    assert set(terms) == {"loss"}, "no layer of a dense model adds anything"
    assert set(objective.weights(batch)) == {"loss", "auxiliary"}
    assert float(objective.weights(batch)["auxiliary"]) == np.sum(np.asarray(batch.segment_ids.array) != 0)
    usual = {"loss", "mean_token_accuracy", "trained_share"}
    assert set(metrics) == (usual | {"z_loss", "entropy"} if z else usual)
    np.testing.assert_allclose(terms["loss"].total, total, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].total, plain, rtol=1e-5)
    np.testing.assert_allclose(metrics["mean_token_accuracy"].total, correct)
    share = metrics.pop("trained_share")
    assert (float(share.total), float(share.weight)) == (weight, np.sum(np.asarray(batch.segment_ids.array) != 0))
    if z:
        np.testing.assert_allclose(metrics["z_loss"].total, z_loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["entropy"].total, entropy, rtol=1e-5)
    for entry in (*terms.values(), *metrics.values()):
        np.testing.assert_array_equal(entry.weight, weight)
    np.testing.assert_array_equal(objective.weights(batch)["loss"], weight)


@pytest.mark.slow
def test_the_gradient_with_a_soft_cap_matches_the_definition(model):
    model, batch = with_traits(model, logit_soft_cap=0.5), a_batch()
    objective = NextToken(z_loss_weight=1e-2, label_smoothing=0.1)
    ours = jax.jit(jax.grad(lambda m: terms_of(objective, m, batch)[0]["loss"].total))(model)
    expected = jax.jit(jax.grad(lambda m: reference(m, batch, 1e-2, 0.1)[0]))(model)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_microbatches_add_up_to_the_batch(model):
    batch, objective = a_batch(), NextToken(z_loss_weight=1e-2)
    is_named = lambda a: isinstance(a, hax.NamedArray)  # noqa: E731
    rows = lambda s: jax.tree.map(lambda a: a["batch", s], batch, is_leaf=is_named)  # noqa: E731
    whole = terms_of(objective, model, batch)
    parts = [terms_of(objective, model, rows(slice(i, i + n))) for i, n in ((0, 1), (1, 3))]
    for group in (0, 1):
        for name, total in whole[group].items():
            added = parts[0][group][name] + parts[1][group][name]
            np.testing.assert_allclose(added.mean(), total.mean(), rtol=1e-6)


def test_weights_of_a_whole_batch():
    batch = a_batch()
    stacked = jax.tree.map(
        lambda a: hax.stack("microbatch", [a, a]), batch, is_leaf=lambda a: isinstance(a, hax.NamedArray)
    )
    assert float(NextToken().weights(stacked)["loss"]) == 2 * float(NextToken().weights(batch)["loss"])


@pytest.mark.slow
def test_the_sums_match_the_vectors():
    given = json.loads((Path(__file__).parents[1] / "vectors" / "post_training.json").read_text())["cross_entropy"]
    axes = tuple(map(Axis, ("batch", "position", "vocab"), given["shape"]))
    logits = hax.named(2 * np.sin(1.7 * np.arange(40, dtype=np.float32) + 0.3).reshape(given["shape"]), axes)
    targets, mask = (hax.named(np.array(given[name]), axes[:2]) for name in ("targets", "mask"))

    def mean(mask, of="total", **options):
        sums = next_token_sums(logits, None, targets, mask.astype(np.float32), **options)
        return float(getattr(sums, of)) / float(hax.sum(mask).scalar())

    everything = hax.ones_like(mask)
    for name, found in {
        "mean": mean(everything),
        "mean_smoothing_0.05": mean(everything, label_smoothing=0.05),
        "mean_smoothing_0.1": mean(everything, label_smoothing=0.1),
        "masked_mean": mean(mask),
        "masked_sum": mean(mask) * 5,
        "masked_smoothing_0.1": mean(mask, label_smoothing=0.1),
        "masked_z_loss_1e-4": mean(mask, "z_loss", z_loss_weight=1e-4),
    }.items():
        assert found == pytest.approx(given[name], rel=1e-6), name
    rows = [mean(mask * hax.named(np.arange(2) == row, axes[:1])) for row in range(2)]
    assert np.mean(rows) == pytest.approx(given["mean_of_row_means"], rel=1e-6)
    assert rows[0] * 3 / 5 + rows[1] * 2 / 5 == pytest.approx(given["masked_mean"], rel=1e-6)


def test_dynamic_fine_tuning_minimizes_another_loss_than_it_logs(model):
    batch = a_batch()
    logits = model.logits(model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids)).final).array
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets.array[..., None], axis=-1)[..., 0]
    terms, metrics, _ = NextToken(dft=True).terms(model, batch, None, key=None)
    expected = -(batch.loss_mask.array * jnp.exp(picked) * picked).sum()
    np.testing.assert_allclose(terms["loss"].total, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].total, -(batch.loss_mask.array * picked).sum(), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"objective\.dft: true given together with label_smoothing: 0\.1"):
        check_fields(NextToken(dft=True, label_smoothing=0.1), "objective")


@pytest.mark.parametrize(
    ("options", "path"),
    [({"z_loss_weight": -1.0}, "objective.z_loss_weight"), ({"label_smoothing": 1.0}, "objective.label_smoothing")],
)
def test_invalid_options_are_refused(options, path):
    with pytest.raises(ConfigError, match=path):
        check_fields(NextToken(**options), "objective")


def test_is_registered_by_name():
    assert ObjectiveConfig.get_choice_class("next_token") is NextToken
