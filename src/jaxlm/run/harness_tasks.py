"""Tasks of lm-evaluation-harness on a model that a person names: the part of `jaxlm.evaluate` behind `--tasks`."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.evals.harness import HarnessEvalConfig, open_tasks
from jaxlm.run.generation_options import add_adapter_option
from jaxlm.run.load_model import open_model

_ONLY_WITH_TASKS = ("task_folder", "num_fewshot", "limit", "adapter")
_ONLY_WITHOUT = ("max_batches",)


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """What `--tasks` and the options beside it mean."""
    parser.add_argument(
        "--tasks",
        default=None,
        help="tasks of lm-evaluation-harness (extra `eval`) instead of text: names, with commas",
    )
    parser.add_argument("--task_folder", default=None, help="a folder with tasks of one's own")
    parser.add_argument("--num_fewshot", type=int, default=None, help="solved examples before each question")
    parser.add_argument("--limit", type=int, default=None, help="so many documents of each task")
    add_adapter_option(parser)


def check_task_options(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for an option that belongs to the other kind of evaluation."""
    without = options.tasks is None
    for name in _ONLY_WITH_TASKS if without else _ONLY_WITHOUT:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} has no effect {'without' if without else 'with'} --tasks. Leave it out")


def evaluate_tasks(options: argparse.Namespace, keys: Mapping[str, Any]) -> None:
    """Runs the tasks, and prints a table and one JSON line.

    Raises:
        ConfigError: no such model or task, or the harness is not installed.
    """
    named = open_model(options.checkpoint, keys, options.adapter, options.weights)
    config = HarnessEvalConfig(
        tasks=options.tasks.split(","),
        task_folder=options.task_folder,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=HarnessEvalConfig.batch_size if options.batch_size is None else options.batch_size,
    )
    tasks = open_tasks(config, named.plan.config.model.seq_len)
    with named.plan.layout.use():
        found = tasks.run(named.for_use(), named.tokenizer)
    numbers = {
        task: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in found.items()
    }
    width = max(map(len, ["task", *numbers]))
    print(f"{'task':<{width}}  {'metric':<24}  {'value':>9}")
    for task, metrics in numbers.items():
        for name, value in metrics.items():
            print(f"{task:<{width}}  {name:<24}  {value:>9.4f}")
    print(json.dumps({"model": str(named.place), "tasks": numbers}))
