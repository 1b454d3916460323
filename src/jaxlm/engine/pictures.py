"""The run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_AVERAGED_OVER = 0.02  # of the steps: width of the moving average


def loss_curve(records: Sequence[Mapping[str, float | None]], path: Path, title: str) -> None:
    """Draws training loss (each step, and averaged) and validation loss by step, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = _series(records, "train/loss")
    if len(steps):
        axes.plot(steps, losses, color="0.8", linewidth=0.8, label="training, each step")
        width = max(1, round(len(steps) * _AVERAGED_OVER))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(steps[width - 1 :], smooth, color="tab:blue", label=f"training, mean of {width}")
    steps, losses = _series(records, "eval/loss")
    if len(steps):
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
    axes.set(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


def _series(records: Sequence[Mapping[str, float | None]], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return (np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=float))
