import contextlib
import dataclasses
import importlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from unittest import mock

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import Histogram, Sample
from jaxlm.observe import environment
from jaxlm.observe.logged_run import LoggedRun, series_of
from jaxlm.observe.plots import loss_curve
from jaxlm.observe.records import parse_jsonl, read_metrics
from jaxlm.observe.trackers import JsonlTracker, RunInfo, TrackerConfig, check_trackers, read_jsonl
from jaxlm.observe.trackers.background import BackgroundTracker, TrackerTimeouts
from jaxlm.observe.trackers.mlflow import MlflowConfig, MlflowTracker
from jaxlm.observe.trackers.tensorboard import TensorboardConfig
from jaxlm.observe.trackers.trackio import TrackioConfig
from jaxlm.observe.trackers.wandb import WandbConfig, WandbTracker
from jaxlm.plan.load_config import load_config
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.reading.decode import choice_name
from tests.observe.tracker_files import tensorboard_events, wandb_records

SOURCE = Path(__file__).parents[2] / "src"
FACTS = RunInfo("run", 0, True, {"trainer": {"seed": 7}}, "trainer:\n  seed: 7\n", {"parameter_count": 1234})


def test_floats_round_trip_bit_for_bit_and_non_finite_values_are_null(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    value = float.fromhex("0x1.921fb6p+1") / 3
    tracker.log(1, {"train/loss": value, "bad": float("nan"), "worse": float("inf")})
    tracker.close()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "train/loss": value, "bad": None, "worse": None}]


def test_a_value_that_is_not_a_metric_is_left_out(tmp_path):
    """Written by another program, or damaged. A report would fail at it, after the whole run."""
    path = tmp_path / "m.jsonl"
    values = ["0.5", "null", '"abc"', "[1]", "{}", "true", "1e400", "NaN", "1" * 400]
    path.write_text("".join(f'{{"step": {s}, "train/loss": {v}}}\n' for s, v in enumerate(values)))
    records = read_metrics(path)
    assert records == [{"step": 0, "train/loss": 0.5}, {"step": 1, "train/loss": None}] + [
        {"step": step} for step in range(2, len(values))
    ]
    loss_curve(LoggedRun("run", series_of(parse_jsonl(path.read_bytes())[0])), tmp_path / "loss.png", "title")


def test_resuming_drops_later_records_and_a_truncated_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s, "x": s}) + "\n" for s in range(1, 9)) + '{"step": 9, "x')
    tracker = JsonlTracker(path, resume_step=5)
    tracker.log(6, {"x": 60})
    tracker.close()
    assert [(r["step"], r["x"]) for r in read_jsonl(path)] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60)]


def test_the_first_training_record_of_a_start_says_where_it_resumed(tmp_path):
    path = tmp_path / "m.jsonl"
    for resume_step, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5)), (5, (6,))):
        tracker = JsonlTracker(path, resume_step=resume_step)
        for step in steps:
            tracker.log(step, {"eval/loss": 1.0})
            tracker.log(step, {"throughput/duration": 0.1})
        tracker.close()
    found = {r["step"]: r["throughput/resumed_from"] for r in read_jsonl(path) if "throughput/resumed_from" in r}
    assert found == {3: 2, 6: 5}


