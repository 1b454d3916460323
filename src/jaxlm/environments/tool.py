"""A tool that the policy may call while it answers, such as the calculator.

Source: karpathy/nanochat (`nanochat/engine.py`, commit b7629ef) for the tokens around calls and outputs.
"""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jaxlm.environments.base import Environment, EnvironmentConfig, Observation
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.models.inference.tools.calls import TOOL_TOKENS, Tool
from jaxlm.reading.choices import choice

_CALL_START, _CALL_END, _OUTPUT_START, _OUTPUT_END = TOOL_TOKENS
_CALL = re.compile(f".*{re.escape(_CALL_START)}(.*?){re.escape(_CALL_END)}", re.DOTALL)


@choice(EnvironmentConfig, "tool")
class ToolEnvironmentConfig(EnvironmentConfig):
    """Answers calls between `<|python_start|>` and `<|python_end|>` with the tool's output between `<|output_start|>` and
    `<|output_end|>`. Without an output, because the call is invalid, the policy writes on. Any other turn is the last one.

    Attributes:
        tool: what answers calls.
        reward_per_call: reward of each call that has an output.
        reward_per_invalid_call: reward of each call that has none.
    """

    tool: Tool = field(default_factory=Calculator)
    reward_per_call: float = 0.0
    reward_per_invalid_call: float = 0.0

    @property
    def turn_ends(self) -> tuple[str, ...]:
        return (_CALL_END,)

    @property
    def observation_start(self) -> tuple[str, ...]:
        return (_OUTPUT_START,)

    @property
    def observation_end(self) -> tuple[str, ...]:
        return (_OUTPUT_END,)

    @property
    def gives_rewards(self) -> bool:
        return bool(self.reward_per_call or self.reward_per_invalid_call)

    def open(self) -> Environment:
        return ToolEnvironment(self)


class ToolEnvironment(Environment):
    """Runs the tool. It has no memory."""

    def __init__(self, config: ToolEnvironmentConfig):
        self._config = config

    def reset(self, prompt: str, columns: Mapping[str, Any]) -> None:
        return

    def step(self, completion: str) -> Observation:
        if not completion.endswith(_CALL_END):
            return Observation(is_done=True)
        call = _CALL.fullmatch(completion)
        output = self._config.tool.run(call[1]) if call and call[1] else None
        config = self._config
        return Observation(output, config.reward_per_invalid_call if output is None else config.reward_per_call)
