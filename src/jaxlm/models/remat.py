"""Remat policies (gradient checkpointing): what a layer saves for the backward pass, and what it recomputes.

    none     saves everything that the derivative reads, except changes of layout and dtype
    cheap    saves matrix products (of a layer with an adapter, the sum), attention, the row statistics of norms and the
             scales of fp8; recomputes norms, activations, rotary embeddings and inputs in fp8
    attention  saves each layer's input, and attention's output and logsumexp, so that attention itself runs once;
             of recurrent layers, the output and the states
    full     saves only each layer's input (Chen et al. 2016, arXiv:1604.06174)
    [names]  saves the layer's input and the named activations: query, key, value, attention, mlp, expert,
             state (of recurrent layers, the states at the start of chunks of 64 tokens and the chunks' errors, which are
             values minus what the state has for their keys; in rows of more than 8,192 tokens, the states at the start of
             groups of chunks; save it together with attention)
    offload  saves some of them in the host's memory, and the layer's input too if its name is there: residual
    modules  saves nothing inside of the modules of each layer whose names match a regular expression, except their inputs,
             and everything in the others
    auto     the first of the platform's policies that fits into memory, decided when the step is compiled

All but `full` save which experts tokens chose. Parameters are never saved a second time. Second derivatives always use
`full`: attention then has no kernel, and its [T, T] weights of each head would be saved for all layers.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import equinox as eqx
import jax
from haliax import NamedArray
from jax import ad_checkpoint

from jaxlm.core.devices import HOST_MEMORY
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.fp8 import FP8_SCALE
from jaxlm.core.sharding import for_compute
from jaxlm.core.tracing import trace_options
from jaxlm.core.tree import compile_pattern
from jaxlm.models.attention.backends.blockwise import ATTENTION
from jaxlm.models.mixers.delta_rule import STATE
from jaxlm.models.norms import NORM

T = TypeVar("T")


@dataclass(frozen=True)
class RematConfig:
    """Says which modules of each layer are recomputed, or which activations are saved where.

    Attributes:
        modules: regular expression searched for in the names of a layer's modules, such as attn, mlp and mlp_norm. The
            backward pass recomputes what happens inside of those that match, and reads the rest from memory.
        save: activations that are saved in device memory, beside each layer's input: query, key, value, attention, mlp,
            expert, state. Everything else is recomputed.
        offload: activations that are saved in the host's memory, from which the backward pass copies them back: those of
            `save`, or `residual`, each layer's input.
    """

    modules: str | None = None
    save: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)

    def __post_init__(self):
        for name in ("save", "offload"):  # the config is part of a static field: it must be hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.modules is not None:
            compile_pattern(self.modules, "model.gradient_checkpointing.modules")
            if self.save or self.offload:
                raise ConfigError(
                    "model.gradient_checkpointing.modules: given together with save or offload, but modules are recomputed"
                    " whole. Remove one of them"
                )
            return
        _check_names("model.gradient_checkpointing.save", self.save, NAMES)
        _check_names("model.gradient_checkpointing.offload", self.offload, (RESIDUAL, *NAMES))
        if both := set(self.save) & set(self.offload):
            raise ConfigError(
                f"model.gradient_checkpointing.offload: '{min(both)}' is in save too. Keep it in one of both: it is saved"
                " either on the device or on the host"
            )


@dataclass(frozen=True)
class RematModules:
    """Recomputes the modules of every layer whose names match a regular expression."""

    modules: str


@dataclass(frozen=True)
class RematOffload:
    """Saves named activations of every layer in the memory of the device and of the host."""

    save: tuple[str, ...]
    offload: tuple[str, ...]


RematPolicy = str | tuple[str, ...] | RematModules | RematOffload

AUTO, NONE, CHEAP, FULL = "auto", "none", "cheap", "full"  # and ATTENTION, which is also the name of an activation
QUERY, KEY, VALUE, MLP, EXPERT, RESIDUAL = "query", "key", "value", "mlp", "expert", "residual"
NAMES = (QUERY, KEY, VALUE, ATTENTION, MLP, EXPERT, STATE)
CHOSEN = "chosen"
"""The experts that tokens chose, and the order of rows that follows: integers, which every policy except `full` saves. They
are the same when rows are recomputed, and gradients are sent to the experts meanwhile."""
ADAPTED = "adapted"
"""The output of a layer with an adapter. Without it, `cheap` would save the products of layer and adapter, not their sum."""
_POLICIES = (AUTO, NONE, CHEAP, ATTENTION, FULL)

# Least recomputation first. On CPUs it is faster to recompute an activation than to read it from memory
# (docs/benchmarks.md), so `auto` does not try `none` there.
CANDIDATES = {
    "cpu": (CHEAP, ATTENTION, FULL),
    "gpu": (NONE, CHEAP, ATTENTION, FULL),
    "tpu": (NONE, CHEAP, ATTENTION, FULL),
}


def parse_remat(value: bool | str | Sequence[str] | RematConfig) -> RematPolicy:
    """Converts `model.gradient_checkpointing` to a policy: true is `full` and false is `none`.

    Raises:
        ConfigError: the value is neither a policy nor a list of names.
    """
    if isinstance(value, bool):
        return FULL if value else NONE
    if isinstance(value, RematConfig):
        if value.modules is not None:
            return RematModules(value.modules)
        saved, offloaded = tuple(value.save), tuple(value.offload)
        return RematOffload(saved, offloaded) if offloaded else saved or FULL
    if isinstance(value, str):
        if value not in _POLICIES:
            raise ConfigError(
                f"model.gradient_checkpointing: '{value}' given. Allowed: true, false, {', '.join(_POLICIES)}, or a"
                f" list of activations to save: {', '.join(NAMES)}, or {{modules: ...}} or {{save: [...], offload: [...]}}"
            )
        return value
    if not value:
        raise ConfigError(f"model.gradient_checkpointing: an empty list given. Activations to save: {', '.join(NAMES)}")
    _check_names("model.gradient_checkpointing", value, NAMES)
    return tuple(value)


def _check_names(key: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{key}: '{unknown[0]}' given. Activations to save: {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}: {', '.join(names)} given. Remove the name that is there twice")


def remat_name(remat_policy: RematPolicy) -> str:
    """A policy, for messages."""
    if isinstance(remat_policy, RematModules):
        return f"modules {remat_policy.modules}"
    if isinstance(remat_policy, RematOffload):
        return ", ".join([*remat_policy.save, *(f"{name} on the host" for name in remat_policy.offload)])
    return remat_policy if isinstance(remat_policy, str) else ", ".join(remat_policy)


def describe_remat(policy: RematPolicy, platform: str) -> str:
    """Says what a policy recomputes, for the table of the plan."""
    if policy == AUTO:
        return f"auto: the first of {', '.join(CANDIDATES[platform])} that fits into memory"
    descriptions = {
        NONE: "nothing is recomputed",
        CHEAP: "norms and activations are recomputed, matrix products and attention are saved",
        ATTENTION: "everything except each layer's input and attention is recomputed",
        FULL: "everything except each layer's input is recomputed",
    }
    if isinstance(policy, str):
        return descriptions[policy]
    if isinstance(policy, RematModules):
        return f"the modules of each layer that match '{policy.modules}' are recomputed, and nothing else"
    if isinstance(policy, RematOffload):
        saved = ", ".join(name for name in (*policy.save, *policy.offload) if name != RESIDUAL)
        beside = f" and {saved}" if saved else ""
        on_host = ", ".join(policy.offload)
        return f"everything except each layer's input{beside} is recomputed; in the host's memory: {on_host}"
    return f"everything except each layer's input and {', '.join(policy)} is recomputed"


def saves(remat_policy: RematPolicy, name: str) -> bool:
    """Tells whether a list of activations to save has this one."""
    if isinstance(remat_policy, RematOffload):
        return name in (*remat_policy.save, *remat_policy.offload)
    return isinstance(remat_policy, tuple) and name in remat_policy


def offloads(remat_policy: RematPolicy) -> bool:
    """Tells whether layers save activations in the host's memory."""
    return isinstance(remat_policy, RematOffload)


