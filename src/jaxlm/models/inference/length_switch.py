"""Texts that grow beyond a length that changes how all their tokens are computed (LongRoPE).

Their cached keys and values no longer fit. In the step whose token is the first beyond that length, the model reads
these texts again from their first token, as transformers' `generate` does for Phi-3. The other rows of the batch take an
ordinary step, so what a row generates does not depend on its batch.
"""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, KEY_POSITION, POSITION
from jaxlm.core.tree import is_named
from jaxlm.models.base import Inputs, LanguageModel
from jaxlm.models.inference.cache import UnstackedCache
from jaxlm.models.inference.unstacked import stack, unstack


def step_across(
    model: LanguageModel, step_model: Any, inputs: Inputs, cache: Any, rows: jax.Array
) -> tuple[NamedArray, Any]:
    """Reads the next token of each row, and rereads all earlier tokens of the rows that cross a switch length.

    Args:
        model, step_model: as of a `Generator`.
        inputs: the next tokens.
        cache: of the tokens before them.
        rows: bool, which rows cross.

    Returns:
        Final hidden states {batch, position, embed} of the token, and the extended cache.
    """
    stepped = step_model.hidden(inputs, cache=cache)
    is_unstacked = isinstance(stepped.cache, UnstackedCache)
    cache = stack(stepped.cache) if is_unstacked else stepped.cache
    assert cache.tokens is not None, "a model with switch lengths keeps the tokens"
    slots = (cache.tokens, cache.positions, cache.segment_ids)
    texts = Inputs(*(hax.auto_sharded(a.rename({KEY_POSITION: POSITION})) for a in slots))
    empty = dataclasses.replace(jax.tree.map(jnp.zeros_like, cache), fresh=True)
    again = model.hidden(texts, cache=empty)

    final = _where(rows, _at(again.final, cache.length - 1), stepped.final)
    choose = lambda new, old: _where(rows, new, old)  # noqa: E731
    stacks = jax.tree.map(choose, again.cache.stacks, cache.stacks, is_leaf=is_named)
    cache = dataclasses.replace(cache, stacks=stacks)
    return final, unstack(cache) if is_unstacked else cache


def _at(hidden: NamedArray, slot: jax.Array) -> NamedArray:
    """The hidden states of one slot, {batch, position, embed}."""
    number = [axis.name for axis in hidden.axes].index(POSITION)
    array = jax.lax.dynamic_slice_in_dim(hidden.array, slot, 1, number)
    return NamedArray(array, tuple(Axis(POSITION, 1) if axis.name == POSITION else axis for axis in hidden.axes))


def _where(rows: jax.Array, chosen: NamedArray, other: NamedArray) -> NamedArray:
    chosen = chosen.rearrange(other.axes)
    shape = [axis.size if axis.name == BATCH else 1 for axis in other.axes]
    return NamedArray(jnp.where(rows.reshape(shape), chosen.array, other.array), other.axes)
