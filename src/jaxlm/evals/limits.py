"""Limits of what evaluations measure, and the end of a run that violates them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class GateError(Exception):
    """An evaluation with `fail_fast` has measured what its limits do not allow. The newest checkpoint stays."""


@dataclass(frozen=True)
class Limit:
    """The limit of a metric.

    Attributes:
        bound: the largest value that is allowed, or the smallest.
        key: the key that says so.
        least: whether it is the smallest.
    """

    bound: float
    key: str
    least: bool = False

    def allows(self, value: float) -> bool:
        """Whether a value is allowed; NaN never is."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"at {'least' if self.least else 'most'} {self.bound:g} allowed ({self.key})"


@dataclass(frozen=True)
class Limits:
    """The limits of an evaluation's metrics, by name. A metric that was not measured violates its limit.

    Attributes:
        fail_fast: whether a violation ends the run.
    """

    by_metric: Mapping[str, Limit] = field(default_factory=dict)
    fail_fast: bool = False

    def violations(self, prefix: str, metrics: Mapping[str, float]) -> list[str]:
        """A line for each metric that is not allowed. Args: prefix: of the names of the metrics in messages."""
        return [
            f"{prefix}/{name} {f'is {metrics[name]:.4g}' if name in metrics else 'was not measured'}, {limit}"
            for name, limit in self.by_metric.items()
            if name not in metrics or not limit.allows(metrics[name])
        ]


def failed(violations: Sequence[str], where: str) -> GateError:
    """The error that ends a run. Args: where: what was measured, such as "step 3"."""
    return GateError(
        f"{where}: {'; '.join(violations)}. The run ends because fail_fast is true for this evaluation. Look at what led"
        " here (the surgery, the objective, the number of steps), or raise these limits, or set fail_fast: false"
    )
