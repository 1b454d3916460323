"""Self-test of fused attention kernels: compares them with reference attention on the device before they are used.

The handling of packed documents, grouped queries and windows differs between versions of jax, cuDNN and GPUs, and
errors are silent. The self-test runs small random inputs through both implementations and compares the output and the
gradients of each document.

Shapes: B batch, T position, K key/value heads, G query heads per key/value head, H head size.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxlm.core.imports import haliax as hax

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core.axes import HEADS
from jaxlm.core.runtime import all_processes
from jaxlm.core.tracing import trace_options
from jaxlm.models.attention.backends.cudnn import DOCUMENTS_PER_CALL, cudnn_attention
from jaxlm.models.attention.backends.reference import reference_attention
from jaxlm.models.attention.null_slot import NullSlot

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(q_BTKGH, k_BTKH, v_BTKH, segment_BT) -> out_BTKGH."""

TOLERANCE = 0.03
"""Largest accepted relative root-mean-square error of a document."""
_LENGTH, _KV_HEADS, _WINDOW = 256, 2, 48
_RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")
# Errors of a kernel that is missing or has changed. jax's own errors are RuntimeErrors; XLA's C++ raises IndexError.
_FAILURES = (ImportError, AttributeError, TypeError, ValueError, RuntimeError, IndexError)


def single_document_rows() -> np.ndarray:
    """Segment ids, int32 [B, T]: one document per row, with or without padding after it; the last row is padding."""
    position = np.arange(_LENGTH)
    return np.stack([position < stop for stop in (_LENGTH, _LENGTH - 56, 1, 0)]).astype(np.int32)


def packed_rows() -> np.ndarray:
    """Segment ids, int32 [B, T]: zero to more than `DOCUMENTS_PER_CALL` documents per row, down to one token long, with
    padding before, between and after them."""
    most = DOCUMENTS_PER_CALL
    rows = [single_document_rows()[0]]
    for number in (2, most - 1, most, most + 3, 2 * most + 1):
        ends = np.unique(np.linspace(1, _LENGTH, number + 1).astype(int) ** 2 // _LENGTH)
        rows.append(1 + np.searchsorted(ends[1:-1], np.arange(_LENGTH), side="right"))
    gaps = rows[2].copy()
    gaps[:5], gaps[gaps == 4], gaps[-30:] = 0, 0, 0
    return np.stack([*rows, gaps, np.zeros(_LENGTH, int)]).astype(np.int32)


@dataclass(frozen=True)
class AttentionShape:
    """The variant of a kernel to test, with `group` query heads per key/value head."""

    dtype: Any
    head_size: int
    group: int
    windowed: bool
    causal: bool = True
    has_sink: bool = False

    @property
    def window(self) -> int | None:
        return _WINDOW if self.windowed else None

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def sink_KG(self) -> jax.Array | None:
        """Float32 scores of a sink. Their gradient follows from the logsumexp, so that a wrong one shows in the output."""
        number = _KV_HEADS * self.group
        return jnp.linspace(-1, 3, number).reshape(_KV_HEADS, self.group) if self.has_sink else None


def selftest_cudnn(shape: AttentionShape, *, packed: bool) -> str | None:
    """Says why cuDNN's attention cannot be used on this device; None if it can.

    Args:
        packed: for rows of several documents, not of a single one.
    """
    return None if trace_options().assume_kernels else _run_selftest(shape, packed)


@functools.cache
def _run_selftest(shape: AttentionShape, packed: bool) -> str | None:
    segment_BT = packed_rows() if packed else single_document_rows()
    return _in_new_thread(lambda: _cudnn_problem(segment_BT, shape, packed=packed))


def disagreement(attend: Attend, segment_BT: np.ndarray, shape: AttentionShape) -> str | None:
    """Says how a kernel differs from float32 reference attention on the same inputs; None if it does not.

    Errors are measured per document, because one wrong document would not show in an average over many.
    """
    inputs, segments = _random_inputs(segment_BT.shape, shape), jnp.asarray(segment_BT)
    actual = _value_and_gradients(attend, inputs, segments)
    # With `--xla_gpu_deterministic_ops=true`, XLA runs one backward call of cuDNN in a program, but not two
    # (openxla/xla#46500).
    two_layers = lambda q, k, v, segments: attend(attend(q, k, v, segments), k, v, segments)  # noqa: E731
    jax.block_until_ready(_value_and_gradients(two_layers, inputs, segments))
    sink = None if shape.sink_KG is None else NullSlot(hax.named(shape.sink_KG.ravel(), HEADS))
    reference = lambda q, k, v, mask: reference_attention(  # noqa: E731
        q, k, v, mask, shape.scale, 0.0, None, null_slot=sink
    )
    exact = tuple(a.astype(jnp.float32) for a in inputs)
    expected = _value_and_gradients(reference, exact, jnp.asarray(_mask(segment_BT, shape)))
    for name, result, reference in zip(_RESULTS, actual, expected, strict=True):
        worst = _worst_document_error(np.asarray(result, np.float32), np.asarray(reference, np.float32), segment_BT)
        if not worst <= TOLERANCE:
            return f"{name} differs from reference attention by {worst:.1%}"
    return None


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(attend: Attend, inputs: tuple[jax.Array, ...], tokens: jax.Array) -> tuple[jax.Array, ...]:
    """In one program, to which `tokens` are an argument: XLA would spend seconds on computing masks from constants.

    Args:
        inputs: queries, keys, values and the gradient of the output.
        tokens: the last argument of `attend`.
    """
    q, k, v, d_out = inputs
    out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, tokens), q, k, v)
    return out, *vjp(d_out)


