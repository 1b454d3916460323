"""cuDNN's fused attention on NVIDIA GPUs, through jax's own bindings.

Source: `jax._src.cudnn.fused_attention_stablehlo`, the implementation of `jax.nn.dot_product_attention(implementation=
"cudnn")`; the algorithm is Dao 2023 (arXiv:2307.08691). The public function supports neither packed documents nor a
backward pass from a saved float32 logsumexp, so this module calls the functions below it.

Rows of a single document use the kernel for whole rows: with a causal mask also rows with padding after the document, which
no token of it attends to. Other rows use the packed kernel, which takes the offset and length of each document. It takes a
fixed number of documents per row and writes a logsumexp of the full row length for each of them, so each call gets few
documents, and rows with more take several calls. Each call reads only its own documents, so together they cost as much as
one call would. The choice between the two is made on the device, from the segment ids.

Shapes: B batch, T position, K key/value heads, G query heads per key/value head, N = K G, H head size, D documents per
call.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models.attention.backends.blockwise import ATTENTION, Reach, blockwise_backward, blockwise_forward
from jaxlm.models.attention.null_slot import add_sink, sink_gradient

DOCUMENTS_PER_CALL = 8
"""Documents per row that one call of the packed kernel handles."""
# Before this version of jax, grouped queries read the keys of packed documents from the wrong offset
# (jax-ml/jax#39521).
_GROUPED_QUERIES_FIXED_IN = (0, 11, 2)


@dataclass(frozen=True)
class CudnnOptions:
    """Compile-time constants of a call.

    Attributes:
        saves_lse: the packed kernel's logsumexp is saved, because the backward pass needs that with a sink.
    """

    scale: float
    window: int | None = None
    packed: bool = False
    causal: bool = True
    saves_lse: bool = False

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.causal)


def cudnn_attention(
    q_BTKGH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_BT: jax.Array,
    *,
    scale: float,
    window: int | None,
    packed: bool,
    causal: bool = True,
    sink_KG: jax.Array | None = None,
) -> jax.Array:
    """Attention within segments, in bfloat16 or float16; arguments as in `blockwise_attention`.

    Args:
        segment_BT: the tokens of a document must be contiguous.
        scale: a Python number, because it is a compile-time constant of the kernel.
        packed: use the packed kernel for rows of several documents; false uses blockwise attention for them.
        causal: a query attends to no later key. The kernel's windows look only back, so false needs `window` None.
    """
    q_BTNH = q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, q_BTKGH.shape[-1])
    options = CudnnOptions(scale, window, packed, causal, saves_lse=sink_KG is not None)
    sink_N = None if sink_KG is None else sink_KG.reshape(-1)
    out: Any = _attend(options, q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N)
    return out.reshape(q_BTKGH.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: CudnnOptions, q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N):
    return _forward(options, q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N)[0]


def _forward(options: CudnnOptions, q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N):
    """Returns the output and the logsumexp [B, N, T]; the latter is 0 if the backward pass recomputes it."""
    branches = (_packed_forward if options.packed else _blockwise_forward, single_forward)
    out_BTNH, lse_BNT = _select_branch(options, branches, segment_BT, q_BTNH, k_BTKH, v_BTKH)
    if sink_N is not None:
        lse_BNT, share_BNT = add_sink(lse_BNT, sink_N[:, None])
        out_BTNH = (out_BTNH * jnp.swapaxes(share_BNT, 1, 2)[..., None]).astype(out_BTNH.dtype)
    return _where(segment_BT != 0, out_BTNH, 0), lse_BNT


def _attend_forward(options: CudnnOptions, q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N):
    out, lse = _forward(options, q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N)
    out, lse = checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
    return out, (q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N, out, lse)


def _attend_backward(options: CudnnOptions, residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, sink_N, out_BTNH, lse_BNT = residuals
    d_out_BTNH = _where(segment_BT != 0, d_out_BTNH, 0)
    branches = (_packed_backward if options.packed else _blockwise_backward, single_backward)
    arrays = (q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH)
    gradients = _select_branch(options, branches, segment_BT, *arrays)
    if sink_N is not None:
        delta_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1)
        by_query = sink_gradient(sink_N[:, None], lse_BNT, jnp.swapaxes(delta_BTN, 1, 2))
        sink_N = jnp.sum(by_query, axis=(0, 2))
    return *gradients, None, sink_N


_attend.defvjp(_attend_forward, _attend_backward)


def _select_branch(options: CudnnOptions, branches, segment_BT, *arrays):
    """Runs one of `branches`, (for rows of several documents, for rows of a single document)."""
    several, single = (functools.partial(branch, options, segment_BT) for branch in branches)
    suits = are_single_documents(segment_BT) if options.causal else jnp.all(segment_BT == segment_BT[:, :1])
    return jax.lax.cond(suits, single, several, *arrays)


def are_single_documents(segment_BT: jax.Array) -> jax.Array:
    """Tells whether every row is one document followed only by padding. What padding attends to does not matter."""
    previous, current = segment_BT[:, :-1], segment_BT[:, 1:]
    return jnp.all((current == previous) | (current == 0))


def _where(selected_BT: jax.Array, x: jax.Array, otherwise: Any) -> jax.Array:
    return jnp.where(selected_BT[:, :, None, None], x, otherwise)


# --- Rows of a single document ----------------------------------------------------------------------------------------


def single_forward(options: CudnnOptions, segment_BT, q_BTNH, k_BTKH, v_BTKH) -> Any:
    """Attention of all queries of a row to all its keys; returns the output and the logsumexp [B, N, T]."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    del segment_BT
    return fused.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=options.scale,
        mask_type=fused.MaskType.CAUSAL if options.causal else fused.MaskType.NO_MASK,
        sliding_window_length=options.window,
        return_residual=True,
    )


