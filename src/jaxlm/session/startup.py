"""Checks of a start, and its table: what will run, on which devices, and why each choice was made."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.devices import cuda_capability, peak_flops
from jaxlm.core.errors import ConfigError, counted
from jaxlm.core.exchange import exchange
from jaxlm.core.precision import bfloat16_products, has_matrix_instruction
from jaxlm.core.products.fp8 import has_fp8_products
from jaxlm.core.publish import child_of, is_complete, location_of, names_in
from jaxlm.core.redaction import without_secrets
from jaxlm.core.runtime import differences_between_processes
from jaxlm.core.sharding import axis_mapping_table
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.phases import Phase
from jaxlm.models.attention.choose import AttentionChoice, choose_attention
from jaxlm.models.base import LanguageModel
from jaxlm.models.chunked_loss import default_chunk_tokens
from jaxlm.models.layers import Attention, activation_dtype
from jaxlm.models.moe import num_active
from jaxlm.models.remat import (
    ATTENTION,
    AUTO,
    CANDIDATES,
    CHEAP,
    FULL,
    NONE,
    RESIDUAL,
    RematModules,
    RematOffload,
    parse_remat,
)
from jaxlm.models.scan import runs_as_scan
from jaxlm.models.stacks import HeterogeneousBody, Stack
from jaxlm.observe.console import duration
from jaxlm.observe.environment import JAX_OPTIONS, flags, source_of, source_of_jaxlm, variables
from jaxlm.observe.events import HIDDEN_ROW, LAYERS_ROW, STEPS_ROW, TRAINS_ROW
from jaxlm.observe.trackers import RunInfo
from jaxlm.optim.base import OptimizerConfig, ParameterGroup
from jaxlm.optim.schedules import lr_shape_name
from jaxlm.optim.stored_state import describe_state
from jaxlm.plan.batches import describe_batches
from jaxlm.plan.load_config import run_id_of
from jaxlm.plan.num_steps import describe_data
from jaxlm.plan.plan import Plan
from jaxlm.plan.presets.base import preset_rows
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import own_modules
from jaxlm.reading.decode import choice_name, dump, encode, flattened
from jaxlm.reading.effects import HARMLESS
from jaxlm.session.compilation.options import describe_options, describe_sizes, step_options
from jaxlm.session.init_from import InitFrom
from jaxlm.session.references import asked_in, flops_per_token
from jaxlm.session.resume_checks import computing_numbers, effect_of_fact
from jaxlm.surgery.fp8 import describe_products
from jaxlm.surgery.quantize import describe_stored

LAST_EXPORTED = "config.json"
"""The file that makes an export complete."""

_DETERMINISTIC = "xla_gpu_deterministic_ops"


def describe(plan: Plan, start: str | None = None) -> list[tuple[str, str]]:
    """The plan as rows of name and value. Args: start: what the run starts from; None if only the configuration is known."""
    devices = plan.layout.mesh.devices.ravel()
    model, batches, trainer = plan.phases[0].model, plan.batches, plan.config.trainer
    family, abstract = (
        type(model).__name__.removesuffix("Config"),
        plan.state_builder.abstract_state(plan.phases[0]).model,
    )
    flops = flops_per_token(plan, plan.phases[0]).causal
    references = asked_in(plan, plan.phases[0])
    passes = "forward and backward" + (f", and the forward pass of {' and '.join(references)}" if references else "")
    chunk = step_options(plan).sizes.loss_chunk_tokens or default_chunk_tokens(plan.layout.platform)
    return [
        ("run", f"{plan.run_id} (seed {trainer.seed})"),
        (
            "devices",
            f"{len(devices)} x {devices[0].device_kind} in {counted(jax.process_count(), 'process')}, JAX {jax.__version__}",
        ),
        ("mesh", str(plan.mesh)),
        *[("warning", text) for text in (*plan.warnings, *plan.state_builder.abstract_initial_model.notes)],
        ("parameter sharding", axis_mapping_table(plan.layout.parameter)),
        ("compute sharding", axis_mapping_table(plan.layout.compute)),
        *_precision(plan),
        *repeatability(plan.layout.platform, os.environ.get("XLA_FLAGS", "")),
        ("model", f"{family}, {parameters(abstract)}, vocabulary {plan.state_builder.Vocab.size:,}"),
        ("batch", describe_batches(batches, plan.phases)),
        ("evaluation", f"{_evals(plan)} every {counted(trainer.steps_per_eval, 'step')}"),
        (
            "FLOPs per token",
            f"{flops:.4g} ({passes}, {'causal' if model.is_causal else 'bidirectional'} attention)",
        ),
        ("attention", "; ".join(f"{c.name}: {c.reason}" for c in attention_choices(plan)) or "chosen by the model"),
        *[("context", plan.context.describe()) for _ in [plan.context] if plan.context is not None],
        *[("positions", text) for text in _positions(plan)],
        ("loss", f"chunks of {chunk} tokens, {_logits(plan)}"),
        ("remat", _remat(plan)),
        *[("block sizes", text) for text in [describe_sizes(plan)] if text is not None],
        *[("step options", text) for text in [describe_options(plan)] if text is not None],
        ("layers", _layers(plan)),
        *[(f"phase {phase.name}", describe_phase(phase)) for phase in plan.phases],
        *[(f"products of {name}", text) for name, text in fp8_products(plan).items()],
        *[
            (f"parts of {phase.name}", text)
            for phase in plan.phases
            if (text := describe_parts(plan, phase)) is not None
        ],
        *[(f"weights of {name}", text) for name, text in _stored_weights(plan).items()],
        *[(f"reference {name}", f"{ref.path} in {ref.dtype}") for name, ref in plan.config.refs.items()],
        ("starts from", _configured_start(plan) if start is None else start),
        *[(f"data of {p.name}", describe_data(plan.config, d)) for p, d in zip(plan.phases, plan.data, strict=True)],
        ("checkpoints", _checkpoints(plan)),
        ("logs", str(plan.log_folder)),
        *preset_rows(plan.config.preset, encode(plan.config)),
    ]


def repeatability(platform: str, xla_flags: str) -> list[tuple[str, str]]:
    """Tells whether a resumed run is the same bit for bit, as rows of name and value. Only on GPUs is that a choice."""
    if platform != "gpu":
        return []
    values = [flag.lstrip("-").partition("=")[2] for flag in xla_flags.split() if _DETERMINISTIC in flag]
    if values and values[-1].lower() in ("true", "1", ""):
        return [("repeatable", f"bit for bit (--{_DETERMINISTIC})")]
    hint = f"for bitwise resumption, start with XLA_FLAGS=--{_DETERMINISTIC}=true, which is slower"
    return [("repeatable", f"within rounding, because some GPU kernels add in no fixed order; {hint}")]


def _precision(plan: Plan) -> list[tuple[str, str]]:
    """The default dtypes, and those of each rule with the number of parameters that follow it."""
    precision, model = plan.precision, plan.state_builder.abstract_state(plan.phases[-1]).model
    arrays = [(precision.at(path), tree.raw(leaf)) for path, leaf in tree.leaves(model) if tree.is_inexact(leaf)]
    rows = [("precision", str(precision))]
    if not precision.reason and plan.layout.platform == "cpu" and has_matrix_instruction():
        rows.append(("bfloat16", f"{bfloat16_products(plan.layout.device).reason} (trainer.mp: auto)"))
    for rule in precision.rules:
        sizes = [array.size for decides, array in arrays if decides is rule]
        rows.append(("precision", f"{rule} ({sum(sizes):,} parameters in {len(sizes)} arrays)"))
    return rows


def _evals(plan: Plan) -> str:
    names = [type(config).__name__.removesuffix("EvalConfig").lower() for config in plan.config.evals]
    max_batches = plan.config.trainer.max_eval_batches
    amount = "all batches" if max_batches is None else f"at most {max_batches} batches"
    sizes = " or ".join(dict.fromkeys(str(plan.batches.eval_of(phase)) for phase in plan.phases))
    return f"{', '.join(names) or 'none'}, on {amount} of {sizes} sequences,"


def _logits(plan: Plan) -> str:
    if jax.eval_shape(lambda model: model.lm_head(), plan.state_builder.abstract_initial_model) is None:
        return "from logits that the model materializes in full"
    return "gradient computed in the forward pass, so logits are never materialized in full"


def parameters(model: LanguageModel) -> str:
    """The number of parameters and, if it differs, the number active per token."""
    count, active = tree.num_parameters(model), num_active(model)
    return f"{count:,} parameters" + (f" ({active:,} active per token)" if active < count else "")


def _remat(plan: Plan) -> str:
    remat_policy = parse_remat(plan.phases[0].model.gradient_checkpointing)
    if remat_policy == AUTO:
        return f"auto: the first of {', '.join(CANDIDATES[plan.layout.platform])} that fits into memory"
    descriptions = {
        NONE: "nothing is recomputed",
        CHEAP: "norms and activations are recomputed, matrix products and attention are saved",
        ATTENTION: "everything except each layer's input and attention is recomputed",
        FULL: "everything except each layer's input is recomputed",
    }
    if isinstance(remat_policy, str):
        return descriptions[remat_policy]
    if isinstance(remat_policy, RematModules):
        return f"the modules of each layer that match '{remat_policy.modules}' are recomputed, and nothing else"
    if isinstance(remat_policy, RematOffload):
        saved = ", ".join(name for name in (*remat_policy.save, *remat_policy.offload) if name != RESIDUAL)
        beside = f" and {saved}" if saved else ""
        on_host = ", ".join(remat_policy.offload)
        return f"everything except each layer's input{beside} is recomputed; in the host's memory: {on_host}"
    return f"everything except each layer's input and {', '.join(remat_policy)} is recomputed"


def _layers(plan: Plan) -> str:
    phase, layout = plan.phases[0], plan.layout
    stacks = _stacks(plan.state_builder.abstract_state(phase).model)
    if not stacks:
        return "defined by the model"
    num_layers = sum(stack.Layers.size for stack in stacks)
    scan = phase.model.scan_layers
    policy = parse_remat(phase.model.gradient_checkpointing)
    loop, reason = runs_as_scan(scan, num_layers, policy, platform=layout.platform, num_devices=layout.mesh.size)
    return f"{'one compiled layer in a scan' if loop else 'compiled separately'} ({reason})"


def _stacks(model: LanguageModel) -> list[Stack | HeterogeneousBody]:
    return [*tree.modules(model, Stack), *tree.modules(model, HeterogeneousBody)]


def _positions(plan: Plan) -> Iterator[str]:
    """Says what LongRoPE chooses in training."""
    seq_len = plan.phases[0].model.seq_len
    for length in plan.state_builder.abstract_initial_model.switch_lengths:
        if seq_len <= length:
            yield f"LongRoPE: short factors, because no row is longer than {length:,} tokens"
        else:
            yield f"LongRoPE: short factors for a document of up to {length:,} tokens, long ones for a longer document"


def attention_choices(plan: Plan) -> list[AttentionChoice]:
    """The distinct attention backends of the layers of all phases' training steps."""
    layout, tasks = plan.layout, {}
    context = {"context": layout.context, "in_text_order": layout.context.balance == "none"}
    for phase in plan.phases:
        model = plan.state_builder.abstract_state(phase).model
        dtype = activation_dtype(jax.eval_shape(plan.precision.cast_to_compute, model))
        shared = (layout.platform, cuda_capability(layout.device), dtype, phase.model.seq_len)
        of_phase = [
            dataclasses.replace(layer.task(*shared, kind.window), **context)
            for stack in _stacks(model)
            for layer in tree.modules(stack, Attention)
            for kind in stack.kinds
        ]
        tasks |= dict.fromkeys((task, phase.model.attn_backend) for task in of_phase)
        # Whole rows have a backend that can be differentiated twice, on every platform.
        optimizers = (phase.optimizer, *phase.optimizer.groups)
        if layout.context.divides_rows and any(one.takes_second_derivatives for one in optimizers):
            tasks |= dict.fromkeys((dataclasses.replace(task, twice_differentiable=True),) for task in of_phase)
    return [choose_attention(*task) for task in tasks]


