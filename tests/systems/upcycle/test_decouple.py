"""Decoupled attention made of a teacher's, against the teacher, closed forms in float64, and a short training."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.engine.state import shardings
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mistral import MistralConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.phi3 import Phi3Config
from jaxlm.interop.hf.families.qwen2 import Qwen2Config
from jaxlm.interop.hf.families.qwen3 import Qwen3Config
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.rope import DefaultRotary, Llama3Rotary, YarnRotary
from jaxlm.systems.upcycle.bottleneck import (
    HeadFeatures,
    Scores,
    kept_rotation,
    largest_pairs,
    lost_rotation,
    low_rank,
    most_turned_pairs,
    score_errors,
    second_root,
)
from jaxlm.systems.upcycle.dba import DbaConfig
from jaxlm.systems.upcycle.decouple import DecoupleConfig
from tests.engine.helpers import layout
from tests.surgery.trained import nll, trained
from tests.tiers import one_of

SEQ_LEN, VOCAB = 24, vocab_axis(50)
SIZES = {
    "seq_len": SEQ_LEN,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.2,
}
TEACHER = LlamaConfig(**SIZES, rope=DefaultRotary(theta=100.0))
HEAD, HEADS, KV_HEADS, INPUTS = 8, 4, 2, 20


def inputs(positions=None, seed=0):
    axes = (hax.Axis("batch", 2), hax.Axis("position", SEQ_LEN))
    ids = np.random.default_rng(seed).integers(0, VOCAB.size, (2, SEQ_LEN))
    positions = np.tile(np.arange(SEQ_LEN), (2, 1)) if positions is None else positions
    return Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, positions, np.ones_like(ids))))


def with_random_biases(model, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda path, leaf: hax.named(jnp.asarray(rng.normal(0, 0.5, leaf.array.shape), jnp.float32), leaf.axes)  # noqa: E731
    return tree.map_leaves(lambda path, leaf: draw(path, leaf) if path.endswith("bias") else leaf, model)


@functools.cache
def built(config, seed=0):
    return with_random_biases(jax.jit(lambda key: config.build(VOCAB, key=key))(jax.random.key(seed)))


@jax.jit
def logits(model, read):
    return model.logits(model.hidden(read).final).rearrange(("batch", "position", "vocab")).array


def student(surgery, model, sums=None):
    made = jax.jit(lambda model: surgery.apply(model, key=jax.random.key(1)))(model)
    if sums is None:
        return made
    fill = jax.jit(lambda new, old, sums: surgery.fill(new, old, refs={}, sums=sums, key=jax.random.key(2)))
    return fill(made, model, sums)


def random_scores(seed=0):
    """Queries and keys of a layer whose inputs do not all matter alike."""
    rng = np.random.default_rng(seed)
    spectrum = np.geomspace(1.0, 0.01, INPUTS)
    q, k = (rng.normal(size=(heads, HEAD, INPUTS)) * spectrum for heads in (HEADS, KV_HEADS))
    return Scores(jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32))


def random_moment(seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(200, INPUTS)) @ rng.normal(size=(INPUTS, INPUTS)) + rng.normal(size=INPUTS)
    return x, jnp.asarray(x.T @ x / len(x), jnp.float32)


def products(scores):
    """The matrices W_q^T W_k of every query head, float64 [H, I, I]."""
    q, k = (np.asarray(a, np.float64) for a in scores)
    return np.einsum("hdi,hdj->hij", q, np.repeat(k, len(q) // len(k), axis=0))


EXACT = {
    "grouped": TEACHER,
    "biased": dataclasses.replace(TEACHER, attention_bias=True, mlp_bias=True),
    "part of the head rotates": dataclasses.replace(TEACHER, rope=DefaultRotary(100.0, partial_rotary_factor=0.5)),
    "scaled frequencies": dataclasses.replace(
        TEACHER, rope=Llama3Rotary(theta=100.0, factor=4.0, original_max_position_embeddings=16)
    ),
    "qwen2": Qwen2Config(**SIZES, rope=DefaultRotary(theta=100.0)),
    "phi3": Phi3Config(**SIZES, rope=DefaultRotary(theta=100.0)),
    "window": MistralConfig(**SIZES, sliding_window=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", one_of(EXACT.values(), but=4), ids=EXACT.keys())
def test_as_many_features_as_the_teacher_has_change_nothing(config):
    model = built(config)
    rotated = config.rope.num_rotated(HEAD)
    surgery = DecoupleConfig(sem_dim=HEADS * (HEAD - rotated), geo_dim=HEADS * rotated, method="exact")
    changed = surgery.changed(config)
    new = student(surgery, model)
    assert changed == new.config
    shape = jax.eval_shape(lambda: changed.build(VOCAB, key=jax.random.key(0)))
    assert jax.tree.structure(new) == jax.tree.structure(shape)
    np.testing.assert_allclose(logits(new, inputs()), logits(model, inputs()), atol=1e-4)


@pytest.mark.slow
def test_everything_but_queries_and_keys_is_the_teachers_to_the_bit():
    model = built(dataclasses.replace(TEACHER, attention_bias=True))
    new = student(DecoupleConfig(sem_dim=16, geo_dim=16, calibration_batches=0), model)
    old, made = dict(tree.leaves(model)), dict(tree.leaves(new))
    replaced = {path for path in made if any(part in path for part in ("q_sem", "k_sem", "q_geo", "k_geo", "pairs"))}
    assert {path for path in old if ".q_proj" not in path and ".k_proj" not in path} == made.keys() - replaced
    for path in made.keys() - replaced:
        np.testing.assert_array_equal(made[path].array, old[path].array, err_msg=path)


@pytest.mark.slow
def test_with_enough_semantic_features_scores_are_those_of_a_teacher_that_rotates_fewer_pairs():
    """Rotation is lost, but nothing else."""
    scores, features = random_scores(), HeadFeatures.of(HEAD, HEAD, interleaved=False)
    pairs = largest_pairs(scores, features, jnp.eye(INPUTS), 2)
    lost, _ = lost_rotation(scores, features, pairs)
    made = low_rank(lost, 4, None)
    q, k = (np.asarray(a, np.float64) for a in scores)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        rest = [f for f in range(HEAD) if f % (HEAD // 2) not in np.asarray(pairs[group])]
        expected = q[head, rest].T @ k[group, rest]
        np.testing.assert_allclose(products(made)[head], expected, atol=1e-5 * np.abs(expected).max())
    kept = kept_rotation(scores, features, pairs)
    whole = products(kept) + products(lost)
    np.testing.assert_allclose(whole, products(scores), atol=1e-5 * np.abs(whole).max())


@pytest.mark.slow
def test_features_that_lose_their_rotation_keep_its_amplitude():
    """All but the first pair hardly turn, so with full rank the student computes what the teacher does."""
    rope = YarnRotary(theta=1e16, factor=4.0, original_max_position_embeddings=16, attention_factor=1.5)
    model = built(dataclasses.replace(TEACHER, rope=rope))
    new = student(DecoupleConfig(sem_dim=24, geo_dim=8, calibration_batches=0), model)
    expected = logits(model, inputs())
    np.testing.assert_allclose(logits(new, inputs()), expected, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_the_cut_leaves_the_smallest_singular_values():
    """Eckart and Young: the squared error of a group is the sum of the squared singular values beyond the rank."""
    scores = random_scores()
    q, k = (np.asarray(a, np.float64) for a in scores)
    errors = []
    for rank in (1, 3, 6, HEAD):
        change = products(low_rank(scores, rank, None)) - products(scores)
        for group in range(KV_HEADS):
            members = slice(group * HEADS // KV_HEADS, (group + 1) * HEADS // KV_HEADS)
            stacked = np.concatenate([head.T @ k[group] for head in q[members]])
            beyond = np.linalg.svd(stacked, compute_uv=False)[rank:]
            total = np.sum(np.linalg.svd(stacked, compute_uv=False) ** 2)
            np.testing.assert_allclose(np.sum(change[members] ** 2), np.sum(beyond**2), atol=1e-4 * total, rtol=1e-4)
        errors.append(np.sum(change**2))
    assert np.all(np.diff(errors) <= 1e-9)


@pytest.mark.slow
def test_whitened_scores_have_the_smallest_error_on_the_data():
    scores, (x, moment) = random_scores(), random_moment()
    root, inverse = second_root(moment)
    np.testing.assert_allclose(root @ root.T, moment, atol=1e-4 * float(jnp.abs(moment).max()))
    q, k = (np.asarray(a, np.float64) for a in scores)
    for rank in (1, 3, 6):
        on_data = [
            np.sum((x @ (products(low_rank(scores, rank, by)) - products(scores)) @ x.T) ** 2)
            for by in ((root, inverse), None)
        ]
        optimum = 0.0
        for group in range(KV_HEADS):
            members = q[group * HEADS // KV_HEADS : (group + 1) * HEADS // KV_HEADS]
            stacked = np.concatenate([x @ head.T @ k[group] @ x.T for head in members])
            optimum += np.sum(np.linalg.svd(stacked, compute_uv=False)[rank:] ** 2)
        assert on_data[0] == pytest.approx(optimum, rel=1e-3)
        assert on_data[0] < on_data[1]


@pytest.mark.slow
def test_the_pairs_that_contribute_most_are_kept():
    scores, features = random_scores(), HeadFeatures.of(HEAD, HEAD, interleaved=False)
    louder = scores.k_GDI.at[0, jnp.array([1, 5])].mul(30.0).at[1, jnp.array([3, 7])].mul(30.0)
    pairs = largest_pairs(Scores(scores.q_HDI, louder), features, jnp.eye(INPUTS), 1)
    assert pairs.tolist() == [[1], [3]]
    # Only inputs in one direction occur: the features that read it are those that matter.
    read = jnp.zeros((HEAD, INPUTS)).at[jnp.array([2, 6]), 0].set(1.0)
    reading = Scores(scores.q_HDI.at[:, :, 0].set(read[:, 0]), scores.k_GDI.at[:, :, 0].set(read[:, 0]))
    moment = jnp.zeros((INPUTS, INPUTS)).at[0, 0].set(1.0)
    assert largest_pairs(reading, features, moment, 1).tolist() == [[2], [2]]


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_both_errors_are_those_of_sampled_scores(interleaved):
    """Against scores of sampled tokens that numpy rotates, at every distance of a causal row."""
    num_tokens, rotated = 64, 6
    scores, (x, moment) = random_scores(), random_moment()
    features = HeadFeatures.of(HEAD, rotated, interleaved=interleaved)
    angles = 0.5 ** np.arange(features.num_pairs)
    pairs = largest_pairs(scores, features, moment, 1)
    lost, _ = lost_rotation(scores, features, pairs)
    sem = low_rank(lost, 3, None)
    measured = score_errors(scores, features, pairs, sem, moment, jnp.asarray(angles, jnp.float32), num_tokens)

    def rotation(distance, chosen):
        matrix = np.eye(HEAD)
        for pair in chosen:
            f, s, angle = features.first[pair], features.second[pair], -angles[pair] * distance
            matrix[np.ix_((f, s), (f, s))] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        return matrix

    q, k = (np.asarray(a, np.float64) for a in scores)
    signal, unrotated, weights = [], [], []
    for distance in range(num_tokens):
        whole, change = [], []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            full, partial = rotation(distance, range(features.num_pairs)), rotation(distance, np.asarray(pairs[group]))
            whole.append(x @ q[head].T @ full @ k[group] @ x.T)
            change.append(x @ q[head].T @ (full - partial) @ k[group] @ x.T)
        signal.append(np.mean(np.square(whole)))
        unrotated.append(np.mean(np.square(change)))
        weights.append(num_tokens - distance)
    cut = x @ (products(sem) - products(lost)) @ x.T
    assert measured.signal == pytest.approx(np.sqrt(np.average(signal, weights=weights)), rel=0.03)
    assert measured.unrotated == pytest.approx(np.sqrt(np.average(unrotated, weights=weights)), rel=0.03)
    assert measured.low_rank == pytest.approx(np.sqrt(np.mean(np.square(cut))), rel=1e-3)


@pytest.mark.slow
def test_both_rules_choose_the_pairs_that_they_promise():
    """A pair that does not turn within the row is loud, another turns and is quiet; angles are exact in float64."""
    features, num_tokens = HeadFeatures.of(HEAD, HEAD, interleaved=False), 64
    (x, moment), scores = random_moment(), random_scores()
    louder = Scores(*(w.at[:, jnp.array([3, 7])].mul(3.0) for w in scores))
    angles = np.array([1.0, 0.3, 0.1, 1e-5])
    assert largest_pairs(louder, features, moment, 1).tolist() == [[3], [3]]
    chosen = most_turned_pairs(louder, features, moment, jnp.asarray(angles, jnp.float32), num_tokens, 1)
    q, k = (np.asarray(a, np.float64) for a in louder)
    changes = np.zeros((KV_HEADS, 4))
    for pair in range(4):
        rows = [pair, pair + 4]
        for distance in range(num_tokens):
            cos, sin = np.cos(angles[pair] * distance), np.sin(angles[pair] * distance)
            change = np.array([[cos - 1, sin], [-sin, cos - 1]])
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                score = x @ q[head, rows].T @ change @ k[group, rows] @ x.T
                changes[group, pair] += (num_tokens - distance) * np.mean(score**2)
    assert chosen[:, 0].tolist() == np.argmax(changes, axis=1).tolist()
    assert 3 not in chosen.ravel().tolist()


REFUSED = {
    "its queries and keys have norms": Qwen3Config(**SIZES),
    "not all of the same kind, with a gate and without experts": MixtralConfig(**SIZES),
    "a model of type gemma2 given": Gemma2Config(**{**SIZES, "num_layers": 2}),
    "a model of type dba given, but its attention is DecoupledAttention": DbaConfig(**SIZES, sem_dim=16, geo_dim=16),
    "geo_dim: 12 given, so each of 4 heads has 3": TEACHER,
    "method: exact given, but the model has 8 rotated and 0 other features": TEACHER,
    "method: whitened given with calibration_batches: 0": TEACHER,
    "sem_dim: 10 given, which cannot be divided among 4 heads": TEACHER,
}
KEYS = {
    "geo_dim: 12": {"geo_dim": 12},
    "method: exact": {"method": "exact"},
    "method: whitened": {"method": "whitened", "calibration_batches": 0},
    "sem_dim": {"sem_dim": 10},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_decoupled_is_refused_with_the_reason(message):
    keys = next((keys for start, keys in KEYS.items() if message.startswith(start)), {})
    with pytest.raises(ConfigError, match="surgery decouple: ") as error:
        DecoupleConfig(**({"sem_dim": 16, "geo_dim": 16} | keys)).changed(REFUSED[message])
    assert message in str(error.value)


def calibration(surgery, model, seed=0):
    """What `measure` gives for tokens of which a few are frequent, as in text."""
    rng = np.random.default_rng(seed)
    axes = (hax.Axis("batch", 8), hax.Axis("position", SEQ_LEN))
    ids = np.minimum(rng.geometric(0.15, (8, SEQ_LEN)) - 1, VOCAB.size - 1)
    columns = (ids, np.tile(np.arange(SEQ_LEN), (8, 1)), np.ones_like(ids))
    tokens, positions, segments = (hax.named(jnp.asarray(a, jnp.int32), axes) for a in columns)
    mask = hax.ones(axes)
    batch = TokenBatch(tokens=tokens, targets=tokens, loss_mask=mask, positions=positions, segment_ids=segments)
    return jax.jit(surgery.measure)(model, batch), Inputs(tokens, positions, segments)


@pytest.mark.slow
def test_measured_inputs_choose_pairs_and_approximation():
    """The pairs of the first layer are those with the largest queries and keys of the tokens, in numpy; an approximation for
    the data has a smaller error on it in every layer."""
    model = built(dataclasses.replace(TEACHER, attention_bias=True))
    joint, whitened = (
        DecoupleConfig(sem_dim=8, geo_dim=8, method=method, pairs="contribution", calibration_batches=1)
        for method in ("svd_joint", "whitened")
    )
    sums, read = calibration(joint, model)
    attention = model.body.layers.stacked.attn
    x = np.asarray(model.tokens.weight.array, np.float64)[np.asarray(read.tokens.array)].reshape(
        -1, SIZES["hidden_dim"]
    )
    x /= np.sqrt(np.mean(x**2, axis=1, keepdims=True) + TEACHER.layer_norm_epsilon)
    sizes = []
    for layer in (attention.q_proj, attention.k_proj):
        features = np.einsum("nhde,te->tnhd", layer.weight.array, x)[:, 0] + layer.bias.array[0]
        sizes.append(np.sqrt(np.mean(features[..., :4] ** 2 + features[..., 4:] ** 2, axis=0)))
    expected = np.argmax(sizes[0].reshape(KV_HEADS, -1, 4).sum(axis=1) * sizes[1], axis=1)
    made = student(joint, model, sums).body.layers.stacked.attn.pairs
    assert made.array[0, :, 0].tolist() == expected.tolist()
    errors = [jax.jit(surgery.errors)(model, sums) for surgery in (whitened, joint)]
    assert np.all(np.asarray(errors[0].low_rank) < np.asarray(errors[1].low_rank))
    np.testing.assert_array_equal(errors[0].unrotated, errors[1].unrotated)  # the same pairs
    table = whitened.describe(model, sums)
    assert (table.source, table.columns) == ("decouple", ("un-rotation", "rank"))
    assert "over 192 tokens" in table.title
    np.testing.assert_allclose(
        table.rows, np.stack([errors[0].unrotated, errors[0].low_rank], 1) / errors[0].signal[:, None], atol=1e-4
    )


@pytest.mark.slow
def test_eight_devices_and_one_make_the_same_student():
    surgery = DecoupleConfig(sem_dim=8, geo_dim=16, method="whitened", calibration_batches=1)
    model = built(TEACHER)
    whole = student(surgery, model, calibration(surgery, model)[0])
    meshes = layout()
    with meshes.use():
        sharded = jax.device_put(model, shardings(model, meshes))
        made = student(surgery, sharded, calibration(surgery, sharded)[0])
    expected = logits(whole, inputs())
    np.testing.assert_allclose(
        logits(jax.device_get(made), inputs()), expected, atol=1e-3 * float(jnp.abs(expected).max())
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_right_after_depends_on_where_queries_and_keys_come_from(seed):
    """On a teacher that has learned Python's source: joint decompositions keep most of it, separate ones nothing."""
    config = dataclasses.replace(TEACHER, **SIZES | {"seq_len": 64, "hidden_dim": 64, "initializer_range": 0.1})
    teacher, batch, held_out = trained(config, seed)
    losses = {"teacher": float(nll(teacher, held_out))}
    assert losses["teacher"] < 2.6  # 4.85 before
    sizes = {
        "exact": {"sem_dim": 0, "geo_dim": 64},
        "transmla": {"sem_dim": 32, "geo_dim": 32},
    }  # one key instead of two
    for method in ("exact", "transmla", "whitened", "svd_joint", "svd_independent", "random", "fresh"):
        of_method = sizes.get(method, {"sem_dim": 16, "geo_dim": 16})
        surgery = DecoupleConfig(**of_method, method=method, calibration_batches=1)
        sums = jax.jit(surgery.measure)(teacher, batch()) if surgery.wants.num_batches else None
        losses[method] = float(nll(student(surgery, teacher, sums), held_out))
    assert losses["exact"] == pytest.approx(losses["teacher"], abs=1e-5)
    assert losses["whitened"] < min(losses[m] for m in ("svd_independent", "random", "fresh"))
    assert losses["svd_joint"] < min(losses[m] for m in ("svd_independent", "random", "fresh"))
    assert losses["transmla"] < losses["whitened"]
