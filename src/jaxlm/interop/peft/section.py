"""Fills in the keys of a `lora` surgery from a PEFT folder before the configuration is decoded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.peft.read import lora_keys
from jaxlm.models.base import ModelConfig

KEY = "from_peft"
_LORA_KEYS = {"target", "rank", "alpha", "dropout", "rslora"}


def peft_folder(name: str) -> Path:
    """Resolves `from_peft`, a path or a Hub name, to a local folder."""
    return local_folder(name, f"surgery lora: {KEY}", weights=True)


def with_peft_keys(tree: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Adds the missing keys of every surgery with `from_peft` from its PEFT folder.

    Returns the same tree if no keys are missing, so that a saved configuration does not depend on other files.

    Args:
        tree: tree of a run that can be decoded without errors.
        model: config of the adapted model.
    """
    if not any(_needs_keys(surgery) for phase in tree.get("phases", []) for surgery in phase.get("surgery", [])):
        return tree

    def filled(surgery: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**lora_keys(peft_folder(surgery[KEY]), model), **surgery} if _needs_keys(surgery) else surgery

    phases = [
        {**phase, "surgery": [filled(surgery) for surgery in phase["surgery"]]} if "surgery" in phase else phase
        for phase in tree["phases"]
    ]
    return {**tree, "phases": phases}


def _needs_keys(surgery: Mapping[str, Any]) -> bool:
    return surgery.get(KEY) is not None and not surgery.keys() >= _LORA_KEYS
