"""Conversations with environments, with a sampler that follows a script; the masks of what it returns in losses."""

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import GroupBatch, TokenBatch
from jaxlm.models.inference.tools.calls import TOOL_TOKENS
from jaxlm.objectives.next_token import NextToken
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.rl.environments import (
    ConversationLimits,
    Dialect,
    Environment,
    EnvironmentConfig,
    Observation,
    Prompt,
    converse,
)
from jaxlm.systems.rl.grpo import Grpo
from jaxlm.systems.rl.policy_losses import OfModel
from tests.objectives.test_dpo import VOCAB, random_model, target_logps
from tests.processes import together

EOS = "<eos>"
SPECIAL = {token: 200 + number for number, token in enumerate((*TOOL_TOKENS, EOS))}
NAMES = {number: token for token, number in SPECIAL.items()}
LIMITS = ConversationLimits(max_turns=4, max_new_tokens=64)


def ids(text):
    """Characters, and special tokens in `<...>`."""
    for token, number in SPECIAL.items():
        text = text.replace(token, chr(number))
    return [ord(character) for character in text]


def text_of(tokens):
    return "".join(NAMES.get(number, chr(number)) for number in tokens)


DIALECT = Dialect(lambda text: [ord(character) for character in text], text_of, SPECIAL)


class Turn(NamedTuple):
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    is_finished: bool


class Script:
    """Row -> the texts of its turns. Stops at the end of each text, or at the limit."""

    def __init__(self, *rows):
        self.rows = rows
        self.calls: list[tuple[list[str], list[int], int, int]] = []

    def __call__(self, prompts, rows, turn, max_new_tokens):
        self.calls.append(([text_of(one) for one in prompts], list(rows), turn, max_new_tokens))
        return [self._turn(row, turn, max_new_tokens) for row in rows]

    def _turn(self, row, turn, most):
        tokens = tuple(ids(self.rows[row][turn]))
        logps = tuple(-(row + 1) - turn / 10 - n / 100 for n in range(len(tokens)))
        return Turn(tokens[:most], logps[:most], len(tokens) <= most)


def prompts(*texts, **columns):
    return [Prompt(ids(text), text, columns, f"data.jsonl:{n + 1}") for n, text in enumerate(texts)]


def tool(**keys):
    config = decode(EnvironmentConfig, ConfigSource({"type": "tool", **keys}))
    config.check()
    return config


def call(text):
    return f"<|python_start|>{text}<|python_end|>"


def output(text):
    return f"<|output_start|>{text}<|output_end|>"


def test_the_calculator_answers_in_the_middle_of_a_completion():
    script = Script(["so " + call("12*7"), " is 84" + EOS], ["no" + EOS], [call("oops"), call("'aba'.count('a')"), EOS])
    config = tool(reward_per_call=0.25, reward_per_invalid_call=-1.0)
    first, second, third = converse(script, config, prompts("12*7? ", "hi ", "a? "), DIALECT, LIMITS)
    assert text_of(first.tokens) == "so " + call("12*7") + output("84") + " is 84" + EOS
    turns = [len(ids("so " + call("12*7"))), len(ids(output("84"))), len(ids(" is 84" + EOS))]
    assert first.mask == (1,) * turns[0] + (0,) * turns[1] + (1,) * turns[2]
    expected = [-1 - n / 100 for n in range(turns[0])] + [0.0] * turns[1] + [-1.1 - n / 100 for n in range(turns[2])]
    assert first.logps == tuple(expected)
    assert (first.is_finished, first.reward, len(first.turn_ends)) == (True, 0.25, 2)
    assert (text_of(second.tokens), second.mask, len(second.turn_ends)) == ("no" + EOS, (1, 1, 1), 1)
    # An invalid call has no output, as in nanochat: the policy writes on.
    assert text_of(third.tokens) == call("oops") + call("'aba'.count('a')") + output("2") + EOS
    assert (third.reward, len(third.turn_ends)) == (-0.75, 3)
    assert first.turn_ends == (turns[0], sum(turns))
    assert third.turn_ends[0] == len(ids(call("oops"))), "the next turn follows at once"
    assert [(rows, turn) for _, rows, turn, _ in script.calls] == [([0, 1, 2], 0), ([0, 2], 1), ([2], 2)]
    assert script.calls[1][0] == ["12*7? so " + call("12*7") + output("84"), "a? " + call("oops")]


