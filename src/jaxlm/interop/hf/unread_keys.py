"""Keys of config.json that a family does not read: some are known to be harmless, some to change what the model computes, and
the others are not known.

transformers ignores a key that the family's class does not know, so ignoring it gives the same numbers. A key that another
family uses to change them is refused all the same: a model with it was not trained to be computed without it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# Keys that do not affect what a causal language model computes. They are too common for a note.
SILENT = {
    *("architectures", "model_type", "vocab_size", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "unk_token_id"),
    *("auto_map", "pretraining_tp", "task_specific_params", "id2label", "label2id", "num_labels", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
    *("chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "torchscript"),
    *("finetuning_task", "prefix", "tokenizer_class", "use_bfloat16", "tf_legacy_loss", "_commit_hash"),
    *("do_sample", "early_stopping", "max_length", "min_length", "num_beams", "num_beam_groups", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "suppress_tokens"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "begin_suppress_tokens"),
    *("diversity_penalty", "decoder_start_token_id", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "cross_attention_hidden_size", "add_cross_attention", "unsloth_version"),
}

# Keys that change the numbers, by what they do. A value that is false, null, zero or empty switches the feature off.
_CHANGES: dict[str, tuple[str, ...]] = {
    "it stores or computes the weights in another form": (
        *("quantization_config", "quantization", "compression_config", "pruned_heads"),
    ),
    "it changes the attention scores": (
        *("alibi", "alibi_bias_max", "attention_logit_cap", "attention_multiplier", "attention_scale", "attn_scale"),
        *("attn_logit_softcapping", "attn_soft_cap", "clip_qkv", "qkv_clip", "query_pre_attn_scalar"),
        *("softmax_scale", "attn_temperature_tuning", "attention_sinks", "use_attention_sinks", "position_bias"),
        *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "attn_config"),
        *("lambda_std_dev", "relative_attention_num_buckets"),
    ),
    "it changes which tokens attend to which": (
        *("sliding_window", "use_sliding_window", "sliding_window_size", "sliding_window_pattern", "window_size"),
        *("attention_chunk_size", "attention_window", "attention_layers", "attention_types", "layer_types"),
        *("layers_block_type", "attn_layer_indices", "full_attn_idxs", "global_attn_every_n_layers", "prefix_lm"),
        *("no_rope_layers", "no_rope_layer_interval", "use_bidirectional_attention", "cross_attention_layers"),
        *("local_attention", "sparse_attention", "num_kv_shared_layers"),
    ),
    "it changes the positions": (
        *("rope_scaling", "rope_parameters", "rope_theta", "rotary_emb_base", "rope_base", "rope_ratio"),
        *("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim", "rotary_ndims", "rope_interleaved"),
        *("rope_interleave", "rotary_interleaved", "rope_local_base_freq", "use_mrope", "mrope_section"),
        *("use_mem_rope", "original_max_position_embeddings", "learned_pos_emb", "use_dynamic_ntk"),
        *("use_logn_attn", "nope_layers"),
    ),
    "it adds, removes or moves norms": (
        *("qk_layernorm", "qk_layernorms", "qk_norm", "use_qk_norm", "qk_ln", "add_qk_norm", "norm_type"),
        *("layer_norm_type", "normalization_type", "apply_residual_connection_post_layernorm"),
        *("do_layer_norm_before", "post_norm", "use_post_norm", "sandwich_norm", "num_ln_in_parallel_attn"),
        *("layer_norm_elementwise_affine", "norm_after", "layernorm_zero_centered_gamma", "zero_centered_gamma"),
        *("norm_reorder", "scale_embedding_norm"),
    ),
    "it adds biases": (
        *("attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias", "add_bias_linear", "enable_bias"),
        *("attention_out_bias", "lm_head_bias", "include_bias", "o_proj_bias"),
    ),
    "it scales activations or logits": (
        *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "lm_head_multiplier"),
        *("scale_embedding", "scale_emb", "embedding_scale", "scale_depth", "dim_model_base", "mup_enabled"),
        *("mup_scale", "mup_width_multiplier", "mup_embeddings_scale", "mup_output_alpha", "residual_weight"),
        *("normalize_embedding", "final_logit_softcapping", "final_logits_soft_cap", "embedding_fraction"),
        *("width_scale", "output_multiplier"),
    ),
    "it changes the layers": (
        *("parallel_attn", "use_parallel_residual", "parallel_residual", "new_decoder_architecture", "multi_query"),
        *("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts"),
        *("moe_layers", "norm_topk_prob", "routed_scaling_factor", "router_jitter_noise", "swiglu_limit"),
        *("swiglu_alpha", "swiglu_beta", "hidden_size_per_layer_input", "altup_num_inputs", "laurel_rank"),
        *("activation_sparsity_pattern", "use_shared_layers", "share_layers", "num_loops", "use_value_residual"),
    ),
}
_REASONS = {name: reason for reason, names in _CHANGES.items() for name in names}
# Keys for which false switches something off that our models always do.
_ON = ("is_causal", "causal", "scale_attn_weights", "use_rope", "use_rotary", "use_rms_norm", "rms_norm")
# Values that mean "not used" although they are not empty.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("scale_attn_weights", "do_layer_norm_before", "learned_pos_emb"), (True,)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_ratio", "logit_scale"), (1, 1.0)),
    **dict.fromkeys(("logits_scaling", "residual_multiplier", "embedding_multiplier", "embedding_fraction"), (1, 1.0)),
    **dict.fromkeys(("scale_emb", "embedding_scale", "lm_head_multiplier", "output_multiplier"), (1, 1.0)),
    "sliding_window_size": (-1,),
}


def sort_unread(content: Mapping[str, Any], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Sorts keys that a family does not read.

    Args:
        content: the content of config.json.
        names: the keys.

    Returns:
        What is wrong with the keys that would change the numbers, and the keys that are not known, as `name: value`.
    """
    problems, unknown = [], []
    for name in sorted(set(names) - SILENT):
        reason = _reason(name, content[name])
        if reason is None:
            unknown.append(f"{name}: {_short(content[name])}")
        else:
            fix = f"To compute without it, set hf_skip_keys: [{name}] (skip_keys in refs), or remove the key"
            problems.append(
                f"{name}: {_short(content[name])} given, which is not supported for this family: {reason}. {fix}"
            )
    return problems, unknown


def _reason(name: str, value: Any) -> str | None:
    """Why a key changes the numbers; None if it is off or not known."""
    if name in _ON and value is False:
        return "these models always have it on"
    off = not value or value in _NEUTRAL.get(name, ())
    return None if off else _REASONS.get(name)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
