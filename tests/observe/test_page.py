"""The HTML page of runs: its numbers, read back from the page, are those of the log folders."""

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxlm.__main__ import main
from jaxlm.core.values.logged import LayerTable
from jaxlm.engine.activity import ActivityClock
from jaxlm.observe.curves import extremes, half_window, smoothed
from jaxlm.observe.ledger import Ledger
from jaxlm.observe.logged_run import LoggedRun, Series, read_run, read_runs
from jaxlm.observe.page.page import render
from jaxlm.observe.page.sections import config_values
from jaxlm.observe.trackers import JsonlTracker
from jaxlm.session import final_report
from tests.observe.page_reader import Page, check_numbers


def phase_event(name, start, end, num_phases=2, rows=()):
    return start, "phase", {"name": name, "start": start, "end": end, "num_phases": num_phases, "rows": rows}


START = (0, "start", {"rows": [("run", "mine (seed 0)"), ("devices", "4 x cpu in 1 process, JAX 0.10.2")]})
EVENTS = (START, phase_event("warm", 0, 4), phase_event("adapt", 4, 12))


def record(step, **metrics):
    shared = {"global_step": step, "run_progress": step / 40, "throughput/tokens_per_second": 100.0 + step}
    return {"step": step, "train/loss": 5 - step / 10, **shared, **metrics}


def write_run(folder, records, samples=(), config="trainer: {seed: 0}\n", events=EVENTS, end=""):
    tracker = JsonlTracker(folder / "metrics.jsonl", resume_step=None)
    for event in events:
        tracker.log_event(*event)
    tracker.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + end)
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text('{"jax": "0.10.2"}')
    return folder


def page_of(*folders) -> Page:
    return Page(render(read_runs([str(folder) for folder in folders])))


def marks(page: Page) -> set[tuple[int, str]]:
    return {(step, text) for step, text in page.figures["chart-0"]["marks"]}


@pytest.mark.parametrize("num", [0, 1, 7, 200, 999, 1000, 5_003])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_downsampling_keeps_the_extremes_of_every_bucket(num, missing):
    rng = np.random.default_rng(num)
    values = rng.standard_normal(num)
    values[rng.random(num) < missing] = np.nan
    kept = extremes(values, 100)
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= 3 * 100 + 2
    if num <= 200:
        np.testing.assert_array_equal(kept, np.arange(num))
        return
    width = -(-num // 100)
    for start in range(0, num, width):
        bucket, shown = values[start : start + width], values[kept[(kept >= start) & (kept < start + width)]]
        assert np.isnan(bucket).any() == np.isnan(shown).any()
        if not np.isnan(bucket).all():
            assert (np.nanmin(shown), np.nanmax(shown)) == (np.nanmin(bucket), np.nanmax(bucket))
    assert {0, num - 1} <= set(kept.tolist())


def test_the_moving_average_is_that_of_the_finite_values_around():
    rng = np.random.default_rng(0)
    steps, values = np.arange(400), rng.standard_normal(400)
    values[[3, 50]] = np.nan
    values[200] = 1e30  # is in no other window
    half = half_window([steps])
    at, means = smoothed(Series(steps, values), half)
    assert half == 4
    np.testing.assert_array_equal(at, [step for step in range(4, 396) if step != 50])
    np.testing.assert_allclose(means, [np.nanmean(values[step - 4 : step + 5]) for step in at], rtol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "width"), [([400], 9), ([400, 10_000], 81), ([4000, 10_000], 201), ([4, 10_000], 201), ([20, 49], 1)]
)
def test_all_runs_of_a_chart_have_one_moving_average(tmp_path, lengths, width):
    """Two runs with the same noise look the same, however long each is."""
    noise = np.random.default_rng(1).standard_normal(max(lengths))
    runs = [
        LoggedRun(
            f"run {n}", {"train/loss": Series(np.arange(1, n + 1), noise[:n]), "eval/loss": Series(*np.ones((2, 2)))}
        )
        for n in lengths
    ]
    page = Page(render(runs))
    assert ("bold: mean of" in page.text) == (width > 1)
    assert width == 1 or f"bold: mean of {width:,} steps" in page.text
    traces = {
        trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in page.figures["chart-0"]["curves"]
    }
    for n in lengths:
        name = "train/loss" if len(lengths) == 1 else f"run {n}: train/loss"
        drawn = traces.get(f"{name}, mean", {})
        assert bool(drawn) == (1 < width <= n)
        half = width // 2
        expected = {step: noise[step - 1 - half : step + half].mean() for step in drawn}
        assert drawn == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_legend_is_beside_the_chart(tmp_path):
    """Nothing lies over it: it is not part of the plot. Its lines know their curves by number."""
    folders = [
        write_run(tmp_path / name, [record(step, **{"eval/loss": 4.0})]) for step, name in ((1, "a<b"), (2, "c"))
    ]
    text = render(read_runs([str(folder) for folder in folders]))
    keys = re.findall(r'data-chart="chart-0" data-key="(\d)"><svg.*?</svg>(.*?)</button>', text)
    names = ["a<b: train/loss", "a<b: eval/loss", "c: train/loss", "c: eval/loss"]
    assert [(int(number), html.unescape(name)) for number, name in keys] == list(enumerate(names))
    curves = Page(text).figures["chart-0"]["curves"]
    assert {(curve["key"], curve["name"]) for curve in curves} == set(enumerate(names))


