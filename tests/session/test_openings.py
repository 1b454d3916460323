"""What a start opens besides text: told by a dry run, before anything is tokenized or compiled, and closed if it fails."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jaxlm import train
from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.plan.run_config import RunConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.session import phase
from jaxlm.session.init_from import expected_cursor


def test_where_a_run_goes_on_is_known_before_its_checkpoints_are_verified(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def save(folder: str, name: str, cursor: Cursor | None) -> None:
        (tmp_path / folder / name / "run").mkdir(parents=True)
        (tmp_path / folder / name / "run" / "cursor.json").write_bytes(
            b"damaged" if cursor is None else cursor.to_json()
        )

    def plan(**trainer: Any) -> Any:
        folder = LocalFolder(tmp_path / "own", delete_temporary=True)
        return SimpleNamespace(config=RunConfig(trainer=TrainerConfig(**trainer)), checkpoints=folder)

    assert expected_cursor(plan()) is None
    other, first, last = (Cursor(step, 0, "one", False, False) for step in (1, 2, 4))
    save("other", "step-1", other)
    assert expected_cursor(plan(initialize_from_state=str(tmp_path / "other"))) == other
    save("own", "step-2", first)
    save("own", "step-4", last)
    save("own", "step-6", None)
    assert expected_cursor(plan(initialize_from_state=str(tmp_path / "other"))) == last
    back = str(tmp_path / "own" / "step-2")
    assert expected_cursor(plan(load_checkpoint_path=back)) == first
    gone_back = replace(last, step=3, history=History(attempt=1, went_back_to="step-2"))
    save("own", "step-3-attempt-1", gone_back)
    assert expected_cursor(plan(load_checkpoint_path=back)) == gone_back


def test_batches_are_closed_if_the_step_does_not_compile(monkeypatch):
    closed: list[str] = []
    data = mock.MagicMock()
    data.batches.return_value = SimpleNamespace(close=lambda: closed.append("batches"))
    monkeypatch.setattr(phase, "with_annotations", lambda *_: data)
    monkeypatch.setattr(phase, "open_data", lambda *_: data)
    monkeypatch.setattr(phase, "step_options", mock.MagicMock())
    monkeypatch.setattr(train, "enter_phase", lambda *arguments, **named: None)
    monkeypatch.setattr(train, "compile_steps", mock.Mock(side_effect=ConfigError("too large")))
    phase_runner = mock.MagicMock(resumed=None)
    init_from = mock.MagicMock()
    init_from.load_weights.return_value = (None, 0)
    opening = train._open_phase(mock.MagicMock(), mock.MagicMock(), None, phase_runner, init_from)
    with pytest.raises(ConfigError, match="too large"), opening:
        pass
    assert closed == ["batches"]
