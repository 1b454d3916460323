"""Asks the controllers of a phase what happens next, remembers what they say, and puts new controls into the state.

A decision takes effect at a step that follows from the step of its metrics alone, whenever these are fetched:

    evaluation after step s    right after it: step s + 1 is the first with new controls
    branch that ends at s      right after it
    metrics of step s          before step s + MAX_IN_FLIGHT, when they have been fetched in any case
    Rewind                     when it is decided: the steps since are abandoned whatever their number

Until then, it waits in the history, which every checkpoint contains.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeGuard

from jaxlm.controllers.base import (
    Answer,
    Branch,
    Branched,
    Controller,
    Decision,
    DoneStep,
    Hold,
    Json,
    Keep,
    Next,
    Noted,
    Rewind,
    SetControls,
)
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import EVAL_PREFIX, SKIPPED
from jaxlm.core.runtime import from_main
from jaxlm.core.sharding import Layout
from jaxlm.engine.checkpoint.manager import Saver
from jaxlm.engine.hooks import Evaluations
from jaxlm.engine.metrics import MAX_IN_FLIGHT
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, with_controls

Note = Callable[[int, str, Mapping[str, Json]], None]
"""Gets the step of a decision, the name of the controller, and what the run's records say about it."""


@dataclass(frozen=True)
class _Memory:
    """Holds what the history says about a controller.

    Attributes:
        state: its state.
        controls: the controls in effect that it has set, by name.
        pending: decisions that are not in effect yet: {"after": steps done}, and one of "controls": values, "keep": purpose,
            "next": fields and "branch": fields.
        keeps: the purpose of the checkpoint that it keeps; None if it keeps none.
    """

    state: Json
    controls: Mapping[str, float] = field(default_factory=dict)
    pending: tuple[Mapping[str, Any], ...] = ()
    keeps: str | None = None

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "_Memory":
        return _Memory(**{**saved, "pending": tuple(saved.get("pending", ()))})

    def to_json(self) -> dict[str, Any]:
        others = {"controls": dict(self.controls), "pending": list(self.pending), "keeps": self.keeps}
        return {"state": self.state} | {name: value for name, value in others.items() if value}


