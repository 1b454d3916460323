"""Launchers are recognized by the variables that they set."""

import dataclasses
import fnmatch
import socket
import sys
import time

import jax
import pytest

from jaxlm.core import distributed
from jaxlm.core.distributed import DistributedConfig, detect_launcher, slurm_devices
from jaxlm.core.errors import ConfigError
from tests.ports import reserved_port

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
LAUNCHERS = {
    "srun": (SLURM, "SLURM"),
    "srun of one task": ({**SLURM, "SLURM_NTASKS": "1"}, None),
    "sbatch without srun": ({k: v for k, v in SLURM.items() if "STEP" not in k}, None),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
    "TPU pod": ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1"}, "TPU"),
    "one TPU host": ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    "TPU slices": ({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, "TPU"),
    "a laptop": ({"HOME": "/home/me"}, None),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_are_detected(name, monkeypatch):
    monkeypatch.setattr(distributed.glob, "glob", lambda pattern: [])
    environment, expected = LAUNCHERS[name]
    assert detect_launcher(environment) == expected


@pytest.mark.parametrize("chips", ["/dev/accel0", "/dev/vfio/0"])  # v4, v5 and later
def test_a_tpu_machine_is_detected_by_its_chips_and_libtpu(chips, monkeypatch):
    monkeypatch.setattr(distributed.glob, "glob", lambda pattern: [chips] if fnmatch.fnmatch(chips, pattern) else [])
    for libtpu, expected in ((object(), "TPU"), (None, None)):
        monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name, found=libtpu: found)
        assert detect_launcher({}) == expected


@pytest.mark.parametrize(
    ("visible", "tasks", "expected"),
    [
        ("0,1,2,3", "4(x2)", [1]),
        ("0,1,2,3,4,5,6,7", "4", [2, 3]),
        ("5", "4(x2)", [0]),
        ("", "4", None),
        ("0,1", "", None),
    ],
)
@pytest.mark.trap("D18")
def test_local_devices_of_a_slurm_task(visible, tasks, expected):
    environment = {**SLURM, "CUDA_VISIBLE_DEVICES": visible, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert slurm_devices(environment) == expected


def test_a_single_slurm_task_per_node_gets_all_gpus():
    environment = {**SLURM, "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert slurm_devices({**environment, "SLURM_STEP_TASKS_PER_NODE": "1(x8)"}) == [0, 1, 2, 3]


def test_under_slurm_jax_finds_the_coordinator(monkeypatch):
    for name, value in {**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **named: seen.append((given, named)))
    DistributedConfig().join()
    ((given, named),) = seen
    assert given == (None, None, None)
    assert named["local_device_ids"] == [1]


def test_a_process_says_that_it_waits_for_the_others(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "_SILENT_S", 0.01)
    said = []

    def connect(*given, **named) -> None:
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
            said.extend(filter(None, [capsys.readouterr().err]))

    monkeypatch.setattr(jax.distributed, "initialize", connect)
    DistributedConfig("127.0.0.1:1234", 2, 0).join()
    assert said
    assert said[0].startswith("still waiting for the other processes of the run to connect. If one of them has failed")
    assert "gives up after 300 s (trainer.distributed.initialization_timeout)" in said[0]


def test_jax_reads_slurm_variables():
    """How jax itself reads the variables: the first node coordinates. A failure here means that jax has changed."""
    from jax._src.clusters.slurm_cluster import SlurmCluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SLURM.items():
            patch.setenv(name, value)
        assert SlurmCluster.is_env_present()
        assert (SlurmCluster.get_process_count(), SlurmCluster.get_process_id()) == (8, 5)
        address = SlurmCluster.get_coordinator_address(timeout_secs=1, override_coordinator_port="99")
        assert address == "node003:99"


@pytest.fixture
def started(monkeypatch):
    """The processes that have passed all checks: jax is not started."""
    seen: list[int] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda address, count, number, **_: seen.append(number))
    monkeypatch.setattr(distributed, "_own_number", [])
    return seen


def test_a_port_that_is_taken_is_refused_by_its_key(started):
    port = reserved_port()
    config = DistributedConfig(f"127.0.0.1:{port}", 2, 0)
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with socket.socket(family) as other:
            other.bind((host, port))
            other.listen()
            for failed in (None, 2):  # a process that has failed does not listen to say so, either
                with pytest.raises(
                    ConfigError, match=r"^trainer\.distributed\.coordinator_address: '127.*Give another port"
                ):
                    config.join(failed)
            with socket.create_connection(("127.0.0.1", port)):
                pass
    assert not started
    config.join()  # connections of a server that has ended are no obstacle
    assert started == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="names of sockets without files")
@pytest.mark.parametrize("host", ["127.0.0.1", f"{'long-name.' * 20}example.org"])
def test_a_number_that_runs_on_this_machine_is_refused(started, host):
    config = DistributedConfig(f"{host}:{reserved_port()}", 3, 1)
    config.join()
    for failed in (None, 2):
        with pytest.raises(ConfigError, match=r"^trainer\.distributed\.process_id: 1 given, but process 1 of the run"):
            config.join(failed)
    dataclasses.replace(config, process_id=2).join()
    distributed._own_number.clear()  # as when the process ends
    config.join()
    assert started == [1, 2, 1]
