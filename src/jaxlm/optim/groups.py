"""Assigns every trainable parameter to one optimizer (parameter groups), and combines the optimizers into one.

optimizer.groups, first match wins -> group_0, group_1, ..., rest; each split by update rule and weight decay

An objective may slow down, or stop, the updates of single layers (`paced`; `Pace` in `core/guards.py`).
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import NOWCAST
from jaxlm.core.pace import Pace
from jaxlm.core.parameters import UpdateRule, described, split_by_rule
from jaxlm.optim.base import OptimizerConfig, ParameterGroup, clip_by_norm
from jaxlm.optim.curvature import Curvature
from jaxlm.optim.matrices import matrix_paths
from jaxlm.optim.schedules import Schedule, ScheduledMomentum
from jaxlm.optim.stored_state import Full, check_applies
from jaxlm.reading.decode import encode


def paced(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which reads the extra argument `pace`. Without one, it is unchanged."""

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, pace: Pace | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        if pace is None:
            return optimizer.update(updates, state, params, **extra)
        before = state
        if pace.position is not None:
            is_new = pace.position == 0
            state = jax.tree.map(lambda new, old: jnp.where(is_new, new, old), optimizer.init(params), state)
        moved, after = optimizer.update(updates, state, params, **extra)
        scaled = _by_layer(pace.factors, lambda f, x: jnp.where(f > 0, x * f, 0).astype(x.dtype), moved)
        return scaled, _by_layer(pace.factors, lambda f, new, old: jnp.where(f > 0, new, old), after, before)

    return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _by_layer(factors: Mapping[str, jax.Array], combine: Callable[..., jax.Array], tree_: Any, *others: Any) -> Any:
    """Combines each leaf that belongs to a parameter with the factors of its layers, and with the leaves of other trees with
    its path. Leaves of no parameter, such as counts, stay as they are.
    """
    other_leaves = [dict(tree.leaves(other)) for other in others]

    def combined(path: str, leaf: Any) -> Any:
        # The state of a parameter is under its path, which may have a prefix and a suffix.
        factor = next((factor for name, factor in factors.items() if f".{name}." in f".{path}."), None)
        if factor is None:
            return leaf
        arrays = [tree.raw(other[path]) for other in other_leaves]
        if not tree.is_named(leaf):  # of a function that has been vectorized over layers
            assert leaf.shape[:1] == factor.shape, f"{path}: {leaf.shape} has no axis of layers"
            return combine(factor.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, *arrays)
        shape = [-1 if axis.name == LAYERS else 1 for axis in leaf.axes]
        return NamedArray(combine(factor.reshape(shape), leaf.array, *arrays), leaf.axes)

    return tree.map_leaves(combined, tree_)


# Their counts are read by schedules only; the counts of other states correct biases.
SCHEDULE_STATES = (optax.ScaleByScheduleState, ScheduledMomentum)
# These act on all parameters together, so that an entry of `groups` cannot have its own.
_GLOBAL_KEYS = {
    "max_grad_norm": "gradients are clipped by the norm of all parameters together",
    "adagc": "the warmup of AdaGC clips the norm of all parameters together",
    "skip_bad_steps": "a step is skipped for all parameters together",
    "telemetry": "it measures all parameters together",
}


def parameter_groups(trainable: Any, config: OptimizerConfig) -> list[ParameterGroup]:
    """Assigns every trainable leaf to exactly one group.

    Groups are split by the optimizer that owns them, by whether parameters decay and, if the optimizer treats matrices
    separately, by whether they are matrices. Parameters with a rule of their own are in groups of their own.
    """
    _check(config)
    trainable, own = split_by_rule(trainable)
    leaves, sizes = dict(tree.leaves(trainable)), tree.sizes(trainable)
    owners = _owners(config, list(leaves), [path for path, _ in tree.leaves(own)])
    separates = any(optimizer.separates_matrices for _, optimizer in _optimizers(config))
    matrices = matrix_paths(trainable) if separates else frozenset()
    by_default = {path for path, parameter in described(trainable).items() if parameter.decays}
    groups = []
    for owner, optimizer in _optimizers(config):
        owned_leaves = {path: leaf for path, leaf in leaves.items() if owners[path] == owner}
        # Patterns that an entry takes from the outer optimizer need not match its own parameters.
        has_patterns = optimizer.weight_decay_modules != config.weight_decay_modules
        with _errors_of(owner):
            decays = _decay_rule(optimizer, list(owned_leaves if has_patterns else leaves), by_default)
            if owner is not None:
                _check_decay(optimizer, config, [path for path in owned_leaves if decays(path)])
        members: dict[tuple[bool, bool], list[str]] = {}
        for path in owned_leaves:
            as_matrix = optimizer.separates_matrices and path in matrices
            members.setdefault((as_matrix, decays(path)), []).append(path)
        groups += [
            ParameterGroup(
                name=_group_name(config, owner, as_matrices, decaying),
                paths=tuple(paths),
                num_parameters=sum(sizes[path] for path in paths),
                weight_decay=optimizer.weight_decay if decaying else 0.0,
                as_matrices=as_matrices,
                owner=owner,
            )
            for (as_matrices, decaying), paths in sorted(members.items(), reverse=True)
        ]
    assert sorted(p for g in groups for p in g.paths) == sorted(leaves)
    return groups + _groups_by_rule(own)


