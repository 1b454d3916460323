"""GPT-2: learned position embeddings, pre-LayerNorm blocks with biases, a head that is usually tied to the token
embedding.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3, and the code released
with it (openai/gpt-2, `src/model.py`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import HEAD_SIZE, MLP
from jaxlm.core.errors import ConfigError, check_choice, check_divides
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, NumLayers, PositiveInt, check_fields
from jaxlm.core.sharding import for_lookup
from jaxlm.models.activations import ACTIVATIONS
from jaxlm.models.base import Inputs, ModelConfig
from jaxlm.models.decoder import TransformerConfig, TransformerModel, transformer_traits
from jaxlm.models.growth import StartsAsIdentity, without_output
from jaxlm.models.layers import Embedding, Mlp, dropout, token_embeddings
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.norms import LayerNorm
from jaxlm.models.stacks import Body, LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gpt2")
class Gpt2Config(TransformerConfig):
    """GPT-2. The defaults are the 124M model.

    Attributes:
        hidden_dim: width of the residual stream.
        num_layers: number of transformer blocks.
        num_heads: number of attention heads; must divide `hidden_dim`.
        mlp_scale: hidden width of the MLP as a multiple of `hidden_dim`.
        intermediate_dim: hidden width of the MLP. Null means `mlp_scale * hidden_dim`.
        initializer_range: standard deviation of the normal initialization of the weights. Position embeddings use half
            of it (as in the released code); projections into the residual stream use
            `initializer_range / sqrt(2 * num_layers)`.
        layer_norm_epsilon: added to the variance in norms, for numerical stability.
        activation_function: activation of the MLP.
        embed_pdrop, resid_pdrop, attn_pdrop: dropout probability of the embeddings, of the outputs of attention and
            MLP, and of the attention weights.
        scale_attn_weights: divide the attention scores by the square root of the head size.
        scale_attn_by_inverse_layer_idx: divide the attention scores of layer i (counted from 0) by i + 1.
        upcast_attn: compute the attention matrix products in float32. Scores and softmax are float32 in any case.
        use_bias: add biases to linear layers and norms.
        tie_word_embeddings: use the token embedding as the output head.
    """

    hidden_dim: PositiveInt = 768
    num_layers: NumLayers = 12
    num_heads: PositiveInt = 12
    mlp_scale: PositiveInt = 4
    intermediate_dim: PositiveInt | None = None
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_epsilon: NonNegativeFloat = 1e-5
    activation_function: str = "gelu_new"
    embed_pdrop: BelowOne = 0.0
    resid_pdrop: BelowOne = 0.0
    attn_pdrop: BelowOne = 0.0
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    upcast_attn: bool = False
    use_bias: bool = True
    tie_word_embeddings: bool = True

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(),) * self.num_layers

    @property
    def Mlp(self) -> Axis:
        width = self.hidden_dim * self.mlp_scale if self.intermediate_dim is None else self.intermediate_dim
        return Axis(MLP, width)

    def check(self) -> None:
        check_fields(self, "model")
        check_divides("model.num_heads", self.num_heads, "model.hidden_dim", self.hidden_dim)
        check_choice("model.activation_function", self.activation_function, ACTIVATIONS)

    def block(self, *, key: jax.Array) -> "Gpt2Block":
        std, bias = self.initializer_range, self.use_bias
        residual_std = std / math.sqrt(2 * self.num_layers)
        Embed, Heads, KVHeads, HeadSize, Mlp_ = self.Embed, self.Heads, self.KVHeads, self.HeadSize, self.Mlp
        k_q, k_k, k_v, k_o, k_up, k_down = jax.random.split(key, 6)
        attn = SelfAttention(
            q_proj=Linear.init(Embed, (Heads, HeadSize), std=std, key=k_q, use_bias=bias),
            k_proj=Linear.init(Embed, (KVHeads, HeadSize), std=std, key=k_k, use_bias=bias),
            v_proj=Linear.init(Embed, (KVHeads, HeadSize), std=std, key=k_v, use_bias=bias),
            o_proj=Linear.init((Heads, HeadSize), Embed, std=residual_std, key=k_o, use_bias=bias),
            scale=None if self.scale_attn_weights else 1.0,
            upcast=self.upcast_attn,
            dropout=self.attn_pdrop,
        )
        mlp = Mlp(
            up_proj=Linear.init(Embed, Mlp_, std=std, key=k_up, use_bias=bias),
            down_proj=Linear.init(Mlp_, Embed, std=residual_std, key=k_down, use_bias=bias),
            activation=self.activation_function,
        )
        norms = [LayerNorm.init(Embed, self.layer_norm_epsilon, use_bias=bias) for _ in range(2)]
        return Gpt2Block(norms[0], attn, norms[1], mlp, self.scale_attn_by_inverse_layer_idx, self.resid_pdrop)

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        if self.scale_attn_by_inverse_layer_idx and tuple(kept) != tuple(range(len(kept))):
            raise ConfigError(
                "model.scale_attn_by_inverse_layer_idx: the scale of a layer depends on its number, which changes if a layer"
                " below it is missing. Only the last layers can be taken out, and none added"
            )
        return {}

    def build(self, Vocab: Axis, *, key: jax.Array) -> "Gpt2":
        k_tokens, k_positions, k_layers = jax.random.split(key, 3)
        final_norm = LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=self.use_bias)
        body, std = self.transformer(final_norm, key=k_layers), self.initializer_range
        tokens = Embedding.init(Vocab, self.Embed, std=std, key=k_tokens)
        positions = Embedding.init(self.Pos, self.Embed, std=std / 2, key=k_positions)
        # A key of its own, so that the other parameters are those of a model with a tied head.
        k_head, Embed, tied = jax.random.fold_in(key, 1), self.Embed, self.tie_word_embeddings
        head = None if tied else Linear.init(Embed, Vocab, std=std, key=k_head)
        traits = transformer_traits(self)
        return Gpt2(tokens=tokens, positions=positions, body=body, head=head, config=self, traits=traits)


class Gpt2Block(StartsAsIdentity):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attn_norm: LayerNorm
    attn: SelfAttention
    mlp_norm: LayerNorm
    mlp: Mlp
    inverse_layer_scale: bool = eqx.field(static=True)
    resid_pdrop: float = eqx.field(static=True)

    def __call__(
        self,
        x: NamedArray,
        context: LayerContext,
        layer_cache: LayerCache | None,
        *,
        index: NamedArray,
        key: jax.Array | None,
    ) -> tuple[NamedArray, ForCache, None]:
        k_attn, k_attn_out, k_mlp_out = (None, None, None) if key is None else jax.random.split(key, 3)
        scale = None
        if self.inverse_layer_scale:
            scale = self.attn.q_proj.weight.axis_size(HEAD_SIZE) ** -0.5 if self.attn.scale is None else self.attn.scale
            scale = scale / (index.array + 1)
        out, new = self.attn(self.attn_norm(x), context, layer_cache, scale=scale, key=k_attn)
        x = x + dropout(out, self.resid_pdrop, k_attn_out)
        out = self.mlp(self.mlp_norm(x))
        return x + dropout(out, self.resid_pdrop, k_mlp_out), new, None

    def as_identity(self) -> "Gpt2Block":
        attn, _ = without_output(self.attn, "o_proj", None)
        mlp, _ = without_output(self.mlp, "down_proj", None)
        return dataclasses.replace(self, attn=attn, mlp=mlp)


class Gpt2(TransformerModel):
    """A transformer with an embedding of positions."""

    tokens: Embedding
    positions: Embedding
    body: Body
    head: Linear | None
    config: Gpt2Config = eqx.field(static=True)

    def embedded(
        self, inputs: Inputs, stream: NamedArray | None, key: jax.Array | None
    ) -> tuple[NamedArray, jax.Array | None]:
        k_embed, k_body = (None, None) if key is None else jax.random.split(key)
        if stream is None:
            tokens, positions = for_lookup((self.tokens, self.positions))
            x = token_embeddings(tokens, inputs) + positions(inputs.positions)
            stream = dropout(x, self.config.embed_pdrop, k_embed)
        return stream, k_body
