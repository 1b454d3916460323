"""What a run needs to save activations in the memory of the host: a compiler that reads them back in the right order."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxlm.core.errors import ConfigError
from jaxlm.models.remat import FULL, RESIDUAL, RematOffload, RematPolicy, offloads, parse_remat, remat
from jaxlm.plan.plan import Plan

# Before this version, XLA for GPUs copies what a loop has offloaded back in the order of the forward pass, and all gradients
# are wrong without an error (openxla/xla#46231, #46308). Shown in compiled programs of jaxlib 0.10.2; those of 0.11.1, 0.11.2
# and 0.12.0.1 have the reverse order.
_ORDER_FIXED_IN = (0, 11, 1)
_DISABLED = "xla_disable_hlo_passes"
_WRONG_PASS = "dynamic-slice-annotator"
_LAYERS, _ROWS, _WIDTH = 3, 64, 256
_TOLERANCE = 1e-3  # a wrong order is wrong in the first digit


def offload_options(plan: Plan) -> dict[str, str]:
    """The XLA options that keep old compilers from reading offloaded activations in the wrong order."""
    offloading = any(offloads(parse_remat(phase.model.gradient_checkpointing)) for phase in plan.phases)
    if plan.layout.platform != "gpu" or not offloading or jaxlib.version.__version_info__ >= _ORDER_FIXED_IN:
        return {}
    flags = (flag.lstrip("-").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    disabled = [passes for name, _, passes in flags if name == _DISABLED]
    return {_DISABLED: ",".join([*disabled, _WRONG_PASS])}


def check_offload(options: Mapping[str, Any]) -> None:
    """Compares the gradients of a few layers with and without offloading their inputs.

    Args:
        options: XLA options of the training step.

    Raises:
        ConfigError: they differ on this device.
    """
    if jax.default_backend() == "cpu":
        return  # has one memory, and stands in for a device that is not attached
    expected, offloaded = (_gradient(policy, options) for policy in (FULL, RematOffload((), (RESIDUAL,))))
    if not np.allclose(offloaded, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ConfigError(
            "model.gradient_checkpointing.offload: on this device, layers that offload have wrong gradients with jaxlib"
            f" {jaxlib.version.__version__} and XLA_FLAGS='{os.environ.get('XLA_FLAGS', '')}'. Remove what is in XLA_FLAGS,"
            " or use another version of jax, or set model.gradient_checkpointing: full"
        )


def _gradient(policy: RematPolicy, options: Mapping[str, Any]) -> np.ndarray:
    def layer(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, RESIDUAL)
        return x + jnp.sin(scale * x), None

    def loss(scales: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(remat(policy, layer, scan=True), x, scales)[0] ** 2)

    scales = jnp.linspace(0.1, 1.0, _LAYERS * _WIDTH, dtype=jnp.float32).reshape(_LAYERS, _WIDTH)
    x = jnp.linspace(-1.0, 1.0, _ROWS * _WIDTH, dtype=jnp.float32).reshape(_ROWS, _WIDTH)
    compiled = jax.jit(jax.grad(loss)).lower(scales, x).compile(dict(options))
    return np.asarray(compiled(scales, x)) / _ROWS
