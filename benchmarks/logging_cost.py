"""Measures what logging costs per step: metrics file, progress line and two trackers, compared with no logging.

    python benchmarks/logging_cost.py --config_path config/quickstart.yaml --minutes 4 [--keep pairs.json]

Uses one process, one compiled step, random tokens, and four steps in flight as in training. Short stretches with and
without logging alternate, in the order on-off, off-on, ... The first 1.2 seconds or so of each stretch do not count,
because the trackers' threads may still be processing earlier records. Each pair of stretches gives the logarithm of the
ratio of their mean step times. The result is the trimmed mean of these (without the outer tenths), with a 95 %
bootstrap interval. `--keep` adds the pairs to those of earlier calls.

Also measures the CPU seconds per step that logging takes, by thread, and those of wandb's process (on Linux). These
depend less on other load on the machine. If the step itself uses all cores fully, they are the time that logging takes
from it.

The last line printed is JSON. The goal is a ratio of at most 1.01.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxlm.commands.bench import random_batch
from jaxlm.core.values.logged import StepInfo
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.metrics import AsyncMetrics, Listener, Workload
from jaxlm.engine.sync import FlagSync
from jaxlm.observe.console import Console
from jaxlm.observe.hooks import ProgressListener, TrackerListener
from jaxlm.observe.trackers import JsonlTracker
from jaxlm.observe.trackers.background import BackgroundTracker, TrackerTimeouts
from jaxlm.observe.trackers.base import RunInfo, Tracker
from jaxlm.observe.trackers.tensorboard import TensorboardConfig
from jaxlm.observe.trackers.wandb import WandbConfig
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.reading.decode import choice_name, dump, encode
from jaxlm.session.compilation.step import compile_step
from jaxlm.session.dry_run import assumed_vocabulary

_TRIMMED, _BOOTSTRAPS = 0.1, 2000
_SETTLE_S = TrackerTimeouts().gather_s + 0.2  # by then, tracker threads have processed earlier records
_WARMUP_PAIRS, _FEWEST_PAIRS = 2, 10


def main() -> None:
    """Measures, adds earlier pairs if there are any, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4, help="approximate minutes of measured steps (default 4)")
    parser.add_argument("--steps", type=int, default=12, help="counted steps per stretch (default 12)")
    parser.add_argument("--keep", type=Path, help="JSON file of pairs to include; new pairs are added")
    options, rest = parser.parse_known_args()
    config = load_config(rest, "benchmarks/logging_cost.py")
    plan = make_plan(config, "logging_cost", assumed_vocabulary(config)[0])
    with tempfile.TemporaryDirectory() as folder, plan.layout.use():
        os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
        pairs, cpu_s = measure(plan, Path(folder), 60 * options.minutes, options.steps)
    if options.keep is not None:
        pairs = (json.loads(options.keep.read_text()) if options.keep.exists() else []) + pairs
        options.keep.write_text(json.dumps(pairs))
    log(pairs, cpu_s)


def log(pairs: Sequence[tuple[float, float]], cpu_s: dict[str, float]) -> None:
    """Prints the result.

    Args:
        pairs: seconds per step (without logging, with logging).
        cpu_s: CPU seconds per logged step, by thread or process.
    """
    silent, logged = np.asarray(pairs).T
    logs = np.log(logged / silent)
    resampled = np.random.default_rng(0).choice(logs, (_BOOTSTRAPS, len(logs)))
    ratio = math.exp(trimmed_mean(logs))
    low, high = (float(np.exp(np.quantile([trimmed_mean(sample) for sample in resampled], q))) for q in (0.025, 0.975))
    step = statistics.median(silent)
    logged_ms = statistics.median(logged) * 1e3
    print(f"\nstep without logging {step * 1e3:.2f} ms, with logging {logged_ms:.2f} ms (medians)")
    print(f"ratio {ratio:.4f} (95 %: {low:.4f} to {high:.4f}; {len(pairs)} pairs)")
    for name, seconds in sorted(cpu_s.items(), key=lambda item: -item[1]):
        print(f"  {name:<32} {seconds * 1e6:8.1f} us CPU per step, {seconds / step:.2%} of it")
    result = {"silent_s": step, "ratio": ratio, "low": low, "high": high, "pairs": len(pairs), "cpu_s": cpu_s}
    print(json.dumps(result))


