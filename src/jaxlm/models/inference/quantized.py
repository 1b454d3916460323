"""Weight-only quantization of a trained model, for inference."""

from typing import Any, TypeVar

import equinox as eqx
import jax

from jaxlm.core import tree
from jaxlm.core.axes import ROUTES, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import Int8Weight, StoredWeight
from jaxlm.core.tree import is_named
from jaxlm.models.linear import ExpertLinear, Linear

T = TypeVar("T")
INT8 = "int8"
FORMATS = (INT8,)


def quantized(model: T) -> T:
    """The model with the weights of its linear layers and experts as `Int8Weight`, with a scale per output channel.

    Embeddings and a head tied to them, norms and biases stay in floating point, and so do routers: they are small, and an
    error in their logits changes which experts a token is sent to.
    """
    changed = jax.tree.map(_quantized_layer, model, is_leaf=_is_layer)
    if not tree.modules(changed, StoredWeight):
        raise ConfigError(
            "--quantize: the model has no linear layers that can be quantized (Flax modules multiply on their own)."
            " Remove it"
        )
    return changed


def describe_weights(model: Any) -> str:
    """The size of the model's arrays, and what it would be with all weights in the dtype of the others."""
    nodes = jax.tree.leaves(model, is_leaf=lambda node: is_named(node) or isinstance(node, StoredWeight))
    stored = [node for node in nodes if isinstance(node, StoredWeight)]
    floats = [tree.raw(node) for node in nodes if tree.is_inexact(node)]
    itemsize = max(array.dtype.itemsize for array in floats)
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(model))
    before = sum(array.nbytes for array in floats) + sum(itemsize * node.size for node in stored)
    return f"int8 weights: {num_bytes / 1e6:.1f} MB instead of {before / 1e6:.1f} MB"


def _is_layer(node: Any) -> bool:
    return isinstance(node, Linear | ExpertLinear)


def _quantized_layer(node: Any) -> Any:
    if not _is_layer(node) or ROUTES in (axis.name for axis in axes_of(node.Out)):
        return node
    return eqx.tree_at(lambda layer: layer.weight, node, Int8Weight.of(node.weight, node.In))
