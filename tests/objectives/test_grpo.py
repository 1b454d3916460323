"""The objective `grpo`: advantages, losses and averages against float64 vectors, its terms against the model's logits."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.config.decode import decode
from jaxlm.config.run import RunConfig
from jaxlm.config.yaml import ConfigSource
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.types import GroupBatch, Largest, Sum
from jaxlm.objectives.completions import ReferenceLogps
from jaxlm.objectives.grpo import Grpo
from jaxlm.objectives.policy_losses import (
    KL_ESTIMATORS,
    average_weight,
    cispo_losses,
    clip_fractions,
    clipped_losses,
    group_advantages,
    log_ratios,
    overlong_penalties,
    sampler_weights,
    sapo_losses,
    token_weights,
    vespo_losses,
)
from tests.objectives.test_dpo import VOCAB, logits_of_one, random_model, target_logps

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "post_training.json").read_text())
SLOW = pytest.mark.slow
POLICY = {k: np.array(v, np.float64) for k, v in VECTORS["policy"].items() if isinstance(v, list)}
LOGPS, OLD, REFERENCE, MASK, ADVANTAGES = (POLICY[k] for k in ("logps", "old", "reference", "mask", "advantages"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("group_ddof0_1e-8", {}),
        ("group_ddof1_1e-4", {"std_ddof": 1, "eps": 1e-4}),
        ("group_ddof1_1e-6", {"std_ddof": 1, "eps": 1e-6}),
        ("none", {"scale": "none"}),
        ("rloo", {"scale": "none", "baseline": "leave_one_out"}),
    ],
)
def test_advantages_match_the_vectors(name, options):
    found = group_advantages(jnp.float32(VECTORS["advantages"]["rewards"]), **options)
    np.testing.assert_allclose(found, VECTORS["advantages"][name], rtol=1e-6, atol=1e-6)


def test_equal_rewards_have_no_advantage_although_their_mean_is_rounded():
    rewards = jnp.full((50, 3), 0.1) * jnp.arange(1, 51)[:, None]
    assert np.any(np.asarray(rewards) != np.asarray(jnp.mean(rewards, axis=-1, keepdims=True)))
    np.testing.assert_array_equal(group_advantages(rewards), 0)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Responses with advantages of 1 and -1 nearly cancel. In float32, their sum has no 6 digits."""
    with jax.enable_x64(True):
        yield


def averaged(losses, average, max_response_tokens=None):
    weight = average_weight(MASK, average, max_response_tokens)
    return float(jnp.sum(losses * token_weights(MASK, average)) / weight)


def loss_of(logps=LOGPS, average="token_mean", length=None, *, old=OLD, level="token", high=0.2, dual=None, **kl):
    """The loss as the objective puts it together. kl: estimator=coefficient."""
    losses = clipped_losses(log_ratios(logps, old, MASK, level), ADVANTAGES, 0.2, high, dual)
    for name, coefficient in kl.items():
        losses += coefficient * KL_ESTIMATORS[name](log_ratios(logps, REFERENCE, MASK, level))
    return averaged(losses, average, length)


@pytest.mark.usefixtures("in_float64")
def test_losses_match_the_vectors():
    louder = LOGPS.copy()
    louder[1, 0] = 0.5
    found = {
        "token_mean": loss_of(),
        "token_mean_k3_0.01": loss_of(k3=0.01),
        "token_mean_k3_0.04": loss_of(k3=0.04),
        "seq_mean_token_mean": loss_of(average="seq_mean_token_mean"),
        "seq_mean_token_mean_k3_0.01": loss_of(average="seq_mean_token_mean", k3=0.01),
        "seq_mean_token_sum": loss_of(average="seq_mean_token_sum"),
        "dr_grpo_4": loss_of(average="dr_grpo", length=4),
        "dr_grpo_4_k3_0.01": loss_of(average="dr_grpo", length=4, k3=0.01),
        "clip_higher_0.28": loss_of(high=0.28),
        "ratio_to_reference_squared_0.01": loss_of(old=REFERENCE, squared=0.01),
        "per_sequence_ratio_to_reference_squared_0.01": loss_of(
            old=REFERENCE, level="sequence", average="seq_mean_token_mean", squared=0.01
        ),
        "cispo_5": averaged(cispo_losses(log_ratios(LOGPS, OLD, MASK, "token"), LOGPS, ADVANTAGES, 5.0), "token_mean"),
    }
    assert found == pytest.approx({name: VECTORS["policy"][name] for name in found}, rel=2e-6, abs=1e-7)
    kl = {
        name: averaged(kl(log_ratios(LOGPS, REFERENCE, MASK, "token")), "token_mean")
        for name, kl in KL_ESTIMATORS.items()
    }
    assert kl == pytest.approx(VECTORS["policy"]["kl"], rel=1e-5)
    dual = VECTORS["policy"]["dual_clip_3"]
    assert loss_of(louder) == pytest.approx(dual["without"], rel=1e-6)
    assert loss_of(louder, dual=3.0) == pytest.approx(dual["with"], rel=1e-6)


