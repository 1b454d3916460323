"""Evaluations with limits, which compare a model with a reference."""

import abc
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jaxlm.core.field_types import PositiveInt
from jaxlm.evals.base import EvalConfig, EvalMetrics, EvalScope, Limit, Limits
from jaxlm.reading.decode import choice_name


@dataclass(frozen=True)
class GateConfig(EvalConfig, abc.ABC):
    """An evaluation whose metrics may be limited. By default, it runs only at the end of each phase.

    Attributes:
        every: runs only at every N-th evaluation, and at the end of the phase; null runs only at the end.
        phases: names of the phases in which it runs; null means all. `jaxlm evaluate --gates` ignores them.
        name: under which its metrics are logged; null means its type. No two of them may have the same.
        fail_fast: a metric beyond its limit ends the run with an error that names it. What was saved stays. False only warns.
    """

    limits: ClassVar[Mapping[str, str]] = {}
    """The key of the limit of each metric that may have one, by its name without `title`. The last part of a key begins with
    `min_` for the smallest value that is allowed. Null allows any."""

    every: PositiveInt | None = field(default=None, kw_only=True)
    phases: list[str] | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    fail_fast: bool = field(default=False, kw_only=True)

    @property
    def title(self) -> str:
        """The beginning of the names of its metrics."""
        return choice_name(type(self)) if self.name is None else self.name

    @property
    def metrics(self) -> EvalMetrics:
        own = self.own_metrics
        names = None if own is None else tuple(f"{self.title}/{name}" for name in own)
        limits = {f"{self.title}/{name}": limit for name, key in self.limits.items() if (limit := self._limit(key))}
        return EvalMetrics(names, self.title, Limits(limits, self.fail_fast))

    def _limit(self, key: str) -> Limit | None:
        *sections, last = key.split(".")
        section = functools.reduce(getattr, sections, self)
        bound = None if section is None else getattr(section, last)
        return None if bound is None else Limit(bound, f"{key}: {bound:g}", least=last.startswith("min_"))

    @property
    def scope(self) -> EvalScope:
        return replace(self.own_scope, phases=self.phases)

    @property
    @abc.abstractmethod
    def own_scope(self) -> EvalScope:
        """What it runs on, in the phases in which it does."""

    @property
    @abc.abstractmethod
    def own_metrics(self) -> tuple[str, ...] | None:
        """The names of its metrics without `title`. None: they are not known before it has run."""


@dataclass(frozen=True)
class PairGateConfig(GateConfig, abc.ABC):
    """Compares the model with a reference on the validation data.

    Attributes:
        reference: name of the model to compare with in the section `refs`.
        batches: the first batches of each source of validation data to compare on, also limited by
            `trainer.max_eval_batches`.
    """

    reference: str = "teacher"
    batches: PositiveInt = 5

    @property
    def own_scope(self) -> EvalScope:
        return EvalScope(references=(self.reference,), validation=True, supervised=True)
