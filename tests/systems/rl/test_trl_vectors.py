"""The losses of groups of responses against those that TRL computes, on stored vectors."""

from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.tree import is_named
from jaxlm.core.values.batch_types import GroupBatch
from jaxlm.objectives.completions import ReferenceLogps
from jaxlm.systems.rl import grpo
from tests.objectives.test_trl_vectors import (
    VECTORS,
    assert_every_case_is_listed,
    assert_is_that_of_trl,
    cases,
    inputs_of,
    token_columns,
    total,
)
from tests.systems.rl.test_grpo import grpo as grpo_of

ENTROPY_FACTORS = (0.5, 1.5, 0.75, 0.9, 0.5, 2.0, 3.0, 2.0)
AS_TRL = {"std_ddof": 1, "eps": 1e-4}
NO_KL = {"kl": None}
WHOLE = {"loss_agg": "seq_mean_token_mean"}
LEAVE_ONE_OUT = {"loss": {"importance": "sequence_product"}, **WHOLE}


def of_model(**correction):
    return {"old_policy": {"type": "model", "importance_sampling": correction}}


GROUPS: dict[str, dict[str, Any]] = {
    "grpo": {**WHOLE, "kl": {"coef": 0.04}},
    "bnpo": NO_KL,
    "dapo": {"loss": {"epsilon_high": 0.28}, **NO_KL},
    "two-sided": {"loss": {"dual_clip": 1.5}, **NO_KL},
    "dr_grpo": {"advantage": {"type": "unscaled"}, "loss_agg": {"type": "dr_grpo", "max_response_tokens": 9}, **NO_KL},
    "gspo": {"loss": {"importance": "sequence"}, **WHOLE, **NO_KL},
    "luspo": {"loss": {"importance": "sequence"}, "loss_agg": "seq_mean_token_sum", **NO_KL},
    "cispo": {"loss": {"type": "cispo", "cap": 1.25}, **NO_KL},
    "cispo sequence": {"loss": {"type": "cispo", "cap": 1.05, "importance": "sequence"}, **NO_KL},
    "sapo": {"loss": {"type": "sapo", "positive_temperature": 0.8, "negative_temperature": 1.3}, **WHOLE, **NO_KL},
    "vespo": {"loss": "vespo", **NO_KL},
    "vespo powers": {
        "loss": {
            "type": "vespo",
            "positive_power": 1.5,
            "positive_decay": 2.5,
            "negative_power": 0.5,
            "negative_decay": 0.75,
        },
        "kl": {"coef": 0.04},
    },
    "gmpo": {"loss": {"type": "gmpo", "epsilon": 0.15, "epsilon_high": 0.25}, **WHOLE, "kl": {"coef": 0.04}},
    "gmpo top_entropy": {"loss": "gmpo", "top_entropy": 0.4, **WHOLE, **NO_KL},
    "batch": {"advantage": {"type": "batch"}, **NO_KL},
    "kl_unbiased": {"kl": {"unbiased": True, "coef": 0.04}},
    "kl_unbiased sequence": {"loss": {"importance": "sequence"}, **WHOLE, "kl": {"unbiased": True, "coef": 0.04}},
    "off_policy": {"off_policy_threshold": 0.01, **NO_KL},
    "top_entropy": {"top_entropy": 0.4, **NO_KL},
    "entropy_coef": {"entropy": {"coef": 0.02}, **NO_KL},
    "top_entropy entropy_coef": {"top_entropy": 0.4, "entropy": {"coef": 0.02}, **NO_KL},
    "tis token_truncate": {**of_model(floor=0.8, cap=1.1), **NO_KL},
    "tis token_mask": {**of_model(mode="token_mask", floor=0.75, cap=1.25), **NO_KL},
    "tis sequence_truncate": {**of_model(mode="sequence_truncate", cap=1.1), **WHOLE, **NO_KL},
    "tis sequence_mask": {**of_model(mode="sequence_mask", floor=0.6, cap=2.0), **WHOLE, "kl": {"coef": 0.04}},
    "tis vespo": {**of_model(mode="token_mask", cap=1.3), "loss": "vespo", **NO_KL},
    "mask_truncated": {"mask_truncated": True, **NO_KL},
    "mask_truncated grpo": {"mask_truncated": True, **WHOLE, "kl": {"coef": 0.04}},
    "mask_truncated entropy": {"mask_truncated": True, "top_entropy": 0.5, "entropy": {"coef": 0.02}, **NO_KL},
    "gdpo": {"advantage": {"type": "normalize_then_sum"}, **NO_KL},
    "rloo": {"advantage": {"type": "unscaled", "baseline": "leave_one_out"}, **LEAVE_ONE_OUT, **NO_KL},
    "rloo normalized": {
        "advantage": {"type": "batch", "std_of": "advantages", "baseline": "leave_one_out"},
        **LEAVE_ONE_OUT,
        **NO_KL,
    },
    "rloo kl": {
        "advantage": {"type": "unscaled", "baseline": "leave_one_out"},
        **LEAVE_ONE_OUT,
        "kl": {"type": "reward", "estimator": "k1", "coef": 0.05},
    },
}

