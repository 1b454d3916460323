"""Blocks of Gemma 4: norms before and after attention and MLP, experts beside the MLP, what a layer reads of the tokens, and
a factor of each layer.

Source: Gemma 4 in transformers (`models/gemma4`).
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray

from jaxlm.core.axes import EMBED
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import FIXED, DeclaresParameters, Parameter
from jaxlm.models.decoders.layer_inputs import LayerInputGate
from jaxlm.models.growth import StartsAsIdentity, norm_of_zero, without_output
from jaxlm.models.layers import GatedMlp
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext, Mixer
from jaxlm.models.moe import Experts
from jaxlm.models.norms import RMSNorm
from jaxlm.models.routing import RouterStats


class ExpertsBeside(eqx.Module):
    """A mixture of experts beside an MLP, which reads the same residual stream.

    Attributes:
        mlp_post_norm: applied to the output of the MLP.
        router_norm: applied to what the router reads, which is the residual stream.
        norm, post_norm: applied to the input and the output of the experts.
    """

    mlp_post_norm: RMSNorm
    router_norm: RMSNorm
    norm: RMSNorm
    experts: Experts
    post_norm: RMSNorm

    def __call__(self, x: NamedArray, out: NamedArray, segment_ids: NamedArray) -> tuple[NamedArray, RouterStats]:
        """The sum of both, {batch, position, embed}. Args: x: the residual stream; out: the output of the MLP."""
        read = self.router_norm(x)
        read = read * read.axis_size(EMBED) ** -0.5
        chosen, stats = self.experts(self.norm(x), segment_ids, read)
        return self.mlp_post_norm(out) + self.post_norm(chosen), stats


class Gemma4Block(StartsAsIdentity, DeclaresParameters):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then x + what the layer reads of the tokens, times a factor.

    Attributes:
        beside: experts beside the MLP; None for none.
        layer_scalar: {}, the factor, which is not trained.
        layer_input: adds what this layer reads of the tokens; None for nothing.
    """

    attn_norm: RMSNorm
    attn: Mixer
    attn_post_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMlp
    mlp_post_norm: RMSNorm
    layer_scalar: NamedArray
    beside: ExpertsBeside | None = None
    layer_input: LayerInputGate | None = None

    def __call__(
        self, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, **_: Any
    ) -> tuple[NamedArray, ForCache, RouterStats | None]:
        attended, new = self.attn(self.attn_norm(x), context, layer_cache)
        x = x + self.attn_post_norm(attended)
        out, stats = self.mlp(self.mlp_norm(x)), None
        if self.beside is not None:
            out, stats = self.beside(x, out, context.attention_mask.segment_ids)
        x = x + self.mlp_post_norm(out)
        if self.layer_input is not None:
            if context.layer_input is None:
                raise ConfigError(
                    "each layer of this model reads embeddings of its own, so that it cannot run without them. Run all layers"
                    " of the model, one after the other"
                )
            x = x + self.layer_input(x, context.layer_input)
        return x * jax.lax.stop_gradient(self.layer_scalar).astype(x.dtype), new, stats

    def as_identity(self) -> "Gemma4Block":
        _, attn_post_norm = without_output(self.attn, "o_proj", self.attn_post_norm)
        _, mlp_post_norm = without_output(self.mlp, "down_proj", self.mlp_post_norm)
        gate = self.layer_input
        if gate is not None:
            gate = dataclasses.replace(gate, post_norm=norm_of_zero(gate.post_norm))
        return dataclasses.replace(self, attn_post_norm=attn_post_norm, mlp_post_norm=mlp_post_norm, layer_input=gate)

    def parameters(self) -> dict[str, Parameter]:
        return {"layer_scalar": FIXED}
