"""What an optimizer is: gradients into updates, and the table of which parameter is treated how."""

import abc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import draccus
import optax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepGuard
from jaxlm.core.lr_shapes import LrShape
from jaxlm.core.schedules import Schedule, ScheduleSpec, make_schedule
from jaxlm.optim.bad_steps import SkipBadSteps, bad_steps
from jaxlm.optim.matrices import matrix_paths

# Without a list of its own, weight decay leaves out what these match: norms, biases and embeddings.
_NO_DECAY = re.compile(r"norm|bias|(^|\.)(tokens|positions)(\.|$)|embedding$")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are treated alike.

    Attributes:
        name: what they have in common.
        paths: of their leaves.
        num_parameters: numbers in them.
        weight_decay: decoupled decay, before the learning rate is multiplied in.
        as_matrices: whether an optimizer of matrices has a rule of its own for them.
    """

    name: str
    paths: tuple[str, ...]
    num_parameters: int
    weight_decay: float
    as_matrices: bool = False


@dataclass(frozen=True)
class OptimizerConfig(draccus.PluginRegistry, abc.ABC, discover_packages_path="jaxlm.optim"):
    """What all optimizers share. `type:` in YAML picks the family.

    Lengths up to 1 are fractions (of the cycle; `cycle_length` of the phase), above 1 numbers of steps. So 1 means all.

    Attributes:
        learning_rate: the peak.
        weight_decay: decoupled; multiplied by the learning rate of the step.
        lr_schedule: shape of the decay: constant, linear, cosine, polynomial, inv_sqrt, inv or power, by name or as a
            section with a `type` and keys of its own.
        min_lr_ratio: the last learning rate of a cycle as a fraction of the peak.
        warmup: from 0 up to the peak, in the first cycle; cut to it.
        decay: from the peak down; null decays over everything that the warmup leaves, and a longer one is cut to that.
        rewarmup: from the last learning rate of a cycle up to the peak of the next; 0 jumps there.
        cycles: how many cycles of equal length there are, or a list of the steps at which they end.
        cycle_length: of every cycle, or a list of the first ones' lengths; the last cycle takes what is left over.
        weight_decay_modules: regular expressions, one or a list, found in the paths of the parameters that decay.
        default_weight_decay_mask: whether all but norms, biases and embeddings decay too; null means only where there
            are no `weight_decay_modules`. False without any of them lets everything decay.
        skip_bad_steps: leave out the update of a step whose loss or gradient norm stands far out from the last ones:
            true, a number of steps to compare with, or a section. (A step that is not finite is left out in any case.)
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    lr_schedule: LrShape | str = "cosine"
    min_lr_ratio: float = 0.1
    warmup: int | float = 0.01
    decay: int | float | None = None
    rewarmup: int | float = 0.0
    cycles: int | list[int] | None = None
    cycle_length: int | float | list[int] | None = None
    weight_decay_modules: str | list[str] | None = None
    default_weight_decay_mask: bool | None = None
    skip_bad_steps: bool | int | SkipBadSteps = False

    separates_matrices: ClassVar[bool] = False
    """Whether matrices are updated by a rule of their own (see `jaxlm.optim.matrices`)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """Without `type:` it is Adam."""
        return "adam"

    @abc.abstractmethod
    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        """Gradients into updates, for a phase of `num_steps` steps.

        The count that the schedule is read at is part of the optimizer's state, so a skipped step does not advance it.
        """

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        """What may leave out a step."""
        return bad_steps(self.skip_bad_steps)

    def schedule(self, num_steps: int) -> Schedule:
        """Updates done in the phase -> learning rate of the next one."""
        shape = ScheduleSpec(
            peak=self.learning_rate,
            warmup=self.warmup,
            decay=self.decay,
            kind=self.lr_schedule,
            min_ratio=self.min_lr_ratio,
            rewarmup=self.rewarmup,
            cycles=self.cycles,
            cycle_length=self.cycle_length,
        )
        return make_schedule(shape, num_steps)


def parameter_groups(trainable: Any, config: OptimizerConfig) -> list[ParameterGroup]:
    """Every leaf of the trainable part in exactly one group: those that decay, and those that do not; matrices apart
    where the optimizer has a rule of their own for them."""
    leaves = tree.leaves(trainable)
    decays = _decay_rule(config, [path for path, _ in leaves])
    matrices = matrix_paths(trainable) if config.separates_matrices else frozenset()
    members: dict[tuple[bool, bool], list[tuple[str, Any]]] = {}
    for path, leaf in leaves:
        members.setdefault((path in matrices, decays(path)), []).append((path, leaf))
    groups = [
        ParameterGroup(
            name=_group_name(config, as_matrices, decaying),
            paths=tuple(path for path, _ in found),
            num_parameters=sum(tree.raw(leaf).size for _, leaf in found),
            weight_decay=config.weight_decay if decaying else 0.0,
            as_matrices=as_matrices,
        )
        for (as_matrices, decaying), found in sorted(members.items(), reverse=True)
    ]
    assert sorted(p for g in groups for p in g.paths) == sorted(path for path, _ in leaves)
    return groups


def _group_name(config: OptimizerConfig, as_matrices: bool, decaying: bool) -> str:
    kind = ("matrices, " if as_matrices else "others, ") if config.separates_matrices else ""
    return kind + ("decay" if decaying else "no decay")


def _decay_rule(config: OptimizerConfig, paths: Sequence[str]) -> Callable[[str], bool]:
    """Which paths decay: what the patterns find, and what the default says where it applies."""
    given, by_default = config.weight_decay_modules, config.default_weight_decay_mask
    if given is None:
        return (lambda path: True) if by_default is False else _decays_by_default
    patterns = [re.compile(pattern) for pattern in ([given] if isinstance(given, str) else given)]
    for pattern in patterns:
        if not any(pattern.search(path) for path in paths):
            raise ConfigError(f"optimizer.weight_decay_modules: '{pattern.pattern}' matches no parameter that trains")

    def decays(path: str) -> bool:
        return any(pattern.search(path) for pattern in patterns) or (by_default is True and _decays_by_default(path))

    return decays


def _decays_by_default(path: str) -> bool:
    return not _NO_DECAY.search(path.lower())


def decay_mask(groups: Sequence[ParameterGroup]):
    """For `optax.add_decayed_weights`: params -> True at every leaf of a group that decays."""
    decaying = {path for group in groups if group.weight_decay for path in group.paths}

    def mask(params: Any) -> Any:
        return tree.map_leaves(lambda path, _: path in decaying, params)

    return mask


def add_weight_decay(config: OptimizerConfig, groups: Sequence[ParameterGroup]) -> optax.GradientTransformation:
    """Adds the decay of every parameter that decays, before the learning rate."""
    return optax.add_decayed_weights(config.weight_decay, decay_mask(groups))


def clip_by_norm(max_norm: float | None) -> optax.GradientTransformation:
    """Scales gradients of a larger global norm down to it; None never does.

    Raises:
        ConfigError: not above 0.
    """
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"optimizer.max_grad_norm: {max_norm} given, null (never clip) or more than 0 expected")
    return optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)


def times_learning_rate(schedule: Schedule) -> optax.GradientTransformation:
    """Directions into updates: multiplied by minus the learning rate of the step."""
    return optax.scale_by_learning_rate(schedule)  # pyright: ignore[reportArgumentType]
