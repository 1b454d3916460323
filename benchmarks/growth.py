"""Compares stacks that train one after the other with a model that trains as a whole, at equal tokens and at equal FLOPs.

    python benchmarks/growth.py --folder runs/growth [--seeds 0,1,2] [--steps 200] [--stacks 3] [--layers 2] [--only NAME,...]

A small Llama on the standard library's source files (`stdlib:train`; validation on `stdlib:validation`). `--steps` is the
number of steps of each stack. Each model ends with the same layers:

    frozen         each new stack trains on a frozen trunk, with the final norm and the head
    polished       likewise, and after each growth all parameters train for a quarter of the steps of a stack; as many
                   tokens in all. One learning-rate schedule covers all phases, and the optimizer's state is kept
    gstack         new stacks are copies, and everything trains
    joint, tokens  the whole model, for as many tokens as the others
    joint, FLOPs   the whole model, for as many FLOPs as `frozen`

FLOPs are those of matrix products in the traced steps, forward and backward, times steps. Prints the duration of each run,
then a Markdown table of the validation losses (nats per token: the mean over seeds, and their range) at the end of each
phase, and of the last loss as a multiple of that of the whole model. Finished runs are recorded in the folder
(`results.json`), so the same command goes on where it was stopped.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused  # noqa: F401  # before haliax

import jax
from training_runs import Figures, read, series, trainer_in

from jaxlm.models.flops import matrix_operations
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation.step import trace_step
from jaxlm.train import train

BATCH, SEQ_LEN, VOCAB = 8, 128, 4096


def preset(steps: int, stacks: int, **keys: Any) -> dict[str, Any]:
    return {"preset": {"type": "progressive", "stacks": stacks, "steps_per_stack": steps, **keys}}


def whole(steps: int, stacks: int, layers: int) -> dict[str, Any]:
    return {"model": {"num_layers": stacks * layers}, "trainer": {"num_train_steps": steps}}


def config(keys: Mapping[str, Any], folder: Path, seed: int, layers: int, learning_rate: float) -> dict[str, Any]:
    """The configuration of one run."""
    model = {"type": "llama", "seq_len": SEQ_LEN, "hidden_dim": 128, "intermediate_dim": 352, "num_layers": layers}
    model |= {"num_heads": 2, "num_kv_heads": 2, "initializer_range": 0.08, "tie_word_embeddings": False}
    trainer = trainer_in(folder, folder.parent, seed=seed, train_batch_size=BATCH, max_eval_batches=40)
    data = {"train_urls": ["stdlib:train"], "validation_urls": ["stdlib:validation"], "tokenizer": "bpe"}
    data |= {"vocab_size": VOCAB, "cache_dir": str(folder.parent / "data")}
    optimizer = {"learning_rate": learning_rate, "weight_decay": 0.1, "warmup": 0.1, "lr_schedule": "cosine"}
    model, trainer = model | keys.get("model", {}), trainer | keys.get("trainer", {})
    tree = {"data": data, "optimizer": optimizer, "evals": [{"type": "loss"}], **keys}
    return {**tree, "model": model, "trainer": trainer}


def run(tree: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns seconds, tokens, FLOPs and the validation loss at the end of each phase."""
    begun = time.monotonic()
    plan = train(decode_run(ConfigSource(tree), "run")).plan
    seconds, flops = round(time.monotonic() - begun, 1), 0
    losses = dict(series(read(plan.log_folder / "metrics.jsonl"), "eval/loss"))
    for phase in plan.phases:
        with plan.layout.use():
            flops += matrix_operations(trace_step(plan, phase).jaxpr.jaxpr) * (phase.end - phase.start)
    steps = plan.phases[-1].end
    ends = {phase.name: losses[phase.end] for phase in plan.phases}
    return {"steps": steps, "tokens": steps * BATCH * SEQ_LEN, "flops": flops, "losses": ends, "seconds": seconds}


def polished(steps: int, stacks: int) -> dict[str, Any]:
    """Stacks with polishing, in about `steps * stacks` steps in all."""
    total = steps * stacks
    polish = max(1, round(total / (5 * stacks - 1)))
    each = max(1, round((total - polish * (stacks - 1)) / stacks))
    return preset(each, stacks, polish_steps=polish, carry_optimizer=True)


def with_range(values: list[float]) -> str:
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def table(results: Figures, names: list[str], seeds: list[int]) -> str:
    """A Markdown table. A run is compared with the joint ones of the same seed."""
    joints = ("joint, tokens", "joint, FLOPs")
    lines = [f"| run | steps | tokens | FLOPs | validation loss | {' | '.join(f'/ {joint}' for joint in joints)} |"]
    lines.append("|---|---|---|---|---|---|---|")
    last = {run: list(record["losses"].values())[-1] for run, record in results.by_name.items()}
    for name in names:
        records = [results.by_name[f"{name} {seed}"] for seed in seeds]
        losses = {phase: [record["losses"][phase] for record in records] for phase in records[0]["losses"]}
        ratios = [
            [last[f"{name} {seed}"] / last[f"{joint} {seed}"] for seed in seeds if f"{joint} {seed}" in last]
            for joint in joints
        ]
        cells = [name, str(records[0]["steps"]), f"{records[0]['tokens']:,}", f"{records[0]['flops']:.3g}"]
        cells.append(", ".join(f"{phase} {with_range(values)}" for phase, values in losses.items()))
        lines.append(f"| {' | '.join([*cells, *(with_range(values) if values else '' for values in ratios)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stacks", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2, help="layers of each stack")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--only", default="", help="names of the runs without their commas, separated by commas")
    parser.add_argument("--folder", type=Path, required=True, help="for results, checkpoints, logs and caches")
    options = parser.parse_args()
    steps, stacks = options.steps, options.stacks
    growing = {
        "frozen": preset(steps, stacks),
        "polished": polished(steps, stacks),
        "gstack": preset(steps, stacks, init="copy", trunk="train"),
        "joint, tokens": whole(steps * stacks, stacks, options.layers),
        "joint, FLOPs": {},
    }
    chosen = [name for name in growing if not options.only or name.replace(", ", " ") in options.only.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    settings = {key: getattr(options, key) for key in ("steps", "stacks", "layers", "learning_rate")}
    results = Figures(options.folder / "results.json", settings)
    for seed in seeds:
        for name in chosen:
            keys, folder = growing[name], options.folder / f"{name.replace(', ', '-')}-{seed}"
            if name == "joint, FLOPs":
                frozen, joint = (results.by_name[f"{other} {seed}"] for other in ("frozen", "joint, tokens"))
                keys = whole(max(1, round(frozen["flops"] / (joint["flops"] / joint["steps"]))), stacks, options.layers)
            tree = config(keys, folder, seed, options.layers, options.learning_rate)
            results.get(f"{name} {seed}", lambda tree=tree: run(tree))
    shape = f"{stacks} stacks of {options.layers} layers, {steps} steps each"
    print(f"\n{shape}, seeds {options.seeds}, jax {jax.__version__}\n")
    print(table(results, chosen, seeds))


if __name__ == "__main__":
    main()