def test_the_numbers_of_a_page_are_those_of_the_log_folder(tmp_path):
    records = [record(step, **{"eval/loss": 4.2 + 1 / step} if step % 4 == 0 else {}) for step in range(1, 13)]
    records[4]["train/loss"] = None
    page = page_of(write_run(tmp_path / "mine", records))
    drawn = page.curve("train/loss")
    assert drawn.pop(5) is None
    assert drawn == pytest.approx({one["step"]: one["train/loss"] for one in records if one["step"] != 5}, rel=1e-6)
    assert page.curve("eval/loss") == pytest.approx({4: 4.45, 8: 4.325, 12: 4.2 + 1 / 12}, rel=1e-6)
    assert page.curve("throughput/tokens_per_second") == {step: 100 + step for step in range(1, 13)}
    assert page.row("steps") == ["12 of 40"]
    assert page.row("validation loss") == ["4.2833 (lowest 4.2833 at step 12)"]
    assert page.row("devices") == ["4 x cpu in 1 process, JAX 0.10.2"]
    assert page.row("jax") == ["0.10.2"]
    assert marks(page) == {(4, "phase adapt")}


def ledger_line(step, seconds):
    """A line of `goodput.jsonl`, with its 512 bytes."""
    names = ("start", "compile", "restore", "data wait", "rollout", "step", "eval", "save")
    spent = {name: float(seconds.get(name, 0)) for name in names}
    stretch = {"number": 0, "from_step": 0}
    line = {"started_unix_s": 100.0, "stretch": stretch, "step": step, "elapsed_s": sum(spent.values())}
    return json.dumps(line | {"seconds": spent}).ljust(511) + "\n"


def test_every_number_of_a_page_is_that_of_its_files(tmp_path):
    """With an evaluation and a save after the last step, of which no step's metrics know."""
    records = []
    for step in range(1, 11):
        one = record(step, **{"train/smoothed_loss": 5.5 - step / 10, "grad/norm/total": 1.0 + step % 3})
        one |= {"throughput/total_tokens": 512 * step, "throughput/total_gflops": 0.75 * step}
        one |= {"throughput/training_time": 0.5 * step, "throughput/mfu": 0.2 + step / 100}
        one |= {"throughput/duration": 0.5, "throughput/loading_time": 0.01, "throughput/hook_time": 0.0}
        records.append(one | {"train/skipped_steps": float(step >= 10), "optim/learning_rate": step / 1000})
    records[9]["train/loss"] = None
    for step, loss, core in ((5, 4.0, 0.1), (10, 4.5, 0.2)):
        evaluated = {"eval/loss": loss, "eval/bpb": loss / 2, "eval/best_bpb": 2.0, "eval/core": core}
        records.insert(step if step == 5 else 11, {"step": step, "global_step": step, **evaluated})
    folder = write_run(tmp_path / "mine", [one | {"run_progress": one["step"] / 40} for one in records])
    early = {"start": 20, "compile": 4, "step": 5}
    late = early | {"eval": 3.9, "save": 0.3, "data wait": 0.1, "start": 21.5}
    (folder / "goodput.jsonl").write_text(ledger_line(0, early) + ledger_line(10, late))
    page = Page(render([read_run(str(folder))], 24.0))
    check_numbers(folder, page)
    assert page.row("training loss, last step") == ["not finite; 4.1000 at step 9"]


