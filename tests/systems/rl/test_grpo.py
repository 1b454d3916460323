"""The objective `grpo`: advantages, losses and averages against float64 vectors, its terms against the model's logits."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.core.values.sums import Largest, Sum
from jaxlm.objectives.completions import ReferenceLogps
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.rl.advantages import NormalizeThenSum, OfGroup, Overlong, ResponseTokens, Unscaled
from jaxlm.systems.rl.grpo import Grpo
from jaxlm.systems.rl.policy_losses import (
    KL_ESTIMATORS,
    Cispo,
    Clip,
    ClippedLoss,
    DrGrpo,
    ImportanceSampling,
    KlInLoss,
    OfModel,
    OfRollout,
    Sapo,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    TokenMean,
    Vespo,
    log_ratios,
)
from tests.objectives.test_dpo import VOCAB, logits_of_one, random_model, target_logps

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "post_training.json").read_text())
SLOW = pytest.mark.slow
POLICY = {k: np.array(v, np.float64) for k, v in VECTORS["policy"].items() if isinstance(v, list)}
LOGPS, OLD, REFERENCE, MASK, ADVANTAGES = (POLICY[k] for k in ("logps", "old", "reference", "mask", "advantages"))


def grpo(**keys: Any) -> Grpo:
    """The objective with keys as in the YAML."""
    objective = decode(RunConfig, ConfigSource({"objective": {"type": "grpo", **keys}})).objective
    assert isinstance(objective, Grpo)
    return objective


def tokens_of(logps: Any, mask: Any, old: Any = None) -> ResponseTokens:
    """Tokens that all count, for losses that read no other numbers."""
    return ResponseTokens(logps, jnp.zeros_like(mask), mask, mask, logps if old is None else old, None, None)


@pytest.mark.parametrize(
    ("name", "advantage"),
    [
        ("group_ddof0_1e-8", OfGroup()),
        ("group_ddof1_1e-4", OfGroup(std_ddof=1, eps=1e-4)),
        ("group_ddof1_1e-6", OfGroup(std_ddof=1, eps=1e-6)),
        ("none", Unscaled()),
        ("rloo", Unscaled(baseline="leave_one_out")),
    ],
)
def test_advantages_match_the_vectors(name, advantage):
    found = advantage.of(jnp.float32(VECTORS["advantages"]["rewards"]))
    np.testing.assert_allclose(found, VECTORS["advantages"][name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_equal_rewards_have_no_advantage_although_their_mean_is_rounded():
    rewards = jnp.full((50, 3), 0.1) * jnp.arange(1, 51)[:, None]
    assert np.any(np.asarray(rewards) != np.asarray(jnp.mean(rewards, axis=-1, keepdims=True)))
    np.testing.assert_array_equal(OfGroup().of(rewards), 0)


@pytest.mark.slow
def test_equal_parts_have_no_advantage_although_their_mean_is_rounded():
    """With a small eps, the rounding of a mean would be an advantage of about 1."""
    values = jnp.full((50, 3), 0.1) * jnp.arange(1, 51)[:, None]
    everywhere = jnp.ones(values.shape, bool)
    normalized = NormalizeThenSum(eps=1e-12)
    advantages = [normalized.of_batch(v[:, None], jnp.ones(1), e) for v, e in zip(values, everywhere, strict=True)]
    np.testing.assert_array_equal(jnp.stack(advantages), 0)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Responses with advantages of 1 and -1 nearly cancel. In float32, their sum has no 6 digits."""
    with jax.enable_x64(True):
        yield


def averaged(losses, average=TokenMean()):  # noqa: B008
    return float(jnp.sum(losses * average.token_weights(MASK)) / average.denominator(MASK, MASK))


