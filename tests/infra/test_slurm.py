"""`infra/slurm.sbatch` under a real SLURM on this machine: preempted, requeued, identical to the last bit.

It needs `apt-get install slurmctld slurmd`, and to be root. One node, whose two tasks are the processes of the run.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import REPOSITORY
from tests.infra.conftest import ARGUMENTS, Launched
from tests.ports import reserved_port

SCRIPT = str(REPOSITORY / "infra" / "slurm.sbatch")

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=INFINITE
PartitionName=high Nodes={host} PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE
"""


@pytest.fixture
def slurm(tmp_path):
    """Starts a cluster of this machine. Yields the variables with which SLURM's programs find it."""
    if shutil.which("slurmd") is None or shutil.which("slurmctld") is None:
        pytest.skip("SLURM is not installed (apt-get install slurmctld slurmd)")
    if os.geteuid() != 0:
        pytest.skip("slurmd must be started by root")
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    path = tmp_path / "slurm.conf"
    host, ports = socket.gethostname().partition(".")[0], [reserved_port(), reserved_port()]
    path.write_text(CONFIG.format(host=host, folder=tmp_path, ports=ports))
    variables = os.environ | {"SLURM_CONF": str(path)}
    daemons = [
        subprocess.Popen([name, "-D"], env=variables, stderr=subprocess.DEVNULL) for name in ("slurmctld", "slurmd")
    ]
    try:
        wait_until(lambda: "idle" in output(variables, "sinfo", "-h", "-o", "%T"), "no node is idle")
        yield variables
    finally:
        subprocess.run(["scancel", "--full", "--user", "root"], env=variables, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)


def output(variables: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True).stdout


def wait_until(condition, problem: str, timeout_s: float = 600) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, problem
        time.sleep(0.1)


def state(variables: dict[str, str], job: str) -> str:
    return output(variables, "squeue", "-h", "-j", job, "-o", "%T").strip()


def submit(place: Launched, variables: dict[str, str], *command: str) -> str:
    """The number of the new job."""
    (place.folder / "logs").mkdir(exist_ok=True)
    done = subprocess.run(
        ["sbatch", "--parsable", *command], env=variables, cwd=place.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.soak
def test_a_mistake_of_all_tasks_is_not_requeued(slurm, launched):
    """SLURM must not kill the task that is slower to say so: its 137 would look like a lost task."""
    place = launched()
    variables = place.environment | {"SLURM_CONF": slurm["SLURM_CONF"]}
    job = submit(place, variables, "--ntasks-per-node", "2", SCRIPT, *ARGUMENTS, "--trainer.num_train_step", "3")
    wait_until(lambda: state(variables, job) in ("", "FAILED"), "the job does not end")
    text = (place.folder / f"logs/slurm-{job}.log").read_text()
    assert "stopped with 2: see the message above; not requeued" in text, text
    assert "num_train_step" in text


@pytest.mark.soak
@pytest.mark.parametrize(("code", "log"), [(2, "stopped with 2"), (75, "ended with 75: requeued, restart 1")])
def test_a_slow_task_ends_by_itself(slurm, launched, code, log):
    """Task 1 ends; task 0 needs a second more, and has the same code."""
    place = launched()
    (place.folder / "bin").mkdir()
    python = place.folder / "bin" / "python"
    python.write_text(f'#!/bin/bash\n[ "$SLURM_PROCID" = 1 ] || sleep 2\nexit {code}\n')
    python.chmod(0o755)
    variables = place.environment | {"SLURM_CONF": slurm["SLURM_CONF"]}
    variables["PATH"] = f"{place.folder / 'bin'}:{variables['PATH']}"
    job = submit(place, variables, "--ntasks-per-node", "2", SCRIPT, *ARGUMENTS)
    path = place.folder / f"logs/slurm-{job}.log"
    wait_until(lambda: path.exists() and "requeued" in path.read_text(), "the job does not end")
    assert log in path.read_text()


@pytest.mark.soak
def test_a_preempted_job_is_requeued_and_identical(slurm, launched, expected):
    place = launched()
    place.wait_at(12)
    variables = place.environment | {"SLURM_CONF": slurm["SLURM_CONF"]}
    job = submit(place, variables, "--ntasks-per-node", "2", SCRIPT, *ARGUMENTS)
    place.wait_for_checkpoint("step-8")
    urgent = submit(
        place, variables, "--partition", "high", "--exclusive", "--output", "urgent.log", "--wrap", "echo urgent"
    )
    log = Path(place.folder / f"logs/slurm-{job}.log")
    wait_until(lambda: "SIGTERM received" in log.read_text(), "the run is not told")
    place.go()
    wait_until(lambda: state(variables, urgent) in ("", "COMPLETED"), "the other job did not run")
    wait_until(lambda: "\ndone" in log.read_text() and state(variables, job) in ("", "COMPLETED"), log.read_text())
    text = log.read_text()
    assert "ended with 143: requeued, restart 1" in text, text
    assert (place.folder / "urgent.log").read_text() == "urgent\n"
    assert place.result() == expected
