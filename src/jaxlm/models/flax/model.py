"""Modules of Flax, NNX or Linen, as language models: what they return are logits, so they have no head of ours.

Their parameters are arrays with named axes, by their own partitioning metadata or by a table, so that they are sharded,
saved, averaged and updated like every other model's. Their layers are their own: one gather brings all parameters from
where they rest to where they compute.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.config.plugins import import_name
from jaxlm.core.axes import BATCH, KEY_POSITION, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import for_compute
from jaxlm.models.base import Hidden, Inputs, LanguageModel, vocab_axis
from jaxlm.models.flax.modules import AxisNames, FlaxInputs, FlaxModule, flax_module
from jaxlm.models.remat import RematPolicy, remat


@dataclass(frozen=True)
class FlaxDefinition:
    """What a module is made from. Equal ones make modules that compute the same.

    Attributes:
        kwargs: the factory's own, as JSON.
    """

    factory: str
    kwargs: str
    vocab_size: int
    seq_len: int

    @property
    def module(self) -> FlaxModule:
        """The module, made once."""
        return _module(self)


@functools.lru_cache(maxsize=16)
def _module(definition: FlaxDefinition) -> FlaxModule:
    where, make = definition.factory, load_factory(definition.factory)
    arguments = _arguments(make, definition)
    rows = jax.eval_shape(lambda: FlaxInputs.blank(2, definition.seq_len))
    given = list(rows.tokens.shape)
    try:
        module = flax_module(make, arguments, where=where)
        params = jax.eval_shape(module.init, jax.random.key(0))
        logits = jax.eval_shape(functools.partial(module.logits, key=None), params, rows)
    except ConfigError:
        raise
    except Exception as error:  # whatever somebody else's module does when it is made and traced
        raise ConfigError(
            f"model.factory: {where} with model.kwargs {definition.kwargs} fails on tokens {given}:"
            f" {type(error).__name__}: {error}"
        ) from error
    shape, expected = getattr(logits, "shape", None), [*given, definition.vocab_size]
    if shape is None or list(shape) != expected or not jnp.issubdtype(logits.dtype, jnp.floating):
        returned = f"{logits.dtype}{list(shape)}" if shape is not None else f"a {type(logits).__name__}"
        raise ConfigError(
            f"model.factory: the module of {where} returns {returned} for tokens {given}; logits"
            f" {expected} expected. The factory is given the vocabulary's size as `vocab_size`, if it takes it"
        )
    return module


def load_factory(path: str) -> Callable[..., Any]:
    """The function at `package.module:function`."""
    try:
        found = import_name(path)
    except ConfigError as error:
        raise ConfigError(f"model.factory: {error}") from error
    if not callable(found):
        module_name, _, name = path.partition(":")
        there = "nothing" if found is None else f"a {type(found).__name__}"
        raise ConfigError(f"model.factory: there is {there} named '{name}' in {module_name}; a function expected")
    return found


def _arguments(make: Callable[..., Any], definition: FlaxDefinition) -> dict[str, Any]:
    """What the factory is called with, beside `rngs`."""
    kwargs = json.loads(definition.kwargs)
    signature = inspect.signature(make)
    takes = signature.parameters
    ours = {"vocab_size": definition.vocab_size, "seq_len": definition.seq_len}
    reserved = sorted({*ours, "rngs"} & kwargs.keys())
    if reserved:
        raise ConfigError(f"model.kwargs.{reserved[0]}: given, but it is worked out. Leave it out")
    arguments = kwargs | {name: value for name, value in ours.items() if name in takes}
    try:
        signature.bind(**arguments, **({"rngs": None} if "rngs" in takes else {}))
    except TypeError as error:
        raise ConfigError(
            f"model.kwargs: {error}. {definition.factory} takes {signature}; given are {', '.join(kwargs) or 'none'}"
        ) from error
    return arguments


def named_axes(
    shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, AxisNames], table: Mapping[str, Sequence[str | None]]
) -> dict[str, tuple[Axis, ...]]:
    """The axes of every parameter: by the table, else by its own names; without a name, one that says its size.

    Raises:
        ConfigError: names that do not fit the dimensions, a name of two sizes, or a pattern that is found in no path.
    """
    unused = set(table)
    sizes: dict[str, tuple[int, str]] = {}
    found: dict[str, tuple[Axis, ...]] = {}
    for path, shape in shapes.items():
        pattern = next((pattern for pattern in table if re.search(pattern, path)), None)
        names = own.get(path, (None,) * len(shape)) if pattern is None else tuple(table[pattern])
        unused -= {pattern}
        where = f"{path} {list(shape)}"
        if len(names) != len(shape) or not all(name is None or isinstance(name, str) for name in names):
            raise ConfigError(
                f"model.axes: {where} has the names {list(names)}; one or null for each dimension expected"
            )
        if len({name for name in names if name}) < sum(name is not None for name in names):
            raise ConfigError(f"model.axes: {where} has the names {list(names)}, of which two are the same")
        for name, size in zip(names, shape, strict=True):
            before, first = sizes.setdefault(name, (size, path)) if name else (size, path)
            if before != size:
                raise ConfigError(
                    f"model.axes: '{name}' is {before} in {first} and {size} in {path}. Give the two different names"
                )
        labels = [name or f"size_{size}" for name, size in zip(names, shape, strict=True)]
        found[path] = tuple(Axis(_numbered(labels, i), size) for i, size in enumerate(shape))
    if unused:
        raise ConfigError(f"model.axes: '{min(unused)}' is found in no path. There are: {', '.join(shapes)}")
    return found


def _numbered(labels: Sequence[str], i: int) -> str:
    before = labels[:i].count(labels[i])
    return f"{labels[i]}_{before + 1}" if before else labels[i]


class TokenHistory(eqx.Module):
    """All that has been read and written, for models that keep nothing else: tokens {batch, key_position}, from 0 on."""

    tokens: NamedArray


class FlaxModel(LanguageModel):
    """A Flax module with its parameters.

    Attributes:
        params: by the module's own paths.
        definition: what the module is made from.
        keep: what the forward pass keeps for the backward pass.
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

    def hidden(self, inputs: Inputs, *, cache: TokenHistory | None = None, key: jax.Array | None = None) -> Hidden:
        """The logits, {batch, position, vocab}."""
        if cache is None:
            return Hidden(self._logits(inputs, key))
        past = _extended(cache, inputs)
        whole = self._logits(_from_the_beginning(past), key)
        # Padding stands at position 0, whose logits nobody reads.
        picked = jnp.take_along_axis(whole.array, inputs.positions.array[..., None], axis=1)
        return Hidden(NamedArray(picked, (*inputs.tokens.axes, self.Vocab)), past)

    def lm_head(self) -> None:
        return None

    def init_cache(self, Batch: Axis, capacity: int, dtype) -> TokenHistory:
        """No tokens yet, and room for so many as the model reads at the most."""
        del dtype  # tokens are whole numbers
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


def _extended(past: TokenHistory, inputs: Inputs) -> TokenHistory:
    """The history with the inputs at their own positions; padding is left out."""
    tokens, positions, segments = (
        column.rearrange((BATCH, POSITION)).array for column in (inputs.tokens, inputs.positions, inputs.segment_ids)
    )
    rows = jnp.arange(tokens.shape[0])[:, None]
    nowhere = past.tokens.axis_size(KEY_POSITION)
    written = past.tokens.array.at[rows, jnp.where(segments == 0, nowhere, positions)].set(tokens, mode="drop")
    return TokenHistory(NamedArray(written, past.tokens.axes))


def _from_the_beginning(past: TokenHistory) -> Inputs:
    """Every row of a history as one document; what is not written yet stands behind, where a causal model sees it not."""
    tokens = past.tokens.rename({KEY_POSITION: POSITION})
    positions = hax.arange(tokens.resolve_axis(POSITION)).broadcast_to(tokens.axes)
    return Inputs(tokens, positions, hax.ones(tokens.axes, dtype=jnp.int32))
