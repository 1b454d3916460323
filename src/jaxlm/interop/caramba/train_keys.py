"""The `train` section of a run: optimizer, precision, batches, objective."""

from typing import Any, Literal

from jaxlm.interop.caramba.distributed import strategy_keys
from jaxlm.interop.caramba.orchestration import put_orchestrator, take_mode
from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

Phase = Literal["standard", "blockwise", "global"]
_OPTIMIZERS = {"adamw": "adam", "adam": "adam", "lion": "lion"}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "none": "constant"}
_DTYPES = {"float32": "f32", "bfloat16": "p=f32,c=bfloat16", "float16": "p=f32,c=float16", "auto": "p=f32,c=bfloat16"}
DEFAULT_BLOCK_SIZE = 512
_ATTENTION = "attn\\."
"""Regular expression on the paths of the parameters that learn in the phase `blockwise`."""
_FIXED = {"ema_decay": 0.99, "window_size": 50}
"""Keys of caramba's detector of spikes that jaxlm's does not have -> their defaults."""
_OF_SANITY_REFERENCE = ("ref_batches", "max_ppl_ratio_vs_ref", "max_nll_delta_vs_ref", "reference_fail_fast")
_SANITY = {"max_loss": ("max_nll", 20.0), "max_perplexity": ("max_ppl", 200.0), "batches": ("batches", 2)}


def put_train(train: Section, place: str, phase: Phase, block_size: Any, out: Translated) -> None:
    """Writes what a run says about its training.

    Args:
        place: what the paths of its own sections begin with: `phases.0.`, or nothing for the top level.
        block_size: of the target's data.
    """
    rate = _optimizer(train, place, phase, out)
    _precision(train, strategy_keys(train, out), out)
    _batches(train, block_size, out)
    _devices(train, out)
    _objective(train, f"{place}objective", phase, rate, out)
    if phase == "blockwise":
        out.put(f"{place}trainable", [_ATTENTION], train, "phase")
    _bookkeeping(train, out)
    train.done()


def _optimizer(train: Section, place: str, phase: Phase, out: Translated) -> float:
    """Returns: the learning rate."""
    path, rate = f"{place}optimizer", train.number("lr", 3e-4)
    mode = take_mode(train)
    peak = rate
    if mode is None:
        _update_rule(train, path, phase, out)
    else:
        peak = rate * put_orchestrator(train, place, phase, mode, out)
    out.put(f"{path}.learning_rate", peak, train, "lr")
    decay = train.take("weight_decay", 0.01)
    out.put(f"{path}.weight_decay", decay, train, "weight_decay")
    if decay:
        out.put(f"{path}.default_weight_decay_mask", False, train, "weight_decay")  # it decays norms and biases too
    out.put(f"{path}.warmup", train.take("warmup_steps", 0), train, "warmup_steps")
    _schedule(train, path, peak, out)
    train.ignore("fused_optimizer", "XLA fuses the update of every optimizer")
    train.refuse("offload_optimizer", "the optimizer's state is on the devices. Use more of them: it is sharded (FSDP)")
    return rate


def _update_rule(train: Section, path: str, phase: Phase, out: Translated) -> None:
    name = train.choice("optimizer", ("adamw", "adam", "lion", "sgd"), "adamw")
    if name == "sgd":
        raise train.error(
            "optimizer",
            "'sgd' given, but of a manifest jaxlm reads adamw and lion. For SGD, convert the manifest, and set optimizer:"
            " {type: portfolio, strategies: {sgd: {type: sgd}}}",
        )
    out.put(f"{path}.type", _OPTIMIZERS[name], train, "optimizer")
    out.put(f"{path}.beta1", train.take("beta1", 0.9), train, "beta1")
    out.put(f"{path}.beta2", train.take("beta2", 0.95), train, "beta2")
    _clip(train, path, phase, out)


