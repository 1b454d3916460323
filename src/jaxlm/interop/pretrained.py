"""Pretrained models in a folder: opened, as the `model` section, and with rows for new tokens.

Adds rows to the embedding and the head of a pretrained model, for tokens that were added to its tokenizer.

Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html): a new row is the mean of the rows there are. With random rows, a new
token would take most of the probability before anything is trained; with the mean, it takes at most an average share.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import merge
from jaxlm.systems.nanochat.torch_checkpoint import check_vocabulary, load_nanochat, model_file, read_nanochat_config


def open_pretrained(path: Path, options: ReadOptions = AS_THEY_ARE) -> PretrainedModel:
    """Reads the configuration of a folder, or of one of nanochat's files. Errors as of `open_folder`."""
    if (file := model_file(path)) is not None:
        return PretrainedModel(*read_nanochat_config(file))
    return open_folder(path, options)


def check_weights(path: Path, options: ReadOptions = AS_THEY_ARE) -> None:
    """Raises `ConfigError` if there are no weights, or their files are damaged, as far as headers and sizes tell."""
    file = None if options.rules else model_file(path)
    open_tensors(file or path)


def check_pretrained(path: Path, num_tokens: int, options: ReadOptions = AS_THEY_ARE) -> None:
    """Raises `ConfigError` if the weights do not fit a tokenizer of this size, or if their files are damaged."""
    if (file := model_file(path)) is not None:
        return check_vocabulary(file, num_tokens)
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
    if not options.rules and (file := model_file(path)) is not None:
        return load_nanochat(file, abstract, config, layout, options.changes)
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
