"""Generated records about problems whose answers a program knows. Answers call the calculator."""

import abc
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.core.field_types import NonNegativeInt, PositiveInt, Seed
from jaxlm.data.base import TRAIN, VALIDATION
from jaxlm.data.sources.source_config import CorpusConfig
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.models.inference.tools.calls import CALL, OUTPUT, TEXT

Message = dict[str, Any]
Part = dict[str, str]
_HELD_OUT_EVERY = 20  # about one problem in 20 is never trained on


@dataclass(frozen=True)
class TaskCorpus(CorpusConfig):
    """Records about problems. Answers with calls are lists of parts, of the types `text`, `python` and `python_output`.

    Attributes:
        num_train: number of records for training.
        num_validation: number of records for validation, about problems that are not in training; 0 for none.
        seed: random seed of the records.
    """

    num_train: PositiveInt = 20_000
    num_validation: NonNegativeInt = 500
    seed: Seed = 0

    @property
    def splits(self) -> Sequence[str]:
        return (TRAIN, VALIDATION) if self.num_validation else (TRAIN,)

    def records(self, split: str) -> Iterator[Mapping[str, Any]]:
        for index in range(self.num_train if split == TRAIN else self.num_validation):
            yield self.record(random.Random(f"{self.seed} {split} {index}"), split)

    @abc.abstractmethod
    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        """A record about a problem of the split (see `split_of`)."""


@dataclass(frozen=True)
class ConversationCorpus(TaskCorpus):
    """Records with `messages`."""

    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        return {"messages": self.conversation(chooser, split)}

    @abc.abstractmethod
    def conversation(self, chooser: random.Random, split: str) -> list[Message]:
        """A conversation about a problem of the split (see `split_of`)."""


def split_of(problem: str) -> str:
    """The split that a problem belongs to."""
    return VALIDATION if hashlib.sha256(problem.encode()).digest()[0] % _HELD_OUT_EVERY == 0 else TRAIN


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(*parts: str | Sequence[Part]) -> Message:
    """An answer, of texts and of calls with their outputs."""
    content: list[Part] = []
    for part in parts:
        content += [{"type": TEXT, "text": part}] if isinstance(part, str) else part
    return {"role": "assistant", "content": content}


def called(expression: str) -> tuple[list[Part], str]:
    """A call of the calculator as two parts, and its output."""
    output = Calculator().run(expression)
    assert output is not None, expression
    return [{"type": CALL, "text": expression}, {"type": OUTPUT, "text": output}], output
