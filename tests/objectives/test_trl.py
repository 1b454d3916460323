"""The losses and metrics of preference objectives against those of TRL, on the same likelihoods. Skipped without `trl`."""

from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.objectives.dpo import Dpo
from jaxlm.objectives.kto import Kto
from jaxlm.objectives.reward import RewardObjective
from jaxlm.surgery.reward_head import RewardHeadConfig
from tests.objectives.test_dpo import columns_of, logps_of, measured, pair_batch, random_model, target_logps
from tests.objectives.test_kto import LABELS, ROWS, unpaired_batch
from tests.objectives.test_reward import rewards_of

torch = pytest.importorskip("torch")
# Importing TRL takes longer than collecting all other tests does, so that only the tests below do it.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")]


def columns_without_padding_rows(rows):
    return {name: column[:-1] for name, column in columns_of(rows + 1).items()}


def for_trl(logps, columns, order):
    """A model that returns these log-likelihoods, and TRL's inputs, for sequences in this order of (row, half).

    Args:
        logps: [rows, 2, S], of all targets.
    """
    ids = np.stack([np.append(columns["tokens"][at][:1], columns["targets"][at]) for at in order])
    mask = np.stack([np.append(0, columns["loss_mask"][at]) for at in order])
    shown = torch.tensor(np.stack([logps[at] for at in order]) * mask[:, 1:], dtype=torch.float32)
    nothing = torch.zeros_like(shown)  # metrics that are not compared
    outputs = SimpleNamespace(log_probs=shown, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    inputs = {"input_ids": ids, "completion_mask": mask, "attention_mask": np.ones_like(mask)}
    return lambda **_: outputs, {k: torch.tensor(v.astype(np.int64)) for k, v in inputs.items()}


def test_the_vectors_are_what_trl_computes():
    from tests.objectives.test_trl_vectors import VECTORS
    from tests.objectives.trl_losses import expected, inputs, without_nan

    for kind, arrays in inputs().items():
        assert VECTORS[kind]["inputs"] == {name: without_nan(array) for name, array in arrays.items()}
        found = expected(kind, arrays)
        assert found["expected"] == pytest.approx(VECTORS[kind]["expected"], rel=1e-7)
        assert found["gradients"].keys() == VECTORS[kind]["gradients"].keys()
        for case, gradient in found["gradients"].items():
            np.testing.assert_allclose(gradient, VECTORS[kind]["gradients"][case], rtol=1e-7, atol=1e-9, err_msg=case)


@pytest.fixture(scope="module")
def models():
    return random_model(0), random_model(1)


CASES = {
    "sigmoid": ({"beta": 0.3}, ["sigmoid"], None),
    "ipo": ({"loss_type": "ipo", "beta": 0.3, "reduction": "mean"}, ["ipo"], None),
    "mixed": (
        {"loss_type": {"sigmoid": 0.8, "hinge": 0.5}, "beta": 0.3, "sft_weight": 0.2},
        ["sigmoid", "hinge", "sft"],
        [0.8, 0.5, 0.2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_dpo(models, case):
    from trl.trainer.dpo_trainer import DPOTrainer

    from tests.objectives.trl_losses import trainer

    model, reference = models
    options, names, weights = CASES[case]
    objective, columns = Dpo(**options), columns_without_padding_rows(3)
    terms, metrics = measured(objective, model, reference, pair_batch(columns))
    theirs = torch.tensor(logps_of(reference, columns), dtype=torch.float32)
    order = [(row, half) for half in range(2) for row in range(3)]
    call, inputs = for_trl(target_logps(model, columns), columns, order)
    inputs |= {"ref_chosen_logps": theirs[:, 0], "ref_rejected_logps": theirs[:, 1]}
    stub = trainer(
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=names,
        loss_weights=weights or [1.0] * len(names),
        beta=objective.beta,
        label_smoothing=0.0,
        use_weighting=False,
        precompute_ref_logps=True,
        args=None,
    )
    loss = DPOTrainer._compute_loss(stub, call, inputs, False)
    assert sum(terms.values()) == pytest.approx(float(loss), rel=2e-5)
    shared = {name: values[-1] for name, values in stub._metrics["eval"].items() if name in metrics}
    assert {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"} < shared.keys()
    assert {"logps/chosen", "logps/rejected"} < shared.keys()
    assert {name: metrics[name] for name in shared} == pytest.approx(shared, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("estimate_kl", [True, False])
def test_kto(models, estimate_kl):
    from trl.trainer.kto_trainer import KTOTrainer

    from tests.objectives.trl_losses import trainer

    model, reference = models
    columns = columns_without_padding_rows(ROWS)
    objective = Kto(beta=0.3, desirable_weight=2.0, undesirable_weight=0.5, estimate_kl=estimate_kl)
    batch, slot = unpaired_batch(columns), objective.init_slot(reference)
    asked = objective.annotate({}, batch, slot, model)
    _, _, after = objective.terms(model, asked, slot, key=None)
    slot = objective.update_slot(after, reference, jnp.int32(1))  # whose estimate is that of this batch
    terms, metrics, _ = objective.terms(model, asked, slot, key=None)
    ours, theirs = (torch.tensor(logps_of(m, columns), dtype=torch.float32) for m in models)
    call, inputs = for_trl(target_logps(model, columns), columns, [(row, 0) for row in range(ROWS)])
    inputs |= {"label": torch.tensor(LABELS), "ref_logps": theirs[:, 0], "ref_KL_logps": theirs[:, 1]}
    stub = trainer(
        _compute_kl_logps=lambda *_: ours[:, 1],
        precompute_ref_logps=True,
        calculate_KL=estimate_kl,
        loss_type="kto" if estimate_kl else "apo_zero_unpaired",
        beta=0.3,
        desirable_weight=2.0,
        undesirable_weight=0.5,
    )
    loss = KTOTrainer._compute_loss(stub, call, inputs, False)
    assert float(terms["loss"].mean()) == pytest.approx(float(loss), rel=2e-5)
    shared = {name: values[-1] for name, values in stub._metrics["eval"].items() if name in metrics}
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= shared.keys()
    found = {name: float(metrics[name].mean()) for name in shared}
    assert found == pytest.approx(shared, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_reward(center):
    from trl.trainer.reward_trainer import RewardTrainer

    from tests.objectives.trl_losses import trainer

    model = RewardHeadConfig().apply(random_model(0), key=jax.random.key(3))
    columns = columns_without_padding_rows(3)
    objective, batch = RewardObjective(center_coefficient=center), pair_batch(columns)
    terms, metrics, _ = objective.terms(model, batch, None, key=None)
    logits = torch.tensor(rewards_of(model, columns).T.reshape(-1, 1), dtype=torch.float32)  # all chosen, all rejected
    stub = trainer(args=SimpleNamespace(center_rewards_coefficient=center or None))
    inputs = {"attention_mask": torch.ones(6, 1, dtype=torch.long)}
    loss = RewardTrainer.compute_loss(stub, lambda **_: SimpleNamespace(logits=logits), inputs)
    assert float(terms["loss"].mean()) == pytest.approx(float(loss), rel=2e-5)
    shared = {name: values[-1] for name, values in stub._metrics["eval"].items() if name in metrics}
    assert {"accuracy", "margin", "mean_reward"} <= shared.keys()
    found = {name: float(metrics[name].mean()) for name in shared}
    assert found == pytest.approx(shared, rel=1e-4, abs=1e-6)
