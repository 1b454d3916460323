"""Sources of tensors: folders in Hugging Face format, safetensors and torch files; patterns that rename tensors."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.safe_io import listed_file, read_json_object
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo
from jaxlm.interop.torch.torch_file import TORCH_SUFFIXES, TorchFile

Region = tuple[slice, ...]
"""A slice of each of a tensor's first dimensions. The others are whole."""
_WHOLE = ("model.safetensors", "pytorch_model.bin")  # in the order of transformers, which prefers each to its index


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name -> shape and dtype."""
        ...

    def view(self, name: str, region: Region = ()) -> np.ndarray:
        """A tensor, or a part of it. Do not write to it."""
        ...

    def where(self, name: str) -> str:
        """A tensor's file and its name there, for messages."""
        ...


class ManyFiles:
    """The tensors of several files.

    Args:
        files: tensor name -> the file that contains it.
    """

    def __init__(self, files: Mapping[str, TensorSource]):
        self._files = files

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: file.tensors[name] for name, file in self._files.items()}

    def view(self, name: str, region: Region = ()) -> np.ndarray:
        return self._files[name].view(name, region)

    def where(self, name: str) -> str:
        return self._files[name].where(name)


def open_tensors(path: Path) -> TensorSource:
    """Opens a weights file, or the weights in a folder: `model.safetensors`, an index of several files, or torch files.

    Raises:
        ConfigError: there are no weights, or an index lists missing files or tensors.
    """
    if not path.is_dir():
        return _open_file(path)
    for name in _WHOLE:
        if (path / name).is_file():
            return _open_file(path / name)
        if (index := _index(path, name)).is_file():
            return _open_index(index)
    files = sorted(p for p in path.glob("*.safetensors") if p.name != "adapter_model.safetensors")
    if not files:
        raise ConfigError(
            f"{path}: no weights found. Looked for model.safetensors, model.safetensors.index.json, other .safetensors files,"
            " pytorch_model.bin and its index"
        )
    return _joined({file: _open_file(file) for file in files})


def unread_indices(path: Path) -> list[str]:
    """Notes about indices that are not read, because the folder has one file with all weights as well."""
    names = [name for name in _WHOLE if (path / name).is_file() and _index(path, name).is_file()]
    return [f"{_index(path, name)}: ignored: transformers reads {name}" for name in names]


def most_common_dtype(source: TensorSource) -> np.dtype:
    """The floating-point dtype with the most elements; float32 if there is none."""
    sizes: Counter[np.dtype] = Counter()
    for info in source.tensors.values():
        if jnp.issubdtype(info.dtype, jnp.floating):
            sizes[info.dtype] += math.prod(info.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default=np.dtype(np.float32))


def _open_file(path: Path) -> TensorSource:
    if not path.is_file():
        raise ConfigError(f"{path}: no such weights file or folder")
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in TORCH_SUFFIXES:
        return TorchFile(path)
    raise ConfigError(f"{path}: unknown file type. Allowed: .safetensors, {', '.join(TORCH_SUFFIXES)}")


def _index(path: Path, name: str) -> Path:
    return path / f"{name}.index.json"


def _open_index(index: Path) -> TensorSource:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: weight_map is not a table of tensor names and file names. Download it again")
    note_file(index)
    names = sorted(set(weight_map.values()))
    paths = {name: listed_file(index.parent, name) for name in names}
    absent = [name for name, path in paths.items() if not path.is_file()]
    if absent:
        raise ConfigError(f"{index} lists missing files: {', '.join(absent)}. Download them")
    files = {name: _open_file(path) for name, path in paths.items()}
    missing = [f"{tensor} (in {file})" for tensor, file in weight_map.items() if tensor not in files[file].tensors]
    if missing:
        raise ConfigError(f"{index} lists tensors that are missing from its files:\n  " + "\n  ".join(missing))
    return _joined({paths[name]: file for name, file in files.items()})


def _joined(files: Mapping[Path, TensorSource]) -> TensorSource:
    owners: dict[str, TensorSource] = {}
    for path, file in files.items():
        for name in file.tensors:
            if name in owners:
                raise ConfigError(
                    f"{path}: the tensor '{name}' is also in another file. Keep only one of the two files"
                )
            owners[name] = file
    return ManyFiles(owners)


class NamedTensors:
    """Some tensors of a source, by other names.

    Args:
        names: new name -> the one in `source`.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        self._source, self._names = source, names

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = self._source.tensors
        return {ours: infos[theirs] for ours, theirs in self._names.items()}

    def view(self, name: str, region: Region = ()) -> np.ndarray:
        return self._source.view(self._names[name], region)

    def where(self, name: str) -> str:
        return self._source.where(self._names[name])


def renamed(source: TensorSource, rules: Mapping[str, str]) -> NamedTensors:
    """A tensor source with other names.

    Args:
        rules: regular expression on the full name in `source` -> new name (`\\1` for groups). The first match applies;
            tensors without a match are skipped.

    Raises:
        ConfigError: an expression is invalid or matches nothing, or two tensors get the same name.
    """
    names: dict[str, str] = {}
    compiled = {_compiled(pattern): name for pattern, name in rules.items()}
    used = set()
    for theirs in source.tensors:
        for pattern, name in compiled.items():
            if match := pattern.fullmatch(theirs):
                ours = match.expand(name)
                if ours in names:
                    raise ConfigError(f"'{names[ours]}' and '{theirs}' are both renamed to '{ours}'")
                names[ours] = theirs
                used.add(pattern)
                break
    for pattern in compiled:
        if pattern not in used:
            raise ConfigError(
                f"the rule '{pattern.pattern}' matches no tensor. Tensors: {', '.join(list(source.tensors)[:8])}, ..."
            )
    return NamedTensors(source, names)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is not a valid regular expression: {error}") from error