@pytest.mark.parametrize(
    ("max_turns", "max_new_tokens", "text", "mask", "num_turns"),
    [
        (1, 64, call("1+1"), "11111", 1),  # nothing would follow the output
        (4, 8, call("1+1"), "11111", 1),  # no room for the output
        (4, 9, call("1+1") + output("2") + "x", "111110001", 2),
        (4, 4, call("1+1")[: -len("<|python_end|>")], "1111", 1),
    ],
)
def test_limits_end_a_conversation(max_turns, max_new_tokens, text, mask, num_turns):
    limits = ConversationLimits(max_turns, max_new_tokens)
    script = Script([call("1+1"), "xyz" + EOS], [EOS])
    found, other = converse(script, tool(), prompts("a", "b"), DIALECT, limits)
    assert (text_of(found.tokens), found.mask) == (text, tuple(map(int, mask)))
    assert (found.is_finished, len(found.turn_ends)) == (False, num_turns)
    assert found.turn_ends[-1] == len(found.tokens)
    assert other.is_finished
    assert all(most <= max_new_tokens for *_, most in script.calls)


def test_a_row_keeps_to_its_own_limit_when_others_may_write_more():
    script = Script(["abcd" + call("1"), "too long" + EOS], ["e" + call("1"), "fits" + EOS])
    first, second = converse(script, tool(), prompts("a", "b"), DIALECT, ConversationLimits(4, 16))
    assert text_of(first.tokens) == "abcd" + call("1") + output("1") + "too lo"
    assert not first.is_finished
    assert text_of(second.tokens) == "e" + call("1") + output("1") + "fits" + EOS
    assert second.is_finished
    assert len(first.tokens) == len(first.logps) == len(first.mask) == 16


_WRONG = {
    "nan": Observation(reward=float("nan")),
    "huge": Observation(reward=10**400),
    "half": Observation("a\ud800"),
}


@dataclass
class Game(Environment):
    """Guess a number."""

    secret: int = 0
    heard: list[str] = field(default_factory=list)

    def reset(self, prompt, columns):
        self.secret, self.heard = columns["secret"], [prompt]

    def step(self, completion):
        self.heard.append(completion)
        guess = completion.removesuffix(EOS)
        if guess in _WRONG:
            return _WRONG[guess]
        if guess == "exit":
            sys.exit(0)
        if int(guess) == self.secret:
            return Observation("won", reward=1.0, is_done=True)
        return Observation("higher " if int(guess) < self.secret else "lower ", reward=-0.125)


@dataclass(frozen=True)
class GameConfig(EnvironmentConfig):
    opened: Any = None

    def open(self):
        self.opened.append(Game())
        return self.opened[-1]


def test_an_environment_of_several_turns():
    config = GameConfig(opened=[])
    script = Script(["5" + EOS, "8" + EOS, "7" + EOS], ["7" + EOS])
    first, second = converse(script, config, prompts("guess", "go", secret=7), DIALECT, LIMITS)
    assert text_of(first.tokens) == f"5{EOS}higher 8{EOS}lower 7{EOS}"
    assert (first.reward, second.reward) == (0.75, 1.0)
    assert config.opened[0].heard == ["guess", "5" + EOS, "8" + EOS, "7" + EOS]
    assert config.opened[1].heard == ["go", "7" + EOS]


class Counting(Environment):
    """Never answers the same twice, as an environment on another machine would."""

    numbers = itertools.count()

    def reset(self, prompt, columns):
        assert columns, "only process 0 has the records"

    def step(self, completion):
        number = next(self.numbers)
        return Observation("x" * number, reward=number / 3, is_done=number > 3)


