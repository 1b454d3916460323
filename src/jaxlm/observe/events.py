"""What happens in a run, as typed records of `events.jsonl`. The console shows the text of each."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from jaxlm.core.errors import table
from jaxlm.core.values.logged import LayerTable
from jaxlm.observe.records import is_count

Rows = Sequence[tuple[str, str]]
_Kind = TypeVar("_Kind")
LAYERS_ROW, TRAINS_ROW, HIDDEN_ROW = "layers", "trains", "hidden tokens"
"""Rows of a phase that the table of all phases shows too."""


class Event(Protocol):
    """A dataclass whose fields are JSON. Attributes: type: its name in the file."""

    type: ClassVar[str]

    @property
    def text(self) -> str:
        """What the console shows."""
        ...


@dataclass(frozen=True)
class RunStart:
    """A start of the run. Attributes: rows: what runs, on which devices, and why each choice was made."""

    type: ClassVar[str] = "start"
    rows: Rows

    @property
    def text(self) -> str:
        return table("run", self.rows)


@dataclass(frozen=True)
class PhaseStart:
    """A phase that a start enters or continues.

    Attributes:
        start, end: steps of the run before the phase and after it, as planned now.
        num_phases: of the whole run.
        rows: its layers, what it trains, and how.
    """

    type: ClassVar[str] = "phase"
    name: str
    start: int
    end: int
    num_phases: int
    rows: Rows

    @property
    def text(self) -> str:
        return table(f"phase '{self.name}': parameters", self.rows)


@dataclass(frozen=True)
class StoredSequences:
    """What the objective of a phase reads from disk, such as the output of a frozen trunk."""

    type: ClassVar[str] = "stored"
    phase: str
    count: int
    megabytes: float
    folder: str

    @property
    def size(self) -> str:
        return f"sequences ({self.megabytes:,.1f} MB)"

    @property
    def text(self) -> str:
        return f"phase '{self.phase}': reads {self.count:,} stored {self.size} from {self.folder}"


@dataclass(frozen=True)
class SkippedStep:
    """A step that made no update.

    Attributes:
        reason: empty if it is not known.
        batch: what its batch was made of.
        num_skipped: in the whole run, with this one.
    """

    type: ClassVar[str] = "skip"
    step: int
    reason: str
    batch: str
    num_skipped: int

    @property
    def text(self) -> str:
        skipped = f"update skipped ({self.num_skipped} skipped so far)"
        return f"step {self.step}: {self.reason}; {skipped}. Batch: {self.batch}"


_TYPES: Mapping[str, type] = {
    kind.type: kind for kind in (RunStart, PhaseStart, StoredSequences, SkippedStep, LayerTable)
}


def parse_event(record: Mapping[str, Any]) -> Event | None:
    """The event that a record of the file describes; None if it is damaged."""
    kind = _TYPES.get(str(record.get("type")))
    return None if kind is None else parse_record(kind, record)


def parse_record(kind: type[_Kind], record: Mapping[str, Any]) -> _Kind | None:
    """A dataclass from a record that was written of it; None if the record is damaged."""
    try:
        return kind(**{name: _decoded(record[name], hint) for name, hint in _hints(kind).items()})
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decoded(value: Any, hint: Any) -> Any:
    """A JSON value as the type of a field. A number that is null is NaN."""
    container, of = typing.get_origin(hint), typing.get_args(hint)
    if container is types.UnionType:
        return None if value is None else _decoded(value, of[0])
    if isinstance(value, list) and container is Sequence:
        return [_decoded(one, of[0]) for one in value]
    if isinstance(value, list) and container is tuple:
        return tuple(_decoded(one, part) for one, part in zip(value, of, strict=True))
    if isinstance(value, dict) and container is Mapping:
        return {name: _decoded(one, of[1]) for name, one in value.items()}
    if hint is float and (value is None or isinstance(value, int | float)):
        return math.nan if value is None else float(value)
    if is_count(value) if hint is int else hint in (str, bool) and isinstance(value, hint):
        return value
    raise ValueError
