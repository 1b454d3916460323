"""The plot of a scaling study: losses by size with the parabola of each budget, and the optima by budget."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.session.scaling.law import ScalingLaw, TrainedPoint

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
