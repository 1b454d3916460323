"""What is saved, and what the error says, when the batch of the next step cannot be made."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.core.publish import PublishError
from jaxlm.core.values.logged import Activity
from jaxlm.engine import save_on_error as rescues
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.checkpoint.lease import LeaseLostError
from jaxlm.engine.checkpoint.manifest import History
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.loop import TrainingLoop
from jaxlm.engine.metrics import NonFiniteError
from jaxlm.engine.save_on_error import SaveOnError
from jaxlm.session.exit_codes import _explained
from tests.engine.test_loop import Sampled, opened_for, through_sampled_batches
from tests.engine.test_peers import Service


class Failing:
    activity = Activity.EVAL

    def due(self, step: int) -> bool:
        return step == 4

    def run(self, step: int, state: Any) -> None:
        raise ConfigError("export: it raised KeyError")


class Counting(Failing):
    """Args: at: how often it ran, by step."""

    def __init__(self, at: list[int]):
        self.at = at

    def run(self, step: int, state: Any) -> None:
        self.at.append(step)


@pytest.mark.parametrize("place", ["first", "exports"])
def test_the_loop_saves_the_step_after_which_a_hook_fails(place):
    log, before, after = list[Any](), list[int](), list[int]()
    hooks: dict[str, Any] = {place: [Counting(before), Failing(), Counting(after)]}
    with pytest.raises(ConfigError, match=r"it raised KeyError\. The run is saved at step 4: the same"):
        through_sampled_batches(log, **hooks)
    assert log[-2:] == ["drain", "save"]
    assert log.count("step") == 4
    assert (before, after) == ([4], [])


def test_a_start_begins_with_the_hook_that_has_failed():
    """Not with those before it, of which a controller has read the metrics."""
    ran: list[list[int]] = [[], [], []]
    opened = opened_for([], exports=[*map(Counting, ran)])
    opened.saver.history = History(hooks_run=1)
    state = SimpleNamespace(step=4, model="weights")
    TrainingLoop(state, opened).run()  # type: ignore[arg-type]
    assert ran == [[], [4], [4]]
    assert opened.saver.history.hooks_run is None


def test_the_loop_saves_the_step_before_a_rollout_or_a_batch_that_fails(monkeypatch):
    """Of the state that all updates up to it have made, after all of them were fetched."""

    def refusing(good: Any, after: int) -> Any:
        def refuse(self: Any, *arguments: Any) -> Any:
            if self.log.count("step") == after:
                raise ConfigError("reward 'right': it raised KeyError. Correct the reward")
            return good(self, *arguments)

        return refuse

    for name, after in (("refresh", 3), ("__next__", 4)):
        log: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(Sampled, name, refusing(getattr(Sampled, name), after))
            with pytest.raises(ConfigError, match=f"Correct the reward. The run is saved at step {after}: the same"):
                through_sampled_batches(log)
        assert log[-2:] == ["drain", "save"]


class OtherIsLate(Service):
    """Process 1 says that it has failed at step 5 after process 0 has looked for that once."""

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        found = super().key_value_dir_get(prefix)
        self.key_value_set("jaxlm/on_error/0-5/1", "", allow_overwrite=True)
        return found


class Saver:
    """Args: error: what a save raises."""

    history = SimpleNamespace(attempt=0)

    def __init__(self, error: Exception | None):
        self.saved: list[tuple[Any, ...]] = []
        self.error = error

    def save(self, state: Any, step: int, position: Any, *, forced: bool) -> None:
        assert forced
        if self.error is not None:
            raise self.error
        self.saved.append((state, step, position))


def failing(error: Exception, *, step: int = 5, cannot_save: Exception | None = None, rewind: Any = None) -> Any:
    """The saver, and the error that leaves the block."""
    saver, clock = Saver(cannot_save), ActivityClock()
    metrics: Any = SimpleNamespace(drain=lambda: None, rewind=rewind)
    batches: Any = SimpleNamespace(state=lambda: {"examples": 40})
    on_error = SaveOnError(batches, metrics, saver, clock, first_step=2)  # type: ignore[arg-type]
    with pytest.raises((type(error), SaveError)) as caught, on_error.between(lambda: "state", step):  # type: ignore[arg-type]
        raise error
    assert bool(clock.seconds()[Activity.SAVE]) == (step > 2 and rewind is None)
    return saver.saved, caught.value


def test_the_error_says_what_a_start_continues_from():
    saved, error = failing(PeerError("process 0: gone"))
    assert saved == [("state", 5, {"examples": 40})]
    assert type(error) is PeerError
    assert str(error) == "process 0: gone. The run is saved at step 5: the same command continues from there"
    saved, error = failing(ConfigError("wrong."), step=2)
    assert saved == [], "the step with which it has begun is saved already"
    assert str(error) == "wrong. The run is saved at step 2: the same command continues from there"
    saved, error = failing(KeyError("a"))
    assert saved
    assert type(error) is KeyError
    assert error.__notes__ == ["The run is saved at step 5: the same command continues from there"]
    saved, error = failing(ConfigError("wrong"), rewind="back")
    assert saved == []
    assert str(error).startswith("wrong. The last steps were not saved, because their updates were skipped. The same")
    saved, error = failing(ConfigError("wrong"), cannot_save=SaveError("cannot save: no space", " Free some."))
    assert type(error) is SaveError
    assert str(error) == "wrong. After that, the last step could not be saved: cannot save: no space. Free some."


@pytest.mark.parametrize("failed", [NonFiniteError("step 4: loss is nan"), LeaseLostError("another start has taken x")])
def test_the_message_begins_with_the_original_error(failed):
    """The last steps are only fetched now, and they or the save may fail as well."""
    saved, error = failing(ConfigError("wrong"), cannot_save=failed)
    assert saved == []
    assert type(error) is ConfigError
    assert str(error) == f"wrong. After that, the last step could not be saved: {failed}"


def test_what_is_saved_is_printed_after_errors_without_a_traceback():
    saved, error = failing(PublishError("cannot write w (no space). Free up disk space"))
    assert saved
    code, message = _explained(error)
    assert code == 1
    assert message == (
        "error: cannot write w (no space). Free up disk space. The run is saved at step 5: the same command continues from"
        " there"
    )


def test_a_process_saves_only_if_all_have_failed_at_the_same_place(monkeypatch):
    service = OtherIsLate()
    assert rescues._agree(service, "jaxlm/on_error/0-5/", 0, 2)
    monkeypatch.setattr(rescues, "_OTHERS_S", 0.0)
    assert not rescues._agree(service, "jaxlm/on_error/0-6/", 0, 2), "the other one has failed elsewhere"
    assert not service.key_value_dir_get("jaxlm/on_error/0-6/"), "the other one would count on it later"
    monkeypatch.setattr(rescues, "_all_have_failed", lambda folder: False)
    saved, error = failing(ConfigError("wrong"), step=1)
    assert saved == []
    assert str(error).startswith(
        "wrong. Not all processes of the run have failed after this step, so it could not be saved"
    )
    monkeypatch.setattr(rescues, "is_lost_peer", lambda error: True)
    saved, error = failing(jax.errors.JaxRuntimeError("Gloo: Connection closed"), step=1)
    assert (saved, str(error)) == ([], "Gloo: Connection closed")