def loss_of(logps=LOGPS, average=TokenMean(), *, old=OLD, level="token", high=0.2, dual=None, **kl):  # noqa: B008
    """The loss as the objective puts it together. kl: estimator=coefficient."""
    loss = Clip(epsilon_high=high, dual_clip=dual)
    losses = loss.losses(tokens_of(logps, MASK), log_ratios(logps, old, MASK, level), ADVANTAGES)
    for name, coefficient in kl.items():
        losses += coefficient * KL_ESTIMATORS[name](log_ratios(logps, REFERENCE, MASK, level))
    return averaged(losses, average)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_losses_match_the_vectors():
    louder = LOGPS.copy()
    louder[1, 0] = 0.5
    found = {
        "token_mean": loss_of(),
        "token_mean_k3_0.01": loss_of(k3=0.01),
        "token_mean_k3_0.04": loss_of(k3=0.04),
        "seq_mean_token_mean": loss_of(average=SeqMeanTokenMean()),
        "seq_mean_token_mean_k3_0.01": loss_of(average=SeqMeanTokenMean(), k3=0.01),
        "seq_mean_token_sum": loss_of(average=SeqMeanTokenSum()),
        "dr_grpo_4": loss_of(average=DrGrpo(4)),
        "dr_grpo_4_k3_0.01": loss_of(average=DrGrpo(4), k3=0.01),
        "clip_higher_0.28": loss_of(high=0.28),
        "ratio_to_reference_squared_0.01": loss_of(old=REFERENCE, squared=0.01),
        "per_sequence_ratio_to_reference_squared_0.01": loss_of(
            old=REFERENCE, level="sequence", average=SeqMeanTokenMean(), squared=0.01
        ),
        "cispo_5": averaged(
            Cispo(cap=5.0).losses(tokens_of(LOGPS, MASK), log_ratios(LOGPS, OLD, MASK, "token"), ADVANTAGES)
        ),
    }
    assert found == pytest.approx({name: VECTORS["policy"][name] for name in found}, rel=2e-6, abs=1e-7)
    kl = {name: averaged(kl(log_ratios(LOGPS, REFERENCE, MASK, "token"))) for name, kl in KL_ESTIMATORS.items()}
    assert kl == pytest.approx(VECTORS["policy"]["kl"], rel=1e-5)
    dual = VECTORS["policy"]["dual_clip_3"]
    assert loss_of(louder) == pytest.approx(dual["without"], rel=1e-6)
    assert loss_of(louder, dual=3.0) == pytest.approx(dual["with"], rel=1e-6)


@pytest.mark.usefixtures("in_float64")
def test_ratios_of_sequences_and_clip_fractions_match_the_vectors():
    gspo = VECTORS["policy"]["gspo"]
    ratios = log_ratios(LOGPS, OLD, MASK, "sequence")
    np.testing.assert_allclose(np.exp(ratios[:, 0]), gspo["ratio"], rtol=1e-6)
    assert loss_of(level="sequence", average=SeqMeanTokenMean()) == pytest.approx(gspo["loss"], rel=1e-6)
    low, high = Clip().is_clipped(log_ratios(LOGPS, OLD, MASK, "token"), ADVANTAGES)
    fractions = {"low": averaged(low), "high": averaged(high)}
    assert fractions == pytest.approx(VECTORS["policy"]["clip_fraction"])


@pytest.mark.slow
def test_truncated_importance_weights_and_overlong_penalties_match_the_vectors():
    tis = VECTORS["policy"]["truncated_importance"]
    sampler = jnp.float32(tis["sampler"])
    sampling = ImportanceSampling(tis["cap"])
    found = sampling.weights(OLD, sampler, MASK)
    np.testing.assert_allclose(found, tis["weights"], rtol=1e-5)
    total = lambda logps: sampling.weights(logps, sampler, MASK).sum()  # noqa: E731
    assert not jax.grad(total)(LOGPS).any()
    overlong = json.loads((Path(__file__).parents[2] / "vectors" / "rollouts.json").read_text())["overlong"]
    found = Overlong(overlong["cache"], overlong["max_tokens"]).penalties(jnp.array(overlong["lengths"]))
    np.testing.assert_array_equal(found, np.float32(overlong["penalties"]))


