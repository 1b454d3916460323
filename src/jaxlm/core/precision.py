"""Mixed precision: storage and compute dtypes by parameter path (`trainer.mp`), and loss scaling for float16.

`auto` chooses by whether a device multiplies matrices faster in bfloat16 than in float32.

Source of loss scaling: Micikevicius et al. 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2; the scale is
adjusted as in the same group's later libraries. It is a power of two, so scaling is exact unless it overflows or underflows.
"""

import abc
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxlib.version

from jaxlm.core.devices import cuda_capability, processor_facts
from jaxlm.core.errors import ConfigError
from jaxlm.core.guards import StepGuard, StepStats, Verdict, is_finite
from jaxlm.core.parameters import float32_paths
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.core.rules import Rules, some_of
from jaxlm.core.tree import closest_paths, compile_pattern, dotted, is_inexact, is_named, leaves, raw, sum_dtype

T = TypeVar("T")

AUTO = "auto"
_FAST, _SLOW = "p=f32,c=bfloat16", "f32"  # the policies of `trainer.mp` that `auto` chooses from
_FIRST_WITH_TENSOR_CORES = (8, 0)  # Ampere
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # the fastest first
# Earlier versions compute most products of bfloat16 in float32 on CPUs, as `jaxlm bench` shows (`hardware/cpu_products.py`).
_FIRST_JAXLIB = (0, 12)


class Bfloat16(NamedTuple):
    """Attributes: is_fast: whether products are faster than in float32; reason: why."""

    is_fast: bool
    reason: str

    @property
    def policy(self) -> str:
        """The policy that `trainer.mp: auto` stands for."""
        return _FAST if self.is_fast else _SLOW


def bfloat16_products(device: Any) -> Bfloat16:
    """Returns how a device computes with bfloat16."""
    if device.platform == "cpu":
        return _of_processor(_instructions(), jaxlib.version.__version_info__)
    capability = cuda_capability(device)
    if capability is not None and capability < _FIRST_WITH_TENSOR_CORES:
        return Bfloat16(False, f"{device.device_kind} has no matrix units for bfloat16")
    return Bfloat16(True, f"{device.device_kind} has matrix units for bfloat16")


def has_matrix_instruction() -> bool:
    """Tells whether this machine's processor has the matrix instructions for bfloat16."""
    return not _instructions().isdisjoint(_INSTRUCTIONS)


def _of_processor(instructions: frozenset[str], version: tuple[int, ...]) -> Bfloat16:
    used, first = ".".join(map(str, version)), ".".join(map(str, _FIRST_JAXLIB))
    instruction = next((name for name in _INSTRUCTIONS if name in instructions), None)
    if instruction is None:
        return Bfloat16(False, f"the processor has neither {' nor '.join(_INSTRUCTIONS)}")
    if version[:2] < _FIRST_JAXLIB:
        return Bfloat16(
            False,
            f"the processor has {instruction}, but jaxlib {used} computes most products of bfloat16 in float32. jaxlib"
            f" {first} and later use it",
        )
    return Bfloat16(True, f"the processor has {instruction}, and jaxlib {used} uses it")


@functools.cache
def _instructions() -> frozenset[str]:
    """Lists the instructions that the processor has according to Linux; empty elsewhere."""
    return frozenset(processor_facts().get("flags", "").split())


class LossScale(abc.ABC):
    """Scales the loss before the backward pass, and unscales the gradient after it."""

    @property
    @abc.abstractmethod
    def guards(self) -> tuple[StepGuard, ...]:
        """Guards that track the steps to adjust the scale."""

    @abc.abstractmethod
    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        """The loss multiplied by the scale."""

    @abc.abstractmethod
    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        """The gradient divided by the scale."""


@dataclass(frozen=True)
class Unscaled(LossScale):
    """No loss scaling."""

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        return ()

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        return loss

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        return gradient


