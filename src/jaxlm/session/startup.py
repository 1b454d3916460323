"""Checks of a start, and its table: what will run, on which devices, and why each choice was made."""

import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import version

import jax

from jaxlm.core import tree
from jaxlm.core.devices import peak_flops
from jaxlm.core.errors import ConfigError, counted
from jaxlm.core.exchange import exchange
from jaxlm.core.products.fp8 import has_fp8_products
from jaxlm.core.publish import child_of, is_complete, location_of, names_in
from jaxlm.core.redaction import without_secrets
from jaxlm.core.runtime import differences_between_processes
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.phases import Phase
from jaxlm.models.chunked_loss import default_chunk_tokens
from jaxlm.models.rows import expert_rows, model_rows
from jaxlm.observe.environment import JAX_OPTIONS, flags, source_of, source_of_jaxlm, variables
from jaxlm.observe.trackers import RunInfo
from jaxlm.plan.batches import describe_batches
from jaxlm.plan.load_config import run_id_of
from jaxlm.plan.num_steps import describe_data
from jaxlm.plan.plan import Plan
from jaxlm.plan.presets.base import preset_rows
from jaxlm.plan.rows import attention_choices, describe_evaluations, fp8_products, planned_phases
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import own_modules
from jaxlm.reading.decode import dump, encode, flattened
from jaxlm.reading.effects import HARMLESS
from jaxlm.session.compilation.options import describe_options, describe_sizes, step_options
from jaxlm.session.init_from import InitFrom
from jaxlm.session.references import asked_in, flops_per_token
from jaxlm.session.resume_checks import computing_numbers, effect_of_fact

LAST_EXPORTED = "config.json"
"""The file that makes an export complete."""


def describe(plan: Plan, start: str | None = None) -> list[tuple[str, str]]:
    """The plan as rows of name and value. Args: start: what the run starts from; None if only the configuration is known."""
    devices, trainer, first = plan.layout.mesh.devices.ravel(), plan.config.trainer, plan.phases[0]
    model, initial = plan.state_builder.abstract_state(first).model, plan.state_builder.abstract_initial_model
    chunk = step_options(plan).sizes.loss_chunk_tokens or default_chunk_tokens(plan.layout.platform)
    references = asked_in(plan, first)
    passes = "forward and backward" + (f", and the forward pass of {' and '.join(references)}" if references else "")
    attended = "causal" if first.model.is_causal else "bidirectional"
    optional = {
        "context": plan.context and plan.context.describe(),
        "block sizes": describe_sizes(plan),
        "step options": describe_options(plan),
    }
    return [
        ("run", f"{plan.run_id} (seed {trainer.seed})"),
        (
            "devices",
            f"{len(devices)} x {devices[0].device_kind} in {counted(jax.process_count(), 'process')}, JAX {jax.__version__}",
        ),
        ("mesh", str(plan.mesh)),
        *[("warning", text) for text in (*plan.warnings, *initial.traits.notes)],
        *plan.layout.rows(),
        *plan.precision.rows(plan.state_builder.abstract_state(plan.phases[-1]).model, plan.layout.device),
        ("batch", describe_batches(plan.batches, plan.phases)),
        ("evaluation", describe_evaluations(plan)),
        *model_rows(first.model, model, plan.state_builder.Vocab.size, plan.layout, chunk),
        ("FLOPs per token", f"{flops_per_token(plan, first).causal:.4g} ({passes}, {attended} attention)"),
        (
            "attention",
            "; ".join({f"{c.name}: {c.reason}": None for c in attention_choices(plan)}) or "chosen by the model",
        ),
        *expert_rows(model, plan.layout, plan.precision),
        *[(name, text) for name, text in optional.items() if text is not None],
        *planned_phases(plan),
        *[(f"reference {name}", f"{ref.path} in {ref.dtype}") for name, ref in plan.config.refs.items()],
        ("starts from", trainer.describe_start() if start is None else start),
        *[(f"data of {p.name}", describe_data(plan.config, d)) for p, d in zip(plan.phases, plan.data, strict=True)],
        ("checkpoints", f"{plan.checkpoints}: {trainer.describe_checkpoints()}"),
        ("logs", str(plan.log_folder)),
        *preset_rows(plan.config.preset, encode(plan.config)),
    ]


def check_performance(plan: Plan) -> None:
    """With `trainer.strict_performance`, raises `ConfigError` for an attention backend or dtype slower than necessary, and
    for emulated fp8."""
    slow = [f"attention uses the {c.name} backend: {c.reason}" for c in attention_choices(plan) if c.degraded]
    if plan.layout.platform != "cpu" and plan.precision.compute.itemsize > 2:
        name = plan.precision.compute.name
        slow.append(f"the compute dtype is {name}: trainer.mp 'p=f32,c=bfloat16' is several times faster")
    if not has_fp8_products(plan.layout.device):
        slow += [f"phase '{name}': {text}" for name, text in fp8_products(plan).items()]
    if plan.config.trainer.strict_performance and slow:
        raise ConfigError(f"trainer.strict_performance: {'; '.join(slow)}")


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
    facts = {k: v for k, v in computing_numbers(config).items() if effect_of_fact(k).kind != HARMLESS.kind}
    return facts | {"devices of the process": f"{len(devices)} x {devices[0].device_kind}"}


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
        if any(evaluation.scope.includes(phase.name) for phase in ahead):
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
