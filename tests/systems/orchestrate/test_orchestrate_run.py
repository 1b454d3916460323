"""Orchestration in the real command: branches and a rollback, killed (SIGKILL) around each, sharded, and in two processes."""

import functools
import json
from typing import Any

import pytest

from tests.end_to_end.commands import Workplace, check_close

MODULE = "tests.systems.orchestrate.orchestrated"
STEPS = 72
SPIKE = {"JAXLM_TEST_SPIKE": f"{34 * 16}:{35 * 16}"}  # the batch of step 35
OPTIMIZER = """
  {type: portfolio, learning_rate: 7.0e-3, warmup: 2, telemetry: {window: 20, mean_steps: 5, reference_steps: 20}}
"""
SAFETY = "safety: {snapshot_interval: 8, quarantine: 2, max_grad_increase: 50, max_loss_increase: null}"
CONTROLLER = (
    "type: orchestrator, interval: 12, horizon: 4, min_steps_between_switches: 4, branch_budget: 1.0, probe_batches: 2"
)
KEYS = (
    *("--config_path", "run.yaml", "--optimizer", OPTIMIZER.strip(), "--trainer.num_train_steps", str(STEPS)),
    *("--trainer.steps_per_eval", "24", "--trainer.checkpointer.keep", "[{every: 24}]"),
    *("--trainer.checkpointer.delete_old_temp_checkpoints", "false"),
)
ORCHESTRATED = (*KEYS, "--trainer.controllers", f"[{{{CONTROLLER}, {SAFETY}}}]")
LAST = f"step-{STEPS}-attempt-1"


def decisions(place: Workplace) -> list[dict[str, Any]]:
    lines = (place.folder / "logs" / "run" / "decisions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def results(place: Workplace) -> Any:
    return place.numbers(), decisions(place), place.digest(LAST)


@pytest.fixture(scope="session")
def whole(workplace):
    """The run without a kill, by number of devices."""

    @functools.cache
    def run(devices: int = 1) -> Workplace:
        place = workplace(devices)
        place.write()
        place.finish(*ORCHESTRATED, module=MODULE, **SPIKE)
        return place

    return run


@pytest.mark.soak
def test_a_damaged_batch_costs_one_rollback_and_branches_keep_within_the_interval(workplace, whole):
    place, clean = whole(), workplace()
    notes = decisions(place)
    rollbacks = [note for note in notes if note["event"] == "rollback"]
    assert [(note["reason"], note["last"], note["to"]) for note in rollbacks] == [("safety", 35, "spike_resistant")]
    branches = [(note["step"], note.get("attempt", 0)) for note in notes if note["event"] == "branch"]
    assert branches[0] == (15, 0)  # a tenth is done after step 8, which is in effect from step 12 on
    assert all(set(note["losses"]) >= {note["winner"]} for note in notes if note["event"] == "branch")
    steps = [(record.get("attempt", 0), record["step"]) for record in place.numbers() if "train/objective" in record]
    back = rollbacks[0]["first"]
    assert steps == [*((0, n) for n in range(1, 36)), *((1, n) for n in range(back, STEPS + 1))]
    assert place.digest(f"step-{back - 1}") == place.digest(f"step-{back - 1}-attempt-1")
    saved = place.folder / "checkpoints" / "run" / f"step-{back - 1}-attempt-1" / "data" / "position.json"
    assert json.loads(saved.read_text()) == {"examples": 35 * 16, "step": back - 1, "skipped": (36 - back) * 16}
    clean.write()
    clean.finish(*ORCHESTRATED)
    ends = [[r["eval/loss"] for r in run.numbers() if "eval/loss" in r][-1] for run in (place, clean)]
    assert ends[0] == pytest.approx(ends[1], rel=0.02)


@pytest.mark.soak
def test_damage_without_end_ends_the_run_after_three_rollbacks(workplace):
    place = workplace()
    place.write()
    end = place.run(*ORCHESTRATED, module=MODULE, JAXLM_TEST_SPIKE=f"{34 * 16}:100000")
    assert end.code == 1, end.err
    assert "error: step " in end.err
    assert "the run has gone back 3 times in a row already (orchestrator.safety.max_rollbacks_in_a_row)" in end.err
    assert "Traceback" not in end.err
    assert [note["reason"] for note in decisions(place) if note["event"] == "rollback"] == 3 * ["safety"]


@pytest.mark.soak
def test_a_run_killed_around_each_decision_ends_the_same(workplace, whole):
    place = workplace()
    place.write()
    for at in (
        "between decision and branch",
        "in a branch",
        "before going back",
        "before the save",
        "after going back",
    ):
        place.die(*ORCHESTRATED, at=at, module=MODULE, **SPIKE)
    place.finish(*ORCHESTRATED, module=MODULE, **SPIKE)
    assert results(place) == results(whole())


@pytest.mark.soak
def test_eight_devices_and_two_processes_decide_as_one_device_does(workplace, whole):
    def decided(place: Workplace) -> list[Any]:
        told = ("step", "event", "reason", "winner", "from", "to", "first", "last")
        return [{key: note[key] for key in told if key in note} for note in decisions(place)]

    two = workplace()
    two.write()
    ends = two.run_all(2, *ORCHESTRATED, module=MODULE, **SPIKE)
    assert [end.code for end in ends] == [0, 0], ends
    for place in (two, whole(8)):
        assert decided(place) == decided(whole())
        last = lambda run: {r["step"]: r["eval/loss"].hex() for r in run.numbers() if "eval/loss" in r}  # noqa: E731
        check_close(last(place), last(whole()), rel=1e-4)


@pytest.mark.soak
def test_to_monitor_changes_no_bit(workplace):
    runs = []
    for keys in ((), ("--trainer.controllers", f"[{{{CONTROLLER}, mode: monitor}}]")):
        place = workplace()
        place.write()
        place.finish(*KEYS, *keys)
        runs.append((place.losses(), place.digest(f"step-{STEPS}")))
    assert runs[0] == runs[1]
    assert {note["event"] for note in decisions(place)} >= {"branch"}
    assert all(note["would"] for note in decisions(place) if note["event"] != "spike")