def _groups_by_rule(own: Any) -> list[ParameterGroup]:
    known, sizes = described(own), tree.sizes(own)
    members: dict[UpdateRule, list[str]] = {}
    for path, parameter in known.items():
        assert parameter.rule is not None
        members.setdefault(parameter.rule, []).append(path)
    return [
        ParameterGroup(f"own rule: {rule}", tuple(paths), sum(sizes[path] for path in paths), 0.0, rule=rule)
        for rule, paths in members.items()
    ]


def build_optimizer(
    config: OptimizerConfig, groups: Sequence[ParameterGroup], num_steps: int
) -> optax.GradientTransformationExtraArgs:
    """The gradient transformation of a phase of `num_steps` steps, for the groups of `parameter_groups`.

    With `OptimizerConfig.groups`, it clips the norm of the whole gradient, and each optimizer then updates its own groups.
    """
    rules = {path: group.rule for group in groups if group.rule is not None for path in group.paths}
    groups = [group for group in groups if group.rule is None]
    optimizer = _without_adagc(config, groups, num_steps)
    if config.adagc is not None:
        optimizer = optax.with_extra_args_support(optax.chain(config.adagc.build(), optimizer))
    return _in_sum_dtypes(paced(_beside_rules(_checked(optimizer, config), rules)))


