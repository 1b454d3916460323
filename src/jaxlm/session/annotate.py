"""Builds the annotations of a phase's training data: references, or the model that trains, read each sequence that the
steps will read, once, before the first step."""

import functools
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
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
from jaxlm.data.mixture import Mixture
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

    def load() -> dict[str, LanguageModel]:
        refs = {name: load_reference(plan, name, log) for name in phase.objective.facts.references}
        check_sanity(plan, phase, refs, open_batches, log)
        return refs

    def store(mixture: Mixture, step: int, first: int, model: LanguageModel | None) -> dict[str, AnnotationFolder]:
        """Stores what is missing of the examples that the phase reads from a step on.

        Args:
            first: number of the first example of the step in the stream of the phase.
            model: the one that trains; None if it is not asked.

        Returns:
            Name of each source that is read -> where its annotations are.
        """
        facts, ask = {}, load
        if model is not None:
            facts = _identity(plan, phase, model)
            ask = lambda: {ITSELF: jax.jit(plan.precision.cast_to_compute)(model)}  # noqa: E731
        drawn = mixture.drawn(first, first + schedule.examples_between(step, phase.end))
        folders = {
            name: AnnotationFolder(data.train[name], _made_from(plan, phase, data.train[name], facts))
            for name, indices in drawn.items()
            if len(indices)
        }
        _store_missing(plan, phase, data, template, folders, drawn, ask, log, clock, check_stop)
        return folders

    if not itself:
        mixture = data.mixture(schedule.starting_at(phase.start), seed=plan.config.order_seed)
        store(mixture, first_step, int(position["examples"]), None)

    def make(reader: BatchReader, context: BatchContext) -> Batches:
        def ask(model: LanguageModel, step: int, first: int) -> None:
            folders = store(reader.mixture, step, first, model if itself else None)
            # Those of the whole phase, also after a resume, if what was read before is stored in the same folder.
            read = reader.mixture.drawn(0, first + schedule.examples_between(step, phase.end))
            for name, folder in folders.items():
                annotations[name].cache = cache = _opened(folder)
                count = np.count_nonzero(cache.stored(read[name]))
                size = count * _bytes_per_example(template) / 1e6
                log(f"phase '{phase.name}': reads {count:,} stored sequences ({size:,.1f} MB) from {folder.path}")

        return AskingBatches(data.make_batches(reader, context), ask)

    return replace(annotated_data(data, annotations, template), make_batches=make)


def _identity(plan: Plan, phase: Phase, model: LanguageModel) -> dict[str, Any]:
    """Lists what the bits of the model's annotations depend on: its frozen part, and the program. Plain JSON."""
    layout = plan.layout
    return {
        "model": encode(phase.model),
        "precision": str(plan.precision),
        "weights": array_digest(phase.split(model)[1]),
        "microbatch": plan.batches.of(phase).largest.microbatch,
        "mesh": dict(layout.mesh.shape),
        "sharding": dict(layout.compute),
        "device": layout.device.device_kind,
        **({"context": encode(layout.context)} if layout.context.axes else {}),
    }


def _opened(folder: AnnotationFolder) -> AnnotationCache:
    """Opens what process 0 finds in a folder. Others may list it late, but a file that they ask for by name is there."""
    blocks = from_main(folder.blocks)
    if not all_processes(all(map(folder.has, blocks))):
        raise ConfigError(
            f"objective: {folder.path} is not visible to all processes. Set data.cache_dir to a folder that they share"
        )
    return folder.open(blocks)