def _random_inputs(rows: tuple[int, int], shape: AttentionShape) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    heads = ((_KV_HEADS, shape.group), (_KV_HEADS,), (_KV_HEADS,), (_KV_HEADS, shape.group))
    return tuple(jnp.asarray(rng.normal(size=(*rows, *h, shape.head_size)), shape.dtype) for h in heads)


def _mask(segment_BT: np.ndarray, shape: AttentionShape) -> np.ndarray:
    distance = np.subtract.outer(np.arange(_LENGTH), np.arange(_LENGTH))
    near = (distance >= 0) | (not shape.causal)
    near &= np.abs(distance) < (shape.window or _LENGTH)
    return near & (segment_BT[:, :, None] == segment_BT[:, None, :]) & (segment_BT != 0)[:, :, None]


def _worst_document_error(result: np.ndarray, reference: np.ndarray, segment_BT: np.ndarray) -> float:
    """The largest relative error of a document; inf if padding is not 0.

    The error is relative to the magnitude of the document or of all documents, whichever is larger.
    """
    square = lambda a: (a**2).reshape(*segment_BT.shape, -1).mean(-1)  # noqa: E731
    error_BT, size_BT = square(result - reference), square(reference)
    if square(result)[segment_BT == 0].any():
        return np.inf
    if not segment_BT.any():
        return 0.0
    floor = size_BT[segment_BT != 0].mean()
    errors = [0.0]
    for row, segments in enumerate(segment_BT):
        for segment in np.unique(segments[segments != 0]):
            tokens = segments == segment
            errors.append(error_BT[row, tokens].mean() / max(size_BT[row, tokens].mean(), floor))
    return float(np.sqrt(np.max(errors)))  # np.max and np.sqrt propagate NaN


def _cudnn_problem(segment_BT: np.ndarray, shape: AttentionShape, *, packed: bool) -> str | None:
    if jax.default_backend() != "gpu":
        return "no GPU is attached to self-test it on"
    options = {"window": shape.window, "packed": packed, "causal": shape.causal, "sink_KG": shape.sink_KG}
    attend = functools.partial(cudnn_attention, scale=shape.scale, **options)
    return selftest_problem(lambda: disagreement(attend, segment_BT, shape))


def selftest_problem(test: Callable[[], str | None]) -> str | None:
    """Runs a test and describes its failure. None only if it passes on all processes."""
    try:
        failure = test()
        problem = None if failure is None else f"its self-test failed: {failure}"
    except _FAILURES as error:
        problem = f"its self-test failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    passed_everywhere = all_processes(problem is None)
    return problem if passed_everywhere or problem is not None else "its self-test failed on another process"


def _in_new_thread(test: Callable[[], str | None]) -> str | None:
    """Runs a test in a new thread, because the caller may be tracing or inside a mesh."""
    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(test()))
    thread.start()
    thread.join()
    assert results, "the self-test of an attention kernel raised an unexpected error"
    return results[0]
