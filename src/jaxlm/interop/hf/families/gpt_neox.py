"""GPT-NeoX and Pythia: parallel attention and MLP, biases everywhere, partial rotary embeddings.

Source: Black et al. 2022 (arXiv:2204.06745), section 2.1; Biderman et al. 2023 (arXiv:2304.01373).
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, Json, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import activation, rope, size_keys
from jaxlm.interop.hf.weights import BLOCK, Tensor, fused, single
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, plain_mlp
from jaxlm.models.decoders.llama_blocks import LlamaAttention
from jaxlm.models.decoders.pre_norm import RotaryDecoderConfig
from jaxlm.models.norms import LayerNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "gpt_neox")
class GptNeoxConfig(RotaryDecoderConfig, LlamaAttention):
    """GPT-NeoX and Pythia. The defaults are Pythia 160M.

    Attributes:
        use_parallel_residual: attention and MLP read the same input. False runs the MLP on the output of attention.
    """

    hidden_dim: PositiveInt = 768
    intermediate_dim: PositiveInt = 3072
    num_layers: NumLayers = 12
    num_heads: PositiveInt = 12
    activation_function: str = "gelu"
    use_parallel_residual: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(partial_rotary_factor=0.25))
    attention_bias: bool = True

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 6)
        attn, mlp = self.attention(keys[:4]), plain_mlp(self, keys[4:], use_bias=True)
        return DecoderBlock(self.norm(), attn, self.norm(), mlp, parallel=self.use_parallel_residual)

    def norm(self) -> LayerNorm:
        return LayerNorm.init(self.Embed, self.layer_norm_epsilon, use_bias=True)


_LAYER = "gpt_neox.layers.{layer}."
_HEADS = {"q_proj": "heads | head_size", "k_proj": "kv_heads | head_size", "v_proj": "kv_heads | head_size"}


def _tensors(config: GptNeoxConfig) -> Iterator[Tensor]:
    yield single("gpt_neox.embed_in.weight", "tokens.weight", "vocab | embed")
    if not config.tie_word_embeddings:
        yield single("embed_out.weight", "head.weight", "vocab | embed")
    norms = {
        "gpt_neox.final_layer_norm": "body.final_norm",
        f"{_LAYER}input_layernorm": f"{BLOCK}attn_norm",
        f"{_LAYER}post_attention_layernorm": f"{BLOCK}mlp_norm",
    }
    for theirs, ours in norms.items():
        for part in ("weight", "bias"):
            yield single(f"{theirs}.{part}", f"{ours}.{part}", "embed")
    weights = {f"{BLOCK}attn.{name}.weight": f"{out} | embed" for name, out in _HEADS.items()}
    biases = {f"{BLOCK}attn.{name}.bias": out for name, out in _HEADS.items()}
    yield fused(f"{_LAYER}attention.query_key_value.weight", weights, along=1, merged=2)
    if config.attention_bias:
        yield fused(f"{_LAYER}attention.query_key_value.bias", biases, along=1, merged=2)
    maps = {
        "attention.dense": ("attn.o_proj", "embed", "heads head_size"),
        "mlp.dense_h_to_4h": ("mlp.up_proj", "mlp", "embed"),
        "mlp.dense_4h_to_h": ("mlp.down_proj", "embed", "mlp"),
    }
    for theirs, (ours, outputs, inputs) in maps.items():
        yield single(f"{_LAYER}{theirs}.weight", f"{BLOCK}{ours}.weight", f"{outputs} | {inputs}")
        if config.attention_bias or not theirs.startswith("attention"):
            yield single(f"{_LAYER}{theirs}.bias", f"{BLOCK}{ours}.bias", outputs)


def _check_equal_split(theirs: Mapping[str, Any]) -> Json:
    """transformers rotates as if heads had this size, and computes with heads of the usual one."""
    usual = theirs["hidden_size"] // theirs["num_attention_heads"]
    if theirs.get("head_dim") not in (None, usual):
        raise ConfigError(f"head_dim: {theirs['head_dim']} given, but hidden_size / num_attention_heads is {usual}")
    return {}


FAMILY = Family(
    model_types=("gpt_neox",),
    architecture="GPTNeoXForCausalLM",
    config=GptNeoxConfig,
    keys=(
        *size_keys(length=2048, eps="layer_norm_eps", eps_default=1e-5),
        rope(partial=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct", rotates_part=True),
        KeyGroup(("head_dim",), _check_equal_split, lambda _: {}),
        activation("hidden_act", "gelu"),
        JsonKey("use_parallel_residual", "use_parallel_residual", True),
        JsonKey("attention_bias", "attention_bias", True),
        FixedKey("attention_dropout", 0.0),
        FixedKey("hidden_dropout", 0.0),
        FixedKey("classifier_dropout", 0.1, others=(0.0, None)),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    prefix="gpt_neox.",
    unused=(r"attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
)
