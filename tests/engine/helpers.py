"""A tiny run without files: model, mesh, phase and random batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxlm.core.axes import MESH_AXES
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.control import Control, Note
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.engine.hooks import Hooks
from jaxlm.engine.metrics import AsyncMetrics, Listener, Workload
from jaxlm.engine.open_phase import OpenPhase, Probe
from jaxlm.engine.phases import Phase
from jaxlm.engine.preemption import StopRequest
from jaxlm.engine.state import RunState, shardings
from jaxlm.engine.step import StepReport, make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import LanguageModel, ModelConfig, vocab_axis
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.elementwise import AdamConfig

MODEL = LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2)
VOCAB = 64
AXES = {"embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_size": 8, "vocab": VOCAB, "layers": 2}
MESHES = {"fsdp 8": {}, "tp 2 x fsdp 4": {"model": 2}, "hsdp 2 x 4": {"replica": 2}, "ddp 8": {"fsdp": False}}
EVERY_MESH = [
    "fsdp 8",
    "tp 2 x fsdp 4",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("hsdp 2 x 4", "ddp 8")),
]
F32 = Precision(jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))


@lru_cache
def layout(model: int = 1, replica: int = 1, fsdp: bool = True) -> Layout:
    """All simulated devices; the data axis takes those that model and replica leave."""
    shape = mesh_shape(len(jax.devices()), replica=replica, model=model)
    tensor_parallel = ("mlp", "heads") if model > 1 else ()
    return make_layout(shape, AxisMappings("batch", ("embed",) if fsdp else (), tensor_parallel, {}, {}), AXES)


def phase(**changes: Any) -> Phase:
    """Plain pretraining for 20 steps."""
    usual = Phase(0, "train", MODEL, (), (".*",), NextToken(), AdamConfig(learning_rate=1e-2, warmup=0), 0, 20)
    return replace(usual, **changes)


def arrays(seed: int, rows: int = 16) -> dict[str, np.ndarray]:
    """Random tokens with repetitions and unequal masks, {rows, 16}."""
    rng = np.random.default_rng(seed)
    ids = (np.arange(17) * rng.integers(1, 4, (rows, 1)) + rng.integers(0, VOCAB, (rows, 1))) % VOCAB
    mask = (rng.random((rows, 16)) < np.linspace(0.1, 1.0, rows)[:, None]).astype(np.float32)
    return {
        "tokens": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "loss_mask": mask,
        "segment_ids": np.ones((rows, 16), np.int32),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (rows, 16)).copy(),
    }


def batch(columns: dict[str, np.ndarray], where: Layout, num_microbatches: int = 1) -> TokenBatch:
    """The columns as a sharded training batch."""
    rows = columns["tokens"].shape[0]
    axes = (hax.Axis("microbatch", num_microbatches), hax.Axis("batch", rows // num_microbatches), MODEL.Pos)
    place = where.compute_sharding(axes)
    shape = tuple(axis.size for axis in axes)
    return TokenBatch(**{k: hax.named(jax.device_put(v.reshape(shape), place), axes) for k, v in columns.items()})


@lru_cache
def one_device() -> Layout:
    """Only the first device: nothing is sharded."""
    devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
    mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    return Layout(mesh, {"batch": ("replica", "data")}, {"batch": ("replica", "data")})


# Compiled once for all tests that use the same step. Layouts are cached above, so `id` identifies them.
_PROGRAMS: dict[tuple[int, str, Precision], tuple[Any, ...]] = {}


@dataclass
class TinyRun:
    """A state and its step."""

    where: Layout
    phase: Phase = field(default_factory=phase)
    precision: Precision = F32
    model: ModelConfig = MODEL
    vocab: int = VOCAB
    refs: dict[str, LanguageModel] = field(default_factory=dict)
    batch: Callable[[dict[str, np.ndarray], Layout, int], Any] = batch

    def __post_init__(self):
        compiled = (
            replace(self.phase, controllers=()),
            self.phase.controls,
        )  # of controllers, only the controls are compiled
        key = (id(self.where), repr((*compiled, self.model, self.vocab)), self.precision)
        if key not in _PROGRAMS:
            state_builder = StateBuilder(self.model, vocab_axis(self.vocab), 0, self.precision, (self.phase,))
            step = make_train_step(self.phase, self.where, self.precision, state_builder.abstract_state(self.phase))
            with self.where.use():
                state = enter_phase(state_builder, self.phase, self.where, None)()
            host = jax.tree.map(np.asarray, state)
            _PROGRAMS[key] = (state_builder, step, host, shardings(state, self.where), {})
        self.state_builder, self._step, state, places, self._compiled = _PROGRAMS[key]
        self.state: RunState = jax.tree.map(lambda a, place: jax.device_put(a.copy(), place), state, places)
        self._blank = FlagSync.unset(self.where)

    def step(self, columns: dict[str, np.ndarray], num_microbatches: int = 1) -> dict[str, float]:
        """One step on a batch; returns its metrics."""
        inputs = self.batch(columns, self.where, num_microbatches)
        with self.where.use():
            self.state, report = self._program(inputs)(self.state, self.refs, inputs, self._blank)
        return {name: float(value) for name, value in report.metrics.items()}

    def loop_step(self, state: RunState, inputs: Any, flags: jax.Array) -> tuple[RunState, StepReport]:
        """The step as the loop calls it. It is compiled, and refuses arrays of other shapes or shardings."""
        return self._program(inputs)(state, self.refs, inputs, flags)

    def compiled_text(self, columns: dict[str, np.ndarray], num_microbatches: int = 1) -> str:
        """The compiled step, as HLO text."""
        return self._program(self.batch(columns, self.where, num_microbatches)).as_text()

    def lowered_text(self, columns: dict[str, np.ndarray], platform: str) -> str:
        """The step before it is compiled, for another platform."""
        inputs = self.batch(columns, self.where, 1)
        with self.where.use():
            traced = self._step.trace(self.state, self.refs, inputs, self._blank)
            return traced.lower(lowering_platforms=(platform,)).as_text()

    def _program(self, inputs: Any) -> Any:
        """The step compiled for batches of this shape, once for all tests."""
        shape = jax.tree.leaves(inputs)[0].shape
        if shape not in self._compiled:
            with self.where.use():
                self._compiled[shape] = self._step.lower(self.state, self.refs, inputs, self._blank).compile()
        return self._compiled[shape]


WORKLOAD = Workload(BatchSchedule.of([BatchSize(0, 16)]), 16, 1e6 / 16, None, 20)


class Ready:
    """Batches that are ready, as the loop sees them.

    Attributes:
        taken: numbers of the batches, in the order in which they were taken.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches if isinstance(batches, Sequence) else list(batches)
        self._next = 0
        self.taken: list[int] = []

    def __next__(self) -> Any:
        self.taken.append(self._next)
        self._next += 1
        return self._batches[self._next - 1]

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def read_ahead(self) -> None:
        pass

    def due(self, step: int) -> bool:
        return False

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass
class Saver:
    """Requests saves after some steps and at the end, and only tells `on_save` about them."""

    history: History = field(default_factory=History)
    at: tuple[int, ...] = ()
    on_save: Callable[[Any, int], object] = lambda state, step: None
    holds: bool = False
    kept: list[tuple[str, int]] = field(default_factory=list)

    def due_by_clock(self) -> bool:
        return False

    def due_by_step(self, step: int) -> bool:
        return step in self.at

    def is_permanent(self, step: int) -> bool:
        return step in self.at

    def settle(self) -> None:
        pass

    def keep(self, purpose: str, step: int, controller: str | None = None) -> None:
        self.kept.append((purpose, step))

    def save(self, state: Any, step: int, position: Any, *, forced: bool) -> None:
        self.on_save(state, step)


