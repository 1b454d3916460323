"""The references of a run: checks, shapes, loading, and what they say about a batch."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import haliax as hax
import jax

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.data.base import Log
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.accumulate import microbatch_axis
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import sharded_shapes
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.moe import num_multiplied
from jaxlm.models.step_flops import ModelInStep
from jaxlm.objectives.base import ITSELF
from jaxlm.plan.context.config import check_context
from jaxlm.plan.plan import Plan
from jaxlm.plan.refs.base import Ref

T = TypeVar("T", bound=Any)


def check_references(plan: Plan, tokenizer: Tokenizer, log: Log) -> None:
    """Checks that every reference has the run's tokenizer and vocabulary, and fits its sequences, its mesh and the surgeries
    that read it.

    Raises:
        ConfigError: a reference does not, or there is no model at its path.
    """
    Vocab, names = plan.state_builder.Vocab, {name for one in plan.phases for name in one.objective.facts.references}
    names |= {name for evaluation in plan.config.evals for name in evaluation.scope.references}
    for name, ref in plan.active_refs.items():
        seq_len = max(phase.model.seq_len for phase in plan.phases) if name in names else 0
        check_reference(f"refs.{name}", ref, ref.abstract(Vocab), tokenizer, plan.layout, seq_len, log)
    for phase in plan.phases:
        if phase.surgery_references and not plan.retired_refs.keys() & set(phase.surgery_references):
            refs = {name: plan.refs[name].abstract(Vocab) for name in phase.surgery_references}
            plan.state_builder.check_references(phase, refs)
    for evaluation in plan.config.evals:
        scope = evaluation.scope
        if not scope.references or plan.retired_refs.keys() & set(scope.references):
            continue
        refs = {name: plan.refs[name].abstract(Vocab) for name in scope.references}
        for phase in (phase for phase in plan.phases if scope.includes(phase.name)):
            evaluation.check_model(plan.state_builder.abstract_state(phase).model, refs)


def check_reference(
    key: str, ref: Ref, model: LanguageModel, tokenizer: Tokenizer, layout: Layout, seq_len: int, log: Log
) -> None:
    """Checks that a reference has this tokenizer, reads sequences of this length and fits the mesh.

    Args:
        key: of its section, for messages.
        model: its shapes.

    Raises:
        ConfigError: it does not.
    """
    theirs = ref.tokenizer()
    if theirs is None:
        log(f"{key}: {ref.location} has no tokenizer, so only the size of its vocabulary was checked")
    else:
        _check_same_tokens(key, theirs, tokenizer)
    if model.Pos.size < seq_len:
        raise ConfigError(
            f"{key}.path: {ref.location} reads at most {model.Pos.size} tokens at once, but model.seq_len is {seq_len}. Set"
            f" model.seq_len to {model.Pos.size} or less"
        )
    _check_divides(key, model, layout)
    check_context(model, layout, key)


def _check_same_tokens(key: str, theirs: Tokenizer, ours: Tokenizer) -> None:
    if theirs.fingerprint == ours.fingerprint:
        return
    by_id = [{number: token for token, number in t.vocabulary().items()} for t in (theirs, ours)]
    for number in range(ours.vocab_size):
        their_token, our_token = (tokens.get(number) for tokens in by_id)
        if their_token != our_token:
            raise ConfigError(
                f"{key}.path: the model has another tokenizer: token {number} is {their_token!r} there, and {our_token!r} in"
                " data.tokenizer. Its probabilities would belong to other tokens. Set data.tokenizer to the tokenizer of"
                " the model"
            )


def _check_divides(key: str, model: LanguageModel, layout: Layout) -> None:
    for _, leaf in tree.leaves(model):
        for axis in leaf.axes if tree.is_named(leaf) else ():
            num_shards = layout.num_shards(axis.name)
            if axis.size % num_shards:
                raise ConfigError(
                    f"{key}.path: its axis '{axis.name}' has {axis.size} entries, which do not divide over the {num_shards}"
                    " devices that the axis is sharded over. Change the mesh or trainer.tensor_parallel_axes"
                )


def references_identity(plan: Plan) -> dict[str, dict[str, str]]:
    """Name -> what identifies a reference. Plain JSON."""
    return {
        name: dict(plan.retired_refs[name]) if name in plan.retired_refs else ref.identity()
        for name, ref in plan.refs.items()
    }


def asked_in(plan: Plan, phase: Phase) -> tuple[str, ...]:
    """The references that the phase's step queries; none if their answers come from the disk."""
    facts = phase.objective.facts
    return facts.references if facts.annotation_key is None else ()