@pytest.mark.slow
def test_gradients_match_the_vectors():
    def loss(logps, old):
        losses = Clip().losses(tokens_of(logps, MASK), log_ratios(logps, old, MASK, "token"), ADVANTAGES)
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
        advantages = Unscaled(baseline=baseline).of(jnp.float32(rewards[groups]))

        def loss(t, advantages=advantages):
            logps = jax.nn.log_softmax(t)[groups].reshape(-1, 1)
            ones = jnp.ones_like(logps)
            ratios = log_ratios(logps, jax.lax.stop_gradient(logps), ones, "token")
            losses = Clip().losses(tokens_of(logps, ones), ratios, advantages.reshape(-1))
            return jnp.dot(losses.reshape(groups.shape).mean(axis=1), chance)

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


@pytest.mark.slow
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
    losses = []
    for given, kl in ((batch, {"type": "reward", "coef": 0.5, "estimator": "k1"}), (known, None)):
        objective = grpo(old_policy="rollout", advantage="unscaled", mask_truncated=True, kl=kl)
        losses.append(float(objective.terms(model, given, objective.init_slot(model), key=None)[0]["loss"].total))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "loss": {"epsilon": 0.15, "epsilon_high": 0.28, "dual_clip": 2.0},
            "advantage": {"std_ddof": 1, "eps": 1e-4},
            "kl": {"coef": 0.04},
        },
        {
            "loss": {"importance": "sequence"},
            "kl": {"level": "sequence", "estimator": "squared"},
            "loss_agg": "seq_mean_token_mean",
        },
        pytest.param(
            {
                "loss": {"type": "cispo", "cap": 1.5},
                "loss_agg": {"type": "dr_grpo", "max_response_tokens": 9},
                "kl": None,
            },
            marks=SLOW,
        ),
        pytest.param(
            {"loss": {"type": "sapo", "positive_temperature": 0.8, "negative_temperature": 1.3}, "kl": None},
            marks=SLOW,
        ),
        pytest.param(
            {
                "old_policy": "model",
                "advantage": {"type": "unscaled", "baseline": "leave_one_out"},
                "loss_agg": "seq_mean_token_sum",
            },
            marks=SLOW,
        ),
    ],
)
def test_terms_and_metrics_match_the_logits(case, options):
    model, reference, columns, rewards, batch, logps = case
    objective = grpo(**options)
    loss, advantage, divergence = objective.loss, objective.advantage, objective.kl
    slot = objective.init_slot(reference)
    asked = objective.annotate({}, batch, slot, model)
    terms, metrics, _ = objective.terms(model, asked, slot, key=None)
    weights = objective.weights(batch)

    mask = columns["loss_mask"].reshape(12, -1).astype(np.float64)[:8]  # the last group is padding
    ours, theirs = (each[:8] for each in logps)
    centered = rewards[:2] - rewards[:2].mean(1, keepdims=True)
    std = np.sqrt((centered**2).sum(1) / (4 - advantage.std_ddof))
    scaled = centered / (std[:, None] + advantage.eps) if isinstance(advantage, OfGroup) else centered * 4 / 3
    a = scaled.reshape(-1, 1)
    lengths = mask.sum(1, keepdims=True)
    per_sequence = lambda d: (d * mask).sum(1, keepdims=True) / lengths + 0 * d  # noqa: E731
    d = ours - (ours if isinstance(objective.old_policy, OfModel) else theirs)
    ratio = np.exp(per_sequence(d) if loss.importance == "sequence" else d)
    match loss:
        case Clip():
            low, high = loss.limits
            losses = -np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
            if loss.dual_clip:
                losses = np.where(a < 0, np.minimum(losses, -loss.dual_clip * a), losses)
        case Cispo():
            losses = -np.minimum(ratio, loss.cap) * a * ours
        case Sapo():
            tau = np.where(a > 0, loss.positive_temperature, loss.negative_temperature)
            losses = -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    kl = 0 * ours
    if isinstance(divergence, KlInLoss):
        k = per_sequence(ours - theirs) if divergence.level == "sequence" else ours - theirs
        kl = k**2 if divergence.estimator == "squared" else np.exp(-k) + k - 1
    mean = {
        TokenMean: lambda x: (x * mask).sum() / mask.sum(),
        SeqMeanTokenMean: lambda x: ((x * mask).sum(1) / lengths[:, 0]).mean(),
        SeqMeanTokenSum: lambda x: (x * mask).sum(1).mean(),
        DrGrpo: lambda x: (x * mask).sum() / (8 * 9),
    }[type(objective.loss_agg)]
    expected = {"loss": mean(losses)} | ({"kl": divergence.coef * mean(kl)} if divergence else {})
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
    if divergence:
        expected["kl"] = (kl * mask).sum() / mask.sum()
    if isinstance(loss, ClippedLoss):
        counts = mask / lengths if loss.importance == "sequence" else mask
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"old_policy": "rollout", "overlong": {"cache": 3, "max_response_tokens": 8}},
        pytest.param(
            {
                "old_policy": {"type": "model", "importance_sampling": {"cap": 1.1}},
                "loss_agg": {"type": "dr_grpo", "max_response_tokens": 8},
            },
            marks=SLOW,
        ),
    ],
    ids=("rollout", "model"),
)
def test_terms_on_what_a_sampler_has_recorded(case, options):
    """At a temperature of 0.7, with a sampler whose probabilities are not quite ours."""
    model, _, columns, rewards, batch, _ = case
    objective = grpo(kl=None, **options)
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
    if objective.overlong:
        shaped += np.clip((8 - 3 - mask.sum(1)) / 3, -1, 0).reshape(2, 4)
        assert np.any(shaped != rewards[:2])
    a = (shaped - shaped.mean(1, keepdims=True)) / (shaped.std(1, keepdims=True) + 1e-8)
    a = a.reshape(-1, 1)
    ratio = np.exp(ours - sampler)
    if isinstance(objective.old_policy, OfRollout):
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
    assert ("overlong_penalty" in found) == bool(objective.overlong)