def fp8_products(plan: Plan) -> dict[str, str]:
    """Name of a phase that computes in fp8 -> how many layers do."""
    described = {
        phase.name: _fp8_products(phase, plan.state_builder.abstract_state(phase).model) for phase in plan.phases
    }
    emulated = "" if has_fp8_products(plan.layout.device) else "; emulated, because this device has no fp8 products"
    return {name: f"{text}{emulated}" for name, text in described.items() if text is not None}


def _stored_weights(plan: Plan) -> dict[str, str]:
    texts = {phase.name: describe_stored(plan.state_builder.abstract_state(phase).model) for phase in plan.phases}
    return {name: text for name, text in texts.items() if text is not None}


def describe_parts(plan: Plan, phase: Phase) -> str | None:
    """The layers that compute a text, by the share of its tokens that is hidden; None if all do."""
    parts, lower, texts = plan.state_builder.abstract_state(phase).model.denoisers, 0.0, []
    for part in parts:
        last = part.stop - 1
        layers = f"layer {last}" if part.first == last else f"layers {part.first} to {last}"
        texts.append(f"{layers} for {lower:.4g} to {part.max_fraction:.4g}")
        lower = part.max_fraction
    return f"{', '.join(texts)} of the tokens hidden" if parts else None


def _fp8_products(phase: Phase, model: LanguageModel) -> str | None:
    facts = phase.objective.facts
    if model.head_fp8 is None or facts.head_in_fp8:
        return describe_products(model)
    others = describe_products(dataclasses.replace(model, head_fp8=None)) or "all in the compute dtype"
    name = choice_name(type(facts.inner or phase.objective))
    return f"{others}, among them the head: objective {name} does not multiply it in fp8"


