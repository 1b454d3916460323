"""GRPO's loss and metrics against those of TRL, on the same likelihoods. Skipped without `trl`."""

from types import SimpleNamespace

import pytest

from jaxlm.systems.rl.policy_losses import Cispo, Clip
from tests.objectives.test_dpo import measured, target_logps
from tests.systems.rl.test_grpo import a_batch, entropies, grpo

torch = pytest.importorskip("torch")

from tests.objectives.test_trl import models, pytestmark  # noqa: E402, F401 - a fixture, and the same condition

GRPO_CASES = {
    "grpo": ({"loss_agg": "seq_mean_token_mean", "kl": {"coef": 0.04}}, "grpo"),
    "dapo": ({"loss": {"epsilon_high": 0.28}}, "dapo"),
    "gspo": ({"loss": {"importance": "sequence"}, "loss_agg": "seq_mean_token_mean"}, "grpo"),
    "cispo": ({"loss": {"type": "cispo", "cap": 1.5}}, "cispo"),
}


@pytest.fixture(scope="module")
def sampled(models):  # noqa: F811
    """Groups of responses, and their log-likelihoods [responses, S] under the model and the reference."""
    columns, rewards, batch = a_batch()
    return columns, rewards, batch, [target_logps(model, columns).reshape(12, -1)[:8] for model in models]


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo(models, sampled, case):  # noqa: F811
    from trl.trainer.grpo_trainer import GRPOTrainer

    from tests.objectives.trl_losses import trainer

    options, loss_type = GRPO_CASES[case]
    as_trl = {"advantage": {"std_ddof": 1, "eps": 1e-4}, "kl": None}
    objective, (model, reference) = grpo(**as_trl | options), models
    columns, rewards, batch, logps = sampled
    terms, metrics = measured(objective, model, reference, batch)
    ours, theirs = (torch.tensor(each, dtype=torch.float32) for each in logps)
    of_model = torch.tensor(entropies(model, columns), dtype=torch.float32)
    mask = torch.tensor(columns["loss_mask"].reshape(12, -1)[:8])
    groups = torch.tensor(rewards[:2])
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    loss = objective.loss
    clip = loss if isinstance(loss, Clip) else Clip(importance=loss.importance)
    low, high = clip.limits
    stub = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (ours, of_model, None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=objective.kl.coef if objective.kl else 0.0,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=loss.cap if isinstance(loss, Cispo) else high,
        importance_sampling_level=loss.importance,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        tools=None,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
    )
    none = torch.zeros(8, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages.reshape(-1),
        "old_per_token_logps": theirs,
        "ref_per_token_logps": theirs,
        "num_items_in_batch": mask.sum(),
    }
    expected = GRPOTrainer._compute_loss(stub, None, inputs)
    assert sum(terms.values()) == pytest.approx(float(expected), rel=2e-5, abs=1e-6)
    shared = {name: values[-1] for name, values in stub._metrics["eval"].items() if name in metrics}
    assert {name: metrics[name] for name in shared} == pytest.approx(shared, rel=1e-4, abs=1e-6)
    assert ("clip_ratio/low_mean" in shared) == isinstance(loss, Clip)
