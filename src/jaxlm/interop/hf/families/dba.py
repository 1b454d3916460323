"""Decoupled bottleneck attention: config.json keys and weight names. Exports bring the code, which transformers lacks."""

from collections.abc import Iterator

from jaxlm.interop.hf.family import Family, FixedKey, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import usual_keys
from jaxlm.interop.hf.weights import BLOCK, Tensor, embeddings_and_head, pre_norms, single
from jaxlm.interop.hf.weights import gated_mlp as gated_mlp_tensors
from jaxlm.models.families.dba import DbaConfig


def _tensors(config: DbaConfig) -> Iterator[Tensor]:
    yield from embeddings_and_head(config)
    yield from pre_norms()
    theirs, ours = "model.layers.{layer}.self_attn.", f"{BLOCK}attn."
    projections, keys = {"v_proj": "kv_heads head_size"}, config.KeyHeads.name
    if config.sem_dim:
        projections["q_sem"] = "heads head_size"
        if not config.tie_qk:
            projections["k_sem"] = f"{keys} head_size"
    if config.geo_dim:
        projections |= {"q_geo": "heads head_size", "k_geo": f"{keys} head_size"}
        yield single(f"{theirs}rotary_pairs", f"{ours}pairs", f"{keys} | rotary_pairs")
    for name, out in projections.items():
        yield single(f"{theirs}{name}.weight", f"{ours}{name}.weight", f"{out} | embed")
        if config.attention_bias:
            yield single(f"{theirs}{name}.bias", f"{ours}{name}.bias", out)
    yield single(f"{theirs}o_proj.weight", f"{ours}o_proj.weight", "embed | heads head_size")
    if config.has_output_bias:
        yield single(f"{theirs}o_proj.bias", f"{ours}o_proj.bias", "embed")
    if config.gate is not None:
        yield single(f"{theirs}gate_logits", f"{ours}gate.logits", "heads")
    if config.gate == "dynamic":
        yield single(f"{theirs}gate_proj.weight", f"{ours}gate.proj.weight", "heads | embed")
    if config.null_slot:
        yield single(f"{theirs}null_key", f"{ours}null_slot.keys", f"{keys} | head_size")
        yield single(f"{theirs}null_value", f"{ours}null_slot.values", "kv_heads | head_size")
    yield from gated_mlp_tensors(use_bias=config.mlp_bias)


FAMILY = Family(
    model_types=("jaxlm_dba",),
    architecture="DbaForCausalLM",
    config=DbaConfig,
    keys=(
        *usual_keys(length=2048),
        *(JsonKey(name, name, 0) for name in ("sem_dim", "geo_dim")),
        JsonKey("num_key_heads", "num_key_heads", None),
        JsonKey("rotary_dim", "rotary_dim", None),
        JsonKey("gate", "gate", None),
        *(
            JsonKey(name, name, False)
            for name in ("rope_semantic", "tie_qk", "null_slot", "attention_bias", "mlp_bias")
        ),
        KeyGroup(
            ("output_bias",),
            lambda theirs: {"output_bias": theirs.get("output_bias", False)},
            lambda config: {"output_bias": config.has_output_bias},
        ),
        JsonKey("sliding_window", "sliding_window", None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    modeling="modeling_jaxlm_dba",
    respelled=("output_bias",),
)
