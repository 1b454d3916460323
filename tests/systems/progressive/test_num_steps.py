"""Numbers of steps that a preset writes."""

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.num_steps import check_num_steps
from jaxlm.reading.yaml import ConfigSource
from tests.session.test_num_steps import MODEL


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        (
            {"preset": {"type": "progressive", "stacks": 2, "steps_per_stack": 3}, "trainer": {"num_train_steps": 3}},
            r"trainer\.num_train_steps: 3 given, .* set it to 6\. .*, or keys of preset\.type: progressive$",
        ),
        (
            {"preset": {"type": "progressive", "stacks": 3, "steps_per_stack": 2**31 - 1}},
            r"num_train_steps: 6442450941 given in all 3 phases .*, or keys of preset\.type: progressive$",
        ),
    ],
)
def test_numbers_of_steps_that_do_not_fit_are_refused(sections, refused):
    config = decode_run(ConfigSource({"model": dict(MODEL), **sections}), None)
    with pytest.raises(ConfigError, match=refused):
        check_num_steps(config)
