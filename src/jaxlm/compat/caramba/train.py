"""Translates the section `train` of a run: optimizer, precision, batches, objective, orchestration, and its devices.

`distributed_strategy`, and the keys of `DistributedConfig`, become keys of jaxlm's mesh. Every strategy computes the same
numbers. They differ in what a device holds: DDP all parameters, FULL_SHARD its share of them, of the gradients and of the
optimizer's state. SHARD_GRAD_OP keeps gathered parameters from the forward to the backward pass; XLA decides that anew for
each program, so it is FULL_SHARD here.
"""

from typing import Any, Literal

from jaxlm.compat.section import Section, Translated

_SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_TORCH_ONLY = {
    "ddp_find_unused_parameters": "gradients are functions of all parameters; those without an effect are zero",
    "ddp_gradient_as_bucket_view": "XLA places the gradients",
    "ddp_static_graph": "the step is compiled once, so its graph is static",
    "ddp_broadcast_buffers": "models have no buffers",
    "fsdp_transformer_layer_cls": "parameters are sharded along the axis trainer.fsdp_axis, not by module",
    "fsdp_min_num_params": "parameters are sharded along the axis trainer.fsdp_axis, not by module",
    "fsdp_auto_wrap_policy": "parameters are sharded along the axis trainer.fsdp_axis, not by module",
    "fsdp_backward_prefetch": "XLA overlaps communication and computation",
    "fsdp_forward_prefetch": "XLA overlaps communication and computation",
    "fsdp_use_orig_params": "parameters are always the model's own",
    "fsdp_sync_module_states": "all processes make the same parameters from the seed",
    "distributed_backend": "JAX chooses how devices communicate",
    "backend": "JAX chooses how devices communicate",
    "init_method": "trainer.distributed says how processes meet",
}


def strategy_keys(train: Section, out: Translated) -> bool:
    """Writes the mesh of a run's `train` section, which may also have a section `distributed`: the keys of a
    `DistributedConfig`.

    Returns:
        Whether the computation is in bfloat16 (`fsdp_mixed_precision`).
    """
    strategy = train.choice("distributed_strategy", ("none", "ddp", "fsdp"))
    train.ignore("distributed_backend", _TORCH_ONLY["distributed_backend"])
    if strategy is not None:
        _put(train, "distributed_strategy", strategy, "FULL_SHARD", out)
    return "distributed" in train and _distributed(train.section("distributed"), out)


def _distributed(config: Section, out: Translated) -> bool:
    strategy = str(config.take("strategy", "ddp")).lower().removeprefix("distributedstrategy.")
    if strategy not in ("none", "ddp", "fsdp"):
        raise config.error("strategy", f"{strategy!r} given. Allowed: none, ddp, fsdp")
    sharding = config.choice("fsdp_sharding_strategy", _SHARDED, "FULL_SHARD")
    _put(config, "strategy", strategy, sharding, out)
    mixed = config.choice("fsdp_mixed_precision", (True, False), False)
    if config.choice("fsdp_activation_checkpointing", (True, False)) and strategy == "fsdp":
        out.put("model.gradient_checkpointing", "full", config, "fsdp_activation_checkpointing")
    config.refuse("fsdp_cpu_offload", "parameters are on the devices. Use more of them: they are sharded")
    for key, reason in _TORCH_ONLY.items():
        config.ignore(key, reason)
    config.done()
    return mixed and strategy == "fsdp"


def _put(section: Section, key: str, strategy: str, sharding: str, out: Translated) -> None:
    if strategy == "ddp" or (strategy == "fsdp" and sharding == "NO_SHARD"):
        out.put("trainer.fsdp_axis", None, section, key)
    elif strategy == "fsdp":
        out.put("trainer.fsdp_axis", "embed", section, key)
        if sharding == "SHARD_GRAD_OP":
            section.note(key, "SHARD_GRAD_OP is read as FULL_SHARD: XLA decides what stays gathered")
        if sharding == "HYBRID_SHARD":  # sharded within a machine, replicated across machines
            out.put("trainer.mesh", {"axes": {"data": -1}, "dcn_axes": {"replica": -1}}, section, key)
    if strategy != "none":
        section.note(key, "batch_size is that of all devices together, whatever their number")


