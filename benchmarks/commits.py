"""Compares two commits of jaxlm on the same run. Shows whether features that the run does not use slow it down.

    python benchmarks/commits.py --before 371befe --rounds 5 --steps 120 --config_path config/quickstart.yaml

Checks out the earlier commit beside the working tree (`git worktree`), tokenizes once for each, and then runs both in
turn, round after round. Reports the time from the start of the process to the end of its first step (with a filled
compilation cache), the median step time from `metrics.jsonl`, and peak memory. The last line printed is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from processes import spread

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 10  # first steps, which are not counted


def main() -> None:
    """Runs both commits in turn and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each commit (default 5)")
    parser.add_argument("--steps", type=int, default=120, help="steps per run (default 120)")
    parser.add_argument("--config_path", type=Path, default=ROOT / "config" / "quickstart.yaml")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, checked_out(options.before, Path(folder) / "tree") as earlier:
        trees = {options.before: earlier, "now": ROOT}
        runs: dict[str, list[dict]] = {name: [] for name in trees}
        for number in range(options.rounds + 1):
            for name, tree in trees.items():
                answer = run(tree, Path(folder) / name, options.config_path.resolve(), options.steps, number)
                print(f"round {number}: {name}: {answer}", file=sys.stderr)
                if number:  # round 0 tokenizes and compiles
                    runs[name].append(answer)
    report(runs)


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of the commit, removed on exit."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def run(tree: Path, home: Path, config: Path, steps: int, number: int) -> dict[str, float]:
    """Runs one process of a tree in its own folder. Returns seconds to the first step, step time and peak memory."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "jaxlm.train", "--config_path", str(config)]
    command += ["--trainer.num_train_steps", str(steps), "--trainer.id", f"round-{number}", "--trainer.log_dir", "logs"]
    command += ["--trainer.steps_per_eval", str(steps), "--trainer.compilation_cache_dir", "programs"]
    command += ["--data.cache_dir", "cache"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONUNBUFFERED": "1"}
    began, first_step, peak = time.perf_counter(), None, 0
    with subprocess.Popen(
        command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if first_step is None and line.startswith("step 1/"):
                first_step = time.perf_counter() - began
            if process.poll() is None:
                peak = max(peak, psutil.Process(process.pid).memory_info().rss)
    if process.returncode or first_step is None:
        raise SystemExit(f"{tree}: the run failed with exit code {process.returncode}")
    (metrics,) = (home / "logs" / f"round-{number}").glob("metrics.jsonl")
    lines = metrics.read_text().splitlines()
    seconds = [json.loads(line)["throughput/duration"] for line in lines if "duration" in line]
    return {"first_step_s": first_step, "step_s": statistics.median(seconds[WARMUP:]), "peak_bytes": peak}


def report(runs: dict[str, list[dict]]) -> None:
    """Prints a line per quantity with both commits and their ratio, then everything as JSON."""
    before, now = runs.values()
    summary: dict[str, dict] = {}
    for key in ("first_step_s", "step_s", "peak_bytes"):
        for name, answers in runs.items():
            summary.setdefault(key, {})[name] = spread([answer[key] for answer in answers])
        ratios = [after[key] / first[key] for first, after in zip(before, now, strict=True)]
        summary[key]["ratio"] = spread(ratios)
        print(f"{key:14}", {name: [round(value, 4) for value in values] for name, values in summary[key].items()})
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
