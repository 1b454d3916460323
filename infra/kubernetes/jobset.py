"""A run as a JobSet on Kubernetes: fills in gpu.yaml or tpu.yaml, and hands it to kubectl.

    python infra/kubernetes/jobset.py mine --image registry/jaxlm:1 --nodes 4 --gpus 8 -- --config_path /config/mine.yaml
    python infra/kubernetes/jobset.py mine --image registry/jaxlm:1 --tpu v5p --topology 4x4x4 --slices 2 -- --config_path ...

What follows `--` are the arguments of `jaxlm train`. `--dry_run` prints the manifest instead of applying it. The cluster
needs the JobSet controller, and Kueue for `--queue`. For anything else, use kubectl: get, logs, delete.
"""

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attempts import train_command
from preflight import check_configuration

CHIPS = 4  # per machine of slices with several machines
# GKE's names of accelerators, the topology of one machine, and the devices that JAX makes of a chip.
TPUS = {
    "v4": ("tpu-v4-podslice", "2x2x1", 1),
    "v5e": ("tpu-v5-lite-podslice", "2x2", 1),
    "v5p": ("tpu-v5p-slice", "2x2x1", 1),
    "v6e": ("tpu-v6e-slice", "2x2", 1),
    "tpu7x": ("tpu7x", "2x2x1", 2),
}
NAME = r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"
# Of Kubernetes: labels and names of objects (RFC 1123), names of variables and of keys, quantities, extended resources.
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
OBJECT = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
KEY = r"[-._a-zA-Z0-9]+"
QUANTITY = r"[1-9][0-9]*(\.[0-9]+)?(m|k|[MGTP]i?|Ki)?"
RESOURCE = r"[a-z0-9.-]+/[-._a-zA-Z0-9]+"
IMAGE = r"[a-zA-Z0-9][-._a-zA-Z0-9:/]*(@sha256:[0-9a-f]{64})?"
TOLERATION = rf"(?P<key>[-._/a-zA-Z0-9]+)(=(?P<value>{KEY}))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
SECRET = re.compile(
    r"(?:TOKEN|SECRETS?|PASSWORD|PASSWD|PGPASS|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)KEY|_KEY|_AUTH)(?![A-Z])",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@|\bhf_\w{30}")
LARGEST = 100_000


def literal(text: str) -> str:
    """Escapes text for arguments and variables, in which Kubernetes expands $(NAME) and turns $$ into $."""
    return text.replace("$", "$$")


def num_chips(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


def manifest(options: argparse.Namespace) -> dict[str, Any]:
    """The JobSet: the template of gpu.yaml or tpu.yaml with the options filled in."""
    jobset = yaml.safe_load(Path(__file__).with_name("tpu.yaml" if options.tpu else "gpu.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    jobset["metadata"] |= {"name": options.name, "namespace": options.namespace}
    jobset["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    jobset["spec"]["failurePolicy"]["maxRestarts"] = options.restarts
    if options.tpu:
        total = num_chips(options.topology)
        nodes, device = max(1, total // CHIPS), {"google.com/tpu": min(CHIPS, total)}
        replicated["replicas"] = options.slices
        pod["nodeSelector"] |= {
            "cloud.google.com/gke-tpu-accelerator": TPUS[options.tpu][0],
            "cloud.google.com/gke-tpu-topology": options.topology,
        }
    else:
        nodes, device = options.nodes, {"nvidia.com/gpu": options.gpus}
    job |= {"parallelism": nodes, "completions": nodes}
    container["image"] = options.image
    container["command"] = [*map(literal, train_command(options.arguments)), *distributed(options)]
    container["env"] = [*({"name": n, "value": literal(v)} for n, v in options.env), *map(secret, options.secret)]
    container["resources"] = {"requests": dict(options.request) | device, "limits": device}
    add_to_pod(pod, container, options)
    return jobset


def distributed(options: argparse.Namespace) -> list[str]:
    """The arguments with which pods find each other. GKE sets variables for TPUs, by which JAX finds the other machines."""
    if options.tpu:
        return []
    address = f"{options.name}-run-0-0.{options.name}:8476"
    values = {"coordinator_address": address, "num_processes": options.nodes, "process_id": "$(JOB_COMPLETION_INDEX)"}
    return [word for key, value in values.items() for word in (f"--trainer.distributed.{key}", str(value))]


def secret(given: tuple[str, str, str]) -> dict[str, Any]:
    """A variable whose value Kubernetes reads from a Secret, so that no manifest contains it."""
    name, owner, key = given
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": owner, "key": key}}}


def add_to_pod(pod: dict[str, Any], container: dict[str, Any], options: argparse.Namespace) -> None:
    """Adds volumes, the service account, tolerations and network adapters."""
    for number, (claim, path) in enumerate(options.volume):
        name = f"volume-{number}"
        pod.setdefault("volumes", []).append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        container.setdefault("volumeMounts", []).append({"name": name, "mountPath": path})
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.toleration:
        pod["tolerations"] = options.toleration
    if options.rdma:
        adapters = dict([options.rdma])
        container["resources"]["limits"] |= adapters
        container["resources"]["requests"] |= adapters
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory


def complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in the defaults of the options for GPUs or TPUs, and refuses options for the other."""
    one_machine = TPUS[options.tpu][1] if options.tpu else None
    kinds = {"gpu": {"nodes": 1, "gpus": 8}, "tpu": {"topology": one_machine, "slices": 1}}
    chosen, other = (kinds["tpu"], kinds["gpu"]) if options.tpu else (kinds["gpu"], kinds["tpu"])
    if ignored := [name for name in other if getattr(options, name) is not None]:
        how = "given with --tpu, which takes --topology and --slices" if options.tpu else "given without --tpu"
        parser.error(f"--{ignored[0]}: {how}")
    for name, default in chosen.items():
        value = getattr(options, name)
        setattr(options, name, default if value is None else value)
    if any(not 1 <= getattr(options, name) <= LARGEST for name in chosen if name != "topology"):
        parser.error(f"--nodes, --gpus and --slices: 1 or more expected, and at most {LARGEST:,}")
    if options.tpu:
        check_topology(parser, options.topology, options.tpu)


def check_topology(parser: argparse.ArgumentParser, topology: str, tpu: str) -> None:
    one_machine = TPUS[tpu][1]
    sizes = rf"[1-9][0-9]{{0,2}}(x[1-9][0-9]{{0,2}}){{{one_machine.count('x')}}}"
    if not re.fullmatch(sizes, topology):
        parser.error(f"--topology: {topology!r} given, such as {one_machine} expected for {tpu}")
    if num_chips(topology) > CHIPS and num_chips(topology) % CHIPS:
        parser.error(f"--topology: {topology!r} given, a multiple of {CHIPS} chips expected, those of a machine")


def matched(pattern: str, expected: str) -> Callable[[str], re.Match[str]]:
    """A type for argparse: refuses what the pattern does not match as a whole."""

    def match(text: str) -> re.Match[str]:
        if (found := re.fullmatch(pattern, text)) is None:
            raise argparse.ArgumentTypeError(f"{text[:200]!r} given, {expected} expected")
        return found

    return match


def text(pattern: str, expected: str) -> Callable[[str], str]:
    return lambda given: matched(pattern, expected)(given)[0]


def variable(given: str) -> tuple[str, str]:
    name, value = matched(rf"({VARIABLE})=(.*)", "NAME=VALUE")(given).groups()
    if SECRET.search(name) or SECRET_VALUE.search(value):
        raise argparse.ArgumentTypeError(
            f"{name} given, which looks like a credential. Values of --env are in the manifest, for all who may read it. Use"
            f" --secret {name}=SECRET/KEY (kubectl create secret generic SECRET --from-literal KEY=...)"
        )
    return name, value


def secret_reference(given: str) -> tuple[str, str, str]:
    match = matched(rf"(?P<name>{VARIABLE})=(?P<owner>{OBJECT})/(?P<key>{KEY})", "NAME=SECRET/KEY")(given)
    return match["name"], match["owner"], match["key"]


def volume(given: str) -> tuple[str, str]:
    match = matched(rf"(?P<claim>{OBJECT}):(?P<path>/[^:]+)", "CLAIM:/PATH")(given)
    return match["claim"], match["path"]


def request(given: str) -> tuple[str, str]:
    match = matched(rf"(?P<name>cpu|memory|ephemeral-storage)=(?P<size>{QUANTITY})", "cpu=96, memory=1Ti or so")(given)
    return match["name"], match["size"]


def rdma(given: str) -> tuple[str, int]:
    match = matched(rf"(?P<name>{RESOURCE})=(?P<count>[1-9][0-9]{{0,2}})", "RESOURCE=NUMBER, such as rdma/ib=8,")(given)
    return match["name"], int(match["count"])


def toleration(given: str) -> dict[str, str]:
    parts = matched(TOLERATION, "KEY, KEY=VALUE or KEY=VALUE:EFFECT")(given).groupdict()
    operator = "Exists" if parts["value"] is None else "Equal"
    return {"operator": operator} | {name: part for name, part in parts.items() if part is not None}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name", type=text(NAME, "lower-case letters, digits and -, 42 at most,"), help="name of the JobSet")
    add(
        "--image",
        required=True,
        type=text(IMAGE, "an image such as registry/jaxlm:1"),
        help="image of infra/Dockerfile.gpu or Dockerfile.tpu, in a registry that the cluster reads",
    )
    add("--namespace", default="default", type=text(LABEL, "a namespace"))
    add("--nodes", type=int, help="machines with GPUs (default: 1)")
    add("--gpus", type=int, help="GPUs of each machine (default: 8)")
    add("--tpu", choices=TPUS, help="a TPU instead of GPUs")
    add("--topology", help="with --tpu: chips of a slice, such as 2x2x4 or 4x4 for 16 (default: one machine)")
    add("--slices", type=int, help="with --tpu: number of slices (default: 1)")
    add("--queue", type=text(LABEL, "the name of a LocalQueue"), help="Kueue's LocalQueue")
    several = {"action": "append", "default": []}
    add("--env", **several, type=variable, metavar="NAME=VALUE", help="a variable of the run, readable in the manifest")
    add("--secret", **several, type=secret_reference, metavar="NAME=SECRET/KEY", help="a variable from a Secret")
    add("--volume", **several, type=volume, metavar="CLAIM:/PATH", help="mounts a PersistentVolumeClaim")
    add("--service_account", type=text(OBJECT, "a service account"), help="who the pods are, for example for a bucket")
    add("--toleration", **several, type=toleration, metavar="KEY[=VALUE][:EFFECT]", help="a taint of nodes to accept")
    add("--request", **several, type=request, metavar="NAME=SIZE", help="cpu, memory or ephemeral-storage of each pod")
    add("--rdma", type=rdma, metavar="RESOURCE=NUMBER", help="network adapters of each pod, such as rdma/ib=8")
    add("--restarts", type=int, default=100, help="how often all pods start again at most")
    add("--no_check", action="store_true", help="do not check the configuration before the start")
    add("--dry_run", action="store_true", help="check the configuration and print the manifest, apply nothing")
    options = parser.parse_args(words[:at])
    options.arguments = words[at + 1 :]
    if not options.arguments:
        parser.error("give the arguments of jaxlm train after --")
    if not 0 <= options.restarts <= LARGEST:
        parser.error(f"--restarts: {options.restarts} given, 0 to {LARGEST} expected")
    complete(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.no_check:
        per_slice = num_chips(options.topology) * TPUS[options.tpu][2] if options.tpu else options.gpus
        slices, platform = (options.slices, "tpu") if options.tpu else (options.nodes, "gpu")
        code = check_configuration(options.arguments, devices=per_slice * slices, slices=slices, platform=platform)
        if code:
            return code
    rendered = yaml.safe_dump(manifest(options), sort_keys=False, width=1000)
    if options.dry_run:
        print(rendered, end="")
        return 0
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=rendered, text=True)
    except FileNotFoundError:
        print("infra: kubectl is not installed, or not on PATH", file=sys.stderr)
        return 2
    label = f"jobset.sigs.k8s.io/jobset-name={options.name}"
    for what in (f"logs -f --prefix -l {label}", f"get jobset {options.name}", f"delete jobset {options.name}"):
        print(f"infra: kubectl -n {shlex.quote(options.namespace)} {what}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