Mode = Literal["active", "monitor"]
_ENABLED, _MODE, _ADAGC = "orchestrator_enabled", "orchestrator_mode", "orchestrator_use_adagc"
_INITIAL, _SAFE = "orchestrator_initial_strategy", "orchestrator_safety_strategy"
_NOWCASTING = "orchestrator_use_nowcasting"
_WARMUP, _THRESHOLD = "orchestrator_adagc_warmup", "orchestrator_adagc_threshold"
_BASE_RATE, _FAIL_FAST = "orchestrator_portfolio_base_lr", "orchestrator_fail_fast"
_CONTROLLER = {
    "interval": ("orchestrator_decision_interval", 500),
    "horizon": ("orchestrator_eval_horizon", 100),
    "max_spikes": ("orchestrator_max_spikes_before_switch", 3),
    "safety.max_loss_increase": ("orchestrator_max_loss_increase", 1.5),
}
"""Keys of the controller -> those of caramba, with their defaults."""
_OF_STRATEGIES = ("optimizer", "beta1", "beta2", "grad_clip", "blockwise_grad_clip_norm")
"""Keys of a single optimizer of which each strategy has its own."""
_USUAL_BASE_RATE = 1e-4
_NOWCAST_WINDOW = 20
_NOWCAST = {"every": 100, "start": 200, "steps": 50}
_ADAGC_DECAY = 0.99
CLIPPED_TOGETHER = {
    "conservative_adamw": {"type": "adamw", "max_grad_norm": 1.0},
    "aggressive_adamw": {"type": "adamw", "lr_scale": 3.0, "max_grad_norm": 5.0},
    "spike_resistant": {"type": "adamw", "lr_scale": 0.3, "max_grad_norm": 0.5},
    "sgd_escape": {"type": "sgd", "swats": True, "nesterov": True, "max_grad_norm": 1.0},
}
"""The strategies of the guide (`optimizer.strategies: guide`) without the AdaGC of spike_resistant, which all have."""
_OF_THE_CODE = "lion_conservative"


def take_mode(train: Section) -> Mode | None:
    """Returns what the orchestrator does; None if there is none. Then none of its keys is left."""
    enabled = train.choice(_ENABLED, (True, False), False)
    mode = train.choice(_MODE, ("active", "monitor", "disabled"))
    if enabled and mode != "disabled":
        return "monitor" if mode == "monitor" else "active"
    if mode is not None and not enabled:
        train.note(_MODE, f"no effect without {_ENABLED}: true")
    others = (_INITIAL, _SAFE, _NOWCASTING, _ADAGC, _WARMUP, _THRESHOLD, _BASE_RATE, _FAIL_FAST)
    for key in (*others, *(old for old, _ in _CONTROLLER.values())):
        train.ignore(key, f"no effect without {_ENABLED}: true" if not enabled else f"no effect with {_MODE}: disabled")
    return None


