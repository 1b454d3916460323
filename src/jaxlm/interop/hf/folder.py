"""Reads and writes model folders in Hugging Face format."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError, check_choice
from jaxlm.core.hashing import note_file
from jaxlm.core.publish import Location, PublishError, check_unused, publish_folder
from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import read_json_object
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.classifier import SCORE, classifier_keys, classifier_tensors, is_classifier, is_reward_model
from jaxlm.interop.hf.family import Family, Json, config_from_json, family_of_config
from jaxlm.interop.hf.form import Form, edited_json, form_of_json, form_of_source
from jaxlm.interop.hf.load import Change, differing_head, load_weights, with_copies, with_tied_names
from jaxlm.interop.hf.source_folder import NO_SOURCE, SourceFolder
from jaxlm.interop.hf.stored_formats import QUANTIZATION, open_weights, unreadable
from jaxlm.interop.hf.tensor_files import most_common_dtype, open_tensors, renamed, unread_indices
from jaxlm.interop.hf.text_part import Names, replaced_keys
from jaxlm.interop.hf.weights import TensorWriter
from jaxlm.models.base import LanguageModel, ModelConfig, as_family

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""Dtypes of exported weights."""
_PARAMETER_DTYPES = ("float32", "bfloat16")
_GENERATION = "generation_config.json"
LARGEST_FILE = 5_000_000_000
"""Maximum size of a weights file in bytes."""
Parts = Literal["all", "text"]
"""What an export has of its source: all parts, or only the text model."""
PARTS = get_args(Parts)
StoredFormat = Literal["decode", "keep"]
"""How an export has the weights that its source has in a stored form: as floats, or as they are there."""
STORED_FORMATS = get_args(StoredFormat)
_AS_IN_SOURCE = "source"


def parse_dtype(name: str, key: str) -> Any:
    """The dtype of this name. Raises `ConfigError` if it is not supported."""
    check_choice(key, name, DTYPES)
    return DTYPES[name]


def parse_export_dtype(name: str, key: str) -> Any:
    """The dtype of exported weights of this name; None for `source`, the one that each tensor has in the source.

    Raises:
        ConfigError: it is not supported.
    """
    check_choice(key, name, (*DTYPES, _AS_IN_SOURCE))
    return DTYPES.get(name)


