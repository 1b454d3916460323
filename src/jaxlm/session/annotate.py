"""Builds the annotations of a phase's training data: references, or the model that trains, read each sequence that the
steps will read, once, before the first step."""

import functools
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, MICROBATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import array_digest
from jaxlm.core.runtime import all_processes, broadcast_from_main, from_main, main_only
from jaxlm.core.tracing import tracing
from jaxlm.core.values.logged import Activity
from jaxlm.core.values.permutation import in_text_order
from jaxlm.data.annotations import AnnotationCache, AnnotationFolder, AskingBatches, AwaitedAnnotations
from jaxlm.data.annotations import with_annotations as annotated_data
from jaxlm.data.base import Batches, Log
from jaxlm.data.batch import Columns
from jaxlm.data.data import Data
from jaxlm.data.examples import Examples
from jaxlm.data.loader import BatchContext, BatchReader
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.phases import Phase
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import ITSELF
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import encode
from jaxlm.session.compilation.step import abstract_batch
from jaxlm.session.references import abstract_annotations, load_reference, references_identity
from jaxlm.session.verification import check_sanity

_BLOCK_EXAMPLES = 256  # at most about this much work is lost if the process is killed
_LOG_INTERVAL_S = 10.0


def with_annotations(
    plan: Plan,
    phase: Phase,
    data: Data,
    log: Log,
    report: Callable[..., None],
    open_batches: Callable[[], Batches],
    first_step: int,
    position: Mapping[str, Any],
    clock: ActivityClock,
    check_stop: Callable[[], None],
) -> Data:
    """The phase's data with the annotations that its objective reads from disk; `data` if it reads none.

    Only examples that the remaining steps read are annotated, and only those that have no annotations yet. If there are
    none, the references are not loaded. The model that trains is asked when the first batch is due. Call it inside
    `plan.layout.use()`.

    Args:
        report: receives what is read from disk, as `RunRecords.report`.
        open_batches: opens the phase's batches, for `check_sanity`.
        first_step, position: the step from which the phase is entered or goes on, and the data position there
            (`Batches.state`).
        clock: counts the time as annotation, but that of loading references and compiling.
        check_stop: raises an error on all processes if the run is to stop. Called before each block.
    """
    if phase.objective.facts.annotation_key is None:
        return data
    template = abstract_annotations(plan, phase, abstract_batch(plan, phase))
    annotations = {name: AwaitedAnnotations() for name in data.train}
    schedule, itself = plan.batches.of(phase), phase.objective.facts.asks_itself
    annotator = _Annotator(plan, phase, data, template, log, clock, check_stop)

    def load() -> dict[str, LanguageModel]:
        refs = {name: load_reference(plan, name, log) for name in phase.objective.facts.references}
        check_sanity(plan, phase, refs, open_batches, log)
        return refs

    if not itself:
        mixture = data.mixture(schedule.starting_at(phase.start), seed=plan.config.order_seed)
        first = int(position["examples"])
        annotator.store(mixture.drawn(first, first + schedule.examples_between(first_step, phase.end)), load, {})

    def make(reader: BatchReader, context: BatchContext) -> Batches:
        def ask(model: LanguageModel, step: int, first: int) -> None:
            facts = annotator.identity(model) if itself else {}
            of_model = lambda: {ITSELF: jax.jit(plan.precision.cast_to_compute)(model)}  # noqa: E731
            last = first + schedule.examples_between(step, phase.end)
            folders = annotator.store(reader.mixture.drawn(first, last), of_model if itself else load, facts)
            # Those of the whole phase, also after a resume, if what was read before is stored in the same folder.
            read = reader.mixture.drawn(0, last)
            for name, folder in folders.items():
                annotations[name].cache = cache = _opened(folder)
                count = int(np.count_nonzero(cache.stored(read[name])))
                size = count * annotator.example_bytes / 1e6
                text = f"phase '{phase.name}': reads {count:,} stored sequences ({size:,.1f} MB) from {folder.path}"
                report(step, text, "stored", phase=phase.name, count=count, megabytes=size, folder=str(folder.path))

        return AskingBatches(data.make_batches(reader, context), ask)

    return replace(annotated_data(data, annotations, template), make_batches=make)


