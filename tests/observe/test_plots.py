import numpy as np
import pytest

from jaxlm.core.values.logged import LayerTable
from jaxlm.observe import plots as plots
from jaxlm.observe.logged_run import LoggedRun, series_of
from jaxlm.observe.plots import layer_bars, loss_curve, schedule_curve, step_time_histogram, step_times
from jaxlm.optim.elementwise import AdamConfig
from tests.engine.helpers import phase


@pytest.fixture
def drawn(monkeypatch):
    """All matplotlib axes of the plots that were drawn."""
    seen = []
    make = plots._figure

    def remember(*whole):
        figure, axes = make(*whole)
        seen.append(axes)
        return figure, axes

    monkeypatch.setattr(plots, "_figure", remember)
    return seen


def run_of(records) -> LoggedRun:
    return LoggedRun("run", series_of(records))


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_schedule_plot_marks_the_corners_of_two_phases(drawn, tmp_path):
    first = phase(optimizer=AdamConfig(learning_rate=1e-2, warmup=10, decay=20, lr_schedule="linear"), end=100)
    second = phase(index=1, name="two", optimizer=AdamConfig(learning_rate=5e-3, warmup=0), start=100, end=150)
    schedule_curve([first, second], run_of([]), tmp_path / "s.png", "title")
    assert is_png(tmp_path / "s.png")
    (axes,) = drawn
    curves = [line for line in axes.lines if len(line.get_xdata()) > 1]
    x, y = (np.concatenate([get(c) for c in curves]) for get in (lambda c: c.get_xdata(), lambda c: c.get_ydata()))
    assert (x[0], x[-1]) == (0, 150)
    for step, rate in ((0, 0.0), (5, 5e-3), (10, 1e-2), (80, 1e-2), (90, 5.5e-3), (150, 5e-4)):
        np.testing.assert_allclose(y[x == step][0], rate, rtol=1e-5)
    corners = {float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1}
    assert corners == {0, 10, 80, 100, 150}
    assert {text.get_text() for text in axes.texts} >= {"decay begins\nstep 80: 0.01", "end\nstep 150: 0.0005"}
    figure = axes.figure
    frame = axes.get_window_extent(figure.canvas.get_renderer())
    for text in axes.texts:
        extent = text.get_window_extent(figure.canvas.get_renderer())
        assert frame.x0 <= extent.x0 < extent.x1 <= frame.x1, text
        assert frame.y0 <= extent.y0 < extent.y1 <= frame.y1, text


def test_a_run_whose_records_are_lost_is_drawn_without_a_warning(tmp_path, recwarn):
    """The disk of its logs was full."""
    loss_curve(run_of([{"step": 0}]), tmp_path / "loss.png", "title")
    assert (is_png(tmp_path / "loss.png"), list(recwarn)) == (True, [])


def training(steps, rate, size=8, **first):
    """Records of steps; those of the first step have more keys."""
    shared = {"throughput/duration": 0.1, "throughput/examples_per_second": size / 0.1}
    records = [{"step": step, "train/loss": 1.0, "optim/learning_rate": rate(step - 1), **shared} for step in steps]
    return [records[0] | first, *records[1:]]


def test_the_schedule_plot_shows_what_was_applied_and_what_is_planned_after_a_change(drawn, tmp_path):
    """Forty steps at ten times today's learning rate, resumed with today's; nothing of the past is drawn anew."""
    today = phase(optimizer=AdamConfig(learning_rate=1e-3, warmup=10, decay=20, lr_schedule="linear"), end=100)
    plan = today.optimizer.schedule(100)
    before = training(range(1, 41), lambda step: 10 * float(plan(step)))
    after = training(range(41, 61), lambda step: float(plan(step)), 16, **{"throughput/resumed_from": 40})
    later = phase(index=1, name="later", optimizer=AdamConfig(warmup=0), start=100, end=110)
    schedule_curve([today, later], run_of([*before, *after]), tmp_path / "s.png", "title")
    (axes,) = drawn
    curves = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(curves) == ["train", "train, planned", "later, planned"]
    x, y = curves["train"].get_xdata(), curves["train"].get_ydata()
    assert (x[0], x[-1]) == (0, 59)
    np.testing.assert_allclose(y, [10 * plan(step) for step in range(40)] + [plan(step) for step in range(40, 60)])
    x, y = curves["train, planned"].get_xdata(), curves["train, planned"].get_ydata()
    assert (x[0], x[-1]) == (60, 100)
    np.testing.assert_allclose(y, plan(x))
    marks = [line.get_xdata() for line in axes.lines if line.get_color() == "0.45"]
    assert marks == [[40, 40]] * 2
    corners = {float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1}
    assert corners == {0, 80, 100, 110}, "at step 10, another rate was applied than is planned today"
    assert [text.get_text() for text in axes.texts if text.xy[0] == 40] == ["batch 16"], "two names would overlap"


