"""Model families of Hugging Face: their keys in config.json and their weight names.

Every family is one file in `jaxlm.interop.hf.families`. Its tables define both directions, import and export.
"""

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlm.core.axes import POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_field
from jaxlm.core.safe_io import read_bytes
from jaxlm.interop.hf import families, modeling
from jaxlm.interop.hf.unread_keys import sort_unread
from jaxlm.interop.hf.weights import Tensor
from jaxlm.models.base import ModelConfig

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
    """

    theirs: str
    value: Any
    others: tuple[Any, ...] = ()


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
        tensors: the table of weights for a model config.
        prefix: prefix of tensor names; files of a model without its head omit it.
        unused: regular expressions for tensors that are not parameters (masks, rotary frequencies).
        modeling: module with the code of the model, which exports bring, if transformers has none. Its classes are called
            like `architecture` and like `config`.
        aliases: another name of a key of config.json -> the name in `keys`. Of both, transformers follows the alias.
        respelled: fields of the model config that describe the same model in several ways, of which an imported config
            has only one.
    """

    model_types: tuple[str, ...]
    architecture: str
    config: type[ModelConfig]
    keys: Sequence[JsonKey | FixedKey | KeyGroup]
    tensors: Callable[[Any], Sequence[Tensor]]
    prefix: str = "model."
    unused: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    modeling: str | None = None
    respelled: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def modeling_files(self) -> dict[str, bytes]:
        """Name -> content of the files with the code of the model; none if transformers has it."""
        if self.modeling is None:
            return {}
        name = f"{self.modeling}.py"
        return {name: read_bytes(Path(str(modeling.__file__)).with_name(name))}

    def code_keys(self) -> Json:
        """The keys of config.json by which transformers finds the code of the model."""
        if self.modeling is None:
            return {}
        classes = {"AutoConfig": self.config.__name__, "AutoModelForCausalLM": self.architecture}
        return {"auto_map": {auto: f"{self.modeling}.{name}" for auto, name in classes.items()}}


_LATENT = "its attention is multi-head latent attention (MLA), with compressed keys and values"
_LLAMA4 = "its attention is chunked, with scores that depend on the position, and its experts scale their inputs"
_GEMMA3N = "it has embeddings for every layer, alternating updates (AltUp) and layers that share keys and values"
_UNSUPPORTED = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
}
"""Why families that users ask for have no model here."""


@functools.cache
def all_families() -> tuple[Family, ...]:
    """All families in `jaxlm.interop.hf.families`."""
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return tuple(module.FAMILY for module in modules if hasattr(module, "FAMILY"))


def family_of_config(config: ModelConfig) -> Family:
    """The family of a model config. Raises `ConfigError` if Hugging Face has none."""
    kind = type(config.as_family())
    for family in all_families():
        if family.config is kind:
            return family
    known = ", ".join(family.model_types[0] for family in all_families())
    raise ConfigError(
        f"model.type: {type(config).__name__} has no equivalent in Hugging Face transformers. Supported: {known}"
    )


def family_of_json(content: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json. Raises `ConfigError` if it is unknown."""
    model_type = content.get("model_type")
    for family in all_families():
        if model_type in family.model_types:
            return family
    known = ", ".join(kind for family in all_families() for kind in family.model_types)
    if isinstance(model_type, str) and model_type in _UNSUPPORTED:
        raise ConfigError(
            f"{where}: model_type '{model_type}' is not supported: {_UNSUPPORTED[model_type]}. Supported: {known}"
        )
    raise ConfigError(f"{where}: unknown model_type '{model_type}'. Known: {known}")


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
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):  # a text where a number belongs
            names = key.theirs if isinstance(key, KeyGroup) else (key.theirs,)
            values = ", ".join(f"{name}: {content[name]!r}" for name in names if name in content)
            problems.append(f"{values or ', '.join(names)} given, which this family does not support")
    return fields, notes, problems


def _check_fixed(key: FixedKey, content: Mapping[str, Any]) -> None:
    value = content.get(key.theirs, key.value)
    if value != key.value and value not in key.others:
        raise ConfigError(f"{key.theirs}: {value} given, which is not supported; {key.value} expected")


def config_to_json(family: Family, config: ModelConfig) -> Json:
    """Converts a model config to the keys of config.json.

    Raises:
        ConfigError: lists all fields whose value config.json cannot represent.
    """
    config = config.as_family()
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


def edited_json(family: Family, config: ModelConfig, source: Mapping[str, Any]) -> Json:
    """Writes the config.json of a model that was made from another: that of the `source`, with the keys that differ.

    A model that was trained on shorter texts keeps the source's length, unless it has lost rows of its table of positions, or
    has another rotary embedding.
    """
    where, config = "the config.json of the source", config.as_family()
    if source.get("model_type") not in family.model_types:
        return config_to_json(family, config)
    try:
        original, _ = config_from_json(family, source, where)
    except ConfigError:  # the run skips keys of it
        return config_to_json(family, config)
    is_learned = any((POSITION,) in part.dims for tensor in family.tensors(config) for part in tensor.parts)
    if config.seq_len < original.seq_len and config.rotary == original.rotary and not is_learned:
        config = dataclasses.replace(config, seq_len=original.seq_len)
    before, after = config_to_json(family, original), config_to_json(family, config)
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    dropped = {
        *(key for key in before if key not in after),
        *(a for a, own in family.aliases.items() if own in changed),
    }
    edited = {key: value for key, value in source.items() if key not in {*dropped, "auto_map"}} | changed
    edited |= {key: after[key] for key in ("architectures", "auto_map") if key in after}
    # Else the source says it in several ways, of which only some were changed.
    with contextlib.suppress(ConfigError):
        if config_to_json(family, config_from_json(family, edited, where)[0]) == after:
            return edited
    return after


# Fields that only affect how the model is computed, and fields that may be null here but are numbers in config.json.
_NOT_COMPARED = (
    *("gradient_checkpointing", "scan_layers", "attn_backend", "mlp_tile_tokens", "pad_vocab_to_multiple_of"),
    *("num_kv_heads", "head_dim"),
    "seq_len",  # dynamic rotary embeddings need the length from which on they change
    "router_z_loss_coef",  # transformers has no such loss; it does not affect the model's outputs
)
