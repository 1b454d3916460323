"""One of two processes is killed or stops responding: the other exits in time, with a message and a nonzero exit code."""

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
@pytest.mark.parametrize(("number", "lost"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
def test_losing_a_process_ends_the_others(workplace, number, lost):
    """Process 0 is the coordinator, so losing it is detected differently from losing another process."""
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
    assert code != 0
    assert "JAX distributed service detected fatal errors" in err or "Gloo" in err or "heartbeat" in err, err
    assert seconds < 5 * HEARTBEAT_S
    assert "step-24" not in place.checkpoints()
