"""Model families of Hugging Face: their keys in config.json, their weight names, and what their unread keys mean.

Every family is one file in `jaxlm.interop.hf.families`, or in a wing. Its tables define both directions, import and export.

Of the keys that a family does not read, some are known to be harmless, some to change what the model computes, and the
others are not known. transformers ignores a key that the family's class does not know, so ignoring it gives the same
numbers. A key that another family uses to change them is refused all the same: a model with it was not trained to be
computed without it.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_field
from jaxlm.core.safe_io import read_bytes
from jaxlm.interop.hf.stored_formats import QUANTIZATION, unreadable
from jaxlm.interop.hf.text_part import TextPart
from jaxlm.interop.hf.weights import Tensor
from jaxlm.models.base import ModelConfig, as_family
from jaxlm.reading.choices import sources

# Keys that do not affect what a causal language model computes. They are too common for a note.
SILENT = {
    *("architectures", "model_type", "vocab_size", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "unk_token_id"),
    *("auto_map", "pretraining_tp", "task_specific_params", "id2label", "label2id", "num_labels", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
    *("chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "torchscript"),
    *("finetuning_task", "prefix", "tokenizer_class", "use_bfloat16", "tf_legacy_loss", "_commit_hash", "eod_token_id"),
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
        *(QUANTIZATION, "quantization", "compression_config", "pruned_heads"),
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
        reason, stored = _reason(name, content[name]), name == QUANTIZATION and unreadable(content[name])
        if name == QUANTIZATION and not stored:
            continue  # the weights are decoded
        if reason is None:
            unknown.append(f"{name}: {_short(content[name])}")
        else:
            fix = f"To compute without it, set hf_skip_keys: [{name}] (skip_keys in refs), or remove the key"
            problems.append(
                f"{name}: {_short(content[name])} given, which is not supported for this family: {reason}"
                f"{f' ({stored})' if stored else ''}. {fix}"
            )
    return problems, unknown


def _reason(name: str, value: Any) -> str | None:
    """Says why a key changes the numbers; None if it is off or not known."""
    if name in _ON and value is False:
        return "these models always have it on"
    off = not value or value in _NEUTRAL.get(name, ())
    return None if off else _REASONS.get(name)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


Json = dict[str, Any]
REQUIRED = object()


@dataclass(frozen=True)
class JsonKey:
    """A key of config.json that corresponds to one field of the model config.

    Attributes:
        theirs, ours: name of the key in config.json, and of the field.
        default: value if the key is missing; REQUIRED if it must be present.
        to_ours, to_theirs: convert the value. Messages of a `ConfigError` must start with the name of the key.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    to_ours: Callable[[Any], Any] = lambda value: value
    to_theirs: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class FixedKey:
    """A key of config.json for which only one value is supported. Export writes that value.

    Attributes:
        others: additional values that are accepted because they mean the same.
        default: the value if the key is missing; None for the supported one.
    """

    theirs: str
    value: Any
    others: tuple[Any, ...] = ()
    default: Any = None


@dataclass(frozen=True)
class KeyGroup:
    """Keys that are converted together (rotary embedding, windows), with one function for each direction.

    Attributes:
        theirs: all keys of config.json that `to_ours` may read.
        to_ours: config.json -> fields of the model config.
        to_theirs: model config -> keys of config.json.
        notes: config.json -> what `to_ours` ignores, and why.
    """

    theirs: tuple[str, ...]
    to_ours: Callable[[Mapping[str, Any]], Json]
    to_theirs: Callable[[Any], Json]
    notes: Callable[[Mapping[str, Any]], Sequence[str]] = lambda _: ()


