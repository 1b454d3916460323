"""`infra/ray_job.py`: the commands of the nodes, mistakes, and the clusters' files."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ARGUMENTS = ("--config_path", "my file.yaml")
DISTRIBUTED = "--trainer.distributed."


def run(*words: str, arguments: tuple[str, ...] = ARGUMENTS) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "infra" / "ray_job.py"), "--dry_run", *words, "--", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_four_nodes_of_eight_gpus():
    out = run("--nodes", "4", "--gpus", "8", "--env", "A=b c").stdout.splitlines()
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


def test_a_v4_32_slice_finds_its_machines_itself():
    out = run("--nodes", "4", "--tpu", "4").stdout.splitlines()
    assert out == [
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
def test_mistakes(words, arguments, message):
    result = run(*words, arguments=arguments)
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("name", ["gcp-gpu", "gcp-tpu"])
def test_ray_accepts_the_files_of_clusters(name):
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    text = (ROOT / "infra" / "ray" / f"{name}.yaml").read_text()
    cluster = yaml.safe_load(text)
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    (shown,) = [line for line in text.splitlines() if "infra/ray_job.py" in line]
    words = shlex.split(shlex.split(shown.lstrip("# "))[-1])
    result = run(*words[2 : words.index("--")])
    assert result.returncode == 0, result.stderr
