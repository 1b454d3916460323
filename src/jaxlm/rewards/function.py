"""A reward that is a function of your own."""

import inspect
from dataclasses import dataclass

from jaxlm.config.plugins import import_name
from jaxlm.core.errors import ConfigError
from jaxlm.rewards.base import Reward, RewardConfig, RewardContext, ScoredRows

_OF_BATCH = ("prompts", "completions", "completion_ids", "is_finished", "places")


@RewardConfig.register_subclass("function")
@dataclass(frozen=True)
class FunctionRewardConfig(RewardConfig):
    """A Python function. It gets keyword arguments by the names of its parameters, and returns a list.

    Attributes:
        function: `package.module:name`.
    """

    function: str

    def open(self, context: RewardContext) -> Reward:
        function = import_name(self.function)
        if not callable(function):
            raise ConfigError(f"function: '{self.function}' names no function")
        return FunctionReward(function)


class FunctionReward(Reward):
    """Calls the function with the arguments that it has parameters for."""

    def __init__(self, function):
        self._function = function
        self._parameters = inspect.signature(function).parameters

    def score(self, rows: ScoredRows) -> list[float | None]:
        lists = (rows.prompts, rows.completions, rows.completion_ids, rows.is_finished, rows.places)
        known = {**rows.columns, **dict(zip(_OF_BATCH, lists, strict=True))}
        return self._function(**{name: list(known[name]) for name in self._parameters if name in known})
