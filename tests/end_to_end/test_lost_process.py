"""One of two processes is killed or stops responding: the other exits in time, with a message and a nonzero exit code."""

import contextlib
import re
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import end_of
from tests.end_to_end.test_signals import RUN

HEARTBEAT_S = 6
SOON_S = 150  # the others would wait for 300 s (trainer.distributed.shutdown_timeout)


def wait_until_lost(pid: int) -> None:
    """Waits until the process is stopped or dead."""
    with contextlib.suppress(OSError):  # there is no such process any more
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.05)


ABORTED = "the JAX distributed service detected fatal errors"
EXCHANGE = "an exchange with the other processes failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "number", "lost", "step", "message"),
    [
        # Before the first step, while it compiles: the others fail in the exchanges of their own compilation, or in a step.
        # They get to speak only after 20 s.
        (2, signal.SIGKILL, 1, 0, f"{EXCHANGE}|no heartbeat of process 1"),
        # Process 0 hosts jax's coordination service, so jax aborts the others after their message.
        pytest.param(2, signal.SIGKILL, 0, 7, f"process 0 cannot be reached|{EXCHANGE}", marks=pytest.mark.soak),
        pytest.param(2, signal.SIGKILL, 1, 7, f"{EXCHANGE}|no heartbeat of process 1", marks=pytest.mark.soak),
        pytest.param(2, signal.SIGSTOP, 0, 7, f"no answer of process 0 for {HEARTBEAT_S} s", marks=pytest.mark.soak),
        pytest.param(2, signal.SIGSTOP, 1, 7, f"no heartbeat of process 1 for {HEARTBEAT_S} s", marks=pytest.mark.soak),
        pytest.param(4, signal.SIGKILL, 0, 7, f"process 0 cannot be reached|{EXCHANGE}", marks=pytest.mark.soak),
        pytest.param(4, signal.SIGKILL, 2, 7, f"{EXCHANGE}|no heartbeat of process 2", marks=pytest.mark.soak),
        pytest.param(4, signal.SIGSTOP, 2, 7, f"no heartbeat of process 2 for {HEARTBEAT_S} s", marks=pytest.mark.soak),
    ],
)
def test_losing_a_process_ends_the_others(workplace, processes, number, lost, step, message):
    place = workplace(1)
    path = place.write()
    path.write_text(
        path.read_text().replace("  log_dir:", f"  distributed: {{heartbeat_timeout: {HEARTBEAT_S}s}}\n  log_dir:")
    )
    running = place.start_all(
        processes, *RUN, module="tests.end_to_end.signaled", JAXLM_TEST_SIGNAL=f"{int(number)}:{lost}:{step}"
    )
    try:
        wait_until_lost(running[lost].pid)
        began = time.monotonic()
        ends = [end_of(process) for index, process in enumerate(running) if index != lost]
        seconds = time.monotonic() - began
    finally:
        running[lost].kill()
        running[lost].communicate()
    for code, _, err in ends:
        # The others may read what one of them said first. If process 0 is killed, jax may abort them before they say it.
        aborted = code == -signal.SIGABRT and (number, lost) == (signal.SIGKILL, 0)
        said = rf"error: (process \d+: )?({message})" + aborted * f"|{ABORTED}"
        assert re.search(said, err), err
        assert code == 1 or aborted, err
        assert "Traceback" not in err
    assert seconds < SOON_S
    assert "step-24" not in place.checkpoints()
