"""The text model in a folder: where its keys and tensors are, and which tensors of the folder are not its own.

A multimodal folder has the keys of its text model in `text_config`, or beside the others in older files. The names of the
text model's tensors begin differently there. Towers, projectors and layers that predict further tokens (MTP) are kept: they
are neither read nor reported, and exports copy them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.tensor_files import NamedTensors, TensorSource
from jaxlm.interop.hf.weights import Tensor

Json = dict[str, Any]
_LEVEL = "text_config"
_TIED, _WIDTH = "tie_word_embeddings", "hidden_size"
_EITHER_LEVEL = (
    *("vocab_size", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("quantization_config", "compression_config"),
)
"""Keys that files have beside the text level or in it. The text level counts. `tie_word_embeddings` counts beside it, as in
transformers, which ties the embeddings of the whole model."""
_OF_OTHERS = re.compile("vision|image|video|audio")  # keys of the other parts, in files without a text level
SECTIONS = {"mrope_section", "mrope_interleaved"}
"""Keys of rotary embeddings that say which features have which of an image's positions."""
IN_SECTIONS = "mrope"
"""A type of rotary embeddings in older files. Text is rotated without scaling."""
_ROTATIONS = {"rope_parameters", "rope_scaling"}


@dataclass(frozen=True)
class TextPart:
    """A kind of multimodal folder that contains a text model of a family.

    Attributes:
        model_types: accepted values of `model_type` at the top of config.json.
        text_types: accepted values of `model_type` in the text level. Of several families with the same `model_types`, the
            one whose text level may lack it has None among them.
        kept: regular expressions for the beginnings of tensor names that belong to other parts.
        defaults: values of keys of the text level that may be missing, where they are not those of the family.
        fixed: keys of `defaults` that may have no other value, because transformers does not read them.
    """

    model_types: tuple[str, ...]
    text_types: tuple[str | None, ...]
    kept: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def matches(self, content: Mapping[str, Any]) -> bool:
        """Tells whether a config.json describes such a folder."""
        if content.get("model_type") not in self.model_types:
            return False
        inner = content.get(_LEVEL)
        return (inner.get("model_type") if isinstance(inner, Mapping) else None) in self.text_types

    def check(self, content: Mapping[str, Any], where: str) -> None:
        """Checks what only this kind of folder has. Raises `ConfigError`."""
        level = self.level(content)
        if _WIDTH not in level:
            given = content.get(_LEVEL, "nothing")
            raise ConfigError(f"{where}: {_LEVEL}: {given} given, an object with the keys of the text model expected")
        for key in self.fixed:
            if level[key] != self.defaults[key]:
                raise ConfigError(
                    f"{where}: {key}: {level[key]} given, but transformers does not read it in a folder of this kind, and"
                    f" computes with {self.defaults[key]}. Remove the key if the model was trained that way"
                )

    def level(self, content: Mapping[str, Any]) -> Json:
        """The keys of the text model, as in a folder of it alone."""
        inner = content.get(_LEVEL)
        level: Json
        if not isinstance(inner, Mapping):
            level = {key: value for key, value in content.items() if not _OF_OTHERS.search(key)}
        else:
            either = {key: content[key] for key in _EITHER_LEVEL if key in content}
            tied = {key: content[key] for key in (_TIED,) if content.get(key) is not None}
            level = {**either, **inner, **tied}
        in_rotation = {name for key in _ROTATIONS for name in level.get(key) or {}}
        return {**{key: value for key, value in self.defaults.items() if key not in in_rotation}, **level}


def without_sections(level: Mapping[str, Any]) -> Json:
    """The keys of a text model without those about the positions of images."""
    kept = {key: value for key, value in level.items() if key not in _ROTATIONS}
    for key in _ROTATIONS & level.keys():
        rotation = {k: v for k, v in (level[key] or {}).items() if k not in SECTIONS and v != IN_SECTIONS}
        kept[key] = rotation or None
    return kept


def pixtral_part(*text_types: str | None, **defaults: Any) -> TextPart:
    """The text part of a Mistral 3 folder, with the vision tower Pixtral. Args: as of `TextPart`."""
    kept = (r"(model\.)?(vision_tower|multi_modal_projector)\.",)
    return TextPart(("mistral3",), text_types, kept, {_TIED: True, **defaults})


