"""The form of a folder: the family of its model, and where the text model is in it. Exports keep the form of their source."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.core.axes import POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import (
    REQUIRED,
    SILENT,
    Family,
    FixedKey,
    Json,
    JsonKey,
    KeyGroup,
    all_families,
    config_from_json,
    config_to_json,
    has_mtp,
    key_problems,
    sort_unread,
    with_mtp_of,
)
from jaxlm.interop.hf.load import misfits
from jaxlm.interop.hf.tensor_files import TensorSource
from jaxlm.interop.hf.text_part import Names, TextPart, replaced_keys, text_tensors, with_sections
from jaxlm.interop.hf.weights import Tensor
from jaxlm.models.base import ModelConfig, as_family


@dataclass(frozen=True)
class Form:
    """The form of a folder.

    Attributes:
        part: the kind of multimodal folder; None for a folder of the text model alone.
    """

    family: Family
    part: TextPart | None = None

    def level(self, content: Mapping[str, Any]) -> Json:
        """The keys of config.json that describe the text model."""
        return dict(content) if self.part is None else self.part.level(content)

    def table(self, config: Any, layout: int = 0) -> Sequence[Tensor]:
        """The table of weights. Args: layout: number of the table, as of `layout`."""
        return (self.family.tensors, *self.family.layouts)[layout](as_family(config))

    def layout(self, source: TensorSource, config: Any, leaves: Mapping[str, Any]) -> int:
        """The number of the table that fits a folder best. Args: source: as of `tensors`. leaves: path -> parameter."""

        def num_misfits(layout: int) -> int:
            return len(misfits(self.table(config, layout), source, leaves, prefix=self.family.prefix))

        return min(range(1 + len(self.family.layouts)), key=num_misfits) if self.family.layouts else 0

    def names(self, source: TensorSource) -> Names:
        """How the names in a folder begin. A multimodal model's names may be in a folder that claims to have text alone."""
        return Names.of(source.tensors, self.family.prefix) if self.family.text else Names()

    def kept(self, source: TensorSource, config: Any) -> Callable[[str], bool]:
        """Tells which tensors exports copy. Those of other parts are also copied if a folder claims to have text alone, and
        those of MTP layers unless the model has one."""
        parts = [self.part] if self.part else self.family.text
        patterns = [*self.family.idle(as_family(config)), *(pattern for part in parts for pattern in part.kept)]
        if not has_mtp(config):
            patterns += self.family.kept
            further = self.family.further
            patterns += [
                re.escape(n.removesuffix(further)) for n in source.tensors if further and n.endswith(f".{further}")
            ]
        return lambda name: any(re.match(pattern, name) for pattern in patterns)

    def copies(self, source: TensorSource, config: Any) -> dict[str, str]:
        """Those of `Family.copies` that a folder has, if the model has the layer: name -> a name of the table."""
        if not has_mtp(config):
            return {}
        table = {tensor.name: tensor for tensor in self.table(config)}
        embedding = next(tensor.name for tensor in table.values() if tensor.parts[0].path == "tokens.weight")
        return {
            name: of if of in table else embedding
            for name, of in self.family.copies.items()
            if name.format(layer=config.num_layers) in source.tensors
        }

    def tensors(self, source: TensorSource, config: Any) -> TensorSource:
        """The tensors of a folder that may be those of a model of this config, by the names of the table."""
        kept = self.kept(source, config)
        copies = {name.format(layer=config.num_layers) for name in self.copies(source, config)}
        is_other = lambda name: name in copies or kept(name)  # noqa: E731
        return text_tensors(source, self.names(source), is_other, self.family.prefix)


def form_of_json(content: Mapping[str, Any], where: str) -> Form:
    """The form that a config.json describes. Raises `ConfigError` if its `model_type` is unknown."""
    for family in all_families():
        if content.get("model_type") in family.model_types:
            return Form(family)
        for part in family.text:
            if part.matches(content):
                return Form(family, part)
    raise ConfigError(f"{where}: {_unknown(content)}")