@dataclass(frozen=True)
class Family:
    """A model family of Hugging Face.

    Attributes:
        model_types: accepted values of `model_type` in config.json; the first one is written.
        architecture: class name in transformers of the model with the language-model head.
        config: model config class in jaxlm.
        keys: all relevant keys of config.json.
        tensors: the table of weights for a model config. Exports have it, unless their source has another.
        layouts: further tables that folders have. The one that fits the tensors of a folder is read.
        prefix: prefix of tensor names; files of a model without its head omit it.
        unused: regular expressions for tensors that are not parameters (masks, rotary frequencies).
        modeling: file with the code of the model, which exports bring, if transformers has none. Its classes are called
            like `architecture` and like `config`.
        aliases: another name of a key of config.json -> the name in `keys`. Of both, transformers follows the alias.
        respelled: fields of the model config that describe the same model in several ways, of which an imported config
            has only one.
        text: the multimodal folders whose text part is such a model.
        kept: regular expressions for the beginnings of names of tensors of layers that predict more tokens (MTP). A model
            without `mtp` does not have them, and its exports copy them.
        idle: config -> such expressions for tensors of its layers that the model does not use. Exports copy them.
        vocab_keys: keys of config.json with the number of rows of a table for the vocabulary.
        further: the tensor that a layer of the files has only if it predicts more tokens, as of `kept`.
        copies: name of a tensor in such a layer, with `{layer}` for its number -> the name of the one that it is a copy of.
        experts: the module of a layer in transformers that has the weights of all experts.
        router: the module there that has the weight of the router; empty if it is a linear layer.
    """

    model_types: tuple[str, ...]
    architecture: str
    config: type[ModelConfig]
    keys: Sequence[JsonKey | FixedKey | KeyGroup]
    tensors: Callable[[Any], Sequence[Tensor]]
    prefix: str = "model."
    unused: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    modeling: Path | None = None
    respelled: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[Callable[[Any], Sequence[Tensor]], ...] = ()
    text: tuple[TextPart, ...] = ()
    kept: tuple[str, ...] = ()
    further: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    idle: Callable[[Any], Sequence[str]] = lambda _: ()
    vocab_keys: tuple[str, ...] = ("vocab_size",)
    experts: str = "mlp.experts"
    router: str = "mlp.gate"

    def modeling_files(self) -> dict[str, bytes]:
        """Name -> content of the files with the code of the model; none if transformers has it."""
        if self.modeling is None:
            return {}
        return {self.modeling.name: read_bytes(self.modeling)}

    def code_keys(self) -> Json:
        """The keys of config.json by which transformers finds the code of the model."""
        if self.modeling is None:
            return {}
        classes = {"AutoConfig": self.config.__name__, "AutoModelForCausalLM": self.architecture}
        return {"auto_map": {auto: f"{self.modeling.stem}.{name}" for auto, name in classes.items()}}


@functools.cache
def all_families() -> tuple[Family, ...]:
    """All families: the `FAMILY` of each module that has one."""
    names = [name for name, text in sources().items() if re.search(r"^FAMILY = ", text, re.M)]
    return tuple(importlib.import_module(name).FAMILY for name in names)


def family_of_config(config: ModelConfig) -> Family:
    """The family of a model config. Raises `ConfigError` if Hugging Face has none."""
    kind = type(as_family(config))
    for family in all_families():
        if family.config is kind:
            return family
    known = ", ".join(family.model_types[0] for family in all_families())
    raise ConfigError(
        f"model.type: {type(config).__name__} has no equivalent in Hugging Face transformers. Supported: {known}"
    )


def config_from_json(family: Family, content: Mapping[str, Any], where: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """Converts a config.json to a model config.

    Returns:
        The config, and notes about what is ignored.

    Raises:
        ConfigError: lists all keys that are missing, have an unsupported value, or are unknown and change the numbers.
    """
    content, outvoted = _by_own_names(family, content)
    fields, notes, problems = _fields_of(family, content)
    names = [key.theirs if isinstance(key, KeyGroup) else (key.theirs,) for key in family.keys]
    changing, unknown = sort_unread(content, set(content).difference(*names))
    problems += changing
    if problems:
        raise ConfigError(f"{where} ({family.model_types[0]}):\n" + "\n".join(f"  {line}" for line in problems))
    try:
        config = family.config(**fields)
        config.check()
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where} ({family.model_types[0]}): {error}") from error
    notes = [*outvoted, *notes]
    if unknown:
        notes.append(f"keys that jaxlm does not know for this family: {', '.join(unknown)}")
    return config, tuple(f"{where}: ignored: {note}" for note in notes)


def _by_own_names(family: Family, content: Mapping[str, Any]) -> tuple[Json, list[str]]:
    """The content with the family's names in place of their aliases, and notes about values that were replaced."""
    given = {own: content[alias] for alias, own in family.aliases.items() if alias in content}
    others = {name: value for name, value in content.items() if name not in family.aliases}
    why = "transformers follows its other name, which is"
    return others | given, [note for o, v in given.items() for note in unfollowed(others, [o], v, f"{why} {v}")]


def unfollowed(theirs: Mapping[str, Any], names: Sequence[str], followed: Any, why: str) -> list[str]:
    """A note for each of these keys of config.json that has another value than the one that transformers follows."""
    return [f"{name}: {theirs[name]}: {why}" for name in names if theirs.get(name) not in (None, followed)]