def checkpoint_name(x: NamedArray, name: str) -> NamedArray:
    """Tags an activation with the name by which policies can save it."""
    return NamedArray(ad_checkpoint.checkpoint_name(x.array, name), x.axes)


def layer_input(x: NamedArray) -> NamedArray:
    """Tags the input of a layer, inside of the loop: what the loop carries is saved on the device, whatever its name is."""
    return checkpoint_name(x, RESIDUAL)


def remat(remat_policy: RematPolicy, layer: Callable[..., Any], *, scan: bool) -> Callable[..., Any]:
    """Wraps a layer so that the backward pass reads what the policy saves and recomputes the rest."""
    remat_policy = trace_options().auto_remat if remat_policy == AUTO else remat_policy
    remat_policy = FULL if trace_options().twice_differentiable else remat_policy
    if isinstance(remat_policy, RematModules):
        return layer  # its modules are wrapped instead
    # Outside a scan, XLA would merge the recomputation with the forward computation.
    return eqx.filter_checkpoint(layer, policy=_policy(remat_policy), prevent_cse=not scan)


class _RematModule(eqx.Module):
    """A module of a layer, with parameters as they are stored, that is checkpointed on its own."""

    module: Any
    policy: str = eqx.field(static=True)
    scan: bool = eqx.field(static=True)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        def run(module: Any, arguments: tuple, keywords: dict) -> Any:
            return for_compute(module)(*arguments, **keywords)

        checkpointed = eqx.filter_checkpoint(run, policy=_policy(self.policy), prevent_cse=not self.scan)
        return checkpointed(self.module, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)