@pytest.mark.usefixtures("in_float64")
def test_ratios_of_sequences_and_clip_fractions_match_the_vectors():
    gspo = VECTORS["policy"]["gspo"]
    ratios = log_ratios(LOGPS, OLD, MASK, "sequence")
    np.testing.assert_allclose(np.exp(ratios[:, 0]), gspo["ratio"], rtol=1e-6)
    assert loss_of(level="sequence", average="seq_mean_token_mean") == pytest.approx(gspo["loss"], rel=1e-6)
    low, high = clip_fractions(log_ratios(LOGPS, OLD, MASK, "token"), ADVANTAGES, 0.2, 0.2)
    fractions = {"low": averaged(low, "token_mean"), "high": averaged(high, "token_mean")}
    assert fractions == pytest.approx(VECTORS["policy"]["clip_fraction"])


def test_truncated_importance_weights_and_overlong_penalties_match_the_vectors():
    tis = VECTORS["policy"]["truncated_importance"]
    sampler = jnp.float32(tis["sampler"])
    found = sampler_weights(OLD, sampler, MASK, "token_truncate", 0.0, tis["cap"])
    np.testing.assert_allclose(found, tis["weights"], rtol=1e-5)
    total = lambda logps: sampler_weights(logps, sampler, MASK, "token_truncate", 0.0, tis["cap"]).sum()  # noqa: E731
    assert not jax.grad(total)(LOGPS).any()
    overlong = json.loads((Path(__file__).parents[1] / "vectors" / "rollouts.json").read_text())["overlong"]
    found = overlong_penalties(jnp.array(overlong["lengths"]), overlong["max_tokens"], overlong["cache"])
    np.testing.assert_array_equal(found, np.float32(overlong["penalties"]))


def test_gradients_match_the_vectors():
    def loss(logps, old):
        losses = clipped_losses(log_ratios(logps, old, MASK, "token"), ADVANTAGES, 0.2, 0.2)
        return jnp.sum(losses * MASK) / jnp.sum(MASK)

    np.testing.assert_allclose(jax.grad(loss)(LOGPS, OLD), VECTORS["policy"]["gradient"], rtol=1e-6, atol=1e-8)
    on_policy = VECTORS["policy"]["on_policy"]
    assert float(loss(LOGPS, LOGPS)) == pytest.approx(on_policy["loss"], rel=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(LOGPS, LOGPS), on_policy["gradient"], rtol=1e-6, atol=1e-8)
    assert float(jax.grad(KL_ESTIMATORS["k3"])(0.0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "share"), [(3, 2 / 3), *(pytest.param(*case, marks=SLOW) for case in ((2, 0.5), (4, 0.75)))]
)
def test_the_expected_gradient_is_that_of_the_expected_reward(size, share):
    """Over all groups of one-token responses: exactly with RLOO, and (G - 1) / G of it with the mean as the baseline."""
    theta, rewards = jnp.array([0.3, -0.2, 0.5]), np.array([1.0, 0.0, 0.25])
    groups = np.array(list(itertools.product(range(3), repeat=size)))
    expected = jax.grad(lambda t: jnp.dot(jax.nn.softmax(t), rewards))(theta)
    np.testing.assert_allclose(expected, [0.1903893, -0.0990015, -0.0913878], rtol=1e-5)
    chance = np.prod(np.asarray(jax.nn.softmax(theta))[groups], axis=1)
    for baseline, factor in (("mean", share), ("leave_one_out", 1.0)):
        advantages = group_advantages(jnp.float32(rewards[groups]), scale="none", baseline=baseline)

        def loss(t, advantages=advantages):
            logps = jax.nn.log_softmax(t)[groups].reshape(-1, 1)
            ones = jnp.ones_like(logps)
            ratios = log_ratios(logps, jax.lax.stop_gradient(logps), ones, "token")
            of_groups = clipped_losses(ratios, advantages.reshape(-1), 0.2, 0.2).reshape(groups.shape).mean(axis=1)
            return jnp.dot(of_groups, chance)

        np.testing.assert_allclose(-jax.grad(loss)(theta), factor * expected, rtol=2e-5)