def check_performance(plan: Plan) -> None:
    """With `trainer.strict_performance`, raises `ConfigError` for an attention backend or dtype slower than necessary, and
    for emulated fp8."""
    slow = [f"attention uses the {c.name} backend: {c.reason}" for c in attention_choices(plan) if c.degraded]
    if plan.layout.platform != "cpu" and plan.precision.compute.itemsize > 2:
        slow.append(
            f"the compute dtype is {plan.precision.compute.name}: trainer.mp 'p=f32,c=bfloat16' is several times faster"
        )
    if not has_fp8_products(plan.layout.device):
        slow += [f"phase '{name}': {text}" for name, text in fp8_products(plan).items()]
    if plan.config.trainer.strict_performance and slow:
        raise ConfigError(f"trainer.strict_performance: {'; '.join(slow)}")


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


def _configured_start(plan: Plan) -> str:
    trainer = plan.config.trainer
    descriptions = {True: "a checkpoint (required)", False: "no checkpoint", None: "its own checkpoint, if it has one"}
    others = {
        "else the state at": trainer.load_checkpoint_path or trainer.initialize_from_state,
        "else the model at": trainer.initialize_from,
    }
    parts = [
        descriptions[trainer.load_checkpoint],
        *(f"{what} {path}" for what, path in others.items() if path is not None),
    ]
    return "; ".join(parts) + (" (missing arrays are newly initialized)" if trainer.allow_partial_checkpoint else "")


