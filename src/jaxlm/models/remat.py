"""What a layer keeps for the backward pass, and what it computes again.

    none     everything that the derivative reads is kept, but for changes of layout and dtype
    cheap    matrix products, attention and what norms find of a row are kept; norms, activations and rotations are
             computed again
    full     only each layer's input is kept (Chen et al. 2016, arXiv:1604.06174)
    [names]  the layer's input and what is named: query, key, value, attention, mlp, expert
    auto     the first of the platform's policies that fits into memory, decided when the step is compiled

Parameters are never kept a second time. For second derivatives it is always `full`: attention has no kernel then, and its
weights, [T, T] of every head, would be kept of all layers.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray
from jax import ad_checkpoint

from jaxlm.core.custom_vjp import is_twice_differentiable
from jaxlm.core.errors import ConfigError
from jaxlm.models.attention.backends.blockwise import ATTENTION
from jaxlm.models.norms import NORM

RematPolicy = str | tuple[str, ...]

AUTO, NONE, CHEAP, FULL = "auto", "none", "cheap", "full"
QUERY, KEY, VALUE, MLP, EXPERT = "query", "key", "value", "mlp", "expert"
NAMES = (QUERY, KEY, VALUE, ATTENTION, MLP, EXPERT)
_POLICIES = (AUTO, NONE, CHEAP, FULL)

# Least recomputed first. On CPU it is faster to compute an activation again than to fetch it from memory
# (docs/benchmarks.md), so `none` is not among what `auto` tries there.
CANDIDATES = {"cpu": (CHEAP, FULL), "gpu": (NONE, CHEAP, FULL), "tpu": (NONE, CHEAP, FULL)}

_auto: contextvars.ContextVar[str] = contextvars.ContextVar("jaxlm_auto_remat", default=CHEAP)


def parse_remat(value: bool | str | Sequence[str]) -> RematPolicy:
    """`model.gradient_checkpointing` as a policy: true is `full` and false is `cheap`.

    Raises:
        ConfigError: neither a policy nor a list of names.
    """
    if isinstance(value, bool):
        return FULL if value else CHEAP
    if isinstance(value, str):
        if value not in _POLICIES:
            raise ConfigError(
                f"model.gradient_checkpointing: '{value}' given. Allowed: true, false, {', '.join(_POLICIES)}, or a list"
                f" of what to keep: {', '.join(NAMES)}"
            )
        return value
    unknown = [name for name in value if name not in NAMES]
    if unknown or not value:
        problem = f"'{unknown[0]}' given" if unknown else "an empty list given"
        raise ConfigError(f"model.gradient_checkpointing: {problem}. What can be kept by name: {', '.join(NAMES)}")
    return tuple(value)


@contextlib.contextmanager
def auto_policy(policy: str) -> Iterator[None]:
    """What `auto` means to everything that is traced inside."""
    token = _auto.set(policy)
    try:
        yield
    finally:
        _auto.reset(token)


def checkpoint_name(x: NamedArray, name: str) -> NamedArray:
    """The same values, known to policies by a name."""
    return NamedArray(ad_checkpoint.checkpoint_name(x.array, name), x.axes)


def remat(remat_policy: RematPolicy, layer: Callable[..., Any], *, scan: bool) -> Callable[..., Any]:
    """The layer, with a backward pass that finds what `keep` says and makes the rest again."""
    remat_policy = FULL if is_twice_differentiable() else _auto.get() if remat_policy == AUTO else remat_policy
    # Without a loop nothing else stops XLA from merging the recomputation with the first computation.
    return eqx.filter_checkpoint(layer, policy=_policy(remat_policy), prevent_cse=not scan)


def _policy(remat_policy: RematPolicy) -> Callable[..., bool] | None:
    policies = jax.checkpoint_policies
    if remat_policy == FULL:
        return None
    if remat_policy == NONE:
        return _all_but_parameters
    if remat_policy == CHEAP:
        return policies.save_from_both_policies(
            policies.dots_saveable, policies.save_only_these_names(ATTENTION, EXPERT, NORM)
        )
    return policies.save_only_these_names(*remat_policy)


# What parameters go through on their way into a matrix product. Kept, they would be a second copy of all layers (under
# FSDP: a gathered one); on activations these cost little.
_OF_PARAMETERS = {"sharding_constraint", "transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type"}


def _all_but_parameters(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _OF_PARAMETERS
