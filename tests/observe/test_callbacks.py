"""Callbacks: their hooks and the order of them, what happens to one that raises, and that they can only look."""

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import StepInfo
from jaxlm.observe.callbacks import (
    HOOKS,
    Callback,
    CallbackConfig,
    CallbackContext,
    CallbackListener,
    Callbacks,
    open_callbacks,
)
from jaxlm.observe.trackers import RunInfo
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.yaml import ConfigSource

RUN = RunInfo(run_id="mine", resume_step=0, is_new=True, config={}, config_text="", summary={})


class Recorder(Callback):
    """Writes every call as a line. Raises in one of them, if asked."""

    def __init__(self, path: Path | None = None, fail_in: str = "", at: int = 0):
        self.lines: list[str] = []
        self._path, self._fail_in, self._at = path, fail_in, at

    def _add(self, hook: str, value: Any = "") -> None:
        self.lines.append(f"{hook} {value}".strip())
        if self._path is not None:
            self._path.write_text("\n".join(self.lines))
        if hook == self._fail_in and value in (self._at, ""):
            raise ValueError(f"no {hook}\nand more")

    def on_train_begin(self, run):
        self._add("on_train_begin", run.run_id)

    def on_epoch_begin(self, epoch):
        self._add("on_epoch_begin", epoch)

    def on_batch_begin(self, step):
        self._add("on_batch_begin", step)

    def on_batch_end(self, info):
        self._add("on_batch_end", info.step)

    def on_optimizer_step(self, info):
        self._add("on_optimizer_step", info.step)

    def on_epoch_end(self, epoch):
        self._add("on_epoch_end", epoch)

    def on_error(self, error):
        self._add("on_error", error)

    def on_train_end(self):
        self._add("on_train_end")


@dataclass(frozen=True)
class RecorderConfig(CallbackConfig):
    """Opens a recorder."""

    path: str
    fail_in: str = ""
    at: int = 0

    def check(self):
        pass

    def open(self, context):
        return Recorder(Path(self.path), self.fail_in, self.at)


def step(number: int, skipped: int = 0, **metrics: float) -> StepInfo:
    return StepInfo(number, "train", {"train/skipped_steps": float(skipped), **metrics})


def listener(callbacks: Callbacks, **options: Any) -> CallbackListener:
    defaults = {"epoch_of": lambda at: at // 3, "last_step": 5, "skipped": 0}
    return CallbackListener(callbacks, [], **defaults | options)


def test_the_hooks_of_a_run_and_their_order():
    """AstrAI's, whose batch is a step here; its default callbacks are keys of jaxlm."""
    recorder = Recorder()
    callbacks = Callbacks({"1": recorder}, print)
    callbacks.call("on_train_begin", "", RUN)
    with callbacks:
        follow = listener(callbacks)
        for number in range(1, 6):
            follow(step(number, skipped=number >= 4))  # the update of step 4 is skipped

    def of(number: int) -> list[str]:
        update = [] if number == 4 else [f"on_optimizer_step {number}"]
        return [f"on_batch_begin {number}", f"on_batch_end {number}", *update]

    first, second = (["on_epoch_begin 0"], ["on_epoch_end 0", "on_epoch_begin 1"])
    expected = ["on_train_begin mine", *first, *of(1), *of(2), *of(3), *second, *of(4), *of(5), "on_epoch_end 1"]
    assert recorder.lines == [*expected, "on_train_end"]
    assert {line.split()[0] for line in recorder.lines} == set(HOOKS) - {"on_error"}


def test_a_run_that_goes_back_and_one_without_epochs():
    recorder = Recorder()
    callbacks = Callbacks({"1": recorder}, print)
    follow = listener(callbacks, last_step=100)
    for number in (3, 4, 3):  # the run goes back to step 2
        follow(step(number))
    epochs = [line for line in recorder.lines if "epoch" in line]
    begins = [f"on_epoch_{what}" for what in ("begin 0", "end 0", "begin 1", "end 1", "begin 0", "end 0")]
    assert epochs == begins
    recorder.lines.clear()
    listener(callbacks, epoch_of=lambda at: None)(step(5))
    assert recorder.lines == ["on_batch_begin 5", "on_batch_end 5", "on_optimizer_step 5"]


def test_the_end_of_a_run_that_fails():
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="out of luck"), Callbacks({"1": recorder}, print):
        raise RuntimeError("out of luck")
    assert recorder.lines == ["on_error out of luck", "on_train_end"]


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in ("on_error", "on_train_begin")])
def test_one_that_raises_is_named_once_and_the_others_go_on(hook):
    said: list[str] = []
    at = 0 if "epoch" in hook else 2
    broken, sound = Recorder(fail_in=hook, at=at), Recorder()
    with Callbacks({"1 (broken)": broken, "2 (sound)": sound}, said.append) as callbacks:
        follow = listener(callbacks)
        for number in range(1, 6):
            follow(step(number))
    when = {"on_train_end": "", "on_epoch_begin": " of epoch 0", "on_epoch_end": " of epoch 0"}.get(hook, " at step 2")
    (line,) = said
    assert line.startswith(f"callback 1 (broken) failed in {hook}{when} (ValueError: no {hook}; test_callbacks.py:")
    assert line.endswith("); the run continues without it")
    assert sound.lines[: len(broken.lines)] == broken.lines
    assert sound.lines[-1] == "on_train_end"
    assert broken.lines[-1] == (hook if hook == "on_train_end" else f"{hook} {at}")


