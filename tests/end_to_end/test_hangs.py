"""A run that makes no progress writes the stacks of its threads, and ends on all processes."""

import re

import pytest

from jaxlm.core.errors import EXIT_HUNG

RUN = ("--config_path", "run.yaml")
WATCHED = (*RUN, "--trainer.watchdog", "{report_after: 2s, end_after: 6s}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "activity", "frame", "resumed"),
    [
        # `read` of the loader's thread blocks; the main thread waits for the batch.
        ("loader", "data wait", "in reading", "resuming, from checkpoints/run/step-5"),
        # The thread that commits a checkpoint blocks; the main thread waits for it when it saves the next one.
        pytest.param("save", "save", "in _commit", "step 24/24", marks=pytest.mark.soak),
        pytest.param(
            "last save", "save", "in _commit", "resuming, from checkpoints/run/step-20", marks=pytest.mark.soak
        ),
    ],
)
def test_a_run_that_hangs_says_where_and_ends(workplace, place, activity, frame, resumed):
    work = workplace()
    work.write()
    done = work.run(*WATCHED, module="tests.end_to_end.hangs", JAXLM_TEST_HANGS_IN=place)
    assert done.code == EXIT_HUNG, done.err
    assert re.search(rf"error: no progress for \d+ s \({activity}; trainer.watchdog.end_after\)", done.err)
    stacks = (work.folder / "logs" / "run" / "stacks-0.txt").read_text()
    for text in (done.err, stacks):
        assert f"s ({activity}) on process 0. Stacks of all threads:" in text
        assert frame in text
        assert "in train" in text
    again = work.finish(*RUN)
    assert resumed in again.out


@pytest.mark.soak
def test_a_process_that_waits_for_one_that_hangs_ends_too(workplace):
    work = workplace()
    work.write()
    ends = work.run_all(2, *WATCHED, module="tests.end_to_end.hangs", JAXLM_TEST_HANGS_IN="process 1")
    assert [end.code for end in ends] == [EXIT_HUNG, EXIT_HUNG], ends
    stacks = [(work.folder / "logs" / "run" / f"stacks-{n}.txt").read_text() for n in (0, 1)]
    assert "in hang" in stacks[1]
    # It waits for the other process in the step, or between steps, where the two agree on whether to save.
    assert re.search(r"loop\.py\", line \d+ in (_take_step|_between)", stacks[0])


@pytest.mark.soak
def test_a_pause_and_a_compilation_are_not_taken_for_a_hang(workplace):
    """A process that was stopped for longer than `end_after`, and whose compilation took longer."""
    work = workplace()
    work.write()
    # Long enough for a step or a save on a machine that is busy.
    watched = ("--trainer.watchdog", "{report_after: 10s, end_after: 10s}")
    done = work.finish(*RUN, *watched, module="tests.end_to_end.hangs", JAXLM_TEST_HANGS_IN="nothing")
    assert "no progress" not in done.err
