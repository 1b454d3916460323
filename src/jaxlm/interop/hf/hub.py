"""Model folders in Hugging Face format: a local folder, a download from the Hugging Face Hub, or an upload to it."""

import os
import re
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.install import install_command
from jaxlm.core.publish import PublishError
from jaxlm.interop.torch.torch_file import TORCH_SUFFIXES

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[^\s@]+)?")
_SAFETENSORS, _TORCH = "*.safetensors", "pytorch_model*.bin"
# Copies of the weights in other forms, which may be as large as the others.
_COPIES = ["*/*.safetensors", "*/*.bin", "consolidated*"]


def may_be_repository(name: str) -> bool:
    """Tells whether a name has the format of a Hub repository: `name` or `owner/name`, optionally with `@revision`."""
    return _REPOSITORY.fullmatch(name) is not None


def repository_of(name: str) -> str | None:
    """The Hub repository that a name without its revision stands for; None for a local path."""
    repository = name.partition("@")[0]
    return repository if may_be_repository(repository) and not Path(name).exists() else None


def check_upload_name(repository: str, key: str) -> None:
    """Raises `ConfigError` if it is not a repository's name. Args: key: the option that has this value, for messages."""
    if not may_be_repository(repository) or "@" in repository:
        raise ConfigError(f"{key}: '{repository}' given, but owner/name expected, a repository on the Hugging Face Hub")


def check_upload(key: str) -> None:
    """Raises `ConfigError` if huggingface_hub is not installed, or you are not logged in. Args: key: as above."""
    try:
        from huggingface_hub import get_token
    except ImportError as error:
        raise ConfigError(f"{key}: needs huggingface_hub. Run: {install_command('hf')}") from error
    if get_token() is None:
        raise ConfigError(f"{key}: not logged in to the Hugging Face Hub. Run hf auth login, or set HF_TOKEN")


def upload_folder(folder: Path, repository: str, message: str) -> str:
    """Pushes the files of a folder to a model repository, which is created if it does not exist. Returns its URL.

    Args:
        message: of the commit.

    Raises:
        PublishError: the upload failed.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="jaxlm")
    try:
        created = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # of the HTTP client, of storage backends, ValueError and OSError
        raise PublishError(
            f"cannot push to {repository} on the Hugging Face Hub ({type(error).__name__}: {error})"
        ) from error
    return str(created)


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
            f" {path.absolute()}. Downloading from the Hub requires huggingface_hub. Run: {install_command('hf')}."
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
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=allowed, ignore_patterns=_COPIES)
        )

    if not weights:
        return copy()
    folder = copy(_SAFETENSORS)
    return folder if any(folder.glob(_SAFETENSORS)) else copy(_TORCH)
