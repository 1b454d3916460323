"""One layer's LoRA of a matrix that is several parameters in jaxlm, such as queries, keys and values.

jaxlm has an adapter for each parameter, and PEFT one for the whole matrix. The rows of each parameter get ranks of their own:

    B_q  0   0        A_q
     0  B_k  0    x   A_k
     0   0  B_v       A_v

Conversely, in any adapter of the whole matrix, the rows of B that belong to a parameter are that parameter's B, beside the
whole A. If only some ranks have values in these rows, the others can be left out. DoRA's norms are over the inputs, so each
row has its own magnitude, which is that of its parameter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxlm.core.axes import LORA
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.weights import Part, Sizes, Tensor
from jaxlm.interop.peft.names import module_path

_ONE = "one"  # an axis of size 1, in place of the inputs


class Arrays(NamedTuple):
    """An adapter's a [rank, in], b [out, rank] and, with DoRA, magnitude [out]."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None

    def present(self) -> dict[str, np.ndarray]:
        """Those that there are, by name."""
        return {name: array for name, array in self._asdict().items() if array is not None}


@dataclass(frozen=True)
class FusedMatrix:
    """The layout of a matrix of several parameters.

    Attributes:
        tensor: its entry in the table of weights.
        sizes: axis sizes of the model.
    """

    tensor: Tensor
    sizes: Sizes

    def fuse(self, pairs: Mapping[str, Arrays]) -> Arrays:
        """The adapter of the whole matrix.

        Args:
            pairs: module path -> its adapter; modules without one do not change.

        Raises:
            ConfigError: some of the modules have magnitudes. Those of the others are norms of weights, which are not given.
        """
        adapted = [path for path in map(module_path, self.tensor.parts) if path in pairs]
        magnitudes = [pairs[path].magnitude for path in adapted]
        if any(magnitude is not None for magnitude in magnitudes) and len(adapted) < len(self.tensor.parts):
            raise ConfigError(
                f"{self.tensor.name}: with DoRA, all parameters of this matrix must have adapters so that PEFT can read them,"
                f" but only {', '.join(adapted)} have. Export the merged model: --adapters merge"
            )
        num_ranks = sum(len(pairs[path].a) for path in adapted)
        start, parts = 0, []
        for part in self.tensor.parts:
            outputs = [self.sizes[axis] for axis in self._outputs(part)]
            whole = np.zeros((int(np.prod(outputs)), num_ranks), pairs[adapted[0]].b.dtype)
            if (path := module_path(part)) in pairs:
                b = pairs[path].b
                whole[:, start : start + b.shape[1]] = b
                start += b.shape[1]
            parts.append(whole.reshape((*outputs, num_ranks)))
        b = self._joined(parts, LORA, num_ranks)
        magnitude = None
        if magnitudes[0] is not None:
            shapes = [[self.sizes[axis] for axis in self._outputs(part)] for part in self.tensor.parts]
            present = [magnitude for magnitude in magnitudes if magnitude is not None]
            columns = [np.reshape(values, (*shape, 1)) for values, shape in zip(present, shapes, strict=True)]
            magnitude = self._joined(columns, _ONE, 1).reshape(-1)
        return Arrays(np.concatenate([pairs[path].a for path in adapted]), b, magnitude)

    def _joined(self, parts: list[np.ndarray], name: str, size: int) -> np.ndarray:
        """[all outputs, size] from one array [*outputs, size] of each parameter."""
        axes = [(*self._outputs(part), name) for part in self.tensor.parts]
        whole = self._with_inputs(name).write(parts, axes, {**self.sizes, name: size})
        return whole.T if self._has_inputs_first else whole

    def split(self, adapter: Arrays, rank: int) -> Iterator[tuple[str, int | None, Arrays]]:
        """(path, rank, adapter) of each module. The rank is None if it has all ranks of the whole adapter.

        Args:
            adapter: the whole one, with arrays [layers, ...]. Those of modules are stacked alike.
            rank: if the ranks are blocks of this size, and no parameter has values in more than one of them, each gets its
                own block.

        Raises:
            ConfigError: the whole adapter has another shape.
        """
        a, b, magnitude = adapter
        num_ranks = a.shape[1]
        outputs = self._with_inputs(LORA).shape({**self.sizes, LORA: num_ranks})
        expected = (outputs[:: -1 if self._has_inputs_first else 1], self.sizes[self._inputs[0]])
        if (b.shape[1:], a.shape[2]) != expected:
            raise ConfigError(
                f"the adapter at {self.tensor.name.removesuffix('.weight')} has lora_A {list(a.shape[1:])} and lora_B"
                f" {list(b.shape[1:])}, but {[num_ranks, expected[1]]} and {list(expected[0])} expected. Check that it"
                " belongs to a model of this configuration"
            )
        rows = [self._rows(b, number, LORA) for number in range(len(self.tensor.parts))]
        blocks = [slice(start, start + rank) for start in range(0, num_ranks, rank)]
        used = [[block for block in blocks if part_rows[..., block].any()] or blocks[:1] for part_rows in rows]
        whole = num_ranks % rank > 0 or num_ranks == rank or any(len(part_blocks) > 1 for part_blocks in used)
        for number, part in enumerate(self.tensor.parts):
            ranks = slice(None) if whole else used[number][0]
            part_magnitude = None if magnitude is None else self._rows(magnitude[..., None], number, _ONE)[..., 0]
            yield (
                module_path(part),
                None if whole else rank,
                Arrays(a[:, ranks], rows[number][..., ranks], part_magnitude),
            )

    def _rows(self, whole: np.ndarray, number: int, name: str) -> np.ndarray:
        """[layers, out, size] of one parameter, from [layers, all outputs, size]."""
        sizes = {**self.sizes, name: whole.shape[-1]}
        axes = (*self._outputs(self.tensor.parts[number]), name)
        layers = (layer.T if self._has_inputs_first else layer for layer in whole)
        rows = [self._with_inputs(name).read(layer, number, sizes, axes) for layer in layers]
        return np.stack([layer.reshape(-1, whole.shape[-1]) for layer in rows])

    @property
    def _has_inputs_first(self) -> bool:
        """As in GPT-2's files: then the parts are concatenated along the last dimension."""
        return self.tensor.along == len(self.tensor.parts[0].dims) - 1

    @property
    def _inputs(self) -> tuple[str, ...]:
        return self.tensor.parts[0].dims[0 if self._has_inputs_first else -1]

    def _with_inputs(self, name: str) -> Tensor:
        """The layout of the matrix with another axis in place of its inputs: that of B, with ranks."""
        replaced = (tuple((name,) if dim == self._inputs else dim for dim in part.dims) for part in self.tensor.parts)
        parts = (replace(part, dims=dims) for part, dims in zip(self.tensor.parts, replaced, strict=True))
        return replace(self.tensor, parts=tuple(parts))

    def _outputs(self, part: Part) -> tuple[str, ...]:
        """The output axes of a parameter, in the order of the file."""
        return tuple(axis for dim in part.dims if dim != self._inputs for axis in dim)