def replaced_keys(content: Mapping[str, Any], changed: Mapping[str, Any], dropped: Sequence[str]) -> Json:
    """A config.json with other values of keys of the text model. All other keys stay, and their order.

    Args:
        changed: key -> value. It is replaced wherever the text model's key is. A new one goes to the text level, if there is
            one, even if another part has a key of this name beside it.
        dropped: keys to leave out.
    """

    def edited(level: Mapping[str, Any], keys: Callable[[str], bool]) -> Json:
        rest = {key: value for key, value in level.items() if key not in dropped}
        return rest | {key: value for key, value in changed.items() if keys(key)}

    inside, either = content.get(_LEVEL), {*_EITHER_LEVEL, _TIED} & content.keys()
    if not isinstance(inside, Mapping) or not inside:
        return edited(content, lambda key: True)
    beside = edited(content, lambda key: key in either or (key in inside and key in content))
    return {**beside, _LEVEL: edited(inside, lambda key: key in inside or key not in either)}


def with_sections(level: Mapping[str, Any], changed: Mapping[str, Any]) -> Json:
    """The changed keys with the sections of the source's rotary embedding: those of text are equal, those of images are not.

    Args:
        level: the text level of the source.
    """
    given = {k: v for key in _ROTATIONS for k, v in (level.get(key) or {}).items() if k in SECTIONS}
    rotations = [key for key in _ROTATIONS if key in changed]
    if not given or not rotations:
        return dict(changed)
    (key,) = rotations
    return {**changed, key: {"rope_type": "default", **(changed[key] or {}), **given}}


@dataclass(frozen=True)
class Names:
    """How the names of the text model's tensors in a folder begin.

    Attributes:
        ours, theirs: a name in the table of weights that begins with `ours` has `theirs` instead in the folder.
    """

    ours: str = ""
    theirs: str = ""

    @classmethod
    def of(cls, names: Sequence[str] | Mapping[str, Any], prefix: str) -> "Names":
        """Finds them by the names in a folder. Args: prefix: of the family's names."""
        nested = cls("model.", "model.language_model.")  # as the modules of transformers since version 4.52
        wrapped = cls("", "language_model.")  # before, and in most published folders of these families
        for one in (nested, wrapped):
            if any(name.startswith(one.in_folder(prefix)) for name in names):
                return one
        return AS_IN_TABLE

    def in_folder(self, name: str) -> str:
        return self.theirs + name.removeprefix(self.ours) if name.startswith(self.ours) else name

    def in_table(self, name: str) -> str:
        return self.ours + name.removeprefix(self.theirs) if name.startswith(self.theirs) else name

    def of_table(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A table of weights with the folder's names."""
        return [replace(tensor, name=self.in_folder(tensor.name)) for tensor in tensors]


AS_IN_TABLE = Names()
IN_TRANSFORMERS = Names("model.", "model.language_model.")
"""The names of a multimodal model's modules there, whatever those in its files."""


@dataclass(frozen=True)
class Modules:
    """The modules of a model in transformers.

    Attributes:
        names: how the names of the text model's modules begin.
        others: names of tensors of other parts.
    """

    names: Names = AS_IN_TABLE
    others: tuple[str, ...] = ()


TEXT_ALONE = Modules()


def text_tensors(source: TensorSource, names: Names, kept: Callable[[str], bool], prefix: str) -> TensorSource:
    """The tensors of a folder that may be the text model's, by the names of the table.

    Args:
        kept: tells which tensors are not the text model's.
        prefix: of the family's names.

    Raises:
        ConfigError: two tensors have the same name there, or one is named as in another kind of folder.
    """
    ours: dict[str, str] = {}
    for theirs in source.tensors:
        if kept(theirs):
            continue
        if (name := names.in_table(theirs)) in ours:
            raise ConfigError(f"'{ours[name]}' and '{theirs}' are both '{name}' of the text model. Keep one of them")
        if (expected := names.in_folder(name)) != theirs and name.startswith(prefix):
            raise ConfigError(
                f"'{theirs}' is named unlike the other tensors of the text model. Rename it: '{expected}'"
            )
        ours[name] = theirs
    return NamedTensors(source, ours)
