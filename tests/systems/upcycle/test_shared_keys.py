"""Keys that heads share, made of a teacher's, against the teacher and closed forms in float64."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.engine.state import shardings
from jaxlm.systems.upcycle.bottleneck import (
    HeadFeatures,
    Scores,
    largest_pairs,
    lost_rotation,
    low_rank,
    score_errors,
    second_root,
)
from jaxlm.systems.upcycle.decouple import DecoupleConfig, in_shared_keys, of_shared_keys
from tests.engine.helpers import layout
from tests.systems.upcycle.test_decouple import (
    EXACT,
    HEAD,
    KV_HEADS,
    TEACHER,
    built,
    calibration,
    inputs,
    logits,
    random_moment,
    random_scores,
    student,
)
from tests.tiers import one_of

WIDE = dataclasses.replace(TEACHER, num_heads=8, num_kv_heads=4)


def features_of(scores):
    """float64, with one head of keys for each query: [H, D, I] twice."""
    q, k = (np.asarray(a, np.float64) for a in scores)
    return q, np.repeat(k, len(q) // len(k), axis=0)


def turned(features, angles, distance):
    """The rotary embedding of a key `distance` before its query, as a matrix of all features of a head."""
    width = 2 * features.num_pairs + len(features.unrotated)
    matrix = np.eye(width)
    for first, second, angle in zip(features.first, features.second, angles, strict=True):
        cos, sin = np.cos(angle * distance), np.sin(angle * distance)
        matrix[np.ix_((first, second), (first, second))] = [[cos, sin], [-sin, cos]]
    return matrix


def shared_scores(rotated=HEAD, interleaved=False, num_keys=1):
    features = HeadFeatures.of(HEAD, rotated, interleaved=interleaved)
    scores, (x, moment) = random_scores(), random_moment()
    made = in_shared_keys(scores, features, num_keys, moment)
    return scores, features, x, moment, made, of_shared_keys(features, HEAD, KV_HEADS // num_keys)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [6, 8])
def test_mixed_keys_have_the_same_scores_at_every_distance(rotated, interleaved):
    scores, features, _, _, made, wide = shared_scores(rotated, interleaved)
    assert made.k_GDI.shape == (1, KV_HEADS * HEAD, scores.k_GDI.shape[-1])
    angles = 0.5 ** np.arange(features.num_pairs)
    (q, k), (q_made, k_made) = features_of(scores), features_of(made)
    for distance in (0, 1, 7, 100):
        before = np.einsum("hdi,de,hej->hij", q, turned(features, angles, distance), k)
        after = np.einsum("hdi,de,hej->hij", q_made, turned(wide, np.tile(angles, KV_HEADS), distance), k_made)
        np.testing.assert_allclose(after, before, atol=1e-5 * np.abs(before).max())


@pytest.mark.slow
def test_the_first_mixture_is_the_largest_that_a_unitary_matrix_makes():
    """Its mean square, relative to queries of equal size, is the largest eigenvalue; nothing is lost in the sum."""
    scores, features, x, _, made, wide = shared_scores()
    (q, k), keys = (np.asarray(a, np.float64) for a in scores), np.asarray(made.k_GDI, np.float64)[0]
    for pair in range(features.num_pairs):
        both = [features.first[pair], features.second[pair]]
        sizes = np.array([np.sum((x @ q[2 * g : 2 * g + 2, both].reshape(4, -1).T) ** 2) for g in range(KV_HEADS)])
        weights = np.sqrt(sizes / sizes.mean())
        z = np.stack([x @ (k[g, both[0]] + 1j * k[g, both[1]]) * weights[g] for g in range(KV_HEADS)], axis=1)
        expected = np.linalg.eigvalsh(z.T @ z.conj() / len(x))[::-1]
        mine = [pair + j * features.num_pairs for j in range(KV_HEADS)]
        found = [np.mean((x @ keys[wide.first[p]]) ** 2 + (x @ keys[wide.second[p]]) ** 2) for p in mine]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_heads_with_the_same_keys_at_other_phases_need_one_mixture():
    """Heads that differ by a rotation of each pair: an orthogonal mixture alone would need two."""
    scores, features = random_scores(), HeadFeatures.of(HEAD, HEAD, interleaved=False)
    turn = jnp.asarray(turned(features, [0.3, 1.0, 1.5, 2.5], 1), jnp.float32)
    alike = Scores(scores.q_HDI, jnp.stack([scores.k_GDI[0], 3.0 * turn @ scores.k_GDI[0]]))
    _, moment = random_moment()
    keys = in_shared_keys(alike, features, 1, moment).k_GDI[0]
    sizes = np.einsum("di,ij,dj->d", *(np.asarray(a, np.float64) for a in (keys, moment, keys)))
    assert np.all(sizes[HEAD:] < 1e-6 * sizes[:HEAD].min())


@pytest.mark.slow
def test_queries_of_zero_make_no_infinite_keys():
    scores, features = random_scores(), HeadFeatures.of(HEAD, HEAD, interleaved=False)
    for heads in (slice(0, 2), slice(0, 4)):
        silent = Scores(scores.q_HDI.at[heads].set(0.0), scores.k_GDI)
        made = in_shared_keys(silent, features, 1, random_moment()[1])
        (q, k), (q_made, k_made) = features_of(silent), features_of(made)
        before = np.einsum("hdi,hdj->hij", q, k)
        np.testing.assert_allclose(np.einsum("hdi,hdj->hij", q_made, k_made), before, atol=1e-5 * np.abs(k).max())


@pytest.mark.slow
def test_semantic_features_of_a_shared_key_are_the_best_for_all_heads_together():
    _, _, x, moment, made, wide = shared_scores()
    pairs = largest_pairs(made, wide, moment, 2)
    lost, _ = lost_rotation(made, wide, pairs)
    q, k = features_of(lost)
    stacked = np.concatenate([x @ one.T @ other @ x.T for one, other in zip(q, k, strict=True)])
    singular = np.linalg.svd(stacked, compute_uv=False)
    for rank in (1, 4, 9):
        q_low, k_low = features_of(low_rank(lost, rank, second_root(moment)))
        change = np.concatenate([x @ a.T @ b @ x.T for a, b in zip(q_low, k_low, strict=True)]) - stacked
        assert np.sum(change**2) == pytest.approx(np.sum(singular[rank:] ** 2), rel=1e-3)


@pytest.mark.slow
def test_scores_have_the_size_that_they_have_in_separate_keys():
    """The denominator of both errors is the same, and without a cut there is none."""
    scores, features, _, moment, made, wide = shared_scores(6)
    angles, num_tokens = jnp.asarray(0.5 ** np.arange(features.num_pairs), jnp.float32), 64
    no_pairs, all_pairs = jnp.zeros((KV_HEADS, 0), jnp.int32), jnp.arange(wide.num_pairs)[None]
    lost, _ = lost_rotation(made, wide, all_pairs)
    before = score_errors(scores, features, no_pairs, scores, moment, angles, num_tokens)
    after = score_errors(made, wide, all_pairs, lost, moment, jnp.tile(angles, KV_HEADS), num_tokens)
    assert after.signal == pytest.approx(float(before.signal), rel=1e-4)
    assert max(after.unrotated, after.low_rank) < 1e-3 * before.signal


@pytest.mark.slow
@pytest.mark.parametrize("num_keys", one_of([2, 1]))
@pytest.mark.parametrize("config", one_of([WIDE, *EXACT.values()], but=3), ids=["four heads", *EXACT])
def test_as_many_features_as_all_heads_have_change_nothing(config, num_keys):
    model = built(config)
    shared, head = config.num_kv_heads // num_keys, config.hidden_dim // config.num_heads
    rotated = config.rope.num_rotated(head)
    sizes = {"sem_dim": config.num_heads * shared * (head - rotated), "geo_dim": config.num_heads * shared * rotated}
    surgery = DecoupleConfig(**sizes, method="transmla", num_key_heads=num_keys)
    new = student(surgery, model, calibration(surgery, model)[0])
    assert surgery.changed(config) == new.config
    assert new.body.layers.stacked.attn.k_geo.weight.axes[1].size == num_keys
    expected = logits(model, inputs())
    np.testing.assert_allclose(logits(new, inputs()), expected, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_as_many_shared_keys_as_heads_are_whitened_ones():
    model = built(dataclasses.replace(TEACHER, attention_bias=True))
    own = DecoupleConfig(sem_dim=8, geo_dim=16, method="whitened", calibration_batches=1)
    shared = dataclasses.replace(own, method="transmla", num_key_heads=KV_HEADS)
    sums, _ = calibration(own, model)
    expected = logits(student(own, model, sums), inputs())
    found = logits(student(shared, model, sums), inputs())
    np.testing.assert_allclose(found, expected, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_everything_but_queries_and_keys_is_the_teachers_and_errors_are_shown_by_layer():
    model = built(dataclasses.replace(TEACHER, attention_bias=True))
    surgery = DecoupleConfig(sem_dim=16, geo_dim=16, method="transmla", calibration_batches=1)
    sums, _ = calibration(surgery, model)
    old, made = dict(tree.leaves(model)), dict(tree.leaves(student(surgery, model, sums)))
    replaced = {path for path in made if any(part in path for part in ("q_sem", "k_sem", "q_geo", "k_geo", "pairs"))}
    for path in made.keys() - replaced:
        np.testing.assert_array_equal(made[path].array, old[path].array, err_msg=path)
    assert made["body.layers.stacked.attn.pairs"].array.shape == (3, 1, 2)
    assert int(made["body.layers.stacked.attn.pairs"].array.max()) < HEAD // 2
    table = surgery.describe(model, sums)
    errors = jax.jit(surgery.errors)(model, sums)
    assert (table.source, table.columns) == ("decouple", ("un-rotation", "rank"))
    expected = np.stack([errors.unrotated, errors.low_rank], 1) / np.asarray(errors.signal)[:, None]
    np.testing.assert_allclose(table.rows, expected, atol=1e-4)


@pytest.mark.slow
def test_eight_devices_and_one_make_the_same_keys():
    surgery = DecoupleConfig(sem_dim=16, geo_dim=32, method="transmla", calibration_batches=1)
    model = built(TEACHER)
    expected = logits(student(surgery, model, calibration(surgery, model)[0]), inputs())
    for meshes in (layout(), layout(model=2)):
        with meshes.use():
            sharded = jax.device_put(model, shardings(model, meshes))
            made = student(surgery, sharded, calibration(surgery, sharded)[0])
        found = logits(jax.device_get(made), inputs())
        np.testing.assert_allclose(found, expected, atol=1e-3 * float(jnp.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random", "fresh"])
def test_new_keys_may_be_shared_too(method):
    surgery = DecoupleConfig(sem_dim=16, geo_dim=16, method=method, num_key_heads=1)
    new = student(surgery, built(TEACHER))
    assert new.body.layers.stacked.attn.k_geo.weight.resolve_axis("key_heads") == hax.Axis("key_heads", 1)
    assert np.isfinite(logits(new, inputs())).all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"calibration_batches": 0}, "method: transmla given with calibration_batches: 0"),
        ({"num_key_heads": 4}, "num_key_heads: 4 given, which does not divide model.num_kv_heads = 2"),
        ({"geo_dim": 80}, "geo_dim: 80 given, 20 features.*frequencies for 8 .rotary_dim., 2 times because"),
    ],
)
def test_sizes_and_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=f"surgery decouple: {message}"):
        DecoupleConfig(**({"sem_dim": 16, "geo_dim": 16, "method": "transmla"} | keys)).changed(TEACHER)


def test_only_some_methods_share_keys():
    with pytest.raises(
        ConfigError,
        match=r"num_key_heads: 1 given without method: transmla or random or fresh, in which heads share keys, but",
    ):
        check_fields(DecoupleConfig(sem_dim=16, geo_dim=16, method="svd_joint", num_key_heads=1))
