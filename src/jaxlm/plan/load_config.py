"""Loads a `RunConfig` from a YAML file and the command line."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxlm.core.distributed import DistributedConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import redacted, remember_secrets, without_secrets
from jaxlm.interop.pretrained import with_hf_model
from jaxlm.plan.presets.base import with_preset
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import load_installed_plugins
from jaxlm.reading.decode import decode, drop_stale_keys
from jaxlm.reading.foreign import ForeignConfig, foreign_config, with_our_keys
from jaxlm.reading.overrides import OPTION, Arguments, help_text, option_tree, override, parse_arguments
from jaxlm.reading.recipes import config_file
from jaxlm.reading.schema import sections
from jaxlm.reading.targets import ENTRYPOINTS, TARGETS, VARS, Resolved, Selection, is_option_of_variables, resolve
from jaxlm.reading.yaml import ConfigSource, load_yaml, parse_value

R = TypeVar("R", bound=RunConfig)
_FOLLOWING = ("callbacks", "tracker")  # keys of `trainer` that only look at a run while it trains
_OF_ALL_PHASES = ("tokenizer", "vocab_size", "added_tokens")  # keys of `data` that must be the same in all phases


def as_run_config(config: RunConfig) -> RunConfig:
    """Drops the keys that a user program added in a subclass, so that every command can read the result."""
    return RunConfig(**{item.name: getattr(config, item.name) for item in fields(RunConfig)})


def load_config(arguments: Sequence[str], command: str, kind: type[R] = RunConfig) -> R:
    """Loads the configuration file given on the command line and applies the overrides.

    Args:
        command: module name to show in the help text, as in `python -m command`.
        kind: `RunConfig`, or a subclass with additional keys of a user program.

    Raises:
        SystemExit: `--help` was given and the help text was printed.
    """
    return decode_run(*load_source(arguments, command, kind), kind)


def load_source(arguments: Sequence[str], command: str, kind: type[RunConfig]) -> tuple[ConfigSource, str | None]:
    """The configuration file given on the command line with the overrides, undecoded, and its name without suffix.

    Raises:
        SystemExit: `--help` was given and the help text was printed.
    """
    load_installed_plugins()
    parsed = parse_arguments(arguments)
    if parsed.help is not None:
        print(help_of(f"python -m {command}", parsed.help, kind))
        raise SystemExit(0)
    if parsed.config_path is None and not parsed.options:
        raise ConfigError(
            "no configuration given. Pass --config_path run.yaml to read a file (jaxlm:quickstart.yaml ships with jaxlm and"
            " trains on text included with Python), or --section.key value to set one key. --help lists them"
        )
    if "quantize" in parsed.options:
        raise ConfigError(
            "command line: --quantize: quantized weights cannot be trained. Remove it here, and use it with jaxlm sample,"
            " chat or evaluate"
        )
    return _overridden(parsed, kind, OPTION)


def _overridden(arguments: Arguments, kind: type[RunConfig], origin: str) -> tuple[ConfigSource, str | None]:
    """Returns what `load_source` returns. Args: origin: what messages write before the name of an option."""
    file = read_file(arguments, kind)
    options = {key: value for key, value in arguments.options.items() if not is_option_of_variables(key)}
    dropped = drop_stale_keys(kind, file.source.tree, option_tree(options, origin))
    if dropped:
        print(f"note: a type is changed; these keys of the file are ignored: {', '.join(dropped)}")
    source, notes = with_our_keys(override(file.source, options, origin))
    for note in (*file.notes, *notes):
        print(f"note: {note}")
    return source, None if arguments.config_path is None else _name_of(arguments.config_path, file.target)


def read_file(arguments: Arguments, kind: type[RunConfig]) -> Resolved:
    """The configuration file of a command line as jaxlm's sections, before the overrides, with the target that it names."""
    selection = Selection.of(arguments.target, arguments.options)
    if arguments.config_path is None:
        return resolve(ConfigSource({}), selection, kind)
    root = None if arguments.config_root is None else Path(arguments.config_root)
    return _resolved(load_yaml(arguments.config_path, root), selection, kind)


def foreign_as_yaml(arguments: Arguments, program: str) -> str:
    """A file of another program as a configuration of jaxlm, without secrets. Comments say what has no effect.

    Args:
        program: a type of `ForeignConfig`.

    Raises:
        ConfigError: the file is not one of that program.
    """
    file = read_file(arguments, RunConfig)
    if file.program != program:
        raise ConfigError(f"{arguments.config_path}: this is not {ForeignConfig.get_choice_class(program).meaning}")
    target = "" if file.target is None else f"target {file.target} of "
    notes = [f"# {redacted(note)}\n" for note in (f"{target}{arguments.config_path}, of {program}", *file.notes)]
    return "".join(notes) + yaml.safe_dump(without_secrets(file.source.tree), sort_keys=False, width=100)


def _resolved(source: ConfigSource, selection: Selection, kind: type[RunConfig]) -> Resolved:
    remember_secrets(source.tree)
    program = foreign_config(source, {VARS, TARGETS, ENTRYPOINTS, *(field.name for field in fields(kind))})
    return resolve(source, selection, kind) if program is None else program.translate(source, selection)


def _name_of(path: Path | str, target: str | None) -> str:
    """Names a run: each target of a file has its own logs and checkpoints."""
    stem = config_file(path).stem
    return stem if target is None else f"{stem}-{target}"


def help_of(command: str, topic: str, kind: type[RunConfig] = RunConfig) -> str:
    """The help text of a command, on a section or key; on "", on all."""
    load_installed_plugins()  # their keys are listed too
    return help_text(sections(kind), command, topic)


