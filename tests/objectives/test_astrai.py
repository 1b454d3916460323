"""The recipes `astrai_*` have the formulas and defaults of AstrAI's training page of May 2026."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.models.loss import next_token_sums
from jaxlm.objectives import dpo
from jaxlm.objectives.completions import ReferenceLogps
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import sections
from jaxlm.reading.yaml import ConfigSource, load_yaml
from tests.objectives.test_dpo import NUM_PAIRS, columns_of, pair_batch

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests" / "vectors" / "post_training.json").read_text())
NAMES = ("seq", "sft", "dpo")  # of grpo: tests/systems/rl
# Defaults of params.md; of `AdamW` and of the class of the scheduler, where params.md has no flag.
OPTIMIZER = {
    "learning_rate": 3e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.01,
    "default_weight_decay_mask": False,
    "max_grad_norm": 1.0,
    "warmup": 0.05,
    "lr_schedule": "cosine",
}


@cache
def recipe(name: str) -> RunConfig:
    """A recipe without the model that it starts from, which a user has."""
    tree = dict(load_yaml(ROOT / "config" / "post_training" / f"astrai_{name}.yaml").tree)
    for key in ("initialize_from_hf", "use_hf_model_config"):
        del tree[key]
    return decode_run(ConfigSource(tree), None)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_of_the_command_line(name):
    check_defaults(recipe(name))


def check_defaults(config: RunConfig) -> None:
    assert {key: getattr(config.optimizer, key) for key in OPTIMIZER} == OPTIMIZER
    assert (config.epoch, config.data_seed, config.model.seq_len) == (1, 3407, 2048)
    num_steps, warmup = 210, 10  # int(0.05 * 210)
    steps = np.arange(num_steps + 1)
    cosine = 0.5 * (1 + np.cos(np.pi * np.minimum((steps - warmup) / (num_steps - warmup), 1)))
    expected = 3e-4 * np.maximum(0.05, np.where(steps < warmup, steps / warmup, cosine))
    np.testing.assert_allclose(config.optimizer.schedule(num_steps)(steps), expected, rtol=1e-5)
    assert float(config.optimizer.schedule(14)(0)) == np.float32(3e-4)  # int(0.05 * 14): no warmup


def test_the_smoothed_cross_entropy_is_the_mean_over_all_targets():
    given = VECTORS["cross_entropy"]
    axes = tuple(map(Axis, ("batch", "position", "vocab"), given["shape"]))
    logits = hax.named(2 * np.sin(1.7 * np.arange(40, dtype=np.float32) + 0.3).reshape(given["shape"]), axes)
    targets = hax.named(np.array(given["targets"]), axes[:2])
    for name in ("seq", "sft"):
        objective = recipe(name).objective
        assert (objective.z_loss_weight, objective.dft) == (0.0, False)
        sums = next_token_sums(logits, None, targets, hax.ones(axes[:2]), label_smoothing=objective.label_smoothing)
        assert float(sums.total) / 8 == pytest.approx(given["mean_smoothing_0.05"], rel=1e-6)


@pytest.mark.slow
def test_dpo_compares_means_over_tokens(monkeypatch):
    pairs = {name: np.array(value) for name, value in VECTORS["pairs"].items() if isinstance(value, list)}
    sides = ("chosen", "rejected")
    columns = columns_of()
    for number, side in enumerate(sides):
        columns["loss_mask"][:, number] = np.arange(12) < pairs[f"{side}_tokens"][:, None]
    policy, reference = (np.stack([pairs[prefix + side] for side in sides], 1) for prefix in ("", "reference_"))
    batch = pair_batch(columns)
    axes = tuple(batch.pairs.tokens.resolve_axis(name) for name in ("batch", "pair"))
    of_tokens = np.zeros((2 * NUM_PAIRS, 12), np.float32)
    of_tokens[:, 0] = policy.ravel()  # in the first token of each completion
    logps = hax.named(jnp.asarray(of_tokens), (Axis("batch", 2 * NUM_PAIRS), Axis("position", 12)))
    monkeypatch.setattr(dpo, "token_logps", lambda *_, **__: (logps, {}))
    asked = replace(batch, annotations=ReferenceLogps(hax.named(jnp.float32(reference), axes)))
    objective = recipe("dpo").objective
    terms, _, _ = objective.terms(None, asked, None, key=None)
    assert float(terms["loss"].mean()) == pytest.approx(VECTORS["pairs"]["sigmoid_mean"], rel=1e-6)
    assert objective.facts.holds_reference
    assert objective.sync_interval == 0


PAGE = (ROOT / "docs" / "howto" / "astrai.md").read_text()


def test_the_keys_of_the_other_tables_exist():
    names = {key.name for section in sections(RunConfig) for key in section.keys}
    learning, callbacks = (
        PAGE.partition(f"## {title}")[2].partition("## ")[0] for title in ("Learning rates", "Callbacks")
    )
    keys = re.findall(r"`(\w+): ", learning) + re.findall(r"`(?:trainer|model|data|optimizer)\.(\w+)", callbacks)
    assert len(keys) >= 12
    assert set(keys) <= names
