"""Conversations about arithmetic, in which the assistant calls a calculator."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxlm.core.field_types import Fraction
from jaxlm.data.sources.corpus import CorpusConfig
from jaxlm.data.sources.tasks.base import ConversationCorpus, Message, assistant, called, split_of, user
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
    """What draws a problem. Args: stories: how often it draws a story."""
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