def test_times_that_only_the_ledger_knows_are_left_out_without_it(tmp_path):
    times = {"throughput/duration": 0.5, "throughput/loading_time": 0.1, "throughput/hook_time": 0.0}
    page = page_of(write_run(tmp_path / "mine", [record(1, **times)]))
    assert not [row for row in page.tables[0] if "time" in row[0] or "waiting" in row[0]]


def test_extremes_of_a_long_run_stay_and_the_page_is_small(tmp_path):
    num = 100_000
    values = np.random.default_rng(0).standard_normal(num)
    values[[77_777, 33_333]] = 1e4, -1e4
    steps = np.arange(1, num + 1)
    series = {"train/loss": (steps, values), "grad/norm/total": (steps, values**2)}
    text = render([LoggedRun("long", {name: Series(*one) for name, one in series.items()})])
    curve = Page(text).curve("train/loss")
    assert (curve[77_778], curve[33_334]) == (1e4, -1e4)
    assert {1, num} <= curve.keys()
    assert len(curve) <= 4_002
    assert len(text) < 1_000_000
    assert f"of {num:,} points" in text


def test_untrusted_text_stays_text(tmp_path):
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    events = [*EVENTS, (3, "skip", {"reason": attack, "batch": attack})]
    records = [record(step, **{"train/skipped_steps": float(step > 2), f"eval/{attack}": 1.0}) for step in range(1, 5)]
    samples = [{"step": 1, "name": attack, "prompt": attack, "text": attack + "\ud800"}]
    folder = write_run(tmp_path / "a<b>", records, samples, f"model: '{attack}'\n", events)
    other = write_run(tmp_path / "b", records, samples, f"model: '{attack}!'\n", events)
    plain = write_run(tmp_path / "plain", [record(1)])
    page, expected = page_of(folder, other), page_of(plain, plain.parent / "b")
    assert [tag for tag, _ in page.tags].count("script") == [tag for tag, _ in expected.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count(attack) >= 8
    report_path = tmp_path / "page.html"
    page_text = render(read_runs([str(folder)]))
    report_path.write_text(page_text, errors="replace")  # a half of a surrogate pair can be written


def test_a_folder_that_is_written_at_the_moment_or_damaged_is_read(tmp_path):
    records = [record(step) for step in range(1, 6)]
    junk = '[1]\nnot json\n{"step": "x"}\n{"step": 1e400}\n{"step": 9, "attempt": "one"}\n'
    junk += '{"step": 6, "train/loss": NaN, "x": "text"}\n'
    folder = write_run(tmp_path / "mine", records, config="a: [", end=junk + '{"step": 7, "train/lo')
    (folder / "environment.json").write_text("{")
    (folder / "samples.jsonl").write_bytes(
        b'{"step": 1}\n\xff\xfe\n{"step": 2, "name": "eval", "prompt": "p", "text": "t"}\n'
    )
    page = page_of(folder)
    assert page.curve("train/loss") == {**{step: 5 - step / 10 for step in range(1, 6)}, 6: None}
    assert ["2", "pt"] in page.rows
    (folder / "metrics.jsonl").write_text("")
    assert "No step is recorded yet" in page_of(folder).text


def test_lines_that_cannot_be_read_are_counted_once(tmp_path, monkeypatch, capsys):
    """The log folder of 4 steps, with 3 damaged metrics, 2 damaged samples and 1 damaged line of the ledger."""
    records = [record(step) for step in range(1, 5)]
    folder = write_run(tmp_path / "mine", records, end='x\n{"step": -1}\n\n{"step": 5, "tra')
    (folder / "samples.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "name": "eval", "prompt": "p", "text": "t"}\n?\n{"step": 3, "name": "ev'
    )
    ledger = Ledger(folder, ActivityClock(), step=0, warn=pytest.fail)
    ledger.begin_line()
    ledger.begin_line()
    content = (folder / "goodput.jsonl").read_bytes()
    (folder / "goodput.jsonl").write_bytes(b"0" * 512 + content[512:] + content[:100])
    write_run(tmp_path / "sound", records)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "mine", "sound"]) == 0
    sentences = [
        "mine: 3 of 7 lines of metrics.jsonl could not be read and are left out",
        "mine: 2 of 3 lines of samples.jsonl could not be read and are left out",
        "mine: 1 of 2 lines of goodput.jsonl could not be read and is left out",
    ]
    assert capsys.readouterr().err.splitlines() == [f"warning: {one}" for one in sentences]
    text = (tmp_path / "report.html").read_text()
    assert [text.count(f"{one}.") for one in sentences] == [1, 1, 1]
    assert text.count("could not be read") == 3