def _store_missing(
    plan: Plan,
    phase: Phase,
    data: Data,
    template: Any,
    folders: Mapping[str, AnnotationFolder],
    drawn: Mapping[str, np.ndarray],
    load: Callable[[], dict[str, LanguageModel]],
    log: Log,
    clock: ActivityClock,
    check_stop: Callable[[], None],
) -> None:
    """Annotates the examples that have no annotations yet.

    Args:
        template: the annotations of a batch {microbatch, batch, ...}, of shapes.
        folders: of the sources, by name.
        drawn: source name -> the indices of the examples that need annotations.
        load: the models that are asked, by name.
    """
    missing = {name: drawn[name][_missing(folder, drawn[name])] for name, folder in folders.items()}
    missing = {name: indices for name, indices in missing.items() if len(indices)}
    if not missing:
        return
    example_bytes = _bytes_per_example(template)
    count = sum(map(len, missing.values()))
    main_only(lambda: _check_space(next(iter(folders.values())).path, count * example_bytes))
    batch_size = plan.batches.of(phase).largest.microbatch  # that of a step, so that the program computes the same
    refs = load()

    @functools.partial(jax.jit, out_shardings=plan.layout.replicated())
    def program(refs: Mapping[str, LanguageModel], batch: Any) -> Any:
        with tracing(quantized_products=phase.objective.facts.asks_itself):  # as in a step
            annotations = phase.objective.annotate(refs, batch).annotations

        order = getattr(batch, "order", None)  # a batch of your own may have none

        def in_text(leaf: Any) -> Any:
            return in_text_order(leaf, order) if tree.is_named(leaf) and leaf.has_axis(POSITION) else leaf

        return jax.tree.map(in_text, annotations, is_leaf=tree.is_named)

    compiled: list[Callable[..., Any]] = []

    def annotate(examples: Examples, indices: np.ndarray) -> Columns:
        """The annotations of some examples, at most a batch of them."""
        read = lambda rows: examples.read(indices[np.minimum(rows, len(indices) - 1)])  # noqa: E731
        batch = data.spec.assemble(read, (hax.Axis(BATCH, batch_size),), plan.layout)
        if not compiled:
            with clock.during(Activity.COMPILE):
                compiled.append(program.lower(refs, batch).compile())
        columns = tree.leaves(compiled[0](refs, batch))
        return {path: np.asarray(tree.raw(leaf))[: len(indices)] for path, leaf in columns}

    def write(folder: AnnotationFolder, indices: np.ndarray) -> None:
        check_stop()
        with clock.during(Activity.ANNOTATION):
            parts = [
                annotate(folder.examples, indices[at : at + batch_size]) for at in range(0, len(indices), batch_size)
            ]
            columns = {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}
            main_only(functools.partial(folder.write, indices, columns))

    for name in missing:
        _build(folders[name], drawn[name], write, batch_size, example_bytes, log)


def _missing(folder: AnnotationFolder, indices: np.ndarray) -> np.ndarray:
    """bool: for which of some examples process 0 finds no annotations."""
    found = main_only(lambda: folder.missing(indices))
    return broadcast_from_main(np.zeros(len(indices), bool) if found is None else found)


def _bytes_per_example(template: Any) -> int:
    """Args: template: annotations of a batch {microbatch, batch, ...} of shapes."""

    def size(leaf: hax.NamedArray) -> int:
        sizes = [axis.size for axis in leaf.axes if axis.name not in (MICROBATCH, BATCH)]
        return math.prod(sizes) * leaf.dtype.itemsize

    return sum(size(leaf) for _, leaf in tree.leaves(template))


def _check_space(folder: Path, needed: int) -> None:
    """Raises `ConfigError` if the missing annotations do not fit on the disk. Args: needed: their bytes."""
    free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
    if needed > free:
        raise ConfigError(
            f"objective: what it stores of the training data in {folder.parent} needs {needed / 1e9:,.1f} GB, and"
            f" {free / 1e9:,.1f} GB are free. Set objective.cache: false (or use the objective inside of cached_trunk alone),"
            " train on fewer or shorter sequences, or move data.cache_dir"
        )


def _made_from(plan: Plan, phase: Phase, examples: Examples, facts: Mapping[str, Any]) -> dict[str, Any]:
    identity = references_identity(plan)
    starts = examples.starts(np.arange(len(examples)))
    return {
        "references": {name: identity[name] for name in phase.objective.facts.references},
        "objective": dict(phase.objective.facts.annotation_key or {}),
        "tokens": examples.cache.fingerprint,
        "seq_len": examples.seq_len,
        "examples": hashlib.sha256(starts.tobytes()).hexdigest(),
        **examples.arrangement,
        "vocabulary": plan.state_builder.Vocab.size,
        **facts,
    }


def _build(
    folder: AnnotationFolder,
    drawn: np.ndarray,
    write: Callable[[AnnotationFolder, np.ndarray], None],
    batch_size: int,
    example_bytes: int,
    log: Log,
) -> None:
    """Annotates those of the drawn examples that have no annotations. All processes compute; process 0 writes."""
    with ExitStack() as locked:
        main_only(lambda: locked.enter_context(folder.locked(log)))
        missing, started = drawn[_missing(folder, drawn)], time.perf_counter()
        size = batch_size * max(1, _BLOCK_EXAMPLES // batch_size)
        blocks, logged = [missing[at : at + size] for at in range(0, len(missing), size)], started
        log(
            f"annotating {len(missing):,} sequences into {folder.path} ({len(missing) * example_bytes / 1e6:,.1f} MB): the"
            f" steps read {len(drawn):,} of {len(folder.examples):,}, and {len(drawn) - len(missing):,} are there"
        )
        for done, indices in enumerate(blocks):
            write(folder, indices)
            if time.perf_counter() - logged > _LOG_INTERVAL_S:
                log(f"annotated {done + 1} of {len(blocks)} blocks")
                logged = time.perf_counter()
        seconds, num_tokens = time.perf_counter() - started, len(missing) * folder.examples.seq_len
        log(f"annotated {num_tokens:,} tokens in {seconds:,.1f} s ({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)")
