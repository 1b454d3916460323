"""Reward models as sequence classifiers of transformers with a single label: class, keys of config.json and weights.

A classifier has the weights of the model without its head for tokens, and `score.weight`. It scores a sequence at its last
token that is not padding.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_json_object
from jaxlm.interop.hf.stored_formats import open_weights
from jaxlm.interop.hf.weights import Tensor, single
from jaxlm.models.base import LanguageModel, RewardModel

SCORE = "score.weight"
_SUFFIX = "ForSequenceClassification"
_OF_TOKENS = ("ForCausalLM", "LMHeadModel")
_HEADS = ("lm_head.weight", "embed_out.weight")
_BASE, _REWARD = "base.", "reward"  # paths of a model with a reward head
_OTHER_NAMES = {"Gemma3": "Gemma3Text"}
_MISSING = ("Granite",)  # families without such a class


def is_reward_model(model: LanguageModel) -> bool:
    """Tells whether a model has a reward head. Its paths are then `reward`, and `base.` before those of the model."""
    return bool(tree.modules(model, RewardModel))


def is_classifier(content: Mapping[str, Any]) -> bool:
    """Tells whether a config.json describes a sequence classifier."""
    names = content.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(_SUFFIX) for name in names)


def classifier_name(architecture: str) -> str:
    """The class of the classifier of an architecture. Raises `ConfigError` if transformers has none."""
    family = next((architecture.removesuffix(end) for end in _OF_TOKENS if architecture.endswith(end)), architecture)
    if family in _MISSING:
        raise ConfigError(
            f"transformers has no {family}{_SUFFIX}, so the reward model cannot be exported. Remove hf_save_path: the"
            " checkpoints have its head"
        )
    return f"{_OTHER_NAMES.get(family, family)}{_SUFFIX}"


def classifier_keys(architecture: str, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json in which a classifier differs from the model of the architecture.

    transformers ignores padding at the end by its id. If that is EOS, it would score the token before EOS: the id is then
    left out, and transformers refuses batches of several sequences instead.

    Raises:
        ConfigError: transformers has no such class.
    """
    pad, eos = special_ids.get("pad_token_id"), special_ids.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    return {
        "architectures": [classifier_name(architecture)],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": None if pad in ends else pad,
    }


def classifier_tensors(tensors: Sequence[Tensor]) -> tuple[list[Tensor], set[str]]:
    """The weight table of a reward model, and the paths of leaves that it leaves out: the head for tokens.

    Args:
        tensors: the table of the model.
    """
    kept = [tensor for tensor in tensors if tensor.name not in _HEADS]
    left_out = {f"{_BASE}{part.path}" for tensor in tensors if tensor not in kept for part in tensor.parts}

    def below_base(tensor: Tensor) -> Tensor:
        parts = (dataclasses.replace(part, path=f"{_BASE}{part.path}") for part in tensor.parts)
        return dataclasses.replace(tensor, parts=tuple(parts))

    return [*map(below_base, kept), single(SCORE, _REWARD, " | embed")], left_out


def read_score(folder: Path, key: str) -> np.ndarray:
    """The reward head in a folder, float32 [embed].

    Args:
        key: the key of the configuration that names the folder, for messages.

    Raises:
        ConfigError: there is none, or it has several labels.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{key}: {folder} has no config.json. Give a folder of a model for sequence classification")
    architectures = read_json_object(config).get("architectures")
    source = open_weights(folder)
    if SCORE not in source.tensors:
        raise ConfigError(
            f"{key}: {folder} ({_listed(architectures)}) has no {SCORE}. Give a model for sequence classification"
        )
    shape = tuple(source.tensors[SCORE].shape)
    if len(shape) != 2 or shape[0] != 1:
        raise ConfigError(
            f"{key}: {SCORE} in {folder} has the shape {list(shape)}, but a reward model has one label: [1, width] expected"
        )
    return np.asarray(source.view(SCORE)).astype(np.float32)[0]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, Collection) and not isinstance(names, str) else str(names)
