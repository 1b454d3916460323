"""Decisions of controllers: the file, words, and what pages and pictures show of them."""

import json
from io import StringIO
from typing import Any

import numpy as np
import pytest

from jaxlm.core import redaction
from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import MASK
from jaxlm.core.values.logged import Completion, Histogram, Sample
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.metrics import Totals
from jaxlm.observe import plots
from jaxlm.observe.callbacks import Callbacks
from jaxlm.observe.console import Console
from jaxlm.observe.decision_notes import Band, decisions_of, described, numbers, strategy_bands
from jaxlm.observe.events import MAX_MARKS
from jaxlm.observe.logged_run import read_run, read_runs
from jaxlm.observe.loop_state import LoopState
from jaxlm.observe.page.page import render
from jaxlm.observe.trackers import JsonlTracker, read_jsonl
from jaxlm.session.final_report import decisions as report_row
from jaxlm.session.run import RunRecords
from tests.observe.page_reader import Page

SWITCH = {"event": "switch", "reason": "spike", "from": "bold", "to": "safe", "effective": 12}
BRANCH = {
    "event": "branch",
    "reason": "periodic",
    "losses": {"safe": 3.21, "slow": 3.25},
    "winner": "slow",
    "until": 22,
}
ROLLBACK = {
    **{"event": "rollback", "reason": "safety", "cause": "the gradient norm was 1,012 times its median"},
    **{"from": "slow", "to": "safe", "first": 31, "last": 32},
}
NOWCAST = {"event": "nowcast", "accepted": False, "losses": {"as it is": 3.1, "nowcast": 3.4}}


def opened(folder, resume_step=0, attempt=0) -> tuple[RunRecords, JsonlTracker, StringIO]:
    output = StringIO()
    tracker = JsonlTracker(folder / "metrics.jsonl", resume_step=resume_step, attempt=attempt)
    of_run: Any = (None, Console(output), LoopState(), Totals(), Callbacks({}, print))
    return RunRecords(*of_run, trackers=[tracker], files=[tracker]), tracker, output


def test_a_secret_of_digits_is_masked_in_texts_and_changes_no_number(tmp_path, monkeypatch):
    """In what is written and in what a report reads. Records of numbers alone are not even searched, in each step."""
    monkeypatch.setenv("DB_PASSWORD", "12345678")
    value, texts = 0.12345678, {"say": "it is 12345678", "number": 0.12345678}
    records, tracker, output = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(redaction, "_masked", pytest.fail)
        tracker.log(8, {"train/loss": value})
        tracker.log_histograms(8, {"grads": Histogram(-value, value, (12345678, 1))})
    tracker.log_samples(12345678, [Sample("eval", "Say 12345678", "12345678!")])
    done = Completion("train", "a:1", "12345678?", "It is 12345678", {"exact": value}, value, -value, True)
    tracker.log_completions(12345678, [done])
    records.decided(8, "mine", {"event": "seen", **texts})
    tracker.close()
    assert read_jsonl(tmp_path / "metrics.jsonl")[0] == {"step": 8, "train/loss": value}
    (histogram,) = read_jsonl(tmp_path / "histograms.jsonl")
    assert (histogram["low"], histogram["high"], histogram["counts"]) == (-value, value, [12345678, 1])
    (sample,) = read_jsonl(tmp_path / "samples.jsonl")
    assert sample == {"step": 12345678, "name": "eval", "prompt": f"Say {MASK}", "text": f"{MASK}!"}
    (completion,) = read_jsonl(tmp_path / "completions.jsonl")
    assert (completion["prompt"], completion["completion"]) == (f"{MASK}?", f"It is {MASK}")
    assert (completion["step"], completion["rewards"], completion["advantage"]) == (12345678, {"exact": value}, -value)
    (decision,) = lines(tmp_path)
    assert decision == {"step": 8, "controller": "mine", "event": "seen", "say": f"it is {MASK}", "number": value}
    assert "12345678" not in output.getvalue()
    for name in ("samples.jsonl", "decisions.jsonl"):  # as an earlier version wrote them
        path = tmp_path / name
        path.write_text(path.read_text().replace(MASK, "12345678"))
    run = read_run(str(tmp_path))
    assert (run.samples, run.completions, run.unread) == ([sample], [completion], [])
    assert run.decisions[0].note == {"event": "seen", "say": f"it is {MASK}", "number": value}


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]


