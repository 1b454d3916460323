"""The fields of everything except models: trainer, optimizer, objective, surgery, phases, and the top level."""

from jaxlm.core import tree
from jaxlm.core.axes import axis_names
from jaxlm.plan.plan import Plan
from tests.fields.proofs import (
    RANDOM_BITS,
    Allowed,
    Change,
    Constant,
    Decays,
    Entry,
    Initial,
    Program,
    Rates,
    Refused,
    Section,
    Shapes,
    ShownIn,
    Table,
    Value,
)

# How the mesh axis `model` shards a stored parameter, and how it shards arrays in the computation.
PARAMETER_OVER_MODEL = r'%arg\d+: tensor<[^>]*> \{sdy.sharding = #sdy.sharding<@mesh, \[[^]]*"model"'
COMPUTATION_OVER_MODEL = r'sdy.sharding_constraint [^\n]*"model"'
COMPLETIONS = "tests/observe/test_completions.py::"
INIT_FROM = "tests/session/test_init_from.py::"
GOING_BACK = "tests/session/test_going_back.py::"
HUGGING_FACE = "tests/end_to_end/test_hugging_face.py::"
REFERENCES = "tests/session/test_references.py::"
GATES = "tests/session/test_gates.py::"
DISTILLED = "tests/end_to_end/test_distill.py::"
FIELDS = "tests/fields/"


def watched(name: str) -> str:
    """A metric of `trainer.watch` among the program's results."""
    return rf"watched\['{name}"


def microbatches(*expected: int) -> Value:
    """(microbatches, sequences in each) of the first step. `trainer.per_device_parallelism` shows the program with them."""
    return Value(lambda plan: plan.batches.train.first.shape, expected)


def mesh(**sizes: int) -> Value:
    """The mesh axes with more than one device, in order. `trainer.mesh.axes` shows the program with them."""
    return Value(lambda plan: {axis: n for axis, n in plan.layout.mesh.shape.items() if n > 1}, sizes)


def mlp_over_model(*mappings: str) -> Value:
    """The mappings that shard the axis `mlp`. `trainer.mesh.param_mapping` and `compute_mapping` show the programs."""
    both = ("parameter", "compute")
    return Value(
        lambda plan: tuple(m for m in both if "model" in axis_names(getattr(plan.layout, m).get("mlp"))), mappings
    )


