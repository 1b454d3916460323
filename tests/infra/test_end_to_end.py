"""Launchers on this machine: two processes, one of them killed; the result is that of an uninterrupted run, bit for bit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.end_to_end.commands import REPOSITORY, end_of
from tests.infra.conftest import ARGUMENTS, NUM_STEPS, pod_commands

INFRA = REPOSITORY / "infra"
SOON = ("--trainer.distributed.heartbeat_timeout", "20s")  # instead of 100 s until a killed process is lost


@pytest.mark.soak
def test_local(launched, expected):
    place = launched()
    place.wait_at(12)
    process = place.launch(
        str(INFRA / "local.sh"), "--processes", "2", "--retries", "1", "--wait_s", "0", "--", *ARGUMENTS, *SOON
    )
    place.wait_for_checkpoint("step-8")
    place.kill_one()
    place.go()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "starting again in 0 s, 0 times left" in out
    assert place.result() == expected


@pytest.mark.slow
def test_sigterm_to_one_pod_saves_in_all(launched):
    """What Kubernetes sends to the first process of an evicted pod reaches the run."""
    place = launched()
    pods = []
    try:
        for _, option, module, *arguments in pod_commands(place.folder, 2):
            assert option == "-m"
            pods.append(
                place.start(*("1000000" if word == str(NUM_STEPS) else word for word in arguments), module=module)
            )
        place.wait_for_checkpoint("step-8")
        pods[1].terminate()
        ends = [end_of(pod) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [end.code for end in ends] == [143, 143], ends
    assert "SIGTERM received: saving after the steps that are under way" in ends[1].out + ends[1].err
    newest = max(place.checkpoints(), key=lambda name: int(name.partition("-")[2]))
    assert f"stopped by SIGTERM; saved as checkpoints/run/{newest}." in ends[0].out


@pytest.mark.soak
def test_ray(launched, expected):
    """A cluster; the actor that watches one of the processes is killed, which kills the process."""
    pytest.importorskip("ray")
    place = launched()
    place.wait_at(12)
    words = ("--address", "local", "--nodes", "2", "--cpus", "0.5", "--share_nodes", "--backoff_s", "0.1")
    process = place.launch(sys.executable, str(INFRA / "ray_job.py"), *words, "--", *ARGUMENTS)
    place.wait_for_checkpoint("step-8")
    killed = place.training_processes()[-1]
    actor = int(subprocess.run(["ps", "-o", "ppid=", "-p", str(killed)], capture_output=True, text=True).stdout)
    os.kill(actor, signal.SIGKILL)
    end = time.monotonic() + 100
    while killed in place.training_processes():
        assert time.monotonic() < end, "the process of the actor goes on"
        time.sleep(0.01)
    place.go()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "infra: retry: the nodes ended with" in out
    assert "infra: done: the nodes ended with [0, 0]" in out
    assert place.result() == expected
