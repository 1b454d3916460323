"""GPT-2: learned position embeddings, pre-LayerNorm blocks with biases, a head that is usually tied to the token
embedding.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3, and the code released
with it (openai/gpt-2, `src/model.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from haliax import Axis

from jaxlm.core.axes import MLP
from jaxlm.core.errors import ConfigError, check_choice, check_divides
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, NumLayers, PositiveInt, check_fields
from jaxlm.interop.hf.family import Family, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation
from jaxlm.interop.hf.weights import BLOCK, HEADS, Tensor, fused, single
from jaxlm.models.activations import ACTIVATIONS
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import TransformerConfig, transformer_traits
from jaxlm.models.decoders.gpt2 import Gpt2, Gpt2Block
from jaxlm.models.layers import Embedding, Mlp
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.norms import LayerNorm
from jaxlm.models.stacks import LayerKind
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

    def block(self, *, key: jax.Array) -> Gpt2Block:
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

    def build(self, Vocab: Axis, *, key: jax.Array) -> Gpt2:
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


_LAYER = "transformer.h.{layer}."
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")  # keys of a classification head


def _tensors(config: Gpt2Config) -> Iterator[Tensor]:
    if not config.use_bias:
        raise ConfigError("model.use_bias: false given, but GPT-2 in Hugging Face format always has biases")
    yield single("transformer.wte.weight", "tokens.weight", "vocab | embed")
    yield single("transformer.wpe.weight", "positions.weight", "position | embed")
    if not config.tie_word_embeddings:
        yield single("lm_head.weight", "head.weight", "vocab | embed")
    norms = {f"{_LAYER}ln_1": f"{BLOCK}attn_norm", f"{_LAYER}ln_2": f"{BLOCK}mlp_norm"}
    for theirs, ours in {"transformer.ln_f": "body.final_norm", **norms}.items():
        for part in ("weight", "bias"):
            yield single(f"{theirs}.{part}", f"{ours}.{part}", "embed")
    weights = {f"{BLOCK}attn.{name}.weight": f"embed | {out}" for name, out in HEADS.items()}
    yield fused(f"{_LAYER}attn.c_attn.weight", weights, along=1)
    yield fused(f"{_LAYER}attn.c_attn.bias", {f"{BLOCK}attn.{name}.bias": out for name, out in HEADS.items()})
    maps = {
        "attn.c_proj": ("attn.o_proj", "heads head_size", "embed"),
        "mlp.c_fc": ("mlp.up_proj", "embed", "mlp"),
        "mlp.c_proj": ("mlp.down_proj", "mlp", "embed"),
    }
    for theirs, (ours, inputs, outputs) in maps.items():
        yield single(f"{_LAYER}{theirs}.weight", f"{BLOCK}{ours}.weight", f"{inputs} | {outputs}")
        yield single(f"{_LAYER}{theirs}.bias", f"{BLOCK}{ours}.bias", outputs)


def _inner_to_ours(theirs: Mapping[str, Any]) -> Json:
    width, embed = theirs.get("n_inner"), theirs["n_embd"]
    if width is not None and width % embed:
        return {"intermediate_dim": width}
    return {"mlp_scale": 4 if width is None else width // embed}


def _inner_to_theirs(config: Gpt2Config) -> Json:
    return {"n_inner": None if config.Mlp.size == 4 * config.hidden_dim else config.Mlp.size}


FAMILY = Family(
    model_types=("gpt2",),
    architecture="GPT2LMHeadModel",
    config=Gpt2Config,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    keys=(
        JsonKey("n_positions", "seq_len", 1024),
        JsonKey("n_embd", "hidden_dim", 768),
        JsonKey("n_layer", "num_layers", 12),
        JsonKey("n_head", "num_heads", 12),
        KeyGroup(("n_inner",), _inner_to_ours, _inner_to_theirs),
        activation("activation_function", "gelu_new"),
        JsonKey("embd_pdrop", "embed_pdrop", 0.1),
        JsonKey("resid_pdrop", "resid_pdrop", 0.1),
        JsonKey("attn_pdrop", "attn_pdrop", 0.1),
        JsonKey("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        JsonKey("initializer_range", "initializer_range", 0.02),
        JsonKey("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", False),
        JsonKey("reorder_and_upcast_attn", "upcast_attn", False),
        JsonKey("scale_attn_weights", "scale_attn_weights", True),
        JsonKey("tie_word_embeddings", "tie_word_embeddings", True),
        KeyGroup(("n_ctx", *(f"summary_{x}" for x in _SUMMARY)), lambda _: {}, lambda _: {}),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    prefix="transformer.",
    unused=(r"attn\.(masked_)?bias$",),
    respelled=("mlp_scale", "intermediate_dim"),
)
