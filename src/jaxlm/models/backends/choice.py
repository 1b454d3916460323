"""Which attention backend runs, decided once from what is known before anything is traced, with the reason in words."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from jaxlm.core.errors import ConfigError
from jaxlm.models.backends.splash import BLOCK as SPLASH_BLOCK

AUTO = "auto"


@dataclass(frozen=True)
class AttentionTask:
    """What a backend must be able to do.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        dtype: of queries, keys and values.
        seq_len: queries a row.
        within_row: queries and keys are the same tokens in the same order; false when decoding with a cache.
        dropout: of attention weights, in training.
    """

    platform: str
    dtype: jnp.dtype
    seq_len: int
    within_row: bool = True
    dropout: float = 0.0


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


def _splash_obstacle(task: AttentionTask) -> str | None:
    if problem := _blocks_obstacle(task):
        return problem
    if task.seq_len % SPLASH_BLOCK:
        return f"seq_len {task.seq_len} is no multiple of {SPLASH_BLOCK}"
    return None


# Best first, for each platform: (name, what it is, what keeps it from a task).
_Backend = tuple[str, str, Callable[[AttentionTask], str | None]]
_BLOCKS: _Backend = ("blocks", "blocks of queries against the keys that they see; no [T, T] array", _blocks_obstacle)
_PLAIN: _Backend = ("plain", "all scores at once", lambda task: None)
_SPLASH: _Backend = ("splash", "jax's Pallas kernel; blocks that the mask hides are skipped", _splash_obstacle)
_BY_PLATFORM: dict[str, tuple[_Backend, ...]] = {
    "cpu": (_BLOCKS, _PLAIN),
    "gpu": (_BLOCKS, _PLAIN),
    "tpu": (_SPLASH, _BLOCKS, _PLAIN),
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
    raise AssertionError("the plain backend can do everything")


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
