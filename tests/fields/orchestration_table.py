"""The fields of orchestration: the controller, what it reads, and where the weights are going."""

from tests.fields.proofs import Change, Constant, Entry, Section, Shapes, ShownIn, Table

DECISIONS = "tests/systems/orchestrate/test_orchestrator.py::test_"
KEYS = "tests/systems/orchestrate/test_orchestrator_keys.py::test_"
AT = "trainer.controllers.0"
ORCHESTRATOR: dict[str, Entry] = {
    "mode": Change("monitor", Shapes({r"^slots\.controls\.strategy$": None})),
    "interval": ShownIn(DECISIONS + "decisions_come_at_the_interval_and_never_sooner"),
    "min_steps_between_switches": ShownIn(DECISIONS + "after_a_switch_no_boundary_counts_for_a_while"),
    "max_spikes": ShownIn(KEYS + "as_many_spikes_as_the_key_says_are_a_boundary"),
    "horizon": ShownIn(KEYS + "a_branch_is_as_the_keys_say"),
    "max_candidates": ShownIn(KEYS + "a_branch_is_as_the_keys_say"),
    "branch_budget": ShownIn(DECISIONS + "the_budget_bounds_the_steps_of_losing_candidates"),
    "probe_batches": ShownIn(KEYS + "a_branch_is_as_the_keys_say"),
    "exploration": ShownIn(KEYS + "a_larger_bonus_tries_what_did_worse_before"),
    "discount": ShownIn(KEYS + "rewards_are_measured_on_the_scale_and_fade_with_the_discount"),
    "reward_scale": ShownIn(KEYS + "rewards_are_measured_on_the_scale_and_fade_with_the_discount"),
    "when_unstable": ShownIn(KEYS + "favored_strategies_are_tried_first"),
    "on_plateau": ShownIn(KEYS + "favored_strategies_are_tried_first"),
    "switch_at": Section(),
    "switch_at.0.step": ShownIn(DECISIONS + "switches_that_are_written_come_at_their_step"),
    "switch_at.0.to": ShownIn(DECISIONS + "switches_that_are_written_come_at_their_step"),
    "safety": Section(),
    "safety.strategy": ShownIn(KEYS + "a_checkpoint_is_trusted_after_its_quarantine"),
    "safety.max_loss_increase": ShownIn(DECISIONS + "metrics_within_the_limits_do_not_trip"),
    "safety.max_loss_delta": ShownIn(DECISIONS + "a_difference_of_losses_may_be_the_limit"),
    "safety.max_grad_increase": ShownIn(DECISIONS + "metrics_within_the_limits_do_not_trip"),
    "safety.max_skipped": ShownIn(KEYS + "so_many_skipped_updates_in_a_row_lead_back"),
    "safety.snapshot_interval": ShownIn(
        DECISIONS + "a_bad_gradient_leads_back_to_a_trusted_checkpoint_with_the_safe_strategy"
    ),
    "safety.quarantine": ShownIn(KEYS + "a_checkpoint_is_trusted_after_its_quarantine"),
    "safety.max_rollbacks_in_a_row": ShownIn(KEYS + "as_many_rollbacks_in_a_row_as_the_key_says"),
    "nowcast": Section(),
    **{
        f"nowcast.{name}": ShownIn(DECISIONS + "extrapolation_is_tried_now_and_then_and_given_up")
        for name in ("every", "start", "steps", "max_rejections")
    },
}
TELEMETRY: dict[str, Entry] = {
    "optimizer.telemetry.window": Change(48, Shapes({r"^slots\.telemetry\.norms\.values": (48,)})),
    "optimizer.telemetry.min_steps": Change(33, Constant(33, part="step")),
    "optimizer.telemetry.loss_limit": Change(5.37, Constant(5.37, part="step")),
    "optimizer.telemetry.grad_norm_limit": Change(8.37, Constant(8.37, part="step")),
    "optimizer.telemetry.plateau_window": Change(123, Shapes({r"^slots\.telemetry\.recent\.values": (123,)})),
    "optimizer.telemetry.mean_steps": Change(19, Constant(1 / 19, part="step")),
    "optimizer.telemetry.reference_steps": Change(211, Constant(1 / 211, part="step")),
}
TABLE: Table = {
    "orchestrator": {f"{AT}.{name}": entry for name, entry in ORCHESTRATOR.items()},
    "telemetry": TELEMETRY,
    "portfolio": {"optimizer.nowcast.window": Change(7, Constant(6 / 7, part="step"))},
}
