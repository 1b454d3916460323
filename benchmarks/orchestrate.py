"""Compares a run that switches between optimizers while it trains with runs of each of its strategies, and with AdamW.

    python benchmarks/orchestrate.py --folder FOLDER [--model small|cpu_d4] [--seeds 0,1,2,3,4] [--steps 1000] [--rows N]

`small` is a Llama of 2 layers and width 64 on the standard library's source files (`stdlib:train`; validation on
`stdlib:validation`); `cpu_d4` is the model and the data of `jaxlm:nanochat/cpu_d4.yaml`. The learning rate of each is chosen
from the same list by the validation loss of one run with a seed of its own (`--tuning-seed`), so that all are tuned with
the same effort. Then each trains with all seeds:

    adamw                AdamW alone (`type: adam`, gradients clipped at a norm of 1)
    adamw, more steps    likewise, for as many steps more as the branches may cost
    NAME                 that strategy of the portfolio alone
    orchestrated         the portfolio with the orchestrator

Prints a Markdown table: the final validation loss (mean and standard deviation over seeds), and the mean difference from
`adamw` of the same seed with its 95 % confidence interval (Student's t). Runs that are finished are recorded in FOLDER, and
not repeated.
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused  # noqa: F401  # before haliax

import jax
import yaml
from training_runs import Figures, read, trainer_in

from jaxlm.plan.load_config import decode_run, load_config
from jaxlm.reading.decode import dump
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.orchestrate.strategies import GUIDE
from jaxlm.train import train

RATES = {"small": (3e-3, 1e-2, 3e-2), "cpu_d4": (3e-4, 1e-3, 3e-3, 1e-2)}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> the 97.5 % quantile of Student's t with one degree of freedom fewer."""
ADAMW, LONGER, ORCHESTRATED = "adamw", "adamw, more steps", "orchestrated"
BUDGET = 0.1


def sections(model: str, rows: int | None) -> dict[str, Any]:
    """Model, data and batches. Args: rows: of a batch; None for the usual number."""
    if model == "small":
        sizes = {"type": "llama", "seq_len": 128, "hidden_dim": 64, "intermediate_dim": 176, "num_layers": 2}
        heads = {"num_heads": 2, "num_kv_heads": 2, "initializer_range": 0.08}
        data = {"train_urls": ["stdlib:train"], "validation_urls": ["stdlib:validation"]}
        data |= {"tokenizer": "bpe", "vocab_size": 1024}
        trainer = {"train_batch_size": rows or 8, "max_eval_batches": 24}
        return {"model": sizes | heads, "data": data, "trainer": trainer}
    recipe = load_config(["--config_path", "jaxlm:nanochat/cpu_d4.yaml"], "orchestrate")
    model, data = (yaml.safe_load(dump(section)) for section in (recipe.model, recipe.data))
    return {"model": model, "data": data, "trainer": {"train_batch_size": rows or 16, "max_eval_batches": 16}}


def optimizer(name: str, rate: float) -> dict[str, Any]:
    """The optimizer of a run. Args: rate: peak learning rate."""
    shared = {"learning_rate": rate, "weight_decay": 0.01, "warmup": 0.1, "lr_schedule": "cosine", "min_lr_ratio": 0.1}
    if name in (ADAMW, LONGER):
        return {"type": "adam", **shared}
    initial = {} if name == ORCHESTRATED else {"initial": name}
    return {"type": "portfolio", "telemetry": True, **shared, **initial}