def test_the_mean_of_the_loss_does_not_lag(drawn, tmp_path):
    """The centered mean of a straight line is the line."""
    loss_curve(run_of([{"step": s, "train/loss": 5 - s / 500} for s in range(1, 1001)]), tmp_path / "l.png", "title")
    (axes,) = drawn
    mean = next(line for line in axes.lines if line.get_label() == "training, mean of 21")
    assert (mean.get_xdata()[0], mean.get_xdata()[-1]) == (11, 990)
    np.testing.assert_allclose(mean.get_ydata(), 5 - mean.get_xdata() / 500)


def test_step_times_exclude_the_first_step_of_a_start_and_differ_by_batch_size(drawn, tmp_path):
    before = training(range(1, 11), lambda step: 1.0)
    after = training(range(11, 31), lambda step: 1.0, 16, **{"throughput/resumed_from": 10, "throughput/duration": 9.0})
    times = step_times(run_of([*before, *after]), exclude={1})
    assert times is not None
    assert times.batch_sizes.tolist() == [8] * 9 + [16] * 19
    np.testing.assert_allclose(times.durations_ms, 100)
    step_time_histogram(times, tmp_path / "t.png", "title")
    (axes,) = drawn
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"batch of 8", "batch of 16"} <= set(legend)


def test_step_times_exclude_first_steps_and_records_without_a_time(drawn, tmp_path):
    rng = np.random.default_rng(0)
    seconds = 0.1 + 0.01 * rng.random(200)
    seconds[0], seconds[100], seconds[150] = 30.0, 20.0, 9.0
    records = [{"step": i + 1, "throughput/duration": s} for i, s in enumerate(seconds.tolist())]
    records += [{"step": 200, "eval/loss": 3.0}]
    times = step_times(run_of(records), exclude={1, 101})
    assert times is not None
    kept = np.delete(seconds, [0, 100]) * 1e3
    np.testing.assert_allclose(times.durations_ms, kept)
    assert times.median_ms == pytest.approx(np.median(kept))
    assert times.p99_ms == pytest.approx(np.percentile(kept, 99))
    step_time_histogram(times, tmp_path / "t.png", "title")
    assert is_png(tmp_path / "t.png")
    (axes,) = drawn
    assert sum(bar.get_height() for bar in axes.patches) == 197  # the outlier of 9 s is in the legend
    assert any("1 above" in text.get_text() for text in axes.get_legend().get_texts())
    assert "None" not in [text.get_text() for text in axes.get_legend().get_texts()]  # of batches of one size
    assert step_times(run_of([{"step": 1, "throughput/duration": 1.0}]), exclude={1}) is None
    assert step_times(run_of([]), exclude={1}) is None


def test_the_loss_curve_accepts_steps_without_a_loss(tmp_path):
    records = [{"step": s, "train/loss": None if s == 3 else 5 - s / 50} for s in range(1, 100)]
    loss_curve(run_of([*records, {"step": 99, "eval/loss": 3.1}]), tmp_path / "l.png", "title")
    assert is_png(tmp_path / "l.png")


def test_a_plot_of_few_steps_has_integer_ticks_and_one_curve(drawn, tmp_path):
    loss_curve(run_of([{"step": s, "train/loss": 5 - s / 50} for s in range(1, 21)]), tmp_path / "l.png", "title")
    (axes,) = drawn
    assert all(tick == round(tick) for tick in axes.get_xticks())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training"]


def test_the_numbers_of_layers_are_neighboring_bars(drawn, tmp_path):
    rows = [(0.8, 0.2), (0.4, 0.1), (0.6, 0.3)]
    layer_bars(LayerTable("decouple", "errors of the scores", ("un-rotation", "rank"), rows), tmp_path / "a.png", "run")
    (axes,) = drawn
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[0.8, 0.4, 0.6], [0.2, 0.1, 0.3]]
    centers = np.array([[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in axes.containers])
    np.testing.assert_allclose(centers.mean(axis=0), [0, 1, 2], atol=1e-9)
    np.testing.assert_allclose(centers[1] - centers[0], axes.containers[0][0].get_width())
    assert is_png(tmp_path / "a.png")
