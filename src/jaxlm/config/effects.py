"""What a changed key means for a run that resumes. Every key has an effect here, itself or with its section.

A key of the model that is not listed belongs to the model, which cannot change.
"""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["harmless", "changes what follows", "refused"]


@dataclass(frozen=True)
class Effect:
    """What a change does to a resumed run.

    Attributes:
        kind: `harmless` cannot change any number of the training.
        how: what is different from here on; empty if the key says it all.
    """

    kind: Kind
    how: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.how}" if self.how else self.kind


HARMLESS = Effect("harmless")
ROUNDING = Effect("changes what follows", "float rounding differs from here")
MODEL = Effect("refused")
CONTENT = Effect("harmless", "the content is the same")
"""Of keys that name what is compared by content, and refused if that differs."""
OWN = Effect("changes what follows", "a key of your own")
_AT_THE_START = Effect("harmless", "only a new run reads it")
_EVALUATIONS = Effect(
    "changes what follows", "evaluations, and what depends on them, are not comparable with earlier ones"
)
_ORDER = Effect(
    "changes what follows", "the data has another order from here: some is read again, and some is left out"
)
_MIXTURE = Effect("changes what follows", "the sources are mixed in another way from here")
_UPDATES = Effect("changes what follows", "the next updates differ")
_LENGTH = Effect("changes what follows", "the run ends at another step, and the learning rate follows the new length")
_STOPPING = Effect("changes what follows", "the run may end or go back where it would not have before")
_CONTROLLERS = Effect(
    "changes what follows",
    "a controller that is new begins here, and the learning rate loses the factor of one that is gone",
)

EFFECTS: dict[str, Effect] = {
    "data.train_urls": CONTENT,
    "data.validation_urls": _EVALUATIONS,
    "data.num_validation_files": CONTENT,
    "data.cache_dir": HARMLESS,
    "data.text_key": CONTENT,
    "data.format": CONTENT,
    "data.tags": _EVALUATIONS,
    "data.id": CONTENT,
    "data.name": CONTENT,
    "data.split": CONTENT,
    "data.validation_split": _EVALUATIONS,
    "data.stream": CONTENT,
    "data.source": CONTENT,
    "data.cache_mirror_gb": HARMLESS,
    "data.tokenizer": CONTENT,
    "data.added_tokens": CONTENT,
    "data.vocab_size": CONTENT,
    "data.shuffle": CONTENT,
    "data.enforce_bos": CONTENT,
    "data.enforce_eos": CONTENT,
    "data.configs": CONTENT,
    "data.train_weights": _MIXTURE,
    "data.stop_strategy": _MIXTURE,
    "data.mixture_block_size": _MIXTURE,
    "data.max_train_batches": CONTENT,
    "data.num_validation_sequences": CONTENT,
    "data.ignore_token_id": CONTENT,
    "data.packing": CONTENT,
    "data.stride": CONTENT,
    "data.train_overlap": CONTENT,
    "data.type": CONTENT,
    "data.group_size": _UPDATES,
    "data.max_new_tokens": _UPDATES,
    "data.temperature": _UPDATES,
    "data.top_k": _UPDATES,
    "data.top_p": _UPDATES,
    "data.min_p": _UPDATES,
    "data.repetition_penalty": _UPDATES,
    "data.updates_per_rollout": _UPDATES,
    "data.minibatches_per_rollout": _UPDATES,
    "data.rewards": _UPDATES,
    "data.reward_timeout_s": HARMLESS,
    "data.dynamic_sampling": _UPDATES,
    "data.curriculum": _UPDATES,
    "data.long_prompts": _ORDER,
    "data.environment": _UPDATES,
    "data.max_turns": _UPDATES,
    "data.sampler": ROUNDING,
    "model": MODEL,
    "model.gradient_checkpointing": ROUNDING,
    "model.scan_layers": ROUNDING,
    "model.attn_backend": ROUNDING,
    "model.pad_vocab_to_multiple_of": ROUNDING,
    "optimizer": _UPDATES,
    "objective": Effect("changes what follows", "another loss is minimized from here"),
    "refs": CONTENT,
    "evals": _EVALUATIONS,
    "phases": Effect("changes what follows", "the phases from the current one on differ"),
    "phases.N.data": CONTENT,
    "phases.N.num_train_steps": _LENGTH,
    "phases.N.carry_optimizer": _UPDATES,
    "phases.N.until": _STOPPING,
    "phases.N.controllers": _CONTROLLERS,
    "preset": Effect("harmless", "the keys that it fills in are compared themselves"),
    "data_seed": _ORDER,
    "epoch": _LENGTH,
    "initialize_from_hf": _AT_THE_START,
    "hf_weight_names": _AT_THE_START,
    "hf_skip_keys": _AT_THE_START,
    "use_hf_model_config": _AT_THE_START,
    "hf_save_path": HARMLESS,
    "hf_save_steps": HARMLESS,
    "hf_save_dtype": HARMLESS,
    "hf_upload": HARMLESS,
    "dry_run": HARMLESS,
    "trainer.id": HARMLESS,
    "trainer.seed": Effect("changes what follows", f"dropout is another; unless data_seed is set, {_ORDER.how}"),
    "trainer.num_train_steps": _LENGTH,
    "trainer.until": _STOPPING,
    "trainer.controllers": _CONTROLLERS,
    "trainer.train_batch_size": Effect("changes what follows", "a step reads another number of sequences from here"),
    "trainer.per_device_parallelism": ROUNDING,
    "trainer.per_device_train_parallelism": ROUNDING,
    "trainer.max_per_device_parallelism": ROUNDING,
    "trainer.allow_nondivisible_batch_size": ROUNDING,
    "trainer.per_device_eval_parallelism": _EVALUATIONS,
    "trainer.steps_per_eval": _EVALUATIONS,
    "trainer.max_eval_batches": _EVALUATIONS,
    "trainer.mp": Effect("changes what follows", "numbers have another precision from here"),
    "trainer.log_dir": HARMLESS,
    "trainer.compilation_cache_dir": HARMLESS,
    "trainer.strict_performance": HARMLESS,
    "trainer.batch_axis": ROUNDING,
    "trainer.fsdp_axis": ROUNDING,
    "trainer.tensor_parallel_axes": ROUNDING,
    "trainer.model_axis_size": ROUNDING,
    "trainer.replica_ici_axis_size": ROUNDING,
    "trainer.replica_dcn_axis_size": ROUNDING,
    "trainer.axis_resources": ROUNDING,
    "trainer.parameter_axis_resources": ROUNDING,
    "trainer.compute_axis_resources": ROUNDING,
    "trainer.mesh": ROUNDING,
    "trainer.load_checkpoint": HARMLESS,
    "trainer.load_checkpoint_path": HARMLESS,
    "trainer.initialize_from": _AT_THE_START,
    "trainer.initialize_from_state": _AT_THE_START,
    "trainer.allow_partial_checkpoint": HARMLESS,
    "trainer.allow_changes": HARMLESS,
    "trainer.require_accelerator": HARMLESS,
    "trainer.crash_on_nan": _STOPPING,
    "trainer.crash_on_inf": _STOPPING,
    "trainer.crash_after_skipped": _STOPPING,
    "trainer.shutdown_at_exit": HARMLESS,
    "trainer.jax_config": ROUNDING,
    "trainer.log_jaxprs": HARMLESS,
    "trainer.log_xla_hlo": HARMLESS,
    "trainer.model_averaging": Effect("changes what follows", "the average of the weights is another from here"),
    "trainer.checkpointer": HARMLESS,
    "trainer.tracker": HARMLESS,
    "trainer.completions": HARMLESS,
    "trainer.callbacks": HARMLESS,
    "trainer.watch": ROUNDING,
    "trainer.profiler": HARMLESS,
    "trainer.distributed": HARMLESS,
    "trainer.watchdog": HARMLESS,
    "trainer.preemption_notices": HARMLESS,
    "trainer.ray": HARMLESS,
}