def _clip(train: Section, path: str, phase: Phase, out: Translated) -> None:
    both = "grad_clip" in train and "blockwise_grad_clip_norm" in train
    norm, key = train.number("grad_clip", 1.0), "grad_clip"
    if "blockwise_grad_clip_norm" in train and phase == "blockwise":
        key, norm = "blockwise_grad_clip_norm", train.number("blockwise_grad_clip_norm")
        if both:
            raise train.error(key, "given together with grad_clip, which is the same key in jaxlm. Remove one of them")
    else:
        train.ignore("blockwise_grad_clip_norm", f"no effect in the phase {phase}")
    out.put(f"{path}.max_grad_norm", norm or None, train, key)


def _schedule(train: Section, path: str, rate: float, out: Translated) -> None:
    if "lr_schedule" in train and "scheduler" in train:
        raise train.error("scheduler", "given together with lr_schedule, which is the same key. Remove one of them")
    key = "scheduler" if "scheduler" in train else "lr_schedule"
    shape = train.choice(key, _SCHEDULES, "cosine")
    for name in ("lr_schedule", "scheduler"):
        train.take(name)
    out.put(f"{path}.lr_schedule", _SCHEDULES[shape], train, key)
    if "min_lr" in train and "min_lr_ratio" in train:
        raise train.error(
            "min_lr_ratio", "given together with min_lr. Both say where the decay ends: remove one of them"
        )
    ratio, key = train.number("min_lr_ratio"), "min_lr_ratio"
    lowest = train.number("min_lr", 0.0)
    if ratio is None:
        key, ratio = "min_lr", lowest / rate if rate else 0.0
        if not 0 <= lowest <= rate:
            raise train.error(key, f"{lowest!r} given, at least 0 and at most lr ({rate!r}) expected")
    out.put(f"{path}.min_lr_ratio", ratio, train, key)


def _precision(train: Section, sharded_in_bfloat16: bool, out: Translated) -> None:
    """Args: sharded_in_bfloat16: FSDP computes in bfloat16 (`fsdp_mixed_precision`)."""
    given = train.choice("dtype", _DTYPES)
    mixed = train.choice("use_amp", (True, False), False)
    if not mixed and "amp_dtype" in train:
        train.note("amp_dtype", "no effect without use_amp: true")
    amp = train.choice("amp_dtype", ("float16", "bfloat16", "auto"), "float16")
    sharded = "bfloat16" if sharded_in_bfloat16 else None
    asked = {"dtype": given, "distributed.fsdp_mixed_precision": sharded, "amp_dtype": amp if mixed else None}
    asked = {key: value for key, value in asked.items() if value is not None} or {"dtype": "float32"}
    key, dtype = list(asked.items())[-1]
    if others := [f"{name} ({value})" for name, value in asked.items() if _DTYPES[value] != _DTYPES[dtype]]:
        train.note(key, f"the computation is in {dtype}, as this key says, and not as {' or '.join(others)} says")
    elif key == "dtype" and dtype != "float32":
        train.note(key, f"{dtype} is the dtype of the computation ({_DTYPES[dtype]}); parameters stay float32")
    out.put("trainer.mp", _DTYPES[dtype], train, key)


def _batches(train: Section, data_block_size: Any, out: Translated) -> None:
    block_size = train.take("block_size", DEFAULT_BLOCK_SIZE if data_block_size is None else data_block_size)
    if data_block_size not in (None, block_size):
        raise train.error(
            "block_size", f"{block_size!r} given, but data.config.block_size is {data_block_size!r}. Set one"
        )
    out.put("model.seq_len", block_size, train, "block_size")
    for key in ("auto_batch_ref_block_size", "auto_batch_min"):
        train.take(key)
    train.refuse("auto_batch_size", "a run has the batch size that is written. Set batch_size")
    size, parts = train.number("batch_size", 32), train.number("gradient_accumulation_steps", 1)
    if parts == 1:
        out.put("trainer.train_batch_size", size, train, "batch_size")
        return
    out.put("trainer.train_batch_size", size * parts, train, "gradient_accumulation_steps")
    out.put("trainer.max_per_device_parallelism", size, train, "batch_size")
    train.note(
        "gradient_accumulation_steps",
        f"a step reads {size * parts} sequences on all devices together, at most {size} at once on each; their loss is the"
        " mean over all tokens",
    )


