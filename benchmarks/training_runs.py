"""Runs of `jaxlm train` in one folder, each a process of its own: trained once, and read from their logs."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Records = list[dict[str, Any]]
LLAMA = {"type": "llama", "seq_len": 256, "hidden_dim": 128, "intermediate_dim": 352, "num_heads": 2, "num_kv_heads": 2}
LLAMA |= {"tie_word_embeddings": True, "initializer_range": 0.08}


class Figures:
    """Figures by name, in a file that is written after each of them. Another program's with other settings end this one."""

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None):
        self.path, self.settings = path, dict(settings or {})
        found = json.loads(path.read_text()) if path.is_file() else {"settings": self.settings, "figures": {}}
        if found["settings"] != self.settings:
            raise SystemExit(f"{path} has {found['settings']}, but {self.settings} given. Choose another --folder")
        self.by_name: dict[str, Any] = found["figures"]

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The figure of this name, measured unless it was before."""
        if name not in self.by_name:
            self.by_name[name] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"settings": self.settings, "figures": self.by_name}, indent=1))
            print(name, json.dumps(self.by_name[name]), file=sys.stderr, flush=True)
        return self.by_name[name]


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


def trainer_in(folder: Path, caches: Path, **keys: Any) -> dict[str, Any]:
    """The trainer's keys of a run with logs and checkpoints of its own, which is evaluated at its end alone."""
    checkpointer = {"base_path": str(folder / "checkpoints"), "save_interval": "1h", "keep": []}
    places = {
        "log_dir": str(folder / "logs"),
        "compilation_cache_dir": str(caches / "xla"),
        "checkpointer": checkpointer,
    }
    return {"id": "run", "steps_per_eval": 1_000_000, **places, **keys}


def train(folder: Path, name: str, config: Mapping[str, Any]) -> Records:
    """Trains a run to its end if it is not there yet. Returns its records."""
    import yaml

    finished, text = folder / f"{name}.finished", yaml.safe_dump(dict(config), sort_keys=False)
    if not finished.exists() or finished.read_text() != text:
        (folder / f"{name}.yaml").write_text(text)
        start(folder, name, "--config_path", f"{name}.yaml")
        finished.write_text(text)
    return read(folder / "logs" / name / "metrics.jsonl")


def start(folder: Path, name: str, *arguments: str, ends: Callable[[], bool] = lambda: False) -> float:
    """Runs `jaxlm train` in a folder until it ends, or until `ends` says so. Its output is appended to NAME.out. A failure
    ends this process. Returns the seconds."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command, started = [sys.executable, "-m", "jaxlm.train", *arguments], time.perf_counter()
    with (folder / f"{name}.out").open("a") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
        while process.poll() is None and not ends():
            time.sleep(1)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        elif process.returncode:
            raise SystemExit(f"{name}: exit code {process.returncode}; see {folder / name}.out")
        process.wait()
    seconds = time.perf_counter() - started
    print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return seconds


def validation_losses(folder: Path, name: str) -> dict[int, float]:
    """Step -> validation loss, as far as the run has come."""
    path = folder / "logs" / name / "metrics.jsonl"
    return dict(series(read(path), "eval/loss")) if path.is_file() else {}


def mean_and_deviation(values: Sequence[float]) -> list[float]:
    """[mean, standard deviation]."""
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def plot_losses(axes: Any, runs: Mapping[int, Mapping[int, float]], label: str) -> None:
    """Plots the mean loss by step of runs with several seeds, and their range. Args: runs: seed -> step -> loss."""
    steps = sorted(set.intersection(*map(set, runs.values())))
    by_step = [[losses[step] for losses in runs.values()] for step in steps]
    (line,) = axes.plot(steps, list(map(statistics.fmean, by_step)), "o-", markersize=3, label=label)
    axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), color=line.get_color(), alpha=0.2)


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
