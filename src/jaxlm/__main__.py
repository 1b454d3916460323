"""The command `jaxlm`, also `python -m jaxlm`: `jaxlm train ...` runs `jaxlm.train`, and so on.

Recipes, and errors in the command line, are printed before jax is imported.
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxlm
from jaxlm.core.distributed import detect_launcher
from jaxlm.core.errors import EXIT_CONFIG, ConfigError, did_you_mean, end_at_interrupt, end_of_output
from jaxlm.core.redaction import command_line
from jaxlm.reading.choices import ENTRY_POINTS
from jaxlm.reading.decode import unknown_key
from jaxlm.reading.foreign import foreign_config
from jaxlm.reading.outline import unknown_keys
from jaxlm.reading.overrides import Arguments, override, parse_arguments
from jaxlm.reading.recipes import recipes_command
from jaxlm.reading.targets import ENTRYPOINTS, TARGETS, VARS
from jaxlm.reading.yaml import ConfigSource, load_yaml

_TRAIN: tuple[str, str] = ("jaxlm.train", "trains what a YAML file describes, and resumes a run that was stopped")
RECIPES = "recipes"
REPORT = "report"  # reads files alone


@functools.cache
def commands() -> dict[str, tuple[str, str]]:
    """Command -> its module, and what it does: the first line of the module, which is a file in a folder `commands`."""
    package = Path(jaxlm.__file__).parent
    found = {"train": _TRAIN}
    for file in sorted([*package.glob("commands/[a-z]*.py"), *package.glob("systems/*/commands/[a-z]*.py")]):
        with file.open(encoding="utf-8") as source:
            meaning = source.readline().strip().strip('"').rstrip(".")
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        found[file.stem] = (module, meaning[0].lower() + meaning[1:])
    return found


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
    code = _run(command, rest) if code is None else code
    if arguments is None:  # the interpreter ends next
        end_at_interrupt()
    return code


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
    elif command not in commands():
        known = [*commands(), RECIPES]
        raise ConfigError(f"'{command}' is not a command.{did_you_mean(command, known)} Commands: {', '.join(known)}")
    elif command == "train" and (parsed := parse_arguments(arguments)).help is not None:
        print(_help(parsed.help))
    else:
        if command == "train":
            _check_keys(parsed)
        return None
    return 0


def _check_keys(arguments: Arguments) -> None:
    """Raises `ConfigError` for a misspelled key of a run in jaxlm's own format, before jax is imported.

    A process of several first connects to the others, to say what is wrong.
    """
    path, root = arguments.config_path or "", None if arguments.config_root is None else Path(arguments.config_root)
    is_one_of_several = detect_launcher(os.environ) or any("distributed" in name for name in arguments.options)
    if is_one_of_several or "://" in path or importlib.metadata.entry_points(group=ENTRY_POINTS):
        return
    source = override(load_yaml(path, root) if path else ConfigSource({}), arguments.options)
    tree, trainer = source.tree, source.tree.get("trainer")
    if isinstance(trainer, dict) and "distributed" in trainer:
        return
    if foreign_config(source, own=()) is not None or tree.keys() & {VARS, TARGETS, ENTRYPOINTS}:
        return
    for place, allowed in unknown_keys(tree):
        raise unknown_key(source, place, None, allowed, is_run=True)


def _help(topic: str) -> str:
    from jaxlm.core.imports import gc_paused

    with gc_paused():
        from jaxlm.plan.load_config import help_of

        return help_of("jaxlm train", topic)


def _run(command: str, arguments: Sequence[str]) -> int:
    end_at_interrupt()  # before the imports, which take seconds
    try:
        from jaxlm.core.imports import gc_paused
    except Exception as error:  # jax reads the environment, and compares its versions, when it is imported
        given = (
            " ".join(f"{name}={value}" for name, value in os.environ.items() if name.startswith("JAX_"))
            or "none is set"
        )
        print(f"error: jax cannot be imported: {error}. Correct its variables ({given}), or reinstall", file=sys.stderr)
        return EXIT_CONFIG
    # As `python -m` does: your own classes may be in this folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with gc_paused():
        module = importlib.import_module(commands()[command][0])
    return module.main(arguments)


def _overview() -> str:
    lines = [f"jaxlm {jaxlm.__version__}", "", "usage: jaxlm COMMAND [options]", ""]
    meanings = {name: meaning for name, (_, meaning) in commands().items()}
    meanings[RECIPES] = "lists the configurations that ship with jaxlm, and copies them"
    lines += [f"  {name:10} {meaning}" for name, meaning in meanings.items()]
    lines += ["", "`jaxlm COMMAND --help` lists options. First run: jaxlm train --config_path jaxlm:quickstart.yaml"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
