"""Splash attention on TPU: jax's own Pallas kernel, which skips fully masked blocks.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`; the algorithm is Dao 2023 (arXiv:2307.08691), section 3.

Shapes: B batch, T position, K key/value heads, G query heads per key/value head, N = K G, H head size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.models.attention.backends.blockwise import ATTENTION

BLOCK = 128
"""Sequence lengths must be multiples of this."""
_LARGEST_BLOCK = 512
_LANES = 128


def splash_attention(
    q_BTKGH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_BT: jax.Array,
    scale: float | jax.Array,
    window: int | None,
    *,
    causal: bool = True,
    sink_KG: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention within segments; arguments as in `blockwise_attention`.

    Args:
        interpret: run the kernel in Pallas's interpret mode, on any device, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    batch, length, kv_heads, group, size = q_BTKGH.shape
    q_BNTH = q_BTKGH.reshape(batch, length, kv_heads * group, size).transpose(0, 2, 1, 3)
    k_BKTH, v_BKTH = (t.transpose(0, 2, 1, 3) for t in (k_BTKH, v_BTKH))
    kernel = _kernel(length, kv_heads * group, window, causal, interpret)
    pad = lambda t: jnp.pad(t, ((0, 0), (0, 0), (0, 0), (0, -size % _LANES)))  # noqa: E731
    scaled = (q_BNTH.astype(jnp.float32) * scale).astype(q_BNTH.dtype)
    segments = splash.SegmentIds(q=segment_BT, kv=segment_BT)
    sink_N = None if sink_KG is None else sink_KG.reshape(-1)
    of_rows = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    out_BNTH: Any = of_rows(pad(scaled), pad(k_BKTH), pad(v_BKTH), segments, sink_N)
    # The kernel treats padding as one more document.
    out_BNTH = jnp.where(segment_BT[:, None, :, None] != 0, out_BNTH[..., :size], 0)
    return out_BNTH.transpose(0, 2, 1, 3).reshape(q_BTKGH.shape).astype(v_BTKH.dtype)


def _kernel(length: int, num_heads: int, window: int | None, causal: bool, interpret: bool):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if window is not None:
        head_mask = masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    else:
        head_mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    block = next(size for size in (_LARGEST_BLOCK, 256, BLOCK) if length % size == 0)
    sizes = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"), block),
        **dict.fromkeys(("block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), block),
    )
    make = functools.partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1, interpret=interpret)
    return make(masks.MultiHeadMask([head_mask] * num_heads), block_sizes=sizes, residual_checkpoint_name=ATTENTION)
