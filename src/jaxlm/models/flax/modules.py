"""A common functional interface to NNX and Linen modules: parameters by path, tokens to logits.

A module maps tokens [batch, position] to logits [batch, position, vocab]. It is called with those of these keyword
arguments that it accepts: `positions`, `segment_ids`, `train`, `deterministic`, `rngs`.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxlm.core.errors import ConfigError

AxisNames = tuple[str | None, ...]
"""The name of each dimension of a parameter; None for unnamed dimensions."""


class FlaxInputs(eqx.Module):
    """`jaxlm.models.base.Inputs` as plain arrays, int32 [batch, position]."""

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array

    @staticmethod
    def blank(rows: int, length: int) -> "FlaxInputs":
        """One document per row, all tokens 0."""
        return FlaxInputs(*(jnp.full((rows, length), value, jnp.int32) for value in (0, 0, 1)))


class FlaxModule(Protocol):
    """A module without its parameters.

    Attributes:
        names: axis names by path, for the parameters with partitioning metadata.
        takes: names of the parameters of its call.
    """

    names: Mapping[str, AxisNames]
    takes: frozenset[str]

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initializes the parameters, by path. Traceable."""
        ...

    def logits(self, params: Mapping[str, jax.Array], inputs: FlaxInputs, key: jax.Array | None) -> jax.Array:
        """Returns [batch, position, vocab]. Without a key there is no dropout."""
        ...


class NnxModule:
    """An `nnx.Module`. Its parameters are its `nnx.Param`s; its random streams are reseeded in every forward pass."""

    def __init__(self, make: Callable[[Any], Any]):
        """Builds the abstract module.

        Args:
            make: function of an `nnx.Rngs` that returns the module.
        """
        from flax import nnx

        self._make = make
        with _without_mesh():
            abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        self._graph, params, streams, rest = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
        _check_state([f"{_dotted(path)} ({type(leaf).__name__})" for path, leaf in nnx.to_flat_state(rest)])
        self._params = {_dotted(path): (path, leaf) for path, leaf in nnx.to_flat_state(params)}
        self._streams = list(nnx.to_flat_state(streams))
        metadata = {path: leaf.get_metadata().get("out_sharding") for path, (_, leaf) in self._params.items()}
        self.names: Mapping[str, AxisNames] = {path: tuple(names) for path, names in metadata.items() if names}
        self.takes = _parameter_names(type(abstract).__call__)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        from flax import nnx

        with _without_mesh():
            module = self._make(nnx.Rngs(_typed(key)))
        return {_dotted(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}

    def logits(self, params: Mapping[str, jax.Array], inputs: FlaxInputs, key: jax.Array | None) -> jax.Array:
        from flax import nnx

        base_key = jax.random.key(0) if key is None else _typed(key)
        filled = [(path, leaf.replace(params[name])) for name, (path, leaf) in self._params.items()]
        for number, (path, leaf) in enumerate(self._streams):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            value = jax.random.fold_in(base_key, number) if is_key else jnp.zeros(leaf.shape, leaf.dtype)
            # A stream that was split (for example, over stacked layers) has several keys.
            value = jax.random.split(value, leaf.shape) if is_key and leaf.shape else value
            filled.append((path, leaf.replace(value)))
        module = nnx.merge(self._graph, nnx.from_flat_state(filled))
        module.train() if key is not None else module.eval()
        streams = None if key is None else nnx.Rngs(jax.random.fold_in(base_key, len(self._streams)))
        return module(inputs.tokens, **_options(self.takes, inputs, train=key is not None, rngs=streams))


class LinenModule:
    """A `flax.linen.Module`. Its parameters are the collection `params`. Training passes the RNG stream `dropout`."""

    def __init__(self, module: Any):
        from flax.core import meta

        self._module = module
        self.takes = _parameter_names(type(module).__call__) - {"rngs"}
        with _without_mesh():
            variables = jax.eval_shape(self._variables, jax.random.key(0))
        _check_state([f"the collection '{name}'" for name in variables if name != "params"])
        boxes = _flat(variables.get("params", {}))
        named = {path: box.names for path, box in boxes.items() if isinstance(box, meta.Partitioned)}
        self.names: Mapping[str, AxisNames] = {path: tuple(names) for path, names in named.items()}

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        from flax.core import meta

        with _without_mesh():
            params = _flat(self._variables(_typed(key))["params"])
        return {path: leaf.value if isinstance(leaf, meta.Partitioned) else leaf for path, leaf in params.items()}

    def logits(self, params: Mapping[str, jax.Array], inputs: FlaxInputs, key: jax.Array | None) -> jax.Array:
        from flax import traverse_util

        tree = traverse_util.unflatten_dict({tuple(path.split(".")): array for path, array in params.items()})
        rngs = None if key is None else {"dropout": _typed(key)}
        options = _options(self.takes, inputs, train=key is not None)
        return self._module.apply({"params": tree}, inputs.tokens, rngs=rngs, **options)

    def _variables(self, key: jax.Array) -> Mapping[str, Any]:
        # The parameters do not depend on the sequence length.
        example = FlaxInputs.blank(1, 2)
        options = _options(self.takes, example, train=False)
        return self._module.init({"params": key}, example.tokens, **options)


def flax_module(factory: Callable[..., Any], arguments: Mapping[str, Any], *, name: str) -> FlaxModule:
    """Calls a factory with `arguments`, and with `rngs` if it accepts it, and wraps the module.

    Args:
        name: of the factory, for error messages.

    Raises:
        ConfigError: the factory returns neither an NNX nor a Linen module, or one with state other than parameters.
    """
    from flax import linen, nnx

    def make(rngs: Any) -> Any:
        return factory(**arguments, **({"rngs": rngs} if "rngs" in inspect.signature(factory).parameters else {}))

    with _without_mesh():
        kinds: list[type] = []
        jax.eval_shape(lambda: kinds.append(type(make(nnx.Rngs(0)))))
    if issubclass(kinds[0], nnx.Module):
        return NnxModule(make)
    if issubclass(kinds[0], linen.Module):
        return LinenModule(make(None))
    raise ConfigError(
        f"model.factory: {name} returned a {kinds[0].__name__}; a flax.nnx.Module or a flax.linen.Module expected"
    )


def _options(takes: frozenset[str], inputs: FlaxInputs, *, train: bool, rngs: Any = None) -> dict[str, Any]:
    """The keyword arguments that a module's call accepts."""
    available = {
        "positions": inputs.positions,
        "segment_ids": inputs.segment_ids,
        "train": train,
        "deterministic": not train,
        "rngs": rngs,
    }
    return {name: value for name, value in available.items() if name in takes}


def _parameter_names(call: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)


def _check_state(other_state: list[str]) -> None:
    if other_state:
        raise ConfigError(
            f"model.factory: the module has the state {', '.join(other_state)}. Only parameters and random streams can"
            " be trained and saved. Compute constants where they are used, and remove running averages and caches"
        )


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
    from flax import traverse_util

    return {_dotted(path): leaf for path, leaf in traverse_util.flatten_dict(params).items()}


def _typed(key: jax.Array) -> jax.Array:
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    """Disables Flax's sharding of new parameters, which would treat logical axis names as mesh axes."""
    from flax import nnx

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), nnx.use_eager_sharding(False):
        yield
