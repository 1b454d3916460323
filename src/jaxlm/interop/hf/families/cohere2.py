"""Cohere 2: Cohere's blocks. Three of four layers have a sliding window; only these have a rotary position embedding.

Source: Cohere 2025, "Command A" (arXiv:2504.00698), section 2.
"""

from dataclasses import field

from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.interop.hf.block_rows import llama_rows
from jaxlm.interop.hf.family import Family, FixedKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, same_keys, usual_keys, window_pattern
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoders.llama_blocks import LlamaBlocks
from jaxlm.models.decoders.pre_norm import PatternConfig
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.reading.choices import choice


@choice(ModelConfig, "cohere2")
class Cohere2Config(PatternConfig, LlamaBlocks):
    """Cohere 2. The defaults are Command R7B with half its context length.

    Attributes:
        rope: rotary position embedding of local layers. Global layers have none.
    """

    seq_len: PositiveInt = 4096
    intermediate_dim: PositiveInt = 14336
    num_kv_heads: PositiveInt | None = 8
    tie_word_embeddings: bool = True
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotary(theta=50000.0))
    sliding_window_pattern: PositiveInt | None = 4
    attention_bias: bool = False
    logit_scale: PositiveFloat = 0.25
    interleaved = True
    norms = "layer without bias"
    use_parallel_residual = True

    @property
    def rotations(self) -> tuple[RotaryConfig, None]:
        return self.rope, None


FAMILY = Family(
    model_types=("cohere2",),
    architecture="Cohere2ForCausalLM",
    config=Cohere2Config,
    keys=(
        *usual_keys(length=8192, eps="layer_norm_eps", eps_default=1e-5, tied=True),
        window_pattern(4, window=4096, key="sliding_window_pattern"),
        *same_keys(attention_bias=False, logit_scale=0.0625),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(llama_rows(config)),
    respelled=RESPELLED_WINDOWS,
)
