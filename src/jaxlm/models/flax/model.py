"""Flax modules (NNX or Linen) as language models, through one functional interface: parameters by path, tokens to logits.

A module maps tokens [batch, position] to logits [batch, position, vocab], so `lm_head` is None. It is called with those of
these keyword arguments that it accepts: `positions`, `segment_ids`, `train`, `deterministic`, `rngs`.

Its parameters become arrays with named axes, from the module's partitioning metadata or a table, so that they are
sharded, checkpointed, averaged and updated like those of every other model. Layers are not gathered one by one: all
parameters are gathered at once before the forward pass.
"""

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, KEY_POSITION, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import DeclaresParameters, MatrixAxes, Parameter, judged, matrix_sides
from jaxlm.core.sharding import for_compute
from jaxlm.models.base import Hidden, Inputs, LanguageModel, check_taps, vocab_axis
from jaxlm.models.remat import RematPolicy, remat
from jaxlm.reading.choices import import_name

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


_UNNAMED = "size_"
# Flax's names for the parameters of norms, biases and embeddings, which stacked layers give a second axis.
_NOT_MATRICES = ("scale", "bias", "embedding")


@dataclass(frozen=True)
class FlaxDefinition:
    """Holds what a module is built from. Equal definitions build equal modules.

    Attributes:
        factory: path of the factory, `package.module:function`.
        kwargs: keyword arguments of the factory, as JSON.
    """

    factory: str
    kwargs: str
    vocab_size: int
    seq_len: int

    @property
    def module(self) -> FlaxModule:
        """The module, built once and cached."""
        return _build_module(self)


@functools.lru_cache(maxsize=16)
def _build_module(definition: FlaxDefinition) -> FlaxModule:
    name, factory = definition.factory, load_factory(definition.factory)
    arguments = _factory_arguments(factory, definition)
    example = jax.eval_shape(lambda: FlaxInputs.blank(2, definition.seq_len))
    tokens_shape = list(example.tokens.shape)
    try:
        module = flax_module(factory, arguments, name=name)
        params = jax.eval_shape(module.init, jax.random.key(0))
        logits = jax.eval_shape(functools.partial(module.logits, key=None), params, example)
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"model.factory: {name} with model.kwargs {definition.kwargs} fails on tokens {tokens_shape}:"
            f" {type(error).__name__}: {error}"
        ) from error
    shape, expected = getattr(logits, "shape", None), [*tokens_shape, definition.vocab_size]
    if shape is None or list(shape) != expected or not jnp.issubdtype(logits.dtype, jnp.floating):
        returned = f"{logits.dtype}{list(shape)}" if shape is not None else f"a {type(logits).__name__}"
        raise ConfigError(
            f"model.factory: the module of {name} returns {returned} for tokens {tokens_shape}; logits"
            f" {expected} expected. The factory gets the size of the vocabulary as `vocab_size` if it accepts it"
        )
    return module


def load_factory(path: str) -> Callable[..., Any]:
    """Imports the function at `package.module:function`."""
    try:
        factory = import_name(path)
    except ConfigError as error:
        raise ConfigError(f"model.factory: {error}") from error
    if not callable(factory):
        module_name, _, name = path.partition(":")
        actual = "nothing" if factory is None else f"a {type(factory).__name__}"
        raise ConfigError(f"model.factory: there is {actual} named '{name}' in {module_name}; a function expected")
    return factory


def _factory_arguments(factory: Callable[..., Any], definition: FlaxDefinition) -> dict[str, Any]:
    """The arguments of the factory, except `rngs`."""
    kwargs = json.loads(definition.kwargs)
    signature = inspect.signature(factory)
    accepted = signature.parameters
    derived = {"vocab_size": definition.vocab_size, "seq_len": definition.seq_len}
    reserved = sorted({*derived, "rngs"} & kwargs.keys())
    if reserved:
        raise ConfigError(f"model.kwargs.{reserved[0]}: given, but its value is derived. Remove it")
    arguments = kwargs | {name: value for name, value in derived.items() if name in accepted}
    try:
        signature.bind(**arguments, **({"rngs": None} if "rngs" in accepted else {}))
    except TypeError as error:
        raise ConfigError(
            f"model.kwargs: {error}. {definition.factory} takes {signature}; given: {', '.join(kwargs) or 'none'}"
        ) from error
    return arguments


def named_axes(
    shapes: Mapping[str, tuple[int, ...]],
    names_by_path: Mapping[str, AxisNames],
    table: Mapping[str, Sequence[str | None]],
) -> dict[str, tuple[Axis, ...]]:
    """The axes of each parameter by path: named by the table, else by `names_by_path`. Unnamed axes are called
    `size_N`.

    Raises:
        ConfigError: names do not fit the dimensions, a name has two sizes, or a pattern matches no path.
    """
    unused = set(table)
    sizes: dict[str, tuple[int, str]] = {}
    axes: dict[str, tuple[Axis, ...]] = {}
    for path, shape in shapes.items():
        pattern = next((pattern for pattern in table if re.search(pattern, path)), None)
        names = names_by_path.get(path, (None,) * len(shape)) if pattern is None else tuple(table[pattern])
        unused -= {pattern}
        parameter = f"{path} {list(shape)}"
        if len(names) != len(shape) or not all(name is None or isinstance(name, str) for name in names):
            raise ConfigError(
                f"model.axes: {parameter} has the names {list(names)}; one name or null per dimension expected"
            )
        if len({name for name in names if name}) < sum(name is not None for name in names):
            raise ConfigError(f"model.axes: {parameter} has the names {list(names)}, which contain a duplicate")
        for name, size in zip(names, shape, strict=True):
            first_size, first_path = sizes.setdefault(name, (size, path)) if name else (size, path)
            if first_size != size:
                raise ConfigError(
                    f"model.axes: '{name}' is {first_size} in {first_path} and {size} in {path}. Give the two axes"
                    " different names"
                )
        labels = [name or f"{_UNNAMED}{size}" for name, size in zip(names, shape, strict=True)]
        axes[path] = tuple(Axis(_unique_label(labels, i), size) for i, size in enumerate(shape))
    if unused:
        raise ConfigError(f"model.axes: '{min(unused)}' matches no parameter. The parameters are: {', '.join(shapes)}")
    return axes


