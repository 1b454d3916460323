"""`jaxlm evaluate --gates`: compares a trained or imported model with references, within limits."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.data import ValidationData
from jaxlm.evals.base import EvalConfig, EvalContext, ValidationSet, failed
from jaxlm.evals.gate import GateConfig
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe.records import finite
from jaxlm.plan.refs.base import Ref, RefConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import load_yaml
from jaxlm.session.load_model import LoadedModel, to_stderr
from jaxlm.session.references import check_reference

_OPTION = "--gates"


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
        _OPTION,
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
    refs = {name: _reference(gates, name) for one in evals for name in one.references}
    abstract = {name: ref.abstract(plan.state_builder.Vocab) for name, ref in refs.items()}
    for name, ref in refs.items():
        check_reference(
            f"refs.{name}", ref, abstract[name], opened.tokenizer, plan.layout, opened.model.seq_len, to_stderr
        )
    with plan.layout.use():
        model = opened.for_inference(options.quantize)
        size = opened.eval_batch if options.batch_size is None else options.batch_size
        arguments = {"batch_size": size, "max_batches": max_batches, "layout": plan.layout}

        def validation_set(one: ValidationData) -> ValidationSet:
            return ValidationSet(one.source.name, tuple(one.source.config.tags), partial(one.batches, **arguments))

        sets = data.open_validation(opened.tokenizer, opened.model.seq_len, to_stderr, separate_cache=True)
        context = EvalContext(
            plan.layout,
            plan.precision,
            opened.tokenizer,
            None,
            tuple(map(validation_set, sets)),
            to_stderr,
            opened.model.seq_len,
            score_batch,
            enforce_bos=opened.adds_bos,
            reference=lambda name: refs[name].load(plan.state_builder.Vocab, plan.layout, to_stderr),
        )
        metrics: dict[str, float] = {}
        for evaluation in evals:
            evaluation.check()
            evaluation.check_models(model, abstract)
            evaluation.check_parts(model)
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
            f"{_OPTION}: {where} has no evaluation that compares with a reference, asks the model or has limits. Give"
            " a file with the sections refs and evals, such as evals: [{type: fidelity}]"
        )
    return gates


def _compares(evaluation: EvalConfig) -> bool:
    """Whether an evaluation is one of those that may compare the model with a reference or with limits."""
    return isinstance(evaluation, GateConfig) or bool(evaluation.references or evaluation.limits.by_metric)


def _reference(gates: Gates, name: str) -> Ref:
    if name not in gates.refs:
        known = ", ".join(gates.refs) or "none"
        raise ConfigError(
            f"{_OPTION}: an evaluation reads the model '{name}', but the section refs only has: {known}. Add it: refs:"
            f" {{{name}: {{type: hf, path: ...}}}}"
        )
    return gates.refs[name].open(f"refs.{name}")


def _print(opened: LoadedModel, metrics: Mapping[str, float], evals: Sequence[EvalConfig]) -> None:
    limits = {name: limit for one in evals for name, limit in one.limits.by_metric.items()}
    width = max(map(len, ["metric", *metrics]))
    print(f"{'metric':<{width}}  {'value':>10}  limit")
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:>10.4g}  {limits.get(name, '')}".rstrip())
    violations = [(one, line) for one in evals for line in one.limits.violations("eval", metrics)]
    for _, line in violations:
        to_stderr(f"warning: {line}")
    numbers = {name: finite(value) for name, value in metrics.items()}
    lines = [line for _, line in violations]
    print(json.dumps({"model": str(opened.location), "metrics": numbers, "violations": lines}))
    if fatal := [line for one, line in violations if one.limits.fail_fast]:
        raise failed(fatal, str(opened.location))
