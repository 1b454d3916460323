"""Model folders in Hugging Face format: a local folder, or a download from the Hugging Face Hub."""

import os
import re
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.interop.torch.torch_file import TORCH_SUFFIXES

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[^\s@]+)?")
_SAFETENSORS, _TORCH = "*.safetensors", "pytorch_model*.bin"


def may_be_repository(name: str) -> bool:
    """Whether a name has the format of a Hub repository: `name` or `owner/name`, optionally with `@revision`."""
    return _REPOSITORY.fullmatch(name) is not None


def local_folder(name: str, key: str, *, weights: bool) -> Path:
    """Resolves a local path, or a Hub `name` or `name@revision`, to a local folder. A weights file is returned unchanged.

    Repositories are downloaded with huggingface_hub, which resumes interrupted downloads and caches files in `HF_HOME`.
    With `HF_HUB_OFFLINE=1`, or if the Hub cannot be reached, only the cache is used.

    Args:
        key: the option that has this value, for messages.
        weights: download the weights too, not only the configuration and the tokenizer.

    Raises:
        ConfigError: there is no such local folder, and the repository cannot be downloaded.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir() or path.suffix in (".safetensors", *TORCH_SUFFIXES):
        return path
    if path.exists() or not may_be_repository(name):
        raise ConfigError(
            f"{key}: '{name}' is not a folder. Set it to an existing folder, or to a repository name on the Hugging Face Hub"
        )
    try:
        from huggingface_hub.errors import (
            HFValidationError,
            HTTPError,  # pyright: ignore[reportPrivateImportUsage] - raised by its HTTP client
        )
    except ImportError as error:
        raise ConfigError(
            f"{key}: '{name}' must be a folder or a repository on the Hugging Face Hub. There is no folder at"
            f" {path.absolute()}. Downloading from the Hub requires huggingface_hub: pip install 'jaxlm[hf]'."
            " Or set it to a folder that contains config.json and the weights"
        ) from error
    try:
        return _download(name, weights=weights)
    except (OSError, HTTPError, HFValidationError) as error:
        raise ConfigError(
            f"{key}: '{name}' must be a folder or a repository on the Hugging Face Hub. There is no folder at"
            f" {path.absolute()}. Downloading from the Hub failed: {type(error).__name__}: {error}\nWithout network access,"
            " copy the repository to this machine (config.json, tokenizer.json and the .safetensors files) and use the"
            " path of that folder"
        ) from error


def _download(name: str, *, weights: bool) -> Path:
    """Downloads a repository. Without network access, uses a cached copy if it is complete.

    Torch weights are only requested if there are no safetensors files. Requesting both would make a cached copy without
    the redundant torch files count as incomplete.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")

    def copy(*patterns: str) -> Path:
        allowed = [*_SMALL_FILES, *patterns]
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=allowed))

    if not weights:
        return copy()
    folder = copy(_SAFETENSORS)
    return folder if any(folder.glob(_SAFETENSORS)) else copy(_TORCH)
