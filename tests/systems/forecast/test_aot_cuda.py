"""Tracing for a GPU that is not attached: the device is never queried, and all patches are undone afterwards."""

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxlm.models.attention.choose import AttentionTask, choose_attention
from jaxlm.systems.forecast.aot import compiling_for_cuda

HOPPER = AttentionTask("gpu", jnp.dtype(jnp.bfloat16), 1024, head_size=128, capability=(9, 0))


def test_kernels_are_assumed_correct_and_jax_sees_the_target_device():
    asked = fused.check_compute_capability
    assert choose_attention(HOPPER).name == "blockwise", "no GPU is attached to self-test it on"
    with compiling_for_cuda((9, 0)):
        assert choose_attention(HOPPER).name == "cudnn"
        assert fused.check_compute_capability("9.0")
        assert fused.check_compute_capability("8.0")
        assert not fused.check_compute_capability("10.0")
        assert not fused.is_cuda_compute_capability_equal("10.3")
    with compiling_for_cuda((8, 0)):
        assert not fused.check_compute_capability("9.0")
    assert fused.check_compute_capability is asked
    assert choose_attention(HOPPER).name == "blockwise"
