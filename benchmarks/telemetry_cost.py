"""Measures what `optimizer.telemetry` costs per step, as a ratio of step times within one process.

    python benchmarks/telemetry_cost.py --config_path config/quickstart.yaml --rounds 40

Compiles the step twice, without and with telemetry. Both run on the same random tokens in alternating stretches, in the
order off-on, on-off, ... Each round gives the ratio of the two; the result is their geometric mean, with a 95 % interval.

`--cpu` measures the CPU seconds of the process instead of the time that passes, for a machine that does other work too. The
last line printed is JSON. The goal is a ratio of at most 1.01.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import jax
from intervals import ratio_interval

from jaxlm.commands.bench import random_batch
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.sync import FlagSync
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import make_plan
from jaxlm.session.compilation.step import compile_step
from jaxlm.session.dry_run import assumed_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of stretches (default 40)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a stretch (default 8)")
    parser.add_argument("--cpu", action="store_true", help="measure CPU seconds")
    options, rest = parser.parse_known_args()
    clock = time.process_time if options.cpu else time.perf_counter
    stretches = [stretch(rest, options.steps, clock, telemetry) for telemetry in ("null", "true")]
    for one in stretches * 2:
        one()
    ratios, seconds = [], []
    for number in range(options.rounds):
        order = (0, 1) if number % 2 else (1, 0)
        took = {which: stretches[which]() for which in order}
        ratios.append(took[1] / took[0])
        seconds.append(took[0])
    low, ratio, high = ratio_interval(ratios)
    step_ms = 1e3 * sorted(seconds)[len(seconds) // 2]
    print(
        f"step without telemetry {step_ms:.2f} ms (median); with it, {ratio:.4f} times that ({low:.4f} to {high:.4f})"
    )
    print(json.dumps({"step_ms": step_ms, "ratio": ratio, "low": low, "high": high, "rounds": options.rounds}))


def stretch(arguments: Sequence[str], steps: int, clock: Callable[[], float], telemetry: str) -> Callable[[], float]:
    """Runs some steps of a configuration, and returns seconds per step."""
    config = load_config([*arguments, "--optimizer.telemetry", telemetry], "benchmarks/telemetry_cost.py")
    plan = make_plan(config, "telemetry_cost", assumed_vocabulary(config)[0])
    with plan.layout.use():
        phase = plan.phases[0]
        step = compile_step(plan, phase, print).call
        state = enter_phase(plan.state_builder, phase, plan.layout, None)()
        flags, batch = FlagSync.unset(plan.layout), random_batch(plan, 0)

    def run() -> float:
        nonlocal state
        began = clock()
        with plan.layout.use():
            for _ in range(steps):
                state, report = step(state, {}, batch, flags)
                jax.block_until_ready(report.metrics)
        return (clock() - began) / steps

    return run


if __name__ == "__main__":
    main()
