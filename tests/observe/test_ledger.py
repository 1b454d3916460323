"""The goodput ledger: every second of a run's wall time is counted once, over starts, kills and going back."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time

import pytest

from jaxlm import train
from jaxlm.core.values.logged import Activity, StepInfo
from jaxlm.engine import activity
from jaxlm.engine.activity import ActivityClock, process_age_s
from jaxlm.observe.ledger import IDLE, LOST, Ledger, account, parse_lines, read_lines
from jaxlm.observe.records import LEDGER


class FakeClockRun:
    """A run with a clock that only its methods move."""

    def __init__(self, folder, monkeypatch):
        self.now = 1000.0
        self.folder = folder
        self.said: list[str] = []
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def start(self, step: int, seconds: float = 4.0) -> None:
        """A process starts, and has its first batch after `seconds`."""
        self.clock = ActivityClock(age_s=0.0, now=lambda: self.now)
        self.now += seconds
        self.ledger = Ledger(self.folder, self.clock, step, self.said.append)
        self.ledger.write()

    def do(self, activity: Activity, seconds: float) -> None:
        with self.clock.during(activity):
            self.now += seconds

    def steps(self, first: int, last: int, seconds: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.do(Activity.DATA, 0.25 * seconds)
            self.do(Activity.STEP, 0.75 * seconds)
            self.ledger(StepInfo(step, "train", {}, {}))

    def save(self, seconds: float = 2.0) -> None:
        self.ledger.begin_line()
        self.do(Activity.SAVE, seconds)

    def found(self):
        goodput = account(read_lines(self.folder))
        assert goodput is not None
        assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_s)
        return goodput


def line_of(seconds: str) -> bytes:
    """A line of another process that did each activity for `seconds`, as JSON."""
    spent = ", ".join(f'"{name}": {seconds}' for name in Activity)
    text = f'{{"started_unix_s": 1, "stretch": {{"from_step": 0}}, "step": 9, "elapsed_s": 1, "seconds": {{{spent}}}}}'
    return text.encode() + b"\n"


NOTHING = dict.fromkeys((*Activity, LOST, IDLE), 0)


def test_lines_of_versions_without_rollouts_are_read():
    older = line_of("1").replace(b', "rollout": 1', b"")
    assert older != line_of("1")
    older = older.replace(b', "annotation": 1', b"").replace(b', "branch": 1', b"")
    lines, num_damaged = parse_lines(older.ljust(512))
    assert (lines[0]["seconds"]["rollout"], lines[0]["seconds"]["step"], num_damaged) == (0, 1, 0)
    assert parse_lines(older.replace(b', "eval": 1', b"").ljust(512)) == ([], 1)


def test_two_processes_that_write_at_the_same_time_are_two(run, tmp_path):
    run.start(0)
    run.steps(1, 4)
    first = run.clock, run.ledger
    run.start(4)
    for number in range(5, 9):
        run.steps(number, number)
        first[1].begin_line()
        run.save(0)
    found = run.found()
    assert (found.num_starts, found.seconds[LOST]) == (2, 0)
    assert min(found.seconds.values()) >= 0


@pytest.fixture
def run(tmp_path, monkeypatch) -> FakeClockRun:
    return FakeClockRun(tmp_path, monkeypatch)


def test_a_run_in_one_piece(run):
    run.start(0)
    run.do(Activity.COMPILE, 10)
    run.do(Activity.ROLLOUT, 2)
    run.steps(1, 8)
    run.do(Activity.EVAL, 3)
    run.save()
    run.ledger.write()
    found = run.found()
    assert found.seconds == NOTHING | {
        "start": 4,
        "compile": 10,
        "data wait": 2,
        "rollout": 2,
        "step": 6,
        "eval": 3,
        "save": 2,
    }
    assert found.wall_s == 29
    assert found.fraction == pytest.approx((6 + 2) / 29)
    assert run.ledger.metrics() == {"throughput/goodput": pytest.approx((6 + 2) / 29)}


def test_steps_after_the_checkpoint_of_a_killed_run_are_lost(run):
    run.start(0)
    run.steps(1, 8)
    run.save()
    run.steps(9, 12)  # killed here
    run.now += 60
    run.start(8)
    run.do(Activity.RESTORE, 5)
    run.steps(9, 16)
    run.ledger.write()
    found = run.found()
    assert found.num_starts == 2
    assert found.seconds == NOTHING | {
        "start": 8,
        "restore": 5,
        "data wait": 4,
        "step": 12,
        "save": 2,
        LOST: 4,
        IDLE: 60,
    }
    assert run.ledger.metrics()["throughput/goodput"] == pytest.approx(12 / found.wall_s)


def test_a_checkpoint_that_was_not_committed_loses_what_it_had_saved(run):
    run.start(0)
    run.steps(1, 4)
    run.save()
    run.steps(5, 8)
    run.save(1)  # killed before it was committed
    run.steps(9, 9)
    run.start(4)
    run.steps(5, 5)
    run.ledger.write()
    assert run.found().seconds[LOST] == 5


def test_a_run_that_goes_back_in_one_process(run):
    run.start(0)
    run.steps(1, 4)
    run.save()
    run.steps(5, 7)
    run.ledger.begin_attempt(4)
    assert run.found().seconds[LOST] == 3
    run.steps(5, 10)
    run.ledger.write()
    found = run.found()
    assert (found.seconds[LOST], found.seconds["step"], found.num_starts) == (3, 7.5, 1)
    assert run.ledger.metrics()["throughput/goodput"] == pytest.approx(7.5 / found.wall_s)
    run.ledger.begin_attempt(0)  # and from the very start again
    run.steps(1, 1)
    run.ledger.write()
    assert run.found().seconds[LOST] == 3 + 10


def test_the_last_line_is_written_once_a_second_and_in_place(run, tmp_path):
    run.start(0)
    sizes = set()
    for step in range(1, 50):
        run.steps(step, step, seconds=0.3)
        sizes.add((tmp_path / LEDGER).stat().st_size)
    assert sizes == {512}
    (line,) = read_lines(tmp_path)
    assert 45 <= line["step"] < 49  # steps take 0.3 s, so the last of them is not written yet


DAMAGE = [
    b"\x00\xff" * 100,
    b'{"step": 5}\n',
    b"[]\n" * 9,
    b'{"cut": ',
    b"[" * 200_000,
    *(line_of(seconds) for seconds in ("NaN", "1e999", "-5", "1" * 400, '"x"', "true", "null")),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_damaged_lines_are_passed_over(run, tmp_path, damage):
    run.start(0)
    run.steps(1, 4)
    run.save()
    with (tmp_path / LEDGER).open("ab") as file:
        file.write(damage)
    run.start(4)
    run.steps(5, 6)
    run.ledger.write()
    assert run.found().seconds["step"] == pytest.approx(4.5)


def test_a_ledger_that_cannot_be_written_is_a_warning_and_the_run_goes_on(run, tmp_path):
    (tmp_path / LEDGER).mkdir()
    run.start(0)
    run.steps(1, 5)
    assert len(run.said) == 1
    assert "cannot be written (Is a directory); training goes on" in run.said[0]
    (tmp_path / LEDGER).rmdir()
    run.steps(6, 8)
    assert "is written again" in run.said[1]
    assert [line["step"] for line in read_lines(tmp_path)] == [8]


def test_the_age_of_a_process_is_that_of_its_start():
    program = "import time; time.sleep(0.3); from jaxlm.engine.activity import process_age_s; print(process_age_s())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert 0.3 <= float(done.stdout) <= time.monotonic() - before + 0.02  # the system counts in hundredths
    assert process_age_s() > 0


def test_two_runs_in_one_process_count_its_age_once(tmp_path, monkeypatch):
    def fake_train(config, clock):
        Ledger(tmp_path, clock, 0, print).write()
        return train.TrainResult(None, train.Done(), None, None)

    monkeypatch.setattr(activity, "_callers", itertools.count())  # as in a new process
    monkeypatch.setattr(train, "load_config", lambda *_: None)
    monkeypatch.setattr(train, "train", fake_train)
    before = process_age_s() - 0.001  # lines are rounded to milliseconds
    assert train.main([]) == train.main([]) == 0
    goodput = account(read_lines(tmp_path))
    assert goodput.num_starts == 2
    assert before <= goodput.wall_s <= process_age_s() + 0.02  # the system counts in hundredths
    first, second = read_lines(tmp_path)
    assert first["elapsed_s"] >= before > second["elapsed_s"]


def test_nested_activities_are_counted_once():
    now = [0.0]
    clock = ActivityClock(now=lambda: now[0])
    with clock.during(Activity.STEP):
        now[0] += 1
        with contextlib.suppress(KeyError), clock.during(Activity.EVAL):
            now[0] += 2
            raise KeyError
        assert clock.activity is Activity.STEP
        now[0] += 4
    now[0] += 8
    assert {name: s for name, s in clock.seconds().items() if s} == {"start": 8, "step": 5, "eval": 2}
    assert clock.elapsed_s() == 15
    assert clock.silent_s() == 8
    assert json.loads(json.dumps(clock.seconds()))["step"] == 5
