"""A model of each token and the mean of earlier ones. By import path in YAML: `type: acme_lm.model:MeanOfPastConfig`."""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.models.base import Hidden, Inputs, LanguageModel, ModelConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.inference.cache import DecodingCache


class MeanOfPast(LanguageModel):
    """Embeds tokens, adds the running mean of the embeddings so far, and predicts the next token.

    Attributes:
        tokens, head: {vocab, embed}.
        mix: {embed, past}.
    """

    tokens: NamedArray
    head: NamedArray
    mix: NamedArray
    seq_len: int = eqx.field(static=True)

    @property
    def Vocab(self) -> Axis:
        return self.head.resolve_axis("vocab")

    @property
    def Pos(self) -> Axis:
        return Axis("position", self.seq_len)

    def hidden(self, inputs: Inputs, *, cache: DecodingCache | None = None, key: jax.Array | None = None) -> Hidden:
        """Documents in one sequence are not separated."""
        embedded = self.tokens.take("vocab", inputs.tokens)
        Pos = inputs.tokens.resolve_axis("position")
        past = hax.cumsum(embedded, Pos) / (hax.arange(Pos) + 1)
        return Hidden(hax.tanh(embedded + hax.dot(past.rename({"embed": "past"}), self.mix, axis="past")))

    def lm_head(self) -> NamedArray:
        return self.head

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> DecodingCache:
        raise NotImplementedError("this model does not decode")


@dataclass(frozen=True)
class MeanOfPastConfig(ModelConfig):
    """A model with one layer.

    Attributes:
        width: size of the embeddings.
    """

    width: int = 16

    @property
    def Embed(self) -> Axis:
        """The axis of embeddings."""
        return Axis("embed", self.width)

    def check(self) -> None:
        pass

    def build(self, Vocab: Axis, *, key: jax.Array) -> MeanOfPast:
        keys = jax.random.split(key, 3)
        tokens, head = (hax.random.normal(k, (Vocab, self.Embed)) * 0.1 for k in keys[:2])
        mix = hax.random.normal(keys[2], (self.Embed, Axis("past", self.width))) * 0.1
        return MeanOfPast(tokens, head, mix, self.seq_len)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        weights = self.width * (self.width + vocab_size)
        return FlopsPerToken(6 * weights, 6 * weights)