@dataclass(frozen=True)
class ReadOptions:
    """Says how the files of another program are read.

    Attributes:
        rules: `renamed`'s rules from their tensor names to the Hugging Face names. With any, config.json is not read.
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
        form: of the folder; None if it is not in Hugging Face's.
    """

    config: ModelConfig
    vocab_size: int
    notes: tuple[str, ...] = ()
    form: Form | None = None


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
    form = Form(family_of_config(config))
    if options.rules:
        source = renamed(open_tensors(path), options.rules)
    else:
        opened = open_folder(path, options)
        theirs = family_of_config(opened.config)
        if not isinstance(config, theirs.config):
            raise ConfigError(
                f"model.type: {type(config).__name__} given, but {path} contains a {theirs.model_types[0]} model."
                " Set use_hf_model_config: true, or set model.type"
            )
        vocab_size, form = opened.vocab_size, opened.form or form
        unused = (re.escape(SCORE),) if is_classifier(read_json_object(path / "config.json")) else ()
        for note in opened.notes:
            options.log(f"note: {note}")
        source = form.tensors(open_weights(path, np.float32), config)
    return load_weights(
        abstract,
        form.table(config, form.layout(source, config, dict(tree.leaves(abstract)))),
        source,
        layout,
        where=str(path),
        prefix=form.family.prefix,
        unused=(*form.family.unused, *unused),
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
    content = read_json_object(file)
    content = _without(content, options.skip_keys, f"{options.skipped_by}: ", file)
    form = form_of_json(content, str(file))
    if form.part:
        form.part.check(content, str(file))
    level = form.level(content)
    vocab_size = level.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ConfigError(f"{file}: vocab_size: {vocab_size!r} given, an integer of 1 or more expected")
    config, notes = config_from_json(form.family, level, str(file))
    if stored := level.get(QUANTIZATION):
        notes = (*notes, f"{file}: the weights are stored as {stored['quant_method']}, and decoded as they are read")
    config, more = _untied_if_different(path, form, config)
    if is_classifier(content):
        config, more = _tied(path, config)
    return PretrainedModel(config, vocab_size, (*notes, *unread_indices(path), *more), form)


def _tied(path: Path, config: Any) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config with tied embeddings, and a note: a sequence classifier has no head for tokens."""
    if getattr(config, "tie_word_embeddings", True):
        return config, ()
    note = (
        f"{path}: the model is for sequence classification. It has no head for tokens, so the token embedding is used"
    )
    return dataclasses.replace(config, tie_word_embeddings=True), (note,)


def _without(content: Json, skip_keys: Sequence[str], where: str, file: Path) -> Json:
    level = form_of_json(content, str(file)).level(content)
    for name in skip_keys:
        if name not in level or replaced_keys(content, {}, [name]) == content:
            raise ConfigError(f"{where}'{name}' given, but {file} has no such key of the model. Remove it")
    stored = level.get(QUANTIZATION)
    if QUANTIZATION in skip_keys and stored and not unreadable(stored):
        raise ConfigError(f"{where}{QUANTIZATION} given, but the weights in {file.parent} are decoded by it. Remove it")
    return replaced_keys(content, {}, skip_keys)


def _untied_if_different(path: Path, form: Form, config: Any) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config without tied embeddings, and a note, if the weights have another head. transformers does the same."""
    if not getattr(config, "tie_word_embeddings", False):
        return config, ()
    try:
        source = open_weights(path)
    except ConfigError:  # not downloaded yet; loading the weights reports what is wrong with them
        return config, ()
    head = differing_head(form.table(config), form.tensors(source, config), form.family.prefix)
    if head is None:
        return config, ()
    note = f"{path}: tie_word_embeddings is true, but {head} differs from the token embedding, so they are not tied"
    return dataclasses.replace(config, tie_word_embeddings=False), (note,)


def parameter_dtype(path: Path) -> tuple[str, str | None]:
    """The dtype for the parameters of a folder's model, and a note if it is not the one the folder asks for.

    The folder asks with `dtype` or `torch_dtype` in config.json, or with the dtype of most of its weights.
    """
    content = read_json_object(path / "config.json")
    content = form_of_json(content, str(path / "config.json")).level(content)
    dtype = str(content.get("dtype") or content.get("torch_dtype")).removeprefix("torch.")
    name = dtype if dtype in DTYPES else most_common_dtype(open_weights(path)).name
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
    source: SourceFolder = NO_SOURCE,
    parts: Parts = "all",
    stored_format: StoredFormat = "decode",
    largest_file: int = LARGEST_FILE,
) -> None:
    """Exports a model in the format of transformers. Every process must call this; process 0 writes.

    The write is atomic: the folder is complete or absent. At most one tensor at a time is in host memory.

    Args:
        model: a model of `config`, without adapters. One with a reward head becomes a sequence classifier, which has the text
            model alone.
        dtype: dtype of the weights in the files; None for the one that each tensor has in the source.
        files: additional files to write, such as the tokenizer's. Without a generation_config.json among them, one with
            the special ids is written.
        special_ids: `bos_token_id`, `eos_token_id` and `pad_token_id`. Ids that the model does not have become null.
        source: the folder that it was made from. The export has its form.
        parts: `text` leaves out what the source has beside the text model.
        stored_format: `keep` copies the tensors that the source has in a stored form.
        largest_file: maximum size of a weights file in bytes.

    Raises:
        ConfigError: config.json cannot represent the model, the folder already exists, or the model has another structure
            than the parts of the source that it is to be written with.
        PublishError: on process 0, the folder cannot be written or uploaded, or a part of the source is missing or has
            changed; a tensor that is to be copied in a stored form was trained.
    """
    check_unused(folder, "config.json")
    family, is_reward = family_of_config(config), is_reward_model(model)
    if is_reward or parts == "text":
        source = source.text_alone(config)
    source.check_fits(config, model.Vocab.size)
    if stored_format == "keep":
        source.check_keeps(config)
    else:
        source = source.with_config(replaced_keys(source.config, {}, [QUANTIZATION]))
    special_ids = {key: _known_ids(ids, model.Vocab.size) for key, ids in special_ids.items()}
    form = form_of_source(family, source.config)
    described = _described(family, form, config, model.Vocab.size, special_ids, source, dtype)
    table, left_out = list((form or Form(family)).table(config, source.layout if form else 0)), set()
    if is_reward:
        described |= classifier_keys(family.architecture, special_ids)
        table, left_out = classifier_tensors(table)
    elif form:
        table = with_copies(with_tied_names(table, source.embedding), source.copies, config)
    names = Names() if form is None else source.names
    writer = TensorWriter(model, names.of_table(table), layout, source.dtype_of(dtype), left_out)
    if not is_main_process():
        writer.join_others()
        return
    try:
        with publish_folder(folder, "config.json") as unfinished:
            opened = source.open() if source.kept or source.files else None
            copied = {} if opened is None else {name: content for name, content in opened.files() if name not in files}
            for name, content in (*copied.items(), *files.items(), *family.modeling_files().items()):
                (unfinished / name).write_bytes(content)
            _write_json(unfinished / "config.json", described)
            if _GENERATION not in files:
                _write_json(unfinished / _GENERATION, {"_from_model_config": True, **special_ids})
            stored = source.open_stored() if stored_format == "keep" else None
            writer.write(unfinished, largest_file, opened, stored)
    except PublishError:
        writer.join_others()
        raise


def _described(
    family: Family,
    form: Form | None,
    config: ModelConfig,
    vocab_size: int,
    special_ids: Mapping[str, Any],
    source: SourceFolder,
    dtype: Any,
) -> Json:
    """The content of config.json. Without a source, it says everything; otherwise, it changes what is different."""
    keys = edited_json(family, config, source.config, untied=source.untied)
    name = source.dtype if dtype is None else np.dtype(dtype).name
    # Write null ids explicitly: some classes have defaults that are out of range for a small vocabulary.
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    rows = dict.fromkeys(family.vocab_keys, vocab_size)
    new = {**rows, **none, **special_ids}
    level = {} if form is None else form.level(keys)
    if "vocab_size" not in level:  # no source, or another run's model with random weights
        return {"use_cache": True, **keys, **new, "dtype" if "dtype" in keys else "torch_dtype": name}
    if level["vocab_size"] == vocab_size:
        new = {k: v for k, v in new.items() if k in level and v is not None and k not in rows}
    dtypes = [key for key in ("dtype", "torch_dtype") if key in level]
    if not dtypes and name != source.dtype:
        dtypes = ["torch_dtype"]
    new |= dict.fromkeys(dtypes, name)
    return replaced_keys(keys, {key: v for key, v in new.items() if key not in level or level[key] != v}, ())


def _known_ids(ids: Any, vocab_size: int) -> int | list[int] | None:
    """The ids that a model has a row for. What another program's config.json gave is not always a number."""
    if isinstance(ids, list):
        return [number for number in ids if _known_ids(number, vocab_size) is not None] or None
    return ids if type(ids) is int and ids < vocab_size else None


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
