"""What an optimizer is: gradients into updates, and the table of which parameter is treated how."""

import abc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import draccus
import optax

from jaxlm.core import tree
from jaxlm.core.decays import Decay
from jaxlm.core.errors import ConfigError
from jaxlm.core.schedules import Schedule, Shape, make_schedule

# Without a list of its own, weight decay leaves out what these match: norms, biases and embeddings.
_NO_DECAY = re.compile(r"norm|bias|(^|\.)(tokens|positions)(\.|$)")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are treated alike.

    Attributes:
        name: what they have in common.
        paths: of their leaves.
        num_parameters: numbers in them.
        weight_decay: decoupled decay, before the learning rate is multiplied in.
    """

    name: str
    paths: tuple[str, ...]
    num_parameters: int
    weight_decay: float


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
        weight_decay_modules: regular expressions on the paths of the parameters that decay; null means all but norms,
            biases and embeddings.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    lr_schedule: Decay | str = "cosine"
    min_lr_ratio: float = 0.1
    warmup: int | float = 0.01
    decay: int | float | None = None
    rewarmup: int | float = 0.0
    cycles: int | list[int] | None = None
    cycle_length: int | float | list[int] | None = None
    weight_decay_modules: list[str] | None = None

    @classmethod
    def default_choice_name(cls) -> str | None:
        """Without `type:` it is Adam."""
        return "adam"

    @abc.abstractmethod
    def build(self, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformationExtraArgs:
        """Gradients into updates, for a phase of `num_steps` steps.

        The count that the schedule is read at is part of the optimizer's state, so a skipped step does not advance it.
        """

    def schedule(self, num_steps: int) -> Schedule:
        """Updates done in the phase -> learning rate of the next one."""
        shape = Shape(
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
    """Every leaf of the trainable part in exactly one group: those that decay, and those that do not."""
    leaves = tree.leaves(trainable)
    decays = _decay_rule(config, [path for path, _ in leaves])
    named = {"decay": [x for x in leaves if decays(x[0])], "no decay": [x for x in leaves if not decays(x[0])]}
    groups = [
        ParameterGroup(
            name=name,
            paths=tuple(path for path, _ in members),
            num_parameters=sum(tree.raw(leaf).size for _, leaf in members),
            weight_decay=config.weight_decay if name == "decay" else 0.0,
        )
        for name, members in named.items()
        if members
    ]
    assert sorted(p for g in groups for p in g.paths) == sorted(path for path, _ in leaves)
    return groups


def _decay_rule(config: OptimizerConfig, paths: Sequence[str]):
    if config.weight_decay_modules is None:
        return lambda path: not _NO_DECAY.search(path.lower())
    patterns = [re.compile(pattern) for pattern in config.weight_decay_modules]
    for pattern in patterns:
        if not any(pattern.search(path) for path in paths):
            raise ConfigError(f"optimizer.weight_decay_modules: '{pattern.pattern}' matches no parameter that trains")
    return lambda path: any(pattern.search(path) for pattern in patterns)


def decay_mask(groups: Sequence[ParameterGroup]):
    """For `optax.add_decayed_weights`: params -> True at every leaf of a group that decays."""
    decaying = {path for group in groups if group.weight_decay for path in group.paths}

    def mask(params: Any) -> Any:
        return tree.map_leaves(lambda path, _: path in decaying, params)

    return mask
