"""Compares stacks that train one after the other with a model that trains as a whole, at equal tokens and at equal FLOPs.

    python benchmarks/growth.py [--seeds 0,1,2] [--steps 200] [--stacks 3] [--layers 2] [--only NAME,...]

A small Llama on the standard library's source files (`stdlib:train`; validation on `stdlib:validation`). `--steps` is the
number of steps of each stack. Each model ends with the same layers:

    frozen         each new stack trains on a frozen trunk, with the final norm and the head
    polished       likewise, and after each growth all parameters train for a quarter of the steps
    gstack         new stacks are copies, and everything trains
    joint, tokens  the whole model, for as many tokens as `gstack`
    joint, FLOPs   the whole model, for as many FLOPs as `frozen`

FLOPs are those of matrix products in the traced steps, forward and backward, times steps. Prints a Markdown table of the
validation losses (nats per token, the mean over seeds) at the end of each phase, and a JSON line.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused  # noqa: F401  # before haliax

import jax

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
    trainer = {"id": "run", "seed": seed, "train_batch_size": BATCH, "log_dir": str(folder / "logs")}
    trainer |= {
        "steps_per_eval": 1_000_000,
        "max_eval_batches": 40,
        "compilation_cache_dir": str(folder.parent / "xla"),
    }
    trainer |= {"checkpointer": {"base_path": str(folder / "checkpoints"), "save_interval": "1h", "keep": []}}
    data = {"train_urls": ["stdlib:train"], "validation_urls": ["stdlib:validation"], "tokenizer": "bpe"}
    data |= {"vocab_size": VOCAB, "cache_dir": str(folder.parent / "data")}
    optimizer = {"learning_rate": learning_rate, "weight_decay": 0.1, "warmup": 20, "lr_schedule": "cosine"}
    tree = {"data": data, "model": model, "trainer": trainer, "optimizer": optimizer, "evals": [{"type": "loss"}]}
    return {
        **tree,
        **keys,
        "model": {**model, **keys.get("model", {})},
        "trainer": {**trainer, **keys.get("trainer", {})},
    }


def run(tree: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns tokens, FLOPs and the validation loss at the end of each phase."""
    result = train(decode_run(ConfigSource(tree), "run"))
    plan, losses = result.plan, {}
    for line in (plan.log_folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "eval/loss" in record:
            losses[record["step"]] = record["eval/loss"]
    flops = 0
    for phase in plan.phases:
        with plan.layout.use():
            flops += matrix_operations(trace_step(plan, phase).jaxpr.jaxpr) * (phase.end - phase.start)
    steps = plan.phases[-1].end
    ends = {phase.name: losses[phase.end] for phase in plan.phases}
    return {"steps": steps, "tokens": steps * BATCH * SEQ_LEN, "flops": flops, "losses": ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stacks", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2, help="layers of each stack")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--only", default="", help="names of the runs, separated by commas without spaces")
    parser.add_argument("--folder", type=Path, help="keeps checkpoints, logs and caches; by default, none are kept")
    options = parser.parse_args()
    steps, stacks = options.steps, options.stacks
    growing = {
        "frozen": preset(steps, stacks),
        "polished": preset(steps, stacks, polish_steps=max(1, steps // 4)),
        "gstack": preset(steps, stacks, init="copy", trunk="train"),
        "joint, tokens": whole(steps * stacks, stacks, options.layers),
        "joint, FLOPs": {},
    }
    chosen = [name for name in growing if not options.only or name.replace(", ", " ") in options.only.split(",")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for seed in map(int, options.seeds.split(",")):
            done: dict[str, dict[str, Any]] = {}
            for name in chosen:
                keys = growing[name]
                if name == "joint, FLOPs":
                    frozen, joint = done["frozen"], done["joint, tokens"]
                    equal = max(1, round(frozen["flops"] / (joint["flops"] / joint["steps"])))
                    keys = whole(equal, stacks, options.layers)
                at = folder / f"{name.replace(', ', '-')}-{seed}"
                done[name] = run(config(keys, at, seed, options.layers, options.learning_rate))
                found[name].append(done[name])
                print(name, seed, json.dumps(done[name]), flush=True)
    print(
        f"\n{stacks} stacks of {options.layers} layers, {steps} steps each, seeds {options.seeds}, jax {jax.__version__}\n"
    )
    print("| run | steps | tokens | FLOPs | validation loss at the end of each phase |")
    print("|---|---|---|---|---|")
    for name, results in found.items():
        first = results[0]
        losses = {phase: statistics.fmean(one["losses"][phase] for one in results) for phase in first["losses"]}
        text = ", ".join(f"{phase} {loss:.3f}" for phase, loss in losses.items())
        print(f"| {name} | {first['steps']} | {first['tokens']:,} | {first['flops']:.3g} | {text} |")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
