"""Fits a scaling law to the losses of models of several sizes, each size trained with several budgets.

Source: Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (arXiv:2203.15556), section 3.2 (approach 2:
IsoFLOP profiles). For each budget C, a parabola through the losses over log N has its minimum at the best size N_opt. The
best sizes and tokens of all budgets lie on power laws, N_opt ~ C^a and D_opt ~ C^b.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

_MIN_SIZES = 3


@dataclass(frozen=True)
class TrainedPoint:
    """A model that was trained with a budget.

    Attributes:
        budget: in FLOPs.
        num_parameters: N, the scaling parameters.
        num_tokens: D, the tokens that it was trained on.
        loss: what it was measured at; lower is better.
    """

    budget: float
    num_parameters: int
    num_tokens: int
    loss: float


@dataclass(frozen=True)
class Parabola:
    """The losses of one budget as a parabola over log10 N.

    Attributes:
        coefficients: of the square, of log10 N, and of 1.
        num_parameters, num_tokens, loss: at the minimum; None if there is none between the sizes.
        problem: why there is none; empty if there is one.
    """

    budget: float
    coefficients: tuple[float, float, float] | None
    num_parameters: float | None = None
    num_tokens: float | None = None
    loss: float | None = None
    problem: str = ""

    def at(self, num_parameters: np.ndarray) -> np.ndarray:
        assert self.coefficients is not None
        return np.polyval(self.coefficients, np.log10(num_parameters))


@dataclass(frozen=True)
class PowerLaw:
    """`factor * C ** exponent`."""

    factor: float
    exponent: float

    def at(self, budget: np.ndarray | float) -> np.ndarray:
        return self.factor * np.asarray(budget) ** self.exponent


@dataclass(frozen=True)
class ScalingLaw:
    """The fit of all budgets.

    Attributes:
        parabolas: by budget, in rising order.
        parameters: N_opt as a function of the budget; None with fewer than two minima.
        tokens: the same of D_opt.
        problem: why there is no law; empty if there is one.
    """

    parabolas: tuple[Parabola, ...]
    parameters: PowerLaw | None
    tokens: PowerLaw | None
    problem: str = ""


def fit_law(points: Sequence[TrainedPoint]) -> ScalingLaw:
    """Fits a parabola to each budget, and power laws to their minima."""
    in_order = sorted(points, key=lambda point: (point.budget, point.num_parameters))
    parabolas = tuple(
        _fit_budget(budget, list(group)) for budget, group in groupby(in_order, lambda point: point.budget)
    )
    minima = [(p.budget, p.num_parameters, p.num_tokens) for p in parabolas if p.num_parameters and p.num_tokens]
    if len(minima) < 2:
        problem = f"{len(minima)} of {len(parabolas)} budgets have a minimum; a power law needs two"
        return ScalingLaw(parabolas, None, None, problem)
    budgets, sizes, tokens = (np.array(column) for column in zip(*minima, strict=True))
    return ScalingLaw(parabolas, _power_law(budgets, sizes), _power_law(budgets, tokens))


def _fit_budget(budget: float, points: Sequence[TrainedPoint]) -> Parabola:
    sizes = np.log10([point.num_parameters for point in points])
    if len(set(sizes)) < _MIN_SIZES:
        return Parabola(budget, None, problem=f"{len(set(sizes))} sizes are trained; a parabola needs {_MIN_SIZES}")
    # Around the middle size, because powers of log N itself are nearly dependent.
    middle = float(sizes.mean())
    square, slope, level = (float(c) for c in np.polyfit(sizes - middle, [point.loss for point in points], 2))
    coefficients = (square, slope - 2 * square * middle, level - slope * middle + square * middle**2)
    if square <= 0:
        return Parabola(budget, coefficients, problem="the losses have no minimum: add smaller and larger depths")
    lowest = middle - slope / (2 * square)
    if not sizes.min() <= lowest <= sizes.max():
        which = "smaller" if lowest < sizes.min() else "larger"
        return Parabola(budget, coefficients, problem=f"the minimum is outside the sizes: add {which} depths")
    # At one budget, log D is almost a line over log N.
    tokens = np.interp(lowest, sizes, np.log10([point.num_tokens for point in points]))
    loss = level - slope**2 / (4 * square)
    return Parabola(budget, coefficients, float(10**lowest), float(10**tokens), float(loss))


def _power_law(budgets: np.ndarray, values: np.ndarray) -> PowerLaw:
    exponent, level = np.polyfit(np.log10(budgets), np.log10(values), 1)
    return PowerLaw(float(10**level), float(exponent))


def law_as_json(law: ScalingLaw) -> Mapping[str, object]:
    """Returns the law as plain values."""
    power = lambda one: None if one is None else {"factor": one.factor, "exponent": one.exponent}  # noqa: E731
    return {
        "num_parameters": power(law.parameters),
        "num_tokens": power(law.tokens),
        "problem": law.problem or None,
        "budgets": [
            {
                "budget": p.budget,
                "num_parameters": p.num_parameters,
                "num_tokens": p.num_tokens,
                "loss": p.loss,
                "parabola": p.coefficients,
                "problem": p.problem or None,
            }
            for p in law.parabolas
        ],
    }