def open_phase(
    where: Layout,
    phase: Phase,
    train_step: Callable[[Any, Any, Any], tuple[Any, Any]],
    batches: Any,
    listen: Listener = lambda info: None,
    saver: Any = None,
    probe: Probe = lambda state, num_batches: 0.0,
    note: Note = lambda step, name, fields: None,
    stop: StopRequest | None = None,
    log: Callable[[str], None] = lambda line: None,
    **hooks: Any,
) -> OpenPhase:
    """A phase with what its loop needs; only its saver writes nothing.

    Args:
        train_step: (state, batch, flags) -> (state, report).
        hooks: arguments of `Hooks`.
    """
    saver = saver or Saver()
    control = Control(phase, saver, where, hooks.get("evaluations"), note)
    metrics = AsyncMetrics(phase.name, WORKLOAD, [listen], decide=control.after_step)
    sync = FlagSync(where, stop or StopRequest())
    clock = ActivityClock()
    return OpenPhase(phase, train_step, batches, metrics, control, saver, sync, clock, log, Hooks(**hooks), probe)


def report(value: Callable[[float], Any] = jnp.asarray) -> StepReport:
    """What a step measures that the loop and its listeners need. Args: value: makes the array of each number."""
    return StepReport({"train/loss": value(1.0), "train/skipped_steps": value(0.0)}, {}, value([0, 0]))  # type: ignore[arg-type]