def _opened(folder: AnnotationFolder) -> AnnotationCache:
    """Opens what process 0 finds in a folder. Others may list it late, but a file that they ask for by name is there."""
    blocks = from_main(folder.blocks)
    if not all_processes(all(map(folder.has, blocks))):
        raise ConfigError(
            f"objective: not all processes see {folder.path}. Set data.cache_dir to a folder that they share"
        )
    return folder.open(blocks)


@dataclass(frozen=True)
class _Annotator:
    """Asks models about the examples of a phase, and stores the answers. All processes compute; process 0 writes.

    Attributes:
        template: the annotations of a batch {microbatch, batch, ...}, of shapes.
    """

    plan: Plan
    phase: Phase
    data: Data
    template: Any
    log: Log
    clock: ActivityClock
    check_stop: Callable[[], None]

    @property
    def example_bytes(self) -> int:
        def size(leaf: hax.NamedArray) -> int:
            sizes = [axis.size for axis in leaf.axes if axis.name not in (MICROBATCH, BATCH)]
            return math.prod(sizes) * leaf.dtype.itemsize

        return sum(size(leaf) for _, leaf in tree.leaves(self.template))

    @property
    def batch_size(self) -> int:
        """That of a step, so that the program computes the same."""
        return self.plan.batches.of(self.phase).largest.microbatch

    def identity(self, model: LanguageModel) -> dict[str, Any]:
        """Lists what the bits of the model's annotations depend on: its frozen part, and the program. Plain JSON."""
        layout = self.plan.layout
        return {
            "model": encode(self.phase.model),
            "precision": str(self.plan.precision),
            "weights": array_digest(self.phase.split(model)[1]),
            "microbatch": self.batch_size,
            "mesh": dict(layout.mesh.shape),
            "sharding": dict(layout.compute),
            "device": layout.device.device_kind,
            **({"context": encode(layout.context)} if layout.context.axes else {}),
        }

    def store(
        self, drawn: Mapping[str, np.ndarray], load: Callable[[], dict[str, LanguageModel]], facts: Mapping[str, Any]
    ) -> dict[str, AnnotationFolder]:
        """Stores the annotations that are missing.

        Args:
            drawn: source name -> the indices of the examples that need annotations.
            load: the models that are asked, by name.
            facts: what they depend on, besides references and tokens.

        Returns:
            Name of each source that is read -> where its annotations are.
        """
        read = [name for name, indices in drawn.items() if len(indices)]
        folders = {
            name: AnnotationFolder(self.data.train[name], self._made_from(self.data.train[name], facts))
            for name in read
        }
        missing = {name: drawn[name][_missing(folder, drawn[name])] for name, folder in folders.items()}
        if count := sum(map(len, missing.values())):
            main_only(lambda: _check_space(next(iter(folders.values())).path, count * self.example_bytes))
            annotate = self._annotate(load())
            for name in (name for name, indices in missing.items() if len(indices)):
                self._fill(folders[name], drawn[name], annotate)
        return folders

    def _made_from(self, examples: Examples, facts: Mapping[str, Any]) -> dict[str, Any]:
        identity, of_objective = references_identity(self.plan), self.phase.objective.facts
        starts = examples.starts(np.arange(len(examples)))
        return {
            "references": {name: identity[name] for name in of_objective.references},
            "objective": dict(of_objective.annotation_key or {}),
            "tokens": examples.cache.fingerprint,
            "seq_len": examples.seq_len,
            "examples": hashlib.sha256(starts.tobytes()).hexdigest(),
            **examples.arrangement,
            "vocabulary": self.plan.state_builder.Vocab.size,
            **facts,
        }

    def _annotate(self, refs: Mapping[str, LanguageModel]) -> Callable[[Examples, np.ndarray], Columns]:
        """Returns what annotates some examples, at most a batch of them."""
        objective, layout = self.phase.objective, self.plan.layout

        @functools.partial(jax.jit, out_shardings=layout.replicated())
        def program(refs: Mapping[str, LanguageModel], batch: Any) -> Any:
            with tracing(quantized_products=objective.facts.asks_itself):  # as in a step
                annotations = objective.annotate(refs, batch).annotations

            order = getattr(batch, "order", None)  # a batch of your own may have none

            def in_text(leaf: Any) -> Any:
                return in_text_order(leaf, order) if tree.is_named(leaf) and leaf.has_axis(POSITION) else leaf

            return jax.tree.map(in_text, annotations, is_leaf=tree.is_named)

        compiled: list[Callable[..., Any]] = []

        def annotate(examples: Examples, indices: np.ndarray) -> Columns:
            read = lambda rows: examples.read(indices[np.minimum(rows, len(indices) - 1)])  # noqa: E731
            batch = self.data.spec.assemble(read, (hax.Axis(BATCH, self.batch_size),), layout)
            if not compiled:
                with self.clock.during(Activity.COMPILE):
                    compiled.append(program.lower(refs, batch).compile())
            columns = tree.leaves(compiled[0](refs, batch))
            return {path: np.asarray(tree.raw(leaf))[: len(indices)] for path, leaf in columns}

        return annotate

    def _fill(
        self, folder: AnnotationFolder, drawn: np.ndarray, annotate: Callable[[Examples, np.ndarray], Columns]
    ) -> None:
        """Annotates those of the drawn examples that have no annotations, in blocks."""
        with ExitStack() as locked:
            main_only(lambda: locked.enter_context(folder.locked(self.log)))
            missing, started = drawn[_missing(folder, drawn)], time.perf_counter()
            size = self.batch_size * max(1, _BLOCK_EXAMPLES // self.batch_size)
            blocks, logged = [missing[at : at + size] for at in range(0, len(missing), size)], started
            num_bytes = len(missing) * self.example_bytes
            self.log(
                f"annotating {len(missing):,} sequences into {folder.path} ({num_bytes / 1e6:,.1f} MB): the steps read"
                f" {len(drawn):,} of {len(folder.examples):,}, and {len(drawn) - len(missing):,} are there"
            )
            for done, indices in enumerate(blocks):
                self.check_stop()
                with self.clock.during(Activity.ANNOTATION):
                    batches = (indices[at : at + self.batch_size] for at in range(0, len(indices), self.batch_size))
                    parts = [annotate(folder.examples, batch) for batch in batches]
                    columns = {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}
                    main_only(functools.partial(folder.write, indices, columns))
                if time.perf_counter() - logged > _LOG_INTERVAL_S:
                    self.log(f"annotated {done + 1} of {len(blocks)} blocks")
                    logged = time.perf_counter()
            seconds, num_tokens = time.perf_counter() - started, len(missing) * folder.examples.seq_len
            rate = num_tokens / max(seconds, 1e-9)
            self.log(f"annotated {num_tokens:,} tokens in {seconds:,.1f} s ({rate:,.0f} tokens/s)")


def _missing(folder: AnnotationFolder, indices: np.ndarray) -> np.ndarray:
    """bool: for which of some examples process 0 finds no annotations."""
    found = main_only(lambda: folder.missing(indices))
    return broadcast_from_main(np.zeros(len(indices), bool) if found is None else found)


def _check_space(folder: Path, needed: int) -> None:
    """Raises `ConfigError` if the missing annotations do not fit on the disk. Args: needed: their bytes."""
    free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
    if needed > free:
        raise ConfigError(
            f"objective: what it stores of the training data in {folder.parent} needs {needed / 1e9:,.1f} GB, and"
            f" {free / 1e9:,.1f} GB are free. Set objective.cache: false (or use the objective inside of cached_trunk alone),"
            " train on fewer or shorter sequences, or move data.cache_dir"
        )
