"""Refuses references that cannot predict the run's text, before anything is built on them."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Batches
from jaxlm.engine.phases import Phase
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.next_token import score_batch
from jaxlm.plan.plan import Plan
from jaxlm.session.references import load_reference

Log = Callable[[str], None]


def check_sanity(
    plan: Plan, phase: Phase, refs: Mapping[str, LanguageModel], open_batches: Callable[[], Batches], log: Log
) -> None:
    """Measures the references on the first batches of a phase that is entered. Call it inside `plan.layout.use()`.

    Those that an earlier phase has read were measured there.

    Args:
        refs: references of the phase by name.
        open_batches: opens the phase's batches at its first step.

    Raises:
        ConfigError: a reference's loss is above its limit (`SanityConfig`). All processes raise it.
    """
    before = {name for earlier in plan.phases[: phase.index] for name in names_read(earlier)}
    for name, model in refs.items():
        sanity = plan.refs[name].config.sanity
        if sanity is None or name in before:
            continue
        if (problem := _problem(plan, phase, model)) is not None:
            log(f"refs.{name}: its loss was not measured: {problem}")
            continue
        with contextlib.closing(open_batches()) as batches:
            loss = mean_loss(model, itertools.islice(iter(lambda: next(batches), None), sanity.batches), plan)
        limit, why = sanity.limit(model.Vocab.size)
        if not loss <= limit:
            raise ConfigError(
                f"refs.{name}: the loss of {plan.refs[name].location} on this run's text is {loss:.4f} nats, and at most"
                f" {limit:.4f} is allowed ({why}). Check that path is the model that you mean, that data.tokenizer is its"
                f" tokenizer, that its weights are complete and in their places (weight_names), and that the text is of a"
                f" kind that it knows. Raise refs.{name}.sanity.max_loss if this loss is right, or set refs.{name}.sanity:"
                " null"
            )
        log(f"refs.{name}: loss {loss:.4f} nats on {sanity.batches} batches, at most {limit:.4f} allowed ({why})")


def check_evaluation_references(plan: Plan, phase: Phase, open_batches: Callable[[], Batches], log: Log) -> None:
    """As `check_sanity`, of the references that only evaluations read. Each is loaded for that, so that a run does not find
    at its end that one cannot be. At the start of a run alone."""
    if phase.index:
        return
    read = {name for one in plan.phases for name in names_read(one)}
    for name in dict.fromkeys(name for evaluation in plan.config.evals for name in evaluation.references):
        if name not in read and plan.refs[name].config.sanity is not None:
            check_sanity(plan, phase, {name: load_reference(plan, name, log)}, open_batches, log)


def names_read(phase: Phase) -> tuple[str, ...]:
    """The references that a phase reads, apart from its evaluations."""
    return (*phase.objective.references, *phase.surgery_references)


def _problem(plan: Plan, phase: Phase, model: LanguageModel) -> str | None:
    """Why a reference cannot be measured on the phase's batches; None if it can."""
    section, seq_len = plan.data[phase.index], phase.model.seq_len
    spec = section.batch_spec(seq_len)
    if not hasattr(batch := spec.make(**dict.fromkeys(spec.columns)), "supervised"):
        return f"{type(batch).__name__} does not say what a model reads"
    if model.Pos.size < seq_len and not model.reads_beyond:
        return f"it reads at most {model.Pos.size} tokens at once, and the batches have sequences of {seq_len}"
    return None


def mean_loss(model: LanguageModel, batches: Iterable, plan: Plan) -> float:
    """Mean next-token loss in nats on training batches {microbatch, batch, ...}, in the dtype of the model."""
    program = jax.jit(_sums, out_shardings=plan.layout.replicated())
    # One at a time: simulated devices deadlock if many are in flight.
    total = sum((np.asarray(program(model, batch), np.float64) for batch in batches), np.zeros(2))
    return float(total[0] / total[1]) if total[1] else math.nan


def _sums(model: LanguageModel, batch) -> jax.Array:
    """float32 [2], the loss of all targets and their number."""

    def add(sums: jax.Array, part) -> jax.Array:
        return sums + score_batch(model, part).sums()

    axes = {axis.name for _, leaf in tree.leaves(batch) if tree.is_named(leaf) for axis in leaf.axes}
    assert MICROBATCH in axes, "a training batch"
    return hax.fold(add, MICROBATCH)(jnp.zeros(2, jnp.float32), batch)
