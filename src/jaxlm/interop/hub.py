"""A folder as Hugging Face writes it: one that is here, or a copy of a repository of the hub."""

from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.interop.sources import TORCH_SUFFIXES

_SMALL = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
_WEIGHTS = {"safetensors": ["*.safetensors"], "torch": ["pytorch_model*.bin"]}


def local_folder(name: str, key: str, *, weights: bool) -> Path:
    """The folder that a path or `name@revision` means; a file of weights is what it is.

    What is not here is fetched through huggingface_hub, which goes on where it was interrupted and keeps its copies in
    `HF_HOME`; with `HF_HUB_OFFLINE=1` it only looks there.

    Args:
        key: the option that named it, for messages.
        weights: fetch those too, and not only what describes the model.

    Raises:
        ConfigError: it is neither here nor at the hub, or the hub cannot be asked.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix in (".safetensors", *TORCH_SUFFIXES):
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"{key}: '{name}' is not a folder. Give one with config.json, or the name of a repository of the hub"
        )
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{key}: '{name}' is no folder here, and asking the hub needs huggingface_hub: pip install 'jaxlm[hf]'."
            " Or give the path of a folder that holds config.json and the weights"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        listed = set(huggingface_hub.list_repo_files(repository, revision=revision or None)) if weights else set()
        kind = "safetensors" if not listed or any(f.endswith(".safetensors") for f in listed) else "torch"
        patterns = _SMALL + (_WEIGHTS[kind] if weights else [])
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"{key}: '{name}' is no folder here, and the hub did not give it: {type(error).__name__}: {error}\nWithout a"
            " network: copy the repository to this machine (config.json, tokenizer.json and the .safetensors files) and"
            " give that folder's path"
        ) from error
