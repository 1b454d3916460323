"""Responses of several turns, between which an environment speaks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxlm.data.rollouts.sampler import Sample, Sampler, SamplingRequest
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.environments.base import EnvironmentConfig
from jaxlm.environments.converse import Conversation, ConversationLimits, Dialect, Prompt, converse

EARNED = "environment"
"""The name of the environment's reward, which is added to the others."""


class Conversations:
    """Has the policy and an environment take turns. All processes run the same conversations."""

    def __init__(self, config: EnvironmentConfig, max_turns: int, sampler: Sampler, tokenizer: Tokenizer):
        self._config, self._max_turns, self._sampler = config, max_turns, sampler
        decode = lambda ids: tokenizer.decode(ids, special=True)  # noqa: E731
        self._dialect = Dialect(tokenizer.encode, decode, tokenizer.vocabulary())
        self._turn_ends = tuple(self._dialect.special_ids(config.turn_ends))
        self._dialect.special_ids((*config.observation_start, *config.observation_end))  # before anything is compiled

    def of(self, model: Any, prompts: Sequence[Prompt], request: SamplingRequest) -> tuple[list[Sample], list[float]]:
        """One conversation for each prompt as a sample, and what it has earned. Args: request: of the first turn."""

        def turns(so_far: list[list[int]], rows: list[int], turn: int, most: int) -> Sequence[Sample]:
            stops = tuple(dict.fromkeys((*request.stop_ids, *self._turn_ends)))
            numbers = [request.rows[row] for row in rows]
            asked = replace(request, rows=numbers, turn=turn, stop_ids=stops, num_rows=len(prompts), room=most)
            return self._sampler.sample(model, so_far, asked)

        limits = ConversationLimits(self._max_turns, request.max_new_tokens)
        held = converse(turns, self._config, prompts, self._dialect, limits)
        return [_sample(conversation) for conversation in held], [conversation.reward for conversation in held]


def _sample(conversation: Conversation) -> Sample:
    return Sample(conversation.tokens, conversation.logps, conversation.mask, conversation.is_finished)
