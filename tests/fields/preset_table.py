"""The fields of presets. What they derive is in tests/presets; here, each changes the plan."""

from typing import Any

from jaxlm.plan.plan import Plan
from tests.fields.proofs import Change, Entry, Table, Value


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
TABLE: Table = {"dial": DIAL}
