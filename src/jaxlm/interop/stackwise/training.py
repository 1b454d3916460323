"""The section `training`: optimizer, batches, steps, devices, checkpoints."""

from typing import Any

from jaxlm.core.errors import shown
from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

_STEPS_PER_STACK = 1000
_OF_SGD = ("momentum", "dampening", "nesterov")


def put_training(training: Section, is_progressive: bool, num_sequences: int | None, out: Translated) -> None:
    """Writes everything but growth and masks. Args: num_sequences: of the training data, if it is known."""
    _optimizer(training.section("optimizer"), out)
    training.ignore("current_block_lr", "no effect: optimizer.lr is the learning rate of all that trains")
    batch_size = training.number("batch_size", 4)
    out.put("trainer.train_batch_size", batch_size, training, "batch_size")
    _steps(training, is_progressive, num_sequences, batch_size, out)
    _devices(training, out)
    _records(training, out)


def _optimizer(optimizer: Section, out: Translated) -> None:
    name = str(optimizer.take("optimizer_type", "AdamW"))
    if name.lower() not in ("adamw", "adam"):
        raise optimizer.error(
            "optimizer_type", f"'{name}' given, which jaxlm cannot do. Set AdamW, or --optimizer.type"
        )
    out.put("optimizer.type", "adam", optimizer, "optimizer_type")
    out.put("optimizer.learning_rate", optimizer.number("lr", 1e-4), optimizer, "lr")
    decay = optimizer.number("weight_decay", 0.1)
    out.put("optimizer.weight_decay", decay, optimizer, "weight_decay")
    if decay:
        out.put("optimizer.default_weight_decay_mask", False, optimizer, "weight_decay")  # norms decay too
        if name.lower() == "adam":
            optimizer.note("weight_decay", "decoupled from the gradient, as in AdamW")
    betas = optimizer.take("betas", [0.9, 0.95])
    if not isinstance(betas, list) or len(betas) != 2:
        raise optimizer.error("betas", f"{shown(betas)} given, a list of two numbers expected")
    for key, value in zip(("beta1", "beta2"), betas, strict=True):
        out.put(f"optimizer.{key}", value, optimizer, "betas")
    out.put("optimizer.epsilon", optimizer.number("eps", 1e-8), optimizer, "eps")
    constant: dict[str, Any] = {"lr_schedule": "constant", "warmup": 0, "max_grad_norm": None}
    for key, value in constant.items():
        out.put(f"optimizer.{key}", value, optimizer, "lr")
    for key in _OF_SGD:
        optimizer.ignore(key, f"no effect with optimizer_type: {name}")
    for key in ("custom_params", "groups"):
        optimizer.refuse(key, "write the keys of optimizer (or optimizer.groups) in the translated file")
    optimizer.refuse("use_groups", "set optimizer.groups in the translated file")
    optimizer.done()


def _steps(
    training: Section, is_progressive: bool, num_sequences: int | None, batch_size: Any, out: Translated
) -> None:
    path = "preset.steps_per_stack" if is_progressive else "trainer.num_train_steps"
    steps, epochs = training.number("max_steps"), training.number("epochs_per_stack")
    if steps is not None:
        out.put(path, steps, training, "max_steps")
        if epochs is not None:
            training.note("epochs_per_stack", f"no effect: max_steps says how long {_of(is_progressive)} trains")
    elif epochs is not None:
        if num_sequences is None:
            raise training.error(
                "epochs_per_stack",
                f"{epochs} given, but the number of sequences in the text is not known here. Set max_steps to the steps of"
                f" {_of(is_progressive)}: epochs times sequences, divided by batch_size",
            )
        out.put(path, max(1, int(epochs * num_sequences // batch_size)), training, "epochs_per_stack")
    elif is_progressive:
        training.note("max_steps", f"missing: each stack trains for {_STEPS_PER_STACK} steps. Set it, or --{path}")
        out.put(path, _STEPS_PER_STACK, training, "max_steps")
    else:
        training.note("max_steps", f"missing: the default of {path} applies. Set it, or --{path}")
    polish = training.number("joint_tuning_steps")
    if is_progressive and polish:
        out.put("preset.polish_steps", polish, training, "joint_tuning_steps")
    elif polish:
        training.note("joint_tuning_steps", "no effect: all stacks train together from the start")


def _of(is_progressive: bool) -> str:
    return "a stack" if is_progressive else "the model"


def _devices(training: Section, out: Translated) -> None:
    device = training.choice("device", ("cuda", "cpu", "auto"))
    if device == "cuda":
        out.put("trainer.require_accelerator", True, training, "device")
    elif device == "cpu":
        out.put("trainer.jax_config.jax_platforms", "cpu", training, "device")
    remat = training.choice("gradient_checkpointing", (True, False))
    if remat is not None:
        out.put("model.gradient_checkpointing", "full" if remat else "none", training, "gradient_checkpointing")


def _records(training: Section, out: Translated) -> None:
    if training.choice("cache_mode", ("stack", "rack")) is not None:
        training.note("cache_mode", "no effect: what a trunk computes is stored for each sequence")
    for key in ("save_stacks", "save_rack"):
        training.ignore(key, "no effect: a checkpoint has the whole model, and is kept at the end of each stack")
    training.ignore("log_interval", "no effect: metrics are logged in every step")
    if (every := training.take("save_interval")) is not None:
        out.put("trainer.checkpointer.keep", [{"every": every}], training, "save_interval")
    if (folder := training.take("checkpoint_dir")) is not None:
        out.put("trainer.checkpointer.base_path", folder, training, "checkpoint_dir")
    if (name := training.take("run_id")) is not None:
        out.put("trainer.id", name, training, "run_id")
    _wandb(training, out)


def _wandb(training: Section, out: Translated) -> None:
    used = training.choice("use_wandb", (True, False), False)
    keys = {"project": "project", "entity": "entity", "run_name": "name", "tags": "tags"}
    if not used:
        for key in keys:
            training.ignore(f"wandb_{key}", "no effect without use_wandb: true")
    given = {new: value for old, new in keys.items() if (value := training.take(f"wandb_{old}"))}
    training.ignore("wandb_notes", "no effect: write a comment in the YAML file instead, which wandb stores")
    if used:
        out.put("trainer.tracker", {"type": "wandb", "project": "stack-wise", **given}, training, "use_wandb")
