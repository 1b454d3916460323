"""Trains two configurations with the same seeds and steps: after how many steps does b reach the last loss of a?

    python benchmarks/muon_vs_adamw.py --folder runs/muon --steps 200 --a_learning_rates 2e-3,5e-3,1.25e-2
        [--a benchmarks/optimizers/adamw.yaml] [--b benchmarks/optimizers/muon.yaml] [--seeds 0,1,2]
        [--a_options "--optimizer.beta2 0.98"] [--b_options "..."] [--evals 25] [--tuning_steps 60]

Meant for AdamW as a and Muon as b, but any two configurations of `jaxlm train` will do: files, or recipes such as
`jaxlm:groups.yaml`. Both need validation data. `--a_learning_rates` and `--b_learning_rates` try several values of
`optimizer.learning_rate` first, in shorter runs with the first seed, and keep the one with the lowest last loss.

One run follows the other, each in a process of its own. Start the same command again after an interruption: finished
runs are not repeated, and the others continue from their last checkpoint.

Writes `muon_vs_adamw.json` (validation loss by step of every run, and the summary) and `muon_vs_adamw.png` into the folder
after every pair of runs. Prints a row for each seed, and the summary as JSON in the last line: the last losses, the steps
that b takes to the last loss of a, and their ratio to all steps, each as [mean, standard deviation] over the seeds. A seed in
which b does not get there counts as null, and its row says by how much b misses it.
"""

import argparse
import hashlib
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_runs import ROOT, mean_and_deviation, plot_losses, start, validation_losses

NAME = "muon_vs_adamw"
DEFAULTS = {"a": "adamw", "b": "muon"}
Losses = dict[int, float]
"""Step -> validation loss of one run."""


