"""How an optimizer's state is stored between updates: in the dtypes of its computation, or in 8 bits in blocks of 256.

A moment in 8 bits has a code for each element, and the largest absolute value of each block of 256 elements.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861), section 2.1; bitsandbytes
0.50.2 for the block size (2048 in the paper) and for multiplying by the reciprocal of the largest value.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Annotated, Any

import draccus
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval
from haliax import Axis, NamedArray
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core import tree
from jaxlm.core.axes import STACKED_LAYERS, axis_names
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import described
from jaxlm.core.products.dynamic_map import nearest_codes, numbers_of
from jaxlm.core.sharding import current_layout
from jaxlm.reading.choices import Registry, choice
from jaxlm.reading.decode import encode

BLOCK_SIZE = 256
_SMALLEST = float(np.finfo(np.float32).tiny)  # the reciprocals of smaller numbers are infinite
_UNNAMED = "dim"  # with its number, the name of an axis of an array without names


class QuantizedMoment(eqx.Module):
    """A moment in 8 bits.

    A block has 256 consecutive elements in row-major order. It is within the last axes that together have a multiple of 256
    elements; if there are none, within a layer, whose last block may be shorter. The codes of a block of zeros are those of
    0, so that new codes are zeros with any `absmax`.

    Attributes:
        codes: uint8, with the axes of the moment.
        absmax: float32, with the axes that blocks do not extend along, and the blocks, which have the name of the first of
            the others. So it is sharded, and cut into layers, like the moment.
        is_signed: whether the moment can be negative.
        dtype: of the moment.
    """

    codes: NamedArray | jax.Array
    absmax: NamedArray | jax.Array
    is_signed: bool = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @staticmethod
    def of(moment: NamedArray | jax.Array, is_signed: bool) -> "QuantizedMoment":
        """Quantizes a moment. Traceable."""
        blocks = _Blocks.of(moment)
        exact = tree.raw(moment).astype(jnp.float32)
        absmax = blocks.largest(jnp.abs(exact))
        scale = jnp.where(absmax < _SMALLEST, 0.0, 1 / absmax)
        codes = nearest_codes(exact * blocks.by_element(scale), is_signed)
        return QuantizedMoment._made(moment, codes, absmax, is_signed)

    @staticmethod
    def constant(moment: NamedArray | jax.Array, value: float, is_signed: bool) -> "QuantizedMoment":
        """As `of`, for a moment with this value everywhere. XLA would take minutes to fold the quantization of a constant."""
        blocks = _Blocks.of(moment)
        size = np.float32(abs(value)) if abs(value) >= _SMALLEST else np.float32(0)
        code = nearest_codes(jnp.float32(np.sign(value) if size else 0), is_signed)
        codes = jnp.full(_shape(blocks.axes), code, jnp.uint8)
        return QuantizedMoment._made(moment, codes, jnp.full(_shape(blocks.absmax_axes), size), is_signed)

    @staticmethod
    def _made(like: NamedArray | jax.Array, codes: jax.Array, absmax: jax.Array, is_signed: bool) -> "QuantizedMoment":
        if isinstance(like, NamedArray):
            absmax_axes = _Blocks.of(like).absmax_axes
            return QuantizedMoment(NamedArray(codes, like.axes), NamedArray(absmax, absmax_axes), is_signed, like.dtype)
        return QuantizedMoment(codes, absmax, is_signed, like.dtype)

    def floats(self) -> NamedArray | jax.Array:
        """The moment in its dtype. Traceable."""
        blocks = _Blocks.of(self.codes)
        numbers = numbers_of(tree.raw(self.codes), self.is_signed)
        array = (numbers * blocks.by_element(tree.raw(self.absmax))).astype(self.dtype)
        return NamedArray(array, blocks.axes) if tree.is_named(self.codes) else array


def layer_size(leaf: Any) -> int:
    """The number of elements of an array in each layer."""
    if not tree.is_named(leaf):
        return leaf.size
    return math.prod(axis.size for axis in leaf.axes if axis.name not in STACKED_LAYERS)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Says where the blocks of an array are.

    With FSDP, a block may be on several devices. Then its largest value is found in two steps, first of each chunk that one
    device has, so that only one number of each chunk moves between devices. The largest of numbers does not depend on the
    order, so the result is the same bit for bit.

    Attributes:
        axes: of the array.
        first: number of axes that blocks do not extend along.
        split: number of axes that chunks do not extend along.
        chunk: number of consecutive elements that are on one device and in one block.
    """

    axes: tuple[Axis, ...]
    first: int
    split: int
    chunk: int

    @staticmethod
    def of(leaf: Any) -> "_Blocks":
        named = tree.is_named(leaf)
        axes = leaf.axes if named else tuple(Axis(f"{_UNNAMED}{n}", size) for n, size in enumerate(leaf.shape))
        # The first axis of an array without names may be that of layers.
        kept = [n + 1 for n, axis in enumerate(axes) if axis.name in STACKED_LAYERS] if named else [int(len(axes) > 1)]
        least = max(kept, default=0)
        wholes = (n for n in reversed(range(least, len(axes))) if _size(axes[n:]) % BLOCK_SIZE == 0)
        first = next(wholes, least)
        shards = _num_shards(axes)
        split = next((n for n in reversed(range(first, len(axes))) if shards[n] > 1), first)
        chunk = math.gcd(BLOCK_SIZE, _size(axes[split:]) // math.prod(shards[split : split + 1]))
        return _Blocks(axes, first, split, chunk)

    @property
    def absmax_axes(self) -> tuple[Axis, ...]:
        return (*self.axes[: self.first], Axis(self.axes[self.first].name, self._num_blocks))

    def largest(self, array: jax.Array) -> jax.Array:
        """The largest element of each block, with the shape of `absmax_axes`."""
        of_chunks = self._placed(jnp.max(array.reshape(*self._chunks_shape, self.chunk), -1))
        flat = of_chunks.reshape(*_shape(self.axes[: self.first]), -1)
        missing = self._num_blocks * self._chunks_per_block - flat.shape[-1]
        padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, missing)]) if missing else flat
        return jnp.max(padded.reshape(*flat.shape[:-1], self._num_blocks, self._chunks_per_block), -1)

    def by_element(self, of_blocks: jax.Array) -> jax.Array:
        """A number of each block for each element of the array."""
        flat = jnp.repeat(of_blocks, self._chunks_per_block, -1)[..., : _size(self.axes[self.first :]) // self.chunk]
        of_chunks = self._placed(flat.reshape(self._chunks_shape))
        return jnp.broadcast_to(of_chunks[..., None], (*of_chunks.shape, self.chunk)).reshape(_shape(self.axes))

    @property
    def _num_blocks(self) -> int:
        return -(-_size(self.axes[self.first :]) // BLOCK_SIZE)

    @property
    def _chunks_per_block(self) -> int:
        return BLOCK_SIZE // self.chunk

    @property
    def _chunks_shape(self) -> tuple[int, ...]:
        return (*_shape(self.axes[: self.split]), _size(self.axes[self.split :]) // self.chunk)

    def _placed(self, of_chunks: jax.Array) -> jax.Array:
        """A number of each chunk, on the device that has the chunk."""
        layout = current_layout()
        if layout is None or layout.mesh.size == 1:
            return of_chunks
        spec = layout.parameter_sharding(self.axes).spec[: self.split + 1]
        return jax.lax.with_sharding_constraint(of_chunks, NamedSharding(layout.mesh, PartitionSpec(*spec)))


def _num_shards(axes: tuple[Axis, ...]) -> list[int]:
    layout = current_layout()
    if layout is None:
        return [1] * len(axes)
    spec = layout.parameter_sharding(axes).spec
    return [math.prod(layout.mesh.shape[name] for name in axis_names(entry)) for entry in spec]


def _size(axes: tuple[Axis, ...]) -> int:
    return math.prod(_shape(axes))


def _shape(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


# Fields of optimizer states that are never negative: Adam's, Adagrad's and SOAP's.
_NOT_NEGATIVE = {"nu", "sum_of_squares", "variance"}


class StateFormat(Registry, draccus.ChoiceRegistry, abc.ABC, by_name=True):
    """The format of an optimizer's state between updates. A plain name selects the format with its default options."""

    @abc.abstractmethod
    def stored(self, optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
        """The optimizer with its state in this format."""


@choice(StateFormat, "full")
class Full(StateFormat):
    """The dtypes that the optimizer computes in: float32, or float64 for parameters in float64."""

    def stored(self, optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
        return optimizer


@choice(StateFormat, "8bit")
class EightBit(StateFormat):
    """8 bits for each element, and a float32 for each block of 256: a quarter of the memory of float32.

    Every update computes in full precision with the moments that the codes stand for, and rounds the new moments to the
    nearest codes. The codes are those of bitsandbytes: dynamic tree quantization, with a sign for first moments, and without
    one for second moments. Arrays that are not moments, such as SOAP's eigenbases, are stored as they are.

    Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861).

    Attributes:
        min_size: moments with fewer elements in each layer are stored in full.
        embeddings: also quantize the moments of token and position embeddings. The paper trains them with 32-bit states
            (section 2.3): the gradients of rare and of frequent tokens differ by orders of magnitude.
    """

    min_size: Annotated[int, Interval(ge=BLOCK_SIZE)] = 4096
    embeddings: bool = False

    def stored(self, optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
        def init_fn(params: Any) -> Any:
            known = described(params)
            shapes = {
                path: tree.raw(leaf).shape
                for path, leaf in tree.leaves(params)
                if layer_size(leaf) >= self.min_size and (self.embeddings or not known[path].embedding)
            }

            def quantized(path: str, leaf: Any) -> Any:
                parameter, fields = _moment_of(path, shapes)
                if parameter is None or not tree.is_inexact(leaf) or tree.raw(leaf).shape != shapes[parameter]:
                    return leaf
                is_signed, value = fields.isdisjoint(_NOT_NEGATIVE), values[path]
                if value is None:
                    return QuantizedMoment.of(leaf, is_signed)
                return QuantizedMoment.constant(leaf, value, is_signed)

            values = _constants(optimizer.init, params)
            return tree.map_leaves(quantized, optimizer.init(params))

        def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            moved, after = optimizer.update(updates, in_full(state), params, **extra)
            stored = lambda old, new: QuantizedMoment.of(new, old.is_signed) if is_quantized(old) else new  # noqa: E731
            return moved, jax.tree.map(stored, state, after, is_leaf=is_quantized)

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def is_quantized(node: Any) -> bool:
    """Tells whether a node of an optimizer state is a moment in 8 bits. Use it as `is_leaf` in traversals."""
    return isinstance(node, QuantizedMoment)


def in_full(state: Any) -> Any:
    """The optimizer state with all moments as floating-point arrays."""
    return jax.tree.map(lambda node: node.floats() if is_quantized(node) else node, state, is_leaf=is_quantized)


def check_applies(given: StateFormat, state: Any, params: Any) -> None:
    """Raises `ConfigError` if nothing of the state of an optimizer for these parameters is in another format than `Full`."""
    if not tree.modules(state, QuantizedMoment):
        most = max((layer_size(leaf) for _, leaf in tree.leaves(params)), default=0)
        raise ConfigError(
            f"optimizer.state: {encode(given)} given, but no moment is stored in 8 bits: the largest trainable parameter has"
            f" {most:,} elements in each layer. Lower optimizer.state.min_size, set optimizer.state.embeddings, or set"
            " optimizer.state: full"
        )


def describe_state(state: Any, num_parameters: int) -> str:
    """Says how much memory an optimizer state needs, summed over devices. Args: num_parameters: that it is for."""
    quantized = tree.modules(state, QuantizedMoment)
    num_arrays = sum(tree.is_inexact(leaf) for _, leaf in tree.leaves(state)) - len(quantized)  # less their absmax
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    stored = f"{num_arrays} arrays" + (f", {len(quantized)} moments in 8 bits" if quantized else "")
    return f"{num_bytes / 2**30:.3f} GiB, {num_bytes / max(num_parameters, 1):.2f} bytes a parameter ({stored})"


def _constants(make: Callable[[Any], Any], params: Any) -> dict[str, float | None]:
    """Path -> the value that a leaf of `make(params)` has everywhere; None if the program does not make it of one number."""
    program, made = jax.make_jaxpr(make, return_shape=True)(params)
    values = {
        equation.outvars[0]: float(equation.invars[0].val)
        for equation in program.eqns
        if equation.primitive.name == "broadcast_in_dim" and isinstance(equation.invars[0], Literal)
    }
    outputs = zip(tree.leaves(made), program.jaxpr.outvars, strict=True)
    return {path: None if isinstance(out, Literal) else values.get(out) for (path, _), out in outputs}


def _moment_of(path: str, parameters: Collection[str]) -> tuple[str | None, set[str]]:
    """The parameter that a path in an optimizer state names, and the names before and after it; None if there is none.

    A moment has at most one name after its parameter's. What belongs to one side of a matrix has two, as in `left.vectors`.
    """
    names = path.split(".")
    for end in (len(names), len(names) - 1):
        for start in range(end):
            if (parameter := ".".join(names[start:end])) in parameters:
                return parameter, {*names[:start], *names[end:]}
    return None, set()
