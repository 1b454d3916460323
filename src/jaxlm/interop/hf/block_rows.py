"""Weight tables that follow from the layers of a model: one tensor per parameter, with Llama's names or a family's own."""

import functools
from collections.abc import Iterator
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.parameters import matrix_sides
from jaxlm.interop.hf.weights import BLOCK, Part, Tensor, single

_NAMES = {"attn": "self_attn", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_PLACES = {"attn_norm": 0, "attn_post_norm": 1, "mlp_norm": 2, "mlp_post_norm": 3}


def llama_rows(config: Any, *, norms_first: bool = False, **theirs: str | None) -> Iterator[Tensor]:
    """The rows of a model with one kind of block. The features of all heads are one dimension of a tensor.

    Args:
        norms_first: in files, the norms of a layer come before its other tensors.
        theirs: name of a module in a block, with `__` for dots -> its name in a layer of the files. Without one, it is called
            alike, or as in Llama. None leaves out its rows.
    """
    names: dict[str, str | None] = _NAMES | {ours.replace("__", "."): name for ours, name in theirs.items()}
    norm, block = _shapes(config)
    yield single("model.embed_tokens.weight", "tokens.weight", "vocab | embed")
    for path, _ in tree.leaves(norm):
        yield single(f"model.norm.{path}", f"body.final_norm.{path}", "embed")
    if not config.tie_word_embeddings:
        yield single("lm_head.weight", "head.weight", "vocab | embed")
    leaves = tree.leaves(block)
    if norms_first:
        leaves.sort(key=lambda one: _PLACES.get(one[0].partition(".")[0], len(_PLACES)))
    for path, leaf in leaves:
        module = next((whole for whole in _wholes(path) if whole in names), "")
        name = names.get(module, "")
        if name is not None:
            name += path.removeprefix(module)
            dims = tuple(tuple(axis.name for axis in side) for side in matrix_sides(leaf.axes))
            yield Tensor(f"model.layers.{{layer}}.{name}", (Part(BLOCK + path, dims),))


@functools.lru_cache(maxsize=8)
def _shapes(config: Any) -> tuple[Any, Any]:
    """A norm of the residual stream and a block, with the shapes of their parameters."""
    return jax.eval_shape(lambda: (config.norm(), config.block(key=jax.random.key(0))))


def _wholes(path: str) -> Iterator[str]:
    """The modules that a parameter is in, from the innermost to the outermost."""
    while path := path.rpartition(".")[0]:
        yield path