def single_backward(options: CudnnOptions, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH):
    """The gradients of queries, keys and values, given the results of attention to these keys, and maybe to others."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    del segment_BT
    mask = fused.MaskType.CAUSAL if options.causal else fused.MaskType.NO_MASK
    return _backward(options, mask, [None] * 4, q_BTNH, k_BTKH, v_BTKH, lse_BNT, out_BTNH, d_out_BTNH)


def _backward(
    options: CudnnOptions, mask: Any, documents: Sequence[jax.Array | None], q_BTNH, k_BTKH, v_BTKH, *results
):
    """Calls the backward kernel.

    Args:
        documents: lengths of queries and keys, and offsets of both; None for rows of a single document.
        results: logsumexp as the kernel has written it, output, and gradient of the output.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    none = jnp.zeros(0, q_BTNH.dtype)  # jax's placeholder for absent bias, lengths, offsets and pages
    parameters: dict[str, Any] = {
        "scale": options.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": options.window,
    }
    if jax.__version_info__ >= (0, 12):
        parameters["score_mod"] = None
    given = [none if array is None else array for array in (None, *documents, None, None)]
    return tuple(
        fused._dot_product_attention_bwd_p_wrapper.bind(q_BTNH, k_BTKH, v_BTKH, *given, *results, **parameters)
    )


# --- Rows of several documents: the packed kernel ---------------------------------------------------------------------


def document_indices(segment_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: index of each token's document within its row, from 0; -1 for padding."""
    previous_BT = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)))
    is_start_BT = (segment_BT != 0) & (segment_BT != previous_BT)
    return jnp.where(segment_BT != 0, jnp.cumsum(is_start_BT, axis=1, dtype=jnp.int32) - 1, -1)