def check_same_start(config: RunConfig, run_id: str) -> None:
    """Raises `ConfigError` on every process if the processes run different code or configurations.

    Each process compiles its own program and reads its own part of the data. Programs that differ wait for each other for
    ever, or train on a mixture of both.
    """
    if exchange() is None:
        return
    _compare(_start_facts(config, run_id))
    # Only now: processes that were started for different platforms wait for each other when they open their devices.
    _compare(_device_facts(config))


def _compare(facts: Mapping[str, str]) -> None:
    different = differences_between_processes(facts)
    if different:
        raise ConfigError(
            "the processes of this run were not started with the same configuration, code and environment:\n"
            + "\n".join(f"  {line}" for line in different)
            + "\nStart the same command, with the same files, versions and environment variables, on machines with the same"
            " devices"
        )


# Keys that may differ between machines. What they name is compared by content, or only used by process 0.
_LOCAL_KEYS = re.compile(
    r"config\.(trainer\.(log_dir|compilation_cache_dir|checkpointer\.staging_dir|(distributed|tracker|callbacks|ray)\b.*)|.*(cache_dir|cache_mirror_gb|_urls))"
)


def _start_facts(config: RunConfig, run_id: str) -> dict[str, str]:
    """Everything that shapes the program and the order of the data, as name -> text."""
    flat = {key: json.dumps(value, default=str) for key, value in flattened(encode(config), "config")}
    return {
        **{key.removeprefix("config."): value for key, value in flat.items() if not _LOCAL_KEYS.fullmatch(key)},
        "trainer.id": run_id,
        "source of jaxlm": source_of_jaxlm(),
        **{f"source of {name}": source_of(name) for name in sorted(own_modules(config))},
        **{f"version of {name}": version(name) for name in ("jax", "jaxlib", "haliax", "equinox", "optax")},
        **{name: str(getattr(jax.config, name)) for name in JAX_OPTIONS},
        **flags(os.environ),
        **{f"variable {name}": value for name, value in variables(os.environ).items()},
        "JAX_PLATFORMS": str(jax.config.values["jax_platforms"]),
    }


