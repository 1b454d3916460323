"""Problems of arithmetic for training on preferences and rewards: with right and wrong answers, or with the result alone."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval

from jaxlm.core.field_types import LARGEST_INT, Fraction
from jaxlm.data.sources.corpus import CorpusConfig
from jaxlm.data.sources.tasks.arithmetic import Problem, answered, problem_maker
from jaxlm.data.sources.tasks.base import Message, TaskCorpus, user
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.models.inference.tools.calls import CALL, OUTPUT, TOOL_TOKENS
from jaxlm.reading.choices import choice

_DIGIT = re.compile(r"\d")
_OPERATOR = re.compile(r"(?<= )[-+*/](?= )")
_RIGHT, _WRONG = 1.0, 0.0


@dataclass(frozen=True)
class ArithmeticCorpus(TaskCorpus):
    """Base of what is made from problems of arithmetic.

    Attributes:
        stories: share of the problems that are stories. The others ask for one result.
    """

    stories: Fraction = 0.4

    @property
    def version(self) -> str:
        return "1"


@choice(CorpusConfig, "arithmetic_pairs")
class ArithmeticPairs(ArithmeticCorpus):
    """Preference pairs: a right answer to a problem, and one in which a digit or an operator was copied wrongly."""

    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        problem = _problem(chooser, split, self.stories)
        right, wrong = answered(problem)[0], answered(_mistaken(chooser, problem))[0]
        return {"prompt": [user(problem.question)], "chosen": [right], "rejected": [wrong]}


@choice(CorpusConfig, "arithmetic_groups")
class ArithmeticGroups(ArithmeticCorpus):
    """Groups of answers to a problem, at least one of them right and one wrong, with a reward of 1 or 0 each.

    Attributes:
        group_size: number of answers in a group, as in `data.format.group_size`.
    """

    group_size: Annotated[int, Interval(ge=2, le=LARGEST_INT)] = 4

    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        problem = _problem(chooser, split, self.stories)
        num_right = chooser.randrange(1, self.group_size)
        rewards = [_RIGHT] * num_right + [_WRONG] * (self.group_size - num_right)
        chooser.shuffle(rewards)
        answers = [answered(problem if reward == _RIGHT else _mistaken(chooser, problem))[0] for reward in rewards]
        return {"prompt": [user(problem.question)], "responses": list(map(_as_text, answers)), "rewards": rewards}


@choice(CorpusConfig, "arithmetic_prompts")
class ArithmeticPrompts(ArithmeticCorpus):
    """Problems whose answers the model samples, with the result as `answer`, and as `difficulty` the number of digits that a
    right answer computes with.
    """

    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        problem = _problem(chooser, split, self.stories)
        digits = sum(len(_DIGIT.findall(call)) for call in _calls(problem))
        result = answered(problem)[1].removesuffix(".0")
        return {"prompt": [user(problem.question)], "answer": result, "difficulty": digits}


def _calls(problem: Problem) -> list[str]:
    """The expressions of a right answer."""
    return [part["text"] for part in answered(problem)[0]["content"] if part["type"] == CALL]


def _problem(chooser: random.Random, split: str, stories: float) -> Problem:
    make = problem_maker(chooser, stories)
    while (problem := make(chooser, split)) is None:
        pass
    return problem


def _mistaken(chooser: random.Random, problem: Problem) -> Problem:
    """The problem with another digit or operator in one of its expressions, and with another result."""
    _, right = answered(problem)
    while True:
        steps = list(problem.steps)
        at = chooser.randrange(len(steps))
        steps[at] = _changed(chooser, steps[at])
        outputs = _outputs(steps)
        if outputs and all(output.lstrip("-").isdigit() for output in outputs) and outputs[-1] != right:
            return problem._replace(steps=tuple(steps))


def _changed(chooser: random.Random, expression: str) -> str:
    """The expression with another digit or another operator."""
    is_digit = chooser.random() < 0.5
    match = chooser.choice(list((_DIGIT if is_digit else _OPERATOR).finditer(expression)) or [None])
    if match is None:  # `{} - {}` has no digits
        return expression
    others = ("0123456789" if is_digit else "+-*").replace(match.group(), "")
    return f"{expression[: match.start()]}{chooser.choice(others)}{expression[match.end() :]}"


def _outputs(steps: list[str]) -> list[str]:
    """What the calculator answers to each step; empty if it has no answer to one of them."""
    outputs: list[str] = []
    for step in steps:
        output = Calculator().run(step.format(*outputs[-1:]))
        if output is None:
            return []
        outputs.append(output.removesuffix(".0"))
    return outputs


def _as_text(answer: Message) -> str:
    """An answer as a text in which special tokens stand around calls and outputs."""
    call_start, call_end, output_start, output_end = TOOL_TOKENS
    around = {CALL: (call_start, call_end), OUTPUT: (output_start, output_end)}
    pieces = ((around.get(part["type"], ("", "")), part["text"]) for part in answer["content"])
    return "".join(f"{before}{text}{after}" for (before, after), text in pieces)
