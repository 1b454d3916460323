"""Environments, which answer the policy's turns and reward the conversation, and the conversations with them.

A conversation is turns that are sampled, and observations that are put between them (`converse`). All processes take part.
Only process 0 opens environments and asks them, and the others get its observations. So an environment may be random, or
need a program that only one machine has.

One environment is a tool that the policy may call while it answers, such as the calculator (`ToolEnvironment`).

Source: karpathy/nanochat (`nanochat/engine.py`, commit b7629ef) for the tokens around calls and outputs of a tool.
"""

import abc
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import draccus

from jaxlm.core.errors import ConfigError, shown
from jaxlm.core.field_types import PositiveInt, is_float32, what_float32_needs
from jaxlm.core.runtime import from_main, main_only
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.models.inference.tools.calls import TOOL_TOKENS, Tool
from jaxlm.reading.choices import Registry, choice
from jaxlm.systems.rl.samplers import Sample


@dataclass(frozen=True)
class Observation:
    """Holds what an environment says to a turn.

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
class EnvironmentConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
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
        """Tells whether its observations may have a reward. If not, `data.rewards` must give some."""
        return True

    def check(self) -> None:
        """Raises `ConfigError` if a key cannot work."""
        return

    @abc.abstractmethod
    def open(self) -> Environment:
        """A new environment. Each conversation has its own."""


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


class Turn(Protocol):
    """Holds what a sampler returns for a row: tokens with the one that ended them, their log-likelihoods, and whether a
    stop token ended them."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def logps(self) -> Sequence[float]: ...

    @property
    def is_finished(self) -> bool: ...


SampleTurns = Callable[[list[list[int]], list[int], int, int], Sequence[Turn]]
"""Samples one turn for some rows: (tokens so far, with the prompt; numbers of the rows; turn, from 0; the most new tokens).
It must stop at the end-of-sequence tokens and at the environment's `turn_ends`, and what it samples for a row must not depend
on the other rows or on the most new tokens."""


@dataclass(frozen=True)
class ConversationLimits:
    """Says when a conversation ends although the environment has not ended it.

    Attributes:
        max_turns: number of turns of the policy.
        max_new_tokens: number of tokens after the prompt, those of observations included.
    """

    max_turns: PositiveInt
    max_new_tokens: PositiveInt


