"""A model of which only some layers run, as a model of its own."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from haliax import Axis, NamedArray

from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.base import Hidden, Inputs, LanguageModel


class ModelPart(LanguageModel):
    """Some layers of a model, with its embeddings, final norm and head.

    Attributes:
        whole: the model.
        first, stop: numbers of the first layer that runs, and of the one after the last; None for all from the first on.
        stream: {batch, position, embed}, the input of the first layer, whatever tokens the model reads; None for the
            embeddings of the tokens.
    """

    whole: LanguageModel
    first: int = eqx.field(static=True)
    stop: int | None = eqx.field(static=True, default=None)
    stream: NamedArray | None = None

    @staticmethod
    def of(whole: LanguageModel, first: int, stop: int | None = None, stream: NamedArray | None = None) -> "ModelPart":
        of_model = {field.name: getattr(whole, field.name) for field in dataclasses.fields(LanguageModel)}
        return ModelPart(whole, first, stop, stream, **{**of_model, "denoisers": ()})

    @property
    def Vocab(self) -> Axis:
        return self.whole.Vocab

    @property
    def Pos(self) -> Axis:
        return self.whole.Pos

    def hidden(
        self, inputs: Inputs, *, cache: Any = None, taps: Sequence[str] = (), key: jax.Array | None = None
    ) -> Hidden:
        assert cache is None, "objectives do not decode"
        return self.whole.hidden_of(self.first, self.stop, inputs, self.stream, taps=taps, key=key)

    def lm_head(self) -> Weight | None:
        return self.whole.lm_head()

    def reward_head(self) -> NamedArray | None:
        return self.whole.reward_head()

    def init_cache(self, Batch: Axis, capacity: int, dtype: Any) -> Any:
        return self.whole.init_cache(Batch, capacity, dtype)
