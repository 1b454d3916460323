"""Folders whose weights are stored as codes with scales for blocks of them, read as if they had floating-point weights.

The key `quantization_config` of config.json names the format. The view shows the names, shapes and layouts of the same folder
in floating point, and decodes a tensor when it is read, so families need not support formats.

MXFP4 (`quant_method: mxfp4`) is how gpt-oss stores its experts: e2m1 numbers, two in a byte, the first in the low bits, in
blocks of 32 along the inputs, each with a power of two. Rows are outputs, `NAME_blocks` [experts, out, in / 32, 16] and
`NAME_scales` [experts, out, in / 32]; the view's `NAME` is [experts, in, out], as in folders of gpt-oss in bfloat16.

FP8 (`quant_method: fp8`) is how DeepSeek-V3 stores matrices: e4m3 numbers in blocks of `weight_block_size` rows and columns,
with a factor for each block. The last blocks of a dimension may be partial. Without a block size, a matrix has one factor.

Source: the OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 to 5.4 and 6.3; DeepSeek-AI 2024, DeepSeek-V3
Technical Report (arXiv:2412.19437), section 3.3.2. The names are those that transformers reads.
"""

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_json_object
from jaxlm.interop.hf.safetensors_file import TensorInfo
from jaxlm.interop.hf.tensor_files import NamedTensors, Region, TensorSource, most_common_dtype, open_tensors

QUANTIZATION = "quantization_config"
"""The key of config.json."""
_BLOCK = 32  # numbers that share a scale in MXFP4
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
# Byte -> the doubles of its two numbers. With half of the scale, no product but the result itself can overflow.
_DOUBLED = 2 * np.concatenate([_E2M1, -_E2M1])[np.arange(256)[:, None] >> np.array([0, 4]) & 0xF]
_PAIRS = np.ascontiguousarray(_DOUBLED).view(np.uint64)[:, 0]
_BIAS = 127  # of e8m0 numbers
_SCALES = ("_scale_inv",)
_SCALES_OF_WEIGHT = (".scale", ".qscale_weight")  # of newer files of DeepSeek and of Mistral, instead of .weight
_WEIGHT = ".weight"
_OF_ACTIVATIONS = "activation_scale"


class StoredTensor(abc.ABC):
    """A tensor of the view."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """Its tensors in the folder, that with the codes first."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape in the view."""

    @abc.abstractmethod
    def decode(self, source: TensorSource, region: Sequence[slice]) -> np.ndarray:
        """A part of it in float32. Args: region: a slice of each dimension, with start, stop and step."""


