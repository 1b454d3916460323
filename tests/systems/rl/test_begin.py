"""What the prompts of rollouts begin with."""

import pytest

from jaxlm.data.formats.completions import PromptsFormat
from jaxlm.systems.rl.rewards.function import FunctionRewardConfig
from jaxlm.systems.rl.rollouts import RolloutsConfig
from tests.data.test_begin import NAMED, check_beginning, folder, section  # noqa: F401 - fixtures


@pytest.mark.parametrize("named", NAMED)
def test_prompts_begin_as_in_transformers_and_trl(named, folder, section):  # noqa: F811
    def of_rollouts(kind, record_format, tokenizer, **keys):
        return section(kind, record_format, tokenizer, rewards=[FunctionRewardConfig(function="m:f")], **keys)

    check_beginning(named, folder, of_rollouts, lambda prompt, _: [(RolloutsConfig, PromptsFormat(), prompt)])
