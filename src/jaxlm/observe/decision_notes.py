"""The decisions of controllers in `decisions.jsonl`: read, in words, and as bands of strategies. A file may be damaged."""

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

from jaxlm.observe.records import is_count

_MAX_CHARACTERS = 400  # of a decision in words
_MAX_NAME = 60


class LoggedDecision(NamedTuple):
    """A decision of a run.

    Attributes:
        step: whose metrics led to it.
        note: what it decided and why, as in docs/design/0033.
        shown_at: where pictures show it: at `step`, or, if the run went back to before that, where it went on.
        is_superseded: whether the run went back to before `step`, which it has done again since.
    """

    step: int
    controller: str
    note: Mapping[str, Any]
    shown_at: int
    is_superseded: bool

    @property
    def is_done(self) -> bool:
        """Tells whether the run has followed it. Controllers that only monitor say what they would do."""
        return self.note.get("would") is not True

    @property
    def is_rollback(self) -> bool:
        return self.note["event"] == "rollback"


class Band(NamedTuple):
    """Steps of one strategy. Attributes: begin, end: steps done before it and with it."""

    begin: int
    end: int
    name: str


def decisions_of(records: Iterable[Mapping[str, Any]], attempt_ends: Mapping[int, float]) -> list[LoggedDecision]:
    """The decisions in records. Args: attempt_ends: of the run's metrics, as `records.attempt_ends` returns them."""
    decisions = []
    for record in records:
        step, end = record["step"], attempt_ends.get(record.get("attempt", 0), math.inf)
        note = {key: value for key, value in record.items() if key not in ("step", "attempt", "controller")}
        shown_at = max(0, int(end) - 1) if step >= end else step
        decisions.append(LoggedDecision(step, _name(record["controller"]), note, shown_at, step >= end))
    return decisions


def described(note: Mapping[str, Any]) -> str:
    """Says what was decided, in plain words that follow the controller's name. An unknown event is listed as it is."""
    text = _known(note) or f"{note.get('event')}: {_listed(note.items())}"
    return shorten(text, _MAX_CHARACTERS, placeholder=" ...")


def numbers(controller: str, note: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a note as metrics: `orchestrator/switch` (1: it happened), `orchestrator/branch/losses/NAME`."""
    prefix = f"{controller}/{note['event']}"
    metrics = {prefix: 1.0}
    for key, value in note.items():
        for name, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
            if isinstance(one, bool | int | float):
                metrics[f"{prefix}/{key}" if name is None else f"{prefix}/{key}/{name}"] = float(one)
    return metrics


def strategy_bands(decisions: Sequence[LoggedDecision], end: int) -> list[Band]:
    """Lists which strategy trained which steps, as far as the decisions say. Args: end: steps done."""
    followed = [one for one in decisions if one.is_done and (one.is_rollback or not one.is_superseded)]
    # A branch whose winner is another strategy is followed by the switch to it, which says what the strategy was before.
    names = [one.note.get("from") for one in followed] + [one.note.get("winner") for one in followed]
    changes = [(0, name) for name in names if isinstance(name, str)][:1]
    for decision in followed:
        note = decision.note
        name = note.get("winner", note.get("to"))
        if isinstance(name, str):
            # The first step of the strategy: of a switch, with new controls; of a branch, of all candidates.
            first = None if decision.is_rollback else note.get("effective", note.get("first"))
            begin = max(0, first - 1) if is_count(first) else decision.shown_at
            while changes and changes[-1][0] >= begin:
                changes.pop()
            changes.append((begin, name))
    bands: list[Band] = []
    for begin, name in reversed(changes):
        if bands and bands[-1].name == _name(name):
            bands[-1] = bands[-1]._replace(begin=begin)
        elif begin < end:
            bands.append(Band(begin, end, _name(name)))
        end = min(begin, end)
    return bands[::-1]


def _known(note: Mapping[str, Any]) -> str:
    """The words for a known event; empty if it is another one, or lacks something."""
    would = note.get("would") is True
    change = f" from {note['from']}" if isinstance(note.get("from"), str) else ""
    change += f" to {note['to']}" if isinstance(note.get("to"), str) else ""
    reason = f" ({note['reason']})" if isinstance(note.get("reason"), str) else ""
    losses = note["losses"] if isinstance(note.get("losses"), Mapping) else {}
    match note:
        case {"event": "switch", "to": str()}:
            begin = f", with step {note['effective']}" if is_count(note.get("effective")) and not would else ""
            return f"{'would switch' if would else 'switches'}{change}{begin}{reason}"
        case {"event": "rollback", "to": str()}:
            why = f": {note['cause']}" if isinstance(note.get("cause"), str) else reason
            place = f" to before step {note['first']}" if is_count(note.get("first")) else ""
            change = f", with {note['to']} again" if note.get("from") == note["to"] else change
            return f"{'would go back' if would else 'goes back'}{place}{change}{why}"
        case {"event": "branch", "candidates": [*names]} if would and all(isinstance(name, str) for name in names):
            return f"would try {', '.join(names)}{reason}"
        case {"event": "boundary", "strategy": str(strategy)}:
            return f"keeps {strategy}: the budget does not allow trying others yet{reason}"
        case {"event": "spike", "loss": float(loss)}:
            return f"sees a spike: the mean of the loss is {loss:.4f}"
        case {"event": "branch", "winner": str(winner)} if losses:
            until = f" up to step {note['until']}" if is_count(note.get("until")) else ""
            return f"tried {_listed(losses.items())}{until}, and continues with {winner}{reason}"
        case {"event": "nowcast"} if would:
            return "would try to extrapolate the weights"
        case {"event": "nowcast", "accepted": bool(accepted)}:
            verb = "extrapolates" if accepted else "does not extrapolate"
            return f"{verb} the weights{f' ({_listed(losses.items())})' if losses else ''}"
        case _:
            return ""


def _listed(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in items if name != "event")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"({_listed(value.items())})" if isinstance(value, Mapping) else str(value)


def _name(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}…"