def test_records_of_a_later_attempt_supersede_those_after_the_step_it_began_at(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonlTracker(path, resume_step=0)
    for step in range(1, 7):
        tracker.log(step, {"x": step})
    tracker.begin_attempt(1, 3, 3)
    for step in (4, 5):
        tracker.log(step, {"x": 10 * step})
    tracker.begin_attempt(2, 4, 4)
    tracker.log_histograms(5, {"h": Histogram(0.0, 1.0, (1, 2))})
    tracker.log(5, {"x": 500})
    tracker.close()
    assert [(r["step"], r.get("attempt", 0), r["x"]) for r in read_jsonl(path)] == [
        (1, 0, 1),
        (2, 0, 2),
        (3, 0, 3),
        (4, 1, 40),
        (5, 2, 500),
    ]
    assert json.loads((tmp_path / "histograms.jsonl").read_text())["attempt"] == 2
    # Killed and resumed in the second attempt: it drops what follows there, and keeps the first attempt.
    JsonlTracker(path, resume_step=4, attempt=1).close()
    assert [(r["step"], r["x"]) for r in map(json.loads, path.read_text().splitlines())] == [
        *((step, step) for step in range(1, 7)),
        (4, 40),
    ]


def test_tensorboard_hides_the_abandoned_steps(tmp_path):
    tracker = TensorboardConfig(logdir=str(tmp_path)).open(FACTS)
    for step in (1, 2, 3):
        tracker.log(step, {"x": 1.0})
    tracker.begin_attempt(1, 1, 2)
    tracker.log(2, {"x": 5.0})
    tracker.close()
    starts = [event.step for event in events(tmp_path / "run") if event.HasField("session_log")]
    assert starts == [1, 2]  # when it was opened, and for the first abandoned step


def test_wandb_counts_on_after_the_run_went_back():
    """wandb cannot remove records, and drops those of steps that it already has."""
    handle = mock.MagicMock(step=0)
    tracker = WandbTracker(handle, None)
    for step in (1, 2, 3):
        tracker.log(step, {"global_step": step})
    tracker.begin_attempt(1, 1, 2)
    tracker.log(2, {"global_step": 2})
    assert [call.kwargs["step"] for call in handle.log.call_args_list] == [1, 2, 3, 4]
    resumed = mock.MagicMock(step=5)
    again = WandbTracker(resumed, None, abandoned_steps=2)
    for step in (2, 3):
        again.log(step, {"global_step": step})
    assert [call.kwargs["step"] for call in resumed.log.call_args_list] == [5]


def test_flushed_records_are_on_disk_without_closing(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    tracker.log(1, {"x": 1.0})
    tracker.flush()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "x": 1.0}]


def events(folder: Path) -> list:
    """Every event in a folder's only event file."""
    (path,) = folder.glob("events*")
    return tensorboard_events(path)