def lengths_and_offsets(document_BT: jax.Array, first: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lengths [B, D] and offsets in the row [B, D + 1] of documents `first` to `first + D - 1`, int32; -1 if absent.

    Args:
        document_BT: from `document_indices`.
    """
    index_D = first + jnp.arange(DOCUMENTS_PER_CALL, dtype=jnp.int32)
    belongs_BDT = document_BT[:, None, :] == index_D[:, None]
    length_BD = jnp.sum(belongs_BDT, axis=-1, dtype=jnp.int32)
    offset_BD = jnp.argmax(belongs_BDT, axis=-1).astype(jnp.int32)
    length_BD, offset_BD = (jnp.where(length_BD > 0, a, -1) for a in (length_BD, offset_BD))
    return length_BD, jnp.pad(offset_BD, ((0, 0), (0, 1)), constant_values=-1)


def _packed_call(options: CudnnOptions, document_BT, first, q_BTNH, k_BTKH, v_BTKH) -> Any:
    """[B, T, N, H], valid for documents `first` to `first + D - 1` and undefined elsewhere; with `options.saves_lse` also the
    logsumexp as the kernel has it."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    length_BD, offset_BD = lengths_and_offsets(document_BT, first)
    return fused.dot_product_attention(
        q_BTNH,
        *_ungrouped(q_BTNH, k_BTKH, v_BTKH),
        q_seqlen=length_BD,
        kv_seqlen=length_BD,
        q_offsets=offset_BD,
        kv_offsets=offset_BD,
        scale=options.scale,
        mask_type=fused.MaskType.PADDING_CAUSAL if options.causal else fused.MaskType.PADDING,
        sliding_window_length=options.window,
        return_residual=options.saves_lse,
    )


def _ungrouped(q_BTNH: jax.Array, *keys: jax.Array) -> tuple[jax.Array, ...]:
    """Keys or values, for each query head where jax has its error with grouped queries."""
    is_grouped = jax.__version_info__ >= _GROUPED_QUERIES_FIXED_IN
    return keys if is_grouped else tuple(jnp.repeat(t, q_BTNH.shape[2] // t.shape[2], axis=2) for t in keys)


@dataclass(frozen=True)
class _Statistics:
    """Where the packed kernel has the logsumexp of each token, in an array [B D, N, T]: the documents of a call follow one
    another, those that are there in front, and each begins at the first place of its own.

    Attributes:
        document_BT: the number of the token's document among those of the call; B D for tokens of no document.
        place_BT: the number of the token in its document.
    """

    document_BT: jax.Array
    place_BT: jax.Array

    @staticmethod
    def of(document_BT: jax.Array, first: int | jax.Array) -> "_Statistics":
        length_BD, offset_BD = lengths_and_offsets(document_BT, first)
        number_BD = jnp.cumsum(length_BD.ravel() >= 0).reshape(length_BD.shape) - 1
        in_call_BT = document_BT - first
        is_there_BT = (in_call_BT >= 0) & (in_call_BT < DOCUMENTS_PER_CALL)
        of_document = functools.partial(jnp.take_along_axis, indices=jnp.where(is_there_BT, in_call_BT, 0), axis=1)
        place_BT = jnp.arange(document_BT.shape[1]) - of_document(offset_BD)
        return _Statistics(jnp.where(is_there_BT, of_document(number_BD), number_BD.size), place_BT)

    def by_token(self, lse_DNT: jax.Array) -> jax.Array:
        """[B, T, N] from [B D, N, T]; 0 for tokens of no document."""
        return lse_DNT.at[self.document_BT, :, self.place_BT].get(mode="fill", fill_value=0)

    def by_document(self, lse_BTN: jax.Array) -> jax.Array:
        """The inverse."""
        batch, length, heads = lse_BTN.shape
        empty = jnp.zeros((batch * DOCUMENTS_PER_CALL, heads, length), jnp.float32)
        return empty.at[self.document_BT, :, self.place_BT].set(lse_BTN, mode="drop")


def _call_repeatedly(document_BT, call, results):
    """Runs `call(first, selected_BT)` until all documents are done, and merges the tokens selected by each call."""
    max_documents = jnp.max(document_BT) + 1

    def one_call(number, results):
        first = number * DOCUMENTS_PER_CALL
        selected_BT = (document_BT >= first) & (document_BT < first + DOCUMENTS_PER_CALL)
        new = call(first, selected_BT)
        return tuple(_where(selected_BT, *pair) for pair in zip(new, results, strict=True))

    return jax.lax.fori_loop(0, -(-max_documents // DOCUMENTS_PER_CALL), one_call, results)


def _packed_forward(options: CudnnOptions, segment_BT, q_BTNH, k_BTKH, v_BTKH):
    document_BT = document_indices(segment_BT)
    batch, length, heads, _ = q_BTNH.shape
    if not options.saves_lse:
        call = lambda first, _: (_packed_call(options, document_BT, first, q_BTNH, k_BTKH, v_BTKH),)  # noqa: E731
        (out_BTNH,) = _call_repeatedly(document_BT, call, (jnp.zeros_like(q_BTNH),))
        return out_BTNH, jnp.zeros((batch, heads, length), jnp.float32)

    def call_and_save(first, _):
        out, lse_DNT = _packed_call(options, document_BT, first, q_BTNH, k_BTKH, v_BTKH)
        return out, _Statistics.of(document_BT, first).by_token(lse_DNT)[..., None]

    empty = (jnp.zeros_like(q_BTNH), jnp.zeros((batch, length, heads, 1), jnp.float32))
    out_BTNH, lse_BTN1 = _call_repeatedly(document_BT, call_and_save, empty)
    return out_BTNH, jnp.swapaxes(lse_BTN1[..., 0], 1, 2)


def _packed_backward(options: CudnnOptions, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH):
    document_BT = document_indices(segment_BT)

    def call(first, selected_BT):
        if options.saves_lse:
            return _packed_call_backward(options, document_BT, first, *arrays, _where(selected_BT, d_out_BTNH, 0))
        _, vjp = jax.vjp(functools.partial(_packed_call, options, document_BT, first), q_BTNH, k_BTKH, v_BTKH)
        return vjp(_where(selected_BT, d_out_BTNH, 0))

    arrays = (q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT)
    return _call_repeatedly(document_BT, call, tuple(map(jnp.zeros_like, (q_BTNH, k_BTKH, v_BTKH))))


def _packed_call_backward(
    options: CudnnOptions, document_BT, first, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH
):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    length_BD, offset_BD = lengths_and_offsets(document_BT, first)
    lse_DNT = _Statistics.of(document_BT, first).by_document(jnp.swapaxes(lse_BNT, 1, 2))
    mask = fused.MaskType.PADDING_CAUSAL if options.causal else fused.MaskType.PADDING
    documents = (length_BD, length_BD, offset_BD, offset_BD)
    keys, of_groups = jax.vjp(functools.partial(_ungrouped, q_BTNH), k_BTKH, v_BTKH)
    dq, *d_keys = _backward(options, mask, documents, q_BTNH, *keys, lse_DNT, out_BTNH, d_out_BTNH)
    return dq, *of_groups(tuple(d_keys))


# --- Rows of several documents: blockwise, if the packed kernel cannot be used ----------------------------------------


def _heads_first(x: jax.Array, kv_heads: int | None = None) -> jax.Array:
    """[B, T, N, H] to [B, N, T, H], or to [B, K, G, T, H] if `kv_heads` is given."""
    x = jnp.swapaxes(x, 1, 2)
    return x if kv_heads is None else x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _heads_last(x: jax.Array, like: jax.Array) -> jax.Array:
    """[B, N, T, H] or [B, K, G, T, H] to [B, T, N, H]."""
    batch, length, heads, size = like.shape
    return jnp.swapaxes(x.reshape(batch, heads, length, size), 1, 2)


def _blockwise_forward(options: CudnnOptions, segment_BT, q_BTNH, k_BTKH, v_BTKH):
    q, (k, v) = _heads_first(q_BTNH, k_BTKH.shape[2]), map(_heads_first, (k_BTKH, v_BTKH))
    out, lse = blockwise_forward(options.reach, q, k, v, segment_BT, options.scale)
    return _heads_last(out, q_BTNH), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def _blockwise_backward(options: CudnnOptions, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH):
    kv_heads = k_BTKH.shape[2]
    q, out, d_out = (_heads_first(t, kv_heads) for t in (q_BTNH, out_BTNH, d_out_BTNH))
    k, v = map(_heads_first, (k_BTKH, v_BTKH))
    lse = lse_BNT.reshape(lse_BNT.shape[0], kv_heads, -1, lse_BNT.shape[-1])
    gradients = blockwise_backward(options.reach, q, k, v, segment_BT, options.scale, out, lse, d_out)
    return tuple(_heads_last(g, t) for g, t in zip(gradients, (q_BTNH, k_BTKH, v_BTKH), strict=True))
