"""Builds the annotations of a phase's training data: references, or the model that trains, read every sequence once, before
the first step."""

import functools
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.core.array_digest import array_digest
from jaxlm.core.axes import BATCH, MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import all_processes, broadcast_from_main, main_only
from jaxlm.core.tracing import tracing
from jaxlm.data.annotations import AnnotationFolder, AskingBatches, AwaitedAnnotations
from jaxlm.data.annotations import with_annotations as annotated_data
from jaxlm.data.base import Batches
from jaxlm.data.batch import Columns
from jaxlm.data.data import Data
from jaxlm.data.examples import Examples
from jaxlm.engine.phases import Phase
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.base import ITSELF
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import encode
from jaxlm.session.compilation.step import abstract_batch
from jaxlm.session.references import abstract_annotations, load_reference, references_identity
from jaxlm.session.verification.sanity import check_sanity

Log = Callable[[str], None]
_BLOCK_EXAMPLES = 256  # at most about this much work is lost if the process is killed
_LOG_INTERVAL_S = 10.0


def with_annotations(plan: Plan, phase: Phase, data: Data, log: Log, open_batches: Callable[[], Batches]) -> Data:
    """The phase's data with the annotations that its objective reads from disk; `data` if it reads none.

    Missing annotations are built first; only then are the references loaded. Those of the model that trains are built when
    the first batch is asked for. Call it inside `plan.layout.use()`.

    Args:
        open_batches: opens the phase's batches, for `check_sanity`.
    """
    if phase.objective.annotation_key is None:
        return data
    template = abstract_annotations(plan, phase, abstract_batch(plan, phase))
    if not phase.objective.asks_itself:

        def load() -> dict[str, LanguageModel]:
            refs = {name: load_reference(plan, name, log) for name in phase.objective.references}
            check_sanity(plan, phase, refs, open_batches, log)
            return refs

        return annotated_data(data, _folders(plan, phase, data, template, {}, load, log), template)
    awaited = {name: AwaitedAnnotations() for name in data.train}

    def ask(model: LanguageModel) -> None:
        frozen = phase.split(model)[1]
        facts = {"model": encode(phase.model), "precision": str(plan.precision), "weights": array_digest(frozen)}
        cast = lambda: {ITSELF: jax.jit(plan.precision.cast_to_compute)(model)}  # noqa: E731
        for name, folder in _folders(plan, phase, data, template, facts, cast, log).items():
            awaited[name].cache = folder.open()

    make = lambda reader, context: AskingBatches(data.make_batches(reader, context), ask)  # noqa: E731
    return replace(annotated_data(data, awaited, template), make_batches=make)