def given_distributed(arguments: Sequence[str]) -> DistributedConfig:
    """Tells how the run's processes connect, as far as can be told although the command line or the file is wrong."""
    options: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, text = argument.partition("=")
        options[name.removeprefix("--")] = text if equals else following
    prefix, tree = "trainer.distributed.", {}
    with contextlib.suppress(ConfigError):
        path, root = options.get("config_path", options.get("config", "")), options.get("config_root")
        given = Arguments(
            path,
            options.get("target"),
            root,
            {n: parse_value(t) for n, t in options.items() if is_option_of_variables(n)},
        )
        section = read_file(given, RunConfig).source.tree.get("trainer")
        tree = dict(section.get("distributed") or {}) if isinstance(section, dict) else {}
    tree |= {name.removeprefix(prefix): parse_value(text) for name, text in options.items() if name.startswith(prefix)}
    return decode(DistributedConfig, ConfigSource(tree))


def refuse_dry_run(config: RunConfig, reason: str) -> None:
    """Raises `ConfigError` if `dry_run` is set for a command that does not train, but does what `reason` says."""
    if config.dry_run:
        raise ConfigError(
            f"dry_run: true has no effect here: {reason}. Remove it. To print the plan and the memory use, run"
            " `jaxlm train --dry_run true`"
        )


def read_config(path: Path | str, keys: Mapping[str, Any] | None = None) -> RunConfig:
    """See `jaxlm.read_config`."""
    load_installed_plugins()
    return decode_run(*_overridden(Arguments(str(path), options=dict(keys or {})), RunConfig, "keys: "))


def read_saved(path: Path, overrides: Mapping[str, Any] | None = None, origin: str = OPTION) -> RunConfig:
    """The configuration that a run saved, for those who only read its model: without the classes that followed its training,
    which may be of a module that this machine does not have.

    Args:
        overrides: dotted key -> value.
        origin: what messages write before the name of an overridden key.
    """
    load_installed_plugins()
    options, saved = dict(overrides or {}), load_yaml(path)
    drop_stale_keys(RunConfig, saved.tree, option_tree(options, origin))
    source = override(saved, options, origin)
    trainer = {key: value for key, value in source.tree.get("trainer", {}).items() if key not in _FOLLOWING}
    return decode_run(ConfigSource({**source.tree, "trainer": trainer}, source.marks), None)


def decode_run(source: ConfigSource, name: str | None, kind: type[R] = RunConfig) -> R:
    """Decodes a run. A preset fills in its keys; phases inherit missing sections and keys from the top level.

    If `trainer.id` is null, it is set from the environment variable RUN_ID, a tracker's `id`, or `name`.
    """
    load_installed_plugins()
    remember_secrets(source.tree)
    source = with_preset(source)
    tree = with_hf_model(_inherit_sections(source.tree))
    config = decode(kind, ConfigSource(tree, source.marks))
    config = _with_surgery_keys(config, tree)
    tracker_ids = (getattr(tracker, "id", None) for tracker in config.trainer.trackers)
    name = os.environ.get("RUN_ID") or next(filter(None, tracker_ids), name)
    if config.trainer.id is None and name is not None:
        config = replace(config, trainer=replace(config.trainer, id=name))
    return config


def _with_surgery_keys(config: R, tree: Mapping[str, Any]) -> R:
    """The configuration with the keys that its surgeries read from files or derive from the model."""
    if not config.phases:
        return config

    model, phases = config.model, []
    for phase, written in zip(config.phases, tree["phases"], strict=True):
        surgeries = []
        for surgery, section in zip(phase.surgery, written.get("surgery", []), strict=True):
            surgeries.append(replace(surgery, **surgery.keys_from_files(section, model)))
            model = surgeries[-1].changed(model)
        phases.append(replace(phase, surgery=surgeries))
    return replace(config, phases=phases)


def _inherit_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Merges each phase's sections over the sections at the top level."""
    phases = tree.get("phases")
    if not isinstance(phases, list):
        return dict(tree)
    return {**tree, "phases": [_inherit_into_phase(tree, p) if isinstance(p, dict) else p for p in phases]}


def _inherit_into_phase(tree: Mapping[str, Any], phase: Mapping[str, Any]) -> dict[str, Any]:
    full = dict(phase)
    for section in ("data", "objective", "optimizer"):
        phase_section, shared = phase.get(section), tree.get(section, {})
        if isinstance(phase_section, dict) and isinstance(shared, dict):
            full[section] = _inherit_keys(shared, phase_section)
            if section == "data":  # also for another kind of data: no other values are valid there
                full[section] = {**{key: shared[key] for key in _OF_ALL_PHASES if key in shared}, **full[section]}
    return full


def _inherit_keys(shared: Mapping[str, Any], section: Mapping[str, Any], *, inside: bool = False) -> dict[str, Any]:
    """A section over one that it inherits from. Keys of one type mean nothing to another type.

    Args:
        inside: the section is inside of another. Only two types that are both named then differ for certain.
    """
    before, after = shared.get("type"), section.get("type", shared.get("type"))
    if before != after and not (inside and before is None):
        return dict(section)
    both = {key for key, value in section.items() if isinstance(value, dict) and isinstance(shared.get(key), dict)}
    return {**shared, **section, **{key: _inherit_keys(shared[key], section[key], inside=True) for key in both}}


def run_id_of(config: RunConfig) -> str:
    """The run's id: `trainer.id`, which `decode_run` fills in, or `run`."""
    name = config.trainer.id or "run"
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"trainer.id: '{name}' given, which is not a valid folder name")
    return name