def _beside_rules(
    optimizer: optax.GradientTransformationExtraArgs, rules: Mapping[str, UpdateRule]
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which never sees the parameters at these paths; they move by their rules, which keep no state."""
    if not rules:
        return optimizer
    others = lambda params: tree.map_leaves(lambda path, leaf: None if path in rules else leaf, params)  # noqa: E731
    own = lambda params: tree.map_leaves(lambda path, leaf: leaf if path in rules else None, params)  # noqa: E731

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, curvature: Curvature | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        within = None if curvature is None else curvature.within(own(params))
        moved, after = optimizer.update(others(updates), state, others(params), curvature=within, **extra)
        ruled = tree.map_leaves(lambda path, leaf: rules[path].update(leaf), own(updates))
        return eqx.combine(moved, ruled, is_leaf=tree.is_named), after

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(others(params)), update_fn)


def _in_sum_dtypes(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which computes, and keeps its state, in the dtypes of sums, whatever the dtypes of the parameters.

    In bfloat16, a decay rate of 0.999 would be 1, and a learning rate one of 128 values between two powers of 2.
    """

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return optimizer.update(tree.widened(updates), state, tree.widened(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(tree.widened(params)), update_fn)


def _without_adagc(
    config: OptimizerConfig, groups: Sequence[ParameterGroup], num_steps: int
) -> optax.GradientTransformationExtraArgs:
    if not config.groups:
        return config.state.stored(_with_controls(config.build(groups, num_steps), config, "optimizer"))
    members = {}
    for owner, optimizer in _optimizers(config):
        owned_groups = [group for group in groups if group.owner == owner]
        if owned_groups:
            with _errors_of(owner):
                # The norm of the whole gradient is clipped before.
                clips = {"max_grad_norm"} & {field.name for field in dataclasses.fields(optimizer)}
                member = dataclasses.replace(optimizer, groups=[], **dict.fromkeys(clips))
                transformation = member.build(owned_groups, num_steps)
            path = "optimizer" if owner is None else f"optimizer.groups.{owner}"
            paths = frozenset(leaf for group in owned_groups for leaf in group.paths)
            stored = optimizer.state.stored(_with_controls(transformation, optimizer, path))
            members["rest" if owner is None else f"group_{owner}"] = _Member(paths, stored)
    clip = clip_by_norm(getattr(config, "max_grad_norm", None))
    return optax.with_extra_args_support(optax.chain(clip, _update_each(members)))


def with_schedules_restarted(opt_state: Any) -> Any:
    """The optimizer state with all schedules at their first step."""
    is_position = lambda node: isinstance(node, SCHEDULE_STATES)  # noqa: E731
    restarted = lambda node: node._replace(count=jnp.zeros_like(node.count)) if is_position(node) else node  # noqa: E731
    return jax.tree.map(restarted, opt_state, is_leaf=is_position)


def group_schedules(config: OptimizerConfig, num_steps: int) -> dict[str, Schedule]:
    """The learning rate of each entry of `groups`, by the entry's name."""
    schedules = {}
    for owner, name in enumerate(group_names(config)):
        with _errors_of(owner):
            schedules[name] = config.groups[owner].schedule(num_steps)
    return schedules


def group_names(config: OptimizerConfig) -> list[str]:
    """A name for each entry of `groups`: its regular expression as a word, which is unique."""
    names: list[str] = []
    for number, group in enumerate(config.groups):
        name = re.sub(r"\W+", "_", group.match or "").strip("_") or f"group_{number}"
        names.append(f"{name}_{number}" if name in names else name)
    return names


@dataclass(frozen=True)
class _Member:
    """An optimizer and the paths of the parameters that it updates."""

    paths: frozenset[str]
    transformation: optax.GradientTransformationExtraArgs

    def own(self, params: Any) -> Any:
        """The tree with None in place of all other leaves."""
        return tree.map_leaves(lambda path, leaf: leaf if path in self.paths else None, params)

    def others(self, params: Any) -> Any:
        """The tree with None in place of the member's leaves."""
        return tree.map_leaves(lambda path, leaf: None if path in self.paths else leaf, params)


def _update_each(members: Mapping[str, _Member]) -> optax.GradientTransformationExtraArgs:
    """Each member updates its own parameters, and sees no others. Its state is under its name."""

    def init_fn(params: Any) -> Any:
        return {name: member.transformation.init(member.own(params)) for name, member in members.items()}

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, curvature: Curvature | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        parts, after = [], {}
        for name, member in members.items():
            within = None if curvature is None else curvature.within(member.others(params))
            part, after[name] = member.transformation.update(
                member.own(updates), state[name], member.own(params), curvature=within, **extra
            )
            parts.append(part)
        return eqx.combine(*parts, is_leaf=tree.is_named), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Read(dict):
    """Controls that remember which of them have been read."""

    def __init__(self, controls: Mapping[str, Any]):
        super().__init__(controls)
        self.unread = set(controls)

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return super().__getitem__(name)


def _with_controls(
    transformation: optax.GradientTransformationExtraArgs, config: OptimizerConfig, path: str
) -> optax.GradientTransformationExtraArgs:
    """The transformation, which raises `ConfigError` when it is traced if it leaves out a control.

    Args:
        path: dotted path of the section.
    """

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, controls: Mapping[str, Any] | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        if controls is None:
            return transformation.update(updates, state, params, **extra)
        read = _Read(controls)
        result = transformation.update(updates, state, params, controls=read, **extra)
        if read.unread:
            control = min(read.unread)
            advice = "Let its last link be jaxlm.optim.base.scale_by_learning_rate"
            raise ConfigError(
                f"{path}.type: {type(config).__name__} does not read the control '{control}', which a controller sets."
                f" {f'Set {path}.nowcast' if control == NOWCAST else advice}, or remove the controller"
            )
        return result

    return optax.GradientTransformationExtraArgs(transformation.init, update_fn)


def _checked(
    optimizer: optax.GradientTransformationExtraArgs, config: OptimizerConfig
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which raises `ConfigError` when its state is made if no format of a state applies to any of it."""
    formats = [one.state for _, one in _optimizers(config) if one.state != Full()]

    def init_fn(params: Any) -> Any:
        state = optimizer.init(params)
        if formats:
            check_applies(formats[0], state, params)
        return state

    return optax.GradientTransformationExtraArgs(init_fn, optimizer.update)


def _optimizers(config: OptimizerConfig) -> Iterator[tuple[int | None, OptimizerConfig]]:
    """Each entry of `groups` with its index, and then the outer optimizer."""
    yield from enumerate(config.groups)
    yield None, config


def _owners(config: OptimizerConfig, paths: Sequence[str], ruled: Sequence[str]) -> dict[str, int | None]:
    """Path -> index of the first entry of `groups` that matches it, or None. Raises for an entry without parameters.

    Args:
        ruled: the paths of parameters that no optimizer updates.
    """
    patterns = []
    for owner, group in enumerate(config.groups):
        with _errors_of(owner, "match"):
            patterns.append(tree.compile_pattern(group.match or ""))
    owners = {path: next((i for i, p in enumerate(patterns) if p.search(path)), None) for path in paths}
    for number, pattern in enumerate(patterns):
        if number not in owners.values():
            taken = [f"{path} (groups.{owners[path]})" for path in paths if pattern.search(path)]
            problem = (
                "matches only parameters that entries before it update already:"
                f" {', '.join([*taken[:5], '...'] if len(taken) > 5 else taken)}. Put it before them, or remove it"
                if taken
                else "matches only parameters with a rule of their own, whatever the optimizer is. Remove it"
                if any(map(pattern.search, ruled))
                else f"matches no trainable parameter. {tree.closest_paths(pattern.pattern, paths)}"
            )
            raise ConfigError(f"optimizer.groups.{number}.match: '{pattern.pattern}' {problem}")
    return owners


def _group_name(config: OptimizerConfig, owner: int | None, as_matrices: bool, decaying: bool) -> str:
    optimizer = config if owner is None else config.groups[owner]
    kind = ("matrices, " if as_matrices else "others, ") if optimizer.separates_matrices else ""
    prefix = "" if not config.groups else "rest: " if owner is None else f"{group_names(config)[owner]}: "
    return f"{prefix}{kind}{'decay' if decaying else 'no decay'}"


def _decay_rule(config: OptimizerConfig, paths: Sequence[str], by_default: Collection[str]) -> Callable[[str], bool]:
    """Tells whether a path decays: paths that match the patterns, and those of the default mask where it applies."""
    modules, use_default = config.weight_decay_modules, config.default_weight_decay_mask
    if modules is None:
        return (lambda path: True) if use_default is False else by_default.__contains__
    expressions = [modules] if isinstance(modules, str) else modules
    patterns = [tree.compile_pattern(pattern, "optimizer.weight_decay_modules") for pattern in expressions]
    for pattern in patterns:
        if not any(pattern.search(path) for path in paths):
            raise ConfigError(f"optimizer.weight_decay_modules: '{pattern.pattern}' matches no trainable parameter")

    def decays(path: str) -> bool:
        return any(pattern.search(path) for pattern in patterns) or (use_default is True and path in by_default)

    return decays


def _check(config: OptimizerConfig) -> None:
    if config.match is not None:
        raise ConfigError(
            f"optimizer.match: '{config.match}' given, but only the entries of optimizer.groups have this key. Write"
            f" optimizer.groups: [{{match: '{config.match}', ...}}]"
        )
    for number, group in enumerate(config.groups):
        path = f"optimizer.groups.{number}"
        if not group.match:
            raise ConfigError(
                f"{path}.match: missing. Set a regular expression for the paths of the parameters that this entry updates"
            )
        if group.groups:
            raise ConfigError(f"{path}.groups: given, but groups cannot contain groups. Move its entries one level up")
        for key, why in _GLOBAL_KEYS.items():
            outer = getattr(config, key, None)
            value = getattr(group, key, outer)  # an entry's class need not have the key
            if value != outer:
                given, expected = ("null" if one is None else encode(one) for one in (value, outer))
                raise ConfigError(
                    f"{path}.{key}: {given} given, but {why}. Remove it and set optimizer.{key}, or set it to"
                    f" {expected} here"
                )


def _check_decay(group: OptimizerConfig, config: OptimizerConfig, decaying: Sequence[str]) -> None:
    """Refuses a weight decay of an entry's own that applies to none of its parameters."""
    if group.weight_decay not in (0, config.weight_decay) and not decaying:
        raise ConfigError(
            f"optimizer.weight_decay: {group.weight_decay} given, but it applies to no parameter of this entry: norms, biases"
            " and embeddings do not decay by default. Set default_weight_decay_mask: false beside it, or remove it"
        )


@contextlib.contextmanager
def _errors_of(owner: int | None, key: str = "") -> Iterator[None]:
    """Names the entry of `groups`, and its key, in errors about an optimizer."""
    try:
        yield
    except ConfigError as error:
        if owner is None:
            raise
        path = f"optimizer.groups.{owner}"
        text = f"{path}.{key}: {error}" if key else re.sub(r"^optimizer\b", path, str(error))
        raise ConfigError(text) from error