SHARED_ROWS = {"trainer": {"context": {"size": 8}}}
LR_SCALE = Shapes({r"^slots\.controls\.lr_scale$": ()})
TOP_LEVEL: dict[str, Entry] = {
    "data": ShownIn(FIELDS + "test_data.py::test_data_field"),
    "model": Section(),
    "trainer": Section(),
    "optimizer": Section(),
    "objective": Section(),
    "refs": Section(),
    "preset": Section(),
    "evals": ShownIn(FIELDS + "test_evals.py::test_the_eval_hook_runs_the_configured_evals"),
    "tables": ShownIn("tests/systems/upcycle/test_tables_run.py::test_training_writes_the_tables_of_both_models"),
    "phases": Section(),
    "initialize_from_hf": ShownIn(HUGGING_FACE + "test_import_and_export_round_trip"),
    "hf_weight_names": ShownIn(HUGGING_FACE + "test_hf_weight_names_rename_a_files_tensors"),
    "hf_skip_keys": ShownIn("tests/session/test_hf_folder.py::test_a_key_is_skipped_on_request"),
    "use_hf_model_config": ShownIn(HUGGING_FACE + "test_the_model_section_overrides_the_folders_config"),
    "hf_save_path": ShownIn(HUGGING_FACE + "test_import_and_export_round_trip"),
    "hf_save_steps": ShownIn(HUGGING_FACE + "test_import_and_export_round_trip"),
    "hf_save_parts": ShownIn("tests/session/test_multimodal_run.py::test_a_run_exports_all_parts_or_the_text"),
    "hf_stored_format": ShownIn("tests/session/test_stored_source.py::test_a_run_keeps_what_it_does_not_train"),
    "hf_save_dtype": ShownIn(HUGGING_FACE + "test_import_and_export_round_trip"),
    "hf_upload": ShownIn("tests/interop/test_model_card.py::test_exports_are_pushed_and_a_failed_push_ends_nothing"),
    "data_seed": ShownIn("tests/session/test_num_steps.py::test_the_seed_of_the_data_order_alone"),
    "epoch": ShownIn("tests/session/test_num_steps.py::test_epochs_set_the_number_of_steps"),
    "dry_run": ShownIn("tests/end_to_end/test_command.py::test_a_dry_run_needs_no_data"),
}
TRAINER: dict[str, Entry] = {
    "trainer.id": Change("y", Value(lambda plan: (plan.checkpoints.location.name, plan.log_folder.name), ("y", "y"))),
    "trainer.seed": Change(1, Initial(r"tokens|proj")),
    "trainer.num_train_steps": Change(200, Rates({101: 5.5e-5})),
    "trainer.controllers": Change([{"type": "reduce_on_plateau", "metric": "train/loss"}], LR_SCALE),
    "trainer.until": ShownIn(GOING_BACK + "test_patience_ends_the_phase_with_the_best_weights"),
    "trainer.train_batch_size": Change(32, Program(gains=r"tensor<1x32x16xi32>")),
    "trainer.per_device_parallelism": Change(1, Program(gains=r"tensor<2x8x16xi32>")),
    "trainer.per_device_train_parallelism": Change(1, microbatches(2, 8)),
    "trainer.max_per_device_parallelism": Change(1, microbatches(2, 8)),
    "trainer.allow_nondivisible_batch_size": Change(
        True,
        Allowed(r"trainer\.train_batch_size: 12 .* 8 ", microbatches(1, 16)),
        also={"trainer": {"train_batch_size": 12}},
    ),
    "trainer.per_device_eval_parallelism": ShownIn(FIELDS + "test_evals.py::test_per_device_eval_parallelism"),
    "trainer.steps_per_eval": ShownIn(FIELDS + "test_evals.py::test_steps_per_eval"),
    "trainer.max_eval_batches": ShownIn(FIELDS + "test_evals.py::test_max_eval_batches"),
    "trainer.mp": Change("p=f32,c=bfloat16", Program(gains="bf16", alone=False)),
    "trainer.log_dir": Change("elsewhere", Value(lambda plan: str(plan.log_folder), "elsewhere/x")),
    "trainer.offload_optimizer": Change(True, Program(gains="pinned_host", part="step")),
    "trainer.compilation_cache_dir": ShownIn(FIELDS + "test_processes.py::test_compilation_cache_dir"),
    "trainer.strict_performance": ShownIn(FIELDS + "test_processes.py::test_strict_performance_refuses_fallbacks"),
    "trainer.batch_axis": Change(None, Program(loses=r"stablehlo.all_reduce")),
    "trainer.fsdp_axis": Change(None, Program(loses=r"stablehlo.reduce_scatter", part="step")),
    "trainer.tensor_parallel_axes": Change(["mlp"], mlp_over_model("parameter", "compute")),
    "trainer.model_axis_size": Change(2, mesh(data=4, model=2), also={"trainer": {"tensor_parallel_axes": ["mlp"]}}),
    "trainer.replica_ici_axis_size": Change(2, mesh(replica=2, data=4)),
    "trainer.replica_dcn_axis_size": Change(2, Refused(r"trainer\.replica_dcn_axis_size: 2 given")),
    "trainer.axis_resources": Change({"mlp": "model"}, mlp_over_model("parameter", "compute")),
    "trainer.parameter_axis_resources": Change({"mlp": "model"}, mlp_over_model("parameter")),
    "trainer.compute_axis_resources": Change({"mlp": "model"}, mlp_over_model("compute")),
    "trainer.mesh": Change({"axes": {"data": -1, "replica": 2}}, mesh(data=4, replica=2)),
    "trainer.mesh.axes": Change({"data": 4, "replica": 2}, Program(gains=r'@mesh = .*"data"=4, "replica"=2')),
    "trainer.mesh.dcn_axes": Change({"data": 2}, Refused(r"trainer\.mesh\.dcn_axes: .*'data': 2")),
    "trainer.mesh.shared_mapping": Change({"mlp": "model"}, mlp_over_model("parameter", "compute")),
    "trainer.mesh.compute_mapping": Change({"mlp": "model"}, Program(gains=COMPUTATION_OVER_MODEL, alone=False)),
    "trainer.mesh.param_mapping": Change({"mlp": "model"}, Program(gains=PARAMETER_OVER_MODEL)),
    "trainer.context": Section(),
    "trainer.context.size": Change(2, mesh(data=4, context=2)),
    "trainer.context.method": Change("ring", Program(gains=r"collective_permute", alone=False), also=SHARED_ROWS),
    "trainer.context.balance": Change(
        "zigzag", Value(lambda plan: plan.layout.context.balance, "zigzag"), also=SHARED_ROWS
    ),
    "trainer.context.heads_size": Change(
        2, mesh(context=4, context_heads=2), also={"trainer": {"context": {"size": 8, "method": "usp"}}}
    ),
    "trainer.load_checkpoint": ShownIn(INIT_FROM + "test_starting_over_existing_checkpoints_is_refused"),
    "trainer.load_checkpoint_path": ShownIn(
        INIT_FROM + "test_another_runs_state_continues_bit_for_bit_and_is_saved_as_the_runs_own"
    ),
    "trainer.initialize_from": ShownIn(INIT_FROM + "test_initialize_from_loads_only_the_model"),
    "trainer.initialize_from_state": ShownIn(
        INIT_FROM + "test_another_runs_state_continues_bit_for_bit_and_is_saved_as_the_runs_own"
    ),
    "trainer.allow_partial_checkpoint": ShownIn(INIT_FROM + "test_partial_checkpoints_list_missing_and_unused_arrays"),
    "trainer.allow_changes": ShownIn("tests/session/test_changes.py::test_other_data_is_refused_unless_it_is_allowed"),
    "trainer.require_accelerator": ShownIn("tests/session/test_startup.py::test_require_accelerator_is_off_by_default"),
    "trainer.crash_on_nan": ShownIn(
        "tests/observe/test_hooks.py::test_crash_on_nan_and_crash_on_inf_stop_at_their_own_values"
    ),
    "trainer.crash_on_inf": ShownIn(
        "tests/observe/test_hooks.py::test_crash_on_nan_and_crash_on_inf_stop_at_their_own_values"
    ),
    "trainer.crash_after_skipped": ShownIn(
        "tests/engine/test_until.py::test_a_run_that_does_not_go_back_ends_at_the_limit"
    ),
    "trainer.shutdown_at_exit": Change(True, Refused(r"trainer\.shutdown_at_exit: ")),
    "trainer.jax_config": ShownIn(
        "tests/session/test_startup.py::test_jax_config_sets_options_of_jax_and_names_wrong_ones"
    ),
    "trainer.log_jaxprs": ShownIn(INIT_FROM + "test_programs_are_dumped_to_the_configured_folder"),
    "trainer.log_xla_hlo": ShownIn(INIT_FROM + "test_programs_are_dumped_to_the_configured_folder"),
    "trainer.model_averaging": Change({"type": "ema"}, Shapes({r"^slots\.ema\.weights\.tokens": (64, 32)})),
    "trainer.checkpointer": Section(),
    "trainer.tracker": ShownIn(FIELDS + "test_trackers.py::test_tracker_field"),
    "trainer.completions": Section(),
    "trainer.completions.max_per_step": ShownIn(COMPLETIONS + "test_what_is_kept_and_shown"),
    "trainer.completions.max_megabytes": ShownIn(COMPLETIONS + "test_the_file_is_replaced_when_it_is_full"),
    "trainer.completions.show_every": ShownIn(COMPLETIONS + "test_what_is_kept_and_shown"),
    "trainer.completions.num_shown": ShownIn(COMPLETIONS + "test_what_is_kept_and_shown"),
    "trainer.callbacks": ShownIn("tests/observe/test_callbacks.py::test_the_hooks_of_a_run_and_their_order"),
    "trainer.watch": Change({"interval": 1}, Program(gains=watched("grad/norm/total"), alone=False, part="step")),
    "trainer.profiler": ShownIn(FIELDS + "test_processes.py::test_profiler_fields"),
    "trainer.distributed": ShownIn(FIELDS + "test_processes.py::test_distributed_fields"),
    "trainer.watchdog": ShownIn("tests/end_to_end/test_hangs.py::test_a_run_that_hangs_says_where_and_ends"),
    "trainer.preemption_notices": ShownIn("tests/end_to_end/test_notices.py::test_notices_can_be_turned_off"),
    "trainer.ray": ShownIn(
        "tests/data/test_ray_cluster.py::test_the_cache_is_the_same_when_workers_are_killed_and_join"
    ),
    "trainer.checkpointer.base_path": Change("other", Value(lambda plan: str(plan.checkpoints.location), "other/x")),
    "trainer.checkpointer.append_run_id_to_base_path": Change(
        False, Value(lambda plan: str(plan.checkpoints.location), "checkpoints")
    ),
    "trainer.checkpointer.save_interval": ShownIn(INIT_FROM + "test_old_temporary_checkpoints_can_be_kept"),
    "trainer.checkpointer.retry_for": ShownIn(
        "tests/end_to_end/test_storage_faults.py::test_saves_that_fail_for_too_long_end_the_run"
    ),
    "trainer.checkpointer.keep": ShownIn(INIT_FROM + "test_the_last_step_is_saved_permanently"),
    "trainer.checkpointer.delete_old_temp_checkpoints": ShownIn(
        INIT_FROM + "test_old_temporary_checkpoints_can_be_kept"
    ),
    "trainer.checkpointer.staging_dir": ShownIn(
        INIT_FROM + "test_temporary_checkpoints_are_deleted_for_every_kind_of_base_path"
    ),
}
KEEP: dict[str, Entry] = {
    "trainer.checkpointer.keep.0.every": ShownIn(INIT_FROM + "test_the_last_step_is_saved_permanently"),
    "trainer.checkpointer.keep.0.until": ShownIn(
        "tests/engine/checkpoint/test_policy.py::test_reads_the_guides_keep_example"
    ),
}
UNTIL: dict[str, Entry] = {
    "trainer.until.metric": ShownIn(GOING_BACK + "test_an_unknown_metric_is_named_with_those_that_were_measured"),
    "trainer.until.below": ShownIn(GOING_BACK + "test_below_ends_the_phase_where_the_metric_is_reached"),
    "trainer.until.above": Change(0.5, Refused(r"trainer\.until\.above: 0\.5 given without mode: max")),
    "trainer.until.patience": ShownIn(GOING_BACK + "test_patience_ends_the_phase_with_the_best_weights"),
    "trainer.until.min_delta": ShownIn(
        "tests/engine/test_until.py::test_the_best_is_the_lowest_and_patience_counts_from_the_last_clear_improvement"
    ),
    "trainer.until.mode": Change("max", Refused(r"trainer\.until\.below: 3\.0 given without mode: min")),
}
WATCH: dict[str, Entry] = {
    "trainer.watch.watch_targets": Change(["updates"], Program(gains=watched("updates/norm/total"), part="step")),
    "trainer.watch.include_norms": Change(False, Program(loses=watched("grad/norm/total"), part="step")),
    "trainer.watch.include_per_parameter_norms": Change(
        False, Program(loses=watched("grad/norm/tokens.weight"), part="step")
    ),
    "trainer.watch.include_histograms": Change(True, Program(gains=watched("grad/hist/tokens.weight"), part="step")),
    "trainer.watch.split_scan_layers": Change(
        False, Program(loses=r"tensor<2xf32> \{jax.result_info = \"[^\"]*watched\['grad/norm/body.layers", part="step")
    ),
    "trainer.watch.interval": Change(7, Constant(7, part="step")),
}
DECAY = {"optimizer": {"weight_decay": 0.1}}
# All rates below: 100 steps, a warmup of one step to a peak of 1e-4, then a cosine down to a tenth of it.
OPTIMIZER: dict[str, Entry] = {
    "optimizer.learning_rate": Change(3e-4, Rates({1: 3e-4})),
    "optimizer.weight_decay": Change(0.3, Decays({r"q_proj\.weight": 0.3})),
    "optimizer.lr_schedule": Change("linear", Rates({34: 7e-5})),
    "optimizer.min_lr_ratio": Change(0.5, Rates({100: 5e-5})),
    "optimizer.lr_floor": Change(0.5, Rates({0: 5e-5, 100: 5e-5})),
    "optimizer.warmup": Change(10, Rates({5: 5e-5})),
    "optimizer.warmup_from_zero": Change(False, Rates({0: 1e-5, 4: 5e-5}), also={"optimizer": {"warmup": 10}}),
    "optimizer.decay": Change(10, Rates({50: 1e-4, 90: 1e-4})),
    "optimizer.rewarmup": Change(10, Rates({55: 5.5e-5}), also={"optimizer": {"cycles": 2}}),
    "optimizer.cycles": Change(2, Rates({50: 1e-4})),
    "optimizer.cycle_length": Change(25, Rates({25: 1e-4, 50: 1e-4, 75: 1e-4})),
    "optimizer.weight_decay_modules": Change(["norm"], Decays({"norm": 0.1, "proj": 0.0}), also=DECAY),
    "optimizer.default_weight_decay_mask": Change(False, Decays({"tokens|norm": 0.1}), also=DECAY),
    "optimizer.skip_bad_steps": Change(True, Shapes({r"^slots\.bad_steps\.losses\.values": (128,)})),
    "optimizer.telemetry": Change({"window": 64}, Shapes({r"^slots\.telemetry\.norms\.values": (64,)})),
    "optimizer.adagc": Change({}, Shapes({r"^opt_state\.0\.norm\..*q_proj\.weight$": (2,)})),
    "optimizer.state": Change(
        {"type": "8bit", "min_size": 256}, Shapes({r"mu\..*q_proj\.weight\.codes": (2, 4, 8, 32)})
    ),
    "optimizer.groups": Change(
        [{"match": "norm", "type": "lion"}], Shapes({r"^opt_state\.1\.group_0\..*final_norm\.weight$": (32,)})
    ),
    "optimizer.match": Change("norm", Refused(r"optimizer\.match: 'norm' given, but only the entries")),
    "optimizer.beta1": Change(0.71, Constant(0.71, part="update")),
    "optimizer.beta2": Change(0.72, Constant(0.72, part="update")),
    "optimizer.epsilon": Change(0.73, Constant(0.73, part="update")),
    "optimizer.max_grad_norm": Change(0.74, Constant(0.74, part="update")),
    "optimizer.nesterov": Change(True, Program(gains=r"stablehlo.add", part="update")),
    "optimizer.update_rms_clipping": Change(0.75, Constant(0.75, part="update")),
    "optimizer.clip_update_norm": Change({"rolling_interval_length": 16}, Shapes({r"^opt_state\.3\..*values": (16,)})),
    "optimizer.adamc_weight_decay": Change(True, Shapes({r"^opt_state\.2\.count": ()}), also=DECAY),
    "optimizer.cautious": Change(True, Program(gains=r"stablehlo.compare  ?GT", part="update")),
    "objective.z_loss_weight": Change(1e-3, Program(gains=r"\['z_loss'\]", alone=False)),
    "objective.label_smoothing": Change(0.1, Constant(0.9)),
    "objective.dft": ShownIn(
        "tests/objectives/test_next_token.py::test_dynamic_fine_tuning_minimizes_another_loss_than_it_logs"
    ),
    "objective.neftune_alpha": ShownIn(
        "tests/objectives/test_neftune.py::test_the_noise_is_uniform_with_the_bound_of_the_paper_for_each_document"
    ),
    "objective.log_entropy": Change(True, Program(gains=r"\['entropy'\]", alone=False)),
    "objective.mtp_weight": Change(
        0.3, Refused("but the model has no layer that predicts the token after the next one")
    ),
}
LORA: dict[str, Entry] = {
    "surgery.target": Change("mlp", Shapes({r"attn\.q_proj\.a$": None})),
    "surgery.rank": Change(4, Shapes({r"^model.*q_proj\.a$": (2, 4, 32)})),
    "surgery.alpha": Change(7.0, Constant(3.5, alone=True)),
    "surgery.dropout": Change(0.5, RANDOM_BITS),
    "surgery.rslora": Change(True, Constant(16 / 2**0.5, alone=True)),
    "surgery.use_dora": Change(True, Shapes({r"^model.*q_proj\.magnitude$": (2, 4, 8)})),
    "surgery.rank_pattern": Change({r"\.1\.attn": 5}, Shapes({r"^model.*q_proj\.a$": (2, 5, 32)})),
    "surgery.alpha_pattern": Change({"attn": 7.0}, Constant(3.5, alone=True)),
    "surgery.existing": ShownIn(
        "tests/systems/progressive/test_stack_adapters.py::test_existing_adapters_are_kept_or_merged"
    ),
    "surgery.cap_rank": ShownIn(
        "tests/systems/progressive/test_stack_adapters.py::test_ranks_are_at_most_half_of_a_matrix"
    ),
    "surgery.layers_to_transform": Change([1], Shapes({r"^model.*q_proj\.layer$": (2,)})),
    "surgery.embeddings": Change("tokens", Shapes({r"^model\.tokens\.lookup\.b$": (32, 2)})),
    "surgery.experts": ShownIn("tests/surgery/test_lora_experts.py::test_parameters_of_adapters_that_are_active"),
    "surgery.ensure_weight_tying": ShownIn("tests/surgery/test_lora.py::test_adapters_of_embeddings"),
    "surgery.modules_to_save": ShownIn(
        "tests/surgery/test_peft.py::test_a_run_with_dora_ranks_by_layer_and_a_trained_head_is_exported"
    ),
    "surgery.init": Change("pissa", Shapes({r"^model.*q_proj\.initial_a$": (2, 2, 32)})),
    "surgery.calibration_batches": Change(
        3, Refused(r"calibration_batches: 3 given without init: eva, but init is default")
    ),
    "surgery.from_peft": ShownIn("tests/surgery/test_peft.py::test_a_run_starts_from_peft_adapters_bit_for_bit"),
}
QUANTIZE: dict[str, Entry] = {
    "surgery.kind": Change("int8", Shapes({r"^model.*q_proj\.weight\.values$": (2, 4, 8, 32)})),
    "surgery.modules": Change("mlp", Shapes({r"^model.*q_proj\.weight\.codes$": None})),
    "surgery.double_quant": Change(False, Shapes({r"^model.*q_proj\.weight\.absmax\.values$": (2, 16)})),
}
INTERPOLATE: dict[str, Entry] = {
    "surgery.ref": Change("other", Refused(r"uses the model 'other', but the section only has: teacher")),
    "surgery.weight": ShownIn("tests/engine/test_entry.py::test_weights_move_towards_a_reference"),
    "surgery.match": Change("nothing", Refused(r"surgery interpolate: match: .*'nothing' matches no parameter")),
}
SPLIT_AT: dict[str, Entry] = {
    "surgery.layer": Change(
        2, Shapes({r"^model\.body\.0\..*q_proj": (2, 4, 8, 32), r"^model\.body\.1\..*q_proj": (1, 4, 8, 32)})
    ),
}
DROPPED = "tests/surgery/test_drop_layers.py::"
DROP_LAYERS: dict[str, Entry] = {
    "surgery.layers": Change([0, 2], Shapes({r"^model\.body\..*q_proj": (1, 4, 8, 32)})),
    "surgery.num_layers": ShownIn(DROPPED + "test_the_layers_with_the_least_influence_are_dropped_with_their_moments"),
    "surgery.calibration_batches": ShownIn(DROPPED + "test_one_and_eight_devices_choose_the_same_layers"),
}
EXTEND_CONTEXT: dict[str, Entry] = {
    "surgery.seq_len": Change(48, Value(lambda plan: plan.phases[0].model.seq_len, 48)),
    "surgery.rope": Change(
        {"type": "linear"}, Value(lambda plan: type(plan.phases[0].model.rope).__name__, "LinearRotary")
    ),
}
GROWN = "tests/systems/progressive/test_grow.py::"
GROW: dict[str, Entry] = {
    "surgery.num_layers": Change(1, Shapes({r"^model\.body\.1\..*q_proj": (1, 4, 8, 32)})),
    "surgery.at": Change("prepend", Shapes({r"^model\.body\.0\..*q_proj": (3, 4, 8, 32)})),
    "surgery.init": ShownIn(GROWN + "test_copied_layers_repeat_the_model"),
}


