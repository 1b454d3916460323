"""The manifests of `infra/kubernetes/jobset.py`: their values, and their schema where its package is installed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobset
import pytest
import yaml

ARGUMENTS = ("--config_path", "my file.yaml", "--trainer.id", "$(HOME): #1 $$\n'\"; `id`")
WORDS = ["python", "-m", "jaxlm.train", *ARGUMENTS]
GPU = ("--nodes", "4", "--gpus", "8", "--env", "A=b: $$c $(D)", "--queue", "jaxlm")
TPU = {
    "v4-32": (("--tpu", "v4", "--topology", "2x2x4"), "tpu-v4-podslice", 1, 4),
    "two v5p slices": (("--tpu", "v5p", "--topology", "4x4x4", "--slices", "2"), "tpu-v5p-slice", 2, 16),
    "one machine": (("--tpu", "v6e", "--topology", "2x2"), "tpu-v6e-slice", 1, 1),
    "two TPU7x slices": (("--tpu", "tpu7x", "--topology", "4x4x4", "--slices", "2"), "tpu7x", 2, 16),
    "one machine by default, 3-D": (("--tpu", "v4"), "tpu-v4-podslice", 1, 1),
    "one machine by default, 2-D": (("--tpu", "v5e"), "tpu-v5-lite-podslice", 1, 1),
}


COMMAND = ("mine", "--image", "registry/jaxlm:1", "--dry_run")


@pytest.fixture
def rendered(in_process) -> Callable[..., dict[str, Any]]:
    """The manifest that the command prints."""

    def run(*words: str) -> dict[str, Any]:
        result = in_process(jobset.main, *COMMAND, *words, "--", *ARGUMENTS)
        assert result.code == 0, result.err
        return yaml.safe_load(result.out)

    return run


def job_of(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The replicated job, its Job, and its pod."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated, job, job["template"]["spec"]


def expanded(text: str) -> str:
    """What a container gets of an argument or a variable, by the rules of Kubernetes."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "REPLACED" if found[1] else "$", text)


def test_four_nodes_of_eight_gpus(rendered):
    manifest = rendered(*GPU)
    replicated, job, pod = job_of(manifest)
    (container,) = pod["containers"]
    distributed = "--trainer.distributed."
    expected = [*WORDS, f"{distributed}coordinator_address", "mine-run-0-0.mine:8476", f"{distributed}num_processes"]
    command = [expanded(word) for word in container["command"]]
    assert command == [*expected, "4", f"{distributed}process_id", "REPLACED"]
    assert container["command"][-1] == "$(JOB_COMPLETION_INDEX)"
    assert (replicated["replicas"], job["parallelism"], job["completions"], job["completionMode"]) == (
        1,
        4,
        4,
        "Indexed",
    )
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    ((variable, value),) = [pair.values() for pair in container["env"]]
    assert (variable, expanded(value)) == ("A", "b: $$c $(D)")
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "jaxlm"
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 130, 141]


@pytest.mark.parametrize("name", TPU)
def test_tpu_slices(rendered, name):
    words, accelerator, slices, machines = TPU[name]
    replicated, job, pod = job_of(rendered(*words))
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (slices, machines, machines)
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == accelerator
    dimensions = 2 if "lite" in accelerator or "v6e" in accelerator else 3
    assert len(pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")) == dimensions
    assert [expanded(word) for word in pod["containers"][0]["command"]] == WORDS
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}


