"""`jaxlm evaluate --tasks`: runs CORE or lm-evaluation-harness tasks on a trained or imported model."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.evals.harness import HarnessEvalConfig, open_tasks
from jaxlm.session.generation_options import add_adapter_option
from jaxlm.session.load_model import LoadedModel, open_model
from jaxlm.systems.nanochat.core_bundle import FETCH_OPTION
from jaxlm.systems.nanochat.core_eval import CORE, CoreEvalConfig, core_metrics, open_core

_ONLY_WITH_TASKS = ("task_folder", "num_fewshot", "limit")
_ONLY_WITHOUT = ("max_batches",)
_ONLY_WITH_CORE = (FETCH_OPTION.removeprefix("--"),)
_NOT_WITH_CORE = ("task_folder", "num_fewshot")
_BOOTSTRAP_ITERS = 1000
_STDERR = "_stderr"


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--tasks` and its options."""
    parser.add_argument(
        "--tasks",
        help="evaluate on tasks instead of text: `core`, `core/TASK,...` for some of its tasks, or comma-separated names of"
        " tasks of lm-evaluation-harness (extra `eval`)",
    )
    parser.add_argument(FETCH_OPTION, help="with --tasks core: the folder with its tasks")
    parser.add_argument("--task_folder", help="folder with your own task definitions")
    parser.add_argument("--num_fewshot", type=int, help="number of few-shot examples per prompt (default: the task's)")
    parser.add_argument("--limit", type=int, help="maximum number of documents per task (default: all)")
    add_adapter_option(parser)


def check_task_options(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that have no effect with, or without, `--tasks`."""
    core = _core_tasks(options.tasks)
    for are_useless, names, how in (
        (options.tasks is None, _ONLY_WITH_TASKS, "without --tasks"),
        (core is None, _ONLY_WITH_CORE, f"without --tasks {CORE}"),
        (options.tasks is not None, _ONLY_WITHOUT, "with --tasks"),
        (core is not None, _NOT_WITH_CORE, f"with --tasks {CORE}"),
    ):
        if given := [name for name in names if are_useless and getattr(options, name) is not None]:
            raise ConfigError(f"--{given[0]} has no effect {how}. Remove it")
    if core is None:
        return
    if options.core_bundle is None:
        raise ConfigError(
            f"--tasks {CORE} needs {FETCH_OPTION} FOLDER. To download the folder, run jaxlm prepare {FETCH_OPTION} FOLDER"
        )
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit: {options.limit} given, must be at least 1")
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch_size: {options.batch_size} given, must be at least 1")


def _core_tasks(tasks: str | None) -> list[str] | None:
    """The tasks of CORE that `--tasks` names, none of them for all; None if it names others."""
    names = [] if tasks is None else tasks.split(",")
    of_core = [name for name in names if name == CORE or name.startswith(f"{CORE}/")]
    if not of_core:
        return None
    if len(of_core) < len(names) or (CORE in names and len(names) > 1):
        raise ConfigError(
            f"--tasks: '{tasks}' given, expected either {CORE}, or {CORE}/TASK,{CORE}/TASK,..., or tasks of"
            " lm-evaluation-harness. Run the command once for each"
        )
    return [name.removeprefix(f"{CORE}/") for name in names if name != CORE]


def evaluate_tasks(options: argparse.Namespace, keys: Mapping[str, Any]) -> None:
    """Runs the tasks, and prints a table and one JSON line."""
    loaded = open_model(options.checkpoint, keys, options.adapter, options.weights)
    if not loaded.model.is_causal:
        raise ConfigError(
            f"--tasks: {loaded.location} has model.use_bidirectional_attention: true, so it makes no predictions of next"
            " tokens, which tasks read. Run `jaxlm evaluate` without --tasks for its bound on the likelihood of text"
        )
    core = _core_tasks(options.tasks)
    if core is None:
        _evaluate_harness(loaded, options)
    else:
        _evaluate_core(loaded, options, core)


def _evaluate_core(loaded: LoadedModel, options: argparse.Namespace, names: list[str]) -> None:
    size = CoreEvalConfig.batch_size if options.batch_size is None else options.batch_size
    config = CoreEvalConfig(bundle=options.core_bundle, tasks=names, max_per_task=options.limit, batch_size=size)
    core = open_core(config, loaded.tokenizer)
    with loaded.plan.layout.use():
        results = core.run(loaded.for_inference(options.quantize), log=lambda line: print(line, file=sys.stderr))
    metrics = core_metrics(results)
    width = max(map(len, results))
    print(f"{'task':<{width}}  {'questions':>9}  {'accuracy':>9}  {'centered':>9}")
    for name, result in results.items():
        print(f"{name:<{width}}  {len(result.correct):>9,}  {result.accuracy:>9.4f}  {result.centered:>9.4f}")
    if CORE in metrics:
        print(f"{'CORE':<{width}}  {'':>9}  {'':>9}  {metrics[CORE]:>9.4f}")
    numbers = {
        name: {"accuracy": result.accuracy, "centered": result.centered, "questions": len(result.correct)}
        for name, result in results.items()
    }
    print(json.dumps({"model": str(loaded.location), CORE: metrics.get(CORE), "tasks": numbers}))


def _evaluate_harness(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """The table and the JSON have standard errors."""
    config = HarnessEvalConfig(
        tasks=options.tasks.split(","),
        task_folder=options.task_folder,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=HarnessEvalConfig.batch_size if options.batch_size is None else options.batch_size,
    )
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
