"""What a resumed run says of changed controllers."""

from typing import Any

from jaxlm.plan.load_config import decode_run
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.resume_checks import SavedRun, changes
from tests.session.test_changes import OPTIONS


def test_of_an_entry_of_a_list_only_the_keys_that_changed_are_told():
    def told_of(before: list[Any], now: list[Any]) -> list[str]:
        optimizer = {"type": "portfolio", "telemetry": True}
        trees = [{"optimizer": optimizer, "trainer": {"controllers": given}} for given in (before, now)]
        configs = [decode_run(ConfigSource(tree), None) for tree in trees]
        return changes(SavedRun("s", configs[0]), configs[1], OPTIONS, 5, 80)

    plateau, orchestrator = (
        {"type": "reduce_on_plateau", "metric": "train/loss"},
        {"type": "orchestrator", "mode": "monitor"},
    )
    switch = {"step": 9, "to": "sgd_escape"}
    changed = orchestrator | {"interval": 50, "safety": {"quarantine": 7}, "switch_at": [switch]}
    place, effect = "trainer.controllers.1", "(changes what follows: the controller decides by the new value from here)"
    assert told_of([plateau, orchestrator], [plateau, changed]) == [
        f"{place}.interval: 500 -> 50 {effect}",
        f"{place}.switch_at: [] -> [{switch}] {effect}",
        f"{place}.safety.quarantine: 20 -> 7 {effect}",
    ]
    later = changed | {"switch_at": [switch | {"step": 8}]}
    assert told_of([plateau, changed], [plateau, later]) == [f"{place}.switch_at.0.step: 9 -> 8 {effect}"]
    added, whole = told_of([], [plateau]), told_of([plateau], [orchestrator])
    assert len(added) == len(whole) == 1
    assert whole[0].startswith("trainer.controllers: [{'type': 'reduce_on_plateau', ")
    assert "a new controller starts here" in added[0]