def test_decisions_go_to_a_file_the_trackers_and_the_console(tmp_path):
    records, tracker, output = opened(tmp_path)
    assert not (tmp_path / "decisions.jsonl").exists()
    records.decided(8, "orchestrator", SWITCH)
    records.decided(12, "orchestrator", BRANCH | {"losses": {"safe": float("nan"), "slow": 3.25}})
    records.flush()
    assert lines(tmp_path) == [
        {"step": 8, "controller": "orchestrator", **SWITCH},
        {"step": 12, "controller": "orchestrator", **BRANCH, "losses": {"safe": None, "slow": 3.25}},
    ]
    tracker.close()
    switch, branch = read_jsonl(tmp_path / "metrics.jsonl")
    assert switch == {"step": 8, "orchestrator/switch": 1.0, "orchestrator/switch/effective": 12.0}
    assert branch["orchestrator/branch/losses/slow"] == 3.25
    assert branch["orchestrator/branch/losses/safe"] is None
    assert output.getvalue().splitlines()[0] == "step 8: orchestrator switches from bold to safe, with step 12 (spike)"


def test_a_run_that_resumes_makes_later_decisions_again(tmp_path):
    records, _, _ = opened(tmp_path)
    for step in (8, 16, 24):
        records.decided(step, "orchestrator", SWITCH)
    records.begin_attempt(History(attempt=1), 20)
    records.decided(22, "orchestrator", NOWCAST)
    records.flush()
    with open(tmp_path / "decisions.jsonl", "a") as file:
        file.write('{"step": 23, "contro')  # the process was killed
    opened(tmp_path, resume_step=22, attempt=1)
    assert [(one["step"], one.get("attempt", 0)) for one in lines(tmp_path)] == [(8, 0), (16, 0), (24, 0), (22, 1)]
    opened(tmp_path, resume_step=16, attempt=0)
    assert [one["step"] for one in lines(tmp_path)] == [8, 16]
    (tmp_path / "decisions.jsonl").unlink()
    (tmp_path / "decisions.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"decisions\.jsonl cannot be read and written"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (SWITCH, "switches from bold to safe, with step 12 (spike)"),
        (SWITCH | {"would": True}, "would switch from bold to safe (spike)"),
        (BRANCH, "tried safe 3.2100, slow 3.2500 up to step 22, and continues with slow (periodic)"),
        (ROLLBACK, f"goes back to before step 31 from slow to safe: {ROLLBACK['cause']}"),
        (ROLLBACK | {"from": "safe"}, f"goes back to before step 31, with safe again: {ROLLBACK['cause']}"),
        (
            {"event": "rollback", "cause": "the loss rose", "to": "safe", "would": True},
            "would go back to safe: the loss rose",
        ),
        ({"event": "branch", "candidates": ["a", "b"], "reason": "plateau", "would": True}, "would try a, b (plateau)"),
        (
            {"event": "boundary", "reason": "spike", "strategy": "a", "extra_steps": 9},
            "keeps a: the budget does not allow trying others yet (spike)",
        ),
        ({"event": "spike", "loss": 3.5}, "sees a spike: the mean of the loss is 3.5000"),
        (NOWCAST, "does not extrapolate the weights (as it is 3.1000, nowcast 3.4000)"),
        ({"event": "lower", "scale": 0.5, "why": {"a": 1}}, "lower: scale 0.5000, why (a 1)"),
        ({"event": "switch", "to": 3}, "switch: to 3"),
        ({"event": "rollback", "first": None}, "rollback: first None"),
        ({"event": "branch", "winner": "a", "losses": [1]}, "branch: winner a, losses [1]"),
    ],
)
def test_decisions_in_words(note, words):
    assert described(note) == words


def test_numbers_of_a_note():
    assert numbers("orchestrator", NOWCAST | {"text": "x", "list": [1], "none": None}) == {
        "orchestrator/nowcast": 1.0,
        "orchestrator/nowcast/accepted": 0.0,
        "orchestrator/nowcast/losses/as it is": 3.1,
        "orchestrator/nowcast/losses/nowcast": 3.4,
    }


def parsed(*decisions: tuple[int, dict], ends=None):
    return decisions_of([{"step": step, "controller": "orchestrator", **note} for step, note in decisions], ends or {})


def test_bands_follow_switches_branches_and_rollbacks():
    assert strategy_bands(parsed((8, SWITCH), (12, BRANCH)), 40) == [
        Band(0, 11, "bold"),
        Band(11, 12, "safe"),
        Band(12, 40, "slow"),
    ]
    whole = parsed((12, BRANCH | {"first": 9}), (12, {**SWITCH, "from": "bold", "to": "slow", "effective": 13}))
    assert strategy_bands(whole, 40) == [Band(0, 8, "bold"), Band(8, 40, "slow")]
    assert strategy_bands(parsed((8, SWITCH), (9, SWITCH | {"to": "bold", "would": True})), 10) == [Band(0, 10, "bold")]
    back = parsed((8, SWITCH), (12, BRANCH), (33, SWITCH | {"effective": 37}), (34, ROLLBACK), ends={0: 26, 1: np.inf})
    assert [one.is_superseded for one in back] == [False, False, True, True]
    assert strategy_bands(back, 60)[-2:] == [Band(12, 25, "slow"), Band(25, 60, "safe")]
    assert strategy_bands([], 10) == []
    assert strategy_bands(parsed((8, SWITCH), (9, SWITCH | {"from": "safe"})), 30) == [
        Band(0, 11, "bold"),
        Band(11, 30, "safe"),
    ]


