"""Compares jaxlm with the harness's own backend `hf` on tasks of lm-evaluation-harness.

    cd FOLDER_WITH_CORE && python benchmarks/harness.py --checkpoint exported --tasks examples/tasks --limit 500

The tasks in `examples/tasks` read `core/*.jsonl` in the current folder. Prints a row for each metric of each task, and
the seconds that both took. The last line printed is JSON. Needs the extras `eval`, `torch` and `hf`.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from processes import answer_of

TASKS = Path(__file__).parents[1] / "examples" / "tasks"
SKIPPED = ("alias", "sample_len")


def main() -> None:
    """Runs all tasks of a folder with both backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a Hugging Face model folder")
    parser.add_argument("--tasks", type=Path, default=TASKS, help="folder of tasks (default examples/tasks)")
    parser.add_argument("--limit", type=int, default=500, help="maximum documents per task (default 500)")
    parser.add_argument("--batch_size", type=int, default=16, help="requests per batch (default 16)")
    options = parser.parse_args()
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    names = sorted(path.stem for path in options.tasks.glob("*.yaml"))
    rows = []
    for name in names:
        ours, our_s = timed(lambda name=name: jaxlm_metrics(options, name))
        theirs, their_s = timed(lambda name=name: hf_metrics(options, name))
        for metric, value in ours.items():
            if metric in SKIPPED or "stderr" in metric:
                continue
            rows.append({"task": name, "metric": metric, "jaxlm": value, "hf": theirs[metric]})
            print(f"{name:24} {metric:24} {value!r:24} {theirs[metric]!r:24} {value == theirs[metric]}")
        print(f"{name:24} seconds                  {our_s:<24.1f} {their_s:<24.1f}", flush=True)
    print(json.dumps(rows))


def timed(fun) -> tuple[dict, float]:
    """Calls `fun`. Returns its result and the seconds it took."""
    began = time.perf_counter()
    return fun(), time.perf_counter() - began


def jaxlm_metrics(options: argparse.Namespace, task: str) -> dict:
    """Metric -> value, from `python -m jaxlm evaluate`."""
    command = [sys.executable, *["-m", "jaxlm", "evaluate", "--trainer.mp", "f32", "--checkpoint"], options.checkpoint]
    command += ["--tasks", task, "--task_folder", options.tasks, "--limit", options.limit]
    command += ["--batch_size", options.batch_size]
    return answer_of([*map(str, command)])["tasks"][task]


def hf_metrics(options: argparse.Namespace, task: str) -> dict:
    """Metric -> value, from the backend `hf`."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=options.checkpoint, dtype="float32", device="cpu", batch_size=options.batch_size)
    manager = TaskManager(include_path=str(options.tasks))
    given = {"tasks": [task], "task_manager": manager, "limit": options.limit, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(model=model, **given)
    return results["results"][task]


if __name__ == "__main__":
    main()