def _unknown(content: Mapping[str, Any]) -> str:
    """What is known about a config.json whose `model_type` is not."""
    inner = content.get("text_config")
    level, name = (inner, "text_config.model_type") if isinstance(inner, Mapping) else (content, "model_type")
    given = f"{name} '{level.get('model_type')}'"
    if level is not content:
        given = f"{given} in a folder with model_type '{content.get('model_type')}'"
    known = ", ".join(sorted({kind for f in all_families() for kind in (*f.model_types, *_folder_types(f))}))
    read = {key for family in all_families() for key in keys_of(family)}
    off = {key.theirs for family in all_families() for key in family.keys if isinstance(key, FixedKey)}
    parts = [
        f"{part} ({', '.join(found)})"
        for pattern, part in _PARTS
        if (found := [key for key in _used(level) if re.search(pattern, key)])
        and not any(re.search(pattern, key) for key in read - off)
    ]
    others = sorted(set(_used(level)) - read - SILENT - _USUAL)
    if any(level.get("model_type") in family.model_types for family in all_families()):
        lacks = " jaxlm reads this text model alone: save it in a folder of its own."
    elif parts:
        lacks = f" It has {', and '.join(parts)}, which jaxlm does not have."
    else:
        lacks = _nearest(level, others, level is content)
    return f"unknown {given}.{lacks} Known: {known}"


def _folder_types(family: Family) -> Iterator[str]:
    for part in family.text:
        yield from part.model_types


def _nearest(level: Mapping[str, Any], others: Sequence[str], is_whole: bool) -> str:
    """Says how the keys differ from those of the family that has the most of them.

    Args:
        others: keys that no family has.
        is_whole: whether the folder has a text model alone.
    """
    _, family, problems, unread = min((_distance(family, level) for family in all_families()), key=lambda one: one[0])
    kind = family.model_types[0]
    if not problems:
        but = f", except {', '.join(unread)}" if unread else ""
        where = "a copy of its config.json" if is_whole else "the config.json of a folder of the text model alone"
        return (
            f" Its keys are those of '{kind}'{but}. If it computes the same and its tensors have the same names, set"
            f" model_type: {kind} in {where}."
        )
    if others:
        return f" No family of jaxlm has its keys {', '.join(others)}."
    lacks = [f"does not read {', '.join(unread)}"] if unread else []
    lacks += [f"says: {'; '.join(lines)}" for lines in [key_problems(family, level)] if lines]
    return f" The family with the most of its keys is '{kind}', which {', and '.join(lacks)}."


def _distance(family: Family, level: Mapping[str, Any]) -> tuple[tuple[Any, ...], Family, list[str], list[str]]:
    """How far a family's keys are from those of a config.json, what is wrong with them, and the keys that it does not read.

    Another usual activation counts most among families that can read them: it tells MLPs apart. Of equals, Llama is the
    likeliest.
    """
    names = keys_of(family)
    unread = sorted(set(level) - names - SILENT)
    problems = key_problems(family, level) + sort_unread(level, unread)[0]
    (width,) = (key.theirs for key in family.keys if isinstance(key, JsonKey) and key.ours == "hidden_dim")
    if not {width, *(alias for alias, own in family.aliases.items() if own == width)} & level.keys():
        problems.append(width)
    usual = {key.theirs: key.default for key in family.keys if isinstance(key, JsonKey) and key.ours == _ACTIVATION}
    differs = any(level[key] != default for key, default in usual.items() if key in level and default is not REQUIRED)
    is_other, size = "llama" not in family.model_types, len(problems) + len(unread)
    return (bool(problems), differs, size, is_other, len(names - set(level))), family, problems, unread


def _used(level: Mapping[str, Any]) -> list[str]:
    """The keys that switch something on, and the kinds of layers."""
    kinds = level.get("layer_types")
    listed = [f"layer_types.{kind}" for kind in kinds] if isinstance(kinds, list) else []
    return [*(key for key, value in level.items() if value and key != "layer_types"), *dict.fromkeys(listed)]