def test_a_run_that_went_back_shows_the_line_that_survives(tmp_path):
    first = [record(step, **{"train/loss": 9.0}) for step in range(1, 11)]
    second = [record(step, attempt=1, **{"train/loss": 1.0}) for step in range(6, 9)]
    second[0]["throughput/resumed_from"] = 5
    texts = [{"step": step, "name": "eval", "prompt": "p", "text": f"old {step}"} for step in (5, 10)]
    page = page_of(write_run(tmp_path / "mine", first + second, texts))
    assert page.curve("train/loss") == dict.fromkeys(range(1, 6), 9.0) | dict.fromkeys(range(6, 9), 1.0)
    assert marks(page) >= {(5, "resumed")}
    assert "old 5" in page.text
    assert "old 10" not in page.text


def test_numbers_of_layers_are_tables_with_bars(tmp_path):
    """A run that was killed in between has measured twice; a line that is damaged or cut off is no table."""
    table = LayerTable(
        "decouple", "errors of the scores: <b>", ("un-rotation", "rank"), [(0.8, 0.2), (0.4, float("nan"))]
    )
    one = LayerTable("drop_layers", "layers 1 of 2 are dropped", ("Block Influence",), [(0.5,), (0.25,)])
    folder = write_run(
        tmp_path / "mine",
        [record(1)],
        events=[*EVENTS, *((step, "layers", vars(of)) for step, of in ((0, table), (0, table), (4, one)))],
    )
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"step": 4, "type": "layers", "source": "x", "title": "x", "columns": ["x"], "rows": [["1"]]}\n')
        file.write('{"step": 4, "type": "layers", "source": "drop_layers", "title": "la')
    page = page_of(folder)
    decoupled, dropped = (each for each in page.tables if each[0][0] == "layer")
    assert decoupled == [["layer", "un-rotation", "rank"], ["0", "0.8000", "0.2000"], ["1", "0.4000", "nan"]]
    assert dropped == [["layer", "Block Influence"], ["0", "0.5000"], ["1", "0.2500"]]
    assert table.title in page.text
    bars = [attributes["style"] for tag, attributes in page.tags if attributes.get("class") == "meter"]
    assert bars == [f"width: {percent}%" for percent in ("70.00", "17.50", "35.00", "0.00", "70.00", "35.00")]


def test_skipped_steps_have_their_reason(tmp_path):
    records = [record(n, **{"train/skipped_steps": s}) for n, s in enumerate([0, 0, 1, 1, 2], 1)]
    skipped = (3, "skip", {"reason": "loss is not finite", "batch": "wiki: sequence 8 of 9"})
    folder = write_run(tmp_path / "mine", records, events=[*EVENTS, skipped])
    page = page_of(folder)
    assert page.row("3") == ["loss is not finite", "wiki: sequence 8 of 9"]
    assert page.row("5") == ["not in events.jsonl", ""]
    assert page.row("skipped steps") == ["2"]


