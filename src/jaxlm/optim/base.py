"""What an optimizer is: gradients into updates, and the table of which parameter is treated how."""

import abc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import draccus
import optax

from jaxlm.core import tree
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

    Lengths (`warmup`, `decay`) up to 1 are fractions of the phase's steps, above 1 numbers of steps.

    Attributes:
        learning_rate: the peak.
        weight_decay: decoupled; multiplied by the learning rate of the step.
        lr_schedule: shape of the decay: constant, linear, cosine, inv_sqrt or inv.
        min_lr_ratio: the last learning rate as a fraction of the peak.
        warmup: from 0 up to the peak.
        decay: from the peak down; null decays over everything after the warmup.
        weight_decay_modules: regular expressions on the paths of the parameters that decay; null means all but norms,
            biases and embeddings.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    lr_schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    warmup: int | float = 0.01
    decay: int | float | None = None
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
        shape = Shape(self.learning_rate, self.warmup, self.decay, self.lr_schedule, self.min_lr_ratio)
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
