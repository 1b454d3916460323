"""Ministral 3: Llama's blocks with YaRN, and scores that grow with the position of the query.

Source: Mistral AI 2025, "Introducing Mistral 3", and its code in transformers.
"""

from dataclasses import field

from jaxlm.core.field_types import NonNegativeFloat, NumLayers, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import rope, same_keys, usual_keys
from jaxlm.interop.hf.text_part import pixtral_part
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import UniformConfig
from jaxlm.models.rope import QueryScaling, RotaryConfig, YarnRotary
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice

_YARN = {"factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}


@choice(ModelConfig, "ministral3")
class Ministral3Config(LlamaBlocks, UniformConfig):
    """Ministral 3. The defaults are Ministral 3 8B with a shorter context.

    Attributes:
        query_scaling: queries are multiplied by 1 + query_scaling * ln(1 + floor(position / original)), for the context
            length before extension. Positions count from the start of each document.
    """

    seq_len: PositiveInt = 16384
    intermediate_dim: PositiveInt = 14336
    num_layers: NumLayers = 34
    num_kv_heads: PositiveInt | None = 8
    rope: RotaryConfig = field(default_factory=lambda: YarnRotary(theta=1e6, **_YARN))
    query_scaling: NonNegativeFloat = 0.1

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        original = self.rope.original_length(self.seq_len)
        scaling = QueryScaling(self.query_scaling, original) if self.query_scaling else None
        return (LayerKind(self.rope, self.sliding_window, query_scaling=scaling),) * self.num_layers


_INSIDE = {"llama_4_scaling_beta": "query_scaling", "max_position_embeddings": None}
_ROPE = rope(1e6, inside=_INSIDE, unset={"rope_type": "yarn", "llama_4_scaling_beta": 0.1, **_YARN})

FAMILY = Family(
    model_types=("ministral3",),
    architecture="Ministral3ForCausalLM",
    config=Ministral3Config,
    keys=(
        *usual_keys(length=262144, eps_default=1e-5, head=128, rotary=_ROPE),
        *same_keys(sliding_window=None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
    text=(pixtral_part("ministral3"),),
)