def test_a_run_of_an_earlier_version_has_its_metrics(tmp_path):
    folder = write_run(tmp_path / "mine", [record(1, **{"train/skipped_steps": 1.0})], events=())
    (folder / "train.log").write_text("run\n  devices  4 x cpu\n")
    page = page_of(folder)
    assert page.curve("train/loss") == {1: 4.9}
    assert "events.jsonl is missing, as in runs of earlier versions. It has the start-up table, the phases" in page.text


def test_the_newest_marks_stay_and_the_others_are_counted(tmp_path):
    resumes = {2 * n: {"throughput/resumed_from": 2 * n - 1} for n in range(1, 40)}
    skips = [record(n, **{"train/skipped_steps": n}, **resumes.get(n, {})) for n in range(1, 121)]
    folder = write_run(tmp_path / "mine", skips)
    page = page_of(folder)
    skipped = sorted(step for step, text in marks(page) if text == "skipped")
    assert skipped == list(range(91, 121))
    assert sorted(step for step, text in marks(page) if text == "resumed") == list(range(19, 78, 2))
    assert "90 earlier skipped steps have no line in the charts." in page.text
    assert "9 earlier resumes have no line in the charts." in page.text
    shown = [int(row[0]) for row in page.rows if len(row) == 3 and row[1] == "not in events.jsonl"]
    assert shown == list(range(21, 121))
    assert "20 earlier ones are left out." in page.text
    assert page.row("resumed from step") == ["63, 65, 67, 69, 71, 73, 75, 77 (31 earlier ones are left out)"]
    both = page_of(folder, write_run(tmp_path / "other", skips[:3]))
    assert "mine: 90 earlier skipped steps have no line in the charts." in both.text


def test_several_runs_lie_over_each_other_and_differ_where_they_differ(tmp_path):
    one = write_run(tmp_path / "x" / "mine", [record(step) for step in range(1, 4)], config="a: {b: 1, c: [1, 2]}\n")
    two = write_run(
        tmp_path / "y" / "mine", [record(step) for step in range(1, 6)], config="a: {b: 2, c: [1, 2], d: no}\n"
    )
    page = page_of(one, two)
    assert page.curve(str(one)) == pytest.approx({step: 5 - step / 10 for step in range(1, 4)})
    assert page.curve(str(two)) == pytest.approx({step: 5 - step / 10 for step in range(1, 6)})
    assert (page.row("a.b"), page.row("a.d")) == (["1", "2"], ["–", "no"])
    assert "a.c" not in [row[0] for row in page.rows if row]
    assert "The environments are the same." in page.text


@pytest.mark.slow
def test_many_samples_and_metrics_are_bounded(tmp_path):
    samples = [
        {"step": step, "name": "eval", "prompt": f"p{prompt}", "text": "x" * 5000}
        for step in range(60)
        for prompt in range(20)
    ]
    many = {f"grad/norm/layer {n}": 1.0 for n in range(60)}
    folder = write_run(tmp_path / "mine", [record(step, **many) for step in range(1, 4)], samples)
    text = render(read_runs([str(folder)]))
    assert len(text) < 3_000_000
    page = Page(text)
    assert "30 others are in samples.jsonl" in page.text
    assert "8 more prompts are in samples.jsonl." in page.text
    shown = [int(row[0].replace(",", "")) for row in page.rows if len(row) == 2 and row[1].startswith("p0x")]
    assert (len(shown), shown[0], shown[-1]) == (30, 59, 0)
    assert len(page.figures) == 42  # loss, throughput and 40 of 60


CORE = {"eval/core": 0.125, "eval/core/copa": 0.25, "eval/core/copa/accuracy": 0.625, "eval/core/squad": 0.0}