class ScaleState(eqx.Module):
    """State of dynamic loss scaling.

    Attributes:
        scale: float32, a power of two.
        good_steps: int32, number of finite steps since the scale last changed.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclass(frozen=True)
class DynamicLossScale(LossScale, StepGuard):
    """Halves the scale after a non-finite step, and doubles it after `growth_interval` finite steps in a row.

    Attributes:
        growth_interval: number of consecutive finite steps before the scale is doubled.
    """

    name: ClassVar[str] = "loss_scale"

    initial: float = 2.0**15
    growth_interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    @property
    def guards(self) -> tuple[StepGuard, ...]:
        return (self,)

    def scaled(self, loss: jax.Array, slots: dict[str, Any]) -> jax.Array:
        return loss * slots[self.name].scale

    def unscaled(self, gradient: T, slots: dict[str, Any]) -> T:
        inverse = 1 / slots[self.name].scale
        return jax.tree.map(lambda g: (g * inverse).astype(g.dtype), gradient)

    def init_slot(self) -> ScaleState:
        return ScaleState(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def judge(self, slot: ScaleState, stats: StepStats) -> Verdict:
        """Updates the scale. Never skips a finite step."""
        good_steps = slot.good_steps + 1
        grows = good_steps >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(slot.scale * 2, self.largest), slot.scale)
        halved = jnp.maximum(slot.scale / 2, self.smallest)
        after = ScaleState(
            scale=jnp.where(stats.finite, grown, halved),
            good_steps=jnp.where(stats.finite & ~grows, good_steps, 0),
        )
        return Verdict(jnp.asarray(True), after, {"train/loss_scale": slot.scale})

    def reason(self, metrics: Mapping[str, float]) -> str | None:
        if is_finite(metrics):
            return None
        return f"the loss scale {metrics['train/loss_scale']:g} may be too large and is halved"


_DTYPES = {
    "f32": jnp.float32,
    "float32": jnp.float32,
    "full": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "f16": jnp.float16,
    "float16": jnp.float16,
    "half": jnp.float16,
    "f64": jnp.float64,
    "float64": jnp.float64,
}
_PARTS = {"p": "params", "params": "params", "c": "compute", "compute": "compute", "o": "output", "output": "output"}


@dataclass(frozen=True)
class PrecisionRuleConfig:
    """The dtypes of the parameters whose path matches.

    Attributes:
        match: regular expression searched for in the paths of parameters.
        params: dtype in which these parameters are stored; null uses that of `default`.
        compute: dtype in which these parameters are used; null uses that of `default`. Matrix products with them are
            computed in this dtype, and their results cast to that of the activations. Activations have the compute
            dtype of the token embedding. The results of a router are not cast.
    """

    match: str
    params: str | None = None
    compute: str | None = None
    key_rules: ClassVar[Rules] = (some_of("params", "compute"),)


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes by parameter path. Parameters that a model computes with in float32, such as the decay rates of a recurrent
    layer, are stored and used in at least float32, also where a rule matches them.

    Attributes:
        default: dtypes of the parameters that no rule matches, as `mp` without a section.
        rules: dtypes of other parameters. Each parameter follows the first rule that matches its path.
    """

    default: str = "f32"
    rules: list[PrecisionRuleConfig] = field(default_factory=list)


