"""What a resumed run checks, whose preset writes other phases."""

from dataclasses import replace

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session import resume_checks
from jaxlm.session.resume_checks import (
    SavedRun,
    check_cursor,
    check_same_run,
)
from tests.session.test_resume_checks import SIZES


def grown(stacks):
    data = {"train_urls": ["a"], "tokenizer": "b"}
    preset = {"type": "progressive", "stacks": stacks, "steps_per_stack": 4, "polish_steps": 1}
    tree = {"model": SIZES, "data": data, "preset": preset, "trainer": {"train_batch_size": 8}}
    return make_plan(decode_run(ConfigSource(tree), None), "x", 64)


def test_phases_that_are_gone_read_no_other_data(monkeypatch):
    def identity(plan):
        pairs = zip(plan.phases, plan.data, strict=True)
        return {phase.name: {"train_files": 1, "tokenizer": data.tokenizer} for phase, data in pairs}

    before = grown(3)
    saved = SavedRun("checkpoint", before.config, identity(before))
    monkeypatch.setattr(resume_checks, "load_saved_run", lambda plan: saved)
    monkeypatch.setattr(resume_checks, "data_identity", identity)
    now = grown(2)
    assert check_same_run(now) == saved
    other = replace(now, data=tuple(replace(data, tokenizer="c") for data in now.data))
    with pytest.raises(ConfigError, match=r"'polish_1'\.tokenizer: b -> c\n(?s:.*)allow_changes '\[tokenizer\]'"):
        check_same_run(other)
    cursor = Cursor(step=14, phase=4, phase_name="polish_2", entering=False, temporary=False)
    keys = r"\(preset\.stacks, preset\.steps_per_stack, preset\.polish_steps, or the list phases\)"
    with pytest.raises(
        ConfigError, match=rf"step 14 of phase 'polish_2'.*'polish_1' from step 8 to 9\. Set what .*{keys}"
    ):
        check_cursor(cursor, now)
