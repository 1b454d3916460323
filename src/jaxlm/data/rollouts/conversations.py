"""Responses of several turns, between which an environment speaks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxlm.core.runtime import from_main
from jaxlm.data.rollouts.sampler import Sample, Sampler, SamplingRequest
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.environments.base import EnvironmentConfig
from jaxlm.environments.converse import Conversation, ConversationLimits, Dialect, Prompt, converse

EARNED = "environment"
"""The name of the environment's reward, which is added to the others."""


def dialect_of(config: EnvironmentConfig, tokenizer: Tokenizer) -> Dialect:
    """How conversations become tokens. Raises `ConfigError` if the tokenizer lacks a special token of the environment."""
    decode = lambda ids: tokenizer.decode(ids, special=True)  # noqa: E731
    dialect = Dialect(tokenizer.encode, decode, tokenizer.vocabulary())
    dialect.special_ids((*config.turn_ends, *config.observation_start, *config.observation_end))
    return dialect


class Conversations:
    """Has the policy and an environment take turns. All processes lead the same conversations."""

    def __init__(self, config: EnvironmentConfig, max_turns: int, sampler: Sampler, tokenizer: Tokenizer):
        self._config, self._max_turns, self._sampler = config, max_turns, sampler
        self._dialect = dialect_of(config, tokenizer)
        # Of process 0, whose environment speaks: another process may have another version of its module.
        self._turn_ends = tuple(from_main(lambda: list(self._dialect.special_ids(config.turn_ends))))

    def of(self, model: Any, prompts: Sequence[Prompt], request: SamplingRequest) -> tuple[list[Sample], list[float]]:
        """One conversation for each prompt as a sample, and what it has earned. Args: request: of the first turn."""

        def turns(so_far: list[list[int]], rows: list[int], turn: int, most: int) -> Sequence[Sample]:
            stops = tuple(dict.fromkeys((*request.stop_ids, *self._turn_ends)))
            numbers = [request.rows[row] for row in rows]
            turn_request = replace(request, rows=numbers, turn=turn, stop_ids=stops, num_rows=len(prompts), room=most)
            return self._sampler.sample(model, so_far, turn_request)

        limits = ConversationLimits(self._max_turns, request.max_new_tokens)
        held = converse(turns, self._config, prompts, self._dialect, limits)
        return [_sample(conversation) for conversation in held], [conversation.reward for conversation in held]


def _sample(conversation: Conversation) -> Sample:
    sequences = (conversation.tokens, conversation.logps, conversation.mask)
    return Sample(*sequences, conversation.is_finished, conversation.turn_ends)
