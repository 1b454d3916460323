"""Grows a model by a stack of layers, before or after those that it has.

Source: a new layer that adds nothing to the residual stream leaves the model's function as it is: Chen et al. 2016, Net2Net
(arXiv:1511.05641), section 2.3; for transformers, Shen et al. 2022, Staged Training for Transformer Language Models
(arXiv:2203.06211), section 3.2. Copied layers: Du et al. 2024, Stacking Your Transformers (arXiv:2405.15319), where the
layers of a model repeat in depth (G_stack), which the paper found to train fastest.
"""

import dataclasses
from typing import Any, Literal

import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumLayers
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.growth import Place, StartsAsIdentity, repeated_layers, with_copied_layers
from jaxlm.models.stack_paths import newest_stack
from jaxlm.models.stacks import Body, Stack
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig


@choice(SurgeryConfig, "grow")
class GrowConfig(SurgeryConfig):
    """Adds layers, for good: the model of the phase, of all later phases and of exports has more. They are a stack of their
    own, which `trainable: [new_stack]` selects. Parameter paths then have the number of the stack, from the input to the
    output: `body.0.layers...`, `body.1.layers...`; the final norm is in the last one.

    Attributes:
        num_layers: number of new layers.
        at: `append` adds them after all layers, `prepend` before them.
        init: how they start. `identity` zeroes what they add to the residual stream (the output projection of attention and
            the last one of the MLP, or the norms behind them), so that the model computes what it did before; `copy` repeats
            the model's layers in depth: new layers after n others are copies of layers 0, 1, ... (G_stack), those before them
            of ..., n - 2, n - 1; `random` is that of a new model.
    """

    num_layers: NumLayers = 4
    at: Place = "append"
    init: Literal["identity", "copy", "random"] = "identity"

    def changed(self, config: ModelConfig) -> ModelConfig:
        try:
            sources, _ = repeated_layers(config.Layers.size, self.num_layers, self.at)
            return config.with_layers(sources)
        except ConfigError as error:
            raise ConfigError(f"surgery grow: {error}") from error

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        before = _body(model)
        try:
            grown = self._grown(model, key)
            number = newest_stack(_body(grown))
            return tree.map_modules(grown, Stack, rf"^body\.{number}$", lambda new: self._started(new, before))
        except ConfigError as error:
            raise ConfigError(f"surgery grow: {error}") from error

    def moved(self, moments: Any, sums: Any) -> Any:
        return self._grown(moments, None)

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model

    def _grown(self, model: Any, key: jax.Array | None) -> Any:
        return model.grown(*repeated_layers(_body(model).num_layers, self.num_layers, self.at), key=key)

    def _started(self, new: Stack, before: Body) -> Stack:
        """The new stack with the values that it starts with. Args: before: the layers before it was added."""
        if self.init == "random":
            return new
        if self.init == "copy":
            sources, added = repeated_layers(before.num_layers, self.num_layers, self.at)
            try:
                return with_copied_layers(new, before, [sources[layer] for layer in added])
            except ConfigError as error:
                raise ConfigError(f"init: copy: {error}, or set init: identity") from error
        block = new.layers.stacked
        if not isinstance(block, StartsAsIdentity):
            raise ConfigError(
                f"init: identity: a layer of this model ({type(block).__name__}) has parts of which jaxlm does not know what"
                " they add to the residual stream. Set init: copy or init: random"
            )
        return dataclasses.replace(new, layers=dataclasses.replace(new.layers, stacked=block.as_identity()))


def _body(model: LanguageModel) -> Body:
    body = next(iter(tree.modules(model, Body)), None)
    if body is None:
        raise ConfigError("surgery grow: this model has no stack of layers. Remove the surgery")
    return body
