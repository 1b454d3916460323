"""Remat policies (gradient checkpointing): what a layer saves for the backward pass, and what it recomputes.

    none     saves everything that the derivative reads, except changes of layout and dtype
    cheap    saves matrix products, attention, the row statistics of norms and the scales of fp8; recomputes norms,
             activations, rotary embeddings and inputs in fp8
    full     saves only each layer's input (Chen et al. 2016, arXiv:1604.06174)
    [names]  saves the layer's input and the named activations: query, key, value, attention, mlp, expert
    auto     the first of the platform's policies that fits into memory, decided when the step is compiled

Parameters are never saved a second time. Second derivatives always use `full`: attention then has no kernel, and its
[T, T] weights of each head would be saved for all layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray
from jax import ad_checkpoint

from jaxlm.core.errors import ConfigError
from jaxlm.core.matmul import FP8_SCALE
from jaxlm.core.tracing import trace_options
from jaxlm.models.attention.backends.blockwise import ATTENTION
from jaxlm.models.norms import NORM

RematPolicy = str | tuple[str, ...]

AUTO, NONE, CHEAP, FULL = "auto", "none", "cheap", "full"
QUERY, KEY, VALUE, MLP, EXPERT = "query", "key", "value", "mlp", "expert"
NAMES = (QUERY, KEY, VALUE, ATTENTION, MLP, EXPERT)
_POLICIES = (AUTO, NONE, CHEAP, FULL)

# Least recomputation first. On CPUs it is faster to recompute an activation than to read it from memory
# (docs/benchmarks.md), so `auto` does not try `none` there.
CANDIDATES = {"cpu": (CHEAP, FULL), "gpu": (NONE, CHEAP, FULL), "tpu": (NONE, CHEAP, FULL)}


def parse_remat(value: bool | str | Sequence[str]) -> RematPolicy:
    """Converts `model.gradient_checkpointing` to a policy: true is `full` and false is `none`.

    Raises:
        ConfigError: the value is neither a policy nor a list of names.
    """
    if isinstance(value, bool):
        return FULL if value else NONE
    if isinstance(value, str):
        if value not in _POLICIES:
            raise ConfigError(
                f"model.gradient_checkpointing: '{value}' given. Allowed: true, false, {', '.join(_POLICIES)}, or a"
                f" list of activations to save: {', '.join(NAMES)}"
            )
        return value
    unknown = [name for name in value if name not in NAMES]
    if unknown or not value:
        problem = f"'{unknown[0]}' given" if unknown else "an empty list given"
        raise ConfigError(f"model.gradient_checkpointing: {problem}. Activations to save: {', '.join(NAMES)}")
    return tuple(value)


def checkpoint_name(x: NamedArray, name: str) -> NamedArray:
    """Tags an activation with the name by which policies can save it."""
    return NamedArray(ad_checkpoint.checkpoint_name(x.array, name), x.axes)


def remat(remat_policy: RematPolicy, layer: Callable[..., Any], *, scan: bool) -> Callable[..., Any]:
    """Wraps a layer so that the backward pass reads what the policy saves and recomputes the rest."""
    remat_policy = trace_options().auto_remat if remat_policy == AUTO else remat_policy
    remat_policy = FULL if trace_options().twice_differentiable else remat_policy
    # Outside a scan, XLA would merge the recomputation with the forward computation.
    return eqx.filter_checkpoint(layer, policy=_policy(remat_policy), prevent_cse=not scan)


def _policy(remat_policy: RematPolicy) -> Callable[..., bool] | None:
    policies = jax.checkpoint_policies
    if remat_policy == FULL:
        return None
    if remat_policy == NONE:
        return _all_but_parameters
    if remat_policy == CHEAP:
        return policies.save_from_both_policies(
            policies.dots_saveable, policies.save_only_these_names(ATTENTION, EXPERT, NORM, FP8_SCALE)
        )
    return policies.save_only_these_names(*remat_policy)


# Operations on parameters before a matrix product. Saving their results would keep a second copy of all layers (under
# FSDP, a gathered one). On activations they are cheap to recompute.
_PARAMETER_OPS = {"sharding_constraint", "transpose", "reshape", "squeeze", "slice", "broadcast_in_dim"}
_PARAMETER_OPS |= {"convert_element_type"}


def _all_but_parameters(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _PARAMETER_OPS
