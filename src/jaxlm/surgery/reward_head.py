"""Adds a head with one output, which scores sequences, beside the head that predicts tokens.

Source: Stiennon et al. 2020, "Learning to summarize from human feedback" (arXiv:2009.01325), section 3.4; the initial
weights have the variance 1 / (width + 1), as in appendix B.1.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import Weight
from jaxlm.core.sharding import for_compute
from jaxlm.interop.hf.classifier import read_score
from jaxlm.models.base import Hidden, Inputs, LanguageModel
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants


class RewardModel(LanguageModel):
    """A model with a reward head.

    Attributes:
        base: the model.
        reward: {embed}, the weight of the reward head.
    """

    base: LanguageModel
    reward: NamedArray

    @property
    def Vocab(self) -> Axis:
        return self.base.Vocab

    @property
    def Pos(self) -> Axis:
        return self.base.Pos

    def hidden(
        self, inputs: Inputs, *, cache: Any = None, taps: Sequence[str] = (), key: jax.Array | None = None
    ) -> Hidden:
        return self.base.hidden(inputs, cache=cache, taps=taps, key=key)

    def lm_head(self) -> Weight | None:
        return self.base.lm_head()

    def with_layers(self, kept: Sequence[int]) -> "RewardModel":
        base = self.base.with_layers(kept)
        return replace(self, base=base, switch_lengths=base.switch_lengths)

    def reward_head(self) -> NamedArray:
        return for_compute(self.reward)

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> Any:
        return self.base.init_cache(Batch, capacity, dtype)


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
        if head is None or model.reward_head() is not None:
            what = (
                "returns logits, so its hidden states cannot be read" if head is None else "has a reward head already"
            )
            raise ConfigError(f"surgery reward_head: this model {what}. Remove the surgery")
        Embed = next(axis for axis in head.axes if axis.name == EMBED)
        reward = hax.random.normal(key, (Embed,)) / (Embed.size + 1) ** 0.5
        static = {name: getattr(model, name) for name in _STATIC}
        return RewardModel(model, reward, **static)

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


_STATIC = (
    "logit_soft_cap",
    "vocab_multiple",
    "head_fp8",
    "notes",
    "reads_beyond",
    "adds_noise",
    "is_causal",
    "switch_lengths",
)
