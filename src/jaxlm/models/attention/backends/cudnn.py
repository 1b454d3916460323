"""cuDNN's fused attention on NVIDIA cards, through jax's own bindings.

Source: `jax._src.cudnn.fused_attention_stablehlo`, which stands behind `jax.nn.dot_product_attention(implementation=
"cudnn")`; the algorithm is Dao 2023 (arXiv:2307.08691). The public function knows neither where documents begin nor a
backward pass that finds the log-sum-exp kept in float32, so both are asked for underneath it.

Rows that are one document each, whatever padding follows it, are plain causal attention. Rows of several documents go to
the packed kernel, which is told where each begins and how long it is. It takes a fixed number of documents a row and
writes a log-sum-exp of the row's whole length for each, so a call gets few, and rows of more are finished by more calls:
each reads its own documents only, and together they cost what one call would. Which of the two it is, is decided on the
device, from the segment ids.

Shapes: B batch, T position, K key/value heads, G query heads a key/value head, N = K G, H head size, D documents a call.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlm.models.attention.backends.blockwise import ATTENTION, blocks_backward, blocks_forward

DOCUMENTS_A_CALL = 8
"""Documents of a row that one call of the packed kernel attends to."""
# Up to this jax, grouped queries read the keys of a packed document from the wrong place (jax-ml/jax#39521).
_GROUPS_ARE_RIGHT_FROM = (0, 11, 2)


@dataclass(frozen=True)
class _Form:
    """What a call is compiled for."""

    scale: float
    window: int | None
    packed: bool


def cudnn_attention(
    q_BTKGH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_BT: jax.Array,
    *,
    scale: float,
    window: int | None,
    packed: bool,
) -> jax.Array:
    """[B, T, K, G, H]: arguments as in `jaxlm.models.attention.backends.blockwise.block_attention`, in bfloat16 or float16.

    Args:
        segment_BT: the tokens of a document stand together.
        scale: a number, not an array: the kernel is compiled for it.
        packed: rows of several documents run on the packed kernel; false runs them on blocks.
    """
    out: Any = _attend(_Form(scale, window, packed), _heads_together(q_BTKGH), k_BTKH, v_BTKH, segment_BT)
    return out.reshape(q_BTKGH.shape)


def _heads_together(x_BTKGH: jax.Array) -> jax.Array:
    return x_BTKGH.reshape(*x_BTKGH.shape[:2], -1, x_BTKGH.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: _Form, q_BTNH, k_BTKH, v_BTKH, segment_BT):
    return _forward(form, q_BTNH, k_BTKH, v_BTKH, segment_BT)[0]


def _forward(form: _Form, q_BTNH, k_BTKH, v_BTKH, segment_BT):
    """The output, and the log-sum-exp [B, N, T], which is 0 where the backward pass makes its own."""
    branches = (_packed_forward if form.packed else _blocks_forward, _whole_forward)
    out_BTNH, lse_BNT = _of_rows(form, branches, segment_BT, q_BTNH, k_BTKH, v_BTKH)
    return _where(segment_BT != 0, out_BTNH, 0), lse_BNT


def _attend_forward(form: _Form, q_BTNH, k_BTKH, v_BTKH, segment_BT):
    out, lse = _forward(form, q_BTNH, k_BTKH, v_BTKH, segment_BT)
    out, lse = checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
    return out, (q_BTNH, k_BTKH, v_BTKH, segment_BT, out, lse)


def _attend_backward(form: _Form, kept, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, out_BTNH, lse_BNT = kept
    d_out_BTNH = _where(segment_BT != 0, d_out_BTNH, 0)
    branches = (_packed_backward if form.packed else _blocks_backward, _whole_backward)
    return *_of_rows(form, branches, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH), None


_attend.defvjp(_attend_forward, _attend_backward)


def _of_rows(form: _Form, branches, segment_BT, *arrays):
    """What the branch for these rows returns: (several documents, one document each)."""
    several, whole = (functools.partial(branch, form, segment_BT) for branch in branches)
    return jax.lax.cond(are_whole(segment_BT), whole, several, *arrays)


def are_whole(segment_BT: jax.Array) -> jax.Array:
    """Whether every row is one document with nothing but padding after it: what padding sees does not matter."""
    before, here = segment_BT[:, :-1], segment_BT[:, 1:]
    return jnp.all((here == before) | (here == 0))


def _where(chosen_BT: jax.Array, x: jax.Array, otherwise: Any) -> jax.Array:
    return jnp.where(chosen_BT[:, :, None, None], x, otherwise)


# --- Rows of one document ---------------------------------------------------------------------------------------------


def _whole_forward(form: _Form, segment_BT, q_BTNH, k_BTKH, v_BTKH):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    del segment_BT
    return fused.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=form.scale,
        mask_type=fused.MaskType.CAUSAL,
        sliding_window_length=form.window,
        return_residual=True,
    )


def _whole_backward(form: _Form, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    del segment_BT
    none = jnp.zeros(0, q_BTNH.dtype)  # jax's mark for a bias, lengths, offsets and pages that are not there
    options: dict[str, Any] = {
        "scale": form.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": fused.MaskType.CAUSAL,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": form.window,
    }
    if jax.__version_info__ >= (0, 12):
        options["score_mod"] = None
    backward = fused._dot_product_attention_bwd_p_wrapper
    return tuple(backward.bind(q_BTNH, k_BTKH, v_BTKH, *[none] * 7, lse_BNT, out_BTNH, d_out_BTNH, **options))


# --- Rows of several documents: the packed kernel ---------------------------------------------------------------------


def documents_of(segment_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: which of its row's documents, from 0, a token belongs to; -1 for padding."""
    before_BT = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)))
    begins_BT = (segment_BT != 0) & (segment_BT != before_BT)
    return jnp.where(segment_BT != 0, jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32) - 1, -1)