@dataclass(frozen=True)
class PathPrecision:
    """The dtypes of the parameters whose path matches a pattern, as in `Precision`."""

    pattern: re.Pattern[str]
    params: jnp.dtype
    compute: jnp.dtype

    def __str__(self) -> str:
        return f"{self.pattern.pattern}: params {self.params.name}, compute {self.compute.name}"


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        params: dtype of stored parameters. Their gradients and the optimizer's state are sums, of at least float32.
        compute: dtype of matrix products and activations. Norms, softmax and the loss are always float32.
        loss_scale: loss scaling, which float16 needs to keep small gradients from underflowing.
        rules: other dtypes of some parameters; the first one that matches a path decides.
        reason: why `auto` is these dtypes; empty if the configuration names them.
    """

    params: jnp.dtype
    compute: jnp.dtype
    loss_scale: LossScale = field(default_factory=Unscaled)
    rules: tuple[PathPrecision, ...] = ()
    reason: str = ""

    def of(self, model: Any) -> Callable[[str], "PathPrecision | Precision"]:
        """Returns path -> what holds the dtypes of the parameter there: the first rule that matches, or this; with at least
        float32 for parameters that their module computes with in float32."""
        float32 = float32_paths(model)

        def at(path: str) -> "PathPrecision | Precision":
            rule = self._rule(path)
            if path not in float32:
                return rule
            return replace(rule, params=sum_dtype(rule.params), compute=sum_dtype(rule.compute))

        return at

    def _rule(self, path: str) -> "PathPrecision | Precision":
        return next((rule for rule in self.rules if rule.pattern.search(path)), self)

    def cast_to_params(self, model: T) -> T:
        """Casts floating-point leaves to their parameter dtype. A `StoredWeight` stays as it is."""
        at = self.of(model)
        return _cast(model, lambda path: at(path).params)

    def cast_to_compute(self, model: T) -> T:
        """Casts floating-point leaves to their compute dtype. A `StoredWeight` stays as it is."""
        at = self.of(model)
        return _cast(model, lambda path: at(path).compute)

    @property
    def for_second_derivatives(self) -> "Precision":
        """The same precision, but with float32 instead of the compute dtypes that need loss scaling.

        The random directions of second derivatives have a norm of about the square root of the number of
        parameters, and float16 overflows at 65,504.
        """
        rules = tuple(replace(rule, compute=_without_float16(rule.compute)) for rule in self.rules)
        return Precision(self.params, _without_float16(self.compute), rules=rules)

    def check(self, models: Sequence[Any]) -> None:
        """Raises `ConfigError` for a rule that decides about no parameter of these models."""
        paths = list(dict.fromkeys(path for model in models for path, leaf in leaves(model) if is_inexact(leaf)))
        free = {path for model in models for path in dict(leaves(model)).keys() - float32_paths(model)}
        for number, rule in enumerate(self.rules):
            key, pattern = f"trainer.mp.rules.{number}.match", rule.pattern.pattern
            matching = [path for path in paths if rule.pattern.search(path)]
            if not matching:
                raise ConfigError(f"{key}: '{pattern}' matches no parameter. {closest_paths(pattern, paths)}")
            if free.isdisjoint(matching) and _is_narrow(rule):
                raise ConfigError(
                    f"{key}: '{pattern}' matches only parameters that the model computes with in float32"
                    f" ({', '.join(matching[:3])}). Remove the rule"
                )
            if all(any(earlier.pattern.search(path) for earlier in self.rules[:number]) for path in matching):
                raise ConfigError(
                    f"{key}: '{pattern}' has no effect, because earlier rules match everything that it matches"
                    f" ({', '.join(matching[:3])}). Put it before them, or remove it"
                )

    def __str__(self) -> str:
        scaled = "" if isinstance(self.loss_scale, Unscaled) else ", dynamic loss scale"
        automatic = f" (auto: {self.reason})" if self.reason else ""
        return f"params {self.params.name}, compute {self.compute.name}{scaled}{automatic}"

    def rows(self, model: Any, device: Any) -> Iterator[tuple[str, str]]:
        """The default dtypes, and those of each rule with the number of parameters that follow it, for the plan's table."""
        yield "precision", str(self)
        if not self.reason and device.platform == "cpu" and has_matrix_instruction():
            yield "bfloat16", f"{bfloat16_products(device).reason} (trainer.mp: auto)"
        arrays = {path: raw(leaf).size for path, leaf in leaves(model) if is_inexact(leaf)}
        own = {path: arrays.pop(path) for path in float32_paths(model) & arrays.keys() if _is_narrow(self._rule(path))}
        for rule in self.rules:
            sizes = [size for path, size in arrays.items() if self._rule(path) is rule]
            yield "precision", f"{rule} ({sum(sizes):,} parameters in {len(sizes)} arrays)"
        if own:
            names = ", ".join(sorted({path.rpartition(".")[2] for path in own}))
            size = f"{sum(own.values()):,} parameters in {len(own)} arrays"
            yield "precision", f"{names}: float32 ({size}, as the model declares)"


def _cast(tree: T, dtype_at: Callable[[str], jnp.dtype]) -> T:
    def cast(path: Any, leaf: Any) -> Any:
        return leaf.astype(dtype_at(dotted(path))) if is_inexact(leaf) else leaf

    is_leaf = lambda node: is_named(node) or isinstance(node, StoredWeight)  # noqa: E731
    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_leaf)


