"""Gemma 2: config.json keys and weight names."""

from jaxlm.interop.hf.families.gemma import ONLY_CAUSAL, gemma_keys, gemma_tensors
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey
from jaxlm.interop.hf.shared_keys import RESPELLED_WINDOWS, rope
from jaxlm.models.families.gemma2 import Gemma2Config

FAMILY = Family(
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    config=Gemma2Config,
    keys=(
        *gemma_keys(length=8192, pattern=2, final_cap=30.0),
        JsonKey("attn_logit_softcapping", "attn_soft_cap", 50.0),
        rope(),
        ONLY_CAUSAL,
        FixedKey("hidden_act", "gelu_pytorch_tanh", others=("gelu_new",)),
    ),
    tensors=lambda config: tuple(gemma_tensors(config)),
    respelled=RESPELLED_WINDOWS,
)