def test_a_callback_cannot_change_what_it_sees():
    seen: list[StepInfo] = []

    class Keeps(Callback):
        def on_batch_end(self, info):
            seen.append(info)

    given = step(1, **{"train/loss": 2.0})
    follow = CallbackListener(
        Callbacks({"1": Keeps()}, print),
        [lambda: {"train/smoothed_loss": 3.0}],
        epoch_of=lambda at: None,
        last_step=9,
        skipped=0,
    )
    follow(given)
    (info,) = seen
    assert info.metrics == {"train/skipped_steps": 0.0, "train/loss": 2.0, "train/smoothed_loss": 3.0}
    with pytest.raises(TypeError):
        info.metrics["train/loss"] = 0.0
    with pytest.raises(FrozenInstanceError):
        info.step = 5
    assert given.metrics == {"train/skipped_steps": 0.0, "train/loss": 2.0}


@dataclass(frozen=True)
class OpenedWith(CallbackConfig):
    """Opens what it is given."""

    make: Any

    def check(self):
        pass

    def open(self, context):
        return self.make()


class Misnamed(Callback):
    """Has a hook of another trainer."""

    def on_step_end(self, info):
        raise AssertionError("never called")


def test_a_callback_that_cannot_be_opened_is_reported(monkeypatch):
    monkeypatch.setitem(CallbackConfig.get_known_choices(), "opened_with", OpenedWith)
    said: list[str] = []
    context = CallbackContext(RUN, said.append)

    def breaks():
        raise OSError("no such device")

    recorder = Recorder()
    assert open_callbacks([OpenedWith(breaks), OpenedWith(lambda: recorder)], context)
    assert recorder.lines == ["on_train_begin mine"]
    (line,) = said
    assert "cannot be opened (OSError: no such device; test_callbacks.py:" in line
    assert line.startswith("callback 1 (opened_with) ")
    message = (
        r"trainer\.callbacks: 1 \(opened_with\): Misnamed defines on_step_end, which is never called\. .*on_batch_end"
    )
    with pytest.raises(ConfigError, match=message):
        open_callbacks([OpenedWith(Misnamed)], context)


def test_print_metrics():
    said: list[str] = []
    given = [{"type": "print_metrics", "every": 2, "metrics": "^grad/|lr"}]
    config = decode_run(ConfigSource({"trainer": {"callbacks": given}}), None)
    callbacks = open_callbacks(config.trainer.callbacks, CallbackContext(RUN, said.append))
    follow = listener(callbacks)
    for number in (1, 2, 3):
        follow(step(number, **{"grad/norm/total": 0.123456789, "train/loss": 1.0, "lr": 3e-4}))
    assert said == ["step 2: grad/norm/total 0.123457  lr 0.0003"]
    wrong = decode_run(ConfigSource({"trainer": {"callbacks": [{"type": "print_metrics", "metrics": "("}]}}), None)
    with pytest.raises(ConfigError, match=r"callbacks \(print_metrics\): metrics: '\(' is not a valid regular"):
        wrong.trainer.check()
