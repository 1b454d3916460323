"""The record of adapters that were merged into an exported model, so that none is merged twice: `merged_adapters.json`."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_json_object, sha256
from jaxlm.core.sharding import Layout
from jaxlm.interop.peft.names import AxisSizes
from jaxlm.interop.peft.read import WEIGHTS, read_adapters
from jaxlm.models.base import LanguageModel, ModelConfig

MERGED = "merged_adapters.json"
_KEY = "adapters"


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter that a model contains.

    Attributes:
        source: the end of the path of its folder, or of the checkpoint that was trained with it.
        sha256: of its adapter_model.safetensors; None for the adapters of a checkpoint.
    """

    source: str
    sha256: str | None = None

    @staticmethod
    def of_checkpoint(location: Path | str) -> "MergedAdapter":
        return MergedAdapter("/".join(str(location).rstrip("/").split("/")[-2:]))

    @staticmethod
    def of_folder(folder: Path) -> "MergedAdapter":
        return MergedAdapter(folder.absolute().name, sha256(folder / WEIGHTS))


def merged_file(adapters: Sequence[MergedAdapter]) -> dict[str, bytes]:
    """The record as a file of an exported folder, by its name; empty without adapters."""
    if not adapters:
        return {}
    return {MERGED: json.dumps({_KEY: [dataclasses.asdict(one) for one in adapters]}, indent=1).encode()}


def read_merged(folder: Path) -> tuple[MergedAdapter, ...]:
    """The record in an exported folder; empty if it has none."""
    file = folder / MERGED
    if not file.is_file():
        return ()
    try:
        return tuple(MergedAdapter(**one) for one in read_json_object(file)[_KEY])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not what jaxlm convert writes ({error}). Export the model again") from error


def has_adapters_of(model: LanguageModel, folder: Path, config: ModelConfig, layout: Layout) -> bool:
    """Tells whether a model has the adapters of a PEFT folder, as rounded in the file. All processes call it."""
    leaves = dict(tree.leaves(model))
    try:
        values = read_adapters(folder, config, AxisSizes.of_model(model)).leaves(model)
    except (ConfigError, KeyError):  # of other layers, ranks or modules
        return False
    whole = jax.jit(lambda x: x, out_shardings=layout.replicated())
    adapters = [(leaves[path], array) for path, array in values.items() if path.endswith((".a", ".b"))]
    return bool(adapters) and all(
        np.array_equal(np.asarray(whole(leaf.array)).astype(array.dtype), array) for leaf, array in adapters
    )