@dataclass(frozen=True)
class MXFP4Tensor(StoredTensor):
    """A matrix for each expert. Attributes: blocks, scales: names."""

    blocks: str
    scales: str
    num_experts: int
    num_inputs: int
    num_outputs: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.blocks, self.scales

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_experts, self.num_inputs, self.num_outputs

    def decode(self, source: TensorSource, region: Sequence[slice]) -> np.ndarray:
        experts, inputs, outputs = region
        first = inputs.start // _BLOCK
        rows = (experts, outputs, slice(first, -(-inputs.stop // _BLOCK)))
        scales = np.ldexp(np.float32(0.5), source.view(self.scales, rows).astype(np.int32) - _BIAS)
        values = np.take(_PAIRS, source.view(self.blocks, rows)).view(np.float32)  # [experts, outputs, blocks, 32]
        with np.errstate(over="ignore"):  # who reads weights refuses infinity
            values *= scales[..., None]
        values = values.reshape(*values.shape[:2], -1)
        within = slice(inputs.start - first * _BLOCK, inputs.stop - first * _BLOCK, inputs.step)
        return values[:, :, within].swapaxes(1, 2)


@dataclass(frozen=True)
class FP8Tensor(StoredTensor):
    """A matrix, several, or a vector.

    Attributes:
        weight, scale: names.
        others: names of tensors that belong to it, and are not read.
        block: rows and columns (of a vector, numbers) that share a scale.
        grid: the shape of the scales, with as many dimensions as the weight.
    """

    weight: str
    scale: str
    others: tuple[str, ...]
    block: tuple[int, ...]
    whole: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.weight, self.scale, *self.others

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole

    def decode(self, source: TensorSource, region: Sequence[slice]) -> np.ndarray:
        codes = source.view(self.weight, tuple(region))
        values = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)[codes.view(np.uint8)]
        scales = source.view(self.scale)
        if scales.dtype == np.uint8:
            scales = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
        scales = scales.astype(np.float32).reshape(self.grid)
        sizes = (*(1 for _ in self.whole[:-2]), *self.block)
        for dim, (part, size, whole) in enumerate(zip(region, sizes, self.whole, strict=True)):
            if self.grid[dim] > 1:
                scales = np.take(scales, np.arange(whole)[part] // size, axis=dim)
        return values * scales


class StoredView:
    """A folder with stored weights as if it had those that they stand for.

    Attributes:
        source: the folder.
        stored: name in the view -> what is decoded. All others are as in the folder.
    """

    def __init__(self, source: TensorSource, stored: Mapping[str, StoredTensor], dtype: Any = None):
        """Args: dtype: of decoded tensors; None for the one of most others."""
        self.source, self.stored = source, stored
        of_stored = {name for tensor in stored.values() for name in tensor.names}
        plain = {name: info for name, info in source.tensors.items() if name not in of_stored}
        self._dtype = np.dtype(dtype or most_common_dtype(NamedTensors(source, {name: name for name in plain})))
        decoded = {name: TensorInfo(tensor.shape, self._dtype) for name, tensor in stored.items()}
        if both := sorted(plain.keys() & decoded.keys()):
            where = source.where(stored[both[0]].names[0])
            raise ConfigError(f"{where} is stored in another form, but '{both[0]}' is there too. Remove one of them")
        self._tensors = plain | decoded

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def view(self, name: str, region: Region = ()) -> np.ndarray:
        if (tensor := self.stored.get(name)) is None:
            return self.source.view(name, region)
        wanted = [*region, *[slice(None)] * (len(tensor.shape) - len(region))]
        exact = [slice(*part.indices(size)) for part, size in zip(wanted, tensor.shape, strict=True)]
        return tensor.decode(self.source, exact).astype(self._dtype, copy=False)

    def where(self, name: str) -> str:
        return self.source.where(self.stored[name].names[0] if name in self.stored else name)


def open_weights(folder: Path, dtype: Any = None) -> TensorSource:
    """Opens the weights of a folder, or of a file, decoded if its config.json says that they are stored.

    Args:
        dtype: as of `StoredView`.

    Raises:
        ConfigError: as `open_tensors`, or a stored tensor is incomplete or has other shapes than its format says.
    """
    source, file = open_tensors(folder), folder / "config.json"
    content = read_json_object(file) if file.is_file() else {}
    inner = content.get("text_config")
    config = (inner if isinstance(inner, dict) and QUANTIZATION in inner else content).get(QUANTIZATION)
    if not config or unreadable(config):
        return source
    return StoredView(source, dict(_FORMATS[config["quant_method"]](source, config)), dtype)


def unreadable(config: Any) -> str | None:
    """Says why weights stored in this way cannot be read; None if they can. Args: config: the key of config.json."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in list(_FORMATS):  # whatever JSON has
        return f"its quant_method is {method}. Known: {', '.join(_FORMATS)}"
    block = config.get("weight_block_size")
    if block is None or (
        isinstance(block, Sequence) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        return None
    return f"its weight_block_size is {block}, two positive integers or null expected"


def _mxfp4_tensors(source: TensorSource, config: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    for name, info in source.tensors.items():
        if not name.endswith("_blocks"):
            continue
        stem, shape = name.removesuffix("_blocks"), info.shape
        scales = source.tensors.get(f"{stem}_scales")
        expected = f"uint8 [experts, out, in / {_BLOCK}, {_BLOCK // 2}] with _scales [experts, out, in / {_BLOCK}]"
        found = (shape, None if scales is None else scales.shape, info.dtype, None if scales is None else scales.dtype)
        if len(shape) != 4 or found != ((*shape[:3], _BLOCK // 2), shape[:3], np.uint8, np.uint8):
            given = f"{info.dtype} {list(shape)}, _scales: {'missing' if scales is None else list(scales.shape)}"
            raise ConfigError(f"{source.where(name)}: {given}; {expected} expected. Download the folder again")
        yield stem, MXFP4Tensor(name, f"{stem}_scales", shape[0], shape[2] * _BLOCK, shape[1])


def _fp8_tensors(source: TensorSource, config: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    for name, info in source.tensors.items():
        if not info.dtype.name.startswith(("float8_e4m3", "float8_e5m2")):
            continue
        stem = name.removesuffix(_WEIGHT)
        of_weight = _SCALES_OF_WEIGHT if stem != name else ()
        scales = [*(name + end for end in _SCALES), *(stem + end for end in of_weight)]
        scale = next((one for one in scales if one in source.tensors), None)
        if scale is None:
            raise ConfigError(
                f"{source.where(name)} is {info.dtype} without a scale. Expected one of: {', '.join(scales)}"
            )
        *outer, rows, columns = (1, 1, *info.shape)[-max(2, len(info.shape)) :]
        block = config.get("weight_block_size") or (rows, columns)
        grid = (*outer, -(-rows // block[0]), -(-columns // block[1]))
        given, dtype = source.tensors[scale].shape, source.tensors[scale].dtype
        if math.prod(given) == 1 and not config.get("weight_block_size"):
            grid = (1,) * len(grid)
        is_number = dtype == np.uint8 or jnp.issubdtype(dtype, jnp.floating)
        if not is_number or [n for n in given if n > 1] != [n for n in grid if n > 1]:
            size = f"blocks of {list(block)}" if config.get("weight_block_size") else "no weight_block_size"
            raise ConfigError(
                f"{source.where(scale)}: {dtype} {list(given)} in the file, numbers {list(grid)} expected for"
                f" {list(info.shape)} with {size}. Correct {QUANTIZATION} in config.json"
            )
        dims = slice(max(0, 2 - len(info.shape)), None)  # of a vector, there are no rows
        others = (f"{stem}.{_OF_ACTIVATIONS}" if stem != name else f"{name}_{_OF_ACTIVATIONS}",)
        present = tuple(one for one in others if one in source.tensors)
        yield name, FP8Tensor(name, scale, present, tuple(block)[dims], info.shape, grid[dims])


_FORMATS = {"mxfp4": _mxfp4_tensors, "fp8": _fp8_tensors}
