"""The command `jaxlm`, also `python -m jaxlm`: `jaxlm train ...` runs `jaxlm.train`, and so on.

Recipes, and errors in the command line, are printed before jax is imported.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import jaxlm
from jaxlm.core.errors import EXIT_CONFIG, ConfigError, end_at_interrupt, end_of_output
from jaxlm.core.redaction import command_line
from jaxlm.reading.overrides import parse_arguments
from jaxlm.reading.recipes import recipes_command

COMMANDS = {
    "train": "trains what a YAML file describes, and resumes a run that was stopped",
    "sample": "continues prompts with the model of a checkpoint or a Hugging Face folder",
    "chat": "chats with such a model through its chat template",
    "evaluate": "measures loss and bits per byte on any text, by source, or runs tasks of lm-evaluation-harness",
    "tables": "writes tables and pictures of a run's model beside its references, for a paper",
    "convert": "writes a checkpoint as a folder for transformers, vLLM or PEFT, or a manifest as a configuration",
    "prepare": "tokenizes data ahead of training, and describes the token caches",
    "report": "writes an HTML page with the curves, samples and settings of one or several runs",
    "scaling": "trains several depths with several budgets, and fits a scaling law",
    "bench": "measures the training step, or forecasts it for machines you do not have",
}
RECIPES = "recipes"
REPORT = "report"  # reads files alone


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    command, *rest = (command_line() if arguments is None else arguments) or ["--help"]
    try:
        code = _answer(command, rest)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError as error:  # `jaxlm train --help | head`
        return end_of_output(error)
    return _run(command, rest) if code is None else code


def _answer(command: str, arguments: Sequence[str]) -> int | None:
    """Does what needs no module of a command, and returns the exit code; None if the module has to run."""
    if command in ("--help", "-h", "help"):
        print(_overview())
    elif command == "--version":
        print(f"jaxlm {jaxlm.__version__}")
    elif command == RECIPES:
        return recipes_command(arguments)
    elif command == REPORT:
        return importlib.import_module("jaxlm.commands.report").main(arguments)
    elif command not in COMMANDS:
        raise ConfigError(_unknown(command))
    elif command == "train" and (topic := parse_arguments(arguments).help) is not None:
        print(_help(topic))
    else:
        return None
    return 0


def _help(topic: str) -> str:
    from jaxlm.core.imports import gc_paused

    with gc_paused():
        from jaxlm.plan.load_config import help_of

        return help_of("jaxlm train", topic)


def _run(command: str, arguments: Sequence[str]) -> int:
    end_at_interrupt()  # before the imports, which take seconds
    from jaxlm.core.imports import gc_paused

    # As `python -m` does: your own classes may be in this folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with gc_paused():
        module = importlib.import_module("jaxlm.train" if command == "train" else f"jaxlm.commands.{command}")
    return module.main(arguments)


def _overview() -> str:
    lines = [f"jaxlm {jaxlm.__version__}", "", "usage: jaxlm COMMAND [options]", ""]
    commands = {**COMMANDS, RECIPES: "lists the configurations that ship with jaxlm, and copies them"}
    lines += [f"  {name:10} {meaning}" for name, meaning in commands.items()]
    lines += ["", "`jaxlm COMMAND --help` lists options. First run: jaxlm train --config_path jaxlm:quickstart.yaml"]
    return "\n".join(lines)


def _unknown(command: str) -> str:
    near = difflib.get_close_matches(command, [*COMMANDS, RECIPES], n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"'{command}' is not a command.{hint} Commands: {', '.join([*COMMANDS, RECIPES])}"


if __name__ == "__main__":
    sys.exit(main())