_USUAL = {f"layer_types.{kind}_attention" for kind in ("full", "sliding", "linear")}
_PARTS = (
    ("^linear_(num|key|value|conv)", "linear attention with a recurrent state"),
    (r"^mamba_(?!ssm_dtype)|^ssm_|^state_size$|layer_types\.mamba|hybrid_override_pattern", "state-space layers"),
    (r"^conv_L_cache$|layer_types\.conv", "short convolutions"),
    ("_low_rank_dim$|^rescale_every$", "the recurrence of RWKV"),
    ("^attention_chunk_size$", "attention in chunks"),
    ("^altup_", "alternating updates (AltUp)"),
    ("^swiglu_limit$", "experts with clamped activations"),
    ("^(is_encoder_decoder|encoder_layers)$", "an encoder beside the decoder"),
)
"""Parts of models by the keys that tell it. It is not missing if some family reads such a key, with several values."""


def edited_json(family: Family, config: ModelConfig, source: Mapping[str, Any], *, untied: bool = False) -> Json:
    """Writes the config.json of a model that was made from another: that of the `source`, with the keys that differ.

    In a multimodal folder, they are those of the text model; all other keys stay. A model that was trained on shorter texts
    keeps the source's length, unless it has lost rows of its table of positions, or has another rotary embedding.

    Args:
        untied: whether the source's weights have a head of their own, whatever its config.json says. transformers follows
            the weights.
    """
    where, config = "the config.json of the source", as_family(config)
    form = form_of_source(family, source)
    if form is None:
        return config_to_json(family, config)
    level = form.level(source)
    try:
        original, _ = config_from_json(family, level, where)
    except ConfigError:  # of an earlier version of the source's folder
        return config_to_json(family, config)
    original = with_mtp_of(config, original)
    if untied:
        original = dataclasses.replace(original, **{_TIED: False})
    is_learned = any((POSITION,) in part.dims for tensor in form.table(config) for part in tensor.parts)
    if config.seq_len < original.seq_len and config.rotary == original.rotary and not is_learned:
        config = dataclasses.replace(config, seq_len=original.seq_len)
    before, after = config_to_json(family, original), config_to_json(family, config)
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    dropped = {
        *(key for key in before if key not in after),
        *(a for a, own in family.aliases.items() if own in changed),
    }
    whole = {"architectures", "auto_map", "model_type"} if form.part is None else set()
    own = {key: after[key] for key in whole if key in after}

    def edited(changed: Mapping[str, Any], dropped: set[str]) -> Json | None:
        """The source with these keys, if it says the same as `after`."""
        content = replaced_keys(source, with_sections(level, changed) | own, [*dropped, *(whole - set(own))])
        with contextlib.suppress(ConfigError):
            told = form.level(content) | ({_TIED: False} if untied else {})
            read = with_mtp_of(config, config_from_json(family, told, where)[0])
            return content if config_to_json(family, read) == after else None
        return None

    if (content := edited(changed, dropped)) is not None:
        return content
    # The source says it in several ways, of which only some were changed. The family's keys become those that it writes.
    kinds = () if form.part is None else ("architectures", "model_type", "auto_map")
    written = {key: value for key, value in after.items() if key not in kinds}
    return edited(written, keys_of(family) - set(written)) or after


def keys_of(family: Family) -> set[str]:
    """The keys of config.json that a family reads, by all of their names."""
    names = (key.theirs if isinstance(key, KeyGroup) else (key.theirs,) for key in family.keys)
    return {*family.aliases, *(name for one in names for name in one)}


def form_of_source(family: Family, source: Mapping[str, Any]) -> Form | None:
    """The form of the folder that a model of a family was made from; None if it is not one of the family's."""
    with contextlib.suppress(ConfigError):
        form = form_of_json(source, "")
        return form if form.family.config is family.config else None
    return None


_ACTIVATION = "activation_function"
_TIED = "tie_word_embeddings"
