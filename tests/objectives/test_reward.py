"""The objective `reward` and its surgery: rewards are read from the last token, and the head stays out of exports."""

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.models.base import Inputs, with_traits
from jaxlm.objectives.reward import RewardObjective
from jaxlm.surgery.reward_head import RewardHeadConfig
from tests.objectives.test_dpo import columns_of, pair_batch, random_model


@pytest.fixture(scope="module")
def model():
    return RewardHeadConfig().apply(random_model(0), key=jax.random.key(3))


def rewards_of(model, columns):
    """[pairs, 2], from the hidden state of the last token of each sequence."""
    sequences = pair_batch(columns).sequences()
    inputs = Inputs(sequences.tokens, sequences.positions, sequences.segment_ids)
    hidden = jax.jit(lambda model: model.base.hidden(inputs).final)(model)
    states = np.asarray(hidden.rearrange(("batch", "position", "embed")).array, np.float64)
    last = columns["segment_ids"].sum(-1).reshape(-1) - 1
    return (states[np.arange(len(last)), last] @ np.asarray(model.reward.array, np.float64)).reshape(-1, 2)


@pytest.mark.slow
def test_terms_and_metrics_match_the_hidden_states(model):
    columns = columns_of()
    batch, rewards = pair_batch(columns), rewards_of(model, columns)[:-1]  # the last row is no pair
    objective = RewardObjective(center_coefficient=0.1)
    terms, metrics, _ = jax.jit(lambda model: objective.terms(model, batch, None, key=None))(model)
    margins = rewards[:, 0] - rewards[:, 1]
    loss = (np.log1p(np.exp(-margins)) + 0.1 * rewards.sum(1) ** 2).mean()
    assert float(terms["loss"].total / objective.weights(batch)["loss"]) == pytest.approx(loss, rel=1e-5)
    expected = {"loss": loss, "accuracy": (margins > 0).mean(), "margin": margins.mean(), "mean_reward": rewards.mean()}
    assert {name: float(metric.mean()) for name, metric in metrics.items()} == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )


@pytest.mark.slow
def test_a_few_steps_separate_the_pairs(model):
    objective, batch = RewardObjective(), pair_batch(columns_of())
    loss = lambda m: objective.terms(m, batch, None, key=None)[0]["loss"].mean()  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss))
    trained, first = model, None
    for _ in range(30):
        value, gradient = step(trained)
        first = value if first is None else first
        trained = jax.tree.map(lambda w, g: w - 0.1 * g, trained, gradient)
    _, metrics, _ = objective.terms(trained, batch, None, key=None)
    assert float(metrics["accuracy"].mean()) == 1
    assert float(value) < 0.5 * float(first)


def test_the_model_is_the_same_without_its_head(model):
    before = random_model(0)
    for ours, theirs in zip(jax.tree.leaves(RewardHeadConfig().merge(model)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    inputs = pair_batch(columns_of()).sequences()
    given = Inputs(inputs.tokens, inputs.positions, inputs.segment_ids)
    np.testing.assert_array_equal(
        model.logits(model.hidden(given).final).array, before.logits(before.hidden(given).final).array
    )
    assert model.traits == before.traits
    capped = RewardHeadConfig().apply(with_traits(before, logit_soft_cap=2.0), key=jax.random.key(3))
    assert capped.traits.logit_soft_cap == 2.0


def test_a_model_without_a_head_and_a_second_head_are_refused(model):
    with pytest.raises(ConfigError, match=r"objective\.type: reward needs a model with a scalar head\. Add `surgery"):
        RewardObjective().terms(random_model(0), pair_batch(columns_of()), None, key=None)
    with pytest.raises(ConfigError, match=r"surgery reward_head: this model has a reward head already"):
        RewardHeadConfig().apply(model, key=jax.random.key(3))