def _unique_label(labels: Sequence[str], i: int) -> str:
    num_before = labels[:i].count(labels[i])
    return f"{labels[i]}_{num_before + 1}" if num_before else labels[i]


class TokenHistory(eqx.Module):
    """The decoding cache of models without a KV cache: all tokens of each row, {batch, key_position}, by position."""

    tokens: NamedArray


class FlaxModel(LanguageModel, DeclaresParameters):
    """A Flax module with its parameters.

    Attributes:
        params: parameters by their path in the module.
        definition: what the module is built from.
        remat_policy: what the forward pass saves for the backward pass.
    """

    params: dict[str, NamedArray]
    definition: FlaxDefinition = eqx.field(static=True)
    remat_policy: RematPolicy = eqx.field(static=True)

    @property
    def Vocab(self) -> Axis:
        return vocab_axis(self.definition.vocab_size)

    @property
    def Pos(self) -> Axis:
        return Axis(POSITION, self.definition.seq_len)

    def hidden(
        self,
        inputs: Inputs,
        *,
        cache: TokenHistory | None = None,
        taps: Sequence[str] = (),
        key: jax.Array | None = None,
    ) -> Hidden:
        """Returns logits, {batch, position, vocab}, in `Hidden.final`. A Flax module has no taps."""
        check_taps(taps, ())
        if cache is None:
            return Hidden(self._logits(inputs, key))
        history = _append_to_history(cache, inputs)
        logits = self._logits(_history_as_inputs(history), key)
        # Padding has position 0; its logits are not used.
        selected = jnp.take_along_axis(logits.array, inputs.positions.array[..., None], axis=1)
        return Hidden(NamedArray(selected, (*inputs.tokens.axes, self.Vocab)), history)

    def lm_head(self) -> None:
        return None

    def parameters(self) -> dict[str, Parameter]:
        """Flax multiplies from the right: the first side of a kernel is its input."""
        held = {f"params.{path}": leaf.axes for path, leaf in self.params.items() if isinstance(leaf, NamedArray)}
        return {path: replace(judged(path, axes), matrix=self._matrix_axes(path, axes)) for path, axes in held.items()}

    def _matrix_axes(self, path: str, axes: Sequence[Axis]) -> MatrixAxes | None:
        sides = matrix_sides(axes)
        return MatrixAxes(sides[1], sides[0]) if len(sides) == 2 and self._may_be_hidden_matrix(path, axes) else None

    def _may_be_hidden_matrix(self, path: str, axes: Sequence[Axis]) -> bool:
        is_vocabulary = any(axis.size == self.Vocab.size and axis.name.startswith(_UNNAMED) for axis in axes)
        return path.rpartition(".")[2] not in _NOT_MATRICES and not is_vocabulary

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> TokenHistory:
        del dtype  # tokens are integers
        KeyPos = Axis(KEY_POSITION, min(capacity, self.Pos.size))
        return TokenHistory(hax.auto_sharded(hax.zeros((Batch, KeyPos), dtype=jnp.int32)))

    def _logits(self, inputs: Inputs, key: jax.Array | None) -> NamedArray:
        columns = [
            column.rearrange((BATCH, POSITION)) for column in (inputs.tokens, inputs.positions, inputs.segment_ids)
        ]
        module = self.definition.module

        def forward(params: dict[str, NamedArray], key: jax.Array | None) -> NamedArray:
            arrays = {path: leaf.array for path, leaf in params.items()}
            logits = module.logits(arrays, FlaxInputs(*(column.array for column in columns)), key)
            return NamedArray(logits, (*columns[0].axes, self.Vocab))

        return hax.auto_sharded(remat(self.remat_policy, forward, scan=False)(for_compute(self.params), key))


def _append_to_history(history: TokenHistory, inputs: Inputs) -> TokenHistory:
    """Writes the inputs at their positions, except padding."""
    tokens, positions, segments = (
        column.rearrange((BATCH, POSITION)).array for column in (inputs.tokens, inputs.positions, inputs.segment_ids)
    )
    rows = jnp.arange(tokens.shape[0])[:, None]
    out_of_bounds = history.tokens.axis_size(KEY_POSITION)
    written = history.tokens.array.at[rows, jnp.where(segments == 0, out_of_bounds, positions)].set(tokens, mode="drop")
    return TokenHistory(NamedArray(written, history.tokens.axes))


def _history_as_inputs(history: TokenHistory) -> Inputs:
    """Each row as one document. Unwritten positions come last, so a causal model does not attend to them."""
    tokens = history.tokens.rename({KEY_POSITION: POSITION})
    positions = hax.arange(tokens.resolve_axis(POSITION)).broadcast_to(tokens.axes)
    return Inputs(tokens, positions, hax.ones(tokens.axes, dtype=jnp.int32))
