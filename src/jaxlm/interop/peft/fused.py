"""One layer's LoRA of a matrix that is several parameters in jaxlm, such as queries, keys and values.

jaxlm has an adapter for each parameter, and PEFT one for the whole matrix. The rows of each parameter get ranks of their own:

    B_q  0   0        A_q
     0  B_k  0    x   A_k
     0   0  B_v       A_v

Conversely, in any adapter of the whole matrix, the rows of B that belong to a parameter are that parameter's B, beside the
whole A. If only some ranks have values in these rows, the others can be left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxlm.core.axes import LORA
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.weights import Part, Sizes, Tensor

Pair = tuple[np.ndarray, np.ndarray]
"""a [rank, in] and b [out, rank]."""


def module_path(part: Part) -> str:
    """The path in jaxlm of the module that has this weight."""
    return part.path.removesuffix(".weight")


@dataclass(frozen=True)
class FusedMatrix:
    """The layout of a matrix of several parameters.

    Attributes:
        tensor: its entry in the table of weights.
        sizes: axis sizes of the model.
    """

    tensor: Tensor
    sizes: Sizes

    def fuse(self, pairs: Mapping[str, Pair]) -> Pair:
        """The adapter of the whole matrix. Args: pairs: module path -> its adapter; modules without one do not change."""
        adapted = [path for path in map(module_path, self.tensor.parts) if path in pairs]
        num_ranks = sum(len(pairs[path][0]) for path in adapted)
        start, parts = 0, []
        for part in self.tensor.parts:
            outputs = [self.sizes[axis] for axis in self._outputs(part)]
            whole = np.zeros((int(np.prod(outputs)), num_ranks), pairs[adapted[0]][1].dtype)
            if (path := module_path(part)) in pairs:
                b = pairs[path][1]
                whole[:, start : start + b.shape[1]] = b
                start += b.shape[1]
            parts.append(whole.reshape((*outputs, num_ranks)))
        axes = [(*self._outputs(part), LORA) for part in self.tensor.parts]
        b = self._of_ranks.write(parts, axes, {**self.sizes, LORA: num_ranks})
        return np.concatenate([pairs[path][0] for path in adapted]), b.T if self._has_inputs_first else b

    def split(self, a: np.ndarray, b: np.ndarray, rank: int) -> Iterator[tuple[str, Pair]]:
        """Path and adapter of each module: all ranks of the whole adapter, or the `rank` ranks with values in its rows.

        Args:
            a, b: the whole adapter, [layers, ranks, in] and [layers, out, ranks]. Those of modules are stacked alike.

        Raises:
            ConfigError: it has another shape, or more than `rank` ranks that are not those of one module each.
        """
        num_ranks = a.shape[1]
        sizes = {**self.sizes, LORA: num_ranks}
        expected = (self._of_ranks.shape(sizes)[:: -1 if self._has_inputs_first else 1], self.sizes[self._inputs[0]])
        if (b.shape[1:], a.shape[2]) != expected:
            raise ConfigError(
                f"the adapter at {self.tensor.name.removesuffix('.weight')} has lora_A {list(a.shape[1:])} and lora_B"
                f" {list(b.shape[1:])}, but {[num_ranks, expected[1]]} and {list(expected[0])} expected. Check that it"
                " belongs to a model of this configuration"
            )
        blocks = [slice(start, start + rank) for start in range(0, num_ranks, rank)]
        for number, part in enumerate(self.tensor.parts):
            axes = (*self._outputs(part), LORA)
            layers = (
                self._of_ranks.read(each.T if self._has_inputs_first else each, number, sizes, axes) for each in b
            )
            rows = np.stack([layer.reshape(-1, num_ranks) for layer in layers])
            used = [block for block in blocks if rows[..., block].any()] or blocks[:1]
            if len(used) > 1 or num_ranks % rank:
                raise ConfigError(
                    f"the adapter at {self.tensor.name.removesuffix('.weight')} has {num_ranks} ranks, but {rank} for each of"
                    f" its parameters expected, and {module_path(part)} uses others. Merge it in PEFT and import the merged"
                    " model"
                )
            yield module_path(part), (a[:, used[0]], rows[..., used[0]])

    @property
    def _has_inputs_first(self) -> bool:
        """As in GPT-2's files: then the parts are concatenated along the last dimension."""
        return self.tensor.along == len(self.tensor.parts[0].dims) - 1

    @property
    def _inputs(self) -> tuple[str, ...]:
        return self.tensor.parts[0].dims[0 if self._has_inputs_first else -1]

    @property
    def _of_ranks(self) -> Tensor:
        """The layout of B: that of the matrix, with ranks in place of its inputs."""
        replaced = (tuple((LORA,) if dim == self._inputs else dim for dim in part.dims) for part in self.tensor.parts)
        parts = (replace(part, dims=dims) for part, dims in zip(self.tensor.parts, replaced, strict=True))
        return replace(self.tensor, parts=tuple(parts))

    def _outputs(self, part: Part) -> tuple[str, ...]:
        """The output axes of a parameter, in the order of the file."""
        return tuple(axis for dim in part.dims if dim != self._inputs for axis in dim)
