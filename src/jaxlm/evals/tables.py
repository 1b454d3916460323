"""The interface of tables: measurements of several models beside each other, as a paper shows them."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.evals.base import Score, ValidationSet
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name

Row = dict[str, Any]
"""Texts and numbers by the names of their columns. None where there is nothing to measure: an empty cell."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: in the CSV file.
        title: in LaTeX and in pictures, with the unit.
        meaning: what its values are.
        spec: how LaTeX shows a number, as of `format`.
    """

    name: str
    title: str
    meaning: str
    spec: str = ""


MODEL = Column("model", "model", "the run's id, or the name of a reference")
DTYPE = Column("dtype", "dtype", "dtype of the model's computation")
BATCH_SIZE = Column("batch", "batch", "sequences at once")
CACHE = Column("cache", "cache", "dtype of keys and values in the cache")


@dataclass(frozen=True)
class Picture:
    """A picture of a table: one panel for each `y`, a line for each model and each combination of `lines`.

    Attributes:
        suffix: of the file's name, after that of the table.
        x, y, lines: names of columns.
    """

    suffix: str
    x: str
    y: tuple[str, ...]
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Holds what was measured.

    Attributes:
        name: of its files.
        caption: a sentence, for LaTeX.
    """

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    picture: Picture | None


@dataclass(frozen=True)
class Subject:
    """A model to measure, with what the measurements need.

    Attributes:
        name: in the column `model`.
        model: in the dtypes of its computation.
        max_tokens: the longest text that all models of the table can read.
        validation: the validation data of each source, as sequences of a length. All processes must call it.
        score: scores the targets of a validation batch.
        log: prints a line.
    """

    name: str
    model: LanguageModel
    precision: Precision
    layout: Layout
    max_tokens: int
    validation: Callable[[int], Sequence[ValidationSet]]
    score: Score
    log: Callable[[str], None]


@dataclass(frozen=True)
class TableConfig(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A table of the run's model and of each model in `refs`. `jaxlm train` writes all tables after the last phase, and
    `jaxlm tables` at any time.

    Attributes:
        name: of its files; null uses the type. Two tables of one type need names.
    """

    reads_validation: ClassVar[bool] = False
    """Whether it measures nothing without validation data."""

    columns: ClassVar[tuple[Column, ...]] = ()
    picture: ClassVar[Picture | None] = None

    name: str | None = dataclasses.field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def caption(self) -> str:
        """A sentence on the table."""

    @abc.abstractmethod
    def check(self, key: str, max_tokens: int) -> None:
        """Raises `ConfigError` for lengths beyond what the models can read. Args: key: path of the section, for messages."""

    @abc.abstractmethod
    def rows(self, subject: Subject) -> list[Row]:
        """Measures a model. All processes must call it, inside `subject.layout.use()`."""


def lengths_that_fit(
    key: str, given: Sequence[int] | None, default: Sequence[int], max_tokens: int, at_least: int = 1
) -> tuple[int, ...]:
    """The lengths to measure: those given, or those of the default that all models can read.

    Raises:
        ConfigError: a length is out of range, or none is left.
    """
    if given is None:
        if fitting := tuple(length for length in default if at_least <= length <= max_tokens):
            return fitting
        raise ConfigError(
            f"{key}: null given, but the models read at most {max_tokens} tokens, and the shortest default is {min(default)}."
            f" Set it to lengths from {at_least} to {max_tokens}"
        )
    check_distinct(key, given)
    for length in given:
        if not at_least <= length <= max_tokens:
            raise ConfigError(
                f"{key}: {length} given, but lengths from {at_least} to {max_tokens} expected, which all models of the table"
                " can read. Remove it, or leave the shorter model out"
            )
    return tuple(given)


def check_distinct(key: str, given: Sequence[object]) -> None:
    """Raises `ConfigError` for a list that is empty, or has a value twice."""
    if not given:
        raise ConfigError(f"{key}: an empty list given. Name at least one, or remove it")
    if twice := [value for value in given if given.count(value) > 1]:
        raise ConfigError(f"{key}: {twice[0]} given twice. Remove one")


def check_tables(tables: Sequence[TableConfig], seq_lens: Mapping[str, int], *, has_validation: bool) -> None:
    """Raises `ConfigError` for tables that cannot be measured, or whose files would have the same name.

    Args:
        seq_lens: name of each model -> tokens that it can read.
        has_validation: whether there is validation data.
    """
    names: set[str] = set()
    for number, table in enumerate(tables):
        key, name = f"tables.{number}", file_name(table)
        if not name or not all(letter.isalnum() or letter in "-_." for letter in name) or name.startswith("."):
            raise ConfigError(
                f"{key}.name: '{name}' given, but letters, digits, '-', '_' and '.' expected, as in a file name"
            )
        if name in names:
            raise ConfigError(f"{key}.name: another table is written to {name}.csv too. Give each a name of its own")
        names.add(name)
        if table.reads_validation and not has_validation:
            raise ConfigError(
                f"{key}: type {choice_name(type(table))} needs validation data. Set data.validation_urls or"
                " data.num_validation_sequences, or remove the table"
            )
        table.check(key, min(seq_lens.values()))


def file_name(table: TableConfig) -> str:
    """The name of a table's files, without suffix."""
    return choice_name(type(table)) if table.name is None else table.name
