"""Cuts the layers into lower and upper stacks, so that `trainable` can freeze the lower one.

Source: training only the upper layers of a pretrained network (Yosinski et al. 2014, arXiv:1411.1792, section 3). The
lower stack has no optimizer state, and the compiled step does not compute its weights' gradients. If the embedding is
frozen too, the backward pass ends above the lower stack.

    embedding -> body.0: layers 0 .. k-1 -> body.1: layers k .. and the final norm -> head
"""

from dataclasses import replace
from typing import Any

import haliax.nn as hnn
import jax

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import LanguageModel
from jaxlm.models.stacks import Body, Stacks
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig


@choice(SurgeryConfig, "split_at")
class SplitAtConfig(SurgeryConfig):
    """Cuts the layers into two stacks without changing a number. Parameter paths then begin with `body.0.` and `body.1.`
    instead of `body.`, so that `trainable: ['body\\\\.1']` freezes the lower layers. Apply it again for more stacks. A model
    that has several stacks already (layers with experts, and layers without) has the upper ones after all lower ones.

    Attributes:
        layer: the first layer of the upper stack, counted from 0 over the whole model; from 1 to the number of layers
            minus 1.
    """

    layer: PositiveInt

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        body = next(iter(tree.modules(model, Body)), None)
        if body is None or body.num_layers == 1:
            what = "no stack of layers" if body is None else "only one layer"
            raise ConfigError(
                f"surgery split_at: this model has {what}, so there is nothing to cut. Remove the surgery"
            )
        if not 0 < self.layer < body.num_layers:
            raise ConfigError(
                f"surgery split_at: layer: {self.layer} given, but the model has {body.num_layers} layers. Expected 1 to"
                f" {body.num_layers - 1}, the first layer of the upper stack"
            )
        if not any(layers[0] < self.layer <= layers[-1] for layers in body.layer_numbers):
            raise ConfigError(f"surgery split_at: layer: {self.layer} given, but a stack already begins there")
        return tree.map_modules(model, Body, ".*", lambda body: body.split_at(self.layer))

    def moved(self, moments: Any, sums: Any) -> Any:
        stacked = lambda leaf: leaf if tree.is_named(leaf) and leaf.has_axis(LAYERS) else None  # noqa: E731
        only = lambda layers: replace(layers, stacked=jax.tree.map(stacked, layers.stacked, is_leaf=tree.is_named))  # noqa: E731
        # What an optimizer keeps for all layers of a stack together cannot be cut.
        moments = tree.map_modules(moments, hnn.Stacked, ".*", only)
        return tree.map_modules(moments, Body, ".*", lambda body: body.split_at(self.layer))

    def merge(self, model: LanguageModel) -> LanguageModel:
        return tree.map_modules(model, Stacks, ".*", Stacks.joined)
