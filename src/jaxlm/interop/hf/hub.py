"""A folder as Hugging Face writes it: one that is here, or a copy of a repository of the hub."""

import re
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.interop.torch.torch_file import TORCH_SUFFIXES

_SMALL = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[^\s@]+)?")
_SAFETENSORS, _TORCH = "*.safetensors", "pytorch_model*.bin"


def may_be_repository(name: str) -> bool:
    """Whether `name`, `owner/name`, either with `@revision`, can be a repository of the hub."""
    return _REPOSITORY.fullmatch(name) is not None


def local_folder(name: str, key: str, *, weights: bool) -> Path:
    """The folder that a path, or the hub's `name` or `name@revision`, means; a file of weights is what it is.

    What is not here is fetched through huggingface_hub, which goes on where it was interrupted and keeps its copies in
    `HF_HOME`; with `HF_HUB_OFFLINE=1`, or where the hub cannot be reached, it only looks there.

    Args:
        key: the option that named it, for messages.
        weights: fetch those too, and not only what describes the model.

    Raises:
        ConfigError: it is neither here nor at the hub, or the hub cannot be asked.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix in (".safetensors", *TORCH_SUFFIXES):
        return path
    if path.exists() or not may_be_repository(name):
        raise ConfigError(
            f"{key}: '{name}' is not a folder. Give the path of one that is here, or the name of a repository of the hub"
        )
    try:
        from huggingface_hub.errors import (
            HFValidationError,
            HTTPError,  # pyright: ignore[reportPrivateImportUsage] - what the library that it asks through raises
        )
    except ImportError as error:
        raise ConfigError(
            f"{key}: '{name}' is a path or a name of the hub. As a path: there is nothing at {path.absolute()}. As a name:"
            " asking the hub needs huggingface_hub: pip install 'jaxlm[hf]'."
            " Or give the path of a folder that holds config.json and the weights"
        ) from error
    try:
        return _fetched(name, weights=weights)
    except (OSError, HTTPError, HFValidationError) as error:
        raise ConfigError(
            f"{key}: '{name}' is a path or a name of the hub. As a path: there is nothing at {path.absolute()}. As a name:"
            f" the hub did not give it: {type(error).__name__}: {error}\nWithout a network: copy the repository to this"
            " machine (config.json, tokenizer.json and the .safetensors files) and give that folder's path"
        ) from error


def _fetched(name: str, *, weights: bool) -> Path:
    """The copy of a repository: the hub's, or without a network the one that is here, if what is asked for is all in it.

    Weights of torch are asked for only where there are no others: asked for both, a copy would lack what nobody reads.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")

    def copy(*patterns: str) -> Path:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=[*_SMALL, *patterns]))

    if not weights:
        return copy()
    folder = copy(_SAFETENSORS)
    return folder if any(folder.glob(_SAFETENSORS)) else copy(_TORCH)
