"""A fused kernel beside plain attention on the device that will run it, before anything relies on it.

What kernels do with packed documents, with groups of query heads and with windows differs between versions of jax, of
cuDNN and of cards, and where it is wrong it is silent. So small rows of random numbers go through both, and every
document's output and gradients are compared.

Shapes: B batch, T position, K key/value heads, G query heads a key/value head, H head size.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.runtime import all_processes
from jaxlm.models.attention.aot_cuda import is_compiling_for_cuda
from jaxlm.models.attention.backends.cudnn import DOCUMENTS_A_CALL, cudnn_attention
from jaxlm.models.attention.backends.reference import reference_attention

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(q_BTKGH, k_BTKH, v_BTKH, segment_BT) -> out_BTKGH."""

TOLERANCE = 0.03
"""Largest accepted root-mean-square error of a document, as a share of what it is compared with."""
_LENGTH, _KV_HEADS, _WINDOW = 256, 2, 48
_RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")
# What a kernel that is not there, or not as it was, ends in: jax's own errors are RuntimeErrors.
_FAILURES = (ImportError, AttributeError, TypeError, ValueError, RuntimeError)


def whole_rows() -> np.ndarray:
    """int32 [B, T]: one document a row, with padding after it or without; the last row is padding alone."""
    position = np.arange(_LENGTH)
    return np.stack([position < stop for stop in (_LENGTH, _LENGTH - 56, 1, 0)]).astype(np.int32)


def packed_rows() -> np.ndarray:
    """int32 [B, T]: from none to more documents a row than one call takes, of one token and more, padding everywhere."""
    most = DOCUMENTS_A_CALL
    rows = [whole_rows()[0]]
    for number in (2, most - 1, most, most + 3, 2 * most + 1):
        ends = np.unique(np.linspace(1, _LENGTH, number + 1).astype(int) ** 2 // _LENGTH)
        rows.append(1 + np.searchsorted(ends[1:-1], np.arange(_LENGTH), side="right"))
    gaps = rows[2].copy()
    gaps[:5], gaps[gaps == 4], gaps[-30:] = 0, 0, 0
    return np.stack([*rows, gaps, np.zeros(_LENGTH, int)]).astype(np.int32)


def whole_rows_problem(dtype: Any, head_size: int, group: int, windowed: bool) -> str | None:
    """What is wrong with cuDNN's attention to rows of one document, on this device; None where nothing is."""
    return None if is_compiling_for_cuda() else _tested(AttentionShape(dtype, head_size, group, windowed), packed=False)


def packed_rows_problem(dtype: Any, head_size: int, group: int, windowed: bool) -> str | None:
    """What is wrong with cuDNN's attention to rows of several documents, on this device; None where nothing is."""
    return None if is_compiling_for_cuda() else _tested(AttentionShape(dtype, head_size, group, windowed), packed=True)


@dataclass(frozen=True)
class AttentionShape:
    """What a kernel is tested for.

    Attributes:
        dtype: of queries, keys and values.
        head_size: features of a head.
        group: query heads a key/value head.
        windowed: with a window, or without.
    """

    dtype: Any
    head_size: int
    group: int
    windowed: bool

    @property
    def window(self) -> int | None:
        """That the test has."""
        return _WINDOW if self.windowed else None

    @property
    def scale(self) -> float:
        """The usual one."""
        return self.head_size**-0.5


@functools.cache
def _tested(shape: AttentionShape, *, packed: bool) -> str | None:
    return _alone(lambda: _cudnn_problem(packed_rows() if packed else whole_rows(), shape, packed=packed))


def disagreement(attend: Attend, segment_BT: np.ndarray, shape: AttentionShape) -> str | None:
    """Where a kernel differs from plain attention in float32 on the same numbers; None where it does not.

    Each document is measured by itself: one wrong document would be lost among many right ones.
    """
    numbers = _numbers(segment_BT.shape, shape)
    mask, segments = jnp.asarray(_mask(segment_BT, shape.window)), jnp.asarray(segment_BT)
    ours = _value_and_gradients(lambda q, k, v: attend(q, k, v, segments), *numbers)
    exact = (a.astype(jnp.float32) for a in numbers)
    theirs = _value_and_gradients(lambda q, k, v: reference_attention(q, k, v, mask, shape.scale, 0.0, None), *exact)
    for name, got, wanted in zip(_RESULTS, ours, theirs, strict=True):
        worst = _worst_document(np.asarray(got, np.float32), np.asarray(wanted, np.float32), segment_BT)
        if not worst <= TOLERANCE:
            return f"{name} off by {worst:.1%} of plain attention's"
    return None


def _value_and_gradients(attend: Callable[..., jax.Array], q, k, v, d_out) -> tuple[jax.Array, ...]:
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(d_out)


def _numbers(rows: tuple[int, int], shape: AttentionShape) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    heads = ((_KV_HEADS, shape.group), (_KV_HEADS,), (_KV_HEADS,), (_KV_HEADS, shape.group))
    return tuple(jnp.asarray(rng.normal(size=(*rows, *h, shape.head_size)), shape.dtype) for h in heads)


def _mask(segment_BT: np.ndarray, window: int | None) -> np.ndarray:
    distance = np.subtract.outer(np.arange(_LENGTH), np.arange(_LENGTH))
    near = (distance >= 0) & (distance < (window or _LENGTH))
    return near & (segment_BT[:, :, None] == segment_BT[:, None, :]) & (segment_BT != 0)[:, :, None]


def _worst_document(got: np.ndarray, wanted: np.ndarray, segment_BT: np.ndarray) -> float:
    """The largest error of a document, relative to it or to all of them, whichever is larger; inf on padding."""
    square = lambda a: (a**2).reshape(*segment_BT.shape, -1).mean(-1)  # noqa: E731
    error_BT, size_BT = square(got - wanted), square(wanted)
    if square(got)[segment_BT == 0].any():
        return np.inf
    if not segment_BT.any():
        return 0.0
    floor = size_BT[segment_BT != 0].mean()
    shares = [0.0]
    for row, segments in enumerate(segment_BT):
        for segment in np.unique(segments[segments != 0]):
            here = segments == segment
            shares.append(error_BT[row, here].mean() / max(size_BT[row, here].mean(), floor))
    return float(np.sqrt(np.max(shares)))  # max, as sqrt, keeps a NaN


def _cudnn_problem(segment_BT: np.ndarray, shape: AttentionShape, *, packed: bool) -> str | None:
    if jax.default_backend() != "gpu":
        return "there is no such device here to test it on"
    attend = functools.partial(cudnn_attention, scale=shape.scale, window=shape.window, packed=packed)
    return verdict(lambda: disagreement(jax.jit(attend), segment_BT, shape))


def verdict(test: Callable[[], str | None]) -> str | None:
    """What a test finds, or how it fails, in words, the same on every process."""
    try:
        found = test()
        problem = None if found is None else f"its self-test here failed: {found}"
    except _FAILURES as error:
        problem = f"its self-test here failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    agreed = all_processes(problem is None)
    return problem if agreed or problem is not None else "its self-test failed on another process"


def _alone(test: Callable[[], str | None]) -> str | None:
    """Runs a test in a thread of its own: whoever asks may be tracing, and may have a mesh."""
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(test()))
    thread.start()
    thread.join()
    assert found, "the self-test of an attention kernel broke"
    return found[0]
