"""Fills in the `model` section from a Hugging Face folder before the configuration is decoded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.folder import ReadOptions
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.pretrained import open_pretrained
from jaxlm.reading.decode import encode
from jaxlm.reading.yaml import merge

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
