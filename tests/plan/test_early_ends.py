"""When phases may begin."""

import pytest

from jaxlm.plan.controllers import earliest_starts
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import plan_phases
from jaxlm.reading.yaml import ConfigSource

LOSS, EVAL = {"metric": "eval/loss"}, 10


@pytest.mark.parametrize(
    ("first", "start"),
    [
        ({}, 25),
        ({"until": {**LOSS, "below": 1.0}}, 10),
        ({"until": {**LOSS, "patience": 2}}, 20),
        ({"until": {**LOSS, "patience": 2, "below": 1.0}}, 10),
        ({"until": {**LOSS, "patience": 3}}, 25),
    ],
)
def test_a_phase_may_begin_when_the_one_before_may_end(first, start):
    check_start(first, start)


def check_start(first, start):
    """Two evaluations of a phase of 25 steps are after 10 and 20 of them. The third phase follows the second, of 7 steps."""
    data = {"validation_urls": ["stdlib:validation"]}
    phases = [{"name": "a", "num_train_steps": 25, **first}, {"name": "b", "num_train_steps": 7}, {"name": "c"}]
    source = {"data": data, "phases": phases, "trainer": {"steps_per_eval": EVAL}}
    config = decode_run(ConfigSource(source), None)
    assert earliest_starts(config, plan_phases(config)[0]) == [0, start, start + 7]


def test_evaluations_are_at_multiples_of_steps_of_the_run():
    until = {**LOSS, "below": 1.0}
    phases = [{"name": "a", "num_train_steps": 25}, {"name": "b", "until": until}, {"name": "c"}]
    source = {"data": {"validation_urls": ["stdlib:validation"]}, "phases": phases, "trainer": {"steps_per_eval": EVAL}}
    config = decode_run(ConfigSource(source), None)
    assert earliest_starts(config, plan_phases(config)[0]) == [0, 25, 30]