# Their parts have faster tests: other cases, and the closed forms of test_grpo.py.
SLOW = {
    "bnpo",
    "two-sided",
    "dr_grpo",
    "luspo",
    "cispo sequence",
    "kl_unbiased sequence",
    "top_entropy entropy_coef",
    "tis token_truncate",
    "tis sequence_truncate",
    "mask_truncated",
    "rloo",
}


def test_every_case_is_listed():
    assert_every_case_is_listed("groups", GROUPS, SLOW)


@pytest.fixture(scope="module")
def groups():
    """A batch of groups, the reference, the policy's log-likelihoods, and a function for them and the entropies."""
    given = inputs_of("groups")
    axes = (Axis("batch", 3), Axis("group", 4), Axis("position", given["mask"].shape[-1]))
    columns = {name: hax.named(jnp.asarray(values), axes) for name, values in token_columns(given["mask"]).items()}
    columns["finished"] = hax.named(jnp.asarray(given["finished"]), axes[:2])
    columns["reward_parts"] = hax.named(jnp.asarray(given["parts"]), (*axes[:2], Axis("reward", 3)))
    named = {name: hax.named(jnp.asarray(given[name]), axes) for name in ("old", "reference")}
    rewards = hax.named(jnp.asarray(given["rewards"]), axes[:2])
    batch = GroupBatch.of(rewards, named["old"], reward_weights=(1.0, 0.5, 2.0), **columns)
    flat = {
        name: hax.named(jnp.asarray(given[name].reshape(12, -1)), (Axis("batch", 12), axes[2]))
        for name in ("policy", "entropy")
    }
    reference = ReferenceLogps(named["reference"])
    return batch, reference, flat["policy"], lambda policy, *_, **__: (policy, flat["entropy"], {})


def loss_of_groups(objective, policy, batch, reference):
    batch = objective.prepare_batch(batch, None)
    batch = replace(batch, annotations=reference if objective.needs_reference else None)
    terms, _, _ = objective.terms(policy, batch, None, key=None)
    return total(terms, objective.weights(batch))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(GROUPS, SLOW))
def test_losses_of_groups_are_those_of_trl(monkeypatch, groups, case):
    batch, reference, policy, logps_and_entropies = groups
    monkeypatch.setattr(grpo, "token_logps", logps_and_entropies)
    advantage = GROUPS[case].get("advantage", {})
    scaled = advantage if advantage.get("type") == "unscaled" else AS_TRL | advantage
    objective = grpo_of(**{"old_policy": "rollout"} | GROUPS[case] | {"advantage": scaled})
    assert_is_that_of_trl(lambda policy: loss_of_groups(objective, policy, batch, reference), policy, "groups", case)


