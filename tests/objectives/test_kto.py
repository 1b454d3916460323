"""The objective `kto`: its terms against the model's logits, and its KL divergence, which is that of the batch before."""

from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.tree import is_named
from jaxlm.core.values.batch_types import UnpairedBatch
from jaxlm.objectives.kto import Kto
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.references import flops_per_token
from tests.objectives.test_dpo import columns_of, logps_of, random_model

ROWS = 6
LABELS = np.array([1, 0, 0, 1, 0, 1], np.float32)


def unpaired_batch(columns):
    """Pairs as completions: the second half of each is the completion of another record."""
    axes = (Axis("batch", ROWS), Axis("position", 12))
    own = {name: hax.named(jnp.asarray(column[:, 0]), axes) for name, column in columns.items()}
    others = {f"mismatched_{name}": hax.named(jnp.asarray(column[:, 1]), axes) for name, column in columns.items()}
    return UnpairedBatch.of(hax.named(LABELS, axes[:1]), **own, **others)


@pytest.fixture(scope="module")
def case():
    """A model, a reference, a batch whose last row is padding, and [row, own or mismatched] log-likelihoods under both."""
    models, columns = (random_model(0), random_model(1)), columns_of(ROWS)
    return *models, unpaired_batch(columns), [logps_of(model, columns)[:-1] for model in models]


def rows(batch, *at):
    return jax.tree.map(lambda column: column["batch", slice(*at)], batch, is_leaf=is_named)


@partial(jax.jit, static_argnums=0)
def measured(objective, model, slot, batch):
    batch = objective.annotate({}, batch, slot, model)
    return objective.terms(model, batch, slot, key=None)


@pytest.mark.slow
@pytest.mark.parametrize("estimate_kl", [True, False])
def test_terms_and_metrics_match_the_logits(case, estimate_kl):
    model, reference, batch, (ours, theirs) = case
    objective = Kto(beta=0.3, desirable_weight=2.0, undesirable_weight=0.5, estimate_kl=estimate_kl)
    slot, ratios, labels = objective.init_slot(reference), ours - theirs, LABELS[:-1].astype(bool)
    for kl in (0.0, max(0.0, ratios[:, 1].mean()) * estimate_kl):
        terms, metrics, slot = measured(objective, model, slot, batch)
        slot = objective.update_slot(slot, model, jnp.int32(1))
        sigma = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
        rewards = 0.3 * ratios[:, 0]
        gains, costs = 2 * (1 - sigma(rewards - 0.3 * kl)), 0.5 * (1 - sigma(0.3 * kl - rewards))
        assert float(terms["loss"].mean()) == pytest.approx(np.where(labels, gains, costs).mean(), rel=1e-5)
        expected = {
            "loss": np.where(labels, gains, costs).mean(),
            "rewards/chosen": rewards[labels].mean(),
            "rewards/rejected": rewards[~labels].mean(),
            "logps/chosen": ours[labels, 0].mean(),
            "logps/rejected": ours[~labels, 0].mean(),
        } | ({"kl": kl} if estimate_kl else {})
        found = {name: float(metric.mean()) for name, metric in metrics.items()}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert bool(slot.statistics) is estimate_kl
    assert float(objective.weights(batch)["loss"]) == ROWS - 1


@pytest.mark.slow
def test_microbatches_add_up_to_the_batch_and_the_estimate_has_no_gradient(case):
    model, reference, batch, _ = case
    objective = Kto()
    start = objective.init_slot(reference)
    after = jax.jit(lambda slot, batch: measured(objective, model, slot, batch)[2])
    whole, first = after(start, batch), after(start, rows(batch, 0, 2))
    both = after(first, rows(batch, 2, ROWS))
    for name, number in whole.statistics.items():
        assert float(both.statistics[name]) == pytest.approx(float(number), rel=1e-5), name

    asked = jax.jit(lambda model: objective.annotate({}, batch, start, model))(model)
    estimate = lambda m: objective.terms(m, asked, start, key=None)[2].statistics["log_ratios"]  # noqa: E731
    assert not any(np.any(g) for g in jax.tree.leaves(jax.jit(jax.grad(estimate))(model)))


@pytest.mark.slow
def test_a_model_that_is_its_own_reference_has_a_loss_of_one_half(case):
    model, _, batch, _ = case
    objective = Kto()
    terms, metrics, slot = measured(objective, model, objective.init_slot(model), batch)
    assert float(terms["loss"].mean()) == 0.5
    assert float(objective.update_slot(slot, model, jnp.int32(1)).statistics["kl"]) == 0
    assert float(metrics["rewards/chosen"].mean()) == 0


def test_kto_needs_a_reference():
    with pytest.raises(ConfigError, match=r"objective\.reference: none given, but the loss needs a reference"):
        Kto(reference="none")
    held = Kto(reference="base", cache=True).init_slot(None)
    assert held is not None
    assert held.weights is None
    assert Kto(reference="base", estimate_kl=False).init_slot(None) is None


def test_a_value_that_is_not_finite_does_not_stay_in_the_divergence():
    """The loss of the step may be finite, so that its update is applied."""
    objective = Kto()
    statistics = {"kl": jnp.float32(0.5), "log_ratios": jnp.float32(np.nan), "sequences": jnp.float32(3)}
    assert objective.update_statistics(statistics)["kl"] == 0.5
    assert objective.update_statistics({**statistics, "log_ratios": jnp.float32(6)})["kl"] == 2


def test_stored_log_likelihoods_with_and_without_other_records_are_not_mixed_up():
    keys = [Kto(cache=True, reference="base", estimate_kl=estimate).facts.annotation_key for estimate in (True, False)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("estimate_kl", "passes"), [(True, 3), (False, 1)])
def test_forward_passes_of_both_models_count_in_the_flops(estimate_kl, passes):
    """Of the reference on the completions, and of both on those of other records: a third of training each."""
    config = {
        "model": {"seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4},
        "data": {"type": "unpaired"},
        "objective": {"type": "kto", "estimate_kl": estimate_kl},
        "trainer": {"id": "x", "train_batch_size": 8},
    }
    plan = make_plan(decode_run(ConfigSource(config), None), "x", 64)
    alone = plan.config.model.flops_per_token(64)
    found = flops_per_token(plan, plan.phases[0])
    assert found.causal == pytest.approx(alone.causal * (1 + passes / 3))
    assert found.palm == pytest.approx(alone.palm * (1 + passes / 3))
