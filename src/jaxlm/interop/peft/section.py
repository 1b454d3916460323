"""What the surgery `lora` takes from a PEFT folder before it is read itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.peft.read import lora_keys
from jaxlm.models.base import ModelConfig

KEY = "from_peft"
_TAKEN = {"target", "rank", "alpha", "dropout", "rslora"}


def peft_folder(name: str) -> Path:
    """The folder that `from_peft` means: a path, or a name at the hub."""
    return local_folder(name, f"surgery lora: {KEY}", weights=True)


def with_peft_keys(tree: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The tree, in which every surgery that begins from a PEFT folder has the keys that it leaves out from there.

    A tree that has them all is what it was: a saved configuration needs no other files.

    Args:
        tree: of a run, which has been read already and found well formed.
        model: what the adapters stand in.
    """
    if not any(_asks(one) for phase in tree.get("phases", []) for one in phase.get("surgery", [])):
        return tree

    def filled(surgery: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**lora_keys(peft_folder(surgery[KEY]), model), **surgery} if _asks(surgery) else surgery

    phases = [
        {**phase, "surgery": [filled(one) for one in phase["surgery"]]} if "surgery" in phase else phase
        for phase in tree["phases"]
    ]
    return {**tree, "phases": phases}


def _asks(surgery: Mapping[str, Any]) -> bool:
    return surgery.get(KEY) is not None and not surgery.keys() >= _TAKEN