def _devices(train: Section, out: Translated) -> None:
    device = train.choice("device", ("mps", "cuda", "cpu"), None)
    if device == "cuda":
        out.put("trainer.require_accelerator", True, train, "device")
    elif device == "cpu":
        out.put("trainer.jax_config.jax_platforms", "cpu", train, "device")
    elif device == "mps":
        train.note("device", "JAX has no backend for mps: the run uses the devices that JAX finds")
    train.ignore("compile_model", "every step is compiled")
    train.ignore("compile_mode", "XLA has one")
    train.ignore("num_workers", "a thread of each process prepares the next batches; caches are made with all cores")
    train.ignore("pin_memory", "batches are copied to the devices while the step before runs")
    checkpoints = train.choice("activation_checkpointing", (True, False))
    if checkpoints is not None:
        out.put("model.gradient_checkpointing", "full" if checkpoints else "none", train, "activation_checkpointing")
    for key in ("activation_checkpoint_threshold", "activation_checkpoint_threshold_mb"):
        if checkpoints:
            train.refuse(
                key,
                "all blocks have activations of the same size, so a threshold means all of them or none. Remove it, or set"
                " activation_checkpointing: false",
                0,
                0.0,
            )
        train.ignore(key, "no effect without activation_checkpointing")


def _objective(train: Section, path: str, phase: Phase, rate: float, out: Translated) -> None:
    if phase == "blockwise":
        _blockwise(train, path, rate, out)
    else:
        out.put(f"{path}.type", "next_token", train, "phase")
        for key in ("target", "patience", "max_steps"):
            train.ignore(f"convergence_{key}", f"no effect in the phase {phase}")
        for key in ("enabled", "mode", "plateau_patience", "lr_decay", "min_lr", "log_every", "spike_std", *_FIXED):
            train.ignore(f"blockwise_autotune_{key}", f"no effect in the phase {phase}")
        train.ignore("blockwise_distill_target", f"no effect in the phase {phase}")
        train.ignore("cache_teacher_outputs", f"no teacher is asked in the phase {phase}")
    train.ignore("blockwise_truncated_forward", "all blocks train at once, on the teacher's inputs")
    train.ignore("blockwise_teacher_cache_max_size", "what a teacher computed is cached on disk")
    train.ignore("blockwise_reset_lr_each_block", "all blocks train at once, each over the whole schedule")


def _blockwise(train: Section, path: str, rate: float, out: Translated) -> None:
    out.put(f"{path}.type", "blockwise", train, "phase")
    out.put(f"{path}.teacher", "teacher", train, "teacher_ckpt")
    target = train.choice("blockwise_distill_target", ("attention", "residual"), "attention")
    out.put(f"{path}.target", target, train, "blockwise_distill_target")
    out.put(f"{path}.order", "parallel", train, "phase")
    train.note("phase", "all blocks train at once (order: parallel): each has the run's steps, as before")
    if "convergence_target" in train or "convergence_max_steps" in train:
        patience = train.take("convergence_patience", 100)
        out.put(f"{path}.convergence.patience", patience, train, "convergence_patience")
        for key in ("target", "max_steps"):
            if (value := train.take(f"convergence_{key}")) is not None:
                out.put(f"{path}.convergence.{key}", value, train, f"convergence_{key}")
    else:
        train.ignore("convergence_patience", "no effect without convergence_target or convergence_max_steps")
        train.take("convergence_target")
        train.take("convergence_max_steps")
    if train.choice("cache_teacher_outputs", (True, False), False):
        out.put(f"{path}.cache", True, train, "cache_teacher_outputs")
    _autotune(train, f"{path}.autotune", rate, out)