@dataclass(frozen=True)
class CountingConfig(EnvironmentConfig):
    def open(self):
        return Counting()


def test_all_processes_hear_the_environment_of_process_0():
    turns = ["a" + EOS, "bc" + EOS, "d" + EOS]

    def converse_on(*asked):
        return lambda: converse(Script(turns, turns), CountingConfig(), asked, DIALECT, LIMITS)

    first, second = together(converse_on(*prompts("go", "on", secret=7)), converse_on(*prompts("go", "on")))
    assert len({one.tokens for one in first}) == 2
    assert second == first


def test_an_environment_that_fails_is_named():
    for text, problem in (
        ("x", "raised ValueError: invalid literal"),
        ("nan", "gave the reward nan, a finite number"),
        ("huge", r"gave the reward 10000.*, a number from -3\.4e\+38 to 3\.4e\+38 \(float32\) expected"),
        ("half", r"answered 'a\\ud800', not valid Unicode"),
        ("exit", "raised SystemExit: 0"),
    ):
        with pytest.raises(ConfigError, match=rf"the environment Game {problem}.* turn 1 of .* data.jsonl:1"):
            converse(Script([text + EOS]), GameConfig(opened=[]), prompts("go", secret=7), DIALECT, LIMITS)
    with pytest.raises(
        ConfigError, match=r"needs the special token <\|output_start\|>, which the tokenizer does not have"
    ):
        converse(Script([]), tool(), prompts("a"), Dialect(DIALECT.encode, text_of, {}), LIMITS)


@pytest.mark.slow
def test_losses_pass_over_observations_in_the_middle():
    """The loss reads the masked targets not at all, and is the closed form over the others."""
    script = Script(["a" + call("1+1"), "b" + EOS], ["c" + call("2"), "d" + EOS])
    found = converse(script, tool(), prompts("xy", "xy"), DIALECT, LIMITS)
    length = 20
    columns = {name: np.zeros((1, 2, length), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    columns["loss_mask"] = np.zeros((1, 2, length), np.float32)
    for number, one in enumerate(found):
        tokens = [token % VOCAB for token in (*ids("xy"), *one.tokens)]
        mask = [0, 0, *one.mask]
        size = len(tokens) - 1
        columns["tokens"][0, number, :size], columns["targets"][0, number, :size] = tokens[:-1], tokens[1:]
        columns["loss_mask"][0, number, :size] = mask[1:]
        columns["segment_ids"][0, number, :size], columns["positions"][0, number, :size] = 1, range(size)
    mask = columns["loss_mask"]
    inside = (columns["segment_ids"] > 0) & (mask == 0) & (np.cumsum(mask, -1) > 0)
    assert inside.sum() == sum(one.mask.count(0) for one in found)
    model, rewards = random_model(0), np.float32([[1, 0]])

    def losses(columns):
        axes = (Axis("batch", 1), Axis("group", 2), Axis("position", length))
        named = {name: hax.named(jnp.asarray(column), axes) for name, column in columns.items()}
        batch = GroupBatch.of(hax.named(rewards, axes[:2]), **named)
        objective = Grpo(old_policy=OfModel(), kl=None)
        terms, _, _ = objective.terms(model, batch, None, key=None)
        flat = {name: column.flatten_axes(("batch", "group"), "batch") for name, column in named.items()}
        supervised, _, _ = NextToken().terms(model, TokenBatch(**flat), None, key=None)
        return float(terms["loss"].mean()), float(supervised["loss"].mean())

    before = losses(columns)
    other = np.where(inside, (columns["targets"] + 1) % VOCAB, columns["targets"])
    assert losses(columns | {"targets": other}) == before
    logps = target_logps(model, columns)
    advantages = np.array([[1.0], [-1.0]])
    assert before[0] == pytest.approx(-(advantages * mask[0]).sum() / mask.sum(), rel=1e-5)
    assert before[1] == pytest.approx(-(logps * mask).sum() / mask.sum(), rel=1e-5)