_CODE = Effect("changes what follows", "the code may compute other numbers from here")
FACTS: dict[str, Effect] = {
    "jaxlm": _CODE,
    "commit of jaxlm": Effect("harmless", "a change of the source is listed under jaxlm"),
    "module": _CODE,
    "Python": HARMLESS,
    **dict.fromkeys(("jax", "jaxlib", "haliax", "equinox", "optax", "libtpu"), ROUNDING),
    **dict.fromkeys(("backend", "devices", "processor", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "variables"), ROUNDING),
    **dict.fromkeys(("jax options", "XLA options", "block sizes"), ROUNDING),
}
"""Of what computes (`run/resume_checks.py`); `module` stands for each module of the user's own."""

_NAMED_SOURCE = re.compile(r"^data\.configs\.[^.]+\.")
_OF_PHASE = re.compile(r"^phases\.\w+\.(?=data\.|objective\b|optimizer\b)")


def effect_of(path: str) -> Effect:
    """The effect of a key, by its dotted path, such as `phases.0.optimizer.beta1`; `OWN` if it is not one of jaxlm's."""
    path = _NAMED_SOURCE.sub("data.", _OF_PHASE.sub("", path))
    path = re.sub(r"\.\d+(?=\.|$)", ".N", path)
    parts = path.split(".")
    prefixes = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((EFFECTS[prefix] for prefix in prefixes if prefix in EFFECTS), OWN)


def effect_of_fact(name: str) -> Effect:
    """The effect of a changed fact about what computes. Raises `KeyError` if it has none."""
    return FACTS[name if name in FACTS else name.partition(" ")[0]]