def flops_per_token(plan: Plan, phase: Phase) -> FlopsPerToken:
    """FLOPs per training token: the model's, forward and backward, and the forward passes of the references in the step.

    References that the run no longer reads do not count: their files may be gone. Nor do layers whose output is stored.
    """
    Vocab, model = plan.state_builder.Vocab, plan.state_builder.abstract_state(phase).model
    facts, config = phase.objective.facts, phase.model

    def in_step(config: ModelConfig, model: LanguageModel, frozen: Any = None) -> ModelInStep:
        return ModelInStep(config, Vocab.size, model, functools.partial(num_multiplied, model=model), frozen)

    references = [in_step(config, model)] * facts.holds_reference
    for name in asked_in(plan, phase):
        if name in plan.active_refs:
            of_teacher = replace(plan.refs[name].model_config(), seq_len=phase.model.seq_len)
            references.append(in_step(of_teacher, plan.refs[name].abstract(Vocab)))
    return facts.flops(in_step(config, model, phase.split(model)[1]), references)


def abstract_references(plan: Plan, phase: Phase) -> dict[str, LanguageModel]:
    """Shapes, dtypes and shardings of the references that the phase's step queries."""
    return {name: _abstract(plan, name) for name in asked_in(plan, phase)}


def load_references(plan: Plan, phase: Phase, log: Log) -> dict[str, LanguageModel]:
    """Loads the references that the phase's step queries. Call it inside `plan.layout.use()`."""
    return {name: load_reference(plan, name, log) for name in asked_in(plan, phase)}


def load_reference(plan: Plan, name: str, log: Log) -> LanguageModel:
    """Loads a reference. Call it inside `plan.layout.use()`."""
    return plan.refs[name].load(plan.state_builder.Vocab, plan.layout, log)


def abstract_annotations(plan: Plan, phase: Phase, batch: Any) -> Any:
    """Shapes, dtypes and shardings of what the references say about a batch {microbatch, batch, ...} of shapes."""
    refs = {name: _abstract(plan, name) for name in phase.objective.facts.references}
    if phase.objective.facts.asks_itself:
        model = jax.eval_shape(plan.precision.cast_to_compute, plan.state_builder.abstract_state(phase).model)
        refs[ITSELF] = sharded_shapes(model, plan.layout)
    annotations = jax.eval_shape(lambda refs, batch: annotations_of(phase, refs, batch), refs, batch)

    def placed(leaf: hax.NamedArray) -> hax.NamedArray:
        sharding = plan.layout.compute_sharding(leaf.axes)
        return hax.NamedArray(jax.ShapeDtypeStruct(leaf.array.shape, leaf.dtype, sharding=sharding), leaf.axes)  # type: ignore[arg-type]

    return jax.tree.map(placed, annotations, is_leaf=tree.is_named)


def annotated(plan: Plan, phase: Phase, batches: Sequence[T], log: Log) -> Sequence[T]:
    """The batches as the phase's step reads them: with annotations, if it does not query the references itself."""
    if phase.objective.facts.annotation_key is None:
        return batches
    abstract = abstract_annotations(plan, phase, batches[0])
    if phase.objective.facts.asks_itself:  # there is no trained model to ask, and its numbers cost no time
        zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), abstract)
        return [replace(batch, annotations=zeros) for batch in batches]
    refs = {name: load_reference(plan, name, log) for name in phase.objective.facts.references}
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    program = jax.jit(lambda refs, batch: annotations_of(phase, refs, batch), out_shardings=places)
    return [replace(batch, annotations=program(refs, batch)) for batch in batches]


def annotations_of(phase: Phase, refs: Mapping[str, LanguageModel], batch: Any) -> Any:
    """Returns what the references say about a batch {microbatch, batch, ...}. Traceable."""
    return hax.map(lambda part: phase.objective.annotate(refs, part).annotations, microbatch_axis(batch))(batch)


def _abstract(plan: Plan, name: str) -> LanguageModel:
    return sharded_shapes(plan.refs[name].abstract(plan.state_builder.Vocab), plan.layout)
