"""The losses of pairs and their gradients are those that TRL 1.16 computes of the same likelihoods: the numbers in
`tests/vectors/trl_losses.json`, which `tests/objectives/trl_losses.py` writes.
"""

import json
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.values.batch_types import PairBatch
from jaxlm.objectives import dpo
from jaxlm.objectives.dpo import Dpo
from jaxlm.objectives.pair_losses import BATCH_LOSSES, OF_MARGIN, PAIR_LOSSES

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "trl_losses.json").read_text())
PAIRS = {
    **{name: {"loss_type": name} for name in ("sigmoid", "hinge", "apo_zero", "apo_down", "nca_pair", "bco_pair")},
    "sigmoid_norm": {"reduction": "mean"},
    "ipo": {"loss_type": "ipo", "reduction": "mean"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "sppo_hard": {"loss_type": "sppo_hard"},
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.5},
    "aot": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot_unpaired": {"loss_type": "aot_unpaired", "label_smoothing": 0.1},
    "mixed": {"loss_type": {"sigmoid": 0.75, "hinge": 0.5}, "sft_weight": 0.25},
    "sigmoid forward_kl": {"f_divergence": "forward_kl"},
    "sigmoid js_divergence": {"f_divergence": "js_divergence"},
    "sigmoid alpha_divergence": {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.25},
    "sigmoid_norm alpha_divergence": {"f_divergence": "alpha_divergence", "reduction": "mean"},
    "ipo js_divergence": {"loss_type": "ipo", "f_divergence": "js_divergence", "reduction": "mean"},
    "hinge forward_kl": {"loss_type": "hinge", "f_divergence": "forward_kl"},
    "sigmoid ld_alpha": {"ld_alpha": 0.25},
    "apo_zero ld_alpha": {"loss_type": "apo_zero", "ld_alpha": 0.0},
    "sigmoid_norm ld_alpha": {"ld_alpha": 0.5, "reduction": "mean"},
    "sigmoid wpo": {"wpo": True},
    "hinge wpo": {"loss_type": "hinge", "wpo": True},
    "cpo sigmoid": {"reference": "none", "label_smoothing": 0.1, "sft_weight": 1.0},
    "cpo hinge": {"reference": "none", "loss_type": "hinge", "sft_weight": 1.0},
    "cpo ipo": {"reference": "none", "loss_type": "ipo", "reduction": "mean", "sft_weight": 1.0},
    "cpo simpo": {"loss_type": "simpo", "simpo_gamma": 0.3, "label_smoothing": 0.1},
    "cpo alphapo": {"loss_type": "alphapo", "simpo_gamma": 0.3, "alphapo_alpha": 0.2, "label_smoothing": 0.1},
    "orpo": {"loss_type": "orpo", "sft_weight": 0.0},
}


# Their parts have faster tests: other cases, and the closed forms of test_dpo.py.
SLOW = {
    "hinge",
    "apo_down",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "cpo hinge",
    "cpo ipo",
    "hinge wpo",
    "hinge forward_kl",
    "sigmoid_norm ld_alpha",
}


def cases(table, slow):
    return [pytest.param(case, marks=pytest.mark.slow if case in slow else ()) for case in table]


def assert_every_case_is_listed(kind, table, slow):
    assert set(table) == set(VECTORS[kind]["expected"])
    assert slow < set(table)
    assert VECTORS[kind]["gradients"].keys() == VECTORS[kind]["expected"].keys()
    # no two cases have one loss, so each key has an effect
    losses = sorted(VECTORS[kind]["expected"].values())
    assert np.diff(losses).min() > 1e-5, kind


def test_every_loss_and_case_is_listed():
    assert_every_case_is_listed("pairs", PAIRS, SLOW)
    assert {*PAIR_LOSSES, *BATCH_LOSSES} - {"simpo", "alphapo"} <= set(PAIRS)
    assert set(OF_MARGIN) <= set(PAIR_LOSSES)


def total(terms, weights):
    assert terms.keys() <= weights.keys()
    return sum(term.total / weights[name] for name, term in terms.items())


def assert_is_that_of_trl(loss_of, policy, kind, case):
    """Compares a loss and its gradient, a missing stop_gradient of which the loss alone does not show.

    Args:
        loss_of: the loss of the policy's log-likelihoods, {batch, position}.
    """
    loss, gradient = jax.value_and_grad(loss_of)(policy)
    assert float(loss) == pytest.approx(VECTORS[kind]["expected"][case], rel=1e-6, abs=1e-6)
    expected = np.array(VECTORS[kind]["gradients"][case]).reshape(-1, policy.axes[1].size)
    padding = np.zeros((len(gradient.array) - len(expected), expected.shape[1]))
    np.testing.assert_allclose(gradient.array, np.concatenate([expected, padding]), rtol=1e-6, atol=1e-6)


def inputs_of(kind):
    """The arrays of a kind of batch, with a row of zeros at the end, which is padding."""
    arrays = {name: np.array(values, np.float32) for name, values in VECTORS[kind]["inputs"].items()}
    return {name: np.concatenate([values, np.zeros_like(values[:1])]) for name, values in arrays.items()}


def token_columns(mask):
    names = ("tokens", "targets", "segment_ids", "positions")
    return {name: np.zeros(mask.shape, np.int32) for name in names} | {"loss_mask": mask}


@pytest.fixture(scope="module")
def pairs():
    """A batch of pairs, the policy's log-likelihoods, and a function for those of a model, which is the log-likelihoods or
    their name, and maybe for the collision entropies.
    """
    given = inputs_of("pairs")
    axes = (Axis("batch", 7), Axis("pair", 2), Axis("position", given["mask"].shape[-1]))
    of_sequences = (Axis("batch", 14), axes[2])

    def flat(model):
        return hax.named(jnp.asarray(given[model].reshape(14, -1)), of_sequences) if isinstance(model, str) else model

    batch = PairBatch.of(**{k: hax.named(jnp.asarray(v), axes) for k, v in token_columns(given["mask"]).items()})
    return (
        batch,
        flat("policy"),
        lambda model, batch, *others, **_: (flat(model), *(flat("collision") for _ in others), {}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(PAIRS, SLOW))
def test_losses_of_pairs_are_those_of_trl(monkeypatch, pairs, case):
    batch, policy, logps = pairs
    monkeypatch.setattr(dpo, "token_logps", logps)
    objective = Dpo(**{"beta": 0.3} | PAIRS[case])
    asked = objective.annotate({"initial": "reference"}, batch)

    def loss_of(policy):
        return total(objective.terms(policy, asked, None, key=None)[0], objective.weights(batch))

    assert_is_that_of_trl(loss_of, policy, "pairs", case)
