"""A machine that says that it will be preempted: saved after the step, exit 143, and resumed bit for bit."""

import contextlib

import pytest

from tests.end_to_end.commands import Workplace
from tests.end_to_end.test_signals import RUN
from tests.metadata_server import metadata_server

NOTICED = "tests.end_to_end.noticed"


@pytest.mark.slow
def test_a_notice_saves_stops_and_resumes(workplace, uninterrupted):
    place = workplace()
    place.write()
    with metadata_server() as server:
        where = {"module": NOTICED, "JAXLM_TEST_NOTICE": "0:7", "GCE_METADATA_HOST": server.host}
        stopped = place.run(*RUN, **where)
        assert stopped.code == 143, stopped.err
        assert "Google Compute Engine preempts this machine: saving after the steps that are under way" in stopped.err
        assert "stopped by a preemption notice; saved as checkpoints/run/step-7. Run the same" in stopped.out
        resumed = place.run(*RUN, GCE_METADATA_HOST=server.host)  # the notice is still there
    assert resumed.code == 0, resumed.err
    assert (place.losses(), place.digest("step-24")) == (uninterrupted.losses, uninterrupted.digest)


@pytest.mark.soak
def test_a_notice_to_one_process_stops_all_at_the_same_step(workplace):
    place = workplace()
    place.write()
    with contextlib.ExitStack() as closing, pytest.MonkeyPatch.context() as patch:
        servers = [closing.enter_context(metadata_server()) for _ in range(2)]
        hosts = iter([server.host for server in servers])
        start = Workplace.start
        patch.setattr(Workplace, "start", lambda *a, **k: start(*a, **k, GCE_METADATA_HOST=next(hosts)))
        ends = place.run_all(2, *RUN, module=NOTICED, JAXLM_TEST_NOTICE="1:7")
    assert [code for code, _, _ in ends] == [143, 143], ends
    assert ["preempts this machine" in err for _, _, err in ends] == [False, True]
    assert "stopped by a preemption notice; saved as checkpoints/run/step-" in ends[0][1]
    assert 7 <= max(int(name.removeprefix("step-")) for name in place.checkpoints()) <= 11


@pytest.mark.soak
@pytest.mark.parametrize("behavior", ["nonsense", *(other for other in ("503", "hangs"))])
def test_training_does_not_depend_on_the_server(workplace, uninterrupted, behavior):
    place = workplace()
    place.write()
    with metadata_server() as server:
        server.behavior = behavior
        ended = place.run(*RUN, GCE_METADATA_HOST=server.host)
        assert server.num_asked >= 1
    assert (ended.code, place.losses()) == (0, uninterrupted.losses), ended.err
    assert "Google" not in ended.out + ended.err


@pytest.mark.slow
def test_notices_can_be_turned_off(workplace):
    place = workplace()
    place.write()
    with metadata_server() as server:
        ended = place.run(
            *RUN,
            "--trainer.preemption_notices",
            "false",
            "--trainer.num_train_steps",
            "2",
            GCE_METADATA_HOST=server.host,
        )
        assert (ended.code, server.num_asked) == (0, 0), ended.err
