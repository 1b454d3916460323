"""Reading a configuration: a YAML file and a command line into a `RunConfig`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxlm.config.decode import decode, drop_stale_keys
from jaxlm.config.overrides import help_text, option_tree, override, parse_arguments
from jaxlm.config.plugins import load_installed_plugins
from jaxlm.config.run import RunConfig
from jaxlm.config.schema import sections
from jaxlm.config.yaml import ConfigSource, load_yaml, merge
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.model_section import with_hf_model
from jaxlm.interop.levanter.config import from_levanter
from jaxlm.interop.peft.section import with_peft_keys

R = TypeVar("R", bound=RunConfig)


def as_run_config(config: RunConfig) -> RunConfig:
    """Without the keys that a program of one's own added: what every command can read again."""
    return RunConfig(**{item.name: getattr(config, item.name) for item in fields(RunConfig)})


def load_config(arguments: Sequence[str], command: str, kind: type[R] = RunConfig) -> R:
    """Reads a command line: the file that it names, and what it overrides.

    Args:
        command: for the help text, as in `python -m command`.
        kind: `RunConfig`, or a dataclass that extends it by keys of its own program.

    Raises:
        ConfigError: the first mistake in either.
        SystemExit: `--help` was asked for, and printed.
    """
    load_installed_plugins()
    parsed = parse_arguments(arguments)
    if parsed.help is not None:
        print(help_text(sections(kind), f"python -m {command}", parsed.help))
        raise SystemExit(0)
    if parsed.config_path is None and not parsed.options:
        raise ConfigError(
            "no configuration is given. --config_path run.yaml reads a file (jaxlm:quickstart.yaml, which ships with jaxlm,"
            " trains on text that every Python has), --section.key value sets one key, and --help lists all keys"
        )
    source = ConfigSource({}) if parsed.config_path is None else load_yaml(parsed.config_path)
    dropped = drop_stale_keys(kind, source.tree, option_tree(parsed.options))
    if dropped:
        print(f"note: the command line changes a type; of the file's keys, these do not apply: {', '.join(dropped)}")
    source, notes = from_levanter(override(source, parsed.options))
    for note in notes:
        print(f"note: {note}")
    stem = None if parsed.config_path is None else Path(parsed.config_path).stem
    return decode_run(source, stem, kind)


def refuse_dry_run(config: RunConfig, because: str) -> None:
    """Raises `ConfigError` where a command that is no training is to be a dry run. Args: because: what it does."""
    if config.dry_run:
        raise ConfigError(
            f"dry_run: true has no effect here: {because}. Leave it out; `python -m jaxlm.train --dry_run true` shows the"
            " plan and the memory"
        )


def read_config(path: Path) -> RunConfig:
    """The configuration in a file, without a command line."""
    return decode_run(from_levanter(load_yaml(path))[0], path.stem)


def decode_run(source: ConfigSource, name: str | None, kind: type[R] = RunConfig) -> R:
    """A run from a tree: phases take what they leave out from the top level, and the run its id where it has none: from
    the environment's RUN_ID, a tracker's `id`, or `name`."""
    load_installed_plugins()
    tree = with_hf_model(_with_inherited(source.tree))
    config = decode(kind, ConfigSource(tree, source.marks))
    filled = with_peft_keys(tree, config.model)
    if filled is not tree:
        config = decode(kind, ConfigSource(filled, source.marks))
    name = _name_elsewhere(config) or name
    if config.trainer.id is None and name is not None:
        config = replace(config, trainer=replace(config.trainer, id=name))
    return config


def _name_elsewhere(config: RunConfig) -> str | None:
    """A run's name from the environment, or from the first tracker that gives it one."""
    given = (getattr(tracker, "id", None) for tracker in config.trainer.trackers)
    return os.environ.get("RUN_ID") or next((name for name in given if name), None)


def _with_inherited(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with every phase's sections laid over the run's own."""
    phases = tree.get("phases")
    if not isinstance(phases, list):
        return dict(tree)
    return {**tree, "phases": [_phase_with_inherited(tree, p) if isinstance(p, dict) else p for p in phases]}


def _phase_with_inherited(tree: Mapping[str, Any], phase: Mapping[str, Any]) -> dict[str, Any]:
    full = dict(phase)
    for section in ("data", "objective", "optimizer"):
        own, shared = phase.get(section), tree.get(section, {})
        if isinstance(own, dict) and isinstance(shared, dict):
            # Another type shares no keys that could be meant.
            same_type = own.get("type", shared.get("type")) == shared.get("type")
            full[section] = merge(shared, own) if same_type else own
    return full


def run_id_of(config: RunConfig) -> str:
    """The run's name: `trainer.id`, which `decode_run` has filled in, or `run`."""
    name = config.trainer.id or "run"
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"trainer.id: '{name}' cannot name a folder")
    return name
