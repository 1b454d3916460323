"""Adds rows to the embedding and the head of a pretrained model, for tokens that were added to its tokenizer.

Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html): a new row is the mean of the rows there are. With random rows, a new
token would take most of the probability before anything is trained; with the mean, it takes at most an average share.
"""

from typing import Any

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.models.base import LanguageModel


def grow_vocabulary(model: LanguageModel, abstract: LanguageModel, layout: Layout) -> LanguageModel:
    """The model with the rows of `abstract`, which has a larger vocabulary and otherwise the same shapes.

    Raises:
        ConfigError: the model has arrays whose shape depends on the vocabulary in another way.
    """
    leaves = dict(tree.leaves(model))

    def grown(path: str, target: Any) -> Any:
        leaf = leaves[path]
        if tree.raw(leaf).shape == tree.raw(target).shape:
            return leaf
        others = [axis for axis in leaf.axes if axis.name != VOCAB]
        if others != [axis for axis in target.axes if axis.name != VOCAB]:
            raise ConfigError(
                f"data.added_tokens: this model's {path} has the axes {dict(leaf.shape)} for its vocabulary and would need"
                f" {dict(target.shape)}, which cannot be told from the rows of the other tokens. Remove added_tokens"
            )
        index = [axis.name for axis in leaf.axes].index(VOCAB)
        num_new = target.axes[index].size - leaf.axes[index].size

        def extend(array: jax.Array) -> jax.Array:
            mean = jnp.mean(array, axis=index, keepdims=True, dtype=jnp.float32).astype(array.dtype)
            return jnp.concatenate([array, jnp.repeat(mean, num_new, axis=index)], axis=index)

        sharding = layout.parameter_sharding(target.axes)
        return NamedArray(jax.jit(extend, out_shardings=sharding)(leaf.array), target.axes)

    return tree.map_leaves(grown, abstract)
