"""`jaxlm evaluate --tasks`: runs tasks of lm-evaluation-harness on a trained or imported model."""

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.evals.harness import HarnessEvalConfig, open_tasks
from jaxlm.session.generation_options import add_adapter_option
from jaxlm.session.load_model import open_model

_ONLY_WITH_TASKS = ("task_folder", "num_fewshot", "limit")
_ONLY_WITHOUT = ("gates", "max_batches")
_BOOTSTRAP_ITERS = 1000
_STDERR = "_stderr"


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--tasks` and its options."""
    parser.add_argument(
        "--tasks",
        help="evaluate on tasks instead of text: comma-separated names of tasks of lm-evaluation-harness (extra `eval`)",
    )
    parser.add_argument("--task_folder", help="folder with your own task definitions")
    parser.add_argument("--num_fewshot", type=int, help="number of few-shot examples per prompt (default: the task's)")
    parser.add_argument("--limit", type=int, help="maximum number of documents per task (default: all)")
    add_adapter_option(parser)


def check_task_options(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that have no effect with, or without, `--tasks`."""
    if options.tasks is None:
        refuse_given(options, _ONLY_WITH_TASKS, "without --tasks")
    else:
        refuse_given(options, _ONLY_WITHOUT, "with --tasks")


def refuse_given(options: argparse.Namespace, names: Iterable[str], how: str) -> None:
    """Raises `ConfigError` if one of these options is given, which has no effect as `how` says."""
    if given := [name for name in names if getattr(options, name) is not None]:
        raise ConfigError(f"--{given[0]} has no effect {how}. Remove it")


def evaluate_tasks(options: argparse.Namespace, keys: Mapping[str, Any]) -> None:
    """Runs the tasks, and prints a table and one JSON line, both with standard errors."""
    loaded = open_model(options.checkpoint, keys, options.adapter, options.weights)
    loaded.check_predicts_next_tokens("--tasks")
    config = HarnessEvalConfig(
        tasks=options.tasks.split(","),
        task_folder=options.task_folder,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=HarnessEvalConfig.batch_size if options.batch_size is None else options.batch_size,
    )
    check_fields(config, "--")
    tasks = open_tasks(config, loaded.model.seq_len)
    with loaded.plan.layout.use():
        model = loaded.for_inference(options.quantize)
        results = tasks.run(model, loaded.tokenizer, bootstrap_iters=_BOOTSTRAP_ITERS)
    numbers = {
        task: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in results.items()
    }
    print(_table(numbers))
    print(json.dumps({"model": str(loaded.location), "tasks": numbers}))


def _table(numbers: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each metric, with the standard error that the harness reports beside it as `METRIC_stderr,FILTER`."""
    width = max(map(len, ["task", *numbers]))
    lines = [f"{'task':<{width}}  {'metric':<24}  {'value':>9}  {'stderr':>9}"]
    for task, metrics in numbers.items():
        for metric in (metric for metric in metrics if _STDERR not in metric):
            name, comma, filter_name = metric.partition(",")
            stderr = metrics.get(f"{name}{_STDERR}{comma}{filter_name}")
            shown = "" if stderr is None else f"{stderr:.4f}"
            lines.append(f"{task:<{width}}  {metric:<24}  {metrics[metric]:>9.4f}  {shown:>9}".rstrip())
    return "\n".join(lines)
