"""The rows of phases and evaluations in the tables of a plan and of a run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxlm.core import tree
from jaxlm.core.errors import counted
from jaxlm.core.products.fp8 import has_fp8_products
from jaxlm.engine.phases import Phase
from jaxlm.models.attention.choose import AttentionChoice, choose_attention
from jaxlm.models.base import LanguageModel, with_traits
from jaxlm.models.rows import attention_tasks, stacks_of
from jaxlm.observe.events import HIDDEN_ROW, LAYERS_ROW, TRAINS_ROW
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.schedules import lr_shape_name
from jaxlm.optim.stored_state import describe_state
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import choice_name
from jaxlm.surgery.fp8 import describe_products
from jaxlm.surgery.quantize import describe_stored


def planned_phases(plan: Plan) -> Iterator[tuple[str, str]]:
    """The rows of all phases of a plan: first what each trains, then how its products and weights are special."""
    yield from ((f"phase {phase.name}", describe_phase(phase)) for phase in plan.phases)
    yield from ((f"products of {name}", text) for name, text in fp8_products(plan).items())
    models = {phase.name: plan.state_builder.abstract_state(phase).model for phase in plan.phases}
    yield from (
        (f"parts of {name}", text) for name, model in models.items() if (text := describe_parts(model)) is not None
    )
    yield from ((f"weights of {name}", text) for name, model in models.items() if (text := describe_stored(model)))


def describe_evaluations(plan: Plan) -> str:
    """Which evaluations run, when, and on how much."""
    names = [type(config).__name__.removesuffix("EvalConfig").lower() for config in plan.config.evals]
    trainer = plan.config.trainer
    amount = "all batches" if trainer.max_eval_batches is None else f"at most {trainer.max_eval_batches} batches"
    sizes = " or ".join(dict.fromkeys(str(plan.batches.eval_of(phase)) for phase in plan.phases))
    every = counted(trainer.steps_per_eval, "step")
    return f"{', '.join(names) or 'none'}, on {amount} of {sizes} sequences, every {every}"


def describe_phase(phase: Phase) -> str:
    """Steps, surgeries, objective, optimizer and schedule."""
    optimizer = phase.optimizer
    surgeries = [type(surgery).__name__.removesuffix("Config") for surgery in phase.surgeries]
    after_surgery = f", after {', '.join(surgeries)}" if surgeries else ""
    return (
        f"steps {phase.start} to {phase.end}{after_surgery}; {type(phase.objective).__name__} with"
        f" {type(optimizer).__name__.removesuffix('Config')}, {lr_shape_name(optimizer.lr_schedule)} schedule from"
        f" {optimizer.facts.learning_rate:g}"
    )


def attention_choices(plan: Plan) -> list[AttentionChoice]:
    """The distinct attention backends of the layers of all phases' training steps."""
    tasks: dict[Any, None] = {}
    for phase in plan.phases:
        model = plan.state_builder.abstract_state(phase).model
        of_phase = attention_tasks(phase.model, model, plan.layout, plan.precision)
        tasks |= dict.fromkeys((task, phase.model.attn_backend) for task in of_phase)
        # Whole rows have a backend that can be differentiated twice, on every platform.
        optimizers = (phase.optimizer, *phase.optimizer.groups)
        if plan.layout.context.divides_rows and any(one.facts.second_derivatives for one in optimizers):
            tasks |= dict.fromkeys((dataclasses.replace(task, twice_differentiable=True),) for task in of_phase)
    return [choose_attention(*task) for task in tasks]


def fp8_products(plan: Plan) -> dict[str, str]:
    """Name of a phase that computes in fp8 -> how many layers do."""
    described = {
        phase.name: _fp8_products(phase, plan.state_builder.abstract_state(phase).model) for phase in plan.phases
    }
    emulated = "" if has_fp8_products(plan.layout.device) else "; emulated, because this device has no fp8 products"
    return {name: f"{text}{emulated}" for name, text in described.items() if text is not None}


def _fp8_products(phase: Phase, model: LanguageModel) -> str | None:
    facts = phase.objective.facts
    if model.traits.head_fp8 is None or facts.head_in_fp8:
        return describe_products(model)
    others = describe_products(with_traits(model, head_fp8=None)) or "all in the compute dtype"
    name = choice_name(type(facts.inner or phase.objective))
    return f"{others}, among them the head: objective {name} does not multiply it in fp8"


def describe_parts(model: LanguageModel) -> str | None:
    """The layers that compute a text, by the share of its tokens that is hidden; None if all do."""
    parts, lower, texts = model.traits.denoisers, 0.0, []
    for part in parts:
        last = part.stop - 1
        layers = f"layer {last}" if part.first == last else f"layers {part.first} to {last}"
        texts.append(f"{layers} for {lower:.4g} to {part.max_fraction:.4g}")
        lower = part.max_fraction
    return f"{', '.join(texts)} of the tokens hidden" if parts else None


def phase_rows(plan: Plan, phase: Phase, model: LanguageModel, opt_state: Any) -> list[tuple[str, str]]:
    """The table of a phase that begins or goes on: its steps, its layers from the input to the output, and its parameter
    groups; every parameter is in exactly one of these. The last row is the optimizer state."""
    trainable, frozen = map(tree.num_parameters, phase.split(model))
    sizes, masking = [stack.Layers.size for stack in stacks_of(model)], plan.data[phase.index].batching.masking
    parts = f" ({' + '.join(map(str, sizes))})" if len(sizes) > 1 else ""
    where = "" if plan.layout.optimizer_memory is None else ", in the host's memory between steps"
    return [
        ("steps", f"{phase.start} to {phase.end}"),
        *([(LAYERS_ROW, f"{sum(sizes)}{parts}")] if sizes else []),
        *([] if masking is None else [(HIDDEN_ROW, masking.summary)]),
        (TRAINS_ROW, f"{trainable:,} of {trainable + frozen:,} parameters"),
        *((group.name, _group_row(phase.optimizer, group)) for group in phase.groups(model)),
        ("frozen", f"{frozen:,}"),
        ("optimizer state", describe_state(opt_state, trainable) + where),
    ]


def _group_row(optimizer: OptimizerConfig, group: ParameterGroup) -> str:
    """The size of a group and, if the optimizer has several owners of parameters, how its owner updates it."""
    size = f"{group.num_parameters:,} in {counted(len(group.paths), 'array')}, weight decay {group.weight_decay:g}"
    if group.rule is not None or not optimizer.groups:
        return size
    owner = optimizer if group.owner is None else optimizer.groups[group.owner]
    falls_back = owner.separates_matrices and not group.as_matrices
    rate = getattr(owner, "adam_lr", owner.learning_rate) if falls_back else owner.learning_rate
    rule = f"{choice_name(type(owner))}{', its rule for others' if falls_back else ''}"
    return f"{size}, {rule}, {lr_shape_name(owner.lr_schedule)} schedule from {rate:g}"