def trimmed_mean(values: np.ndarray) -> float:
    """The mean without the lowest and highest tenth."""
    cut = int(len(values) * _TRIMMED)
    return float(np.sort(values)[cut : len(values) - cut].mean())


@dataclass
class Switch:
    """Passes steps to listeners only while it is on.

    Attributes:
        cpu_s: CPU seconds that the loop's thread spent in the listeners.
        num_steps: steps passed to the listeners.
    """

    listeners: Sequence[Listener]
    on: bool = False
    cpu_s: float = 0.0
    num_steps: int = 0

    def __call__(self, info: StepInfo) -> None:
        if self.on:
            began = time.thread_time()
            for listener in self.listeners:
                listener(info)
            self.cpu_s += time.thread_time() - began
            self.num_steps += 1


def measure(
    plan: Plan, folder: Path, enough_s: float, steps: int
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Mean seconds per step in each pair of stretches, without and with logging, and CPU seconds per logged step."""
    trackers = open_trackers(plan, folder)  # first, because wandb takes seconds to start
    phase = plan.phases[0]
    step = compile_step(plan, phase, print).call
    state = enter_phase(plan.state_builder, phase, plan.layout, None)()
    flags, batch = FlagSync.unset(plan.layout), random_batch(plan, 0)
    listeners = [
        TrackerListener(trackers),
        ProgressListener(Console(), phase, lambda step: "", lambda *_: None, skipped=0),
    ]
    switch = Switch(listeners)
    workload = Workload(plan.batches.train, plan.config.model.seq_len, 1e9, None, 10**6)
    reports = AsyncMetrics("train", workload, [switch])
    pairs: list[tuple[float, float]] = []
    number = 0

    def one_step() -> None:
        nonlocal state, number
        number += 1
        state, report = step(state, {}, batch, flags)
        reports.push(number, report, 0.0)

    def stretch(on: bool) -> float:
        switch.on = on
        settled = time.perf_counter() + _SETTLE_S
        while time.perf_counter() < settled:
            one_step()
        began = time.perf_counter()
        for _ in range(steps):
            one_step()
        return (time.perf_counter() - began) / steps

    def pair(first: bool) -> tuple[float, float]:
        seconds = {on: stretch(on) for on in (first, not first)}
        return seconds[False], seconds[True]

    for warmup in range(_WARMUP_PAIRS):
        pair(bool(warmup % 2))
    switch.cpu_s, switch.num_steps, before = 0.0, 0, cpu_seconds()
    end = time.monotonic() + enough_s
    while time.monotonic() < end or len(pairs) < _FEWEST_PAIRS:
        pairs.append(pair(bool(len(pairs) % 2)))
    spent = {name: (now - before.get(name, 0.0)) / switch.num_steps for name, now in cpu_seconds().items()}
    reports.drain()
    for tracker in trackers:
        tracker.close()
    return pairs, {"loop": switch.cpu_s / switch.num_steps} | {name: s for name, s in spent.items() if s > 0}


def open_trackers(plan: Plan, folder: Path) -> list[Tracker]:
    """Opens the metrics file, TensorBoard and Weights & Biases as a run does."""
    config, backend = plan.config, {"backend": jax.default_backend()}
    run_info = RunInfo("logging_cost", 0, True, encode(config), dump(config), backend)
    configs = [TensorboardConfig(logdir=str(folder)), WandbConfig(project="cost", save_code=False)]
    background = [
        BackgroundTracker(choice_name(type(config)), lambda config=config: config.open(run_info), print)
        for config in configs
    ]
    return [JsonlTracker(folder / "metrics.jsonl", resume_step=0), *background]


def cpu_seconds() -> dict[str, float]:
    """CPU seconds of every Python thread except this one, and of child processes. Empty without /proc."""
    own, me = Path("/proc/self/task"), threading.get_native_id()
    threads = {t.name: own / str(t.native_id) for t in threading.enumerate() if t.native_id != me}
    seconds = {name: used for name, path in threads.items() if (used := _cpu_seconds_of(path)) is not None}
    for process in Path("/proc").glob("[0-9]*"):
        is_child = _parent(process) == os.getpid()
        tasks = [_cpu_seconds_of(task) or 0.0 for task in process.glob("task/*")] if is_child else []
        if tasks:
            seconds[f"process {(process / 'comm').read_text().strip()}"] = sum(tasks)
    return seconds


def _cpu_seconds_of(task: Path) -> float | None:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return None


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    main()