def _autotune(train: Section, path: str, rate: float, out: Translated) -> None:
    """Args: rate: the learning rate, of which caramba's lowest one is a part."""
    prefix = "blockwise_autotune_"
    enabled = train.choice(f"{prefix}enabled", (True, False), False)
    given = train.peek(f"{prefix}mode")
    mode = train.choice(f"{prefix}mode", ("off", "monitor", "active"), "monitor")
    train.ignore(f"{prefix}log_every", "metrics of every block are logged in every step")
    if not enabled or mode == "off":
        if mode != "off" and given is not None:
            train.note(f"{prefix}mode", f"no effect without {prefix}enabled: true")
        for name in ("plateau_patience", "lr_decay", "min_lr", "spike_std", *_FIXED):
            train.ignore(f"{prefix}{name}", f"no effect without {prefix}enabled: true")
        return
    out.put(f"{path}.mode", mode, train, f"{prefix}mode")
    defaults = {"patience": ("plateau_patience", 100), "decay": ("lr_decay", 0.5), "spike_std": ("spike_std", 3.0)}
    for new, (old, default) in defaults.items():
        out.put(f"{path}.{new}", train.take(f"{prefix}{old}", default), train, f"{prefix}{old}")
    lowest = train.number(f"{prefix}min_lr", 1e-6)
    if not 0 < lowest <= rate:
        raise train.error(f"{prefix}min_lr", f"{lowest!r} given, above 0 and at most lr ({rate!r}) expected")
    out.put(f"{path}.min_scale", lowest / rate, train, f"{prefix}min_lr")
    for name, fixed in _FIXED.items():
        train.refuse(
            f"{prefix}{name}", f"the detector of spikes has no such key. Remove it, or set it to {fixed}", fixed
        )


def put_sanity(train: Section, out: Translated) -> None:
    """Writes the dtype of a teacher, and what it must be able to do before anything is built on it."""
    dtype = train.peek("dtype")
    out.put("refs.teacher.dtype", "bfloat16" if dtype == "auto" else dtype or "float32", train, "dtype")
    checks = train.choice("teacher_sanity_check", (True, False), True)
    for new, (old, default) in _SANITY.items():
        value = train.take(f"teacher_sanity_{old}", default)
        if checks:
            out.put(f"refs.teacher.sanity.{new}", value, train, f"teacher_sanity_{old}")
    train.ignore("teacher_sanity_batch_size", "the batches are those of the training")
    train.refuse(
        "teacher_sanity_reference",
        "weights are compared with transformers by `jaxlm convert to-hf --verify true`, not at the start of a run",
        "none",
    )
    for key in _OF_SANITY_REFERENCE:
        train.ignore(f"teacher_sanity_{key}", "no effect without teacher_sanity_reference")


def drop_start(train: Section, reason: str) -> None:
    """Takes the keys of what happens once, before the first run of a target that upcycles."""
    for key in ("check", "batches", "batch_size", "max_nll", "max_ppl", "reference", *_OF_SANITY_REFERENCE):
        train.ignore(f"teacher_sanity_{key}", reason)
    for key in ("dba_init", "teacher_rope_base", "teacher_rope_dim"):
        train.ignore(key, reason)


def _bookkeeping(train: Section, out: Translated) -> None:
    resumes = train.choice("auto_resume", (True, False))
    if resumes is False:
        out.put("trainer.load_checkpoint", False, train, "auto_resume")
    train.ignore("skip_if_final", "a run that has ended is not trained again")
    train.ignore("telemetry_interval", "metrics are logged in every step")
    train.refuse("profile_every", "set --trainer.profiler '{start_step: 10, num_steps: 5}'", 0)
    train.ignore("profile_record_shapes", "a profile has the shapes")
