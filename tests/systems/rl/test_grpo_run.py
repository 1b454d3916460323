"""Runs of `grpo` on stored groups: what they learn."""

import random
from typing import Any

import pytest

from tests.end_to_end.test_dpo import LETTERS, finish, records_of, start

GRPO = {
    "data": {"type": "groups", "format": {"type": "groups", "group_size": 4}},
    "objective": {"type": "grpo", "loss_agg": "seq_mean_token_mean"},
    "evals": [{"type": "objective"}],
}


def groups() -> list[dict[str, Any]]:
    """One response of four repeats the letter of the prompt."""
    chooser, records = random.Random(0), []
    for letter in LETTERS * 15:
        responses = chooser.sample([other for other in LETTERS if other != letter], 3)
        responses.insert(at := chooser.randrange(4), letter)
        rewards = [1.0 if number == at else 0.0 for number in range(4)]
        records.append({"prompt": f"{letter}:", "responses": [f" {r}" for r in responses], "rewards": rewards})
    return records


@pytest.mark.soak
def test_rewarded_responses_become_more_likely_within_the_clipped_range(workplace):
    place = start(workplace(), GRPO, groups())
    finish(place)
    steps = [record for record in records_of(place) if "train/loss" in record]
    assert steps[0]["train/loss"] == pytest.approx(0, abs=1e-6)
    assert steps[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    assert steps[0]["train/reward"] == 0.25
    # With all ratios at the limits, the loss is -0.2 times the mean size of the advantages: 2 * sqrt(3) / 4.
    assert -0.2 * 3**0.5 / 2 * 1.5 < steps[-1]["train/loss"] < -0.1
    assert steps[-1]["train/clip_ratio/high_mean"] > 0.05
    evaluated = [record for record in records_of(place) if "eval/reward" in record]
    assert len(evaluated) == 3
