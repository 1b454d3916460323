"""SIGTERM and SIGINT: the step is finished and saved, the exit code shows it, and the run resumes bit for bit."""

import signal

import pytest

from tests.end_to_end.commands import Workplace, check_close, end_of
from tests.tiers import one_of

RUN = ("--config_path", "run.yaml")


@pytest.fixture
def whole(request):
    """Number of processes -> losses and last hashes: one device, or two processes with one device each."""

    def run(processes: int):
        if processes == 1:
            finished = request.getfixturevalue("finished")
            return finished.losses(), finished.digest("step-24")
        together = request.getfixturevalue("two_processes")
        return together.losses, together.digest

    return run


@pytest.mark.soak  # CI stops one process in tests/end_to_end/test_resume.py
@pytest.mark.parametrize(
    ("processes", "number", "to"),
    [(1, signal.SIGTERM, 0), (1, signal.SIGINT, 0), (2, signal.SIGTERM, 0), (2, signal.SIGTERM, 1)],
)
def test_a_signal_saves_and_the_run_resumes(workplace, whole, processes, number, to):
    place = workplace()
    place.write_averaged() if processes == 1 else place.write()
    running = place.start_all(
        processes, *RUN, module="tests.end_to_end.signaled", JAXLM_TEST_SIGNAL=f"{int(number)}:{to}:7"
    )
    results = [end_of(process) for process in running]
    assert [code for code, _, _ in results] == [128 + number] * processes, results
    assert f"stopped by {signal.Signals(number).name}; saved as checkpoints/run/step-" in results[0][1]
    saved = max(int(name.removeprefix("step-")) for name in place.checkpoints())
    assert saved == 7 if processes == 1 else 7 <= saved <= 11
    results = place.run_all(processes, *RUN)
    assert [code for code, _, _ in results] == [0] * processes, results
    assert (place.losses(), place.digest("step-24")) == whole(processes)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(workplace):
    place = workplace()
    place.write()
    code, _, err = place.run(*RUN, module="tests.end_to_end.signaled", JAXLM_TEST_SIGNAL="15:0:7:twice")
    assert code == 143
    assert "step-7" not in place.checkpoints()
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("number", one_of([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_during_the_first_compilation_ends_at_once(workplace, number):
    place = workplace()
    place.write()
    code, _, err = place.run(*RUN, module="tests.end_to_end.signaled", JAXLM_TEST_SIGNAL=f"{int(number)}:0:0")
    assert code == 128 + number
    assert f"stopped by {signal.Signals(number).name} before training started; nothing was lost" in err
    assert "Traceback" not in err
    assert not place.checkpoints()


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(uninterrupted, two_processes):
    check_close(two_processes.losses, uninterrupted.losses)


@pytest.mark.soak
@pytest.mark.trap("T4")
def test_processes_with_different_run_ids_are_refused(workplace):
    """Levanter gives every process the run id of process 0."""
    place = workplace(1)
    place.write()
    names = iter(("one", "two"))
    start = Workplace.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workplace, "start", lambda *a, **k: start(*a, **k, RUN_ID=next(names)))
        results = place.run_all(2, *RUN)
    assert [code for code, _, _ in results] == [2, 2], results
    assert "trainer.id: one on process 0; two on process 1" in results[1][2]
