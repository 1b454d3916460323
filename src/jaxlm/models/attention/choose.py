"""Which attention backend runs, decided once from what is known before anything is traced, with the reason in words."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.models.attention.backends.splash import BLOCK as SPLASH_BLOCK
from jaxlm.models.attention.scores import ScoreRule
from jaxlm.models.attention.selftest import packed_rows_problem, whole_rows_problem

AUTO = "auto"


@dataclass(frozen=True)
class AttentionTask:
    """What a backend must be able to do.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        dtype: of queries, keys and values.
        seq_len: queries a row.
        head_size: features of a head.
        group: query heads a key/value head.
        window: how many tokens a query sees, itself included; None means all.
        capability: of NVIDIA devices, (9, 0) for Hopper.
        within_row: queries and keys are the same tokens in the same order; false when decoding with a cache.
        dropout: of attention weights, in training.
        rule: what becomes of scores before the softmax.
        twice_differentiable: somebody wants second derivatives.
    """

    platform: str
    dtype: jnp.dtype
    seq_len: int
    head_size: int
    group: int = 1
    window: int | None = None
    capability: tuple[int, int] | None = None
    within_row: bool = True
    dropout: float = 0.0
    rule: ScoreRule = field(default_factory=ScoreRule)
    twice_differentiable: bool = False


@dataclass(frozen=True)
class AttentionChoice:
    """The backend that attention runs on.

    Attributes:
        name: of the backend.
        reason: why that one.
        degraded: whether a better one exists for this platform and could not be used.
    """

    name: str
    reason: str
    degraded: bool = False


def _blocks_obstacle(task: AttentionTask) -> str | None:
    if not task.within_row:
        return "queries and keys are not the same tokens"
    if task.dropout:
        return f"attention dropout ({task.dropout:g}) needs all weights at once"
    return None


def _kernel_obstacle(task: AttentionTask) -> str | None:
    """What keeps any fused kernel from it."""
    if problem := _blocks_obstacle(task):
        return problem
    if task.twice_differentiable:
        return "its backward pass has no derivative"
    return None if task.rule.is_plain else f"it does not know {task.rule}"


def _splash_obstacle(task: AttentionTask) -> str | None:
    if problem := _kernel_obstacle(task):
        return problem
    if task.seq_len % SPLASH_BLOCK:
        return f"seq_len {task.seq_len} is no multiple of {SPLASH_BLOCK}"
    return None


_AMPERE, _HOPPER = (8, 0), (9, 0)
_CUDNN_TILE = 8


def _cudnn_rows_obstacle(task: AttentionTask) -> str | None:
    if problem := _kernel_obstacle(task):
        return problem
    if task.capability is None or task.capability < _AMPERE:
        return "it needs an NVIDIA device of compute capability 8.0 or more"
    if task.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it has no {jnp.dtype(task.dtype).name}, only bfloat16 and float16"
    largest = 256 if task.capability >= _HOPPER else 128
    if task.head_size > largest or task.head_size % _CUDNN_TILE:
        return f"head size {task.head_size} is no multiple of {_CUDNN_TILE} up to {largest}"
    if task.seq_len % _CUDNN_TILE:
        return f"seq_len {task.seq_len} is no multiple of {_CUDNN_TILE}"
    return whole_rows_problem(jnp.dtype(task.dtype), task.head_size, task.group, task.window is not None)


def _cudnn_obstacle(task: AttentionTask) -> str | None:
    if problem := _cudnn_rows_obstacle(task):
        return problem
    assert task.capability is not None
    if task.capability < _HOPPER:
        return "packed documents need compute capability 9.0 or more"
    return packed_rows_problem(jnp.dtype(task.dtype), task.head_size, task.group, task.window is not None)


# Best first, for each platform: (name, what it is, what keeps it from a task).
_Backend = tuple[str, str, Callable[[AttentionTask], str | None]]
_BLOCKWISE: _Backend = (
    "blockwise",
    "blocks of queries against the keys that they see; no [T, T] array",
    _blocks_obstacle,
)
_REFERENCE: _Backend = ("reference", "all scores at once", lambda task: None)
_SPLASH: _Backend = ("splash", "jax's Pallas kernel; blocks that the mask hides are skipped", _splash_obstacle)
_CUDNN: _Backend = ("cudnn", "cuDNN's fused kernel, for single and for packed documents", _cudnn_obstacle)
_CUDNN_ROWS: _Backend = (
    "cudnn_rows",
    "cuDNN's fused kernel where rows are single documents, blocks where they are packed",
    _cudnn_rows_obstacle,
)
_BY_PLATFORM: dict[str, tuple[_Backend, ...]] = {
    "cpu": (_BLOCKWISE, _REFERENCE),
    "gpu": (_CUDNN, _CUDNN_ROWS, _BLOCKWISE, _REFERENCE),
    "tpu": (_SPLASH, _BLOCKWISE, _REFERENCE),
}


def choose_attention(task: AttentionTask, wanted: str = AUTO) -> AttentionChoice:
    """The backend for a task: the first of its platform's that can do it, or the one that was asked for.

    Raises:
        ConfigError: the one that was asked for cannot do it, or does not run on this platform.
    """
    candidates = _BY_PLATFORM[task.platform]
    if wanted != AUTO:
        return AttentionChoice(wanted, _asked_for(task, wanted, candidates))
    obstacles: list[str] = []
    for name, what, obstacle in candidates:
        problem = obstacle(task)
        if problem is None:
            return AttentionChoice(name, "; ".join([what, *obstacles]), degraded=bool(obstacles))
        obstacles.append(f"not {name}: {problem}")
    raise AssertionError("the reference backend can do everything")


def _asked_for(task: AttentionTask, wanted: str, candidates: tuple[_Backend, ...]) -> str:
    found = {name: (what, obstacle) for name, what, obstacle in candidates}
    if wanted not in found:
        raise ConfigError(
            f"model.attn_backend: '{wanted}' does not run on {task.platform}. Allowed: {', '.join([AUTO, *found])}"
        )
    what, obstacle = found[wanted]
    problem = obstacle(task)
    if problem is not None and task.within_row:
        raise ConfigError(f"model.attn_backend: '{wanted}' given, but {problem}. Use {AUTO}")
    return f"{what} (model.attn_backend)"