def main() -> None:
    """Trains every pair that is not trained yet, and reports after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for runs, caches and results")
    for side, name in DEFAULTS.items():
        default = str(ROOT / "benchmarks" / "optimizers" / f"{name}.yaml")
        parser.add_argument(f"--{side}", default=default, help=f"configuration of {side} (default {name}.yaml)")
        parser.add_argument(f"--{side}_options", default="", help=f"further options of jaxlm train for {side}")
        parser.add_argument(f"--{side}_learning_rates", default="", help="comma-separated learning rates to try first")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds of the runs (default 0,1,2)")
    parser.add_argument("--steps", type=int, required=True, help="steps of each run")
    parser.add_argument("--tuning_steps", type=int, help="steps of runs that try learning rates (default --steps / 3)")
    parser.add_argument("--evals", type=int, default=25, help="evaluations of each run (default 25)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = list(map(int, options.seeds.split(",")))
    rates: dict[str, dict[str, float]] = {name: {} for name in DEFAULTS}
    sides: dict[str, Side] = {}
    for name in DEFAULTS:
        side = Side(name, getattr(options, name), shlex.split(getattr(options, f"{name}_options")))
        given = [rate for rate in getattr(options, f"{name}_learning_rates").split(",") if rate]
        tuning_steps = options.tuning_steps or max(1, options.steps // 3)
        for rate in given:
            trial, tried = f"{name}-{seeds[0]}-rate-{rate}", side.with_rate(rate)
            losses = train(options.folder, trial, tried, seeds[0], tuning_steps, tuning_steps)
            rates[name][rate] = losses[tuning_steps]
        best = sorted(given, key=lambda rate: math.inf if math.isnan(rates[name][rate]) else rates[name][rate])[:1]
        sides[name] = side.with_rate(*best) if best else side
    runs: dict[str, dict[int, Losses]] = {name: {} for name in sides}
    for seed in seeds:
        for name, side in sides.items():
            steps_per_eval = max(1, options.steps // options.evals)
            runs[name][seed] = train(options.folder, f"{name}-{seed}", side, seed, options.steps, steps_per_eval)
        print(row(seed, runs["a"][seed], runs["b"][seed]), file=sys.stderr, flush=True)
        report(options.folder, sides, rates, runs)


@dataclass(frozen=True)
class Side:
    """One of the two configurations, and the options that follow it on the command line."""

    name: str
    config: str
    options: Sequence[str]

    def with_rate(self, rate: str) -> "Side":
        """The same with another learning rate."""
        return Side(self.name, self.config, [*self.options, "--optimizer.learning_rate", rate])

    def __str__(self) -> str:
        return " ".join([f"{self.name}: {Path(self.config).stem}", *self.options])


def train(folder: Path, name: str, side: Side, seed: int, steps: int, steps_per_eval: int) -> Losses:
    """Trains a run to its end if it is not there yet. Returns its validation losses.

    The run's name ends with a digest of what determines it, so that other options never continue it.
    """
    determines = json.dumps([side.config, *side.options, steps, steps_per_eval])
    name = f"{name}-{hashlib.sha256(determines.encode()).hexdigest()[:6]}"
    losses = validation_losses(folder, name)
    if steps in losses:
        return losses
    config = side.config if side.config.startswith("jaxlm:") else str(Path(side.config).resolve())
    keys = {
        "trainer.id": name,
        "trainer.seed": seed,
        "trainer.num_train_steps": steps,
        "trainer.steps_per_eval": steps_per_eval,
        "trainer.log_dir": "logs",
        "trainer.checkpointer.base_path": "checkpoints",
        "evals": "[{type: loss}]",
    }
    written = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    start(folder, name, "--config_path", config, *written, *side.options)
    losses = validation_losses(folder, name)
    if steps not in losses:
        raise SystemExit(f"{name}: no loss at step {steps}; see {folder / name}.out")
    return losses


def steps_to(loss: float, losses: Losses) -> float | None:
    """The first step at which a run has a loss, along lines between its evaluations; None if it never has."""
    before: tuple[int, float] | None = None
    for step, found in sorted(losses.items()):
        if found <= loss:
            if before is None or before[1] == found:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - found)
        before = step, found
    return None


def row(seed: int, a: Losses, b: Losses) -> str:
    """The result of one seed."""
    last = max(a)
    reached = steps_to(a[last], b)
    found = f"b misses it by {min(b.values()) - a[last]:.4f}" if reached is None else f"b has it after {reached:.0f}"
    return f"seed {seed}: after {last} steps a has {a[last]:.4f} and b {b[max(b)]:.4f}; {found}"


def summary(runs: Mapping[str, Mapping[int, Losses]]) -> dict[str, Any]:
    """Means and standard deviations over the seeds that both have finished."""
    seeds = sorted(runs["a"].keys() & runs["b"].keys())
    lasts = {side: [runs[side][seed][max(runs[side][seed])] for seed in seeds] for side in runs}
    reached = [steps_to(loss, runs["b"][seed]) for seed, loss in zip(seeds, lasts["a"], strict=True)]
    there = [steps for steps in reached if steps is not None]
    num_steps = max(runs["a"][seeds[0]])
    return {
        "num_steps": num_steps,
        "seeds": seeds,
        **{f"last_loss_{side}": mean_and_deviation(values) for side, values in lasts.items()},
        "steps_of_b_to_the_last_loss_of_a": reached,
        "their_spread": mean_and_deviation(there) if there else None,
        "ratio_to_all_steps": mean_and_deviation([steps / num_steps for steps in there]) if there else None,
    }


def report(
    folder: Path,
    sides: Mapping[str, Side],
    rates: Mapping[str, Mapping[str, float]],
    runs: Mapping[str, Mapping[int, Losses]],
) -> None:
    """Writes the results so far, and prints the summary."""
    found = summary(runs)
    given = {name: str(side) for name, side in sides.items()}
    text = json.dumps({"sides": given, "learning_rates": rates, "summary": found, "losses": runs}, indent=1)
    (folder / f"{NAME}.json").write_text(text)
    plot(folder / f"{NAME}.png", runs, given)
    print(json.dumps(found), flush=True)


def plot(path: Path, runs: Mapping[str, Mapping[int, Losses]], names: Mapping[str, str]) -> None:
    """Plots the mean validation loss by step with the range over the seeds, and the last mean of a."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for side, by_seed in runs.items():
        plot_losses(axes, by_seed, names[side])
    last = statistics.mean(losses[max(losses)] for losses in runs["a"].values())
    axes.axhline(last, color="0.4", linestyle="--", label="last loss of a")
    axes.set(xlabel="step", ylabel="validation loss (nats per token)", yscale="log")
    axes.set_title(f"Equal steps, mean and range over {len(runs['a'])} seeds")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
