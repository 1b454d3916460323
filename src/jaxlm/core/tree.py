"""Model trees by the paths of their leaves: listing, selecting, splitting, changing modules.

A leaf is an array, or a `NamedArray` as a whole. Its path is what one would write in Python, dotted:
`transformer.layers.attention.q.weight`; places in lists and tuples are numbers.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax

from jaxlm.core.errors import ConfigError

T = TypeVar("T")
M = TypeVar("M")
_NEAR_SHOWN = 5


def is_named(x: Any) -> bool:
    """Whether a tree's node is a `NamedArray`: where walks over leaves must stop."""
    return isinstance(x, hax.NamedArray)


def raw(leaf: Any) -> Any:
    """The plain array of a leaf."""
    return leaf.array if is_named(leaf) else leaf


def dotted(path: Sequence[Any]) -> str:
    """A path of jax's as one writes it: `transformer.layers.0.weight`."""
    return ".".join(_part(entry) for entry in path)


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    return [(dotted(path), leaf) for path, leaf in found]


def map_leaves(change: Callable[[str, Any], Any], tree: Any) -> Any:
    """The tree with `change(path, leaf)` in place of every leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(dotted(path), leaf), tree, is_leaf=is_named)


def replace_leaves(tree: T, arrays: Mapping[str, Any]) -> T:
    """The same tree with other arrays in its leaves. `arrays` has one for every path."""

    def replaced(path: str, leaf: Any) -> Any:
        return hax.NamedArray(arrays[path], leaf.axes) if is_named(leaf) else arrays[path]

    return map_leaves(replaced, tree)


def select(tree: T, patterns: Sequence[str]) -> T:
    """A mask: True at each floating-point leaf whose path one of the regular expressions is found in.

    `re.search` decides: `attention` matches anywhere in the path, `^head` at its beginning, `weight$` at its end.

    Raises:
        ConfigError: an expression is malformed, or is found in no path at all.
    """
    compiled = [_compiled(pattern) for pattern in patterns]
    paths = [path for path, leaf in leaves(tree) if is_inexact(leaf)]
    for pattern in compiled:
        if not any(pattern.search(path) for path in paths):
            raise ConfigError(f"the pattern '{pattern.pattern}' matches no parameter. {_near(pattern.pattern, paths)}")

    def chosen(path: str, leaf: Any) -> bool:
        return is_inexact(leaf) and any(pattern.search(path) for pattern in compiled)

    return map_leaves(chosen, tree)


def partition(tree: T, mask: Any) -> tuple[T, T]:
    """(leaves where the mask is True, the others): the same tree twice, None where the other one has the leaf."""
    return eqx.partition(tree, mask, is_leaf=is_named)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array, concrete or abstract, of floating-point numbers."""
    dtype = getattr(raw(leaf), "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def num_parameters(tree: Any) -> int:
    """Numbers in all floating-point leaves."""
    return sum(raw(leaf).size for _, leaf in leaves(tree) if is_inexact(leaf))


def modules(tree: Any, kind: type[M]) -> list[M]:
    """Every module of a type, in the tree's order."""
    return [node for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(node, kind)]


def modules_by_path(tree: Any, kind: type[M]) -> list[tuple[str, M]]:
    """(path, module) of every module of a type."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return [(dotted(path), node) for path, node in found if isinstance(node, kind)]


def map_modules(tree: T, kind: type[M], pattern: str, change: Callable[[M], Any]) -> T:
    """The tree with `change` applied to every module of a type whose path the expression is found in.

    Raises:
        ConfigError: there is no such module; names those that there are.
    """
    compiled = _compiled(pattern)
    modules, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    paths = [dotted(path) for path, module in modules if isinstance(module, kind)]
    if not any(compiled.search(path) for path in paths):
        raise ConfigError(f"the pattern '{pattern}' matches no {kind.__name__} layer. {_near(pattern, paths)}")

    def changed(path: Any, node: Any) -> Any:
        return change(node) if isinstance(node, kind) and compiled.search(dotted(path)) else node

    return jax.tree_util.tree_map_with_path(changed, tree, is_leaf=lambda x: isinstance(x, kind))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"'{pattern}' is not a regular expression: {error}") from error


def _near(pattern: str, paths: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, n=_NEAR_SHOWN, cutoff=0.0)
    return f"There are, nearest first: {', '.join(near)}" if near else "There are none at all"


def _part(entry: Any) -> str:
    for name in ("name", "key", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)