def _fields_of(family: Family, content: Mapping[str, Any]) -> tuple[Json, list[str], list[str]]:
    """The fields of the model config, notes about what is ignored, and what is wrong with the keys that the family reads."""
    notes: list[str] = []
    problems: list[str] = []
    fields: Json = {}
    missing = False  # or wrong, so that keys which are computed from several cannot be
    for key in sorted(family.keys, key=lambda key: isinstance(key, KeyGroup)):  # groups last: they read other keys
        try:
            if isinstance(key, KeyGroup):
                fields |= {} if missing else key.to_ours(content)
                notes += [] if missing else key.notes(content)
            elif isinstance(key, FixedKey):
                _check_fixed(key, content)
            elif (value := content.get(key.theirs, key.default)) is REQUIRED:
                missing = True
                problems.append(f"{key.theirs}: missing")
            else:
                fields[key.ours] = key.to_ours(value)
                check_field(family.config, key.ours, fields[key.ours], "model")
        except ConfigError as error:
            missing = missing or not isinstance(key, KeyGroup)
            problems.append(str(error))
        except KeyError as error:  # groups read keys that every file of the family has
            problems.append(f"{error.args[0]}: missing")
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):  # a text where a number belongs
            names = key.theirs if isinstance(key, KeyGroup) else (key.theirs,)
            values = ", ".join(f"{name}: {content[name]!r}" for name in names if name in content)
            problems.append(f"{values or ', '.join(names)} given, which this family does not support")
    return fields, notes, problems


def key_problems(family: Family, content: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of a config.json that a family reads."""
    return _fields_of(family, content)[2]


def _check_fixed(key: FixedKey, content: Mapping[str, Any]) -> None:
    value = content.get(key.theirs, key.value if key.default is None else key.default)
    if value != key.value and value not in key.others:
        raise ConfigError(f"{key.theirs}: {value} given, which is not supported; {key.value} expected")


def config_to_json(family: Family, config: ModelConfig) -> Json:
    """Converts a model config to the keys of config.json.

    Raises:
        ConfigError: lists all fields whose value config.json cannot represent.
    """
    config = as_family(config)
    written: Json = {}
    for key in family.keys:
        if isinstance(key, FixedKey):
            written[key.theirs] = key.value
        elif isinstance(key, KeyGroup):
            written |= key.to_theirs(config)
        else:
            written[key.theirs] = key.to_theirs(getattr(config, key.ours))
    described = {**written, "model_type": family.model_types[0]}
    restored, _ = config_from_json(family, described, "the exported config.json")
    lost = [
        f"{f.name}: {getattr(config, f.name)} would become {getattr(restored, f.name)}"
        for f in dataclasses.fields(config)
        if f.name not in (*_NOT_COMPARED, *family.respelled) and getattr(config, f.name) != getattr(restored, f.name)
    ]
    ours, theirs = (getattr(one, "KVHeads", None) for one in (config, restored))  # null means as many as query heads
    if ours is not None and theirs is not None and ours != theirs:
        lost.append(f"num_kv_heads: {ours.size} would become {theirs.size}")
    if lost:
        raise ConfigError(
            f"config.json of {family.model_types[0]} cannot represent this model:\n"
            + "\n".join(f"  model.{x}" for x in lost)
        )
    kind = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    return {**kind, **family.code_keys(), **written}


# Fields that only affect how the model is computed, and fields that may be null here but are numbers in config.json.
_NOT_COMPARED = (
    *("gradient_checkpointing", "scan_layers", "attn_backend", "mlp_tile_tokens", "pad_vocab_to_multiple_of"),
    *("expert_dispatch", "expert_capacity", "expert_products", "expert_parts"),
    *("num_kv_heads", "head_dim"),
    "seq_len",  # dynamic rotary embeddings need the length from which on they change
    "router_z_loss_coef",  # transformers has no such loss; it does not affect the model's outputs
    "router_bias_step",  # nor such an update
    "mtp",  # config.json says whether there is such a layer, and not whether it is computed
)


def has_mtp(config: Any) -> bool:
    """Whether a model has a layer that predicts the token after the next one (`jaxlm.models.decoders.mtp`)."""
    return getattr(config, "mtp", False)


def with_mtp_of(config: Any, read: ModelConfig) -> ModelConfig:
    """A config of the same family that was read from a config.json, with this layer if `config` has it."""
    return dataclasses.replace(read, **{"mtp": True}) if has_mtp(config) else read