def put_orchestrator(train: Section, place: str, phase: str, mode: Mode, out: Translated) -> float:
    """Writes the optimizer, without its schedule and weight decay, and the controller.

    Args:
        place: what the paths of the run's own sections begin with: `phases.0.`, or nothing for the top level.

    Returns:
        What the learning rate is multiplied by.
    """
    optimizer, controller = f"{place}optimizer", f"{place or 'trainer.'}controllers.0"
    out.put(f"{optimizer}.type", "portfolio", train, _ENABLED)
    out.put(f"{optimizer}.telemetry", True, train, _ENABLED)
    out.put(f"{optimizer}.initial", _strategy(train, _INITIAL, "conservative_adamw"), train, _INITIAL)
    for key in _OF_STRATEGIES:
        if key in train:
            train.note(key, f"no effect with {_ENABLED}: each strategy has its own. Set optimizer.strategies")
        train.take(key)
    _put_adagc(train, optimizer, out)
    out.put(f"{controller}.type", "orchestrator", train, _ENABLED)
    out.put(f"{controller}.mode", mode, train, _MODE)
    out.put(f"{controller}.safety.strategy", _strategy(train, _SAFE, "spike_resistant"), train, _SAFE)
    for new, (old, default) in _CONTROLLER.items():
        out.put(f"{controller}.{new}", train.take(old, default), train, old)
    if train.choice(_NOWCASTING, (True, False), False):
        if phase == "blockwise":
            raise train.error(
                _NOWCASTING,
                "true given in a blockwise run, whose layers stop at different steps: their weights have no common trend."
                " Remove the key",
            )
        out.put(f"{optimizer}.nowcast", {"window": _NOWCAST_WINDOW}, train, _NOWCASTING)
        out.put(f"{controller}.nowcast", _NOWCAST, train, _NOWCASTING)
    if train.choice(_FAIL_FAST, (True, False), True) is False:
        raise train.error(
            _FAIL_FAST,
            "false given, which jaxlm cannot do: an error of the orchestrator ends the run, as any error does, and the next"
            f" start resumes it. Remove the key, or set {_ENABLED}: false to go on without the orchestrator",
        )
    if mode == "active":
        _check_held_out(train, phase, out)
    base = train.number(_BASE_RATE, _USUAL_BASE_RATE)
    if base <= 0:
        raise train.error(_BASE_RATE, f"{base} given, a number above 0 expected")
    return _USUAL_BASE_RATE / base


def _strategy(train: Section, key: str, default: str) -> str:
    name = train.choice(key, (*CLIPPED_TOGETHER, _OF_THE_CODE), default)
    if name == _OF_THE_CODE:
        train.note(
            key,
            f"the guide has no {name}. Set optimizer.strategies: caramba, which has the strategies of caramba's code",
        )
    return name


def _put_adagc(train: Section, optimizer: str, out: Translated) -> None:
    """Writes AdaGC for all strategies, if the run has it."""
    if not train.choice(_ADAGC, (True, False), False):
        for key in (_WARMUP, _THRESHOLD):
            train.ignore(
                key, f"no effect without {_ADAGC}: true. Of the strategies, spike_resistant alone has AdaGC then"
            )
        return
    out.put(f"{optimizer}.strategies", CLIPPED_TOGETHER, train, _ADAGC)
    out.put(f"{optimizer}.adagc.mode", "zscore", train, _ADAGC)
    out.put(f"{optimizer}.adagc.beta", _ADAGC_DECAY, train, _ADAGC)
    out.put(f"{optimizer}.adagc.threshold", train.take(_THRESHOLD, 3.0), train, _THRESHOLD)
    out.put(f"{optimizer}.adagc.warmup", train.take(_WARMUP, 100), train, _WARMUP)


def _check_held_out(train: Section, phase: str, out: Translated) -> None:
    """Says what is missing to compare strategies.

    Raises:
        ConfigError: the teacher's outputs come from a file that has the training data alone.
    """
    if not out.has("data.num_validation_sequences"):
        train.note(
            _ENABLED,
            "strategies are compared on held-out data, of which the manifest has none. Set defaults.data.val_frac (of a .npy"
            f" file), data.num_validation_sequences or data.validation_urls; or {_MODE}: monitor, which compares nothing",
        )
    if phase == "blockwise" and train.peek("cache_teacher_outputs") is True:
        raise train.error(
            "cache_teacher_outputs",
            f"true given together with {_ENABLED}, which compares strategies on held-out data, but the stored outputs are"
            f" those for the training data. Set it to false, or {_MODE}: monitor",
        )


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
