"""Reads the page of a run, and computes its numbers a second time from the files of the log folder."""

import json
from html.parser import HTMLParser

import pytest


class Page(HTMLParser):
    """The parts of a page: its texts, tags, JSON and table rows."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.tables: list[list[list[str]]] = []
        self._texts: list[str] = []
        self._in_cell = False
        self._in_figures = False
        self.figures: dict = {}
        self.feed(text)
        self.text = "".join(self._texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in_figures = dict(attrs).get("id") == "figures"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.rows.append([])
            self.tables[-1].append(self.rows[-1])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._in_figures:
            self.figures = json.loads(data)
            self._in_figures = False
        self._texts.append(data)
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next([cell.strip() for cell in row[1:]] for row in self.rows if row and row[0].strip() == name)

    def curve(self, name: str, chart: int | None = None) -> dict[int, float | None]:
        """The points of the first curve with a name."""
        figures = self.figures.values() if chart is None else [self.figures[f"chart-{chart}"]]
        trace = next(trace for figure in figures for trace in figure["curves"] if trace["name"] == name)
        return dict(zip(trace["x"], trace["y"], strict=True))


def expected_card(folder):
    """The numbers of a report card, from the files alone: of one attempt that nothing superseded, and of one process."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def values(name):
        return [(one["step"], one[name]) for one in records if name in one]

    def newest(name):
        step, value = next(pair for pair in reversed(values(name)) if pair[1] is not None)
        return f"{value:.4f}" if values(name)[-1][1] is not None else f"not finite; {value:.4f} at step {step}"

    def lowest(name):
        value, step = min((value, step) for step, value in values(name) if value is not None)
        return f"{newest(name)} (lowest {value:.4f} at step {step})"

    def median(name):
        numbers = sorted(value for _, value in values(name) if value is not None)
        middle = (numbers[(len(numbers) - 1) // 2] + numbers[len(numbers) // 2]) / 2
        return f"{middle:,.0f}" if middle >= 10 else f"{middle:.3g}"

    ledger = [json.loads(line) for line in (folder / "goodput.jsonl").read_text().splitlines()]
    spent = ledger[-1]["seconds"]
    last = [one for one in records if "train/loss" in one][-1]
    skipped = max(value for _, value in values("train/skipped_steps")) if values("train/skipped_steps") else 0
    card = {
        "steps": f"{last['global_step']} of {round(last['global_step'] / last['run_progress'])}",
        "training loss, last step": newest("train/loss"),
        "training loss, smoothed": newest("train/smoothed_loss"),
        "validation loss": lowest("eval/loss"),
        "bits per byte": lowest("eval/bpb"),
        "best bits per byte": newest("eval/best_bpb"),
        "tokens": f"{last['throughput/total_tokens']:,.0f}",
        "model FLOPs": f"{last['throughput/total_gflops'] * 1e9:.4g}",
        "training time, all starts": f"{last['throughput/training_time']:,.1f} s",
        "tokens per second, median": median("throughput/tokens_per_second"),
        "wall time": f"{sum(spent.values()):,.1f} s",
        "time in steps": f"{spent['step']:,.1f} s",
        "waiting for batches": f"{spent['data wait']:,.1f} s",
        "time in evaluations": f"{spent['eval']:,.1f} s",
        "time in saves": f"{spent['save']:,.1f} s",
        "cost": f"{sum(spent.values()) / 3600 * 24:,.2f} ({sum(spent.values()) / 3600:,.2f} hours at 24 per hour)",
    }
    card |= {"MFU, median": median("throughput/mfu")} if values("throughput/mfu") else {}
    card |= {"CORE": newest("eval/core")} if values("eval/core") else {}
    return card | ({"skipped steps": f"{skipped:.0f}"} if skipped else {})


def check_numbers(folder, page):
    """Every number of a page but those of its texts is the one that the files give."""
    card = {row[0]: row[1] for row in page.tables[0] if row[0]}
    texts = {"devices", "model", "batch", "precision", "starts from", "command", "system"}
    texts |= {name for name in card if name.startswith("phase ")}
    shown = {(name, value) for name, value in card.items() if name not in texts}
    expected = set(expected_card(folder).items())
    assert shown == expected, f"shown: {shown - expected}, expected: {expected - shown}"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for one in records for name, value in one.items() if isinstance(value, int | float | None)}
    drawn = {trace["name"] for figure in page.figures.values() for trace in figure["curves"]}
    assert names - {"step", "attempt", "global_step", "run_progress", "throughput/resumed_from"} <= drawn
    for name in names & drawn:
        points = {one["step"]: one[name] for one in records if name in one}
        curve = page.curve(name)
        assert {step for step, value in curve.items() if value is None} == {n for n, v in points.items() if v is None}
        finite = {step: value for step, value in points.items() if value is not None}
        assert {step: curve[step] for step in finite} == pytest.approx(finite, rel=1e-6)
    spent = json.loads((folder / "goodput.jsonl").read_text().splitlines()[-1])["seconds"]
    shares = {name: [f"{s:,.1f} s", f"{s / sum(spent.values()):.1%}"] for name, s in spent.items() if s}
    assert {row[0]: row[1:] for row in page.rows if row and row[0] in spent and row[1].endswith(" s")} == shares