def _is_narrow(dtypes: PathPrecision | Precision) -> bool:
    return any(sum_dtype(dtype) != dtype for dtype in (dtypes.params, dtypes.compute))


def _without_float16(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def parse_precision(mp: str | PrecisionConfig, device: Any = None) -> Precision:
    """Parses `f32`, `bf16`, `p=f32,c=bfloat16[,o=bfloat16]`, `auto`, or a section whose default is one of these.

    Compute defaults to params; the long names `params`, `compute`, `output` work too. A float16 compute dtype turns on
    dynamic loss scaling. The output dtype is accepted for compatibility with other programs, but must equal the compute
    dtype: the loss reads hidden states in the compute dtype and computes in float32. Float16 parameters are an error.

    Args:
        device: what `auto` depends on.
    """
    if isinstance(mp, str):
        return _with_loss_scale(_parse_default(mp, "trainer.mp", device))
    default = _parse_default(mp.default, "trainer.mp.default", device)
    rules = tuple(_parse_rule(rule, default, f"trainer.mp.rules.{n}") for n, rule in enumerate(mp.rules))
    return _with_loss_scale(replace(default, rules=rules))


def _with_loss_scale(precision: Precision) -> Precision:
    needed = jnp.float16 in (precision.compute, *(rule.compute for rule in precision.rules))
    return replace(precision, loss_scale=DynamicLossScale()) if needed else precision


def _parse_default(text: str, key: str, device: Any) -> Precision:
    if "=" not in text and text not in (AUTO, *_DTYPES):
        raise ConfigError(f"{key}: '{text}' has the dtype '{text}'. Allowed: {', '.join((AUTO, *_DTYPES))}")
    if text != AUTO:
        return _parse_dtypes(text, key)
    found = bfloat16_products(device)
    return replace(_parse_dtypes(found.policy, key), reason=found.reason)


def _parse_dtypes(text: str, key: str) -> Precision:
    parts = text.split(",") if "=" in text else [f"params={text}", f"compute={text}"]
    dtypes: dict[str, jnp.dtype] = {}
    for part in parts:
        name, _, value = part.strip().partition("=")
        if name not in _PARTS:
            raise ConfigError(f"{key}: '{text}' has the part '{name}'. Allowed: p=, c=, o= (params, compute, output)")
        dtypes[_PARTS[name]] = _dtype(value.strip(), text, key)
    params = dtypes.get("params", jnp.dtype(jnp.float32))
    compute = dtypes.get("compute", params)
    if dtypes.get("output", compute) != compute:
        raise ConfigError(
            f"{key}: '{text}' sets an output dtype that differs from the compute dtype, which would have no effect:"
            " hidden states stay in the compute dtype and the loss is computed in float32. Remove `o=` or set it to"
            f" {compute.name}"
        )
    _check_storage(params, text, key, "Use 'p=f32,c=float16'")
    return Precision(params, compute)


def _parse_rule(rule: PrecisionRuleConfig, default: Precision, key: str) -> PathPrecision:
    params = default.params if rule.params is None else _dtype(rule.params, rule.params, f"{key}.params")
    compute = default.compute if rule.compute is None else _dtype(rule.compute, rule.compute, f"{key}.compute")
    _check_storage(params, rule.params or "", f"{key}.params", "Use float32 or bfloat16")
    return PathPrecision(compile_pattern(rule.match, f"{key}.match"), params, compute)


def _check_storage(params: jnp.dtype, text: str, key: str, fix: str) -> None:
    if params == jnp.float16:
        raise ConfigError(
            f"{key}: '{text}' stores parameters in float16, where small updates and the optimizer's epsilon underflow."
            f" {fix}"
        )


def _dtype(name: str, text: str, key: str) -> jnp.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"{key}: '{text}' has the dtype '{name}'. Allowed: {', '.join(_DTYPES)}")
    dtype = jnp.dtype(_DTYPES[name])
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ConfigError(f"{key}: '{text}' needs 64-bit arrays. Set JAX_ENABLE_X64=1 in the environment")
    return dtype


FLOAT32 = parse_precision("f32")
"""All in float32."""