def write(folder, decisions, num_steps=60, metrics=None):
    folder.mkdir(parents=True)
    attempts = [{"step": step, "train/loss": 5 - step / 100, **(metrics or {})} for step in range(1, num_steps + 1)]
    attempts[0] |= {"telemetry/is_spike": 0.0}
    attempts[29] |= {"telemetry/is_spike": 1.0}
    attempts[30] |= {"telemetry/is_spike": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in attempts))
    if decisions is not None:
        (folder / "decisions.jsonl").write_text("".join(decisions))
    return folder


def line(step, note, **changes):
    return json.dumps({"step": step, "controller": "orchestrator", **note, **changes}) + "\n"


@pytest.mark.slow
def test_a_page_shows_decisions_as_a_table_bands_and_marks(tmp_path, monkeypatch):
    folder = write(tmp_path / "a", [line(8, SWITCH), line(12, BRANCH), line(32, ROLLBACK)])
    text = render(read_runs([str(folder)]))
    page = Page(text)
    assert "<h2>Decisions</h2>" in text
    assert ["8", "orchestrator", described(SWITCH)] in page.rows
    loss = page.figures["chart-0"]
    assert [band[:2] for band in loss["bands"]] == [[0, 11], [11, 12], [12, 32], [32, 60]]
    assert loss["bands"][1][2] == loss["bands"][3][2]  # safe, twice
    assert {(30, "spike"), (32, "went back")} <= {tuple(mark) for mark in loss["marks"]}
    assert all(not figure["bands"] for name, figure in page.figures.items() if name != "chart-0")
    assert report_row(read_run(str(folder)), folder)[0][1].startswith("switch 1, branch 1, rollback 1: ")

    plain = write(tmp_path / "b", None)
    text = render(read_runs([str(plain)]))
    assert "Decisions" not in text
    assert Page(text).figures["chart-0"]["bands"] == []
    assert report_row(read_run(str(plain)), plain) == []
    # Of several runs, the table says which is which, and no bands lie over each other.
    both = Page(render(read_runs([str(folder), str(plain)])))
    assert both.figures["chart-0"]["bands"] == []
    assert ["8", "orchestrator", described(SWITCH)] in both.rows

    seen, make = [], plots._figure
    monkeypatch.setattr(plots, "_figure", lambda *whole: seen.append(make(*whole)) or seen[-1])
    plots.loss_curve(read_run(str(folder)), tmp_path / "loss.png", "title")
    plots.loss_curve(read_run(str(plain)), tmp_path / "plain.png", "title")
    (_, axes), (_, without) = seen
    assert {"bold", "safe", "slow"} <= set(axes.get_legend_handles_labels()[1])
    assert {text.get_text() for text in axes.texts} == {"spike", "went back"}
    assert not without.collections


@pytest.mark.slow
def test_hostile_decisions_stay_text_and_are_bounded(tmp_path):
    evil = "<script>alert(1)</script>$\\frac{$"
    wrong = [
        *(line(step, SWITCH, **{"from": evil, "to": f"{evil}{step}", "effective": step}) for step in range(1, 1000)),
        line(5, {"event": "rollback", "first": 10**30, "to": [1], "cause": evil * 1000}),
        line(6, {"event": "branch", "winner": evil, "losses": {evil: "x", "n": None, "d": {"d": {}}}, "until": -3}),
        line(7, {"event": "switch", "to": "x" * 10_000, "effective": 1e300}),
        line(8, {"event": evil}, controller=evil),
        *(line(step, ROLLBACK) for step in range(1, 100)),
        '{"step": 9, "controller": 3, "event": "switch"}\n',
        '{"step": "9"}\n',
        "not json\n",
    ]
    folder = write(tmp_path / "a", wrong, num_steps=1000)
    run = read_run(str(folder))
    assert "3 of 1,105 lines of decisions.jsonl could not be read and are left out" in run.unread
    text = render([run])
    page = Page(text)
    assert "<script>alert" not in text
    assert len(text) < 1_000_000
    assert "902 earlier ones are in decisions.jsonl" in page.text
    assert len(page.figures["chart-0"]["bands"]) <= 200
    assert len([mark for mark in page.figures["chart-0"]["marks"] if mark[1] == "went back"]) <= MAX_MARKS
    assert "earlier rollbacks have no line in the charts" in page.text
    plots.loss_curve(run, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").stat().st_size > 5000