def denoisers(plan: Plan) -> list[tuple[float, int, int]]:
    """The parts of the model of the first phase."""
    parts = plan.state_builder.abstract_state(plan.phases[0]).model.traits.denoisers
    return [(one.max_fraction, one.first, one.stop) for one in parts]


DENOISERS: dict[str, Entry] = {
    "surgery.mask_fractions": Change([0.25, 1.0], Value(denoisers, [(0.25, 1, 2), (1.0, 0, 2)])),
    "surgery.parts": Change("blocks", Value(denoisers, [(0.5, 1, 2), (1.0, 0, 1)])),
}
DIFFUSION_BLOCKS: dict[str, Entry] = {
    "objective.num_blocks": Change(1, Value(denoisers, [(1.0, 0, 2)])),
}
DECOUPLED = "tests/systems/upcycle/test_decouple.py::"
DECOUPLE: dict[str, Entry] = {
    "surgery.sem_dim": Change(8, Shapes({r"^model.*q_sem\.weight": (2, 4, 2, 32)})),
    "surgery.geo_dim": Change(8, Shapes({r"^model.*q_geo\.weight": (2, 4, 2, 32)})),
    "surgery.method": ShownIn(DECOUPLED + "test_the_loss_right_after_depends_on_where_queries_and_keys_come_from"),
    "surgery.calibration_batches": ShownIn(DECOUPLED + "test_measured_inputs_choose_pairs_and_approximation"),
    "surgery.pairs": ShownIn(DECOUPLED + "test_both_rules_choose_the_pairs_that_they_promise"),
    "surgery.num_key_heads": ShownIn(
        "tests/systems/upcycle/test_shared_keys.py::test_as_many_features_as_all_heads_have_change_nothing"
    ),
    "surgery.gate": Change("static", Shapes({r"^model.*gate\.logits": (2, 4)})),
    "surgery.null_slot": Change(True, Shapes({r"^model.*null_slot\.values": (2, 4, 8)})),
}
POOLED = "tests/systems/upcycle/test_pool_kv_heads.py::"
POOL_KV_HEADS: dict[str, Entry] = {
    "surgery.num_kv_heads": Change(2, Shapes({r"^model.*k_proj\.weight": (2, 2, 8, 32)})),
    "surgery.method": ShownIn(POOLED + "test_heads_are_means_and_everything_else_keeps_its_bits"),
    "surgery.align": ShownIn(POOLED + "test_turned_heads_compute_the_same"),
    "surgery.calibration_batches": ShownIn(POOLED + "test_alignment_loses_less_in_every_layer"),
}
FP8: dict[str, Entry] = {
    "surgery.recipe": Change("rowwise", Program(gains=r"stablehlo\.bitcast_convert", loses=r"f8E5M2", part="step")),
    "surgery.exclude": Change("mlp", Program(loses=r"f8E4M3FN")),
    "surgery.min_features": Change(64, Refused(r"no linear layer has at least min_features: 64 input and output")),
}
OF_TORCH = ShownIn("tests/controllers/test_reduce_on_plateau.py::test_the_learning_rates_are_those_of_torch")
PLATEAU: dict[str, Entry] = {
    "trainer.controllers.0.metric": Change(
        "eval/x", Refused(r"trainer\.controllers\.0\.metric: 'eval/x' given, but no evaluation measures it")
    ),
    **{
        f"trainer.controllers.0.{name}": OF_TORCH
        for name in ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")
    },
}
HANDOVER: dict[str, Entry] = {
    f"trainer.controllers.0.{name}": ShownIn(
        f"tests/systems/upcycle/test_handover.py::test_the_loss_may_be_some_{what}"
    )
    for name, what in {"max_loss_increase": "times_the_teachers", "max_loss_delta": "nats_above_the_teachers"}.items()
}