def test_the_report_card_has_what_the_run_measured(tmp_path):
    totals = {"throughput/total_gflops": 2.5e6, "throughput/training_time": 5400.0, "train/smoothed_loss": 4.25}
    best = {"eval/bpb": 1.5, "eval/best_bpb": 1.25}
    folder = write_run(tmp_path / "mine", [record(1), record(2, **totals, **best, **CORE)])
    (folder / "environment.json").write_text('{"command": "jaxlm train", "system": "Linux"}')
    page = page_of(folder)
    rows = {
        "command": "jaxlm train",
        "system": "Linux",
        "training loss, smoothed": "4.2500",
        "best bits per byte": "1.2500",
        "model FLOPs": "2.5e+15",
        "training time, all starts": "5,400.0 s",
    }
    assert {name: page.row(name) for name in rows} == {name: [value] for name, value in rows.items()}
    assert page.row("copa") == ["0.6250", "0.2500"]
    assert page.row("squad") == ["–", "0.0000"]
    assert [row[1:] for row in page.rows if row and row[0].strip() == "CORE"] == [["0.1250"], ["", "0.1250"]]
    assert page.curve("eval/core") == {2: 0.125}
    assert "cost" not in [row[0] for row in page.rows if row]
    plain = page_of(write_run(tmp_path / "plain", [record(1)]))
    assert "CORE" not in plain.text
    both = page_of(folder, tmp_path / "plain")
    assert both.row("copa") == ["0.6250", "0.2500", "–", "–"]


def test_the_cost_is_that_of_the_hours_without_pauses():
    seconds = {"step": 5000.0, "compile": 400.0, "idle between starts": 9e9}
    runs = [LoggedRun("mine", {}, goodput=seconds), LoggedRun("without a ledger", {})]
    assert Page(render(runs, 24.0)).row("cost") == ["36.00 (1.50 hours at 24 per hour)", "–"]


def test_goodput_is_a_bar_and_a_table():
    run = LoggedRun("mine", {}, goodput={"step": 30.0, "compile": 10.0, "save": 0.0})
    page = Page(render([run]))
    assert [page.row("step"), page.row("compile")] == [["30.0 s", "75.0%"], ["10.0 s", "25.0%"]]
    widths = [attrs["style"] for tag, attrs in page.tags if tag == "span" and "width" in attrs.get("style")]
    assert [style.split(";")[0] for style in widths] == ["width: 75.0000%", "width: 25.0000%"]
    assert "Wall time" not in render([LoggedRun("mine", {})])


def test_a_page_loads_nothing_and_is_the_same_again(tmp_path):
    folder = write_run(tmp_path / "mine", [record(step) for step in range(1, 4)])
    text = render([read_run(str(folder))])
    assert text == render([read_run(str(folder))])
    page = Page(text)
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    (policy,) = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")


def test_a_run_is_a_path_an_id_or_a_url(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "logs" / "mine", [record(step) for step in range(1, 4)])
    monkeypatch.chdir(tmp_path)
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/bucket/mine", recursive=True)
    found = [read_run(given) for given in ("mine", "logs/mine", str(folder), "memory://bucket/mine/")]
    assert [run.name for run in found] == ["mine"] * 4
    assert [run.latest("train/loss") for run in found] == [4.7] * 4
    assert {run.config for run in found} == {"trainer: {seed: 0}\n"}