def a_batch(groups=3, size=4, length=12, seed=0):
    """Responses of unequal lengths after prompts of three tokens; the last group is padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (groups, size, length + 1))
    end = 5 + np.arange(groups * size).reshape(groups, size) % (length - 4)
    at = np.arange(length)
    inside = at < end[..., None]
    mask = (at >= 2) & (at + 1 < end[..., None])
    mask[-1] = False
    columns = {
        "tokens": ids[..., :-1] * inside,
        "targets": ids[..., 1:] * inside,
        "loss_mask": mask.astype(np.float32),
        "segment_ids": inside.astype(np.int32),
        "positions": at * inside,
    }
    columns = {k: v.astype(np.float32 if k == "loss_mask" else np.int32) for k, v in columns.items()}
    rewards = rng.integers(0, 3, (groups, size)).astype(np.float32)
    axes = (Axis("batch", groups), Axis("group", size), Axis("position", length))
    named = {name: hax.named(jnp.asarray(column), axes) for name, column in columns.items()}
    return columns, rewards, GroupBatch.of(hax.named(rewards, axes[:2]), **named)


@pytest.fixture(scope="module")
def case():
    """A model, a reference, a batch, and the log-likelihoods [N, S] under both."""
    models = random_model(0), random_model(1)
    columns, rewards, batch = a_batch()
    return *models, columns, rewards, batch, [target_logps(model, columns).reshape(12, -1) for model in models]


def test_responses_that_are_left_out_of_the_loss_keep_their_kl_in_the_advantages_of_others(case):
    """The loss with the advantages of all responses, given as a column."""
    model, reference, columns, rewards, batch, _ = case
    sampler, of_reference = (
        hax.named(jnp.asarray(target_logps(m, columns).reshape(columns["tokens"].shape)), batch.responses.tokens.axes)
        for m in (random_model(2), reference)
    )
    finished = np.ones(rewards.shape, np.float32)
    finished[0, 1] = finished[1, 2] = 0
    batch = replace(
        batch,
        sampler_logps=sampler,
        annotations=ReferenceLogps(of_reference),
        finished=hax.named(jnp.asarray(finished), batch.rewards.axes),
    )
    kl = np.sum((sampler.array - of_reference.array) * columns["loss_mask"], axis=-1)
    shaped = rewards - 0.5 * kl
    centered = shaped - shaped.mean(axis=1, keepdims=True)
    known = replace(batch, advantages=hax.named(jnp.asarray(centered), batch.rewards.axes))
    options = {"old_policy": "rollout", "scale": "none", "mask_truncated": True}
    losses = []
    for given, keys in (
        (batch, {"kl_coef": 0.5, "kl_estimator": "k1", "kl_in_reward": True}),
        (known, {"kl_coef": 0.0}),
    ):
        objective = Grpo(**options, **keys)
        losses.append(float(objective.terms(model, given, objective.init_slot(model), key=None)[0]["loss"].total))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_eps": 0.15, "clip_eps_high": 0.28, "dual_clip": 2.0, "std_ddof": 1, "eps": 1e-4, "kl_coef": 0.04},
        {
            "importance": "sequence",
            "kl_level": "sequence",
            "kl_estimator": "squared",
            "loss_agg": "seq_mean_token_mean",
        },
        pytest.param(
            {"policy_loss": "cispo", "cispo_cap": 1.5, "loss_agg": "dr_grpo", "max_response_tokens": 9, "kl_coef": 0.0},
            marks=SLOW,
        ),
        pytest.param(
            {"policy_loss": "sapo", "sapo_positive_temperature": 0.8, "sapo_negative_temperature": 1.3, "kl_coef": 0.0},
            marks=SLOW,
        ),
        pytest.param(
            {"old_policy": "model", "scale": "none", "baseline": "leave_one_out", "loss_agg": "seq_mean_token_sum"},
            marks=SLOW,
        ),
    ],
)
def test_terms_and_metrics_match_the_logits(case, options):
    model, reference, columns, rewards, batch, logps = case
    objective = Grpo(**options)
    slot = objective.init_slot(reference)
    asked = objective.annotate(objective.references_in_slot(slot, model), batch)
    terms, metrics, _ = objective.terms(model, asked, slot, key=None)
    weights = objective.weights(batch)

    mask = columns["loss_mask"].reshape(12, -1).astype(np.float64)[:8]  # the last group is padding
    ours, theirs = (each[:8] for each in logps)
    centered = rewards[:2] - rewards[:2].mean(1, keepdims=True)
    std = np.sqrt((centered**2).sum(1) / (4 - objective.std_ddof))
    scaled = centered / (std[:, None] + objective.eps) if objective.scale == "group" else centered * 4 / 3
    a = scaled.reshape(-1, 1)
    lengths = mask.sum(1, keepdims=True)
    per_sequence = lambda d: (d * mask).sum(1, keepdims=True) / lengths + 0 * d  # noqa: E731
    d = ours - (ours if objective.old_policy == "model" else theirs)
    ratio = np.exp(per_sequence(d) if objective.importance == "sequence" else d)
    low, high = objective.limits
    losses = -np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    if objective.dual_clip:
        losses = np.where(a < 0, np.minimum(losses, -objective.dual_clip * a), losses)
    if objective.policy_loss == "cispo":
        losses = -np.minimum(ratio, objective.cispo_cap) * a * ours
    if objective.policy_loss == "sapo":
        tau = np.where(a > 0, objective.sapo_positive_temperature, objective.sapo_negative_temperature)
        losses = -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    k = per_sequence(ours - theirs) if objective.kl_level == "sequence" else ours - theirs
    kl = k**2 if objective.kl_estimator == "squared" else np.exp(-k) + k - 1
    mean = {
        "token_mean": lambda x: (x * mask).sum() / mask.sum(),
        "seq_mean_token_mean": lambda x: ((x * mask).sum(1) / lengths[:, 0]).mean(),
        "seq_mean_token_sum": lambda x: (x * mask).sum(1).mean(),
        "dr_grpo": lambda x: (x * mask).sum() / (8 * 9),
    }[objective.loss_agg]
    expected = {"loss": mean(losses)} | ({"kl": objective.kl_coef * mean(kl)} if objective.kl_coef else {})
    assert {name: float(term.total / weights[name]) for name, term in terms.items()} == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )
    expected = {
        "loss": mean(losses),
        "reward": rewards[:2].mean(),
        "reward_std": std.mean(),
        "entropy": (entropies(model, columns) * mask).sum() / mask.sum(),
        "frac_reward_zero_std": (std == 0).mean(),
        "completions/mean_length": lengths.mean(),
    }
    if objective.kl_coef:
        expected["kl"] = (kl * mask).sum() / mask.sum()
    if objective.policy_loss == "clip":
        counts = mask / lengths if objective.importance == "sequence" else mask
        clipped = [((ratio < 1 - low) & (a < 0)) * counts, ((ratio > 1 + high) & (a > 0)) * counts]
        names = ("clip_ratio/low_mean", "clip_ratio/high_mean")
        expected |= {name: c.sum() / counts.sum() for name, c in zip(names, clipped, strict=True)}
    assert {name: float(metric.mean()) for name, metric in metrics.items()} == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )


def entropies(model, columns, temperature=1.0):
    """[8, S]: of the prediction of each target, from all logits."""
    names = ("tokens", "positions", "segment_ids")
    rows = [logits_of_one(model, *(columns[name][row] for name in names)) for row in np.ndindex(2, 4)]
    log_p = np.asarray(jax.nn.log_softmax(np.asarray(rows, np.float64) / temperature, axis=-1), np.float64)
    return -(np.exp(log_p) * log_p).sum(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"old_policy": "rollout", "kl_coef": 0.0, "overlong_cache": 3, "max_response_tokens": 8},
        pytest.param({"old_policy": "model", "kl_coef": 0.0, "tis_cap": 1.1, "loss_agg": "dr_grpo"}, marks=SLOW),
    ],
    ids=lambda options: options["old_policy"],
)
def test_terms_on_what_a_sampler_has_recorded(case, options):
    """At a temperature of 0.7, with a sampler whose probabilities are not quite ours."""
    model, _, columns, rewards, batch, _ = case
    objective = Grpo(**{"max_response_tokens": 8} | options)
    rng, mask = np.random.default_rng(3), columns["loss_mask"].reshape(12, -1).astype(np.float64)[:8]
    names = ("tokens", "positions", "segment_ids")
    logits = np.asarray([logits_of_one(model, *(columns[name][row] for name in names)) for row in np.ndindex(2, 4)])
    log_p = np.asarray(jax.nn.log_softmax(logits / 0.7, axis=-1), np.float64)
    ours = np.take_along_axis(log_p, columns["targets"].reshape(12, -1)[:8, :, None], axis=-1)[..., 0]
    sampler = ours + 0.2 * rng.normal(size=ours.shape)
    recorded = np.zeros((12, mask.shape[1]), np.float32)
    recorded[:8] = sampler * mask
    axes = batch.responses.tokens.axes
    batch = replace(batch, sampler_logps=hax.named(jnp.asarray(recorded.reshape(3, 4, -1)), axes), temperature=0.7)
    terms, metrics, _ = objective.terms(model, batch, None, key=None)

    shaped = rewards[:2].astype(np.float64)
    if objective.overlong_cache:
        shaped += np.clip((8 - 3 - mask.sum(1)) / 3, -1, 0).reshape(2, 4)
        assert np.any(shaped != rewards[:2])
    a = (shaped - shaped.mean(1, keepdims=True)) / (shaped.std(1, keepdims=True) + 1e-8)
    a = a.reshape(-1, 1)
    ratio = np.exp(ours - sampler)
    if objective.old_policy == "rollout":
        losses = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
        expected = (losses * mask).sum() / mask.sum()
    else:
        expected = (-np.minimum(ratio, 1.1) * a * mask).sum() / (8 * 8)
    found = {name: float(metric.logged()) for name, metric in metrics.items()}
    assert float(terms["loss"].total / objective.weights(batch)["loss"]) == pytest.approx(expected, rel=1e-4)
    difference = np.abs(ours - sampler) * mask
    assert found["sampling/logp_diff_mean"] == pytest.approx(difference.sum() / mask.sum(), rel=1e-4)
    assert found["sampling/logp_diff_max"] == pytest.approx(difference.max(), rel=1e-4)
    assert found["reward"] == pytest.approx(rewards[:2].mean())
    assert found["entropy"] == pytest.approx((entropies(model, columns, 0.7) * mask).sum() / mask.sum(), rel=1e-4)
    assert ("overlong_penalty" in found) == bool(objective.overlong_cache)


def test_responses_of_a_filtered_distribution_are_corrected_for():
    batch = GroupBatch.of(
        None, samples_all=False, **dict.fromkeys(("tokens", "targets", "loss_mask", "segment_ids", "positions"))
    )
    for corrected in ({"old_policy": "rollout"}, {"old_policy": "model", "tis_cap": 2.0}):
        Grpo(kl_coef=0.0, **corrected).check_batch(batch)
    with pytest.raises(
        ConfigError, match=r"objective\.old_policy: model given, but data\.top_k, .* Set objective\.tis_cap"
    ):
        Grpo(kl_coef=0.0, old_policy="model").check_batch(batch)


@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({"old_policy": "rollout"}, (), r"objective\.old_policy: rollout given, but the data does not record"),
        ({"old_policy": "model", "tis_cap": 2.0}, (), r"objective\.tis_cap: 2\.0 given, but the data does not record"),
        (
            {"old_policy": "model", "off_policy_threshold": 0.1},
            (),
            r"objective\.off_policy_threshold: 0\.1 given, but the data does not record",
        ),
        (
            {"mask_truncated": True},
            (),
            r"objective\.mask_truncated: True given, but the data does not record which responses",
        ),
        (
            {"aggregation": "normalize_then_sum"},
            (),
            r"objective\.aggregation: normalize_then_sum given, but the data does not record the rewards that",
        ),
        ({}, ("sampler_logps",), r"objective\.old_policy: reference given, but the model that trains samples"),
        (
            {"old_policy": "rollout", "reference": "base", "cache": True},
            ("sampler_logps",),
            r"objective\.cache: true given, but the responses are sampled during training",
        ),
    ],
)
def test_objectives_that_do_not_suit_the_data_are_refused(options, columns, message):
    with pytest.raises(ConfigError, match=message):
        Grpo(**options).check_columns(columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlong_cache": 4}, r"objective\.max_response_tokens: missing\. overlong_cache is counted from it"),
        (
            {"overlong_cache": 9, "max_response_tokens": 8},
            r"objective\.overlong_cache: 9 given, at most max_response_tokens \(8\)",
        ),
        ({"tis_floor": 0.5}, r"objective\.tis_floor: 0\.5 given, which has no effect with tis_cap: null"),
        (
            {"old_policy": "model", "tis_cap": 0.5, "tis_floor": 0.75},
            r"objective\.tis_floor: 0\.75 given, at most tis_cap \(0\.5\) expected",
        ),
        (
            {"policy_loss": "vespo", "old_policy": "model", "tis_cap": 2.0, "tis_mode": "sequence_mask"},
            r"objective\.tis_mode: sequence_mask given with policy_loss: vespo",
        ),
        ({"entropy_coef_delta": 0.1}, r"entropy_coef_delta: 0\.1 given, which has no effect with entropy_target: null"),
        (
            {"entropy_target": 1.0, "entropy_coef_min": 2.0},
            r"objective\.entropy_coef_min: 2 given, at most entropy_coef_max \(1\) expected",
        ),
        (
            {"entropy_target": 1.0, "entropy_coef": 2.0},
            r"objective\.entropy_coef: 2 given, from entropy_coef_min \(0\) to entropy_coef_max \(1\) expected",
        ),
        (
            {"entropy_target": 1.0, "entropy_coef_min": 0.1},
            r"objective\.entropy_coef: 0 given, from entropy_coef_min \(0\.1\)",
        ),
        (
            {"aggregation": "normalize_then_sum", "scale": "none"},
            r"objective\.scale: none given, which has no effect with aggregation: normalize_then_sum",
        ),
        ({"tis_cap": 2.0}, r"objective\.tis_cap: 2\.0 given, which has no effect with old_policy: reference"),
        (
            {"vespo_positive_power": 1.0},
            r"vespo_positive_power: 1\.0 given, which has no effect with policy_loss: clip",
        ),
        (
            {"policy_loss": "vespo", "vespo_positive_decay": 3e4},
            r"vespo_positive_decay: 30000 given with vespo_positive_power: 2, with which .* e\^3e\+04, at most e\^20 expect",
        ),
        (
            {"policy_loss": "vespo", "vespo_negative_power": 40.0},
            r"vespo_negative_decay: 2 given with vespo_negative_power: 40, with which the weight of a response reaches e\^8",
        ),
        (
            {"policy_loss": "vespo", "clip_eps_high": 0.28},
            "clip_eps_high: 0.28 given, which has no effect with policy_loss",
        ),
        (
            {"policy_loss": "gmpo", "importance": "sequence"},
            r"objective\.importance: sequence given, which has no effect with policy_loss: gmpo",
        ),
        ({"kl_coef": 0, "kl_unbiased": True}, r"kl_unbiased: True given, which has no effect with kl_coef: 0"),
        ({"kl_in_reward": True}, r"kl_in_reward: True given, which has no effect with old_policy: reference"),
        (
            {"kl_in_reward": True, "kl_unbiased": True, "old_policy": "rollout"},
            r"kl_unbiased: True given, which has no effect with kl_in_reward: true",
        ),
        (
            {"kl_in_reward": True, "scale": "batch", "old_policy": "rollout"},
            r"objective\.scale: batch given with kl_in_reward: true",
        ),
        ({"loss_agg": "dr_grpo"}, r"objective\.max_response_tokens: missing\. loss_agg: dr_grpo divides by it"),
        (
            {"max_response_tokens": 9},
            r"objective\.max_response_tokens: 9 given, which has no effect with loss_agg: token_mean",
        ),
        (
            {"policy_loss": "cispo", "clip_eps": 0.1},
            r"objective\.clip_eps: 0\.1 given, which has no effect with .*cispo",
        ),
        (
            {"sapo_negative_temperature": 2.0},
            r"sapo_negative_temperature: 2\.0 given, which has no effect with .*: clip",
        ),
        ({"cispo_cap": 2.0}, r"objective\.cispo_cap: 2\.0 given, which has no effect with policy_loss: clip"),
        (
            {"kl_coef": 0, "kl_estimator": "k2"},
            r"objective\.kl_estimator: k2 given, which has no effect with kl_coef: 0",
        ),
        (
            {"old_policy": "model", "clip_eps": 0.1},
            r"objective\.clip_eps: 0\.1 given, which has no effect with old_policy",
        ),
        (
            {"old_policy": "model", "importance": "sequence"},
            r"objective\.importance: sequence given, which has no effect",
        ),
        ({"scale": "none", "eps": 1e-4}, r"objective\.eps: 0\.0001 given, which has no effect with scale: none"),
        ({"eps": 0}, r"objective\.eps: 0 given, a finite number above 0"),
        ({"dual_clip": 1.0}, r"objective\.dual_clip: 1\.0 given, a finite number above 1"),
        ({"std_ddof": 2}, r"objective\.std_ddof: 2 given, an integer of 0 or more and at most 1"),
        ({"reference": "none"}, r"objective\.reference: none given, but old_policy: reference"),
        (
            {"old_policy": "model", "kl_coef": 0, "reference": "base"},
            r"objective\.reference: 'base' given, but the loss needs none",
        ),
    ],
)
def test_options_without_an_effect_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        decode(RunConfig, ConfigSource({"objective": {"type": "grpo", **options}}))


def test_a_reference_is_only_held_if_the_loss_reads_it():
    assert Grpo().holds_reference
    assert Grpo(old_policy="model").holds_reference
    assert not Grpo(old_policy="model", kl_coef=0.0).holds_reference


def test_metrics_of_microbatches_are_their_mean_or_their_largest():
    parts = jnp.array([1.0, 3.0, 2.0])
    assert float(Largest(parts).over_microbatches().logged()) == 3
    assert float(Sum(parts, jnp.array([2.0, 2.0, 0.0])).over_microbatches().logged()) == 1.5


def test_the_gradient_of_sapo_is_finite_for_any_ratio():
    gradient = jax.grad(lambda log_ratio: jnp.sum(sapo_losses(log_ratio, jnp.ones(1), 1.0, 1.05)))
    found = np.asarray(gradient(jnp.float32([[-200.0, 0.0, 200.0]])))
    np.testing.assert_allclose(found, [[0.0, -1.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("power", "decay"),
    [(2.0, math.inf), (math.inf, 3.0), (math.nan, 3.0), pytest.param(10**400, 3.0, id="huge"), (1e-300, 1e300)],
)
def test_weights_of_vespo_that_their_types_refuse_raise_nothing_before_that(power, decay):
    grpo = Grpo(policy_loss="vespo", vespo_positive_power=power, vespo_positive_decay=decay, kl_coef=0)
    with pytest.raises(ConfigError, match=r"^vespo_positive_(power|decay): .* given, a finite number"):
        check_fields(grpo)


@pytest.mark.parametrize(("power", "decay"), [(2.0, 3.0), (1e-3, 19.9), (0.95, 1e-37), (9.0, 0.7)])
def test_the_weights_of_vespo_that_are_accepted_are_finite(power, decay):
    """The largest one is what is compared with the limit: also of ratios between those of this grid."""
    Grpo(policy_loss="vespo", vespo_positive_power=power, vespo_positive_decay=decay, kl_coef=0)
    log_w = np.linspace(-30, 30, 4001)
    clipped = np.clip(log_w, np.log(1e-8), 20)
    expected = decay + power * clipped - decay * np.exp(clipped)
    assert expected.max() <= 20 + 1e-3
    ratios, ones = jnp.asarray(log_w[:, None], jnp.float32), jnp.ones((len(log_w), 1))
    losses = vespo_losses(ratios, -ones, ones[:, 0], ones, (power, decay), (1.0, 1.0))[:, 0]
    assert np.all(np.isfinite(losses))
    inside = expected > -60
    np.testing.assert_allclose(np.log(np.asarray(losses, np.float64)[inside]), expected[inside], atol=1e-3)