def _batch_of_phase(plan: Plan) -> tuple[int, int]:
    """Sequences per microbatch of the first phase, in training and in evaluation."""
    return plan.batches.of(plan.phases[0]).first.microbatch, plan.batches.eval_of(plan.phases[0])


PHASES: dict[str, Entry] = {
    "phases.0.name": ShownIn(
        "tests/end_to_end/test_phases.py::test_the_cursor_separates_entry_from_end_and_a_damaged_entry_is_rebuilt"
    ),
    "phases.0.num_train_steps": Change(50, Rates({50: 1e-5})),
    "phases.0.train_batch_size": Change(
        48,
        Refused(r"trainer\.train_batch_size: 16 given, but it has no effect, because every phase has its own \(48\)"),
    ),
    "phases.0.per_device_parallelism": Change(1, Value(_batch_of_phase, (8, 8))),
    "phases.0.carry_optimizer": Change(
        True, Refused(r"carry_optimizer: true given, but no phase is before the first one")
    ),
    "phases.0.until": ShownIn(
        GOING_BACK + "test_the_next_phase_starts_from_the_best_weights_where_the_phase_before_ended"
    ),
    "phases.0.controllers": Change([{"type": "reduce_on_plateau", "metric": "train/loss"}], LR_SCALE),
    "phases.0.surgery": Change([{"type": "lora", "rank": 2}], Shapes({r"^model.*attn\.q_proj\.a$": (2, 2, 32)})),
    "phases.0.trainable": Change(["mlp"], Shapes({r"^opt_state.*attn": None})),
    "phases.0.data": ShownIn("tests/end_to_end/test_prepare.py::test_shows_the_rows_that_a_step_sees"),
    "phases.0.objective": Change({"type": "next_token", "z_loss_weight": 1e-3}, Program(gains=r"\['z_loss'\]")),
    "phases.0.optimizer": Change({"type": "adam", "learning_rate": 3e-4}, Rates({1: 3e-4})),
}
TOP_K = {"objective": {"top_k": 5}}
DISTILL: dict[str, Entry] = {
    "objective.teacher": Change("other", Refused(r"uses the model 'other', but the section only has: teacher")),
    "objective.divergence": Change("js", Program(gains=r"stablehlo\.log_plus_one")),
    "objective.beta": Change(0.3, Constant(0.3), also={"objective": {"divergence": "js"}}),
    "objective.temperature": Change(3.0, Constant(3.0)),
    "objective.weight": Change(0.3, Constant(0.3, alone=True)),
    "objective.top_k": Change(5, Program(gains=r"tensor<\d+x\d+x5xi32>")),
    "objective.hidden": Change(0.3, Constant(0.3), also={"model": {"hidden_dim": 64}}),  # as wide as its teacher
    "objective.cache": Change(True, Program(gains=r"%arg\d+: tensor<1x16x16x5xi32>"), also=TOP_K),
    "objective.teacher_loss": Change(True, Program(gains=r"\['teacher_loss'\]")),
    "refs.teacher.path": ShownIn(REFERENCES + "test_a_teacher_is_loaded_in_its_own_dtype_sharded_like_parameters"),
    "refs.teacher.dtype": Change("float32", Program(loses=r"xbf16>")),
    "refs.teacher.weight_names": ShownIn(REFERENCES + "test_weights_of_other_programs_are_renamed"),
    "refs.teacher.sanity": ShownIn(GATES + "test_a_scrambled_teacher_is_refused_before_anything_is_saved"),
    "refs.teacher.sanity.max_loss": ShownIn(GATES + "test_limits_of_loss_and_perplexity"),
    "refs.teacher.sanity.max_perplexity": ShownIn(GATES + "test_limits_of_loss_and_perplexity"),
    "refs.teacher.sanity.batches": ShownIn(GATES + "test_the_loss_of_a_good_teacher_is_logged_once"),
    "refs.teacher.skip_keys": ShownIn(REFERENCES + "test_a_key_of_a_teachers_config_is_skipped_on_request"),
}
BLOCKS = "tests/systems/upcycle/test_blockwise.py::"
LAYERWISE = "tests/models/test_layerwise.py::"
CACHED_TRUNK: dict[str, Entry] = {
    "objective.objective": Change({"type": "next_token", "z_loss_weight": 0.1}, Constant(0.1)),
    "objective.num_layers": Change(2, Refused("num_layers: 2 given, but the model has 2 layers")),
    "objective.int8": Change(True, Program(gains=r"%arg\d+: tensor<1x16x16x32xi8>")),
}
BLOCKWISE: dict[str, Entry] = {
    "objective.teacher": Change("other", Refused(r"uses the model 'other', but the section only has: teacher")),
    "objective.target": ShownIn(LAYERWISE + "test_streams_are_those_of_a_pass_through_all_layers"),
    "objective.order": ShownIn(BLOCKS + "test_sequential_blocks_train_alone_each_with_a_new_optimizer_and_one_program"),
    "objective.inputs": ShownIn(
        LAYERWISE + "test_a_layer_that_reads_its_own_models_streams_is_compared_with_the_teachers"
    ),
    "objective.cache": Change("int8", Program(gains=r"%arg\d+: tensor<1x16x2x16x64xi8>")),
    "objective.convergence": Section(),
    "objective.convergence.target": ShownIn(BLOCKS + "test_limits_of_steps_and_the_target"),
    "objective.convergence.max_steps": ShownIn(BLOCKS + "test_limits_of_steps_and_the_target"),
    "objective.convergence.min_steps": ShownIn(BLOCKS + "test_limits_of_steps_and_the_target"),
    "objective.convergence.patience": ShownIn(
        BLOCKS + "test_a_constant_error_ends_a_block_after_exactly_patience_steps_without_improvement"
    ),
    "objective.convergence.min_delta": ShownIn(BLOCKS + "test_averages_and_counts_match_the_definition"),
    "objective.convergence.decay": ShownIn(BLOCKS + "test_averages_and_counts_match_the_definition"),
    "objective.autotune": Section(),
    "objective.autotune.mode": ShownIn(BLOCKS + "test_off_and_monitor_move_the_model_alike_and_active_less"),
    **{
        f"objective.autotune.{name}": ShownIn(BLOCKS + "test_autotune_lowers_the_rate_on_plateaus_down_to_its_limit")
        for name in ("patience", "decay", "min_scale")
    },
    "objective.autotune.spike_std": ShownIn(BLOCKS + "test_autotune_sees_a_spike_on_a_falling_error_and_few_in_noise"),
}
PREFERENCES = "tests/objectives/test_dpo.py::"
DPO: dict[str, Entry] = {
    "objective.loss_type": ShownIn(PREFERENCES + "test_terms_and_metrics_match_the_logits"),
    "objective.beta": ShownIn(PREFERENCES + "test_terms_and_metrics_match_the_logits"),
    "objective.label_smoothing": ShownIn(PREFERENCES + "test_terms_and_metrics_match_the_logits"),
    "objective.reduction": ShownIn(PREFERENCES + "test_terms_and_metrics_match_the_logits"),
    "objective.simpo_gamma": ShownIn(PREFERENCES + "test_the_losses_match_the_closed_forms_with_finite_gradients"),
    "objective.alphapo_alpha": ShownIn(PREFERENCES + "test_the_losses_match_the_closed_forms_with_finite_gradients"),
    "objective.discopop_tau": ShownIn(PREFERENCES + "test_the_losses_match_the_closed_forms_with_finite_gradients"),
    **{
        f"objective.{name}": ShownIn("tests/objectives/test_trl_vectors.py::test_losses_of_pairs_are_those_of_trl")
        for name in ("f_divergence", "f_divergence_alpha", "ld_alpha", "wpo")
    },
    "objective.sft_weight": ShownIn(PREFERENCES + "test_terms_and_metrics_match_the_logits"),
    "objective.reference": Change("base", Refused(r"uses the model 'base', but the section is empty")),
    "objective.cache": ShownIn(PREFERENCES + "test_answers_from_the_disk_are_not_asked_again"),
    "objective.sync_interval": ShownIn(
        PREFERENCES + "test_frozen_leaves_are_the_reference_s_too_and_syncs_move_the_others"
    ),
    "objective.sync_mixup": ShownIn(
        PREFERENCES + "test_frozen_leaves_are_the_reference_s_too_and_syncs_move_the_others"
    ),
}
GROUPS = "tests/systems/rl/test_grpo.py::"
OF_TERMS = ShownIn(GROUPS + "test_terms_and_metrics_match_the_logits")
OF_TRL = ShownIn("tests/systems/rl/test_trl_vectors.py::test_losses_of_groups_are_those_of_trl")
OF_SAMPLER = ShownIn(GROUPS + "test_terms_on_what_a_sampler_has_recorded")
GRPO: dict[str, Entry] = {
    **dict.fromkeys(
        (
            *("objective.loss", "objective.loss.importance", "objective.loss.epsilon", "objective.loss.epsilon_high"),
            *("objective.loss.dual_clip", "objective.loss.cap", "objective.loss.positive_temperature"),
            *("objective.loss.negative_temperature", "objective.loss_agg", "objective.loss_agg.max_response_tokens"),
            *("objective.old_policy", "objective.advantage", "objective.advantage.baseline"),
            *("objective.advantage.std_ddof", "objective.advantage.eps"),
            *("objective.kl", "objective.kl.coef", "objective.kl.estimator", "objective.kl.level"),
        ),
        OF_TERMS,
    ),
    **dict.fromkeys(
        (
            *("objective.loss.positive_power", "objective.loss.positive_decay", "objective.loss.negative_power"),
            *("objective.loss.negative_decay", "objective.advantage.std_of", "objective.kl.unbiased"),
            *(f"objective.old_policy.importance_sampling.{name}" for name in ("floor", "mode")),
            *("objective.entropy.coef", "objective.off_policy_threshold", "objective.mask_truncated"),
            "objective.top_entropy",
        ),
        OF_TRL,
    ),
    "objective.entropy": Section(),
    **dict.fromkeys(
        (
            "objective.entropy.adaptive",
            *(f"objective.entropy.adaptive.{name}" for name in ("target", "delta", "min", "max")),
        ),
        ShownIn("tests/systems/rl/test_trl_vectors.py::test_adaptive_entropy_is_that_of_trl_in_any_microbatches"),
    ),
    "objective.old_policy.importance_sampling": OF_SAMPLER,
    "objective.old_policy.importance_sampling.cap": OF_SAMPLER,
    "objective.overlong": OF_SAMPLER,
    "objective.overlong.cache": OF_SAMPLER,
    "objective.overlong.max_response_tokens": OF_SAMPLER,
    "objective.reference": Change("base", Refused(r"uses the model 'base', but the section is empty")),
    "objective.cache": ShownIn(PREFERENCES + "test_answers_from_the_disk_are_not_asked_again"),
    "objective.sync_interval": DPO["objective.sync_interval"],
    "objective.sync_mixup": DPO["objective.sync_mixup"],
}
UNPAIRED = ShownIn("tests/objectives/test_kto.py::test_terms_and_metrics_match_the_logits")
KTO: dict[str, Entry] = {
    "objective.estimate_kl": UNPAIRED,
    "objective.beta": UNPAIRED,
    "objective.desirable_weight": UNPAIRED,
    "objective.undesirable_weight": UNPAIRED,
    **{name: GRPO[name] for name in ("objective.reference", "objective.sync_interval", "objective.sync_mixup")},
    "objective.cache": GRPO["objective.cache"],
}
REWARD_HEAD: dict[str, Entry] = {
    "surgery.from_hf": ShownIn(
        "tests/interop/test_classifier.py::test_rewards_are_those_of_transformers_in_both_directions"
    ),
}
REWARD: dict[str, Entry] = {
    "objective.center_coefficient": ShownIn(
        "tests/objectives/test_reward.py::test_terms_and_metrics_match_the_hidden_states"
    ),
}
CHECKPOINT: dict[str, Entry] = {
    "refs.teacher.path": ShownIn(DISTILLED + "test_a_checkpoint_is_the_same_teacher_as_its_export"),
    "refs.teacher.dtype": Change("int8", Refused(r"refs\.teacher\.dtype: 'int8' given")),
    "refs.teacher.sanity": ShownIn(GATES + "test_a_scrambled_teacher_is_refused_before_anything_is_saved"),
    "refs.teacher.weights": ShownIn(DISTILLED + "test_the_average_of_a_checkpoint_is_another_teacher"),
}