def test_a_folder_without_metrics_does_not_hide_the_run_of_its_name(tmp_path, monkeypatch, capsys):
    for name in ("d2", "plug"):
        write_run(tmp_path / "logs" / name, [record(step) for step in range(1, 4)])
    (tmp_path / "plug").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", "d2", "plug"]) == 0
    assert main(["report", "plug"]) == 0
    assert capsys.readouterr().out.split() == ["report.html", "logs/plug/report.html"]
    write_run(tmp_path / "other", [record(1)])
    (tmp_path / "logs" / "other").mkdir()
    assert main(["report", "other"]) == 0
    assert capsys.readouterr().out.split() == ["other/report.html"]


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "logs" / "mine", [record(1)])
    write_run(tmp_path / "logs" / "other", [record(1)])
    monkeypatch.chdir(tmp_path)
    assert main(["report", "mine"]) == 0
    assert (folder / "report.html").read_text() == render([read_run("mine")])
    assert main(["report", "mine", "logs/other"]) == 0
    assert main(["report", "mine", "--output_path", "new/page.html"]) == 0
    assert (tmp_path / "new" / "page.html").read_text() == (folder / "report.html").read_text()
    assert capsys.readouterr().out.split() == ["logs/mine/report.html", "report.html", "new/page.html"]
    assert main(["report", "mine", "--price_per_hour", "24"]) == 0
    assert main(["report", "mine", "--price_per_hour", "-1"]) == 2
    assert "--price_per_hour: -1.0 given, a finite number of 0 or more expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "'absent' given, which is not a run: it has no metrics.jsonl.*runs there: mine"),
        (["logs"], "'logs' given, which is not a run"),
        (["memory://bucket/absent"], "'memory://bucket/absent' given, which is not a run"),
        (["mine", "mine"], "mine given twice"),
        (["mine", "--output_path", "logs"], "logs cannot be written"),
        (["nothing://x"], "fsspec does not support nothing://"),
    ],
)
def test_mistakes_are_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    write_run(tmp_path / "logs" / "mine", [record(1)])
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert re.search(message, said)
    assert said.count("\n") == 1


def test_a_page_that_cannot_be_written_is_a_row_of_the_final_report(tmp_path):
    folder = write_run(tmp_path / "mine", [record(1)])
    run = read_run(str(folder))
    assert final_report.report_page(run, folder) == str(folder / "report.html")
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert final_report.report_page(run, folder).startswith("not written: ")


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ACTIONS = Path(__file__).with_name("page_actions.js").read_text()


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_the_numbers(tmp_path):
    """Read at the ticks of the axes: at first, zoomed, and with one of the curves hidden."""
    curves = {"train/loss": {step: 5 - step / 50 + (step % 7) / 10 for step in range(1, 201)}}
    curves["eval/loss"] = {step: 1.5 + step / 100 for step in (50, 100, 150, 200)}
    records = [{"step": n} | {name: one[n] for name, one in curves.items() if n in one} for n in range(1, 201)]
    text = render([read_run(str(write_run(tmp_path / "mine", records)))])
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{ACTIONS}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--window-size=1024,800", "--dump-dom", f"file://{tmp_path}/page.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    seen = {name: json.loads(html.unescape(found)) for name, found in re.findall(r'<pre id="(\w+)">(.*?)</pre>', dom)}
    assert seen["tip"][:2] == ["step 57", f"train/loss: {curves['train/loss'][57]:.5g}"]
    for view in ("whole", "zoomed", "hidden"):
        places = [np.polyfit(*np.array(ticks).T[::-1], 1) for ticks in seen[view]["ticks"]]
        drawn = {}
        for name, path in seen[view]["paths"].items():
            x, y = np.array(re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path), float).T
            drawn[name] = np.polyval(places[0], x + 56), np.polyval(places[1], y + 6 + 4)  # inside the margins
        names = {"eval/loss"} if view == "hidden" else {*curves, "train/loss, mean"}
        assert drawn.keys() == names
        for name in names & curves.keys():
            np.testing.assert_allclose(drawn[name][0], list(curves[name]), atol=0.1)
            np.testing.assert_allclose(drawn[name][1], list(curves[name].values()), atol=2e-3)
        steps = [step for step, _ in seen[view]["ticks"][0]]
        assert (min(steps) > 100, max(steps) <= 151) == ((view == "zoomed"),) * 2


def test_a_configuration_whose_aliases_multiply_is_shown_in_part():
    names = "abcdefghijklmnopqrstuvwxyz"
    lines = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in itertools.pairwise(names)]
    values = config_values("\n".join(["a: &a [x, x]", *lines]))
    assert values["a"] == "[x, x]"
    assert values["c.8.8"] == "[x, x]"
    assert len(values) == 5000
    assert config_values("loop: &loop [*loop, *loop]") == {}
