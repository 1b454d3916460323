"""Arithmetic: conversations in which the assistant calls a calculator, and problems with right and wrong answers."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from annotated_types import Interval

from jaxlm.core.field_types import LARGEST_INT, Fraction
from jaxlm.data.sources.source_config import CorpusConfig
from jaxlm.data.sources.tasks.base import ConversationCorpus, Message, TaskCorpus, assistant, called, split_of, user
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.models.inference.tools.calls import CALL, OUTPUT, TOOL_TOKENS
from jaxlm.reading.choices import choice

_ASKED = ("What is {}?", "Calculate {}.", "How much is {}?", "{} = ?", "Please compute {}.")
_NAMES = ("Ada", "Ben", "Chen", "Dana", "Emil", "Fatima", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
_THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "pencils", "shells", "stamps", "tiles")
_MAX_TRIES = 100  # follow-up questions for one result; some results have none of the split
_NEXT = (("Now double that.", "* 2"), ("Add {} to that.", "+ {}"), ("Multiply that by {}.", "* {}"))


@choice(CorpusConfig, "arithmetic")
class ArithmeticCorpus(ConversationCorpus):
    """Sums, differences, products and quotients, and stories that need two of them.

    Attributes:
        stories: share of the conversations that are about a story. The others ask for one result.
        follow_ups: share of the conversations in which a second question is about the result of the first.
    """

    stories: Fraction = 0.4
    follow_ups: Fraction = 0.2

    @property
    def version(self) -> str:
        return "2"

    def conversation(self, chooser: random.Random, split: str) -> list[Message]:
        make = problem_maker(chooser, self.stories)
        goes_on = chooser.random() < self.follow_ups
        while True:
            problem = make(chooser, split)
            if problem is None:
                continue
            answer, result = answered(problem)
            more = _follow_up(chooser, split, result) if goes_on else []
            if more is not None:
                return [user(problem.question), answer, *more]


class Problem(NamedTuple):
    """A problem, and how it is solved.

    Attributes:
        question: what the user asks.
        steps: one expression, or two, of which the second has `{}` for the result of the first.
        closing: the last sentence of a story's answer, with `{}` for its result; None for a single expression.
    """

    question: str
    steps: tuple[str, ...]
    closing: str | None


ProblemMaker = Callable[[random.Random, str], Problem | None]
"""(random numbers, split) -> a problem; None if the one that was drawn is not of the split."""


def problem_maker(chooser: random.Random, stories: float) -> ProblemMaker:
    """Chooses the function that draws a problem. Args: stories: how often it draws a story."""
    return _story if chooser.random() < stories else _question


def answered(problem: Problem) -> tuple[Message, str]:
    """The answer to a problem, with its calls of the calculator, and its result."""
    first, *more = problem.steps
    call, output = called(first)
    if problem.closing is None:
        result = output.removesuffix(".0")
        return assistant(f"{first} is ", call, f"{result}."), result
    next_call, result = called(more[0].format(output))
    closing = problem.closing.format(result)
    return assistant("First: ", call, f"{output}. Then: ", next_call, f"{result}. {closing}"), result


def _question(chooser: random.Random, split: str) -> Problem | None:
    a, b = chooser.randrange(2, 1000), chooser.randrange(2, 1000)
    small, other = chooser.randrange(2, 100), chooser.randrange(2, 100)
    expression = chooser.choice((f"{a} + {b}", f"{a} - {b}", f"{small} * {other}", f"{small * other} / {small}"))
    if split_of(expression) != split:
        return None
    return Problem(chooser.choice(_ASKED).format(expression), (expression,), None)


def _story(chooser: random.Random, split: str) -> Problem | None:
    question, first, second, closing = chooser.choice(_STORIES)(chooser)
    if split_of(first) != split:
        return None
    _, output = called(first)
    if split_of(second.format(output)) != split:
        return None
    return Problem(question, (first, second), closing)


def _boxes(chooser: random.Random) -> Sequence[str]:
    name, things = chooser.choice(_NAMES), chooser.choice(_THINGS)
    boxes, per_box = chooser.randrange(2, 30), chooser.randrange(5, 50)
    num_given = chooser.randrange(1, boxes * per_box)
    question = f"{name} has {boxes} boxes with {per_box} {things} each, and gives away {num_given} {things}."
    asked, closing = f"How many {things} are left?", f"{name} has {{}} {things} left."
    return f"{question} {asked}", f"{boxes} * {per_box}", f"{{}} - {num_given}", closing


def _change(chooser: random.Random) -> Sequence[str]:
    name, things = chooser.choice(_NAMES), chooser.choice(_THINGS)
    count, price = chooser.randrange(2, 20), chooser.randrange(2, 30)
    paid = count * price + chooser.randrange(1, 50)
    question = f"{name} buys {count} {things} for {price} dollars each, and pays with {paid} dollars."
    return f"{question} How much change is that?", f"{count} * {price}", f"{paid} - {{}}", "The change is {} dollars."


def _days(chooser: random.Random) -> Sequence[str]:
    name, things = chooser.choice(_NAMES), chooser.choice(_THINGS)
    first, second, times = chooser.randrange(2, 200), chooser.randrange(2, 200), chooser.randrange(2, 9)
    question = (
        f"{name} finds {first} {things} on Monday and {second} on Tuesday. Next week it is {times} times as many."
    )
    closing = f"{name} finds {{}} {things} next week."
    return f"{question} How many {things} is that?", f"{first} + {second}", f"{{}} * {times}", closing


_STORIES: tuple[Callable[[random.Random], Sequence[str]], ...] = (_boxes, _change, _days)


def _follow_up(chooser: random.Random, split: str, result: str) -> list[Message] | None:
    """A second question with its answer; None if none of the split has been found."""
    for _ in range(_MAX_TRIES):
        asked, applied = chooser.choice(_NEXT)
        number = chooser.randrange(2, 50)
        expression = f"{result} {applied.format(number)}"
        if split_of(expression) == split:
            call, output = called(expression)
            return [user(asked.format(number)), assistant(f"{expression} is ", call, f"{output}.")]
    return None


_DIGIT = re.compile(r"\d")
_OPERATOR = re.compile(r"(?<= )[-+*/](?= )")
_RIGHT, _WRONG = 1.0, 0.0


@dataclass(frozen=True)
class ArithmeticProblems(TaskCorpus):
    """Base of what is made from problems of arithmetic.

    Attributes:
        stories: share of the problems that are stories. The others ask for one result.
    """

    stories: Fraction = 0.4

    @property
    def version(self) -> str:
        return "1"


@choice(CorpusConfig, "arithmetic_pairs")
class ArithmeticPairs(ArithmeticProblems):
    """Preference pairs: a right answer to a problem, and one in which a digit or an operator was copied wrongly."""

    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        problem = _problem(chooser, split, self.stories)
        right, wrong = answered(problem)[0], answered(_mistaken(chooser, problem))[0]
        return {"prompt": [user(problem.question)], "chosen": [right], "rejected": [wrong]}


@choice(CorpusConfig, "arithmetic_groups")
class ArithmeticGroups(ArithmeticProblems):
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
class ArithmeticPrompts(ArithmeticProblems):
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
    """Returns what the calculator answers to each step; empty if it has no answer to one of them."""
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
