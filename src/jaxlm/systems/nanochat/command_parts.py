"""What nanochat's system adds to commands: the tasks of CORE (`prepare`, `evaluate`), and its checkpoints (`convert`)."""

import json
import sys
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.reading.choices import choice
from jaxlm.session.command_parts import CommandPart
from jaxlm.session.export import check_new_folder, output_folder
from jaxlm.session.harness_tasks import check_task_options, refuse_given
from jaxlm.session.load_model import add_checkpoint_options, open_model
from jaxlm.surgery.base import merge_surgeries
from jaxlm.systems.nanochat.core_bundle import FETCH_OPTION, FILES_OPTION, FILES_URL, build_bundle, fetch_bundle
from jaxlm.systems.nanochat.core_eval import CORE, CoreEvalConfig, core_metrics, open_core
from jaxlm.systems.nanochat.torch_checkpoint import save_nanochat

_TO_NANOCHAT = "to-nanochat"


@choice(CommandPart, "prepare core")
class PrepareCore(CommandPart):
    """`jaxlm prepare --core_bundle`."""

    def add_options(self, parser: Any) -> None:
        parser.add_argument(
            FETCH_OPTION, metavar="FOLDER", help="first download the tasks of the evaluation `core` (160 MB) there"
        )
        parser.add_argument(
            FILES_OPTION,
            metavar="FOLDER",
            help=f"with {FETCH_OPTION}: copy the tasks from this clone of {FILES_URL} instead of downloading them",
        )

    def run(self, options: Any, rest: Any) -> int | None:
        if options.core_files is not None and options.core_bundle is None:
            raise ConfigError(f"{FILES_OPTION} has no effect without {FETCH_OPTION} FOLDER. Add the folder to write to")
        if options.core_bundle is None:
            return None
        if options.core_files is None:
            fetch_bundle(options.core_bundle, print)
        else:
            build_bundle(options.core_bundle, options.core_files, print)
        return None if rest or options.show_batch is not None else 0


@choice(CommandPart, "evaluate core")
class EvaluateCore(CommandPart):
    """`jaxlm evaluate --tasks core`."""

    def add_options(self, parser: Any) -> None:
        parser.add_argument(
            FETCH_OPTION, help=f"with --tasks {CORE}, or {CORE}/TASK,... for some of its tasks: their folder"
        )

    def run(self, options: Any, rest: Any) -> int | None:
        names = [] if options.tasks is None else options.tasks.split(",")
        of_core = [name for name in names if name == CORE or name.startswith(f"{CORE}/")]
        if not of_core:
            refuse_given(options, (FETCH_OPTION.removeprefix("--"),), f"without --tasks {CORE}")
            return None
        if len(of_core) < len(names) or (CORE in names and len(names) > 1):
            raise ConfigError(
                f"--tasks: '{options.tasks}' given, expected either {CORE}, or {CORE}/TASK,{CORE}/TASK,..., or tasks of"
                " lm-evaluation-harness. Run the command once for each"
            )
        check_task_options(options)
        refuse_given(options, ("task_folder", "num_fewshot"), f"with --tasks {CORE}")
        if options.core_bundle is None:
            raise ConfigError(
                f"--tasks {CORE} needs {FETCH_OPTION} FOLDER. To download the folder, run jaxlm prepare {FETCH_OPTION} FOLDER"
            )
        for name in ("limit", "batch_size"):
            if (given := getattr(options, name)) is not None and given < 1:
                raise ConfigError(f"--{name}: {given} given, must be at least 1")
        _evaluate_core(options, rest, [name.removeprefix(f"{CORE}/") for name in names if name != CORE])
        return 0


def _evaluate_core(options: Any, keys: Any, names: list[str]) -> None:
    loaded = open_model(options.checkpoint, keys, options.adapter, options.weights)
    loaded.check_predicts_next_tokens("--tasks")
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


@choice(CommandPart, "convert nanochat")
class ToNanochat(CommandPart):
    """`jaxlm convert to-nanochat`."""

    def add_options(self, parser: Any) -> None:
        direction = parser.add_parser(_TO_NANOCHAT, help="write model_STEP.pt and meta_STEP.json for nanochat")
        add_checkpoint_options(direction)
        direction.add_argument("--output_dir", required=True, help="folder to create; it must not exist")

    def run(self, options: Any, rest: Any) -> int | None:
        if options.direction != _TO_NANOCHAT:
            return None
        folder = output_folder(options.output_dir)
        if isinstance(folder, str):
            raise ConfigError(f"--output_dir: {folder} is a URL. Write a local folder, and copy it there")
        check_new_folder(folder, "")
        opened = open_model(options.checkpoint, {}, None, options.weights)
        plan, step = opened.plan, opened.step or 0
        with plan.layout.use():
            model = merge_surgeries(opened.load(), opened.surgeries)
            save_nanochat(folder, model, opened.model, plan.layout, step=step)
        print(f"wrote {opened.location} to {folder}")
        return 0
