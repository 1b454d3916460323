"""Fits a scaling law to the losses of models of several sizes, each trained with several budgets, and draws it.

Source: Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (arXiv:2203.15556), section 3.2 (approach 2:
IsoFLOP profiles). For each budget C, a parabola through the losses over log N has its minimum at the best size N_opt. The
best sizes and tokens of all budgets lie on power laws, N_opt ~ C^a and D_opt ~ C^b.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

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


_NUM_POINTS = 200


def scaling_plot(points: Sequence[TrainedPoint], law: ScalingLaw, path: Path, metric: str) -> None:
    """Writes the plot as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    profiles, optima = figure.subplots(1, 2)
    _draw_profiles(profiles, points, law, metric)
    _draw_optima(optima, law)
    for axes in (profiles, optima):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    with path.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)


def _draw_profiles(axes: Any, points: Sequence[TrainedPoint], law: ScalingLaw, metric: str) -> None:
    for number, parabola in enumerate(law.parabolas):
        color, budget_points = f"C{number % 10}", [point for point in points if point.budget == parabola.budget]
        sizes = np.array([point.num_parameters for point in budget_points], float)
        axes.plot(sizes, [point.loss for point in budget_points], "o", color=color, label=f"{parabola.budget:g} FLOPs")
        if parabola.coefficients is not None:
            between = np.geomspace(sizes.min(), sizes.max(), _NUM_POINTS)
            axes.plot(between, parabola.at(between), color=color, linewidth=0.8)
        if parabola.num_parameters is not None:
            axes.plot(parabola.num_parameters, parabola.loss, "x", color="0.2", markersize=8)
    axes.set(title="IsoFLOP profiles", xscale="log", xlabel="scaling parameters N", ylabel=metric)


def _draw_optima(axes: Any, law: ScalingLaw) -> None:
    fits = {"N": (law.parameters, "num_parameters"), "D": (law.tokens, "num_tokens")}
    for number, (name, (power, field)) in enumerate(fits.items()):
        optima = [(p.budget, getattr(p, field)) for p in law.parabolas if getattr(p, field) is not None]
        label = f"best {name}" if power is None else f"best {name} ~ C^{power.exponent:.3f}"
        axes.plot([at for at, _ in optima], [value for _, value in optima], "o", color=f"C{number}", label=label)
        if power is not None:
            budgets = np.array([at for at, _ in optima])
            axes.plot(budgets, power.at(budgets), color=f"C{number}", linewidth=0.8)
    # Without points, a log scale is an error.
    scale = "log" if any(p.num_parameters for p in law.parabolas) else "linear"
    axes.set(title="Optima", xscale=scale, yscale=scale, xlabel="FLOPs C", ylabel="parameters, tokens")