def _device_facts(config: RunConfig) -> dict[str, str]:
    """Lists what computes the numbers on this process, as `jaxlm train` lists it for a resumed run: name -> text."""
    devices = jax.local_devices()
    return {
        **{
            name: text for name, text in computing_numbers(config).items() if effect_of_fact(name).kind != HARMLESS.kind
        },
        "devices of the process": f"{len(devices)} x {devices[0].device_kind}",
    }


def check_opens(plan: Plan, tokenizer: Tokenizer, cursor: Cursor | None) -> None:
    """Raises `ConfigError` if a reward, an environment, a sampler or something else cannot be opened that a phase or an
    evaluation needs. Process 0 calls it.

    Args:
        cursor: where the run goes on. What only finished phases needed, such as a server, may be gone. None: at the start.
    """
    ahead = [phase for phase in plan.phases if not _is_over(phase, plan, cursor)]
    for data in {id(data): data for data in (plan.data[phase.index] for phase in ahead)}.values():
        data.check_opens(lambda: tokenizer, dry=False)
    for evaluation in plan.config.evals:
        if not any(evaluation.runs_in(phase.name) for phase in ahead):
            continue
        evaluation.check_opens(lambda: tokenizer, plan.phases[0].model.seq_len, dry=False)


def check_exports_are_new(plan: Plan, first_step: int) -> None:
    """Raises `ConfigError` if a run without checkpoints finds exports of the steps that it is to export: they are another
    run's, and would stay. Process 0 calls it.

    Args:
        first_step: where the run starts.
    """
    config = plan.config
    if config.hf_save_path is None or plan.checkpoints.checkpoints():
        return
    folder, ends = location_of(config.hf_save_path), {phase.end for phase in plan.phases}
    matches = (re.fullmatch(r"step-(\d{1,18})", name) for name in names_in(folder))
    for step in sorted(int(match[1]) for match in matches if match):
        is_due = first_step < step <= plan.num_steps and (step % config.hf_save_steps == 0 or step in ends)
        if is_due and is_complete(taken := child_of(folder, f"step-{step}"), LAST_EXPORTED):
            raise ConfigError(
                f"hf_save_path: {taken} exists, and this run, which has no checkpoint yet, is to export step {step} there."
                f" Set another folder, such as {child_of(folder, run_id_of(config))}, or move the exports away"
            )


def _is_over(phase: Phase, plan: Plan, cursor: Cursor | None) -> bool:
    if cursor is None or phase.index != cursor.phase:
        return cursor is not None and phase.index < cursor.phase
    return cursor.step >= plan.with_phase_ends(cursor.history.phase_ends).phases[phase.index].end


