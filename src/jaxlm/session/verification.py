"""References that are compared before a run relies on them: whether they predict its text, and `jaxlm evaluate --gates`."""

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.axes import MICROBATCH
from jaxlm.core.errors import ConfigError
from jaxlm.data.base import Batches, Log
from jaxlm.data.config import DataConfig
from jaxlm.data.data import ValidationData
from jaxlm.engine.phases import Phase
from jaxlm.evals.base import EvalConfig, EvalContext, ValidationSet, failed
from jaxlm.evals.batches import read_sums
from jaxlm.evals.gate import GateConfig
from jaxlm.models.base import LanguageModel
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe.records import finite
from jaxlm.plan.plan import Plan
from jaxlm.plan.refs.base import Ref, RefConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import load_yaml
from jaxlm.session.load_model import LoadedModel, to_stderr
from jaxlm.session.references import check_reference, load_reference


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
    for name in dict.fromkeys(name for evaluation in plan.config.evals for name in evaluation.scope.references):
        if name not in read and plan.refs[name].config.sanity is not None:
            check_sanity(plan, phase, {name: load_reference(plan, name, log)}, open_batches, log)


def validation_sets(
    data: Iterable[ValidationData], *, progress: Callable[[], object] = lambda: None, **options: Any
) -> tuple[ValidationSet, ...]:
    """What evaluations read. Args: progress: called for each batch. options: of `ValidationData.batches`."""

    def validation_set(one: ValidationData) -> ValidationSet:
        def batches() -> Iterator[Any]:
            for batch in one.batches(**options):
                progress()
                yield batch

        return ValidationSet(one.source.name, tuple(one.source.config.tags), batches)

    return tuple(map(validation_set, data))


def names_read(phase: Phase) -> tuple[str, ...]:
    """The references that a phase reads, apart from its evaluations."""
    return (*phase.objective.facts.references, *phase.surgery_references)


def _problem(plan: Plan, phase: Phase, model: LanguageModel) -> str | None:
    """Explains why a reference cannot be measured on the phase's batches; None if it can."""
    section, seq_len = plan.data[phase.index], phase.model.seq_len
    spec = section.batch_spec(seq_len)
    if not hasattr(batch := spec.make(**dict.fromkeys(spec.columns)), "supervised"):
        return f"{type(batch).__name__} does not say what a model reads"
    if model.Pos.size < seq_len and not model.traits.reads_beyond:
        return f"it reads at most {model.Pos.size} tokens at once, and the batches have sequences of {seq_len}"
    return None


def mean_loss(model: LanguageModel, batches: Iterable, plan: Plan) -> float:
    """Mean next-token loss in nats on training batches {microbatch, batch, ...}, in the dtype of the model."""
    program = jax.jit(_sums, out_shardings=plan.layout.replicated())
    total = read_sums((program(model, batch) for batch in batches), 2)
    return float(total[0] / total[1]) if total[1] else math.nan


def _sums(model: LanguageModel, batch) -> jax.Array:
    """float32 [2], the loss of all targets and their number."""

    def add(sums: jax.Array, part) -> jax.Array:
        return sums + score_batch(model, part).sums()

    axes = {axis.name for _, leaf in tree.leaves(batch) if tree.is_named(leaf) for axis in leaf.axes}
    assert MICROBATCH in axes, "a training batch"
    return hax.fold(add, MICROBATCH)(jnp.zeros(2, jnp.float32), batch)


@dataclass(frozen=True)
class Gates:
    """The file of `--gates`: two sections of a run's configuration.

    Attributes:
        evals: evaluations with limits.
        refs: the models that they read.
    """

    evals: list[EvalConfig]
    refs: dict[str, RefConfig] = field(default_factory=dict)


