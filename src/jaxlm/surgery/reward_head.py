"""Adds a head with one output, which scores sequences, beside the head that predicts tokens.

Source: Stiennon et al. 2020, "Learning to summarize from human feedback" (arXiv:2009.01325), section 3.4; the initial
weights have the variance 1 / (width + 1), as in appendix B.1.
"""

from dataclasses import replace
from pathlib import Path

import haliax as hax
import jax

from jaxlm.core.axes import EMBED
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.classifier import read_score
from jaxlm.models.base import LanguageModel, RewardModel, reward_head
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants


@choice(SurgeryConfig, "reward_head")
class RewardHeadConfig(SurgeryConfig):
    """Adds a head with one output, for the objective `reward`. Parameter paths then begin with `base.`, and the head is
    `reward`. Exports are models for sequence classification; samples leave the head out.

    Attributes:
        from_hf: start with the head of a model for sequence classification in Hugging Face format, given as a folder; null
            initializes it randomly.
    """

    from_hf: str | None = None

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        head = model.lm_head()
        if head is None or reward_head(model) is not None:
            what = (
                "returns logits, so its hidden states cannot be read" if head is None else "has a reward head already"
            )
            raise ConfigError(f"surgery reward_head: this model {what}. Remove the surgery")
        Embed = next(axis for axis in head.axes if axis.name == EMBED)
        reward = hax.random.normal(key, (Embed,)) / (Embed.size + 1) ** 0.5
        return RewardModel(model, reward, is_causal=model.is_causal, traits=model.traits)

    def merge(self, model: LanguageModel) -> LanguageModel:
        assert isinstance(model, RewardModel), "the surgery has been applied"
        return model.base

    def exported(self, model: LanguageModel, merged: LanguageModel) -> LanguageModel:
        assert isinstance(model, RewardModel), "the surgery has been applied"
        return replace(model, base=merged)

    @property
    def wants(self) -> Wants:
        if (folder := self.from_hf) is None:
            return Wants()
        return Wants(leaves=lambda model, config: {"reward": read_score(Path(folder), "surgery reward_head: from_hf")})
