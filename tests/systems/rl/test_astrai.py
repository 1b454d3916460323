"""AstrAI's GRPO: the formula and the defaults of its training page of May 2026."""

import json
import re
from dataclasses import replace

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.objectives.completions import ReferenceLogps
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import sections
from jaxlm.systems.rl import grpo
from tests.objectives.test_astrai import PAGE, ROOT, check_defaults, recipe
from tests.systems.rl.test_grpo import a_batch


def test_defaults_of_the_command_line():
    check_defaults(recipe("grpo"))


@pytest.mark.slow
def test_grpo_compares_whole_responses_with_one_reference(monkeypatch):
    """L = -mean(min(r A, clip(r) A)) + 0.01 mean((log p - log q)^2), with one log-likelihood per response: its mean."""
    columns, rewards, batch = a_batch()
    rewards = rewards.astype(np.float64)[:2]  # the last group is padding
    mask = columns["loss_mask"].astype(np.float64)[:2]
    rng = np.random.default_rng(5)
    reference = -rng.uniform(0.1, 4, columns["tokens"].shape)
    policy = reference + rng.normal(0, 0.6, reference.shape)
    named = batch.responses.tokens.axes
    axes = (Axis("batch", 12), named[2])
    outputs = hax.named(jnp.float32(policy.reshape(12, -1)), axes), hax.zeros(axes), {}
    monkeypatch.setattr(grpo, "token_logps", lambda *_, **__: outputs)
    asked = replace(batch, annotations=ReferenceLogps(hax.named(jnp.float32(reference), named)))
    objective = recipe("grpo").objective
    terms, _, _ = objective.terms(None, asked, None, key=None)
    weights = objective.weights(asked)

    mean = lambda logps: (logps[:2] * mask).sum(-1) / mask.sum(-1)  # noqa: E731
    log_ratio = mean(policy) - mean(reference)
    std = rewards.std(axis=1, ddof=1, keepdims=True)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (std + np.finfo(np.float32).eps)
    ratio = np.exp(log_ratio)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert np.any(surrogate != ratio * advantages), "a ratio is clipped"
    found = {name: float(term.total / weights[name]) for name, term in terms.items()}
    assert found == pytest.approx({"loss": -surrogate.mean(), "kl": 0.01 * (log_ratio**2).mean()}, rel=1e-5)
    assert recipe("grpo").data.format.group_size == 4


def test_the_reference_of_grpo_follows_the_model_every_200_updates():
    objective = recipe("grpo").objective
    slot = objective.init_slot({"w": jnp.float32(0.0)})
    held = {}
    for updates in (1, 199, 200, 201, 399, 400, 401):
        slot = objective.update_slot(slot, {"w": jnp.float32(updates)}, jnp.int32(updates))
        held[updates] = float(slot.weights["w"])
    assert held == {1: 0, 199: 0, 200: 200, 201: 200, 399: 200, 400: 400, 401: 400}


FLAGS = json.loads((ROOT / "tests" / "vectors" / "astrai_flags.json").read_text())["flags"]


def test_every_flag_has_a_row_whose_keys_exist():
    rows = [
        line.split("|")[1:-1]
        for line in PAGE.partition("## Flags")[2].partition("## ")[0].splitlines()
        if "`--" in line
    ]
    listed = [(re.findall(r"`--(\w+)`", row[0]), row[1]) for row in rows]
    assert sorted(flag for flags, _ in listed for flag in flags) == sorted(FLAGS)
    for flags, shown in listed:
        given = [FLAGS[flag] for flag in flags if FLAGS[flag] is not None]
        if given:
            assert [type(value)(text.strip()) for value, text in zip(given, shown.split(","), strict=True)] == given
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)*)(?:: [^`]*)?`", " ".join(row[2] for row in rows))
    keys = {f"{section.path}.{key.name}".lstrip(".") for section in sections(RunConfig) for key in section.keys}
    typed = {"objective.type", "data.type"}  # registries, which have no key of this name
    assert {name for name in named if name not in ("false", "null")} - keys == typed
    assert len(set(named)) > 25
