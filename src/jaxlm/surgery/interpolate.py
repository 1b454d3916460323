"""Moves weights towards those of another model.

Source: Wortsman et al. 2022, Robust fine-tuning of zero-shot models (WiSE-FT, arXiv:2109.01903), section 3: the weights
(1 - w) theta + w theta_ref, leaf by leaf. With w = 1/2, the average of two fine-tuned models (Wortsman et al. 2022, Model
soups, arXiv:2203.05482).
"""

from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError, within
from jaxlm.core.field_types import Fraction
from jaxlm.models.base import LanguageModel
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants


@choice(SurgeryConfig, "interpolate")
class InterpolateConfig(SurgeryConfig):
    """Starts the phase with (1 - weight) times the weights that the model has, plus weight times those of a reference of the
    same architecture. Give the reference `dtype: float32`, or its weights are rounded first. The reference is read once, on
    entering the phase.

    Attributes:
        ref: name of a model in the section `refs`.
        weight: the share of the reference, from 0 (nothing changes) to 1 (the reference's weights).
        match: regular expression searched for in the paths of parameters; the others do not change.
    """

    ref: str
    weight: Fraction = 0.5
    match: str = ".*"

    @property
    def wants(self) -> Wants:
        return Wants(references=(self.ref,))

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        with within("surgery interpolate: match"):
            tree.select(model, [self.match])
        return model

    def fill(
        self, model: LanguageModel, before: LanguageModel, *, refs: Mapping[str, LanguageModel], **_: Any
    ) -> LanguageModel:
        theirs, mask = dict(tree.leaves(refs[self.ref])), dict(tree.leaves(tree.select(model, [self.match])))

        def between(path: str, leaf: Any) -> Any:
            if not mask[path]:
                return leaf
            if not isinstance(other := theirs.get(path), hax.NamedArray) or not tree.is_inexact(other):
                raise ConfigError(
                    f"surgery interpolate: ref: the model '{self.ref}' has no parameter {path}, so its architecture differs."
                    " Use a model of the same architecture, set match to parameters that both have, or put the surgery before"
                    " those that change the architecture"
                )
            sizes, their_sizes = ({axis.name: axis.size for axis in array.axes} for array in (leaf, other))
            if sizes != their_sizes:
                raise ConfigError(
                    f"surgery interpolate: ref: {path} has the axes {their_sizes} in the model '{self.ref}', but {sizes}"
                    " here. Use a model of the same sizes, or set match to parameters of the same shape"
                )
            ours, other = leaf.astype(jnp.float32), other.rearrange(leaf.axes).astype(jnp.float32)
            return ((1 - self.weight) * ours + self.weight * other).astype(leaf.dtype)

        return tree.map_leaves(between, model)

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model
