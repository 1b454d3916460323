"""The table of a run's phases, from its log folder."""

from jaxlm.observe.events import phase_history, phase_table
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.page.page import render
from tests.observe.page_reader import Page
from tests.observe.test_page import START, page_of, phase_event, write_run


def stored(step, count, megabytes, folder):
    return step, "stored", {"phase": "adapt", "count": count, "megabytes": megabytes, "folder": folder}


EVENTS = [
    START,
    phase_event("warm", 0, 4, 2, [("layers", "2"), ("trains", "90 of 90 parameters"), ("rest", "80 in 6 arrays")]),
    phase_event("adapt", 4, 9, 2, [("layers", "2"), ("trains", "1 of 90 parameters")]),
    stored(4, 7, 0.1, "cache/annotations/0"),
    phase_event("adapt", 4, 12, 2, [("layers", "4 (2 + 2)"), ("hidden tokens", "time 0"), ("trains", "1,040")]),
    stored(4, 24, 1.3, "cache/annotations/1"),
    stored(6, 28, 1.5, "cache/annotations/1"),
    stored(6, 4, 0.2, "other/annotations/2"),
]
RECORDS = [{"step": n, "train/loss": 6 - n / 4, "throughput/total_tokens": 100 * n} for n in range(1, 11)]
RECORDS[2]["train/loss"] = None
EVALS = [{"step": 4, "eval/loss": 4.5}, {"step": 8, "eval/loss": 4.25}]


def run_folder(folder, events=EVENTS):
    return write_run(folder, sorted([*RECORDS, *EVALS], key=lambda one: one["step"]), events=events)


def test_the_history_of_each_phase(tmp_path):
    warm, adapt = phase_history(read_run(str(run_folder(tmp_path / "mine"))))
    assert (warm.start, warm.end, warm.layers, warm.trains) == (0, 4, "2", "90 of 90 parameters")
    assert (warm.losses, warm.validation_loss, warm.num_tokens) == ((5.75, 5.0), 4.5, 400)
    assert (adapt.start, adapt.end, adapt.layers, adapt.trains) == (4, 12, "4 (2 + 2)", "1,040")
    assert (adapt.losses, adapt.validation_loss, adapt.num_tokens) == ((4.75, 3.5), 4.25, 600)
    assert adapt.hidden == "time 0"
    assert adapt.stored == "28 sequences (1.5 MB) and 4 sequences (0.2 MB)"
    assert warm.summary == (
        "steps 0 to 4; layers 2; trains 90 of 90 parameters; training loss 5.7500 to 5.0000; validation loss 4.5000;"
        " tokens 400"
    )


def test_columns_without_content_are_left_out(tmp_path):
    history = phase_history(read_run(str(run_folder(tmp_path / "mine"))))
    assert phase_table(history[:1])[0] == ["steps", "layers", "trains", "training loss", "validation loss", "tokens"]
    head, rows = phase_table(history)
    assert len(head) == 8
    assert [row[0] for row in rows] == ["warm", "adapt"]
    assert rows[0][1 + head.index("stored")] == ""


def test_a_run_of_one_phase_has_no_table(tmp_path):
    events = [START, phase_event("warm", 0, 4, 1)]
    assert phase_history(read_run(str(run_folder(tmp_path / "one", events)))) == []


def test_the_page_has_the_phases_of_runs_that_have_several(tmp_path):
    with_phases, without = run_folder(tmp_path / "mine"), write_run(tmp_path / "plain", RECORDS, events=())
    page = page_of(with_phases, without)
    assert "4.7500 to 3.5000" in page.text
    assert "time 0" in page.text
    assert "Phases" not in Page(render([read_run(str(without))])).text
