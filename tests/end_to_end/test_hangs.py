"""A run that makes no progress writes the stacks of its threads, and ends on all processes."""

import re
import time

import pytest

RUN = ("--config_path", "run.yaml", "--trainer.watchdog", "{report_after: 2s, end_after: 6s}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "activity", "frame", "saved"),
    [
        # `read` of the loader's thread blocks; the main thread waits for the batch.
        ("loader", "data wait", "in reading", "step-5"),
        # The thread that commits a checkpoint blocks; the main thread waits for it when it saves the next one.
        ("save", "save", "in _commit", "step-0"),
    ],
)
def test_a_run_that_hangs_says_where_and_ends(workplace, place, activity, frame, saved):
    work = workplace()
    work.write()
    done = work.run(*RUN, module="tests.end_to_end.hangs", JAXLM_TEST_HANGS_IN=place)
    assert done.code == 1, done.err
    assert re.search(rf"error: no progress for \d+ s \({activity}; trainer.watchdog.end_after\)", done.err)
    assert re.search(
        rf"no progress for \d+ s \({activity}\): the stacks of all threads are in logs/run/stacks-0.txt", done.out
    )
    stacks = (work.folder / "logs" / "run" / "stacks-0.txt").read_text()
    assert frame in stacks
    assert "in run_phase" in stacks
    again = work.run(*RUN, "--trainer.num_train_steps", "12")
    assert again.code == 0, again.err
    if saved == "step-5":
        assert "resuming, from checkpoints/run/step-5" in again.out


@pytest.mark.slow
def test_a_process_that_waits_for_one_that_hangs_ends_too(workplace):
    work = workplace()
    work.write()
    processes = work.start_all(2, *RUN, module="tests.end_to_end.hangs", JAXLM_TEST_HANGS_IN="process 1")
    begin = time.monotonic()
    ends = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert [code for _, _, code in ends] == [1, 1], ends
    assert time.monotonic() - begin < 60
    assert any("no progress for" in err for _, err, _ in ends)
    stacks = {n: (work.folder / "logs" / "run" / f"stacks-{n}.txt").read_text() for n in (0, 1)}
    assert "in hang" in stacks[1]
    assert "in run_phase" in stacks[0]


@pytest.mark.slow
def test_a_compilation_is_not_taken_for_a_hang(workplace):
    work = workplace()
    work.write()
    keys = ("--trainer.watchdog", "{report_after: 1s, end_after: 2s}", "--trainer.num_train_steps", "4")
    done = work.run("--config_path", "run.yaml", *keys, module="tests.end_to_end.compiles_slowly")
    assert done.code == 0, done.err
    assert "no progress" not in done.out
