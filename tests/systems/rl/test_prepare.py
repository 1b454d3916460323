"""`jaxlm prepare` for rollouts: which batches of prompts it can show."""

import contextlib

import pytest

from jaxlm.commands.prepare import check_batch
from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import plan_phases
from jaxlm.reading.yaml import ConfigSource


@pytest.mark.parametrize(
    ("keys", "is_refused"),
    [
        ({"updates_per_rollout": 4, "minibatches_per_rollout": 2}, True),
        ({"dynamic_sampling": 1}, True),
        ({"curriculum": {"type": "success"}}, True),
        ({"updates_per_rollout": 2, "minibatches_per_rollout": 2}, False),
    ],
)
def test_batches_of_prompts_are_shown_only_where_every_step_reads_new_ones(keys, is_refused):
    """Otherwise the prompts of a step are those of an earlier one, or depend on the responses."""
    sections = {"data": {"type": "rollouts", **keys}, "trainer": {"train_batch_size": 4, "num_train_steps": 9}}
    config = decode_run(ConfigSource(sections), None)
    refused = pytest.raises(
        ConfigError, match="--show_batch: 3 given, but in phase 'train' not every step trains on as many"
    )
    with refused if is_refused else contextlib.nullcontext():
        check_batch(config, 3, plan_phases(config)[0])
