"""Trackers and the profiler in a real run: what they write, and that they change nothing."""

import os

import pytest

RUN = ("--config_path", "run.yaml", "--trainer.num_train_steps", "8")
WATCHED = """
  tracker:
    - {project: p}
    - {type: tensorboard, logdir: a_file}
    - {type: tensorboard, logdir: board}
  profiler: {start_step: 2, num_steps: 3}
"""


@pytest.mark.soak
def test_watching_changes_nothing_and_broken_trackers_are_reported_once(workplace, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    plain, watched = workplace(), workplace()
    plain.write()
    assert plain.run(*RUN).code == 0
    path = watched.write()
    head, optimizer, tail = path.read_text().partition("optimizer:")
    path.write_text(head.rstrip() + WATCHED + optimizer + tail)
    (watched.folder / "a_file").write_text("where a folder should be")
    result = watched.run(*RUN, HOME=str(watched.folder))  # no API keys
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert watched.losses() == plain.losses()
    assert watched.digest("step-8") == plain.digest("step-8")
    assert result.out.count("tracker wandb failed (NoKeyError") == 1
    assert result.out.count("tracker tensorboard failed (") == 1
    (events,) = (watched.folder / "board" / "run").glob("events*")
    assert events.read_bytes().count(b"train/loss") == 8
    page = (watched.folder / "logs" / "run" / "profile" / "train" / "profile.md").read_text()
    assert page.startswith("# Profile of phase 'train', steps 3 to 5\n")
    assert "| matrix products |" in page