def batch_with(*columns, samples_all=True):
    """Without values, like those that are checked in planning."""
    tokens = dict.fromkeys(("tokens", "targets", "loss_mask", "segment_ids", "positions"))
    return GroupBatch.of(None, samples_all=samples_all, **tokens, **{name: object() for name in columns})


def test_responses_of_a_filtered_distribution_are_corrected_for():
    batch, model = batch_with("sampler_logps", samples_all=False), random_model(0)
    for corrected in ("rollout", {"type": "model", "importance_sampling": {"cap": 2.0}}):
        grpo(kl=None, old_policy=corrected).check(batch, model, None)
    message = r"objective\.old_policy: model given, but data\.top_k, .* Set objective\.old_policy\.importance_sampling"
    with pytest.raises(ConfigError, match=message):
        grpo(kl=None, old_policy="model").check(batch, model, None)


@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({"old_policy": "rollout"}, (), r"objective\.old_policy: rollout given, but the data does not record"),
        (
            {"old_policy": {"type": "model", "importance_sampling": {"cap": 2.0}}},
            (),
            r"objective\.old_policy\.importance_sampling given, but the data does not record",
        ),
        (
            {"old_policy": "model", "off_policy_threshold": 0.1},
            (),
            r"objective\.off_policy_threshold given, but the data does not record",
        ),
        (
            {"mask_truncated": True},
            (),
            r"objective\.mask_truncated given, but the data does not record which responses",
        ),
        (
            {"advantage": "normalize_then_sum"},
            (),
            r"objective\.advantage: normalize_then_sum given, but the data does not record the rewards that",
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
        grpo(**options).check(batch_with(*columns), random_model(0), None)


NO_KEY = r"objective\.loss\.%s: no such key in objective\.loss \(type %s\)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlong": {"cache": 4}}, r"objective\.overlong: the key 'max_response_tokens' is missing"),
        (
            {"overlong": {"cache": 9, "max_response_tokens": 8}},
            r"objective\.overlong\.max_response_tokens: 8 given, but cache is 9",
        ),
        (
            {"old_policy": {"type": "model", "importance_sampling": {"floor": 0.5}}},
            r"objective\.old_policy\.importance_sampling: the key 'cap' is missing",
        ),
        (
            {"old_policy": {"type": "model", "importance_sampling": {"cap": 0.5, "floor": 0.75}}},
            r"objective\.old_policy\.importance_sampling\.cap: 0\.5 given, but floor is 0\.75",
        ),
        (
            {
                "loss": "vespo",
                "old_policy": {"type": "model", "importance_sampling": {"cap": 2.0, "mode": "sequence_mask"}},
            },
            r"objective\.old_policy\.importance_sampling\.mode: sequence_mask given with loss: vespo",
        ),
        (
            {"old_policy": {"importance_sampling": {"cap": 2.0}}},
            r"importance_sampling: no such key .* \(type reference\)",
        ),
        ({"entropy": {"adaptive": {"delta": 0.1}}}, r"objective\.entropy\.adaptive: the key 'target' is missing"),
        (
            {"entropy": {"coef": 2.0, "adaptive": {"target": 1.0}}},
            r"objective\.entropy\.adaptive\.max: 1\.0 is the default, but coef is 2\.0, and the coefficient starts there",
        ),
        (
            {"entropy": {"adaptive": {"target": 1.0, "min": 0.1}}},
            r"objective\.entropy\.coef: 0\.0 is the default, but adaptive\.min is 0\.1",
        ),
        (
            {"advantage": {"type": "normalize_then_sum", "baseline": "mean"}},
            r"objective\.advantage\.baseline: no such key",
        ),
        (
            {"advantage": "normalize_then_sum", "overlong": {"cache": 1, "max_response_tokens": 2}},
            r"objective\.overlong: a section given together with advantage: \{type: normalize_then_sum\}",
        ),
        ({"loss": {"positive_power": 1.0}}, NO_KEY % ("positive_power", "clip")),
        (
            {"loss": {"type": "vespo", "positive_decay": 3e4}},
            r"positive_decay: 30000 given with positive_power: 2, with which .* e\^3e\+04, at most e\^20 expected",
        ),
        (
            {"loss": {"type": "vespo", "negative_power": 40.0}},
            r"negative_decay: 2 is the default with negative_power: 40, with which the weight of a response reaches e\^8",
        ),
        ({"loss": {"type": "vespo", "epsilon_high": 0.28}}, NO_KEY % ("epsilon_high", "vespo")),
        ({"loss": {"type": "gmpo", "importance": "sequence"}}, NO_KEY % ("importance", "gmpo")),
        ({"loss": {"type": "cispo", "epsilon": 0.1}}, NO_KEY % ("epsilon", "cispo")),
        ({"loss": "ppo"}, r"objective\.loss\.type: 'ppo' given. Allowed: cispo, clip, gmpo, sapo, vespo"),
        (
            {"kl": {"type": "reward", "unbiased": True}},
            r"objective\.kl\.unbiased: no such key in objective\.kl \(type reward",
        ),
        ({"kl": {"coef": 0}}, r"objective\.kl\.coef: 0 given, a finite number above 0"),
        ({"kl": "reward"}, r"objective\.kl: reward given with old_policy: reference"),
        (
            {"kl": "reward", "advantage": "batch", "old_policy": "rollout"},
            r"objective\.advantage: batch given with kl: reward",
        ),
        ({"loss_agg": "dr_grpo"}, r"objective\.loss_agg: the key 'max_response_tokens' is missing"),
        (
            {"loss": {"epsilon": 0.1}, "old_policy": "model"},
            r"objective\.loss: keys given, which have no effect with old_policy",
        ),
        ({"advantage": {"type": "unscaled", "eps": 1e-4}}, r"objective\.advantage\.eps: no such key"),
        ({"advantage": {"eps": 0}}, r"objective\.advantage\.eps: 0 given, a finite number above 0"),
        ({"loss": {"dual_clip": 1.0}}, r"objective\.loss\.dual_clip: 1\.0 given, a finite number above 1"),
        (
            {"advantage": {"std_ddof": 2}},
            r"objective\.advantage\.std_ddof: 2 given, an integer of 0 or more and at most 1",
        ),
        ({"reference": "none"}, r"objective\.reference: none given, but old_policy: reference"),
        (
            {"old_policy": "model", "kl": None, "reference": "base"},
            r"objective\.reference: 'base' given, but the loss needs none",
        ),
    ],
)
def test_options_without_an_effect_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        grpo(**options)


