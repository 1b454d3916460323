"""Selects the attention backend before tracing, and gives the reason."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import UNDIVIDED, ContextSharding
from jaxlm.models.attention.backends.splash import BLOCK as SPLASH_BLOCK
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.attention.selftest import AttentionShape, selftest_cudnn

AUTO = "auto"
_CUDNN_TILE = 8


@dataclass(frozen=True)
class AttentionTask:
    """Describes what a backend must support.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        dtype: of queries, keys and values.
        seq_len: queries per row.
        head_size: features of queries and keys per head.
        value_size: features of values per head; None means `head_size`.
        group: query heads per key/value head.
        window: number of tokens that a query attends to, including itself; None means all.
        capability: compute capability of an NVIDIA device, (9, 0) for Hopper.
        same_tokens: queries and keys are the same tokens in the same order; false when decoding with a cache.
        causal: a query attends to no later key.
        dropout: dropout probability of the attention weights.
        rule: modifies the scores before the softmax.
        null_slot: every token attends to one more value.
        sink: the softmax has one more term per head, without a value.
        twice_differentiable: second derivatives are needed.
        context: how devices divide the attention of the tokens of a row.
        in_text_order: the tokens are in the order of the text, not in that of `context.balance`.
    """

    platform: str
    dtype: jnp.dtype
    seq_len: int
    head_size: int
    value_size: int | None = None
    group: int = 1
    window: int | None = None
    capability: tuple[int, int] | None = None
    same_tokens: bool = True
    causal: bool = True
    dropout: float = 0.0
    rule: ScoreRule = field(default_factory=ScoreRule)
    null_slot: bool = False
    sink: bool = False
    twice_differentiable: bool = False
    context: ContextSharding = UNDIVIDED
    in_text_order: bool = True

    @property
    def divided(self) -> bool:
        """Tells whether a device has only a part of the keys of a row at a time, in any order."""
        return self.same_tokens and self.context.divides_rows

    @property
    def needs_parts(self) -> bool:
        """Tells whether attention is computed from positions, not from the place of tokens in the row. So is ALiBi after
        devices have exchanged heads, because its slopes are those of a device's own heads."""
        return self.divided or (bool(self.context.heads) and self.rule.alibi_max is not None)

    @property
    def in_zigzag_ring(self) -> bool:
        """Tells whether every hop of the ring needs half of its scores, without a mask or with a causal one."""
        is_zigzag = self.context.balance == "zigzag" and not self.in_text_order
        return bool(self.context.ring) and is_zigzag and self.causal and self.window is None

    @property
    def kernel_size(self) -> int:
        """Features per head as fused kernels see them."""
        return kernel_head_size(self.head_size, self.head_size if self.value_size is None else self.value_size)


