"""One of two processes is killed or stops responding: the other exits in time, with a message and a nonzero exit code."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.test_signals import RUN, process_end

HEARTBEAT_S = 6


def wait_until_lost(pid: int) -> None:
    """Waits until the process is stopped or dead."""
    while (status := Path(f"/proc/{pid}/stat")).exists() and status.read_text().rpartition(")")[2].split()[
        0
    ] not in "TZ":
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "lost", "message"),
    [
        # Process 0 hosts jax's coordination service, so jax aborts the others after their message.
        (signal.SIGKILL, 0, "process 0 cannot be reached|an exchange with the other processes failed"),
        (signal.SIGKILL, 1, "an exchange with the other processes failed|no heartbeat of process 1"),
        (signal.SIGSTOP, 0, f"no answer of process 0 for {HEARTBEAT_S} s"),
        (signal.SIGSTOP, 1, f"no heartbeat of process 1 for {HEARTBEAT_S} s"),
    ],
)
def test_losing_a_process_ends_the_others(workplace, number, lost, message):
    place = workplace(1)
    path = place.write()
    path.write_text(
        path.read_text().replace("  log_dir:", f"  distributed: {{heartbeat_timeout: {HEARTBEAT_S}s}}\n  log_dir:")
    )
    processes = place.start_all(
        2, *RUN, module="tests.end_to_end.signaled", JAXLM_TEST_SIGNAL=f"{int(number)}:{lost}:7"
    )
    try:
        wait_until_lost(processes[lost].pid)
        began = time.monotonic()
        code, _, err = process_end(processes[1 - lost])
        seconds = time.monotonic() - began
    finally:
        processes[lost].kill()
        processes[lost].communicate()
    assert re.search(f"error: ({message})", err), err
    assert code == 1 or (code == -signal.SIGABRT and (number, lost) == (signal.SIGKILL, 0)), err
    assert "Traceback" not in err
    assert seconds < 5 * HEARTBEAT_S
    assert "step-24" not in place.checkpoints()