class Control:
    """The controllers of a phase. All processes call it with the same numbers in the same order."""

    def __init__(
        self,
        phase: Phase,
        saver: Saver,
        layout: Layout,
        evaluations: Evaluations | None = None,
        note: Note = lambda step, name, fields: None,
        *,
        skipped: int = 0,
    ):
        """Args: skipped: number of updates skipped in the run so far."""
        self._phase, self._saver, self._layout, self._evaluations = phase, saver, layout, evaluations
        self._note, self._skipped = note, skipped
        self._holding: set[str] = set()
        names = [name for controller in phase.controllers for name in controller.metrics.values()]
        self._reads_evaluations = any(name.startswith(EVAL_PREFIX) for name in names)

    def begin(self, state: RunState) -> RunState:
        """The state with the controls that are in effect. The history says which: a run that starts from another run's state,
        or whose controllers have changed, does not go by the arrays of the checkpoint. Controllers that are gone are
        forgotten, unless they keep a checkpoint.

        Raises:
            ConfigError: a controller cannot go on with the keys of the phase.
        """
        names, history = {controller.name for controller in self._phase.controllers}, self._saver.history
        staying = {name: it for name, it in history.controllers.items() if name in names or "keeps" in it}
        self._saver.history = replace(history, controllers=staying)
        for controller in self._phase.controllers:
            resumed = controller.persistence.resumed
            if controller.name in staying and (now := resumed(self._memory(controller).state)) is not None:
                memory = replace(self._memory(controller), state=now[0], controls=now[1], pending=())
                self._remember(controller, memory)
        return self._with_controls(state) if self._phase.controls else state

    def is_due(self, step: int) -> bool:
        """Tells whether decisions take effect after `step`."""
        memories = self._saver.history.controllers
        pending = (memories.get(controller.name, {}).get("pending", ()) for controller in self._phase.controllers)
        return any(decision["after"] <= step for decisions in pending for decision in decisions)

    def take_effect(self, state: RunState, step: int) -> tuple[RunState, Next | None]:
        """Puts the controls that are due after `step` into the state. Returns how the phase ends, if it ends here.

        A branch that is due stays so until `branched`, after which `take_effect` follows.
        """
        ended = None
        for controller in self._phase.controllers:
            memory = self._memory(controller)
            controls, later = dict(memory.controls), []
            for decision in memory.pending:
                if decision["after"] > step or "branch" in decision:
                    later.append(decision)
                    continue
                controls |= decision.get("controls", {})
                ended = ended or (Next(**decision["next"]) if "next" in decision else None)
                if "keep" in decision:
                    self._saver.keep(decision["keep"], step + 1)
            self._remember(controller, replace(memory, controls=controls, pending=tuple(later)))
        return (self._with_controls(state) if self._phase.controls else state), ended

    def branch(self, step: int) -> Branch | None:
        """The branch that is due after `step`."""
        due = self._due_branch(step)
        return None if due is None else due[1]

    def with_candidate(self, state: RunState, changes: Mapping[str, float]) -> RunState:
        """The state with the controls of a candidate of a branch."""
        return self._with_controls(state, changes)

    def branched(self, step: int, branch: Branch, result: Branched) -> None:
        """Asks the controller what follows from its branch, which has ended after `step`, before it learns of its steps.

        Raises:
            StopRunError: the controller ends the run.
        """
        due = self._due_branch(step)
        assert due is not None
        controller, _ = due
        memory = self._memory(controller)
        controls = {**memory.controls, **branch.candidates[result.winner], **branch.ending}
        others = tuple(decision for decision in memory.pending if "branch" not in decision)
        done = replace(self._done(step), branched=result)
        remembered, answer = controller.after(done, {}, memory.state)
        before = replace(memory, state=remembered, controls=controls, pending=others)
        decision = self._noted(controller, step, answer)
        assert decision is None or isinstance(decision, SetControls), f"{controller.name}: {decision} after a branch"
        self._remember(controller, self._after(before, decision, done, takes_effect_now=True))

    def after_step(self, step: int, metrics: Mapping[str, float], is_whole: bool) -> Rewind | None:
        """Asks the controllers that need metrics of a training step. Returns how the run goes back, if it does.

        Args:
            metrics: what the devices measured in it.
            is_whole: whether that is all that they ever measure (`trainer.watch` has an interval).

        Raises:
            ConfigError: a controller needs a metric that is not measured.
            StopRunError: a controller ends the run.
        """
        skipped = int(metrics[SKIPPED])
        is_skipped = skipped > self._skipped
        done = replace(self._done(step), is_skipped=is_skipped, effective=step + MAX_IN_FLIGHT)
        self._skipped = skipped
        if is_whole:
            self._check_measured(metrics, step, of_evaluations=False)
        decided = self._ask(done, metrics, of_evaluations=False)
        return decided if isinstance(decided, Rewind) else None

    def after_evaluation(self, step: int) -> Rewind | Next | None:
        """Asks the controllers that need metrics of evaluations. Returns how the phase ends or the run goes back, if so.

        Raises: as `after_step`, on all processes.
        """
        if not self._reads_evaluations or self._evaluations is None:
            return None
        if any("keeps" in memory for memory in self._saver.history.controllers.values()):
            self._saver.settle()  # a kept checkpoint may have failed
        metrics = from_main(lambda: self._measured(step))
        return self._ask(self._done(step), metrics, of_evaluations=True)

    def after_rewind(self, then: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Returns what the controllers remember when the run has gone back.

        Args:
            then: what they remembered in that checkpoint.
            step: of the checkpoint.
        """
        now = self._saver.history.controllers
        rewound = {controller.name: controller.persistence.rewound for controller in self._phase.controllers}
        survivors = {name: change for name, change in rewound.items() if change is not None}
        staying = {name: dict(now[name]) for name in survivors.keys() & now.keys()}
        for name, memory in staying.items():
            memory.pop("pending", None)
            memory["state"] = survivors[name](memory["state"], step)
        return {name: memory for name, memory in then.items() if name not in survivors} | staying

    def _ask(self, done: DoneStep, metrics: Mapping[str, float], *, of_evaluations: bool) -> Rewind | Next | None:
        decided: Rewind | Next | None = None
        for controller in self._phase.controllers:
            if isinstance(decided, Rewind):
                break  # of two that would go back, the first does
            names = [name for name in controller.metrics.values() if name.startswith(EVAL_PREFIX) == of_evaluations]
            measured = {name: metrics[name] for name in names if name in metrics}
            if not measured:
                continue
            before = self._memory(controller)
            state, answer = controller.after(done, measured, before.state)
            decision = self._noted(controller, done.number, answer)
            if isinstance(decision, Keep) and of_evaluations:
                self._saver.keep(decision.purpose, done.number, controller.name)
            now = replace(before, state=state)
            self._remember(controller, self._after(now, decision, done, takes_effect_now=of_evaluations))
            (self._holding.add if isinstance(decision, Hold) else self._holding.discard)(controller.name)
            if decided is None and self._acts_now(decision, done, of_evaluations):
                decided = decision
        self._saver.holds = bool(self._holding)
        return decided

    def _acts_now(self, decision: Decision | None, done: DoneStep, of_evaluations: bool) -> TypeGuard[Rewind | Next]:
        """Tells whether the loop ends here. After its last step, a phase that keeps its weights is done anyway."""
        is_done_anyway = isinstance(decision, Next) and done.is_last and decision.weights is None
        return isinstance(decision, Rewind) or (isinstance(decision, Next) and of_evaluations and not is_done_anyway)

    def _after(self, memory: _Memory, decision: Decision | None, done: DoneStep, *, takes_effect_now: bool) -> _Memory:
        """Returns what is remembered of a decision."""
        after = done.effective - 1
        then: dict[str, Any]
        match decision:
            case SetControls(values):
                assert values.keys() <= self._phase.controls.keys(), f"{sorted(values)} are not all in controls()"
                then = {"controls": dict(values)}
            case Next() if not takes_effect_now:
                then = {"next": asdict(decision)}
            case Keep(purpose) if takes_effect_now:
                return replace(memory, keeps=purpose)
            case Keep(purpose):
                then = {"keep": purpose}
            case Branch():
                then = {"branch": asdict(decision)}
            case Rewind(controls=values):
                return replace(memory, controls={**memory.controls, **values})
            case _:
                return memory
        return replace(memory, pending=(*memory.pending, {"after": after, **then}))

    def _done(self, step: int) -> DoneStep:
        phase = self._phase
        progress = (step - phase.start) / (phase.end - phase.start)
        return DoneStep(step, step == phase.end, False, progress, effective=step + 1)

    def _noted(self, controller: Controller, step: int, answer: Answer) -> Decision | None:
        """The decision in an answer, whose notes are passed on."""
        if not isinstance(answer, Noted):
            return answer
        for fields in answer.notes:
            self._note(step, controller.name, fields)
        return answer.decision

    def _due_branch(self, step: int) -> tuple[Controller, Branch] | None:
        for controller in self._phase.controllers:
            for decision in self._memory(controller).pending:
                if "branch" in decision and decision["after"] <= step:
                    return controller, Branch(**decision["branch"])
        return None

    def _measured(self, step: int) -> dict[str, float]:
        """The metrics of the evaluation after this step that controllers need. Process 0 calls it."""
        assert self._evaluations is not None
        latest = self._evaluations.latest
        if self._evaluations.all_due(step):
            self._check_measured(latest, step, of_evaluations=True)
        needed = {name for controller in self._phase.controllers for name in controller.metrics.values()}
        return {name: float(value) for name, value in latest.items() if name in needed}

    def _check_measured(self, metrics: Mapping[str, float], step: int, *, of_evaluations: bool) -> None:
        """Raises `ConfigError` if a metric that a controller needs is not measured."""
        for controller in self._phase.controllers:
            for key, name in controller.metrics.items():
                if name in metrics or name.startswith(EVAL_PREFIX) != of_evaluations:
                    continue
                nothing = (
                    "nothing: there is no validation data. Set data.validation_urls" if of_evaluations else "nothing"
                )
                measured = ", ".join(sorted(metrics)) or nothing
                what = f"the evaluation after step {step}" if of_evaluations else f"step {step}"
                raise ConfigError(
                    f"{key}: '{name}' given for phase '{self._phase.name}', but {what} measured {measured}"
                )

    def _with_controls(self, state: RunState, changes: Mapping[str, float] | None = None) -> RunState:
        values = dict(self._phase.controls)
        for controller in self._phase.controllers:
            values |= self._memory(controller).controls
        values |= changes or {}
        return with_controls(state, {name: values[name] for name in self._phase.controls}, self._layout)

    def _memory(self, controller: Controller) -> _Memory:
        saved = self._saver.history.controllers.get(controller.name)
        return _Memory(controller.init()) if saved is None else _Memory.from_json(saved)

    def _remember(self, controller: Controller, memory: _Memory) -> None:
        """Puts it into the history, unless it is what a controller begins with."""
        history = self._saver.history
        others = {name: other for name, other in history.controllers.items() if name != controller.name}
        entry = {} if memory == _Memory(controller.init()) else {controller.name: memory.to_json()}
        if others | entry != history.controllers:
            self._saver.history = replace(history, controllers=others | entry)
