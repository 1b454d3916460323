"""Runs that go back to an earlier checkpoint, and phases that end early. Runs the trainer in this process, on eight devices.

A poisoned example has a loss mask of NaN, so that every step that reads it has a loss that is not finite.
"""

import hashlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.mixture import Mixture
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor, find_checkpoints
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.phase_runner import RewindError
from jaxlm.engine.sync import Next
from jaxlm.observe.trackers import read_jsonl
from tests.session.test_init_from import Trainings, saved_arrays

pytestmark = pytest.mark.slow

STEPS, BATCH = 10, 8
RULE = {"optimizer": {"skip_bad_steps": {"rewind_after": 3, "max_rewinds": 2}}}


class Runs(Trainings):
    """Runs of ten steps on batches of eight examples, with evaluations."""

    def run(self, run_id: str, steps: int = STEPS, **sections: Any) -> Any:
        optimizer = {"learning_rate": 1e-2, "warmup": 0, "lr_schedule": "constant", **sections.pop("optimizer", {})}
        data = {"validation_urls": [f"{self.folder}/text"], **self.config(run_id, steps)["data"]}
        trainer = {"steps_per_eval": 2, "max_eval_batches": 1, **sections.pop("trainer", {})}
        return super().run(run_id, steps, optimizer=optimizer, data=data, trainer=trainer, **sections)

    def records(self, run_id: str) -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def attempts(self, run_id: str) -> list[tuple[int, int]]:
        """(attempt, step) of each training record."""
        return [(r.get("attempt", 0), r["step"]) for r in self.records(run_id) if "train/objective" in r]

    def cursor(self, run_id: str, checkpoint: str) -> Cursor:
        return Cursor.from_json((self.place(run_id) / checkpoint / "run" / "cursor.json").read_bytes())

    def names(self, run_id: str) -> list[str]:
        return [path.name for path in find_checkpoints(self.place(run_id))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """`clean` is a run without poison, and has a checkpoint and an export of every second step."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.run("clean", hf_save_path=f"{made.folder}/hf_clean", hf_save_steps=2)
    return made


@pytest.fixture
def poison(monkeypatch):
    """Poisons the examples of a range of steps of the first attempt, counted from 1; None is no end."""
    read = Mixture.read

    def plant(first: int, last: int | None) -> None:
        begin, end = (first - 1) * BATCH, np.inf if last is None else last * BATCH

        def reading(self: Mixture, rows: np.ndarray, *args: Any) -> Any:
            columns = read(self, rows, *args)
            columns["loss_mask"] = columns["loss_mask"].copy()
            columns["loss_mask"][(rows >= begin) & (rows < end)] = np.nan
            return columns

        monkeypatch.setattr(Mixture, "read", reading)

    return plant


def moved(source: Path, target: Path, examples: int) -> None:
    """Copies a checkpoint and moves its data position."""
    shutil.copytree(source, target)
    path, sums = target / "data" / "position.json", target / "checksums.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "examples": examples}))
    listed = json.loads(sums.read_text())
    listed["data/position.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text(json.dumps(listed))


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray], *, below: str = "") -> bool:
    ours, theirs = ({path: a for path, a in arrays.items() if path.startswith(below)} for arrays in (one, two))
    return bool(ours) and ours.keys() == theirs.keys() and all(np.array_equal(ours[p], theirs[p]) for p in ours)


@pytest.mark.soak
def test_three_bad_steps_in_a_row_go_back_and_past_their_data(runs, poison):
    """Compared with a run that is started by hand from the same checkpoint, with the data position after the bad steps."""
    poison(5, 7)
    result = runs.run("rewound", **RULE)
    assert "steps 5 to 7 were skipped: going back to" in runs.output
    assert "rewound/step-4 and past the data of the 3 steps since (attempt 1 of at most 2)" in runs.output
    assert runs.attempts("rewound") == [*((0, n) for n in range(1, 8)), *((1, n) for n in range(5, STEPS + 1))]
    assert int(result.state.step) == int(result.state.guard.updates) == STEPS
    assert result.checkpoint.name == "step-10-attempt-1"
    history = runs.cursor("rewound", "step-10-attempt-1").history
    assert (history.attempt, history.abandoned_steps, history.controllers, history.pins) == (1, 3, {}, {})

    moved(runs.place("rewound") / "step-4", runs.place("by_hand") / "step-4", 7 * BATCH)
    runs.run("by_hand", **RULE)
    expected = {r["step"]: r["train/loss"] for r in runs.records("by_hand") if "train/loss" in r}
    found = {r["step"]: r["train/loss"] for r in runs.records("rewound") if "train/loss" in r and r.get("attempt")}
    assert found == expected
    assert same(
        *(saved_arrays(runs.place(n) / c) for n, c in (("rewound", "step-10-attempt-1"), ("by_hand", "step-10")))
    )

    ends = [
        r["eval/loss"]
        for name in ("rewound", "clean")
        for r in runs.records(name)
        if r["step"] == STEPS and "eval/loss" in r
    ]
    assert ends[0] == pytest.approx(ends[1], rel=0.01)
    latest = read_jsonl(runs.folder / "logs" / "rewound" / "metrics.jsonl")
    assert [r["step"] for r in latest if "train/objective" in r] == list(range(1, STEPS + 1))


def test_fewer_bad_steps_than_the_rule_asks_for_go_on(runs, poison):
    poison(5, 6)
    runs.run("two_bad", **RULE)
    assert runs.attempts("two_bad") == [(0, n) for n in range(1, STEPS + 1)]


@pytest.mark.soak
def test_data_that_stays_bad_ends_the_run_and_never_in_a_circle(runs, poison):
    poison(5, None)
    trainer = {"checkpointer": {**runs.checkpointer, "delete_old_temp_checkpoints": False}}
    with pytest.raises(
        RewindError, match=r"steps 5 to 7 were skipped, but the run may not go back again: .* 2 of 2 times"
    ):
        runs.run("poisoned", trainer=trainer, **RULE)
    assert runs.attempts("poisoned")[-3:] == [(2, 5), (2, 6), (2, 7)]
    starts = ["step-4", "step-4-attempt-1", "step-4-attempt-2"]
    positions = [json.loads((runs.place("poisoned") / s / "data" / "position.json").read_text()) for s in starts]
    assert positions == [
        {"examples": 4 * BATCH, "step": 4},
        {"examples": 7 * BATCH, "step": 4, "skipped": 3 * BATCH},
        {"examples": 10 * BATCH, "step": 4, "skipped": 6 * BATCH},
    ]
    with pytest.raises(RewindError, match="2 of 2 times"):  # starting again does not begin to count anew
        runs.run("poisoned", trainer=trainer, **RULE)


def test_a_damaged_checkpoint_is_passed_over(runs, poison, monkeypatch):
    poison(5, 7)
    from jaxlm.engine.phase_runner import PhaseRunner

    go_back = PhaseRunner._go_back

    def damaging(self: PhaseRunner, *args: Any) -> Any:
        (runs.place("damaged") / "step-4" / "run" / "manifest.json").write_text("{}")
        return go_back(self, *args)

    monkeypatch.setattr(PhaseRunner, "_go_back", damaging)
    runs.run("damaged", **RULE)
    assert "checkpoint step-4 is damaged" in runs.output
    assert "damaged/step-2 and past the data of the 5 steps since" in runs.output
    assert runs.attempts("damaged")[7:] == [(1, n) for n in range(3, STEPS + 1)]


@pytest.mark.soak
def test_a_checkpoint_of_the_streak_is_not_gone_back_to_and_does_not_delete_the_one_before(runs, poison):
    """Every step is saved as a temporary checkpoint. Without the pin, step 5 would have replaced step 4."""
    poison(5, 7)
    checkpointer = {**runs.checkpointer, "save_interval": 0, "keep": []}
    runs.run("pinned", trainer={"checkpointer": checkpointer}, **RULE)
    assert "pinned/step-4 and past the data of the 3 steps since" in runs.output
    assert runs.names("pinned") == ["step-10-attempt-1"]


def back_to(runs: Runs, run_id: str, checkpoint: str) -> dict[str, Any]:
    """Options for a run that goes back, with another learning rate than before."""
    path = str(runs.place(run_id) / checkpoint)
    return {"trainer": {"load_checkpoint_path": path}, "optimizer": {"learning_rate": 5e-3}}


@pytest.fixture(scope="module")
def stopped(runs) -> dict[int, str]:
    """The losses of a run that was stopped at step 4 and continued with another learning rate."""
    runs.run("stopped", 4)
    runs.run("stopped", optimizer={"learning_rate": 5e-3})
    return runs.losses("stopped")


def test_going_back_to_an_earlier_checkpoint_is_the_run_that_was_stopped_there(runs, stopped):
    runs.run("returned")
    before = {name: saved_arrays(runs.place("returned") / name) for name in ("step-6", "step-8", "step-10")}
    options = back_to(runs, "returned", "step-4")
    with (runs.folder / "logs" / "returned" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12}) + "\n")  # as after a kill between a step and its checkpoint
    runs.run("returned", **options)
    assert "load_checkpoint_path: going back from step-10 to" in runs.output
    assert "returned/step-4 (attempt 1)" in runs.output
    assert "checkpoint step-10 was set aside as step-10.abandoned" in runs.output
    for name, arrays in before.items():
        assert same(arrays, saved_arrays(runs.place("returned") / f"{name}.abandoned"))
    names = ["step-2", "step-4", "step-6-attempt-1", "step-8-attempt-1", "step-10-attempt-1"]
    assert runs.names("returned") == names
    attempts = [*((0, n) for n in range(1, STEPS + 1)), *((1, n) for n in range(5, STEPS + 1))]
    assert runs.attempts("returned") == attempts
    assert runs.losses("returned") == stopped
    assert same(*(saved_arrays(runs.place(n) / c) for n, c in (("returned", names[-1]), ("stopped", "step-10"))))
    history = runs.cursor("returned", names[-1]).history
    assert (history.attempt, history.abandoned_steps, history.went_back_to) == (1, 8, "step-4")

    runs.run("returned", **options)  # the same command again does not lose what was done since
    assert "the run has gone back to step-4 already (attempt 1)" in runs.output
    assert "the run is complete" in runs.output
    assert runs.attempts("returned") == attempts

    runs.run("returned", **back_to(runs, "returned", "step-8-attempt-1"))
    assert runs.attempts("returned") == [*attempts, (2, 9), (2, 10)]
    assert runs.losses("returned") == stopped
    (runs.place("returned") / "step-8.abandoned").rename(runs.place("returned") / "step-8")
    with pytest.raises(
        ConfigError, match=r"step-8 is from attempt 0, and attempt 1 of 'returned' has done its steps again"
    ):
        runs.run("returned", **back_to(runs, "returned", "step-8"))
    for name, is_dry in itertools.product(("step-5", "step-6.abandoned"), (True, False)):
        with pytest.raises(
            ConfigError, match=f"the run 'returned' has no checkpoint {name} to go back to. It has: step-2"
        ):
            runs.run("returned", dry_run=is_dry, **back_to(runs, "returned", name))


@pytest.mark.soak
@pytest.mark.parametrize("keep", [pytest.param([{"every": 2}], id="permanent"), pytest.param([], id="temporary")])
def test_a_run_that_goes_back_may_be_killed_at_any_time(runs, stopped, keep, monkeypatch):
    """Before anything was set aside, after a part of it, and while training. Temporary checkpoints stay, too."""
    name = f"killed_{len(keep)}"
    checkpointer = {**runs.checkpointer, "keep": keep, "save_interval": 0, "retry_for": 0}
    if not keep:  # every step is saved, and each save deletes the one before
        checkpointer["delete_old_temp_checkpoints"] = False
    runs.run(name, trainer={"checkpointer": checkpointer})
    options = back_to(runs, name, "step-4")
    options["trainer"]["checkpointer"] = {**checkpointer, "delete_old_temp_checkpoints": True}
    abandon, commit = LocalFolder.abandon, LocalFolder.commit

    def killed_at(method: str, at: str) -> None:
        original = {"abandon": abandon, "commit": commit}[method]

        def acting(self: LocalFolder, checkpoint: str) -> Any:
            if checkpoint == at:
                raise RuntimeError("killed")
            return original(self, checkpoint)

        monkeypatch.setattr(LocalFolder, method, acting)
        with pytest.raises((RuntimeError, SaveError), match="killed"):
            runs.run(name, **options)
        monkeypatch.setattr(LocalFolder, method, original)

    killed_at("abandon", "step-10")
    assert runs.names(name)[-2:] == ["step-10", "step-4-attempt-1"]
    killed_at("abandon", "step-8")
    killed_at("commit", "step-8-attempt-1")
    runs.run(name, **options)
    assert "gone back to step-4 already" in runs.output
    aside = {path.name for path in runs.place(name).glob("*.abandoned")}
    assert aside >= {"step-6.abandoned", "step-8.abandoned", "step-10.abandoned"}
    assert runs.attempts(name) == [*((0, n) for n in range(1, STEPS + 1)), *((1, n) for n in range(5, STEPS + 1))]
    assert runs.losses(name) == stopped


UNTIL = {
    "metric": "eval/loss",
    "mode": "max",
    "patience": 2,
}  # the loss falls, so that the first evaluation is the best


def test_patience_ends_the_phase_with_the_best_weights(runs):
    exports = {"hf_save_path": f"{runs.folder}/hf_patient", "hf_save_steps": 3}
    trainer = {"until": UNTIL, "checkpointer": {**runs.checkpointer, "keep": []}}
    result = runs.run("patient", trainer=trainer, **exports)
    assert "phase 'train' ends after step 6: eval/loss has not improved in 2 evaluations" in runs.output
    assert "going on with the weights of" in runs.output
    assert isinstance(result.outcome, Next)
    assert runs.names("patient") == ["step-6"]
    assert int(result.state.step) == 6
    best, kept = (saved_arrays(runs.place(name) / step) for name, step in (("clean", "step-2"), ("patient", "step-6")))
    assert same(best, kept, below="model.")
    evals = [r["eval/loss"] for r in runs.records("patient") if "eval/loss" in r]
    assert evals[0] == evals[3] == max(evals)
    history = runs.cursor("patient", "step-6").history
    assert (history.phase_ends, history.controllers, history.pins) == ((6,), {}, {})
    assert runs.attempts("patient") == [(0, n) for n in range(1, 7)]
    check_the_best_weights_are_exported(runs)
    runs.run("patient", trainer={"until": UNTIL}, **exports)
    assert "the run is complete" in runs.output
    assert "to train longer" not in runs.output


def check_the_best_weights_are_exported(runs):
    from safetensors.numpy import load_file

    exports = {name: runs.folder / f"hf_{name}" for name in ("clean", "patient")}
    assert sorted(path.name for path in exports["patient"].iterdir()) == ["step-3", "step-6"]
    best, last = (
        load_file(exports[n] / s / "model.safetensors") for n, s in (("clean", "step-2"), ("patient", "step-6"))
    )
    assert same(best, last)


def test_a_phase_that_improves_to_its_end_keeps_its_last_weights(runs):
    runs.run("improving", trainer={"until": {"metric": "eval/loss", "patience": 1}})
    assert "ends after" not in runs.output
    assert same(*(saved_arrays(runs.place(name) / "step-10") for name in ("clean", "improving")))


def test_below_ends_the_phase_where_the_metric_is_reached(runs):
    losses = {r["step"]: r["eval/loss"] for r in runs.records("clean") if "eval/loss" in r}
    bound = (losses[4] + losses[2]) / 2
    runs.run("below", trainer={"until": {"metric": "eval/loss", "below": bound}})
    assert f"phase 'train' ends after step 4: eval/loss is {losses[4]:.4f}, below {bound:g}" in runs.output
    assert runs.names("below") == ["step-2", "step-4"]
    assert same(*(saved_arrays(runs.place(name) / "step-4") for name in ("clean", "below")))


@pytest.mark.soak
def test_the_next_phase_starts_from_the_best_weights_where_the_phase_before_ended(runs):
    """Compared with a run whose first phase is as long as it takes to reach the best weights."""
    first = {"name": "one", "num_train_steps": STEPS, "until": UNTIL}
    second = {"name": "two", "num_train_steps": 4, "optimizer": {"learning_rate": 0.0, "lr_schedule": "constant"}}
    keep = {"checkpointer": {**runs.checkpointer, "keep": []}}
    runs.run("phases", STEPS + 4, phases=[first, second], trainer=keep)
    assert runs.names("phases") == ["step-6", "step-10"]
    assert runs.cursor("phases", "step-10").history.phase_ends == (6,)
    assert runs.attempts("phases") == [(0, n) for n in range(1, 11)]
    trained, best = (saved_arrays(runs.place(n) / s) for n, s in (("phases", "step-10"), ("clean", "step-2")))
    assert same(trained, best, below="model.")


def test_an_unknown_metric_is_named_with_those_that_were_measured(runs):
    with pytest.raises(
        ConfigError, match=r"until.metric: 'eval/wiki/loss' given .* measured eval/best_bpb, eval/bpb, eval/loss"
    ):
        runs.run("unknown", trainer={"until": {"metric": "eval/wiki/loss", "below": 1.0}})
