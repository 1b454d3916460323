"""What logging costs a step: metrics file, progress line and two trackers, beside nothing at all.

    python benchmarks/logging_cost.py --config_path config/quickstart.yaml --segments 12 --steps 25

One process, one compiled step, random tokens: segments with everything switched on and segments with nothing take turns.
Prints the medians of a step, the ratio, and one JSON line last. The goal: a ratio of 1.01 at the most.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax

from jaxlm.bench import random_batch
from jaxlm.compiling import compile_step
from jaxlm.config import load_config
from jaxlm.core.decode import dump, encode
from jaxlm.dry_run import assumed_vocabulary
from jaxlm.engine.agreement import Ballot, Wishes
from jaxlm.engine.console import Console
from jaxlm.engine.hooks import ProgressListener, TrackerListener
from jaxlm.engine.phases import entering
from jaxlm.engine.reports import Reports, Workload
from jaxlm.engine.trackers import JsonlTracker
from jaxlm.engine.trackers.base import RunFacts
from jaxlm.engine.trackers.guarded import GuardedTracker
from jaxlm.engine.trackers.tensorboard import TensorboardConfig
from jaxlm.engine.trackers.wandb import WandbConfig
from jaxlm.plan import make_plan


def main() -> None:
    """Takes turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=25, help="of a segment")
    options, rest = parser.parse_known_args()
    config = load_config(rest, "benchmarks/logging_cost.py")
    plan = make_plan(config, "logging_cost", assumed_vocabulary(config)[0])
    with tempfile.TemporaryDirectory() as folder, plan.layout.use():
        os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
        seconds = measure(plan, Path(folder), options.segments, options.steps)
    silent, logged = (statistics.median(seconds[on]) for on in (False, True))
    spread = statistics.quantiles(seconds[False], n=4)
    print(f"\nsilent {silent * 1e3:.2f} ms ({spread[0] * 1e3:.2f}-{spread[2] * 1e3:.2f}), logged {logged * 1e3:.2f} ms")
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    result = {"silent_s": silent, "logged_s": logged, "ratio": statistics.median(ratios), "quartiles": quartiles}
    print(json.dumps(result))


def measure(plan, folder: Path, segments: int, steps: int) -> dict[bool, list[float]]:
    """Seconds of a step, one median a segment, without and with logging."""
    phase = plan.phases[0]
    step = compile_step(plan, phase, print).call
    state = entering(plan.recipe, phase, plan.layout, None)()
    vote, batch = Ballot(plan.layout).cast(Wishes()), random_batch(plan, 0)
    facts = RunFacts(
        "logging_cost", 0, True, encode(plan.config), dump(plan.config), {"backend": jax.default_backend()}
    )
    foreign = [TensorboardConfig(logdir=str(folder)), WandbConfig(project="cost", save_code=False)]
    guarded = [
        GuardedTracker(type(config).__name__, lambda config=config: config.open(facts), print) for config in foreign
    ]
    trackers = [JsonlTracker(folder / "metrics.jsonl", resume_step=0), *guarded]
    listeners = [TrackerListener(trackers), ProgressListener(Console(), phase, lambda step: "", skipped=0)]
    workload = Workload(plan.batches.train, plan.config.model.seq_len, 1e9, None, 10**6)
    found: dict[bool, list[float]] = {False: [], True: []}
    number = 0
    for segment in range(2 * segments + 2):
        logging = bool(segment % 2)
        reports = Reports("train", workload, listeners if logging else [])
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            number += 1
            state, report = step(state, batch, vote)
            reports.push(number, report, 0.0)
            times.append(time.perf_counter() - began)
        reports.drain()
        if segment >= 2:  # the first of each kind warms up
            found[logging].append(statistics.median(times))
    for tracker in trackers:
        tracker.close()
    return found


if __name__ == "__main__":
    main()
