"""Custom environments: a random one, and one with a mistake."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.systems.rl.environments import Environment, EnvironmentConfig, Observation


class Dice(Environment):
    """Answers at random, in each process otherwise."""

    def reset(self, prompt: str, columns: Mapping[str, Any]) -> None:
        self._random = random.SystemRandom()

    def step(self, completion: str) -> Observation:
        number = self._random.randrange(8)
        return Observation(str(number) * (number % 3), reward=number / 7, is_done=number < 3)


@dataclass(frozen=True)
class DiceConfig(EnvironmentConfig):
    """Throws dice."""

    def open(self) -> Environment:
        return Dice()


@dataclass(frozen=True)
class OpensNothingConfig(EnvironmentConfig):
    """Forgets to return its environment."""

    def open(self):
        return None