EVERYTHING = (
    *("--secret", "HF_TOKEN=hf/token", "--volume", "data:/data", "--service_account", "trainer", "--rdma", "rdma/ib=8"),
    *("--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "pool=train", "--request", "cpu=96"),
    *("--request", "memory=1Ti"),
)


def test_what_pods_need_of_the_cluster(rendered):
    _, _, pod = job_of(rendered(*EVERYTHING))
    (container,) = pod["containers"]
    secret = {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert container["env"] == [{"name": "HF_TOKEN", "valueFrom": secret}]
    assert {"name": "volume-0", "mountPath": "/data"} in container["volumeMounts"]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    assert [volume["name"] for volume in pod["volumes"]] == ["shared-memory", "volume-0"]
    assert pod["serviceAccountName"] == "trainer"
    assert pod["tolerations"] == [
        {"operator": "Exists", "key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"operator": "Equal", "key": "pool", "value": "train"},
    ]
    devices = {"nvidia.com/gpu": 8, "rdma/ib": 8}
    assert container["resources"] == {"limits": devices, "requests": {"cpu": "96", "memory": "1Ti"} | devices}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def kept(given: Any, read: Any) -> bool:
    """Whether what was given is in what was read, which also has defaults."""
    if isinstance(given, dict):
        return isinstance(read, dict) and all(key in read and kept(value, read[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(map(kept, given, read))
    return given == read


@pytest.mark.parametrize(
    "words", [GPU, EVERYTHING, *(words for words, *_ in TPU.values())], ids=["gpu", "everything", *TPU]
)
def test_manifests_have_the_fields_of_the_api(rendered, words):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[infra-test]'")
    manifest = rendered(*words)
    assert kept(manifest, models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict())
    misspelled = manifest | {"spec": manifest["spec"] | {"failurPolicy": {}}}
    assert not kept(misspelled, models.JobsetV1alpha2JobSet.from_dict(misspelled).to_dict())


def test_the_queue_is_valid_yaml():
    kinds = [part["kind"] for part in yaml.safe_load_all(Path(jobset.__file__).with_name("queue.yaml").read_text())]
    assert kinds == ["ResourceFlavor", "ClusterQueue", "LocalQueue"]


@pytest.mark.parametrize(
    ("words", "arguments", "message"),
    [
        (("--tpu", "v4", "--topology", "16"), ARGUMENTS, "--topology: '16' given, such as 2x2x1 expected for v4"),
        (("--tpu", "v5e", "--topology", "2x2x4"), ARGUMENTS, "--topology: '2x2x4' given, such as 2x2 expected for v5e"),
        (("--tpu", "v6e", "--topology", "2x3"), ARGUMENTS, "--topology: '2x3' given, a multiple of 4 chips expected"),
        (("--tpu", "v4", "--slices", "0"), ARGUMENTS, "1 or more expected"),
        (("--tpu", "v4", "--nodes", "1"), ARGUMENTS, "--nodes: given with --tpu, which takes --topology and --slices"),
        (("--tpu", "v4", "--gpus", "8"), ARGUMENTS, "--gpus: given with --tpu"),
        (("--topology", "2x2x1"), ARGUMENTS, "--topology: given without --tpu"),
        (("--slices", "2"), ARGUMENTS, "--slices: given without --tpu"),
        (("--nodes", "0"), ARGUMENTS, "1 or more expected"),
        (("--nodes", "9" * 20), ARGUMENTS, "at most 100,000"),
        (("--restarts", "-1"), ARGUMENTS, "--restarts: -1 given, 0 to 100000 expected"),
        (("--image", "x\n securityContext: {privileged: true}"), ARGUMENTS, "argument --image:"),
        (("--namespace", "default, a: b"), ARGUMENTS, "argument --namespace: 'default, a: b' given"),
        (("--queue", "q, x: y}"), ARGUMENTS, "argument --queue:"),
        (("--env", "HF_TOKEN=hf_1"), ARGUMENTS, "HF_TOKEN given, which looks like a credential"),
        (("--secret", "HF_TOKEN=hf_1"), ARGUMENTS, "'HF_TOKEN=hf_1' given, NAME=SECRET/KEY expected"),
        (("--volume", "data"), ARGUMENTS, "'data' given, CLAIM:/PATH expected"),
        (("--toleration", "a=b:Never"), ARGUMENTS, "argument --toleration:"),
        (("--request", "gpu=1"), ARGUMENTS, "argument --request:"),
        (("--rdma", "ib=8"), ARGUMENTS, "argument --rdma:"),
        (("--env", "WANDB_KEY=x"), ARGUMENTS, "WANDB_KEY given, which looks like a credential"),
        (("--env", "U=https://u:pw@h/x"), ARGUMENTS, "U given, which looks like a credential"),
        (("--env", "PGPASSWORD=x"), ARGUMENTS, "PGPASSWORD given, which looks like a credential"),
        (("--env", "WANDB_API_KEY=x"), ARGUMENTS, "WANDB_API_KEY given, which looks like a credential"),
        (("--env", "a"), ARGUMENTS, "--env: 'a' given, NAME=VALUE expected"),
        ((), (), "give the arguments of jaxlm train after --"),
    ],
)
def test_invalid_arguments_are_refused(in_process, words, arguments, message):
    result = in_process(jobset.main, *COMMAND, *words, "--", *arguments)
    assert (result.code, message in result.err) == (2, True), result.err
