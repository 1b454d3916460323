"""The fields of presets. What they derive is in tests/presets; here, each changes the plan."""

from typing import Any

from jaxlm.plan.plan import Plan
from tests.fields.proofs import Change, Entry, Section, Table, Value


def model(key: str) -> Any:
    """Reads a key of the model from the plan."""
    return lambda plan: getattr(plan.config.model, key)


def microbatches(plan: Plan) -> int:
    return plan.batches.train.first.num_microbatches


def rate_of(match: str) -> Any:
    """Reads the learning rate of an entry of the optimizer's groups from the plan."""
    return lambda plan: next(g.learning_rate for g in plan.config.optimizer.groups if match in g.match)


# The base has a batch of 2^16 tokens, whose square root is 2^-1.5 of that of the reference, and a width of 64.
BATCH, WIDTH = (2**16 / 2**19) ** 0.5, (64 / 768) ** -0.5
LOOKUP = {"model": {"lookup": {"layers": [0]}}}
DIAL: dict[str, Entry] = {
    "preset.depth": Change(3, Value(model("num_layers"), 3)),
    "preset.recipe": Change("seed", Value(model("qk_scale"), 1.0)),
    "preset.aspect_ratio": Change(64, Value(model("hidden_dim"), 128)),
    "preset.head_dim": Change(32, Value(model("num_heads"), 2)),
    "preset.num_iterations": Change(7, Value(lambda plan: plan.num_steps, 7)),
    # A step is 65,536 tokens of 639,408 FLOPs.
    "preset.target_flops": Change(5e12, Value(lambda plan: plan.num_steps, 119)),
    "preset.target_param_data_ratio": Change(8.0, Value(lambda plan: plan.num_steps, 12)),
    "preset.total_batch_size": Change(32768, Value(lambda plan: plan.batches.train.first.size, 2048)),
    "preset.device_batch_size": Change(8, Value(microbatches, 64)),
    "preset.embedding_lr": Change(0.1, Value(rate_of("tokens"), 0.1 * BATCH * WIDTH)),
    "preset.unembedding_lr": Change(0.1, Value(rate_of("head"), 0.1 * BATCH * WIDTH)),
    "preset.matrix_lr": Change(0.1, Value(lambda plan: plan.config.optimizer.learning_rate, 0.1 * BATCH)),
    "preset.lookup_lr": Change(0.1, Value(rate_of("lookups"), 0.1 * BATCH * WIDTH), LOOKUP),
    "preset.scalar_lr": Change(0.1, Value(rate_of("x0"), 0.1 * BATCH)),
    "preset.weight_decay": Change(0.0, Value(lambda plan: plan.config.optimizer.weight_decay, 0.0)),
}


def last(read: Any) -> Any:
    """Reads from the last phase of the plan."""
    return lambda plan: read(plan.phases[-1])


def adapters(number: int, name: str) -> Any:
    """Reads rank or scale of the adapters that a stack of the last phase has."""

    def read(plan: Plan) -> Any:
        state = plan.state_builder.abstract_state(plan.phases[-1])
        layer = state.model.body.stacks[number].layers.stacked.mlp.up_proj
        return layer.a.axis_size("lora_rank") if name == "rank" else layer.scale

    return read


def forms(plan: Plan) -> list[str | None]:
    """In which forms the stacks of the last phase are stored."""
    state = plan.state_builder.abstract_state(plan.phases[-1])
    weights = [stack.layers.stacked.mlp.up_proj.weight for stack in state.model.body.stacks]
    return [getattr(weight, "form", None) for weight in weights]


TRAINABLE = last(lambda phase: list(phase.trainable))
STACKS: dict[str, Entry] = {
    "preset.stacks": Change(4, Value(lambda plan: len(plan.phases), 4)),
    "preset.steps_per_stack": Change(5, Value(lambda plan: plan.num_steps, 15)),
    "preset.layers_per_stack": Change(1, Value(last(lambda phase: phase.model.num_layers), 4)),
    "preset.polish_steps": Change(2, Value(lambda plan: plan.num_steps, 16)),
    "preset.at": Change("prepend", Value(last(lambda phase: phase.surgeries[0].at), "prepend")),
    "preset.init": Change("copy", Value(last(lambda phase: phase.surgeries[0].init), "copy")),
    "preset.trunk": Change("train", Value(TRAINABLE, [".*"])),
    "preset.cache": Change("int8", Value(last(lambda phase: getattr(phase.objective, "int8", None)), True)),
    "preset.train_head": Change(False, Value(TRAINABLE, ["new_stack", "final_norm"])),
    "preset.train_norm": Change(False, Value(TRAINABLE, ["new_stack", "^head"])),
    "preset.train_embeddings": Change(
        True, Value(TRAINABLE, ["new_stack", "final_norm", "^head", "^(tokens|positions)"])
    ),
    "preset.carry_optimizer": Change(True, Value(last(lambda phase: phase.carries_optimizer), True)),
    "preset.lora": Section(),
    "preset.depth_times": Section(),
    "preset.store": Change("nf4", Value(forms, ["nf4", "nf4", None])),
}
ADAPTED: dict[str, Entry] = {
    "preset.lora.rank": Change(4, Value(adapters(0, "rank"), 4)),
    "preset.lora.alpha": Change(16.0, Value(adapters(0, "scale"), 1.0)),
    "preset.lora.rank_pattern": Change("decreasing", Value(adapters(1, "rank"), 8)),
    "preset.lora.alpha_pattern": Change("linear", Value(adapters(1, "scale"), 3.0)),
    "preset.lora.stacks": Change([{"rank": 3, "alpha": 3.0}], Value(adapters(0, "scale"), 1.0)),
}


def times(phase: int) -> Any:
    """Reads the times of a phase."""
    return lambda plan: plan.data[phase].masking.times


TIMED: dict[str, Entry] = {
    "preset.depth_times.order": Change("training", Value(times(0), [0.0, 0.0])),
    "preset.depth_times.mapping": Change([0, 100, 299], Value(times(1), [100 / 299] * 2)),
    "preset.depth_times.time_per_stack": Change(1, Value(times(1), [0.5, 0.5])),
    "preset.depth_times.num_time_steps": Change(4, Value(times(1), [2 / 3, 2 / 3])),
}
TABLE: Table = {"dial": DIAL, "progressive": STACKS, "adapted stacks": ADAPTED, "timed stacks": TIMED}
