"""Pretrained models in a folder, in Hugging Face's format or in nanochat's."""

from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.folder import AS_THEY_ARE, PretrainedModel, ReadOptions, load_model, open_folder
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.interop.torch.nanochat import check_vocabulary, load_nanochat, model_file, read_nanochat_config
from jaxlm.models.base import LanguageModel, ModelConfig


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