def with_remat_modules(remat_policy: RematPolicy, block: T, *, scan: bool) -> T:
    """A block for the computation, given as it is stored. With a policy for modules, each of them is checkpointed.

    Each module reshards its parameters inside of its checkpoint, so that the backward pass does it again. Otherwise all
    layers' gathered parameters would be saved.

    Raises:
        ConfigError: no module matches.
    """
    if not isinstance(remat_policy, RematModules) or trace_options().twice_differentiable:
        return for_compute(block)
    names = [part.name for part in dataclasses.fields(block)]  # pyright: ignore[reportArgumentType]
    modules = {
        name: module for name in names if callable(module := getattr(block, name)) and isinstance(module, eqx.Module)
    }
    matching = {name for name in modules if re.search(remat_policy.modules, name)}
    if not matching:
        raise ConfigError(
            f"model.gradient_checkpointing.modules: '{remat_policy.modules}' matches no module of a layer. A layer has:"
            f" {', '.join(modules)}"
        )
    wrapped = {name: _RematModule(module, FULL if name in matching else NONE, scan) for name, module in modules.items()}
    change: Any = dataclasses.replace
    return change(for_compute(change(block, **dict.fromkeys(modules))), **wrapped)


def for_whole_layers(remat_policy: RematPolicy) -> RematPolicy:
    """The policy, or `full` in the place of policies for single modules."""
    return FULL if isinstance(remat_policy, RematModules) else remat_policy


def _policy(remat_policy: RematPolicy) -> Callable[..., bool] | None:
    assert not isinstance(remat_policy, RematModules), "modules have policies of their own"
    policies = jax.checkpoint_policies
    if remat_policy == FULL:
        return None
    if remat_policy == NONE:
        return _all_but_parameters
    if remat_policy == CHEAP:
        return policies.save_from_both_policies(
            policies.dots_saveable,
            policies.save_only_these_names(ATTENTION, STATE, EXPERT, CHOSEN, NORM, FP8_SCALE, ADAPTED),
        )
    if isinstance(remat_policy, RematOffload):
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*remat_policy.save, CHOSEN],
            names_which_can_be_offloaded=list(remat_policy.offload),
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
    names = (ATTENTION, STATE) if remat_policy == ATTENTION else remat_policy
    return policies.save_only_these_names(*names, CHOSEN)


# Operations on parameters before a matrix product. Saving their results would keep a second copy of all layers (under
# FSDP, a gathered one). On activations they are cheap to recompute.
_PARAMETER_OPS = {"sharding_constraint", "transpose", "reshape", "squeeze", "slice", "broadcast_in_dim"}
_PARAMETER_OPS |= {"convert_element_type"}


def _all_but_parameters(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _PARAMETER_OPS
