"""What each layer reads of the tokens beside the residual stream (per-layer embeddings).

Source: Gemma 4 in transformers (`hidden_size_per_layer_input`).
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, LAYER_INPUT, LAYER_INPUTS, LAYERS, VOCAB
from jaxlm.core.parameters import TABLE, DeclaresParameters, Parameter
from jaxlm.core.products.float32_sums import rows_of
from jaxlm.core.sharding import for_compute, for_lookup
from jaxlm.models.activations import gated
from jaxlm.models.base import Inputs
from jaxlm.models.linear import Linear
from jaxlm.models.norms import RMSNorm


class LayerInputs(DeclaresParameters):
    """For each layer, the mean of an embedding of the token and of a projection of what the first layer reads, times the
    square root of 2.

    Attributes:
        table: {vocab, layer_inputs}, the embeddings, which are multiplied by the square root of their size.
        projection: {layer_inputs, embed}, whose output is divided by the square root of the stream's width.
        norm: of the projection, for each layer.
    """

    table: NamedArray
    projection: Linear
    norm: RMSNorm
    Layers: Axis = eqx.field(static=True)

    @staticmethod
    def init(
        Vocab: Axis, Embed: Axis, Layers: Axis, size: int, *, std: float, eps: float, key: jax.Array
    ) -> "LayerInputs":
        """Args: size: features of what one layer reads."""
        keys, All = jax.random.split(key), Axis(LAYER_INPUTS, Layers.size * size)
        table, norm = hax.random.normal(keys[0], (Vocab, All)) * std, RMSNorm.init(Axis(LAYER_INPUT, size), eps)
        return LayerInputs(table, Linear.init(Embed, All, std=std, key=keys[1]), norm, Layers)

    def __call__(self, inputs: Inputs, embedded: NamedArray) -> NamedArray:
        """{layers, batch, position, layer_input}. Args: embedded: {batch, position, embed}, what the first layer reads."""
        projection, norm = for_compute((self.projection, self.norm))
        size = self.table.axis_size(LAYER_INPUTS) // self.Layers.size
        axes = (self.Layers, Axis(LAYER_INPUT, size))
        rows, projected = (
            x.unflatten_axis(LAYER_INPUTS, axes)
            for x in (rows_of(for_lookup(self.table), VOCAB, inputs.tokens), projection(embedded))
        )
        by_token = rows * jnp.asarray(size**0.5, rows.dtype)
        by_context = norm(projected * embedded.axis_size(EMBED) ** -0.5)
        return hax.auto_sharded(((by_context + by_token) * 0.5**0.5).rearrange((LAYERS, ...)))

    def parameters(self) -> dict[str, Parameter]:
        return {"table": TABLE}


class LayerInputGate(eqx.Module):
    """Adds what a layer reads of the tokens to the residual stream, gated by that.

    Attributes:
        input_gate: {layer_input, embed}.
        input_projection: {embed, layer_input}.
        post_norm: applied to its output.
    """

    input_gate: Linear
    input_projection: Linear
    post_norm: RMSNorm
    activation: str = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, size: int, *, activation: str, std: float, eps: float, key: jax.Array) -> "LayerInputGate":
        """Args: size: features of what the layer reads."""
        keys, Input = jax.random.split(key), Axis(LAYER_INPUT, size)
        gate, projection = (
            Linear.init(*sides, std=std, key=one)
            for sides, one in zip(((Embed, Input), (Input, Embed)), keys, strict=True)
        )
        return LayerInputGate(gate, projection, RMSNorm.init(Embed, eps), activation)

    def __call__(self, x: NamedArray, layer_input: NamedArray) -> NamedArray:
        """What is added to {batch, position, embed}. Args: layer_input: {batch, position, layer_input}."""
        gate = self.input_gate(x)
        out = gated(self.activation, gate.array, layer_input.rearrange(gate.axes).array)
        return self.post_norm(self.input_projection(NamedArray(out, gate.axes)))