def lengths_and_offsets(document_BT: jax.Array, first: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of documents `first` to `first + D`: lengths [B, D] and places in the row [B, D + 1], int32, -1 where there is none.

    Args:
        document_BT: from `documents_of`.
    """
    wanted_D = first + jnp.arange(DOCUMENTS_A_CALL, dtype=jnp.int32)
    mine_BDT = document_BT[:, None, :] == wanted_D[:, None]
    length_BD = jnp.sum(mine_BDT, axis=-1, dtype=jnp.int32)
    offset_BD = jnp.argmax(mine_BDT, axis=-1).astype(jnp.int32)
    length_BD, offset_BD = (jnp.where(length_BD > 0, a, -1) for a in (length_BD, offset_BD))
    return length_BD, jnp.pad(offset_BD, ((0, 0), (0, 1)), constant_values=-1)


def _packed(form: _Form, document_BT, first, q_BTNH, k_BTKH, v_BTKH) -> jax.Array:
    """[B, T, N, H], filled in for documents `first` to `first + D` and undefined elsewhere."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    length_BD, offset_BD = lengths_and_offsets(document_BT, first)
    if jax.__version_info__ < _GROUPS_ARE_RIGHT_FROM:
        group = q_BTNH.shape[2] // k_BTKH.shape[2]
        k_BTKH, v_BTKH = (jnp.repeat(t, group, axis=2) for t in (k_BTKH, v_BTKH))
    out: Any = fused.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        q_seqlen=length_BD,
        kv_seqlen=length_BD,
        q_offsets=offset_BD,
        kv_offsets=offset_BD,
        scale=form.scale,
        mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=form.window,
    )
    return out


def _calls(document_BT, call, results):
    """`call(first, chosen_BT)` for all documents; each result is taken where that call's own documents are."""
    most = jnp.max(document_BT) + 1

    def one(number, results):
        first = number * DOCUMENTS_A_CALL
        chosen_BT = (document_BT >= first) & (document_BT < first + DOCUMENTS_A_CALL)
        new = call(first, chosen_BT)
        return tuple(_where(chosen_BT, *pair) for pair in zip(new, results, strict=True))

    return jax.lax.fori_loop(0, -(-most // DOCUMENTS_A_CALL), one, results)


def _packed_forward(form: _Form, segment_BT, q_BTNH, k_BTKH, v_BTKH):
    document_BT = documents_of(segment_BT)
    call = lambda first, _: (_packed(form, document_BT, first, q_BTNH, k_BTKH, v_BTKH),)  # noqa: E731
    (out_BTNH,) = _calls(document_BT, call, (jnp.zeros_like(q_BTNH),))
    batch, length, heads, _ = q_BTNH.shape
    return out_BTNH, jnp.zeros((batch, heads, length), jnp.float32)


def _packed_backward(form: _Form, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH):
    # The log-sum-exp is made again: kept, it would be D times as large as that of whole rows, in every layer.
    del out_BTNH, lse_BNT
    document_BT = documents_of(segment_BT)

    def call(first, chosen_BT):
        _, vjp = jax.vjp(functools.partial(_packed, form, document_BT, first), q_BTNH, k_BTKH, v_BTKH)
        return vjp(_where(chosen_BT, d_out_BTNH, 0))

    return _calls(document_BT, call, tuple(map(jnp.zeros_like, (q_BTNH, k_BTKH, v_BTKH))))


# --- Rows of several documents: blocks, where the packed kernel cannot be used ----------------------------------------


def _heads_first(x: jax.Array, kv_heads: int | None = None) -> jax.Array:
    """[B, T, N, H] to [B, N, T, H], or to [B, K, G, T, H]."""
    x = jnp.swapaxes(x, 1, 2)
    return x if kv_heads is None else x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _heads_last(x: jax.Array, like: jax.Array) -> jax.Array:
    """[B, N, T, H] or [B, K, G, T, H] to [B, T, N, H]."""
    batch, length, heads, size = like.shape
    return jnp.swapaxes(x.reshape(batch, heads, length, size), 1, 2)


def _blocks_forward(form: _Form, segment_BT, q_BTNH, k_BTKH, v_BTKH):
    q, (k, v) = _heads_first(q_BTNH, k_BTKH.shape[2]), map(_heads_first, (k_BTKH, v_BTKH))
    out, lse = blocks_forward(form.window, q, k, v, segment_BT, form.scale)
    return _heads_last(out, q_BTNH), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def _blocks_backward(form: _Form, segment_BT, q_BTNH, k_BTKH, v_BTKH, out_BTNH, lse_BNT, d_out_BTNH):
    kv_heads = k_BTKH.shape[2]
    q, out, d_out = (_heads_first(t, kv_heads) for t in (q_BTNH, out_BTNH, d_out_BTNH))
    k, v = map(_heads_first, (k_BTKH, v_BTKH))
    lse = lse_BNT.reshape(lse_BNT.shape[0], kv_heads, -1, lse_BNT.shape[-1])
    gradients = blocks_backward(form.window, q, k, v, segment_BT, form.scale, out, lse, d_out)
    return tuple(_heads_last(g, t) for g, t in zip(gradients, (q_BTNH, k_BTKH, v_BTKH), strict=True))
