"""How an optimizer's state is stored between updates: in the dtypes of its computation, or in 8 bits."""

import abc
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any

import jax
import optax
from annotated_types import Interval
from jax.extend.core import Literal

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.optim.stored_state.moment import BLOCK_SIZE, QuantizedMoment, layer_size
from jaxlm.reading.choices import NamedChoice, choice
from jaxlm.reading.decode import encode

EMBEDDING = r"(^|\.)(tokens|positions)(\.|$)|embedding$"
"""Matches the paths, in lower case, of embeddings of tokens and positions."""
# Fields of optimizer states that are never negative: Adam's, Adagrad's and SOAP's.
_NOT_NEGATIVE = {"nu", "sum_of_squares", "variance"}


class StateFormat(NamedChoice, abc.ABC):
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
            shapes = {path: tree.raw(leaf).shape for path, leaf in tree.leaves(params) if self._stores(path, leaf)}

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

    def _stores(self, path: str, leaf: Any) -> bool:
        return layer_size(leaf) >= self.min_size and (self.embeddings or not re.search(EMBEDDING, path.lower()))


def is_quantized(node: Any) -> bool:
    """Whether a node of an optimizer state is a moment in 8 bits. Use it as `is_leaf` in traversals."""
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
    """How much memory an optimizer state needs, summed over devices. Args: num_parameters: that it is for."""
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