def orchestrator(steps: int) -> dict[str, Any]:
    """The controller, with times in proportion to the guide's (500, 100 and 200 of a run of 10,000 steps)."""
    interval = max(20, steps // 20)
    times = {"interval": interval, "horizon": max(4, interval // 5), "min_steps_between_switches": interval * 2 // 5}
    safety = {"snapshot_interval": max(20, interval * 2 // 5)}
    return {"type": "orchestrator", **times, "branch_budget": BUDGET, "safety": safety}


class Runs:
    """Trains, and remembers what came out."""

    def __init__(self, folder: Path, model: str, steps: int, rows: int | None):
        self._folder, self._model, self._steps, self._rows = folder, model, steps, rows

    def result(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        """The last validation loss of a run, and further figures. Each name has a file: other processes train others."""
        file = self._folder / f"{self._model}-{self._steps}-{_in_file_names(name)}.json"
        return Figures(file).get(f"{name} {rate:g} {seed}", lambda: self._train(name, rate, seed))

    def loss(self, name: str, rate: float, seed: int) -> float:
        """The loss of a run; of one that diverged, infinity."""
        loss = self.result(name, rate, seed)["loss"]
        return math.inf if loss is None or not math.isfinite(loss) else loss

    def _train(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        tree = sections(self._model, self._rows)
        steps = round(self._steps * (1 + BUDGET)) if name == LONGER else self._steps
        place = self._folder / "runs" / f"{self._model}-{_in_file_names(name)}-{rate:g}-{seed}"
        controllers = [orchestrator(steps)] if name == ORCHESTRATED else []
        keys = {**tree["trainer"], "seed": seed, "num_train_steps": steps, "controllers": controllers}
        tree["trainer"] = trainer_in(place, self._folder, **keys)
        tree["data"] |= {"cache_dir": str(self._folder / "data")}
        tree |= {"optimizer": optimizer(name, rate), "evals": [{"type": "loss"}]}
        result = train(decode_run(ConfigSource(tree), "run"))
        logs = result.plan.log_folder
        losses = [record["eval/loss"] for record in read(logs / "metrics.jsonl") if "eval/loss" in record]
        found: dict[str, Any] = {"loss": losses[-1]}
        decisions = logs / "decisions.jsonl"
        if decisions.exists():
            notes = read(decisions)
            found["extra_steps"] = sum(note.get("extra_steps", 0) for note in notes if note["event"] == "branch")
            found["switches"] = [(note["effective"], note["to"]) for note in notes if note["event"] == "switch"]
            found["rollbacks"] = sum(note["event"] == "rollback" for note in notes)
        return found


def _in_file_names(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def described(losses: list[float], base: list[float]) -> str:
    """Mean and standard deviation, and the mean difference from another run of the same seeds with its interval."""
    differences = [loss - other for loss, other in zip(losses, base, strict=True)]
    text = f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}"
    if losses is base:
        return f"{text} | "
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    half = T_95[len(losses)] * deviation / math.sqrt(len(losses))
    return f"{text} | {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what has been trained, caches and logs")
    parser.add_argument("--model", choices=tuple(RATES), default="small")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--tuning-seed", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, help="rows of a batch; each value needs a folder of its own")
    parser.add_argument("--only", help="trains these, separated by commas, and prints no table: for several processes")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = Runs(options.folder, options.model, options.steps, options.rows)
    names = [ADAMW, *GUIDE, ORCHESTRATED]
    chosen = options.only.split(",") if options.only else names
    rates: dict[str, float] = {}
    for name in (name for name in names if name in chosen):
        rates[name] = min(RATES[options.model], key=lambda rate: runs.loss(name, rate, options.tuning_seed))
    if ADAMW in chosen:
        rates[LONGER] = rates[ADAMW]
    losses = {name: [runs.loss(name, rate, seed) for seed in seeds] for name, rate in rates.items()}
    if options.only:
        return
    print(f"\n{options.model}, {options.steps} steps, seeds {options.seeds}, jax {jax.__version__}\n")
    print("| run | learning rate | validation loss | difference from adamw (95 %) |")
    print("|---|---|---|---|")
    for name in (ADAMW, LONGER, *GUIDE, ORCHESTRATED):
        print(f"| {name} | {rates[name]:g} | {described(losses[name], losses[ADAMW])} |")
    spent = [runs.result(ORCHESTRATED, rates[ORCHESTRATED], seed) for seed in seeds]
    print(f"\nExtra steps of branches: {[one.get('extra_steps') for one in spent]} of {options.steps}.")
    for seed, one in zip(seeds, spent, strict=True):
        print(f"Seed {seed}: {one.get('rollbacks', 0)} rollbacks; switches {one.get('switches')}")


if __name__ == "__main__":
    main()
