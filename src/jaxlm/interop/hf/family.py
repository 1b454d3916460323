"""A family of models as Hugging Face knows it: its names in config.json, and its table of weights.

Every family is one file in `jaxlm.interop.hf.families`, which says both ways at once: what is read is what is written.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf import families
from jaxlm.interop.hf.weights import Tensor
from jaxlm.models.base import ModelConfig

Json = dict[str, Any]


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class JsonKey:
    """A number or name that both have.

    Attributes:
        theirs, ours: its name there and here.
        default: what theirs is when it is not written; REQUIRED where they always write it.
        to_ours, to_theirs: translate the value; a `ConfigError`'s message begins with the name of the key.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    to_ours: Callable[[Any], Any] = lambda value: value
    to_theirs: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class FixedKey:
    """A key of theirs with one value that can be imported, which is the one written.

    Attributes:
        others: further values that mean the same.
    """

    theirs: str
    value: Any
    others: tuple[Any, ...] = ()


@dataclass(frozen=True)
class KeyGroup:
    """Keys that only make sense together (rotation, windows): a function for each way.

    Attributes:
        theirs: all that it may read.
        to_ours: their config -> our fields.
        to_theirs: our config -> their keys.
    """

    theirs: tuple[str, ...]
    to_ours: Callable[[Mapping[str, Any]], Json]
    to_theirs: Callable[[Any], Json]


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_types: `model_type` in config.json; the first is what is written.
        architecture: the class of transformers with the language-model head.
        config: ours.
        keys: all of their keys that matter.
        tensors: the table of weights for a configuration.
        prefix: what their names begin with; files of the model without its head leave it out.
        unused: regular expressions of tensors that are no parameters (masks, rotations).
    """

    model_types: tuple[str, ...]
    architecture: str
    config: type[ModelConfig]
    keys: Sequence[JsonKey | FixedKey | KeyGroup]
    tensors: Callable[[Any], Sequence[Tensor]]
    prefix: str = "model."
    unused: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)


@functools.cache
def all_families() -> tuple[Family, ...]:
    """Every family that there is a file for."""
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return tuple(module.FAMILY for module in modules if hasattr(module, "FAMILY"))


def family_of_config(config: ModelConfig) -> Family:
    """The family that writes a model configuration of ours."""
    for family in all_families():
        if family.config is type(config):
            return family
    known = ", ".join(family.model_types[0] for family in all_families())
    raise ConfigError(
        f"model.type: {type(config).__name__} has no counterpart at Hugging Face. There is one for: {known}"
    )


def family_of_json(content: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json belongs to."""
    given = content.get("model_type")
    for family in all_families():
        if given in family.model_types:
            return family
    known = ", ".join(kind for family in all_families() for kind in family.model_types)
    raise ConfigError(f"{where}: model_type '{given}' is not known. Known: {known}")


# Keys that change nothing about what a causal language model computes from tokens.
IRRELEVANT = {
    *("architectures", "model_type", "vocab_size", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "unk_token_id"),
    *("auto_map", "pretraining_tp", "task_specific_params", "id2label", "label2id", "num_labels", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
    *("chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "torchscript"),
    *("finetuning_task", "prefix", "tokenizer_class", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "_commit_hash"),
    *("do_sample", "early_stopping", "max_length", "min_length", "num_beams", "num_beam_groups", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "suppress_tokens"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "begin_suppress_tokens"),
    *("diversity_penalty", "decoder_start_token_id", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "cross_attention_hidden_size", "add_cross_attention", "unsloth_version"),
}


def config_from_json(family: Family, content: Mapping[str, Any], where: str) -> ModelConfig:
    """Our configuration of a config.json.

    Raises:
        ConfigError: a key that is missing, that is not known, or that says what cannot be imported; all are named.
    """
    problems: list[str] = []
    fields: Json = {}
    missing = False
    for key in sorted(family.keys, key=lambda key: isinstance(key, KeyGroup)):  # these may read what the others need
        try:
            if isinstance(key, KeyGroup):
                fields |= {} if missing else key.to_ours(content)
            elif isinstance(key, FixedKey):
                _check_fixed(key, content)
            elif (value := content.get(key.theirs, key.default)) is REQUIRED:
                missing = True
                problems.append(f"{key.theirs}: not given")
            else:
                fields[key.ours] = key.to_ours(value)
        except ConfigError as error:
            problems.append(str(error))
    seen = IRRELEVANT.union(*(key.theirs if isinstance(key, KeyGroup) else (key.theirs,) for key in family.keys))
    unknown = sorted(set(content) - seen)
    problems += [f"{name}: {content[name]} given; it is not known what this means for the model" for name in unknown]
    if problems:
        raise ConfigError(f"{where} ({family.model_types[0]}):\n" + "\n".join(f"  {line}" for line in problems))
    config = family.config(**fields)
    config.check()
    return config


def _check_fixed(key: FixedKey, content: Mapping[str, Any]) -> None:
    given = content.get(key.theirs, key.value)
    if given != key.value and given not in key.others:
        raise ConfigError(f"{key.theirs}: {given} given, which cannot be imported; {key.value} can")


def config_to_json(family: Family, config: ModelConfig) -> Json:
    """The keys of config.json for a configuration of ours.

    Raises:
        ConfigError: the configuration says what theirs cannot; all of it is named.
    """
    written: Json = {}
    for key in family.keys:
        if isinstance(key, FixedKey):
            written[key.theirs] = key.value
        elif isinstance(key, KeyGroup):
            written |= key.to_theirs(config)
        else:
            written[key.theirs] = key.to_theirs(getattr(config, key.ours))
    again = config_from_json(family, {**written, "model_type": family.model_types[0]}, "what would be written")
    lost = [
        f"{f.name}: {getattr(config, f.name)} would become {getattr(again, f.name)}"
        for f in dataclasses.fields(config)
        if f.name not in _NOT_COMPARED and getattr(config, f.name) != getattr(again, f.name)
    ]
    if lost:
        raise ConfigError(
            f"config.json of {family.model_types[0]} cannot say all that the model is:\n"
            + "\n".join(f"  model.{x}" for x in lost)
        )
    return {"architectures": [family.architecture], "model_type": family.model_types[0], **written}


# How the model is computed, and what is written as a number where ours may be null.
_NOT_COMPARED = (
    *("gradient_checkpointing", "scan_layers", "attn_backend", "num_kv_heads", "head_dim"),
    "router_z_loss_coef",  # they have no such loss; what the model computes is the same
)
