"""Grows a model by a stack of layers, splits its layers into stacks, and lets parts of it fill in hidden tokens.

Cut into lower and upper stacks, the layers can be frozen by `trainable`. A frozen lower stack has no optimizer state, and
the compiled step does not compute its weights' gradients. If the embedding is frozen too, the backward pass ends above the
lower stack.

    embedding -> body.0: layers 0 .. k-1 -> body.1: layers k .. and the final norm -> head

A new layer that adds nothing to the residual stream leaves the model's function as it is. Parts that fill in hidden tokens
by themselves do so for texts with a certain share of them each.

Source:
    Splitting: training only the upper layers of a pretrained network (Yosinski et al. 2014, arXiv:1411.1792, section 3).
    Growing: Chen et al. 2016, Net2Net (arXiv:1511.05641), section 2.3; for transformers, Shen et al. 2022, Staged Training
    for Transformer Language Models (arXiv:2203.06211), section 3.2. Copied layers: Du et al. 2024, Stacking Your
    Transformers (arXiv:2405.15319), where the layers of a model repeat in depth (G_stack), which the paper found to train
    fastest.
    Parts: a block for each range of noise: Shing et al. 2025, DiffusionBlocks (arXiv:2506.14202), section 3; a stack and
    all stacks after it for each noise: StackWise (time as depth).
"""

import dataclasses
import itertools
from dataclasses import replace
from typing import Any, Literal

import haliax.nn as hnn
import jax

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS
from jaxlm.core.errors import ConfigError, within
from jaxlm.core.field_types import NumLayers, PositiveFraction, PositiveInt
from jaxlm.models.base import LanguageModel, ModelConfig, with_traits
from jaxlm.models.decoder import as_transformer
from jaxlm.models.diffusion import Parts, denoisers_of
from jaxlm.models.growth import Place, StartsAsIdentity, repeated_layers, with_copied_layers
from jaxlm.models.stack_paths import newest_stack
from jaxlm.models.stacks import Body, Stack, Stacks, body_of
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
        body = body_of(model, "surgery split_at")
        if body.num_layers == 1:
            raise ConfigError("surgery split_at: this model has only one layer, so there is nothing to cut. Remove it")
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
        return tree.map_modules(model, Stacks, ".*", Stacks.unsplit)


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
        with within("surgery grow"):
            sources, _ = repeated_layers(config.Layers.size, self.num_layers, self.at)
            return config.with_layers(sources)

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        before = body_of(model, "surgery grow")
        with within("surgery grow"):
            grown = self._grown(model, key)
            number = newest_stack(body_of(grown, "the new model"))
            return tree.map_modules(grown, Stack, rf"^body\.{number}$", lambda new: self._started(new, before))

    def moved(self, moments: Any, sums: Any) -> Any:
        return self._grown(moments, None)

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model

    def _grown(self, model: Any, key: jax.Array | None) -> Any:
        old = as_transformer(model, "has no layers that jaxlm can add to")
        return old.grown(*repeated_layers(old.body.num_layers, self.num_layers, self.at), key=key)

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


@choice(SurgeryConfig, "denoisers")
class DenoisersConfig(SurgeryConfig):
    """From now on, a part of the layers computes a text, by the share of its tokens that is hidden: in the loss, in
    evaluations and in generation. No number changes. `preset.depth_times` and the objective `diffusion_blocks` add this
    surgery; its effect ends when the model grows.

    Attributes:
        mask_fractions: the largest share that each part is for, ascending: the first one for the last stack of layers. One
            for each stack; a single stack is divided into equal parts. The last part is also for larger shares.
        parts: `blocks`, a stack alone; `suffixes`, a stack and all after it. A model of blocks cannot be exported: no other
            program runs only some of its layers.
    """

    mask_fractions: list[PositiveFraction]
    parts: Parts = "suffixes"

    def __post_init__(self):
        rises = all(lower < upper for lower, upper in itertools.pairwise(self.mask_fractions))
        if not self.mask_fractions or not rises:
            raise ConfigError(
                f"surgery denoisers: mask_fractions: {self.mask_fractions} given, rising numbers expected, from the last"
                " stack to the first"
            )

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        body = body_of(model, "surgery denoisers")
        if model.is_causal:
            raise ConfigError(
                "surgery denoisers: this model predicts next tokens, and no hidden ones. Remove the surgery"
            )
        try:
            as_transformer(model, "cannot run only some of its layers")
            return with_traits(model, denoisers=denoisers_of(body.layer_numbers, self.mask_fractions, self.parts))
        except ConfigError as error:
            where = "surgery denoisers: mask_fractions"
            where = f"objective.num_blocks (diffusion_blocks) or {where}" if self.parts == "blocks" else where
            raise ConfigError(f"{where}: {error}") from error

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model