def add_gate_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--gates`."""
    parser.add_argument(
        "--gates",
        nargs="?",
        const="",
        metavar="FILE",
        help="compare with references instead: run the evaluations of the run's section `evals` that compare, ask or have"
        " limits, or those of a YAML file with the sections `refs` and `evals`. A violated limit with `fail_fast` ends the"
        " command with code 1",
    )


def evaluate_gates(opened: LoadedModel, data: DataConfig, options: argparse.Namespace, max_batches: int | None) -> None:
    """Runs the gates, and prints a table and one JSON line.

    Raises:
        ConfigError: there are none, or one of them does not suit the model.
        GateError: a limit with `fail_fast` is violated. The table is printed before.
    """
    gates, plan = _gates(opened, options.gates), opened.plan
    evals = [evaluation for evaluation in gates.evals if _compares(evaluation)]
    refs = {name: _reference(gates, name) for one in evals for name in one.scope.references}
    abstract = {name: ref.abstract(plan.state_builder.Vocab) for name, ref in refs.items()}
    for name, ref in refs.items():
        check_reference(
            f"refs.{name}", ref, abstract[name], opened.tokenizer, plan.layout, opened.model.seq_len, to_stderr
        )
    with plan.layout.use():
        model = opened.for_inference(options.quantize)
        size = opened.eval_batch if options.batch_size is None else options.batch_size
        sets = data.open_validation(opened.tokenizer, opened.model.seq_len, to_stderr, separate_cache=True)
        context = EvalContext(
            plan.layout,
            plan.precision,
            opened.tokenizer,
            None,
            validation_sets(sets, batch_size=size, max_batches=max_batches, layout=plan.layout),
            to_stderr,
            opened.model.seq_len,
            score_batch,
            enforce_bos=opened.adds_bos,
            reference=lambda name: refs[name].load(plan.state_builder.Vocab, plan.layout, to_stderr),
        )
        metrics: dict[str, float] = {}
        for evaluation in evals:
            evaluation.check()
            evaluation.check_model(model, abstract)
            evaluation.check_opens(lambda: opened.tokenizer, opened.model.seq_len, dry=False)
            metrics |= evaluation.open(context).run(model)
    _print(opened, metrics, evals)


def _gates(opened: LoadedModel, file: str) -> Gates:
    if file:
        gates, where = decode(Gates, load_yaml(file)), file
    else:
        gates = Gates(opened.plan.config.evals, opened.plan.config.refs)
        where = f"the configuration of {opened.location}"
    if not any(map(_compares, gates.evals)):
        raise ConfigError(
            f"--gates: {where} has no evaluation that compares with a reference, asks the model or has limits. Give"
            " a file with the sections refs and evals, such as evals: [{type: fidelity}]"
        )
    return gates


def _compares(evaluation: EvalConfig) -> bool:
    limits = evaluation.metrics.limits.by_metric
    return isinstance(evaluation, GateConfig) or bool(evaluation.scope.references or limits)


def _reference(gates: Gates, name: str) -> Ref:
    if name not in gates.refs:
        known = ", ".join(gates.refs) or "none"
        raise ConfigError(
            f"--gates: an evaluation reads the model '{name}', but the section refs only has: {known}. Add it: refs:"
            f" {{{name}: {{type: hf, path: ...}}}}"
        )
    return gates.refs[name].open(f"refs.{name}")


def _print(opened: LoadedModel, metrics: Mapping[str, float], evals: Sequence[EvalConfig]) -> None:
    limits = {name: limit for one in evals for name, limit in one.metrics.limits.by_metric.items()}
    width = max(map(len, ["metric", *metrics]))
    print(f"{'metric':<{width}}  {'value':>10}  limit")
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:>10.4g}  {limits.get(name, '')}".rstrip())
    violations = [(one, line) for one in evals for line in one.metrics.limits.violations("eval", metrics)]
    for _, line in violations:
        to_stderr(f"warning: {line}")
    numbers = {name: finite(value) for name, value in metrics.items()}
    lines = [line for _, line in violations]
    print(json.dumps({"model": str(opened.location), "metrics": numbers, "violations": lines}))
    if fatal := [line for one, line in violations if one.metrics.limits.fail_fast]:
        raise failed(fatal, str(opened.location))
