"""Compares a masked-diffusion model with an autoregressive one on Python's standard library, at equal FLOPs.

    python benchmarks/diffusion.py --folder runs/diffusion [--seeds 0,1,2] [--steps 1800] [--replicas 4]
    python benchmarks/diffusion.py --folder runs/blocks --forms blocks,whole --steps 900

Both are the recipe `progressive/diffusion.yaml`: the same model, tokenizer, data and optimizer, with a learning rate that
suits each. The autoregressive one is causal, predicts next tokens, and trains as many steps longer as it needs fewer FLOPs a
token. Each run is a process of its own. Start the same command again after an interruption: finished runs are not repeated,
and the others continue from their last checkpoint.

The forms `blocks` and `whole` are the recipe `progressive/diffusion_blocks.yaml` and the same model trained as a whole, at
equal steps: the blocks need half of the layers' FLOPs.

Of the diffusion model, the loss in nats a token and the bits per byte are the bound: an upper limit of what the likelihood
would give, where those of the autoregressive model are exact. Writes `diffusion.json` into the folder. The last line printed
is JSON: form -> metric -> [mean, standard deviation] over the seeds.
"""

import argparse
import json
from pathlib import Path

import yaml
from training_runs import ROOT, mean_and_deviation, read, series, start

RECIPES = ROOT / "src/jaxlm/systems/progressive/recipes/progressive"
DIFFUSION, CAUSAL, BLOCKS, WHOLE = "diffusion", "autoregressive", "blocks", "whole"
METRICS = ("eval/loss", "eval/bpb")
CAUSAL_LEARNING_RATE = 6e-3  # that of the quickstart; the masked model learns less with it


def main() -> None:
    """Trains what is not trained yet, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for runs, caches and results")
    parser.add_argument("--forms", default=f"{DIFFUSION},{CAUSAL}", help="what to train (default both)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds (default 0,1,2)")
    parser.add_argument("--steps", type=int, default=1800, help="steps of the diffusion model (default 1800)")
    parser.add_argument("--replicas", type=int, default=4, help="ways to hide tokens of a sequence (default 4)")
    parser.add_argument("--eval_batches", type=int, default=200, help="batches of 8 sequences to evaluate")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {form: [] for form in options.forms.split(",")}
    for seed in map(int, options.seeds.split(",")):
        for form, runs in results.items():
            runs.append(train(options.folder, form, seed, options))
            print(f"{form}, seed {seed}: {runs[-1]}", flush=True)
    (options.folder / "diffusion.json").write_text(json.dumps(results, indent=1))
    summary = {
        form: {metric: mean_and_deviation([run[metric] for run in runs]) for metric in METRICS}
        for form, runs in results.items()
    }
    print(json.dumps(summary))


def config_of(form: str, seed: int, options: argparse.Namespace) -> dict:
    """The configuration of a run."""
    name = "diffusion_blocks" if form in (BLOCKS, WHOLE) else "diffusion"
    config = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    trainer, data = config["trainer"], config["data"]
    data["cache_dir"] = str(options.folder.resolve() / "cache")
    data["masking"]["validation_replicas"] = options.replicas
    trainer |= {"id": f"{form}-{seed}", "seed": seed, "num_train_steps": options.steps}
    trainer |= {"steps_per_eval": options.steps, "max_eval_batches": options.eval_batches}
    config["evals"] = [{"type": "loss"}]
    if form == WHOLE:
        config["objective"] = {"type": "diffusion"}
    if form == CAUSAL:
        del data["masking"], config["objective"], config["model"]["use_bidirectional_attention"]
        config["optimizer"]["learning_rate"] = CAUSAL_LEARNING_RATE
        trainer["max_eval_batches"] = -(-options.eval_batches // options.replicas)  # the same sequences
        both = flops_per_token(config_of(DIFFUSION, seed, options))
        trainer["num_train_steps"] = round(options.steps * both / flops_per_token(config))
        trainer["steps_per_eval"] = trainer["num_train_steps"]
    return config


def flops_per_token(config: dict) -> float:
    """FLOPs for each training token, of unmasked attention alone."""
    from jaxlm.models.base import ModelConfig
    from jaxlm.reading.decode import decode
    from jaxlm.reading.yaml import ConfigSource

    return decode(ModelConfig, ConfigSource(config["model"])).flops_per_token(config["data"]["vocab_size"]).causal


def train(folder: Path, form: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Trains a run to its end, unless it has been. Returns its steps and its last metrics."""
    config = config_of(form, seed, options)
    name = f"{form}-{seed}"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    start(folder, name, "--config_path", f"{name}.yaml")
    records = read(folder / "logs" / name / "metrics.jsonl")
    return {
        "steps": config["trainer"]["num_train_steps"],
        **{metric: series(records, metric)[-1][1] for metric in METRICS},
    }


if __name__ == "__main__":
    main()
