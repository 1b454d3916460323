"""What a resumed run on rollouts checks."""

from tests.session.test_resume_checks import STAGES, warnings_of


def test_a_rollout_in_the_middle_does_not_move_the_stages_of_weights():
    """It has read the prompts of all its mini-batches: here those of steps 28 to 31."""
    configs = {name: {"train_urls": [name], "format": {"type": "prompts"}} for name in "ab"}
    rollouts = {"type": "rollouts", "configs": configs, "updates_per_rollout": 4, "minibatches_per_rollout": 4}
    rollouts["rewards"] = [{"type": "length", "max_tokens": 8}]
    sections = {"data": rollouts, "objective": {"type": "grpo", "old_policy": "rollout", "kl": None}}
    held = {"rollout": {"first_step": 28, "end": 32}}
    assert warnings_of(16, STAGES, 512, sections, **held) == []
    (line,) = warnings_of(32, STAGES, 512, sections, **held)
    assert "the first 32 steps of phase 'train' read 512 sequences" in line
    assert "have read 1,024" in line
    assert "[{start: 0, value: 16}, {start: 32, value: 32}]" in line
