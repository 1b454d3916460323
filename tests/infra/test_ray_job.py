"""`infra/ray_job.py`: the commands of the nodes, mistakes, and the clusters' files."""

import json
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import attempts
import pytest
import ray_job
import yaml

from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
ARGUMENTS = ("--config_path", "my file.yaml")
DISTRIBUTED = "--trainer.distributed."


@pytest.fixture
def shown(in_process) -> Callable[..., list[str]]:
    """The lines that the command prints."""

    def run(*words: str) -> list[str]:
        result = in_process(ray_job.main, "--dry_run", *words, "--", *ARGUMENTS)
        assert result.code == 0, result.err
        return result.out.splitlines()

    return run


def test_four_nodes_of_eight_gpus(shown):
    out = shown("--nodes", "4", "--gpus", "8", "--env", "A=b c")
    assert out[0] == 'infra: 4 nodes, each with {"CPU": 1, "GPU": 8}'
    for number, line in enumerate(out[1:]):
        words = [
            "env",
            "A=b c",
            "python",
            "-m",
            "jaxlm.train",
            *ARGUMENTS,
            f"{DISTRIBUTED}coordinator_address",
            "HOST:PORT",
        ]
        words += [f"{DISTRIBUTED}num_processes", "4", f"{DISTRIBUTED}process_id", str(number)]
        assert shlex.split(line) == words


def test_a_v4_32_slice_finds_its_machines_itself(shown):
    assert shown("--nodes", "4", "--tpu", "4") == [
        'infra: 4 nodes, each with {"CPU": 1, "TPU": 4}',
        *["python -m jaxlm.train --config_path 'my file.yaml'"] * 4,
    ]


@pytest.mark.parametrize(
    ("words", "arguments", "message"),
    [
        (("--nodes", "0"), ARGUMENTS, "--nodes: 0 given, 1 or more expected"),
        (("--gpus", "8", "--tpu", "4"), ARGUMENTS, "--gpus and --tpu given: choose one"),
        (("--env", "=1"), ARGUMENTS, "--env: '=1' given, NAME=VALUE expected"),
        ((), (), "give the arguments of jaxlm train after --"),
    ],
)
def test_invalid_arguments_are_refused(in_process, words, arguments, message):
    result = in_process(ray_job.main, "--dry_run", *words, "--", *arguments)
    assert (result.code, message in result.err) == (2, True), result.err


def test_the_port_of_the_coordinator_is_free_and_not_one_of_outgoing_connections(monkeypatch):
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
    with socket.socket() as other:
        other.bind(("", reserved_port()))
        taken, free, asked = other.getsockname()[1], reserved_port(), []
        ports = iter((taken, free))
        monkeypatch.setattr(ray_job.random, "randint", lambda *limits: asked.append(limits) or next(ports))
        assert ray_job.Node().free_address() == f"10.0.0.1:{free}"
    assert asked == [(20_000, 31_999)] * 2


class TimeoutOfRay(Exception):
    """Stands for ray.exceptions.GetTimeoutError."""


@pytest.mark.parametrize("nodes_come", [False, True])
def test_nodes_that_never_come_use_up_the_retries(monkeypatch, nodes_come, capsys):
    """Ray's stand-in: an hour's wait for nodes passes at once, then it is refused; or they come, and are lost in a minute."""
    now = [0.0]

    def get(_, timeout):
        now[0] += timeout
        raise TimeoutOfRay("no nodes")

    group = SimpleNamespace(ready=lambda: None)
    util = SimpleNamespace(placement_group=lambda *_, **__: group, remove_placement_group=lambda _: None)
    exceptions = SimpleNamespace(RayError=TimeoutOfRay)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util, exceptions=exceptions, get=get))
    if nodes_come:
        monkeypatch.setattr(ray_job.Attempt, "start", lambda _: now.__setitem__(0, now[0] + 3500))
        monkeypatch.setattr(ray_job.Attempt, "codes", lambda _: now.__setitem__(0, now[0] + 60) or [1, 255])
    else:
        scheduling = SimpleNamespace(PlacementGroupSchedulingStrategy=None)
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", scheduling)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        assert len(waits) < 9, "it never gives up"

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(ray_job, "time", clock)
    monkeypatch.setattr(attempts, "time", clock)
    assert ray_job.run(ray_job.parse(["--nodes", "2", "--retries", "3", "--", "x"])) == 1
    assert waits == [30, 60, 120]
    assert "giving up after 4 attempts" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcp-gpu", "gcp-tpu"])
def test_ray_accepts_the_files_of_clusters(shown, name):
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    text = (ROOT / "infra" / "ray" / f"{name}.yaml").read_text()
    cluster = yaml.safe_load(text)
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    (command,) = [line for line in text.splitlines() if "infra/ray_job.py" in line]
    words = shlex.split(shlex.split(command.lstrip("# "))[-1])
    assert shown(*words[2 : words.index("--")])