def kernel_head_size(head_size: int, value_size: int) -> int:
    """Features per head of fused kernels, which need values as wide as queries and keys: zeros are added to the others."""
    return head_size if head_size == value_size else -(-max(head_size, value_size) // _CUDNN_TILE) * _CUDNN_TILE


@dataclass(frozen=True)
class AttentionChoice:
    """The selected backend.

    Attributes:
        name: name of the backend.
        reason: why it was selected.
        degraded: a faster backend exists for this platform but does not support the task.
    """

    name: str
    reason: str
    degraded: bool = False


def _blockwise_problem(task: AttentionTask) -> str | None:
    if not task.same_tokens:
        return "queries and keys are not the same tokens"
    if task.dropout:
        return f"attention dropout ({task.dropout:g}) needs all weights at once"
    if task.null_slot:
        return "it has no null slot"
    if task.divided and task.twice_differentiable:
        return "it is not twice differentiable if devices divide the tokens of a row"
    return None


def _fused_kernel_problem(task: AttentionTask) -> str | None:
    if problem := _blockwise_problem(task):
        return problem
    if task.twice_differentiable:
        return "its backward pass is not differentiable"
    return None if task.rule.is_identity else f"it does not support {task.rule}"


_NEEDS_ROWS = "devices divide the tokens of a row, and it needs whole rows"


def _splash_problem(task: AttentionTask) -> str | None:
    if problem := _fused_kernel_problem(task):
        return problem
    if task.divided:
        return f"{_NEEDS_ROWS} (trainer.context.method)"
    if task.seq_len % SPLASH_BLOCK:
        return f"seq_len {task.seq_len} is not a multiple of {SPLASH_BLOCK}"
    return None


_AMPERE, _HOPPER = (8, 0), (9, 0)


def _shape(task: AttentionTask) -> AttentionShape:
    windowed = task.window is not None
    return AttentionShape(jnp.dtype(task.dtype), task.kernel_size, task.group, windowed, task.causal, task.sink)


def _cudnn_rows_problem(task: AttentionTask) -> str | None:
    if problem := _fused_kernel_problem(task):
        return problem
    if task.divided and not task.in_zigzag_ring:
        return f"{_NEEDS_ROWS}, or a ring in zigzag order with a causal mask (trainer.context)"
    if task.window is not None and not task.causal:
        return "its windows look only back, and tokens attend to later ones"
    if task.capability is None or task.capability < _AMPERE:
        return "it needs an NVIDIA device of compute capability 8.0 or higher"
    if task.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it does not support {jnp.dtype(task.dtype).name}, only bfloat16 and float16"
    largest = 256 if task.capability >= _HOPPER else 128
    if task.kernel_size > largest or task.kernel_size % _CUDNN_TILE:
        return f"head size {task.kernel_size} is not a multiple of {_CUDNN_TILE} up to {largest}"
    if task.seq_len % _CUDNN_TILE:
        return f"seq_len {task.seq_len} is not a multiple of {_CUDNN_TILE}"
    return selftest_cudnn(_shape(task), packed=False)


def _cudnn_problem(task: AttentionTask) -> str | None:
    if problem := _cudnn_rows_problem(task):
        return problem
    if task.divided:
        return f"{_NEEDS_ROWS} for packed documents"
    assert task.capability is not None
    if task.capability < _HOPPER:
        return "packed documents need compute capability 9.0 or higher"
    return selftest_cudnn(_shape(task), packed=True)


# Name -> (description, function that says why a task is not supported).
_BACKENDS: dict[str, tuple[str, Callable[[AttentionTask], str | None]]] = {
    "blockwise": ("blocks of queries against the keys they attend to; no [T, T] array", _blockwise_problem),
    "reference": ("all scores at once", lambda task: None),
    "splash": ("jax's Pallas kernel; skips fully masked blocks", _splash_problem),
    "cudnn": ("cuDNN's fused kernel, for single and packed documents", _cudnn_problem),
    "cudnn_rows": (
        "cuDNN's fused kernel for rows of a single document, blockwise attention for packed rows",
        _cudnn_rows_problem,
    ),
}
# Fastest first.
_BY_PLATFORM = {
    "cpu": ("blockwise", "reference"),
    "gpu": ("cudnn", "cudnn_rows", "blockwise", "reference"),
    "tpu": ("splash", "blockwise", "reference"),
}


def choose_attention(task: AttentionTask, backend: str = AUTO) -> AttentionChoice:
    """Selects the backend for a task.

    Args:
        backend: a name, or `auto` for the fastest backend of the platform that supports the task.

    Raises:
        ConfigError: the named backend does not support the task, or does not run on this platform.
    """
    if backend != AUTO:
        return AttentionChoice(backend, _check_named(task, backend))
    rejected: list[str] = []
    for name in _BY_PLATFORM[task.platform]:
        description, problem_of = _BACKENDS[name]
        problem = problem_of(task)
        if problem is None:
            return AttentionChoice(name, "; ".join([description, *rejected]), degraded=bool(rejected))
        rejected.append(f"not {name}: {problem}")
    raise AssertionError("the reference backend supports every task")


def _check_named(task: AttentionTask, backend: str) -> str:
    allowed = _BY_PLATFORM[task.platform]
    if backend not in allowed:
        raise ConfigError(
            f"model.attn_backend: '{backend}' does not run on {task.platform}. Allowed: {', '.join([AUTO, *allowed])}"
        )
    description, problem_of = _BACKENDS[backend]
    problem = problem_of(task)
    if problem is not None and task.same_tokens:
        raise ConfigError(f"model.attn_backend: '{backend}' given, but {problem}. Use {AUTO}")
    return f"{description} (model.attn_backend)"
