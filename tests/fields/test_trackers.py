"""The calls to the tracker libraries, field by field."""

import dataclasses
import sys
from typing import Any
from unittest import mock

import pytest

from jaxlm.observe import environment
from jaxlm.observe.trackers import RunInfo, TrackerConfig

# Field -> (another value, text that the recorded calls must then contain, or with a leading "no ", must not contain).
FIELDS: dict[str, dict[str, tuple[Any, str]]] = {
    "mlflow": {
        "tracking_uri": ("https://server", "call.MlflowClient(tracking_uri='https://server')"),
        "experiment": ("other", "call.MlflowClient().get_experiment_by_name('other')"),
        "name": ("n", "run_name='n',"),
    },
    "tensorboard": {
        "logdir": ("elsewhere", "call('elsewhere/run', "),
        "comment": ("-two", "call('tblogs/run-two', "),
        "purge_step": (3, "purge_step=3,"),
        "max_queue": (5, "max_queue=5,"),
        "flush_secs": (7, "flush_secs=7,"),
        "filename_suffix": (".x", "filename_suffix='.x',"),
        "write_to_disk": (False, "write_to_disk=False)"),
    },
    "trackio": {
        "project": ("p", "call.init(project='p',"),
        "name": ("n", "name='n',"),
        "group": ("g", "group='g',"),
        "space_id": ("user/space", "space_id='user/space',"),
    },
    "wandb": {
        "entity": ("e", "entity='e',"),
        "project": ("p", "project='p',"),
        "name": ("n", "name='n',"),
        "tags": (["t"], "tags=['t'],"),
        "id": ("i", "id='i',"),
        "group": ("g", "group='g',"),
        "mode": ("online", "mode='online',"),
        "resume": ("must", "resume='must',"),
        "save_code": (False, "no log_code("),
        "save_xla_dumps": (True, "add_dir("),
    },
}


def test_every_tracker_field_is_listed():
    kinds = TrackerConfig.get_known_choices()
    listed = {kind: list(fields) for kind, fields in FIELDS.items()}
    assert {kind: [f.name for f in dataclasses.fields(kinds[kind])] for kind in kinds} == listed


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Opens and closes a tracker with a stand-in for its library; returns the calls to the library."""
    import tensorboardX
    import wandb

    (tmp_path / "dumped").mkdir()
    (tmp_path / "dumped" / "a.txt").write_text("a program")
    (tmp_path / "main.py").write_text("a program")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path / 'dumped'}")

    def opened(kind: str, **fields: Any) -> str:
        library = mock.MagicMock()
        library.step = 0
        library.id = "id"
        library.init.return_value._next_step = 0
        monkeypatch.setattr(tensorboardX, "SummaryWriter", library)
        monkeypatch.setattr(wandb, "init", library)
        monkeypatch.setitem(sys.modules, "trackio", library)
        library.MlflowClient.return_value.search_runs.return_value = []
        library.MlflowClient.return_value.create_run.return_value.data.tags = {}
        monkeypatch.setitem(sys.modules, "mlflow", library)
        monkeypatch.setitem(sys.modules, "mlflow.entities", library)
        monkeypatch.setattr(wandb, "login", lambda **_: True)
        monkeypatch.setattr(wandb, "Artifact", lambda name, type: library)
        monkeypatch.setattr(wandb, "Settings", dict)
        monkeypatch.setattr(environment, "repository", lambda: tmp_path)
        monkeypatch.setattr(environment, "packages", lambda: ["a==1"])
        config = TrackerConfig.get_known_choices()[kind](**fields)
        config.check()
        config.open(RunInfo("run", 0, False, {}, "", {})).close()
        return str(library.mock_calls)

    return opened


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FIELDS for name in FIELDS[kind]])
def test_tracker_field(calls, kind, name):
    value, part = FIELDS[kind][name]
    part, expected = (part.removeprefix("no "), False) if part.startswith("no ") else (part, True)
    assert (part in calls(kind)) is not expected
    assert (part in calls(kind, **{name: value})) is expected
