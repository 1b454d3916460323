"""What a configuration takes from a Hugging Face folder before it is read itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.config.decode import encode
from jaxlm.config.yaml import merge
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.folder import open_folder
from jaxlm.interop.hf.hub import local_folder

_KEY = "initialize_from_hf"


def hf_name(initialize_from_hf: bool | str, tokenizer: str) -> str | None:
    """The folder, or name at the hub, that `initialize_from_hf` means; None where it is false.

    Raises:
        ConfigError: true is given, and `data.tokenizer` is no folder or name.
    """
    if initialize_from_hf is True:
        if tokenizer == "bpe":
            raise ConfigError(
                f"{_KEY}: true means the folder that data.tokenizer names, which is 'bpe'. Give the folder, or a name of"
                " the hub"
            )
        path = Path(tokenizer)
        return str(path.parent if path.name == "tokenizer.json" else path)
    return initialize_from_hf or None


def with_hf_model(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with its `model` section laid over that of the folder, where `use_hf_model_config` asks for it.

    What comes out no longer asks for it: a saved configuration needs no other files.
    """
    if tree.get("use_hf_model_config") is not True:
        return dict(tree)
    data = tree.get("data")
    tokenizer = data.get("tokenizer", "bpe") if isinstance(data, Mapping) else "bpe"
    name = hf_name(tree.get(_KEY, False), tokenizer)
    if name is None:
        raise ConfigError("use_hf_model_config: true, but initialize_from_hf names no folder to take it from")
    found = encode(open_folder(local_folder(name, _KEY, weights=False)).config)
    own = tree.get("model", {})
    if isinstance(own, Mapping) and own.get("type", found["type"]) != found["type"]:
        raise ConfigError(f"model.type: {own['type']} given, but {name} holds a {found['type']}. Leave the type out")
    model = merge(found, own) if isinstance(own, dict) else own
    return {**tree, "model": model, "use_hf_model_config": False}
