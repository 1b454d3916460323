"""The names in PEFT's files of the modules and parameters of a model, and how PEFT matches them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlm.core.axes import LAYERS
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.weights import Part, Tensor
from jaxlm.models.base import ModelConfig

PREFIX = "base_model.model."
"""Prefix of all module names in PEFT files."""
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"
HEAD = "head"
"""The path in jaxlm of a head, also if it is tied to the token embedding."""


def peft_tensors(config: ModelConfig) -> list[Tensor]:
    """The table of weights of a model. PEFT adapts the head as a module of its own, also if its weight is tied."""
    family, config = family_of_config(config), config.as_family()
    tensors = list(family.tensors(config))
    if is_tied(config):
        untied = family.tensors(dataclasses.replace(config, tie_word_embeddings=False))  # pyright: ignore[reportCallIssue]
        tensors += [tensor for tensor in untied if module_path(tensor.parts[0]) == HEAD]
    return [tensor for tensor in tensors if tensor.stacked in ((), (LAYERS,))]


def is_tied(config: ModelConfig) -> bool:
    """Whether the head of a model is its token embedding."""
    fields = {field.name for field in dataclasses.fields(config)}
    return "tie_word_embeddings" in fields and bool(getattr(config, "tie_word_embeddings"))  # noqa: B009


def module_path(part: Part) -> str:
    """The path in jaxlm of the module that has this weight."""
    return part.path.removesuffix(".weight")


def module_name(tensor: Tensor, layer: int | None) -> str:
    """The name of the module that has this weight, without the prefix."""
    return weight_name(tensor, layer).rpartition(".")[0]


def weight_name(tensor: Tensor, layer: int | None) -> str:
    """The name of this weight in a layer."""
    return tensor.name if layer is None else tensor.name.format(layer=layer)


def layers_of(tensor: Tensor, num_layers: int) -> list[int | None]:
    """The number of every layer that has such a tensor; None for one that is not in a layer."""
    if not tensor.is_stacked:
        return [None]
    return list(range(num_layers) if tensor.numbers is None else tensor.numbers)


def by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of `rank_pattern` or `alpha_pattern` for a module, as PEFT finds it: the first that matches the end."""
    matches = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)


def shortest_suffix(name: str, mine: Sequence[str], others: Sequence[str], *, whole: bool) -> str | None:
    """The shortest end of a module's name that only modules in `mine` have. None if even the whole name is not enough.

    Args:
        name: without the part that differs between layers.
        whole: an end begins with a whole part of the name. Otherwise it may begin anywhere, as in `modules_to_save`.
    """
    parts = name.split(".")
    for start in range(len(parts) - 1, -1, -1):
        end = ".".join(parts[start:])
        if "{layer}" in end:
            return None
        same = [other for other in others if other == end or other.endswith(f".{end}" if whole else end)]
        if all(other in mine for other in same):
            return end
    return None