def test_a_reference_is_only_held_if_the_loss_reads_it():
    assert Grpo().facts.holds_reference
    assert grpo(old_policy="model").facts.holds_reference
    assert not grpo(old_policy="model", kl=None).facts.holds_reference


def test_metrics_of_microbatches_are_their_mean_or_their_largest():
    parts = jnp.array([1.0, 3.0, 2.0])
    assert float(Largest(parts).over_microbatches().logged()) == 3
    assert float(Sum(parts, jnp.array([2.0, 2.0, 0.0])).over_microbatches().logged()) == 1.5


@pytest.mark.slow
def test_the_gradient_of_sapo_is_finite_for_any_ratio():
    tokens, ratios = tokens_of(jnp.ones((1, 3)), jnp.ones((1, 3))), jnp.float32([[-200.0, 0.0, 200.0]])
    found = np.asarray(jax.grad(lambda ratios: jnp.sum(Sapo().losses(tokens, ratios, jnp.ones(1))))(ratios))
    np.testing.assert_allclose(found, [[0.0, -1.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("power", "decay"),
    [(2.0, math.inf), (math.inf, 3.0), (math.nan, 3.0), pytest.param(10**400, 3.0, id="huge"), (1e-300, 1e300)],
)
def test_weights_of_vespo_that_their_types_refuse_raise_nothing_before_that(power, decay):
    objective = Grpo(loss=Vespo(positive_power=power, positive_decay=decay))
    with pytest.raises(ConfigError, match=r"^loss\.positive_(power|decay): .* given, a finite number"):
        check_fields(objective)


@pytest.mark.parametrize(("power", "decay"), [(2.0, 3.0), (1e-3, 19.9), (0.95, 1e-37), (9.0, 0.7)])
def test_the_weights_of_vespo_that_are_accepted_are_finite(power, decay):
    """The largest one is what is compared with the limit: also of ratios between those of this grid."""
    loss = Vespo(positive_power=power, positive_decay=decay, negative_power=1.0, negative_decay=1.0)
    log_w = np.linspace(-30, 30, 4001)
    clipped = np.clip(log_w, np.log(1e-8), 20)
    expected = decay + power * clipped - decay * np.exp(clipped)
    assert expected.max() <= 20 + 1e-3
    ratios, ones = jnp.asarray(log_w[:, None], jnp.float32), jnp.ones((len(log_w), 1))
    losses = loss.losses(tokens_of(-ones, ones), ratios, ones[:, 0])[:, 0]
    assert np.all(np.isfinite(losses))
    inside = expected > -60
    np.testing.assert_allclose(np.log(np.asarray(losses, np.float64)[inside]), expected[inside], atol=1e-3)
