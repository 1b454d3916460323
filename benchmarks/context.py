"""Compares the step of two processes that share each row with that of one process, at equal length, on CPUs.

    python benchmarks/context.py --folder FOLDER [--seq-len 8192] [--rounds 3] [--steps 12]

Each process runs on a core of its own (`taskset`), so two of them could at best take half of the time. All start the real
command: a Llama of 4 layers and width 256 with 8 query and 4 key/value heads, one row of packed source files a step. The
variants take turns. Prints a Markdown table: the median step with its quartiles over all rounds, how many times as fast it is
as one process, and the loss after the last step.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import yaml
from processes import spread
from training_runs import read, trainer_in

WARMUP_STEPS = 3
ALONE = "one process"
VARIANTS = {
    ALONE: {},
    "gather, blocks": {"method": "gather", "balance": "blocks"},
    "gather, zigzag": {"method": "gather", "balance": "zigzag"},
    "gather, order of the text": {"method": "gather", "balance": "none"},
    "ring, blocks": {"method": "ring", "balance": "blocks"},
    "ring, zigzag": {"method": "ring", "balance": "zigzag"},
    "ulysses": {"method": "ulysses"},
}


def run_of(folder: Path, variant: str, seq_len: int, steps: int) -> Path:
    """Writes the YAML of a variant."""
    heads = {"num_heads": 8, "num_kv_heads": 4}
    sizes = {"type": "llama", "seq_len": seq_len, "hidden_dim": 256, "intermediate_dim": 704, "num_layers": 4, **heads}
    context = VARIANTS[variant]
    name = variant.replace(", ", "-").replace(" ", "-")
    keys = {"context": {"size": 2, **context}} if context else {}
    trainer = trainer_in(folder, folder, id=name, num_train_steps=steps, train_batch_size=1, **keys)
    data = {"train_urls": ["stdlib:train"], "tokenizer": "bpe", "vocab_size": 1024, "cache_dir": str(folder / "data")}
    path = folder / f"{name}.yaml"
    run = {"model": sizes, "data": data, "trainer": trainer, "optimizer": {"learning_rate": 1e-3}, "evals": []}
    path.write_text(yaml.safe_dump(run))
    return path


def train(folder: Path, variant: str, seq_len: int, steps: int) -> tuple[list[float], float]:
    """Seconds of each step after the first ones, and the last loss."""
    path = run_of(folder, variant, seq_len, steps)
    log = folder / "logs" / path.stem
    subprocess.run(["rm", "-rf", log, folder / "checkpoints" / path.stem], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    number = 2 if VARIANTS[variant] else 1
    together = [f"--trainer.distributed.{key}" for key in ("coordinator_address", "num_processes", "process_id")]
    processes = []
    for process in range(number):
        place = [part for pair in zip(together, (address, str(number), str(process)), strict=True) for part in pair]
        command = [sys.executable, "-m", "jaxlm.train", "--config_path", str(path), *(place if number > 1 else [])]
        processes.append(subprocess.Popen(["taskset", "-c", str(process), *command], stdout=subprocess.DEVNULL))
    for process in processes:
        if process.wait():
            sys.exit(f"{variant}: a process ended with {process.returncode}")
    records = [record for record in read(log / "metrics.jsonl") if "train/loss" in record]
    return [one["throughput/duration"] for one in records[WARMUP_STEPS:]], records[-1]["train/loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    losses: dict[str, float] = {}
    for number in range(options.rounds):
        for variant in VARIANTS:
            steps, losses[variant] = train(options.folder, variant, options.seq_len, options.steps)
            seconds[variant] += steps
            print(f"round {number + 1}: {variant} {statistics.median(steps):.2f} s", file=sys.stderr, flush=True)
    print(f"\n{options.seq_len:,} tokens in a row, jax {jax.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print("| variant | step | times as fast | loss |")
    print("|---|---|---|---|")
    alone = statistics.median(seconds[ALONE])
    for variant, steps in seconds.items():
        median, low, high = spread(steps)
        print(
            f"| {variant} | {median:.2f} s ({low:.2f} to {high:.2f}) | {alone / median:.2f} | {losses[variant]:.6f} |"
        )


if __name__ == "__main__":
    main()
