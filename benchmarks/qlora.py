"""QLoRA beside LoRA on bfloat16 weights: bytes of buffers, and loss curves. On a CPU with a small model in about ten minutes.

    python benchmarks/qlora.py --model MODEL_FOLDER --data instructions.jsonl --output qlora
    python benchmarks/qlora.py --model MODEL_FOLDER --data instructions.jsonl --steps 5     # a short trial

The data has records with `prompt` and `response`. Each variant is `python -m jaxlm.train` in its own process, with the same
seed. Bytes are those of the arrays in the checkpoint's model, as Orbax lists them. Writes OUTPUT.json and prints a table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

LORA = {"type": "lora", "target": "attn|mlp", "rank": 8, "alpha": 16.0}
STORED = {"bfloat16": 16, "nf4": 4.127, "nvfp4": 4.5}  # bits per parameter
WINDOW = 10  # steps whose losses are averaged


def config(options: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """The run of one variant."""
    return {
        "initialize_from_hf": options.model,
        "use_hf_model_config": True,
        "data": {
            "train_urls": [options.data],
            "tokenizer": options.model,
            "format": {"type": "supervised", "input_field": "prompt", "output_field": "response"},
            "cache_dir": str(folder.parent / "cache"),
        },
        "trainer": {
            "id": kind,
            "mp": "p=f32,c=bfloat16",
            "train_batch_size": options.batch,
            "log_dir": str(folder / "logs"),
            "tracker": [],
            "steps_per_eval": options.steps,
            "checkpointer": {"base_path": str(folder / "checkpoints")},
        },
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0, "warmup": 0.03},
        "phases": [
            {
                "name": "lora",
                "num_train_steps": options.steps,
                "surgery": [{"type": "quantize", "kind": kind}, LORA],
                "trainable": [r"\.[ab]$"],
            }
        ],
    }


def run(options: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """Losses and bytes of one variant."""
    folder.mkdir()
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config(options, kind, folder)))
    subprocess.run([sys.executable, "-m", "jaxlm.train", "--config_path", str(file)], check=True)
    records = [json.loads(line) for line in (folder / "logs" / kind / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    (manifest,) = (folder / "checkpoints" / kind).glob(f"step-{options.steps}/run/manifest.json")
    leaves = json.loads(manifest.read_text())["leaves"]
    sizes = {path: _num_bytes(leaf) for path, leaf in leaves.items() if path.startswith("model.")}
    return {
        "losses": losses,
        "weights": sum(size for path, size in sizes.items() if ".base.weight" in path),
        "model": sum(sizes.values()),
    }


def _num_bytes(leaf: dict[str, Any]) -> int:
    itemsize = 2 if leaf["dtype"] == "bfloat16" else np.dtype(leaf["dtype"]).itemsize
    return int(np.prod(leaf["shape"], dtype=np.int64)) * itemsize


def main() -> None:
    """Runs all variants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a Hugging Face folder with weights and tokenizer")
    parser.add_argument("--data", required=True, help="JSON Lines with prompt and response")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--output", default=None, help="write OUTPUT.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = {kind: run(options, kind, Path(name) / kind) for kind in STORED}
    if options.output is not None:
        Path(f"{options.output}.json").write_text(json.dumps(results, indent=1) + "\n")
    print("| stored as | bytes of stored weights | of the model | first loss | mean loss of the last steps |")
    print("|---|---|---|---|---|")
    for kind, result in results.items():
        losses = result["losses"]
        last = sum(losses[-WINDOW:]) / len(losses[-WINDOW:])
        print(f"| {kind} | {result['weights']:,} | {result['model']:,} | {losses[0]:.4f} | {last:.4f} |")


if __name__ == "__main__":
    main()
