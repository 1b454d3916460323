"""Operations on model trees by leaf path: list, count, select, partition, replace modules.

A leaf is an array or a whole `NamedArray`. Its path is dotted, as in Python: `transformer.layers.attention.q.weight`.
Positions in lists and tuples are numbers.
"""

import abc
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


def is_named(x: Any) -> bool:
    """Tells whether a node is a `NamedArray`. Use it as `is_leaf` in traversals."""
    return isinstance(x, hax.NamedArray)


def raw(leaf: Any) -> Any:
    """The plain array of a leaf."""
    return leaf.array if is_named(leaf) else leaf


def dotted(path: Sequence[Any]) -> str:
    """Formats a jax key path as `transformer.layers.0.weight`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order."""
    leaves_with_path, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    return [(dotted(path), leaf) for path, leaf in leaves_with_path]


def map_leaves(change: Callable[[str, Any], Any], tree: Any) -> Any:
    """Replaces every leaf by `change(path, leaf)`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(dotted(path), leaf), tree, is_leaf=is_named)


def replace_leaves(tree: T, arrays: Mapping[str, Any]) -> T:
    """Replaces the array in every leaf. `arrays` must contain every path."""

    def replaced(path: str, leaf: Any) -> Any:
        return hax.NamedArray(arrays[path], leaf.axes) if is_named(leaf) else arrays[path]

    return map_leaves(replaced, tree)


def select(tree: T, patterns: Sequence[str]) -> T:
    """A mask that is True at each floating-point leaf whose path matches one of the regular expressions.

    Matching uses `re.search`: `attention` matches anywhere in the path, `^head` at its start, `weight$` at its end. An
    expression that matches no path raises `ConfigError`.
    """
    compiled = [compile_pattern(pattern) for pattern in patterns]
    paths = [path for path, leaf in leaves(tree) if is_inexact(leaf)]
    for pattern in compiled:
        if not any(pattern.search(path) for path in paths):
            hint = closest_paths(pattern.pattern, paths)
            raise ConfigError(f"the pattern '{pattern.pattern}' matches no parameter. {hint}")

    def chosen(path: str, leaf: Any) -> bool:
        return is_inexact(leaf) and any(pattern.search(path) for pattern in compiled)

    return map_leaves(chosen, tree)


def partition(tree: T, mask: Any) -> tuple[T, T]:
    """Splits a tree into (leaves where the mask is True, other leaves). Missing leaves are None in each."""
    return eqx.partition(tree, mask, is_leaf=is_named)


def is_inexact(leaf: Any) -> bool:
    """Tells whether a leaf is a floating-point array, concrete or abstract."""
    dtype = getattr(raw(leaf), "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def is_wide(leaf: Any) -> bool:
    """Returns whether a leaf is a floating-point array whose dtype is that of its sums."""
    return is_inexact(leaf) and raw(leaf).dtype == sum_dtype(raw(leaf).dtype)


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype of a sum over many terms, microbatches or steps whose terms have this dtype: at least float32.

    In bfloat16, which has 8 bits, a sum stops growing at 256 equal terms, and a running mean that moves by less than 1/256
    of itself does not move.
    """
    return jax.numpy.promote_types(dtype, jax.numpy.float32)


def widened(tree: T) -> T:
    """Casts floating-point arrays to the dtypes of their sums."""
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)) if is_inexact(x) else x, tree)


class Padded(eqx.Module):
    """A module with arrays that are larger than its parameters. The rest of them is zero, and no step changes it."""

    @abc.abstractmethod
    def padding(self) -> Mapping[str, int]:
        """Path of a leaf in the module -> how many of its elements are not parameters."""


class Packed(eqx.Module):
    """A module whose arrays stand for one parameter array, in another number of elements."""

    @abc.abstractmethod
    def num_parameters(self) -> int:
        """Number of elements of the array that it stands for."""


def sizes(tree: Any) -> dict[str, int]:
    """Path -> number of elements of every floating-point leaf, without padding, and of every `Packed` module."""
    whole = {path: module for path, module in modules_by_path(tree, Packed) if jax.tree.leaves(module)}
    inside = tuple(f"{path}." for path in whole)
    counts = {path: raw(leaf).size for path, leaf in leaves(tree) if is_inexact(leaf) and not path.startswith(inside)}
    counts |= {path: module.num_parameters() for path, module in whole.items()}
    for module, padded in modules_by_path(tree, Padded):
        for name, padding in padded.padding().items():
            path = f"{module}.{name}".lstrip(".")
            if path in counts:
                counts[path] -= padding
    return counts


def num_parameters(tree: Any) -> int:
    """Total number of elements in all floating-point leaves, without padding."""
    return sum(sizes(tree).values())


def modules(tree: Any, kind: type[M]) -> list[M]:
    """All modules of a type, in the tree's order."""
    return [node for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(node, kind)]


def modules_by_path(tree: Any, kind: type[M]) -> list[tuple[str, M]]:
    """(path, module) of all modules of a type."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return [(dotted(path), node) for path, node in nodes if isinstance(node, kind)]


def map_modules(tree: T, kind: type[M], pattern: str, change: Callable[[M], Any]) -> T:
    """Applies `change` to every module of a type whose path matches the regular expression, which must match one."""
    return map_modules_by_path(tree, kind, pattern, lambda _, module: change(module))


def map_modules_by_path(tree: T, kind: type[M], pattern: str, change: Callable[[str, M], Any], key: str = "") -> T:
    """As `map_modules`, with `change(path, module)`. Args: key: that gave the pattern, for messages."""
    compiled, prefix = compile_pattern(pattern, key), f"{key}: " if key else ""
    paths = [path for path, _ in modules_by_path(tree, kind)]
    if not any(compiled.search(path) for path in paths):
        raise ConfigError(
            f"{prefix}the pattern '{pattern}' matches no {kind.__name__} layer. {closest_paths(pattern, paths)}"
        )

    def changed(path: Any, node: Any) -> Any:
        return change(dotted(path), node) if isinstance(node, kind) and compiled.search(dotted(path)) else node

    return jax.tree_util.tree_map_with_path(changed, tree, is_leaf=lambda x: isinstance(x, kind))


def compile_pattern(pattern: str, key: str = "") -> re.Pattern[str]:
    """Compiles a regular expression. Raises `ConfigError`, which names `key`, if it is not valid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        where = f"{key}: " if key else ""
        raise ConfigError(f"{where}'{pattern}' is not a valid regular expression: {error}") from error


def closest_paths(pattern: str, paths: Sequence[str]) -> str:
    """A sentence with the paths that are most similar to a pattern that matches none of them."""
    similar = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.0)
    return f"Closest names: {', '.join(similar)}" if similar else "The model has none"