@pytest.mark.slow
def test_the_kl_divergence_in_rewards_is_that_of_the_sampler_although_ratios_are_1(monkeypatch, groups):
    batch, reference, policy, logps_and_entropies = groups
    monkeypatch.setattr(grpo, "token_logps", logps_and_entropies)
    objective = grpo_of(
        old_policy="model", advantage="unscaled", kl={"type": "reward", "estimator": "k1", "coef": 0.05}
    )
    terms, metrics, _ = objective.terms(policy, replace(batch, annotations=reference), None, key=None)
    given = {name: np.array(values) for name, values in VECTORS["groups"]["inputs"].items()}
    kl = ((given["old"] - given["reference"]) * given["mask"]).sum(-1)
    shaped = given["rewards"] - 0.05 * kl
    advantages = shaped - shaped.mean(axis=1, keepdims=True)
    expected = -(advantages[..., None] * given["mask"]).sum() / given["mask"].sum()
    assert float(total(terms, objective.weights(batch))) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert float(metrics["kl"].logged()) == pytest.approx(kl.sum() / given["mask"].sum(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["rewards", "advantages"])
def test_the_scale_of_a_batch_does_not_depend_on_its_microbatches(groups, of):
    batch, *_ = groups
    objective = grpo_of(old_policy="model", advantage={"type": "batch", "std_of": of}, kl=None)
    whole = objective.prepare_batch(batch, None)
    split = jax.tree.map(
        lambda column: column.unflatten_axis("batch", (Axis("microbatch", 3), Axis("batch", 1))),
        batch,
        is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray),
    )
    of_split = objective.prepare_batch(split, None).std_of_batch
    assert [axis.name for axis in of_split.axes] == ["microbatch", "batch"]
    np.testing.assert_allclose(np.unique(of_split.array), np.unique(whole.std_of_batch.array), rtol=1e-6)
    rewards = np.array(VECTORS["groups"]["inputs"]["rewards"])
    values = rewards if of == "rewards" else rewards - rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(whole.std_of_batch.array, values.std(), rtol=1e-6)


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_adaptive_entropy_is_that_of_trl_in_any_microbatches(monkeypatch, groups, size):
    batch, _, policy, logps_and_entropies = groups
    given = {name: np.array(VECTORS["groups"]["inputs"][name]) for name in ("entropy", "mask")}
    target = float((given["entropy"] * given["mask"]).sum() / given["mask"].sum())
    adaptive = {"target": target, "min": 0.004, "max": 0.012, "delta": 0.0035}
    entropy: Any = {"coef": 0.01, "adaptive": adaptive}
    objective = grpo_of(old_policy="rollout", entropy=entropy, advantage=AS_TRL, kl=None)
    slot, denominators = objective.init_slot(None), objective.weights(batch)
    for number, (factor, expected) in enumerate(zip(ENTROPY_FACTORS, VECTORS["adaptive_entropy"], strict=True)):
        loss = 0.0
        for first in range(0, 3, size):
            part = jax.tree.map(lambda column: column["batch", first : first + size], batch, is_leaf=is_named)  # noqa: B023
            rows = slice(4 * first, 4 * (first + size))

            def of_rows(*_, rows=rows, factor=factor, **__):
                logps, entropies, aux = logps_and_entropies(policy)
                return logps["batch", rows], entropies["batch", rows] * factor, aux

            monkeypatch.setattr(grpo, "token_logps", of_rows)
            terms, _, slot = objective.terms(policy, part, slot, key=None)
            loss += float(total(terms, denominators))
        assert loss == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
        slot = objective.update_slot(slot, None, jnp.int32(number + 1))
        assert float(slot.statistics["entropy_coef"]) == pytest.approx(expected["entropy_coef"], rel=1e-6)


@pytest.mark.slow
def test_normalized_rewards_do_not_depend_on_microbatches(groups):
    batch, *_ = groups
    objective = grpo_of(old_policy="model", advantage="normalize_then_sum", kl=None)
    split = jax.tree.map(
        lambda column: column.unflatten_axis("batch", (Axis("microbatch", 3), Axis("batch", 1))),
        batch,
        is_leaf=is_named,
    )
    found: list[Any] = [objective.prepare_batch(each, None).advantages for each in (batch, split)]
    whole, parts = (np.asarray(each.array) for each in found)
    np.testing.assert_allclose(parts.reshape(whole.shape), whole, rtol=1e-6)
    assert whole[1, 3] == 0, "no reward applies to it"
    assert not whole[2].any(), "padding"
