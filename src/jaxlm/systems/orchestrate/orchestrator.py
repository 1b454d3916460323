"""Switches between the strategies of an optimizer: tries them where the training changes, and goes back when it fails.

Source: caramba's guide to orchestrated training, for the boundaries, the trial of candidates and the meaning of the keys.
docs/howto/orchestrate.md says what differs.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval

from jaxlm.controllers.base import (
    Answer,
    Branch,
    Branched,
    Controller,
    ControllerConfig,
    DoneStep,
    Json,
    Keep,
    Noted,
    Persistence,
    PhaseFacts,
    Rewind,
    SetControls,
    StopRunError,
)
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from jaxlm.core.guards import NOWCAST
from jaxlm.core.values import logged
from jaxlm.reading.choices import choice
from jaxlm.systems.orchestrate.bandit import PURPOSES, Bandit, Memory, Safety, favoring, reward

_METRICS = (
    logged.LOSS,
    logged.LOSS_REFERENCE,
    logged.GRAD_NORM_RATIO,
    logged.IS_SPIKE,
    logged.NUM_SPIKES,
    logged.IS_PLATEAU,
)
_EARLY, _LATE = 0.1, 0.7  # fractions of the phase
_UNSTABLE_SPIKES = 2
_UNSTABLE, _PLATEAU = "unstable", "plateau"
_FAVORED = {_UNSTABLE: ["conservative_adamw", "spike_resistant"], _PLATEAU: ["aggressive_adamw", "sgd_escape"]}
_AS_IT_IS, _NOWCAST = "as it is", "nowcast"
_DELAY = 4  # steps from a step's metrics to the first step that they can change, `DoneStep.effective`


class RollbacksError(StopRunError):
    """The run has gone back too often in a row."""


@dataclass(frozen=True)
class NowcastTrials:
    """Tries to jump ahead along the line on which the weights have been moving.

    Attributes:
        every: number of steps between two tries.
        start: the step of the phase from which on it tries.
        steps: how many steps ahead the weights are extrapolated.
        max_rejections: number of tries in a row that make the held-out loss no better, after which it stops trying.
    """

    every: PositiveInt = 100
    start: NonNegativeInt = 200
    steps: PositiveInt = 50
    max_rejections: PositiveInt = 10


@dataclass(frozen=True)
class PlannedSwitch:
    """A switch that is planned.

    Attributes:
        step: the step of the run from which on the strategy makes the updates, at least 5. The fifth step of the phase is the
            earliest, and a branch that is under way ends first.
        to: name of the strategy.
    """

    step: PositiveInt
    to: str


@choice(ControllerConfig, "orchestrator")
class OrchestratorConfig(ControllerConfig):
    """Switches between the strategies of `optimizer: {type: portfolio}`.

    At a boundary, it takes the strategies that have done best so far, trains each for some steps, from the same state and on
    the same batches, and continues with the one whose held-out loss is the lowest. Boundaries are: `interval` steps since the
    last one, several spikes, a plateau, and the points where 10 % and 70 % of the phase are done.

    Attributes:
        mode: `active`, or `monitor`, which records what it would decide and changes nothing.
        interval: number of steps between two decisions.
        min_steps_between_switches: number of steps after a switch in which no boundary counts, and after any decision in
            which spikes and plateaus do not. Only `safety` and `switch_at` switch earlier.
        max_spikes: number of spikes within the window of the telemetry that are a boundary.
        horizon: number of steps that each candidate trains. An evaluation, an export or a permanent checkpoint ends them
            earlier.
        max_candidates: most strategies that are tried, with the current one. 1 tries none: it switches to the one that has
            done best so far.
        branch_budget: most that branches may have cost, in steps of candidates that lost and what took as long, as a fraction
            of the steps done.
        probe_batches: number of validation batches on which candidates are compared. Several sources have equal parts of
            them, at least one each; `trainer.max_eval_batches` limits those of a source.
        exploration: weight of the bonus for strategies that have been tried less.
        discount: factor by which earlier rewards count less after each new one.
        reward_scale: improvement of the held-out loss, in nats, that is the best possible reward.
        when_unstable: strategies that are favored after several spikes. Null favors conservative_adamw and spike_resistant,
            if there are such strategies.
        on_plateau: strategies that are favored while the loss has stopped falling. Null favors aggressive_adamw and
            sgd_escape, if there are such strategies.
        switch_at: switches that are planned.
        safety: when the run goes back, and to what. Null never goes back.
        nowcast: tries to extrapolate the weights; the optimizer must have `nowcast` too. Null does not.
    """

    mode: Literal["active", "monitor"] = "active"
    interval: PositiveInt = 500
    min_steps_between_switches: NonNegativeInt = 200
    max_spikes: PositiveInt = 3
    horizon: PositiveInt = 100
    max_candidates: Annotated[int, Interval(ge=1, le=16)] = 3
    branch_budget: Fraction = 0.1
    probe_batches: PositiveInt = 4
    exploration: NonNegativeFloat = Bandit.exploration
    discount: PositiveFraction = Bandit.discount
    reward_scale: PositiveFloat = 0.1
    when_unstable: list[str] | None = None
    on_plateau: list[str] | None = None
    switch_at: list[PlannedSwitch] = field(default_factory=list)
    safety: Safety | None = field(default_factory=Safety)
    nowcast: NowcastTrials | None = None

    def build(self, phase: PhaseFacts) -> "Orchestrator":
        if not phase.strategies:
            raise ConfigError(
                "type orchestrator switches between the strategies of an optimizer, but this one has only one way to update."
                " Set optimizer: {type: portfolio}"
            )
        if phase.telemetry_window is None:
            raise ConfigError(
                "type orchestrator reads the metrics of optimizer.telemetry, which is not set. Set optimizer.telemetry: true"
            )
        named = {f"switch_at.{number}.to": planned.to for number, planned in enumerate(self.switch_at)}
        steps = [planned.step for planned in self.switch_at]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise ConfigError(f"switch_at: the steps {steps} given, ascending ones expected. Sort the entries")
        if steps and steps[0] <= _DELAY:
            raise ConfigError(
                f"switch_at.0.step: {steps[0]} given, at least {_DELAY + 1} expected: what follows from the metrics of the"
                f" first step comes then. Set optimizer.initial: {self.switch_at[0].to} to begin with it"
            )
        if self.safety is not None and self.safety.never_trips:
            raise ConfigError(
                "safety: max_loss_increase, max_loss_delta, max_grad_increase and max_skipped are null, so that the run would"
                " never go back. Set one of them, or safety: null"
            )
        if self.max_spikes > phase.telemetry_window:
            raise ConfigError(
                f"max_spikes: {self.max_spikes} given, at most {phase.telemetry_window} expected: the number of"
                " recent steps whose spikes are counted (optimizer.telemetry.window). Lower it, or raise window"
            )
        for key in ("when_unstable", "on_plateau"):
            named |= {f"{key}.{number}": name for number, name in enumerate(getattr(self, key) or ())}
        named |= {} if self.safety is None else {"safety.strategy": self.safety.strategy}
        for key, name in named.items():
            if name not in phase.strategies:
                instead = ", or safety: null" if key == "safety.strategy" else ""
                raise ConfigError(
                    f"{key}: {name!r}, but optimizer.strategies has {', '.join(phase.strategies)}. Set one"
                    f" of them{instead}"
                )
        self._check_nowcast(phase.nowcast_window)
        made = Orchestrator(self, phase.strategies)
        if made.may_branch and not phase.has_validation:
            raise ConfigError(
                "type orchestrator compares candidates on held-out data, but there is none. Set data.validation_urls, or"
                " data.num_validation_sequences to hold some of the training data out, or max_candidates: 1 without nowcast,"
                " which compares nothing"
            )
        if made.may_branch and phase.is_annotated:
            raise ConfigError(
                "type orchestrator reads batches again for each candidate, but the objective reads what is stored about the"
                " training data as it comes to it. Set objective.cache (or preset.cache, for a frozen trunk) to false, or"
                " max_candidates: 1 to switch without trying"
            )
        return made

    def without_effect(self, spans: Sequence[range]) -> list[str]:
        longest = max(map(len, spans))
        last = longest - _DELAY  # of its steps, the last one that a decision can follow
        allowed = self.branch_budget * max(last, 0)

        def expensive(cost: int) -> str:
            return f"a trial costs {cost} steps, and branch_budget: {self.branch_budget:g} allows {math.floor(allowed)}"

        lines = [] if self.interval <= _longest_wait(longest) else [f"interval: {self.interval}"]
        if self.max_candidates > 1 and (cost := self.extra_steps(2, self.horizon)) > allowed:
            lines.append(f"horizon: {self.horizon} ({expensive(cost)})")
        if self.max_candidates == 1:
            idle = ("horizon",) if self.nowcast is not None else ("horizon", "branch_budget", "probe_batches")
            given = {key: getattr(self, key) for key in idle if getattr(self, key) != getattr(OrchestratorConfig, key)}
            lines += [f"{key}: {value:g} (max_candidates: 1 tries nothing)" for key, value in given.items()]
        for number, planned in enumerate(self.switch_at):
            if not any(planned.step in span for span in spans):
                lines.append(f"switch_at.{number}.step: {planned.step}")
        if self.safety is not None and _DELAY + 1 + self.safety.quarantine > longest:
            lines.append(f"safety.quarantine: {self.safety.quarantine} (no checkpoint is old enough to go back to)")
        if self.nowcast is not None and self.nowcast.start > last:
            lines.append(f"nowcast.start: {self.nowcast.start}")
        elif self.nowcast is not None and (cost := self.extra_steps(2, 1)) > allowed:
            lines.append(f"nowcast ({expensive(cost)})")
        return lines

    def extra_steps(self, num_candidates: int, num_steps: int) -> int:
        """Computes what a branch costs in addition to the winner's steps. A held-out batch costs a third of a step: it has
        no backward pass."""
        return (num_candidates - 1) * num_steps + math.ceil((num_candidates + 1) * self.probe_batches / 3)

    def _check_nowcast(self, window: int | None) -> None:
        if self.nowcast is None:
            return
        if window is None:
            raise ConfigError(
                "nowcast: given, but the optimizer does not measure where the weights are going. Set"
                " optimizer.nowcast too, or remove it"
            )
        for key in ("every", "start"):
            if (value := getattr(self.nowcast, key)) < window:
                raise ConfigError(
                    f"nowcast.{key}: {value}, at least {window} expected: the weights are extrapolated from as many updates"
                    " (optimizer.nowcast.window)"
                )


@dataclass(frozen=True)
class Orchestrator(Controller):
    """Its state is a `Memory` as JSON.

    Attributes:
        strategies: name -> the controls that select it; the run begins with the first.
    """

    name: ClassVar[str] = "orchestrator"

    config: OrchestratorConfig
    strategies: Mapping[str, Mapping[str, float]]

    @property
    def metrics(self) -> Mapping[str, str]:
        return {f"optimizer.{metric.replace('/', '.')}": metric for metric in _METRICS}

    @property
    def persistence(self) -> Persistence:
        return Persistence(self._rewound, self._resumed)

    @property
    def may_branch(self) -> bool:
        """Tells whether it may decide to `Branch`."""
        return self._is_active and (self._num_candidates > 1 or self.config.nowcast is not None)

    def controls(self) -> Mapping[str, float]:
        if not self._is_active:
            return {}
        nowcast = {} if self.config.nowcast is None else {NOWCAST: 0.0}
        return {**self.strategies[self._initial], **nowcast}

    def init(self) -> Json:
        return asdict(Memory(self._initial, self._signature, self._bandit.init()))

    def _resumed(self, state: Json) -> tuple[Json, Mapping[str, float]] | None:
        memory = Memory(**state)
        if memory.made_for == self._signature:
            return None
        strategy = self._initial if memory.switched is None or not self._is_active else memory.strategy
        if strategy not in self.strategies:
            raise ConfigError(
                f"optimizer.strategies: {', '.join(self.strategies)} given, but the orchestrator of the run has chosen"
                f" '{strategy}'. Keep that strategy, or start a new run with initialize_from"
            )
        memory = replace(memory, strategy=strategy, made_for=self._signature, trying=None)
        return asdict(memory), {**self.controls(), **self.strategies[strategy]} if self._is_active else {}

    def _rewound(self, state: Json, step: int) -> Json:
        memory = Memory(**state)
        interval = 0 if self.config.safety is None else self.config.safety.snapshot_interval
        snapshots = {purpose: at for purpose, at in memory.snapshots.items() if at == step}  # its pin has moved along
        return asdict(
            replace(
                memory,
                trying=None,
                branched_until=min(memory.branched_until, step),
                decided=min(memory.decided, step),
                switched=None if memory.switched is None else min(memory.switched, step),
                extrapolated=None if memory.extrapolated is None else min(memory.extrapolated, step),
                planned_until=min(memory.planned_until, step),
                snapshots=snapshots,
                next_snapshot=step + interval if snapshots else step,
            )
        )

    def after(self, step: DoneStep, metrics: Mapping[str, float], state: Json) -> tuple[Json, Answer]:
        """Raises: RollbacksError: the run has gone back too often in a row."""
        memory = Memory(**state)
        if step.branched is not None:
            return self._branched(step, step.branched, memory)
        if memory.begun is None:
            before = step.number - 1
            memory = replace(memory, begun=before, decided=before, planned_until=before)
        spikes = [{"event": "spike", "loss": metrics[logged.LOSS]}] if metrics[logged.IS_SPIKE] else []
        memory, answer = self._after(step, metrics, memory)
        return asdict(memory), _with_notes(spikes, answer)

    def _branched(self, step: DoneStep, result: Branched, memory: Memory) -> tuple[Json, Answer]:
        reason, extra = memory.trying, self.config.extra_steps(len(result.losses), result.num_steps)
        memory = replace(memory, trying=None, branched_until=step.number, extra=memory.extra + extra)
        losses = {name: loss if math.isfinite(loss) else None for name, loss in result.losses.items()}
        note = {"before": result.before, "losses": losses, "until": step.number, "extra_steps": extra}
        if result.purpose == _NOWCAST:
            accepted = result.winner == _NOWCAST
            memory = replace(memory, rejections=0 if accepted else memory.rejections + 1)
            return asdict(memory), Noted(None, [{"event": "nowcast", "accepted": accepted, **note}])
        bandit = memory.bandit
        for name, loss in result.losses.items():
            bandit = self._bandit.rewarded(bandit, name, self._reward(result.before, loss))
        first = step.number - result.num_steps + 1
        notes = [{"event": "branch", "reason": reason, "winner": result.winner, "first": first, **note}]
        before, memory = memory.strategy, replace(memory, bandit=bandit, loss=None)
        if result.winner != before:
            memory = replace(memory, strategy=result.winner, switched=step.number)
            notes.append(_switch(reason, before, result.winner, first))
        return asdict(memory), Noted(None, notes)

    def _after(self, step: DoneStep, metrics: Mapping[str, float], memory: Memory) -> tuple[Memory, Answer]:
        """Returns what follows from a step, but for the record of its spike."""
        config, safety = self.config, self.config.safety
        skipped = memory.skipped + 1 if step.is_skipped else 0
        memory = replace(memory, healthy=memory.healthy + 1, skipped=skipped)
        cause = None if safety is None else safety.trip(metrics, skipped)
        if safety is not None and cause is not None:
            return self._recovered(safety, step, cause, memory)
        if memory.is_branching(step.number):
            return memory, None
        memory, reason = self._boundary(step, metrics, memory)
        if reason == "manual":
            due = [planned.to for planned in config.switch_at if planned.step <= step.effective]
            return self._switched(memory, reason, due[-1], step)
        if reason is not None:
            return self._decided(step, metrics, replace(memory, decided=step.number), reason)
        if self._extrapolates(step, memory) and not self._is_active:
            memory = replace(memory, extrapolated=step.number, extra=memory.extra + self.config.extra_steps(2, 1))
            return memory, Noted(None, [{"event": "nowcast"} | self._would])
        if self._extrapolates(step, memory):
            return replace(memory, extrapolated=step.number, trying=_NOWCAST), self._extrapolation
        if safety is not None and self._is_active and step.effective >= memory.next_snapshot:
            purpose = min(PURPOSES, key=lambda purpose: memory.snapshots.get(purpose, -1))
            snapshots = {**memory.snapshots, purpose: step.effective}
            after = step.effective + safety.snapshot_interval
            return replace(memory, snapshots=snapshots, next_snapshot=after), Keep(purpose)
        return memory, None

    def _boundary(self, step: DoneStep, metrics: Mapping[str, float], memory: Memory) -> tuple[Memory, str | None]:
        """Says why to decide after this step; None for no reason."""
        config = self.config
        on_plateau = bool(metrics[logged.IS_PLATEAU])
        is_planned = any(memory.planned_until < planned.step <= step.effective for planned in config.switch_at)
        memory = replace(memory, planned_until=step.effective)
        if is_planned:
            return replace(memory, on_plateau=on_plateau), "manual"
        if memory.switched is not None and step.number - memory.switched < config.min_steps_between_switches:
            return memory, None
        stage = "early" if step.progress < _EARLY else "late" if step.progress >= _LATE else "middle"
        is_settled = step.number - memory.decided >= config.min_steps_between_switches
        reason = None
        if metrics[logged.NUM_SPIKES] >= config.max_spikes and is_settled:
            reason = "spike"
        elif on_plateau and not memory.on_plateau and is_settled:
            reason = "plateau"
        elif stage != memory.stage:
            reason = "phase_change"
        elif step.number - memory.decided >= config.interval:
            reason = "periodic"
        return replace(memory, stage=stage, on_plateau=on_plateau), reason

    def _decided(
        self, step: DoneStep, metrics: Mapping[str, float], memory: Memory, reason: str
    ) -> tuple[Memory, Answer]:
        """Decides at a boundary: tries strategies, or takes the one that seems best."""
        config, loss = self.config, metrics[logged.LOSS]
        if memory.loss is not None:
            reward = self._reward(memory.loss, loss)
            memory = replace(memory, bandit=self._bandit.rewarded(memory.bandit, memory.strategy, reward))
        memory = replace(memory, loss=loss)
        ranked = self._bandit.ranked(memory.bandit, self._condition(metrics))
        if self._num_candidates == 1:
            return self._switched(memory, reason, ranked[0], step)
        others = [name for name in ranked if name != memory.strategy][: self._affordable(step, memory)]
        candidates = [memory.strategy, *others]
        if not others:
            if reason == "spike" and config.safety is not None:
                return self._switched(memory, reason, config.safety.strategy, step)
            note = {"event": "boundary", "reason": reason, "strategy": memory.strategy, "extra_steps": memory.extra}
            return memory, Noted(None, [note | self._would])
        if not self._is_active:
            extra = self.config.extra_steps(len(candidates), config.horizon)
            note = {"event": "branch", "reason": reason, "candidates": candidates, "extra_steps": extra}
            return replace(memory, extra=memory.extra + extra), Noted(None, [note | self._would])
        controls = {name: self.strategies[name] for name in candidates}
        return replace(memory, trying=reason), Branch("strategy", controls, config.horizon, config.probe_batches)

    def _recovered(self, safety: Safety, step: DoneStep, cause: str, memory: Memory) -> tuple[Memory, Answer]:
        """Goes back to a trusted checkpoint, or takes the safe strategy if there is none yet."""
        purpose = safety.target(memory.snapshots, memory.trusted, step.number)
        if not self._is_active:
            note = {"event": "rollback", "reason": "safety", "cause": cause, "to": safety.strategy} | self._would
            recent = memory.switched is not None and step.number - memory.switched < safety.snapshot_interval
            return (memory, None) if recent else (replace(memory, switched=step.number), Noted(None, [note]))
        if purpose is None:
            return (
                (memory, None)
                if memory.is_branching(step.number)
                else self._switched(memory, "safety", safety.strategy, step, cause)
            )
        rollbacks = 1 if memory.healthy > safety.snapshot_interval else memory.rollbacks + 1
        if rollbacks > safety.max_rollbacks_in_a_row:
            raise RollbacksError(
                f"step {step.number}: {cause}, and the run has gone back {memory.rollbacks} times in a row already"
                " (orchestrator.safety.max_rollbacks_in_a_row). Its kept checkpoints stay. Look at the data and the gradient"
                " norms of these steps, lower optimizer.learning_rate, or raise the limit"
            )
        target = memory.snapshots[purpose]
        note = {
            "event": "rollback",
            "reason": "safety",
            "cause": cause,
            "from": memory.strategy,
            "to": safety.strategy,
            "first": target + 1,
            "last": step.number,
        }
        memory = replace(
            memory,
            strategy=safety.strategy,
            switched=target,
            loss=None,
            trusted=target,
            rollbacks=rollbacks,
            healthy=0,
            skipped=0,
        )
        key = "orchestrator.safety"
        rewind = Rewind(target + 1, step.number, cause, None, key, (purpose,), self.strategies[safety.strategy])
        return memory, Noted(rewind, [note])

    def _switched(
        self, memory: Memory, reason: str, to: str, step: DoneStep, cause: str | None = None
    ) -> tuple[Memory, Answer]:
        if to == memory.strategy:
            return memory, None
        why = {} if cause is None else {"cause": cause}
        note = _switch(reason, memory.strategy, to, step.effective) | why
        if not self._is_active:
            return replace(memory, switched=step.number), Noted(None, [note | self._would])
        memory = replace(memory, strategy=to, switched=step.number, loss=None)
        return memory, Noted(SetControls(self.strategies[to]), [note])

    @property
    def _signature(self) -> Json:
        """The keys with which what it remembers must agree."""
        table = [[name, dict(controls)] for name, controls in self.strategies.items()]
        keys = {"mode": self.config.mode, "may_branch": self.may_branch, "nowcast": self.config.nowcast is not None}
        return {**keys, "table": table}

    @property
    def _initial(self) -> str:
        return next(iter(self.strategies))

    @property
    def _is_active(self) -> bool:
        return self.config.mode == "active"

    @property
    def _would(self) -> dict[str, Json]:
        """The fields that a record has if nothing is done."""
        return {} if self._is_active else {"would": True}

    @property
    def _num_candidates(self) -> int:
        return min(self.config.max_candidates, len(self.strategies))

    @property
    def _bandit(self) -> Bandit:
        config, names = self.config, tuple(self.strategies)
        favored = {_UNSTABLE: config.when_unstable, _PLATEAU: config.on_plateau}
        chosen = {when: _FAVORED[when] if given is None else given for when, given in favored.items()}
        prior = {when: favoring(names, given) for when, given in chosen.items() if set(given) & set(names)}
        return Bandit(names, config.exploration, config.discount, prior)

    @property
    def _extrapolation(self) -> Branch:
        assert self.config.nowcast is not None
        candidates = {_AS_IT_IS: {}, _NOWCAST: {NOWCAST: float(self.config.nowcast.steps)}}
        return Branch(_NOWCAST, candidates, 1, self.config.probe_batches, {NOWCAST: 0.0})

    def _extrapolates(self, step: DoneStep, memory: Memory) -> bool:
        nowcast, begun = self.config.nowcast, memory.begun or 0
        return (
            nowcast is not None
            and step.number >= begun + nowcast.start
            and (memory.extrapolated is None or step.number - memory.extrapolated >= nowcast.every)
            and memory.rejections < nowcast.max_rejections
            and self.config.extra_steps(2, 1) <= self._budget_left(step, memory)
        )

    def _affordable(self, step: DoneStep, memory: Memory) -> int:
        """Counts the candidates that may lose a branch after this step."""
        left, horizon = self._budget_left(step, memory), self.config.horizon
        within = (n for n in range(1, self._num_candidates) if self.config.extra_steps(n + 1, horizon) <= left)
        return max(within, default=0)

    def _budget_left(self, step: DoneStep, memory: Memory) -> float:
        return self.config.branch_budget * (step.number - (memory.begun or 0)) - memory.extra

    def _condition(self, metrics: Mapping[str, float]) -> str:
        if metrics[logged.NUM_SPIKES] >= _UNSTABLE_SPIKES:
            return _UNSTABLE
        return _PLATEAU if metrics[logged.IS_PLATEAU] else ""

    def _reward(self, before: float, after: float) -> float:
        return reward(before, after, self.config.reward_scale)


def _switch(reason: str | None, before: str, to: str, effective: int) -> dict[str, Json]:
    """The record of a switch. Args: effective: the first step that the new strategy makes."""
    return {"event": "switch", "reason": reason, "from": before, "to": to, "effective": effective}


def _longest_wait(num_steps: int) -> int:
    """The most steps without a decision after which `interval` leads to one, in a phase of `num_steps` steps."""
    last, begin, waits = num_steps - _DELAY, 0, []
    for fraction in (_EARLY, _LATE):
        change = math.ceil(fraction * num_steps)
        change -= (change - 1) / num_steps >= fraction
        waits.append(min(change - 1, last) - begin)  # where the stage changes, that is the reason
        begin = change
    return max(*waits, last - begin)


def _with_notes(notes: Sequence[Mapping[str, Json]], answer: Answer) -> Answer:
    """The answer with further notes in front of its own."""
    if isinstance(answer, Noted):
        return Noted(answer.decision, [*notes, *answer.notes])
    return Noted(answer, notes) if notes else answer