def test_tensorboard_files_hold_scalars_and_the_runs_description(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorboardConfig(logdir=str(tmp_path)).open(FACTS)
    tracker.log(3, {"train/loss": 1.5, "eval/a task": 0.5})
    tracker.close()
    values = {v.tag: (e.step, v) for e in events(tmp_path / "run") for v in e.summary.value}
    step, loss = values["train/loss"]
    assert (step, loss.simple_value) == (3, 1.5)
    assert values["eval/a_task"][1].simple_value == 0.5
    (together,) = [e for e in events(tmp_path / "run") if e.step == 3]  # one event per record, not per number
    assert len(together.summary.value) == 2
    assert b"seed: 7" in values["config/text_summary"][1].tensor.string_val[0]
    assert b"parameter_count: 1234" in values["summary/text_summary"][1].tensor.string_val[0]
    assert b"jax==" in values["packages/text_summary"][1].tensor.string_val[0]


HISTOGRAM = Histogram(-1.0, 2.0, (3, 0, 4))
NOT_FINITE = Histogram(float("inf"), float("-inf"), (0, 0, 0))


def test_tensorboard_shows_histograms(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorboardConfig(logdir=str(tmp_path)).open(FACTS)
    tracker.log_histograms(5, {"grad/hist/x": HISTOGRAM, "bad": NOT_FINITE})
    tracker.close()
    shown = {v.tag: (e.step, v.histo) for e in events(tmp_path / "run") for v in e.summary.value if v.HasField("histo")}
    assert list(shown) == ["grad/hist/x"]
    step, found = shown["grad/hist/x"]
    assert (step, found.min, found.max, found.num) == (5, -1.0, 2.0, 7)
    assert [*found.bucket_limit, *found.bucket] == [0.0, 1.0, 2.0, 3.0, 0.0, 4.0]
    assert found.sum == pytest.approx(3 * -0.5 + 4 * 1.5)


SAMPLES = [Sample("eval", "Once", " upon\na time"), Sample("eval", "é", ""), Sample("eval/ema", "Once", " more")]


# What is logged -> its lines, without the step.
OWN_FILES = {
    "histograms": (
        {"grad/hist/x": HISTOGRAM, "bad": NOT_FINITE},
        [
            {"name": "grad/hist/x", "low": -1.0, "high": 2.0, "counts": [3, 0, 4]},
            {"name": "bad", "low": None, "high": None, "counts": [0, 0, 0]},
        ],
    ),
    "samples": (SAMPLES, [dataclasses.asdict(sample) for sample in SAMPLES]),
}


@pytest.mark.parametrize("name", OWN_FILES)
def test_histograms_and_samples_have_their_own_files_without_duplicate_records(name, tmp_path):
    given, expected = OWN_FILES[name]
    path = tmp_path / f"{name}.jsonl"
    JsonlTracker(tmp_path / "m.jsonl", resume_step=0).close()
    assert not path.exists()
    for resume_step in (0, 2):  # killed after step 4 and resumed from step 2
        tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=resume_step)
        for step in (2, 4)[resume_step // 2 :]:
            getattr(tracker, f"log_{name}")(step, given)
        tracker.close()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert records == [{"step": step, **line} for step in (2, 4) for line in expected]


def test_tensorboard_shows_samples_as_text(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorboardConfig(logdir=str(tmp_path)).open(FACTS)
    tracker.log_samples(5, SAMPLES)
    tracker.close()
    shown = {v.tag: (e.step, v) for e in events(tmp_path / "run") for v in e.summary.value if "samples" in v.tag}
    assert list(shown) == [f"eval{average}/samples/{n}/text_summary" for average, n in (("", 0), ("", 1), ("/ema", 0))]
    step, value = shown["eval/samples/0/text_summary"]
    assert (step, value.metadata.plugin_data.plugin_name) == (5, "text")
    assert value.tensor.string_val[0] == b"**prompt**\n\n    Once\n\n**text**\n\n     upon\n    a time"


def test_wandb_gets_samples_as_tables(monkeypatch):
    wandb = pytest.importorskip("wandb")
    handle = mock.MagicMock(step=0)
    tracker = WandbTracker(handle, None)
    tracker.log_samples(5, SAMPLES)
    (first, second) = (call.args[0] for call in handle.log.call_args_list)
    assert [call.kwargs for call in handle.log.call_args_list] == [{"step": 5}] * 2
    assert (list(first), list(second)) == (["eval/samples"], ["eval/ema/samples"])
    assert isinstance(first["eval/samples"], wandb.Table)
    assert first["eval/samples"].columns == ["step", "prompt", "text"]
    assert first["eval/samples"].data == [[5, "Once", " upon\na time"], [5, "é", ""]]


def test_the_report_can_say_how_to_open_each_trackers_output(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    assert TensorboardConfig(logdir="boards").how_to_open("run") == "tensorboard --logdir boards"
    assert TensorboardConfig(write_to_disk=False).how_to_open("run") is None
    assert WandbConfig(project="p", entity="me").how_to_open("run") == "wandb.ai: run 'run' of me/p"
    assert WandbConfig(mode="offline").how_to_open("run") == "wandb sync wandb/offline-run-*-run"
    assert WandbConfig(mode="disabled").how_to_open("run") is None
    assert TrackioConfig(project="p").how_to_open("run") == "trackio show --project p"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert MlflowConfig().how_to_open("run") == "mlflow ui --backend-store-uri sqlite:///mlflow.db"
    shown = MlflowConfig("https://me:a-password@host", experiment="e").how_to_open("run")
    assert shown == "https://me:<redacted>@host: run 'run' of the experiment 'e'"


class Recording:
    """A tracker that records its calls, and fails or blocks on request."""

    def __init__(self, fail: str = "", block: str = ""):
        self.records: list[tuple[int, dict]] = []
        self.calls: list[str] = []
        self.go_on = threading.Event()
        self._fail, self._block = fail, block

    def opened(self) -> "Recording":
        self._called("open")
        return self

    def log(self, step, metrics):
        self._called("log")
        self.records.append((step, dict(metrics)))

    def log_histograms(self, step, histograms):
        self._called("log_histograms")
        self.records.append((step, dict(histograms)))

    def log_samples(self, step, samples):
        self._called("log_samples")
        self.records.append((step, list(samples)))

    def begin_attempt(self, attempt, step, abandoned_steps):
        self._called("begin_attempt")

    def flush(self):
        self._called("flush")

    def close(self):
        self._called("close")

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self._fail:
            raise RuntimeError(f"no {what} today\nand more lines")
        if what == self._block:
            self.go_on.wait(60)


def test_a_guarded_tracker_receives_everything_in_order():
    inside, lines = Recording(), []
    tracker = BackgroundTracker("t", inside.opened, lines.append)
    for step in range(1, 100):
        tracker.log(step, {"x": float(step)})
        if step % 30 == 0:
            tracker.flush()
    tracker.close()
    assert inside.records == [(step, {"x": float(step)}) for step in range(1, 100)]
    assert inside.calls[0] == "open"
    assert inside.calls[-1] == "close"
    assert inside.calls.count("flush") == 3
    assert lines == []


def test_records_are_queued_until_the_interval_or_a_flush():
    slow, quick = Recording(), Recording()
    patient = BackgroundTracker("t", slow.opened, print, TrackerTimeouts(gather_s=60.0))
    hasty = BackgroundTracker("t", quick.opened, print, TrackerTimeouts(gather_s=0.01))
    deadline = time.monotonic() + 60
    while not (slow.calls and quick.calls) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    for tracker in (patient, hasty):
        tracker.log(1, {"x": 1.0})
    while not quick.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (len(quick.records), len(slow.records)) == (1, 0)
    patient.flush()
    assert len(slow.records) == 1
    for tracker in (patient, hasty):
        tracker.close()


@pytest.mark.parametrize("where", ["open", "log", "flush", "close"])
def test_a_failing_tracker_is_reported_once_and_does_no_harm(where, tmp_path):
    broken, lines = Recording(fail=where), []
    whole = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    other = Recording()
    trackers = (
        whole,
        BackgroundTracker("broken", broken.opened, lines.append),
        BackgroundTracker("t", other.opened, lines.append),
    )
    for step in range(1, 20):
        for tracker in trackers:
            tracker.log(step, {"x": 1.0})
            tracker.flush()
    for tracker in reversed(trackers):
        tracker.close()
    assert lines == [
        f"tracker broken failed (RuntimeError: no {where} today); the run continues without it. metrics.jsonl has all metrics"
    ]
    assert len(other.records) == len(read_jsonl(tmp_path / "m.jsonl")) == 19


def test_a_tracker_is_opened_again_if_python_could_not_parse_in_its_thread():
    recording, lines, failures = Recording(), [], [SystemError("AST constructor recursion depth mismatch")]

    def opened():
        if failures:
            raise failures.pop()
        return recording.opened()

    tracker = BackgroundTracker("t", opened, lines.append)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert lines == []
    assert len(recording.records) == 1


def test_a_package_whose_import_failed_that_way_is_imported_anew(tmp_path, monkeypatch):
    package = tmp_path / "halfway"
    package.mkdir()
    (package / "__init__.py").write_text("from halfway import state\nstate.count()\n")
    (package / "state.py").write_text(
        "import builtins, halfway\n"
        "def count():\n"
        "    builtins.halfway_imports = getattr(builtins, 'halfway_imports', 0) + 1\n"
        "    if builtins.halfway_imports == 1:\n"
        "        raise SystemError('AST constructor recursion depth mismatch')\n"
        "    assert halfway is __import__('sys').modules['halfway']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recording, lines = Recording(), []

    def opened():
        importlib.import_module("halfway")
        return recording.opened()

    tracker = BackgroundTracker("t", opened, lines.append)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert lines == []
    assert len(recording.records) == 1


@pytest.mark.parametrize("where", ["open", "log", "flush", "close"])
def test_a_blocking_tracker_does_not_delay_the_run(where):
    stuck, lines = Recording(block=where), []
    tracker = BackgroundTracker(
        "stuck", stuck.opened, lines.append, TrackerTimeouts(max_waiting=50, flush_s=0.2, close_s=0.2)
    )
    began = time.perf_counter()
    for step in range(1, 30):
        tracker.log(step, {"x": 1.0})
    assert time.perf_counter() - began < 30  # the tracker would block for 60 s
    flushes = []
    for _ in range(10):
        began = time.perf_counter()
        tracker.flush()
        flushes.append(time.perf_counter() - began)
    assert statistics.median(flushes) < 0.2  # only one of them waits until its timeout
    tracker.close()
    expected = {"open": 1, "log": 2, "flush": 2, "close": 1}[where]
    assert len(lines) in (expected, 1)
    assert "has not finished within 0.2 s" in lines[-1]
    stuck.go_on.set()


def test_a_full_queue_ends_the_tracker():
    stuck, lines = Recording(block="open"), []
    tracker = BackgroundTracker("stuck", stuck.opened, lines.append, TrackerTimeouts(max_waiting=5))
    for step in range(100):
        tracker.log(step, {})
    tracker.close()
    assert lines == ["tracker stuck is 5 records behind; the run continues without it. metrics.jsonl has all metrics"]
    stuck.go_on.set()


def trackers_of(tmp_path: Path, text: str, *arguments: str) -> list[TrackerConfig]:
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(["--config_path", str(tmp_path / "run.yaml"), *arguments], "test")
    return config.trainer.trackers


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (
            [TensorboardConfig(), WandbConfig(), TensorboardConfig()],
            "two trackers of type tensorboard write to the same place",
        ),
        ([WandbConfig(id="a/b")], "id: 'a/b' given"),
    ],
)
def test_invalid_trackers_are_refused(trackers, message):
    check_trackers([TensorboardConfig(), TensorboardConfig(logdir="there")])
    with pytest.raises(ConfigError, match=f"trainer.tracker.*{message}"):
        check_trackers(trackers)


def test_trackers_from_one_section_a_list_or_the_command_line(tmp_path):
    nothing = "trainer: {seed: 1}"
    assert TrainerConfig().trackers == trackers_of(tmp_path, nothing) == []
    one = "trainer: {tracker: {project: p, entity: e}}"
    assert trackers_of(tmp_path, one) == [WandbConfig(project="p", entity="e")]
    two = "trainer: {tracker: [{type: wandb, project: p}, {type: tensorboard, logdir: here}]}"
    assert trackers_of(tmp_path, two) == [WandbConfig(project="p"), TensorboardConfig(logdir="here")]
    assert trackers_of(tmp_path, two, "--trainer.tracker.1.logdir", "there")[1] == TensorboardConfig(logdir="there")
    assert trackers_of(tmp_path, nothing, "--trainer.tracker.project", "x") == [WandbConfig(project="x")]
    assert trackers_of(tmp_path, nothing, "--trainer.tracker.type", "tensorboard") == [TensorboardConfig()]
    assert trackers_of(tmp_path, one, "--trainer.tracker.type", "tensorboard") == [TensorboardConfig()]
    assert trackers_of(tmp_path, one, "--trainer.tracker", "[]") == []
    with pytest.raises(ConfigError, match=r"wandb.*projetc|projetc.*wandb"):
        trackers_of(tmp_path, "trainer: {tracker: {projetc: p}}")
    with pytest.raises(ConfigError, match="Allowed: mlflow, tensorboard, trackio, wandb"):
        trackers_of(tmp_path, "trainer: {tracker: {type: wandbb}}")


def test_xla_dumps_need_their_flag(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "")
    WandbConfig().check()
    with pytest.raises(ConfigError, match="--xla_dump_to="):
        WandbConfig(save_xla_dumps=True).check()
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=.*")
    WandbConfig(save_xla_dumps=True).check()


WANDB_RUN = """
import sys
from jaxlm.core.values.logged import Histogram
from jaxlm.observe.trackers import RunInfo
from jaxlm.observe.trackers.background import BackgroundTracker
from jaxlm.observe.trackers.wandb import WandbConfig

facts = RunInfo("my run", 0, True, {"trainer": {"seed": 7}}, "trainer:\\n  seed: 7\\n", {"parameter_count": 1234})
config = WandbConfig(**eval(sys.argv[1]))
tracker = BackgroundTracker("wandb", lambda: config.open(facts), print)
for step in (1, 2, 3, 2):
    tracker.log(step, {"train/loss": 5.0 - step})
    if step != 1:
        tracker.log_histograms(step, {"grad/hist/x": Histogram(-1.0, 2.0, (step, 0, 4))})
tracker.flush()
tracker.close()
"""


def run_wandb(folder: Path, config: dict, **environment: str) -> subprocess.CompletedProcess[str]:
    """A small run with wandb in a separate process without an API key."""
    script = folder / "script.py"
    script.write_text(WANDB_RUN.replace("\\\\n", "\\n"))
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {
        "WANDB_DIR": str(folder),
        "HOME": str(folder),
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
        **environment,
    }
    env |= {name: str(folder / name) for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    return subprocess.run(
        [sys.executable, str(script), repr(config)], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_offline_wandb_writes_the_run(tmp_path):
    pytest.importorskip("wandb")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in ("script.py", "other.py"):
        (tmp_path / name).write_text("before")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "secret.txt").write_text("not known to git")
    config = {"mode": "offline", "project": "p", "entity": "e", "id": "an-id", "tags": ["one"], "group": "g"}
    result = run_wandb(tmp_path, config)
    assert result.returncode == 0, result.stderr
    assert "tracker wandb" not in result.stdout
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(path)
    (run,) = (r.run for r in records if r.HasField("run"))
    assert (run.project, run.entity, run.run_id, run.run_group, list(run.tags)) == ("p", "e", "an-id", "g", ["one"])
    assert run.display_name == "my run"
    settings = {u.key or ".".join(u.nested_key): u.value_json for r in records for u in r.config.update}
    settings |= {u.key: u.value_json for u in run.config.update}
    assert json.loads(settings["trainer"]) == {"seed": 7}
    assert json.loads(settings["git_commit"]) == f"{head} + changes"
    artifacts = {r.artifact.type: {entry.path for entry in r.artifact.manifest.contents} for r in records}
    assert artifacts["run"] == {"config.yaml", "requirements.txt", "changes.patch"}
    assert artifacts["code"] == {"script.py", "other.py"}
    summary = {u.key or ".".join(u.nested_key): u.value_json for r in records for u in r.summary.update}
    assert summary["parameter_count"] == "1234"
    history, shown = [], {}
    for record in records:
        items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "train/loss" in items:
            history.append((record.history.step.num or items["_step"], items["train/loss"]))
        if "grad/hist/x._type" in items:
            parts = {key: items[f"grad/hist/x.{key}"] for key in ("_type", "values", "bins")}
            shown[record.history.step.num or items["_step"]] = parts
    assert history == [(1, 4.0), (2, 3.0), (3, 2.0)]  # step 2 was logged again and dropped
    assert shown == {s: {"_type": "histogram", "values": [s, 0, 4], "bins": [-1.0, 0.0, 1.0, 2.0]} for s in (2, 3)}


def test_wandb_is_asked_once_for_its_newest_step():
    handle = mock.MagicMock()
    asked = mock.PropertyMock(return_value=120)
    type(handle).step = asked
    tracker = WandbTracker(handle, None)
    for step in (119, 120, 121):
        tracker.log(step, {"x": 1.0})
    assert [call.kwargs["step"] for call in handle.log.call_args_list] == [120, 121]
    assert asked.call_count == 1


@pytest.mark.parametrize(("is_new", "known", "taken"), [(True, 120, True), (True, 0, False), (False, 120, False)])
def test_wandb_refuses_an_id_of_another_run(is_new, known, taken, monkeypatch):
    """wandb would silently drop its records, step by step."""
    wandb = pytest.importorskip("wandb")
    handle = mock.MagicMock(step=known, id="an-id")
    monkeypatch.setattr(wandb, "init", lambda **_: handle)
    lines: list[str] = []
    facts = dataclasses.replace(FACTS, resume_step=0, is_new=is_new)
    config = WandbConfig(mode="offline", save_code=False)
    tracker = BackgroundTracker("wandb", lambda: config.open(facts), lines.append)
    tracker.log(121, {"x": 1.0})
    tracker.close()
    assert handle.finish.call_count == 1
    assert handle.log.call_count == (0 if taken else 1)
    assert len(lines) == taken
    if taken:
        assert (
            "wandb already has 120 steps of another run with the ID 'an-id', but this run starts from scratch"
            in lines[0]
        )
        assert "Set another trainer.tracker.id, or delete the wandb run" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no API key. Run `wandb login`"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "3"}, "CommError"),
    ],
    ids=["no key", "no network"],
)
def test_an_unreachable_wandb_is_reported_once(environment, said, tmp_path):
    pytest.importorskip("wandb")
    result = run_wandb(tmp_path, {}, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tracker wandb") == 1
    assert said in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_trackio_stores_and_resumes_a_run(tmp_path):
    """In a separate process, because trackio reads its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    script = tmp_path / "script.py"
    script.write_text(TRACKIO_RUN)
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "kept"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    env |= {"PYTHONPATH": str(SOURCE), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "tracker trackio" not in done.stdout
    (path,) = (tmp_path / "kept").glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
        configs = [json.loads(text) for (text,) in database.execute("select config from configs")]
    runs = list(dict.fromkeys(run for run, _, _ in rows))
    by_run = [[(step, json.loads(metrics)["x"]) for run, step, metrics in rows if run == which] for which in runs]
    # It continues after step 3, whose record was repeated; started over, it is another run of the same name.
    assert by_run == [[(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)], [(1, 7.0)]]
    assert configs[0]["trainer"] == {"seed": 7}
    assert configs[0]["summary"] == {"parameter_count": 1234}
    assert any(package.startswith("jax==") for package in configs[0]["packages"])


TRACKIO_RUN = """
from jaxlm.observe.trackers import RunInfo
from jaxlm.observe.trackers.background import BackgroundTracker
from jaxlm.observe.trackers.trackio import TrackioConfig

for is_new, records in ((True, {1: 1, 2: 2, 3: 3}), (False, {3: 30, 4: 40}), (True, {1: 7})):
    facts = RunInfo("run", 0, is_new, {"trainer": {"seed": 7}}, "", {"parameter_count": 1234})
    tracker = BackgroundTracker("trackio", lambda: TrackioConfig().open(facts), print)
    for step, value in records.items():
        tracker.log(step, {"x": float(value)})
    tracker.close()
"""


@pytest.mark.parametrize("config", [TrackioConfig(), MlflowConfig()])
def test_a_missing_library_is_reported(monkeypatch, config):
    name = choice_name(type(config))
    monkeypatch.setitem(sys.modules, name, None)
    lines: list[str] = []
    BackgroundTracker(name, lambda: config.open(FACTS), lines.append).close()
    (line,) = lines
    assert f"{name} is not installed. Run: pip install '{name}" in line


@pytest.fixture(scope="module")
def mlflow_uri(tmp_path_factory):
    """A database, which takes longest to make."""
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'kept.db'}"


@pytest.mark.slow
def test_mlflow_stores_and_resumes_a_run(mlflow_uri, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)  # for the texts
    config = MlflowConfig(mlflow_uri)
    long = {"long": {"text": "x" * 10_000}} | {f"key {number}": number for number in range(150)}
    for is_new, records in ((True, {1: 1, 2: 2, 3: 3}), (False, {3: 30, 4: 40}), (True, {1: 7})):
        facts = dataclasses.replace(FACTS, is_new=is_new, config={"trainer": {"seed": 7 + 10 * (not is_new)}} | long)
        tracker = config.open(facts)
        for step, value in records.items():
            tracker.log(step, {"train/loss": value / 3, "a[0]": float("nan")})
        tracker.log_samples(4, SAMPLES)
        tracker.close()
    client = mlflow.MlflowClient(config.tracking_uri)
    experiment = client.get_experiment_by_name("jaxlm").experiment_id
    newer, older = client.search_runs([experiment])
    histories = [client.get_metric_history(run.info.run_id, "train/loss") for run in (older, newer)]
    # It continues after step 3, whose record was repeated; started over, it is another run of the same name.
    assert [[(one.step, one.value) for one in history] for history in histories] == [
        [(1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 40 / 3)],
        [(1, 7 / 3)],
    ]
    params = older.data.params
    assert (params["trainer.seed"], params["summary.parameter_count"], params["key 149"]) == ("7", "1234", "149")
    assert params["long.text"] == "x" * 6000
    assert (older.info.status, older.info.run_name) == ("FINISHED", "run")
    assert "mlflow.source.git.commit" in older.data.tags
    assert "a_0_" in older.data.metrics
    assert [file.path for file in client.list_artifacts(older.info.run_id)] == [
        "config.yaml",
        "requirements.txt",
        "samples",
    ]
    (samples,) = client.list_artifacts(older.info.run_id, "samples")
    stored = mlflow.artifacts.load_dict(f"{older.info.artifact_uri}/{samples.path}")
    assert stored == [dataclasses.asdict(sample) for sample in SAMPLES]


@pytest.mark.slow
def test_mlflow_keeps_what_its_names_cannot_tell_apart(mlflow_uri, tmp_path, monkeypatch):
    """It refuses parameters of one name and long names, and would mix the metrics of one name."""
    import mlflow

    monkeypatch.chdir(tmp_path)
    config = MlflowConfig(mlflow_uri, experiment="names")
    given = {"a[0]": 1, "a(0)": 2, "a_0_": 3, "x" * 300: 4, "x" * 300 + "y": 5}
    for step in (1, 2):  # the second start resumes the first
        tracker = config.open(dataclasses.replace(FACTS, is_new=step == 1, config=given, resume_step=step - 1))
        tracker.log(step, {name: float(value) for name, value in given.items()})
        tracker.close()
    client = mlflow.MlflowClient(config.tracking_uri)
    (run,) = client.search_runs([client.get_experiment_by_name("names").experiment_id])
    marked = [f"_{zlib.crc32(name.encode()):08x}" for name in given]
    names = ["a_0_", f"a_0_{marked[1]}", f"a_0_{marked[2]}", "x" * 250, f"{'x' * 241}{marked[4]}"]
    assert [run.data.params[name] for name in names] == ["1", "2", "3", "4", "5"]
    assert [run.data.metrics[name] for name in names] == [1, 2, 3, 4, 5]


@pytest.mark.slow  # it imports mlflow
def test_mlflow_sends_many_metrics_in_several_requests():
    pytest.importorskip("mlflow")
    client, handle = mock.MagicMock(), mock.MagicMock()
    handle.data.tags = {}
    tracker = MlflowTracker(client, handle)
    for step in range(1, 4):
        tracker.log(step, {f"metric {number}": 0.5 for number in range(700)})
    tracker.flush()
    sent = [call.kwargs for call in client.log_batch.call_args_list]
    assert [len(one["metrics"]) for one in sent] == [1000, 400, 700]
    assert [[tag.value for tag in one["tags"]] for one in sent] == [[], ["3"], ["4"]]


def test_code_is_what_git_tracks_and_nothing_else_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for name in ("main.py", "lib/one.yaml", "deleted.py"):
        (tmp_path / name).write_text("x")
    (tmp_path / "weights.bin").write_bytes(bytes(3 * 2**20))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "untracked.py").write_text("x")
    monkeypatch.setattr(os, "walk", mock.Mock(side_effect=AssertionError))
    assert environment.code_files(tmp_path) == ([tmp_path / "lib/one.yaml", tmp_path / "main.py"], 1)
    monkeypatch.setattr(environment, "MAX_CODE_FILES", 1)
    assert environment.code_files(tmp_path) == ([tmp_path / "lib/one.yaml"], 2)
    monkeypatch.setattr(environment, "MAX_CODE_BYTES", 15)
    assert environment.code_files(tmp_path) == ([], 3)


def test_without_git_code_is_the_python_files_outside_of_environments(tmp_path, monkeypatch):
    for name in (".venv/lib/a.py", "env/pyvenv.cfg", "env/lib/b.py", "x/__pycache__/c.py", "x/code.py", "x/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert environment.code_files(tmp_path) == ([tmp_path / "x/code.py"], 0)
    monkeypatch.setattr(environment, "_MAX_VISITED", 0)
    assert environment.code_files(tmp_path) == ([], 0)


def test_records_do_not_wait_for_the_code(tmp_path, monkeypatch):
    """Logging the code blocks until the record has arrived. Its failure is reported when the records are sent."""
    wandb = pytest.importorskip("wandb")
    (tmp_path / "main.py").write_text("x")
    handle, arrived = mock.MagicMock(step=0), threading.Event()

    def log_code(folder: str, **_: object) -> None:
        assert os.listdir(folder) == ["main.py"]
        assert arrived.wait(60)
        raise OSError("no space")

    handle.log_code = log_code
    handle.log = lambda *_, **__: arrived.set()
    monkeypatch.setattr(wandb, "init", lambda **_: handle)
    lines: list[str] = []
    config = WandbConfig(mode="offline", save_code=str(tmp_path))
    tracker = BackgroundTracker("wandb", lambda: config.open(FACTS), lines.append)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert arrived.is_set()
    assert handle.finish.call_count == 1
    (line,) = lines
    assert line.startswith(
        "tracker wandb has all records, but the code and the packages were not logged: OSError('no sp"
    )


def test_the_repository_of_the_main_script(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "main.py").write_text("")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "main.py"), raising=False)
    environment.repository.cache_clear()
    try:
        assert environment.repository() == tmp_path.resolve()
        assert environment.commit() == head
        assert environment.code_files(tmp_path) == ([tmp_path / "main.py"], 0)
        assert environment.changes() == ""
        (tmp_path / "main.py").write_text("changed\n")
        assert environment.commit() == f"{head} + changes"
        patch = environment.changes()
        (tmp_path / "main.py").write_text("")
        subprocess.run([*git, "apply", "-"], input=patch, text=True, check=True)
        assert (tmp_path / "main.py").read_text() == "changed\n"
    finally:
        environment.repository.cache_clear()
