"""The grids of the evaluation `needle`, as pictures and pages show them."""

import numpy as np
import pytest

from jaxlm.observe.curves import is_cell, needle_grids
from jaxlm.observe.logged_run import LoggedRun, Series
from jaxlm.observe.page.page import render
from jaxlm.observe.plots import needle_maps

PHASES = [
    {"type": "phase", "name": name, "start": start, "end": start + 10, "num_phases": 2, "rows": []}
    for name, start in (("short", 0), ("long", 10))
]
STEPS = np.array([5, 10, 20])
CELLS = {
    "eval/needle/64/depth_0": [0.0, 0.5, 1.0],
    "eval/needle/64/depth_0.25": [0.25, 0.75, 1.0],
    "eval/needle/128/depth_0": [0.0, 0.0, 0.5],
}
MEANS = {"eval/needle/64": [0.1, 0.6, 1.0], "eval/loss": [3.0, 2.0, 1.0]}


def run(events=PHASES) -> LoggedRun:
    series = {name: Series(STEPS, np.array(values)) for name, values in (CELLS | MEANS).items()}
    return LoggedRun("mine", series, events=events)


def test_the_last_grid_of_each_phase_is_read():
    short, long = needle_grids(run())
    assert (short.phase, short.step, long.phase, long.step) == ("short", 10, "long", 20)
    assert (short.lengths, short.depths) == ((64, 128), (0.0, 0.25))
    np.testing.assert_array_equal(short.found, [[0.5, 0.0], [0.75, np.nan]])
    np.testing.assert_array_equal(long.found, [[1.0, 0.5], [1.0, np.nan]])
    (only,) = needle_grids(run(()))
    assert (only.phase, only.step) == ("", 20)
    assert needle_grids(LoggedRun("none", {"eval/loss": Series(STEPS, np.ones(3))})) == []
    assert [name for name in CELLS | MEANS if is_cell(name)] == list(CELLS)


@pytest.mark.slow
def test_a_picture_has_a_map_of_each_phase(tmp_path):
    from matplotlib.image import imread

    sizes = []
    for number in (1, 2):
        path = tmp_path / f"{number}.png"
        needle_maps(needle_grids(run())[:number], path, "mine")
        sizes.append(imread(path).shape)
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_a_page_shows_grids_as_tables_and_means_as_curves():
    text = render([run()])
    assert "needle, short, step 10" in text
    assert "hsl(60 65% 70%)" in text, "half of the keys are found"
    assert "Needle in a haystack, by length" in text
    assert "depth_0" not in text
