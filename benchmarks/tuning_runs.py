"""Runs of `jaxlm train` in one folder, for post_training.py: each is trained once, and read from its logs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
Records = list[dict[str, Any]]


def write(path: Path, lines: Iterable[str]) -> None:
    """Writes lines, unless the file has them: a run that goes on must find its files unchanged."""
    text = "".join(f"{line}\n" for line in lines)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def trainer(seed: int, batch: int, steps_per_eval: int) -> dict[str, Any]:
    """The trainer's keys that all runs share."""
    return {
        "seed": seed,
        "train_batch_size": batch,
        "steps_per_eval": steps_per_eval,
        "max_eval_batches": None,
        "log_dir": "logs",
        "checkpointer": {"base_path": "checkpoints", "save_interval": "1m", "keep": []},
    }


def train(folder: Path, name: str, config: Mapping[str, Any]) -> Records:
    """Trains a run to its end if it is not there yet. Returns its records."""
    finished, text = folder / f"{name}.finished", yaml.safe_dump(dict(config), sort_keys=False)
    if not finished.exists() or finished.read_text() != text:
        (folder / f"{name}.yaml").write_text(text)
        started = time.perf_counter()
        with (folder / f"{name}.out").open("a") as out:
            paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, "-m", "jaxlm.train", "--config_path", f"{name}.yaml"]
            done = subprocess.run(command, cwd=folder, env=env, stdout=out, stderr=out)
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}; see {folder / name}.out")
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        finished.write_text(text)
    return read(folder / "logs" / name / "metrics.jsonl")


def read(path: Path) -> Records:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def series(records: Records, name: str) -> list[tuple[int, float]]:
    """The steps and values of a metric."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def averaged(points: Sequence[tuple[int, float]], width: int = 10) -> list[tuple[float, float]]:
    """Means over as many points."""
    if len(points) < 3 * width:
        return [*points]
    parts = [points[at : at + width] for at in range(0, len(points) - width + 1, width)]
    return [(sum(s for s, _ in part) / width, sum(v for _, v in part) / width) for part in parts]
