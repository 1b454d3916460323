"""Variants of a run in one file.

    vars: {steps: 500, seq_len: 2048}
    targets:
      quick: {vars: {steps: 50, seq_len: 512}}
      paper: {}
    entrypoints: {default: paper, q: quick}

The keys of the target override those of the file, as the command line would: sections are merged, lists are replaced, and
`phases.0.num_train_steps` reaches into a list. `entrypoints.default` is used unless the command line names another.
`${name}` (`jaxlm.reading.variables`) has a meaning only in a file that has one of these three keys.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import ConfigError, did_you_mean, listed
from jaxlm.reading.decode import config_error, drop_stale_keys
from jaxlm.reading.overrides import option_tree, override
from jaxlm.reading.variables import VARS, is_option_of_variables, overridden, substituted, unused, variables_of
from jaxlm.reading.yaml import ConfigSource

TARGETS, ENTRYPOINTS, DEFAULT = "targets", "entrypoints", "default"
OPTION = "command line: --target"


@dataclass(frozen=True)
class Selection:
    """What the command line says of the variant to read.

    Attributes:
        target: the name of a target or an entrypoint; None for the default.
        variables: `vars.NAME` -> value.
    """

    target: str | None
    variables: Mapping[str, Any]

    @staticmethod
    def of(target: str | None, options: Mapping[str, Any]) -> "Selection":
        """The selection of a command line. Args: options: its dotted keys."""
        return Selection(target, {name: value for name, value in options.items() if is_option_of_variables(name)})


@dataclass(frozen=True)
class Resolved:
    """A configuration without `vars`, `targets` and `entrypoints`.

    Attributes:
        target: the name of the target that was used; None for a file without one.
        notes: what a user should know about it.
        program: the program whose file it was; None for a configuration of jaxlm.
    """

    source: ConfigSource
    target: str | None
    notes: tuple[str, ...] = ()
    program: str | None = None


def resolve(source: ConfigSource, selection: Selection, kind: type) -> Resolved:
    """Applies a target, and replaces variables by their values.

    Args:
        kind: the dataclass that the file will be decoded to.
    """
    tree = source.tree
    if not {VARS, TARGETS, ENTRYPOINTS} & tree.keys():
        if selection.target is not None:
            raise ConfigError(
                f"{OPTION}: '{selection.target}' given, but the configuration has no {TARGETS}. Remove the option, or add"
                f" `{TARGETS}: {{{selection.target}: {{...}}}}` to the file"
            )
        if selection.variables:
            raise ConfigError(f"command line: --{next(iter(selection.variables))}: the configuration has no {VARS}")
        return Resolved(source, None)
    targets = _targets(source)
    target = entrypoint(source, targets, selection.target)
    over = {} if target is None else targets[target] or {}
    variables = variables_of(tree, source) | variables_of(over, source, (TARGETS, target or "", VARS))
    idle = unused(variables, tree)
    variables = overridden(variables, selection.variables)
    base = {key: value for key, value in tree.items() if key not in (VARS, TARGETS, ENTRYPOINTS)}
    base = {key: substituted(source, (key,), variables) for key in base}
    if target is None:
        return Resolved(ConfigSource(base, source.marks), None, idle)

    path = (TARGETS, target)
    keys = {key: substituted(source, (*path, key), variables) for key in over if key != VARS}
    origin = f"{TARGETS}.{target}."
    dropped = drop_stale_keys(kind, base := copy.deepcopy(base), option_tree(keys, origin))
    notes = [f"target {target} changes a type; these keys are ignored: {', '.join(dropped)}"] if dropped else []
    changed = override(ConfigSource(base, source.marks), keys, origin)
    for place, mark in source.marks.items():
        if place[:2] == path and len(place) > 2:
            first = tuple(int(part) if part.isdecimal() else part for part in str(place[2]).split("."))
            changed.marks[(*first, *place[3:])] = mark
    return Resolved(changed, target, (*idle, *notes))


def entrypoint(source: ConfigSource, targets: Collection[str], wanted: str | None) -> str | None:
    """The target that a name stands for; None if no target is wanted, and none is the default.

    Args:
        targets: names of all targets.
        wanted: the name of a target or an entrypoint; None for the default.
    """
    section = source.tree.get(ENTRYPOINTS)
    if not isinstance(section, dict | None):
        raise config_error(source, (ENTRYPOINTS,), f"{section!r} given, a mapping such as {{default: NAME}} expected")
    aliases = section or {}
    for name, meaning in aliases.items():
        if name in targets and meaning != name:
            raise config_error(
                source,
                (ENTRYPOINTS, name),
                f"'{name}' is a target already. Rename one of the two, or remove the entrypoint",
            )
        _follow(source, name, aliases, targets)  # checks all of them, not only the selected one
    if wanted is None:
        return _follow(source, DEFAULT, aliases, targets) if DEFAULT in aliases else None
    if wanted in targets:
        return wanted
    if wanted in aliases:
        return _follow(source, wanted, aliases, targets)
    raise ConfigError(f"{OPTION}: {_unknown(wanted, [*targets, *aliases])}")


def _follow(source: ConfigSource, name: str, aliases: Mapping[str, Any], targets: Collection[str]) -> str:
    """The target that an entrypoint stands for, which may be another entrypoint."""
    seen = [name]
    while (name := aliases[seen[-1]]) not in targets:
        if name in seen:
            circle = " -> ".join((*seen, name))
            raise config_error(source, (ENTRYPOINTS, seen[0]), f"circular: {circle}. Let one name a target")
        if not isinstance(name, str) or name not in aliases:
            raise config_error(source, (ENTRYPOINTS, seen[-1]), _unknown(name, [*targets, *aliases]))
        seen.append(name)
    return name


def _targets(source: ConfigSource) -> dict[str, Any]:
    section = source.tree.get(TARGETS)
    if not isinstance(section, dict | None):
        raise config_error(source, (TARGETS,), f"{section!r} given, a mapping from names to sections expected")
    for name, keys in (section or {}).items():
        if not isinstance(keys, dict | None):
            raise config_error(source, (TARGETS, name), f"{keys!r} given, a mapping of sections expected")
    return section or {}


def _unknown(name: object, known: Collection[str]) -> str:
    return f"'{name}' is not a target.{did_you_mean(str(name), known)} Known: {listed(sorted(set(known)))}"
