"""Gemma 2 in config.json and in its files."""

from jaxlm.interop.family import Family, Fixed, Key
from jaxlm.interop.shared_keys import activation, head_dim, kv_heads, rope, sizes, window_pattern
from jaxlm.interop.shared_weights import attention, ends, four_norms, gated_mlp
from jaxlm.models.gemma2 import Gemma2Config

FAMILY = Family(
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    config=Gemma2Config,
    keys=(
        *sizes(length=8192, tied=True),
        kv_heads(),
        head_dim(256),
        rope(),
        activation("hidden_activation", "gelu_pytorch_tanh", written={"gelu_new": "gelu_pytorch_tanh"}),
        window_pattern(2, window=4096),
        Key("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        Key("attn_logit_softcapping", "attn_soft_cap", 50.0),
        Key("final_logit_softcapping", "final_soft_cap", 30.0),
        Fixed("hidden_act", "gelu_pytorch_tanh", others=("gelu_new",)),
        Fixed("use_bidirectional_attention", None, others=(False,)),
        Fixed("attention_bias", False),
        Fixed("attention_dropout", 0.0),
        Fixed("cache_implementation", "hybrid", others=(None,)),
    ),
    tensors=lambda config: (*ends(config), *four_norms(), *attention(), *gated_mlp()),
)