def check_accelerator(plan: Plan) -> None:
    """With `trainer.require_accelerator`, raises `ConfigError` if JAX finds only CPUs."""
    if plan.config.trainer.require_accelerator and plan.layout.platform == "cpu":
        raise ConfigError(
            "trainer.require_accelerator: true given, but JAX finds only CPUs. Install JAX for your accelerator (extra `gpu`"
            " or `tpu`), check JAX_PLATFORMS, or remove the key"
        )


def _checkpoints(plan: Plan) -> str:
    policy = plan.config.trainer.checkpointer
    permanent = "; ".join(f"every {r.every} steps" + (f" until {r.until}" if r.until else "") for r in policy.keep)
    interval = duration(policy.save_interval.total_seconds())
    retention = "temporary" if policy.delete_old_temp_checkpoints else "never deleted"
    return f"{plan.checkpoints}: every {interval} ({retention}), permanent {permanent or 'only at the end'}"


def phase_rows(plan: Plan, phase: Phase, model: LanguageModel, opt_state: Any) -> list[tuple[str, str]]:
    """The table of a phase that begins or goes on: its steps, its layers from the input to the output, and its parameter
    groups; every parameter is in exactly one of these. The last row is the optimizer state."""
    trainable, frozen = map(tree.num_parameters, phase.split(model))
    sizes, noise = [stack.Layers.size for stack in _stacks(model)], plan.data[phase.index].noise
    parts = f" ({' + '.join(map(str, sizes))})" if len(sizes) > 1 else ""
    where = "" if plan.layout.optimizer_memory is None else ", in the host's memory between steps"
    return [
        (STEPS_ROW, f"{phase.start} to {phase.end}"),
        *([(LAYERS_ROW, f"{sum(sizes)}{parts}")] if sizes else []),
        *([(HIDDEN_ROW, noise)] if noise is not None else []),
        (TRAINS_ROW, f"{trainable:,} of {trainable + frozen:,} parameters"),
        *((group.name, _group_row(phase.optimizer, group)) for group in phase.groups(model)),
        ("frozen", f"{frozen:,}"),
        ("optimizer state", describe_state(opt_state, trainable) + where),
    ]


def _group_row(optimizer: OptimizerConfig, group: ParameterGroup) -> str:
    """The size of a group and, if the optimizer has several owners of parameters, how its owner updates it."""
    size = f"{group.num_parameters:,} in {counted(len(group.paths), 'array')}, weight decay {group.weight_decay:g}"
    if not optimizer.groups:
        return size
    owner = optimizer if group.owner is None else optimizer.groups[group.owner]
    falls_back = owner.separates_matrices and not group.as_matrices
    rate = getattr(owner, "adam_lr", owner.learning_rate) if falls_back else owner.learning_rate
    rule = f"{choice_name(type(owner))}{', its rule for others' if falls_back else ''}"
    return f"{size}, {rule}, {lr_shape_name(owner.lr_schedule)} schedule from {rate:g}"


def run_info(plan: Plan, init_from: InitFrom) -> RunInfo:
    """Facts about the run for those who follow it."""
    devices = jax.devices()
    peak = peak_flops(devices[0].device_kind)
    summary: dict[str, float | str] = {
        "parameter_count": tree.num_parameters(plan.state_builder.abstract_state(plan.phases[-1]).model),
        "num_devices": len(devices),
        "num_hosts": jax.process_count(),
        "backend": jax.default_backend(),
        "throughput/device_kind": devices[0].device_kind,
    }
    if peak is not None:
        summary["throughput/theoretical_flops"] = peak * len(devices)
    return RunInfo(
        run_id=plan.run_id,
        resume_step=init_from.resume_step or 0,
        is_new=init_from.resume_step is None,
        config=without_secrets(encode(plan.config)),
        config_text=dump(plan.config),
        summary=summary,
        abandoned_steps=init_from.history.abandoned_steps,
    )
