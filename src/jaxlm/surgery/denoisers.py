"""Lets parts of a model fill in hidden tokens by themselves, each for texts with a certain share of them.

Source: a block for each range of noise: Shing et al. 2025, DiffusionBlocks (arXiv:2506.14202), section 3; a stack and all
stacks after it for each noise: StackWise (time as depth).
"""

import itertools

import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFraction
from jaxlm.models.base import LanguageModel
from jaxlm.models.diffusion.denoisers import Parts, denoisers_of
from jaxlm.models.stacks import Body
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig


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
        body = next(iter(tree.modules(model, Body)), None)
        if model.is_causal or body is None:
            why = "has no stack of layers" if body is None else "predicts next tokens, and no hidden ones"
            raise ConfigError(f"surgery denoisers: this model {why}. Remove the surgery")
        try:
            return model.with_denoisers(denoisers_of(body.layer_numbers, self.mask_fractions, self.parts))
        except ConfigError as error:
            where = "surgery denoisers: mask_fractions"
            where = f"objective.num_blocks (diffusion_blocks) or {where}" if self.parts == "blocks" else where
            raise ConfigError(f"{where}: {error}") from error

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model
