"""Reads and writes model folders in Hugging Face format."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.publish import Location, PublishError, check_unused, publish_folder
from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import read_json_object
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.classifier import SCORE, classifier_keys, classifier_tensors, is_classifier, is_reward_model
from jaxlm.interop.hf.family import (
    Family,
    Json,
    config_from_json,
    edited_json,
    family_of_config,
    family_of_json,
)
from jaxlm.interop.hf.load import Change, differing_head, load_weights
from jaxlm.interop.hf.tensor_files import RenamedTensors, most_common_dtype, open_tensors, unread_indices
from jaxlm.interop.hf.weights import TensorWriter
from jaxlm.models.base import LanguageModel, ModelConfig, as_family

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""Dtypes of exported weights."""
_PARAMETER_DTYPES = ("float32", "bfloat16")
_GENERATION = "generation_config.json"
LARGEST_FILE = 5_000_000_000
"""Maximum size of a weights file in bytes."""


def parse_dtype(name: str, key: str) -> Any:
    """The export dtype of this name. Raises `ConfigError` if it is not supported."""
    if name not in DTYPES:
        raise ConfigError(f"{key}: '{name}' given. Allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class ReadOptions:
    """Says how the files of another program are read.

    Attributes:
        rules: `RenamedTensors` rules from their tensor names to the Hugging Face names. With any, config.json is not read.
        skip_keys: keys of config.json to read as if they were not there.
        skipped_by: the key of the configuration that names them, for messages.
        log: gets the notes about config.json when the weights are loaded.
        changes: path of a parameter -> what is made of it when it has been read.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    skip_keys: Sequence[str] = ()
    skipped_by: str = "hf_skip_keys"
    log: Callable[[str], None] = lambda _: None
    changes: Mapping[str, Change] = field(default_factory=dict)


AS_THEY_ARE = ReadOptions()


@dataclass(frozen=True)
class PretrainedModel:
    """A model in a folder, without its weights.

    Attributes:
        vocab_size: number of rows of the embedding; may be larger than the number of tokens.
        notes: what is ignored or read in another way than config.json says.
    """

    config: ModelConfig
    vocab_size: int
    notes: tuple[str, ...] = ()


def load_model(
    path: Path,
    abstract: LanguageModel,
    config: ModelConfig,
    layout: Layout,
    options: ReadOptions = AS_THEY_ARE,
) -> LanguageModel:
    """Loads the weights of a folder or file into a model with the shapes and dtypes of `abstract`, sharded by `layout`.

    Args:
        abstract: a model of `config` under `jax.eval_shape`.

    Raises:
        ConfigError: the weights do not fit the model; lists all tensors that are missing or do not fit.
    """
    config, vocab_size, unused = as_family(config), None, ()
    if not options.rules:
        opened = open_folder(path, options)
        theirs = family_of_config(opened.config)
        if not isinstance(config, theirs.config):
            raise ConfigError(
                f"model.type: {type(config).__name__} given, but {path} contains a {theirs.model_types[0]} model."
                " Set use_hf_model_config: true, or set model.type"
            )
        vocab_size = opened.vocab_size
        unused = (re.escape(SCORE),) if is_classifier(read_json_object(path / "config.json")) else ()
        for note in opened.notes:
            options.log(f"note: {note}")
    family, source = family_of_config(config), open_tensors(path)
    return load_weights(
        abstract,
        family.tensors(config),
        RenamedTensors(source, options.rules) if options.rules else source,
        layout,
        where=str(path),
        prefix=family.prefix,
        unused=(*family.unused, *unused),
        vocab_size=vocab_size,
        changes=options.changes,
    )


def open_folder(path: Path, options: ReadOptions = AS_THEY_ARE) -> PretrainedModel:
    """Reads config.json of a folder.

    Raises:
        ConfigError: config.json is missing, invalid, or describes an unsupported model.
    """
    file = path / "config.json"
    if not file.is_file():
        inside = sorted(path.glob("*/config.json"), key=lambda one: one.stat().st_mtime)
        hint = f". Did you mean {inside[-1].parent}?" if inside else ""
        raise ConfigError(f"{path}: config.json not found. It is required to know the model of the weights{hint}")
    note_file(file)
    content = _without(read_json_object(file), options.skip_keys, f"{options.skipped_by}: ", file)
    family = family_of_json(content, str(file))
    vocab_size = content.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ConfigError(f"{file}: vocab_size: {vocab_size!r} given, an integer of 1 or more expected")
    config, notes = config_from_json(family, content, str(file))
    config, more = _untied_if_different(path, family, config)
    if is_classifier(content):
        config, more = _tied(path, config)
    return PretrainedModel(config, vocab_size, (*notes, *unread_indices(path), *more))


def _tied(path: Path, config: Any) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config with tied embeddings, and a note: a sequence classifier has no head for tokens."""
    if getattr(config, "tie_word_embeddings", True):
        return config, ()
    note = (
        f"{path}: the model is for sequence classification. It has no head for tokens, so the token embedding is used"
    )
    return dataclasses.replace(config, tie_word_embeddings=True), (note,)


def _without(content: Json, skip_keys: Sequence[str], where: str, file: Path) -> Json:
    for name in skip_keys:
        if name not in content:
            raise ConfigError(f"{where}'{name}' given, but {file} has no such key. Remove it")
    return {name: value for name, value in content.items() if name not in skip_keys}


def _untied_if_different(path: Path, family: Family, config: Any) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config without tied embeddings, and a note, if the weights have another head. transformers does the same."""
    if not getattr(config, "tie_word_embeddings", False):
        return config, ()
    try:
        source = open_tensors(path)
    except ConfigError:  # not downloaded yet; loading the weights reports what is wrong with them
        return config, ()
    head = differing_head(family.tensors(config), source, family.prefix)
    if head is None:
        return config, ()
    note = f"{path}: tie_word_embeddings is true, but {head} differs from the token embedding, so they are not tied"
    return dataclasses.replace(config, tie_word_embeddings=False), (note,)


def parameter_dtype(path: Path) -> tuple[str, str | None]:
    """The dtype for the parameters of a folder's model, and a note if it is not the one the folder asks for.

    The folder asks with `dtype` or `torch_dtype` in config.json, or with the dtype of most of its weights.
    """
    content = read_json_object(path / "config.json")
    dtype = str(content.get("dtype") or content.get("torch_dtype")).removeprefix("torch.")
    name = dtype if dtype in DTYPES else most_common_dtype(open_tensors(path)).name
    if name in _PARAMETER_DTYPES:
        return name, None
    return (
        "float32",
        f"{path}: the weights are {name}, in which parameters cannot be stored, so they are read as float32",
    )


def save_folder(
    folder: Location,
    model: LanguageModel,
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: Any,
    files: Mapping[str, bytes],
    special_ids: Mapping[str, int | list[int] | None],
    source: Mapping[str, Any] = MappingProxyType({}),
    largest_file: int = LARGEST_FILE,
) -> None:
    """Exports a model in the format of transformers. Every process must call this; process 0 writes.

    The write is atomic: the folder is complete or absent. At most one tensor at a time is in host memory.

    Args:
        model: a model of `config`, without adapters. One with a reward head becomes a sequence classifier.
        dtype: dtype of the weights in the files.
        files: additional files to write, such as the tokenizer's. Without a generation_config.json among them, one with
            the special ids is written.
        special_ids: `bos_token_id`, `eos_token_id` and `pad_token_id`. Ids that the model does not have become null.
        source: config.json of the model that it was made from; empty for random weights.
        largest_file: maximum size of a weights file in bytes.

    Raises:
        ConfigError: config.json cannot represent the model, or the folder already exists.
        PublishError: on process 0, the folder cannot be written or uploaded.
    """
    check_unused(folder, "config.json")
    family = family_of_config(config)
    # Write null ids explicitly: some classes have defaults that are out of range for a small vocabulary.
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    special_ids = {key: _known_ids(ids, model.Vocab.size) for key, ids in special_ids.items()}
    vocabulary = {"vocab_size": model.Vocab.size, **none, **special_ids}
    if source.get("vocab_size") == model.Vocab.size:
        vocabulary = {key: value for key, value in vocabulary.items() if key in source or value is not None}
    keys = edited_json(family, config, source)
    described = {**keys, **vocabulary, "dtype" if "dtype" in keys else "torch_dtype": np.dtype(dtype).name}
    described.setdefault("use_cache", True)
    tensors, left_out = list(family.tensors(as_family(config))), set()
    if is_reward_model(model):
        described |= classifier_keys(family.architecture, special_ids)
        tensors, left_out = classifier_tensors(tensors)
    writer = TensorWriter(model, tensors, layout, np.dtype(dtype), left_out)
    if not is_main_process():
        writer.join_others()
        return
    try:
        with publish_folder(folder, "config.json") as unfinished:
            for name, content in (*files.items(), *family.modeling_files().items()):
                (unfinished / name).write_bytes(content)
            _write_json(unfinished / "config.json", described)
            if _GENERATION not in files:
                _write_json(unfinished / _GENERATION, {"_from_model_config": True, **special_ids})
            writer.write(unfinished, largest_file)
    except PublishError:
        writer.join_others()
        raise


def _known_ids(ids: Any, vocab_size: int) -> int | list[int] | None:
    """The ids that a model has a row for. What another program's config.json gave is not always a number."""
    if isinstance(ids, list):
        return [number for number in ids if _known_ids(number, vocab_size) is not None] or None
    return ids if type(ids) is int and ids < vocab_size else None


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
