"""Safetensors files, read through a memory map and written tensor by tensor, with numpy only.

Source: the format's description (github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the
header (name -> dtype, shape, begin and end of its bytes), then the bytes, row-major and little-endian.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.safe_io import open_regular

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # limit of the format
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """The tensors of one file.

    Attributes:
        tensors: name -> shape and dtype.
    """

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
            ConfigError: not a safetensors file, or a truncated one.
        """
        self._path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._starts: dict[str, int] = {}
        with open_regular(path) as file:
            head = file.read(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _MAX_HEADER_BYTES + 1
            header = _parse_header(file.read(length)) if length <= _MAX_HEADER_BYTES else None
        if header is None:
            raise ConfigError(f"{path}: not a safetensors file: it has no valid header. Download it again")
        note_file(path)
        size = path.stat().st_size
        for name, entry in header.items():
            self._add(name, entry, _LENGTH.size + length, size)
        self._check_order(_LENGTH.size + length, size)
        self._map = np.memmap(path, np.uint8, "r") if size else None

    def view(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        """A memory-mapped view of a tensor. Its data is read on access."""
        info = self.tensors[name]
        return np.ndarray(info.shape, info.dtype, buffer=self._map, offset=self._starts[name])[(*region, ...)]

    def where(self, name: str) -> str:
        return f"{self._path}: '{name}'"

    def _add(self, name: str, entry: Mapping[str, Any], begin: int, size: int) -> None:
        try:
            code, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
                raise ValueError("not a size")
        except (TypeError, KeyError, ValueError) as error:
            damaged = f"the header entry of '{name}' is damaged: {str(entry)[:80]}"
            raise ConfigError(f"{self._path}: {damaged}. Download it again") from error
        if code not in _DTYPES:
            raise ConfigError(f"{self._path}: '{name}' has the dtype {code}. Known: {', '.join(_DTYPES)}")
        info = TensorInfo(shape, np.dtype(_DTYPES[code]))
        if last - first != info.num_bytes:
            raise ConfigError(
                f"{self._path}: the header is damaged: '{name}' has {last - first:,} bytes, but its shape {list(shape)} needs"
                f" {info.num_bytes:,}. Download it again"
            )
        if begin + last > size:
            raise ConfigError(
                f"{self._path}: the file is truncated: it has {size:,} bytes, but '{name}' ends at byte {begin + last:,}."
                " Download it again"
            )
        self.tensors[name] = info
        self._starts[name] = begin + first

    def _check_order(self, begin: int, size: int) -> None:
        """Like the reference, refuses tensors that overlap, and bytes that belong to none."""
        ranges = sorted((self._starts[name], info.num_bytes, name) for name, info in self.tensors.items())
        for first, num_bytes, name in [*ranges, (size, 0, "the end of the file")]:
            if first != begin:
                raise ConfigError(
                    f"{self._path}: the header is damaged: '{name}' is at byte {first:,}, {begin:,} expected: tensors"
                    " overlap, or bytes belong to none. Download it again"
                )
            begin += num_bytes


def _parse_header(header: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(header)
    except (ValueError, RecursionError):
        return None
    return {k: v for k, v in content.items() if k != _METADATA} if isinstance(content, dict) else None


def write_safetensors(path: Path, infos: Mapping[str, TensorInfo], arrays: Iterable[np.ndarray]) -> None:
    """Writes tensors one after another. Each array is requested only after the previous one is written.

    Args:
        infos: all tensors, in the order of `arrays`.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, info in infos.items():
        end = offset + info.num_bytes
        header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for (name, info), array in zip(infos.items(), arrays, strict=True):
            assert array.shape == info.shape, (name, array.shape, info.shape)
            file.write(np.ascontiguousarray(array, info.dtype).view(np.uint8).data)


def in_shards(infos: Mapping[str, TensorInfo], max_bytes: int) -> Iterator[dict[str, TensorInfo]]:
    """Splits tensors into files of at most `max_bytes`. A larger tensor gets a file of its own."""
    shard: dict[str, TensorInfo] = {}
    size = 0
    for name, info in infos.items():
        if shard and size + info.num_bytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = info
        size += info.num_bytes
    yield shard


def shard_names(count: int) -> Sequence[str]:
    """The conventional file names of `count` shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
