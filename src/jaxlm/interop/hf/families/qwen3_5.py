"""Qwen3.5, dense (3.6 and 3.8 too): Gated DeltaNet in three of four layers, and attention with a gate in the others.

Source: Qwen team 2025, "Qwen3-Next" and "Qwen3.5".
"""

from dataclasses import field

import jax

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.family import Family
from jaxlm.interop.hf.hybrids import qwen3_5_keys, qwen_hybrid_keys, qwen_hybrid_tensors
from jaxlm.interop.hf.shared_keys import rope, usual_keys
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import gated_mlp
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock
from jaxlm.models.decoder import gated_mlp as initial_mlp
from jaxlm.models.decoders.qwen_hybrid import QwenHybridConfig
from jaxlm.models.mixers.base import Mixer
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "qwen3_5")
class Qwen35Config(QwenHybridConfig):
    """Qwen3.5, dense. The defaults are Qwen3.5 0.8B with a shorter context length.

    Attributes:
        mtp: one more layer predicts the token after the next one, as `objective.mtp_weight` trains it. False leaves such a
            layer of a folder as it is.
    """

    seq_len: PositiveInt = 32768
    hidden_dim: PositiveInt = 1024
    intermediate_dim: PositiveInt = 3584
    num_layers: NumLayers = 24
    num_heads: PositiveInt = 8
    num_kv_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 256
    layer_norm_epsilon: NonNegativeFloat = 1e-6
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=1e7, partial_rotary_factor=0.25))
    mtp: bool = False

    def layer(self, mixer: Mixer, *, key: jax.Array) -> DecoderBlock:
        return DecoderBlock(self.norm(), mixer, self.norm(), initial_mlp(self, jax.random.split(key, 3)))


FAMILY = Family(
    model_types=("qwen3_5_text",),
    architecture="Qwen3_5ForCausalLM",
    config=Qwen35Config,
    keys=(
        *usual_keys(length=32768, head=256, rotary=rope(partial=0.25, rotates_part=True)),
        *qwen_hybrid_keys(),
        *qwen3_5_keys(),
    ),
    tensors=lambda config: qwen_hybrid_tensors(config, gated_mlp()),
    text=(TextPart(("qwen3_5",), ("qwen3_5_text", None), (r"(model\.)?visual\.",), {"num_key_value_heads": 4}),),
    kept=(r"mtp\.",),
)