def _stored_mlp(plan: Plan) -> set[str]:
    """The dtypes in which the parameters of MLPs are stored."""
    model = plan.state_builder.abstract_initial_model
    return {leaf.dtype.name for path, leaf in tree.leaves(model) if "mlp." in path}


TABLE: Table = {
    "llama": {**TOP_LEVEL, **TRAINER, **OPTIMIZER},
    "keep": KEEP,
    "until": UNTIL,
    "plateau": PLATEAU,
    "handover": HANDOVER,
    "watch": WATCH,
    "stages": {
        "trainer.train_batch_size.1.start": Change(30, Value(lambda plan: plan.batches.train.at(25).size, 16)),
        "trainer.train_batch_size.1.value": Change(48, Value(lambda plan: plan.batches.train.at(25).size, 48)),
    },
    "lora": LORA,
    "quantize": QUANTIZE,
    "split_at": SPLIT_AT,
    "drop_layers": DROP_LAYERS,
    "extend_context": EXTEND_CONTEXT,
    "grow": GROW,
    "denoisers": DENOISERS,
    "diffusion_blocks": DIFFUSION_BLOCKS,
    "decouple": DECOUPLE,
    "pool_kv_heads": POOL_KV_HEADS,
    "interpolate": INTERPOLATE,
    "fp8": FP8,
    "distill": DISTILL,
    "blockwise": BLOCKWISE,
    "cached_trunk": CACHED_TRUNK,
    "checkpoint": CHECKPOINT,
    "dpo": DPO,
    "grpo": GRPO,
    "kto": KTO,
    "reward": REWARD,
    "reward_head": REWARD_HEAD,
    "phases": PHASES,
    "8bit": {
        "optimizer.state.min_size": Change(1200, Shapes({r"mu\..*q_proj\.weight\.codes": None})),
        "optimizer.state.embeddings": Change(True, Shapes({r"mu\.tokens\.weight\.codes": (64, 32)})),
    },
    "adagc": {
        "optimizer.adagc.mode": Change("zscore", Shapes({r"^opt_state\.0\.variance\..*q_proj\.weight$": (2,)})),
        "optimizer.adagc.lambda_rel": Change(1.76, Constant(1.76, part="update")),
        "optimizer.adagc.lambda_abs": Change(0.77, Constant(0.77, part="update")),
        "optimizer.adagc.threshold": ShownIn(
            "tests/optim/test_adagc.py::test_200_steps_match_the_algorithm_in_float64"
        ),
        "optimizer.adagc.beta": Change(0.79, Constant(0.79, part="update")),
        "optimizer.adagc.warmup": Change(81, Constant(81, part="update")),
    },
    "precision": {
        "trainer.mp.default": Change("f32", Program(loses=r"bf16")),
        "trainer.mp.rules": Section(),
        "trainer.mp.rules.0.match": Change(
            "experts", Refused(r"mp\.rules\.0\.match: 'experts' matches no parameter\. Closest names: \w+")
        ),
        "trainer.mp.rules.0.params": Change("bf16", Value(_stored_mlp, {"bfloat16"})),
        "trainer.mp.rules.0.compute": Change("bf16", Program(loses=r"dot_general [^\n]*xf32>, [^\n]*xf32>\)")),
    },
}
