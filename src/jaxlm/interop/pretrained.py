"""Pretrained models in a folder: opened, as the `model` section, and with rows for new tokens.

The embedding and the head get a row for each token that was added to the tokenizer: the mean of the rows there are. With
random rows, a new token would take most of the probability before anything is trained; with the mean, it takes at most an
average share.

Source: new rows: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draccus
import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.folder import AS_THEY_ARE, PretrainedModel, ReadOptions, load_model, open_folder
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import merge


@dataclass(frozen=True)
class WeightFormat(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A form of pretrained models besides Hugging Face's."""

    @abc.abstractmethod
    def find(self, path: Path) -> Path | None:
        """The file of the model, if the path is one in this form, or a folder with one."""

    @abc.abstractmethod
    def open(self, file: Path) -> PretrainedModel:
        """Reads the configuration. Errors as of `open_folder`."""

    @abc.abstractmethod
    def check_vocabulary(self, file: Path, num_tokens: int) -> None:
        """Raises `ConfigError` if the weights do not fit a tokenizer of this size."""

    @abc.abstractmethod
    def load(
        self, file: Path, abstract: LanguageModel, config: ModelConfig, layout: Layout, options: ReadOptions
    ) -> LanguageModel:
        """Loads the weights. Arguments and errors as of `jaxlm.interop.hf.folder.load_model`."""


def _other_format(path: Path) -> tuple[WeightFormat, Path] | None:
    """The form of a model that is not in Hugging Face's, and its file."""
    for _, kind in sorted(WeightFormat.get_known_choices().items()):
        if (file := kind().find(path)) is not None:
            return kind(), file
    return None


def open_pretrained(path: Path, options: ReadOptions = AS_THEY_ARE) -> PretrainedModel:
    """Reads the configuration of a folder or file. Errors as of `open_folder`."""
    if (other := _other_format(path)) is not None:
        return other[0].open(other[1])
    return open_folder(path, options)


def check_weights(path: Path, options: ReadOptions = AS_THEY_ARE) -> None:
    """Raises `ConfigError` if there are no weights, or their files are damaged, as far as headers and sizes tell."""
    other = None if options.rules else _other_format(path)
    open_tensors(path if other is None else other[1])


def check_pretrained(path: Path, num_tokens: int, options: ReadOptions = AS_THEY_ARE) -> None:
    """Raises `ConfigError` if the weights do not fit a tokenizer of this size, or if their files are damaged."""
    if (other := _other_format(path)) is not None:
        return other[0].check_vocabulary(other[1], num_tokens)
    rows = open_folder(path, options).vocab_size
    if rows < num_tokens:
        raise ConfigError(
            f"{path}: the embedding has {rows:,} rows, but the tokenizer has {num_tokens:,} tokens. Set data.tokenizer to the"
            " one that the model was trained with"
        )
    if any(path.glob("*.safetensors*")):  # without weights, they may be on the machines that train
        check_weights(path, options)
    return None


def load_pretrained(
    path: Path, abstract: LanguageModel, config: ModelConfig, layout: Layout, options: ReadOptions = AS_THEY_ARE
) -> LanguageModel:
    """Loads the weights of a folder or file. Arguments and errors as of `jaxlm.interop.hf.folder.load_model`."""
    if not options.rules and (other := _other_format(path)) is not None:
        return other[0].load(other[1], abstract, config, layout, options)
    return load_model(path, abstract, config, layout, options)


_KEY = "initialize_from_hf"


def hf_name(initialize_from_hf: bool | str, tokenizer: object) -> str | None:
    """Resolves `initialize_from_hf` to a folder or Hub name; None if it is false.

    Args:
        tokenizer: `data.tokenizer`: a path, or how a tokenizer is trained.

    Raises:
        ConfigError: the value is true, but `data.tokenizer` is not a folder or Hub name.
    """
    if initialize_from_hf is True:
        if tokenizer == "bpe" or not isinstance(tokenizer, str):
            raise ConfigError(
                f"{_KEY}: true uses the folder in data.tokenizer, but that is 'bpe'. Set {_KEY} to a folder or to a"
                " repository name on the Hugging Face Hub"
            )
        path = Path(tokenizer)
        return str(path.parent if path.name == "tokenizer.json" else path)
    return initialize_from_hf or None


def with_hf_model(tree: Mapping[str, Any]) -> dict[str, Any]:
    """With `use_hf_model_config`, merges the `model` section over the model config of the Hugging Face folder.

    The result has `use_hf_model_config: false`, so that a saved configuration does not depend on other files.
    """
    if tree.get("use_hf_model_config") is not True:
        return dict(tree)
    data = tree.get("data")
    tokenizer = data.get("tokenizer", "bpe") if isinstance(data, Mapping) else "bpe"
    name = hf_name(tree.get(_KEY, False), tokenizer)
    if name is None:
        raise ConfigError(
            "use_hf_model_config: true given without initialize_from_hf. Set initialize_from_hf to the folder that"
            " contains config.json"
        )
    skipped = tree.get("hf_skip_keys")
    skip_keys = skipped if isinstance(skipped, list) else []  # decoding reports what is not a list
    base = encode(open_pretrained(local_folder(name, _KEY, weights=False), ReadOptions(skip_keys=skip_keys)).config)
    section = tree.get("model", {})
    if isinstance(section, Mapping) and section.get("type", base["type"]) != base["type"]:
        raise ConfigError(
            f"model.type: {section['type']} given, but {name} contains a {base['type']} model. Remove the type"
        )
    model = merge(base, section) if isinstance(section, dict) else section
    return {**tree, "model": model, "use_hf_model_config": False}


def grow_vocabulary(model: LanguageModel, abstract: LanguageModel, layout: Layout) -> LanguageModel:
    """The model with the rows of `abstract`, which has a larger vocabulary and otherwise the same shapes.

    Raises:
        ConfigError: the model has arrays whose shape depends on the vocabulary in another way.
    """
    leaves = dict(tree.leaves(model))

    def grown(path: str, target: Any) -> Any:
        leaf = leaves[path]
        if tree.raw(leaf).shape == tree.raw(target).shape:
            return leaf
        others = [axis for axis in leaf.axes if axis.name != VOCAB]
        if others != [axis for axis in target.axes if axis.name != VOCAB]:
            raise ConfigError(
                f"data.added_tokens: this model's {path} has the axes {dict(leaf.shape)} for its vocabulary and would need"
                f" {dict(target.shape)}, which cannot be told from the rows of the other tokens. Remove added_tokens"
            )
        index = [axis.name for axis in leaf.axes].index(VOCAB)
        num_new = target.axes[index].size - leaf.axes[index].size

        def extend(array: jax.Array) -> jax.Array:
            mean = jnp.mean(array, axis=index, keepdims=True, dtype=jnp.float32).astype(array.dtype)
            return jnp.concatenate([array, jnp.repeat(mean, num_new, axis=index)], axis=index)

        sharding = layout.parameter_sharding(target.axes)
        return NamedArray(jax.jit(extend, out_shardings=sharding)(leaf.array), target.axes)

    return tree.map_leaves(grown, abstract)
