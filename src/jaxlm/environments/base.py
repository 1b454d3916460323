"""The environment interface: what answers the policy's turns, and rewards them."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.reading.choices import Registry


@dataclass(frozen=True)
class Observation:
    """What an environment says to a turn.

    Attributes:
        text: what the policy reads next. No part of it becomes a special token. None adds nothing.
        reward: for this turn. The rewards of all turns are added up.
        is_done: whether the conversation is over.
    """

    text: str | None = None
    reward: float = 0.0
    is_done: bool = False


class Environment(abc.ABC):
    """One conversation with the policy. With several processes, process 0 runs it and tells the others what it says."""

    @abc.abstractmethod
    def reset(self, prompt: str, columns: Mapping[str, Any]) -> None:
        """Begins a new conversation.

        Args:
            columns: the other values of the prompt's record, by key.
        """

    @abc.abstractmethod
    def step(self, completion: str) -> Observation:
        """Answers a turn of the policy.

        Args:
            completion: the turn, with the special tokens that it contains and the one that ended it.
        """


@dataclass(frozen=True)
class EnvironmentConfig(Registry, abc.ABC):
    """An environment. The policy writes until an end-of-sequence token or one of `turn_ends`; then the environment speaks."""

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Special tokens that end a turn, besides the end-of-sequence tokens."""
        return ()

    @property
    def observation_start(self) -> tuple[str, ...]:
        """Special tokens before the text of each observation."""
        return ()

    @property
    def observation_end(self) -> tuple[str, ...]:
        """Special tokens after the text of each observation."""
        return ()

    @property
    def gives_rewards(self) -> bool:
        """Whether its observations may have a reward. If not, `data.rewards` must give some."""
        return True

    def check(self) -> None:
        """Raises `ConfigError` if a key cannot work."""
        return

    @abc.abstractmethod
    def open(self) -> Environment:
        """A new environment. Each conversation has its own."""