class Dialect(NamedTuple):
    """Says how texts and tokens of a conversation correspond.

    Attributes:
        encode: text to tokens, none of them special.
        decode: tokens to text, with special tokens.
        vocabulary: token -> id.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    vocabulary: Mapping[str, int]

    def special_ids(self, tokens: Sequence[str]) -> list[int]:
        """Ids of special tokens. Raises `ConfigError` if the tokenizer lacks one."""
        if missing := [token for token in tokens if token not in self.vocabulary]:
            raise ConfigError(
                f"the environment needs the special token {missing[0]}, which the tokenizer does not have. Use a tokenizer"
                " with this token, or another environment"
            )
        return [self.vocabulary[token] for token in tokens]


@dataclass
class _Row:
    """A conversation that goes on."""

    number: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    reward: float = 0.0
    is_finished: bool = False
    is_open: bool = True

    def add(self, tokens: Sequence[int], logps: Sequence[float], mask: int) -> None:
        self.tokens += tokens
        self.logps += logps
        self.mask += [mask] * len(tokens)

    def result(self) -> Sample:
        sequences = (tuple(self.tokens), tuple(self.logps), tuple(self.mask))
        return Sample(*sequences, self.is_finished, tuple(self.turn_ends), self.reward)


class Prompt(NamedTuple):
    """A prompt of a conversation. Attributes: columns, place: of its record; empty on processes other than 0."""

    tokens: Sequence[int]
    text: str
    columns: Mapping[str, Any]
    place: str


def converse(
    sample: SampleTurns,
    config: EnvironmentConfig,
    prompts: Sequence[Prompt],
    dialect: Dialect,
    limits: ConversationLimits,
) -> list[Sample]:
    """Leads one conversation for each prompt. The conversations take their turns together.

    A turn that a limit cuts off ends its conversation, and so does an observation for which there is no room, or after which
    the policy could not write. That observation is left out.
    """
    marks = (config.observation_start, config.observation_end)
    start, end = from_main(lambda: [list(dialect.special_ids(mark)) for mark in marks])
    speakers = main_only(lambda: [_Speaker(config, prompt) for prompt in prompts]) or []
    rows = [_Row(number, list(prompt.tokens)) for number, prompt in enumerate(prompts)]
    for turn in range(limits.max_turns):
        if not (active := [row for row in rows if row.is_open]):
            break
        left = [limits.max_new_tokens - len(row.tokens) for row in active]
        so_far = [row.prompt + row.tokens for row in active]
        samples = sample(so_far, [row.number for row in active], turn, max(left))
        turns = zip(active, left, samples, strict=True)
        written = [(row, one.tokens) for row, room, one in turns if _add_turn(row, room, one)]
        for (row, _), (text, reward, is_done) in zip(written, _observations(speakers, written, dialect), strict=True):
            row.reward += reward
            row.is_finished, row.is_open = is_done, not is_done
            if is_done or text is None:
                continue
            added = [*start, *dialect.encode(text), *end]
            is_last = turn + 1 == limits.max_turns
            if not is_last and len(row.tokens) + len(added) < limits.max_new_tokens:
                row.add(added, [0.0] * len(added), 0)
            else:
                row.is_open = False
        for row in active:
            row.is_open &= len(row.tokens) < limits.max_new_tokens
    return [row.result() for row in rows]


def _add_turn(row: _Row, room: int, sampled: Turn) -> bool:
    """Adds a turn. Returns whether the environment answers it: not if a limit has cut it off. Args: room: for tokens."""
    row.add(sampled.tokens[:room], sampled.logps[:room], 1)
    row.turn_ends.append(len(row.tokens))
    row.is_open = sampled.is_finished and len(sampled.tokens) <= room
    return row.is_open


def _observations(
    speakers: "Sequence[_Speaker]", written: Sequence[tuple[_Row, Sequence[int]]], dialect: Dialect
) -> list[tuple[str | None, float, bool]]:
    """Returns what environments say to the turns that rows have written. Args: speakers: empty except on process 0."""

    def ask() -> list[tuple[str | None, float, bool]]:
        return [
            speakers[row.number].answer(dialect.decode(list(tokens)), len(row.turn_ends)) for row, tokens in written
        ]

    return from_main(ask) if written else []


class _Speaker:
    """The environment of a row. Whatever it raises or answers wrongly is a `ConfigError`."""

    def __init__(self, config: EnvironmentConfig, prompt: Prompt):
        self._environment, self._place = opened_environment(config), prompt.place
        name = type(self._environment).__name__
        _guarded(name, prompt.place, lambda: self._environment.reset(prompt.text, prompt.columns))

    def answer(self, turn: str, number: int) -> tuple[str | None, float, bool]:
        """The text, the reward, and whether the conversation is over. Args: number: of the turn, for messages."""
        name, where = type(self._environment).__name__, f"turn {number} of the conversation of {self._place}"
        reply = _guarded(name, where, lambda: self._environment.step(turn))
        if not isinstance(reply, Observation) or not isinstance(reply.text, str | None):
            raise ConfigError(
                f"the environment {name} answered {reply!r:.80}, an Observation with a text or None expected, in {where}."
                " Correct it"
            )
        if not isinstance(reply.reward, numbers.Real) or not is_float32(reply.reward):
            raise ConfigError(
                f"the environment {name} gave the reward {shown(reply.reward)}, {what_float32_needs(reply.reward)}"
                f" expected, in {where}. Correct it"
            )
        if reply.text is not None and reply.text.encode(errors="replace").decode() != reply.text:
            raise ConfigError(
                f"the environment {name} answered {reply.text!a:.80}, not valid Unicode, in {where}. Correct it"
            )
        return reply.text, float(reply.reward), bool(reply.is_done)


def opened_environment(config: EnvironmentConfig) -> Environment:
    """Opens a new environment. Raises `ConfigError` if it cannot be opened."""
    kind = type(config).__name__
    environment = _guarded(kind, "its method open", config.open)
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"the environment {kind} opened {environment!r:.80}, an Environment expected. Correct its method open"
        )
    return environment


def _guarded(name: str, where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # an environment can raise anything
        raise ConfigError(
            f"the environment {name} raised {type(error).__name__}: {error}, in {where}. Correct it"
        ) from error