def _folders(
    plan: Plan,
    phase: Phase,
    data: Data,
    template: Any,
    facts: Mapping[str, Any],
    load: Callable[[], dict[str, LanguageModel]],
    log: Log,
) -> dict[str, AnnotationFolder]:
    """Source name -> the complete cache of its training examples. What is missing is built.

    Args:
        template: the annotations of a batch {microbatch, batch, ...}, of shapes.
        facts: what determines the annotations besides the references and the objective's key. Plain JSON.
        load: the models that are asked, by name.
    """
    batch_size = plan.batches.train.largest.microbatch  # that of a step, so that the program computes the same
    block_size = batch_size * max(1, _BLOCK_EXAMPLES // batch_size)
    folders = {
        name: AnnotationFolder(examples, _made_from(plan, phase, examples, facts), block_size)
        for name, examples in data.train.items()
    }
    missing = [folder for folder in folders.values() if not all_processes(folder.path.exists())]
    example_bytes = _bytes_per_example(template)
    if missing:
        main_only(lambda: _check_space(missing, example_bytes))
        refs = load()

        @functools.partial(jax.jit, out_shardings=plan.layout.replicated())
        def program(refs: Mapping[str, LanguageModel], batch: Any) -> Any:
            with tracing(quantized_products=phase.objective.asks_itself):  # as in a step
                return phase.objective.annotate(refs, batch).annotations

        def annotate(examples: Examples, indices: np.ndarray) -> Columns:
            """The annotations of consecutive examples, at most a batch of them."""
            read = lambda rows: examples.read(indices[np.minimum(rows, len(indices) - 1)])  # noqa: E731
            batch = data.spec.assemble(read, (hax.Axis(BATCH, batch_size),), plan.layout)
            columns = tree.leaves(program(refs, batch))
            return {path: np.asarray(tree.raw(leaf))[: len(indices)] for path, leaf in columns}

        for folder in missing:
            _build(folder, annotate, batch_size, example_bytes, log)
    for folder in folders.values():
        size = len(folder.examples) * example_bytes / 1e6
        log(
            f"phase '{phase.name}': reads {len(folder.examples):,} stored sequences ({size:,.1f} MB) from {folder.path}"
        )
    return folders


def _bytes_per_example(template: Any) -> int:
    """Args: template: annotations of a batch {microbatch, batch, ...} of shapes."""

    def size(leaf: hax.NamedArray) -> int:
        sizes = [axis.size for axis in leaf.axes if axis.name not in (MICROBATCH, BATCH)]
        return math.prod(sizes) * leaf.dtype.itemsize

    return sum(size(leaf) for _, leaf in tree.leaves(template))


def _check_space(folders: Sequence[AnnotationFolder], example_bytes: int) -> None:
    """Raises `ConfigError` if the missing annotations do not fit on the disk. Blocks that an interrupted build has left are
    kept, or make room."""
    counts = [folder.to_build() for folder in folders]
    needed = sum(num_examples for num_examples, _ in counts) * example_bytes
    where = folders[0].path
    existing = next(parent for parent in where.parents if parent.exists())
    free = shutil.disk_usage(existing).free + sum(num_bytes for _, num_bytes in counts)
    if needed > free:
        raise ConfigError(
            f"objective: what it stores of the training data in {where.parent} needs {needed / 1e9:,.1f} GB, and"
            f" {free / 1e9:,.1f} GB are free. Set objective.cache: false (or use the objective inside of cached_trunk alone),"
            " train on fewer or shorter sequences, or move data.cache_dir"
        )


def _made_from(plan: Plan, phase: Phase, examples: Examples, facts: Mapping[str, Any]) -> dict[str, Any]:
    identity = references_identity(plan)
    starts = examples.starts(np.arange(len(examples)))
    return {
        "references": {name: identity[name] for name in phase.objective.references},
        "objective": dict(phase.objective.annotation_key or {}),
        "tokens": examples.cache.fingerprint,
        "seq_len": examples.seq_len,
        "examples": hashlib.sha256(starts.tobytes()).hexdigest(),
        **examples.arrangement,
        "vocabulary": plan.state_builder.Vocab.size,
        **facts,
    }


def _build(
    folder: AnnotationFolder, annotate: Callable[..., Columns], batch_size: int, example_bytes: int, log: Log
) -> None:
    """Annotates the missing blocks. All processes compute; process 0 writes."""
    with ExitStack() as locked:
        missing = main_only(lambda: locked.enter_context(folder.prepared(log)))
        is_missing = np.zeros(folder.num_blocks, bool)
        is_missing[missing or []] = True
        blocks, started = np.flatnonzero(broadcast_from_main(is_missing)).tolist(), time.perf_counter()
        size, logged = len(folder.examples) * example_bytes, started
        log(
            f"annotating {len(folder.examples):,} sequences into {folder.path} ({size / 1e6:,.1f} MB):"
            f" {len(blocks)} blocks to go"
        )
        for done, number in enumerate(blocks):
            indices = folder.indices(number)
            parts = [
                annotate(folder.examples, indices[at : at + batch_size]) for at in range(0, len(indices), batch_size)
            ]
            columns = {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}
            main_only(functools.partial(folder.write, number, columns))
            if time.perf_counter() - logged > _LOG_INTERVAL_S:
                log(f"annotated {done + 1} of {len(blocks)} blocks")
                logged = time.perf_counter()
        seconds = time.perf_counter() - started
        num_tokens = sum(len(folder.indices(number)) for number in blocks) * folder.examples.seq_len
        log(f"annotated {num_tokens:,} tokens in {seconds:,.1f} s ({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)")
        main_only(folder.finish)
    if not all_processes(folder.path.exists()):
        raise ConfigError(
            f"objective.cache: {folder.path} is not visible to all processes. Set data.cache_dir to a folder that they share"
        )
