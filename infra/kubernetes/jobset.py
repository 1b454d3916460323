"""A run as a JobSet on Kubernetes: fills in gpu.yaml or tpu.yaml, and hands it to kubectl.

    python infra/kubernetes/jobset.py mine --image registry/jaxlm:1 --nodes 4 --gpus 8 -- --config_path /config/mine.yaml
    python infra/kubernetes/jobset.py mine --image registry/jaxlm:1 --tpu v5p --topology 4x4x4 --slices 2 -- --config_path ...

What follows `--` are the arguments of `jaxlm train`. `--dry_run` prints the manifest instead of applying it. The cluster
needs the JobSet controller, and Kueue for `--queue`. For anything else, use kubectl: get, logs, delete.
"""

import argparse
import json
import math
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attempts import train_command

CHIPS = 4  # per machine of slices with several machines
# GKE's names of accelerators, and the topology of one machine.
TPUS = {
    "v4": ("tpu-v4-podslice", "2x2x1"),
    "v5e": ("tpu-v5-lite-podslice", "2x2"),
    "v5p": ("tpu-v5p-slice", "2x2x1"),
    "v6e": ("tpu-v6e-slice", "2x2"),
}
NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


def literal(text: str) -> str:
    """Escapes text for arguments and variables, in which Kubernetes expands $(NAME) and turns $$ into $."""
    return text.replace("$", "$$")


def num_chips(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


def manifest(options: argparse.Namespace) -> str:
    """The YAML of the JobSet."""
    pairs = [value.split("=", 1) for value in options.env]
    variables = [{"name": name, "value": literal(value)} for name, value in pairs]
    values = {
        "name": options.name,
        "namespace": options.namespace,
        "image": options.image,
        "queue": f", kueue.x-k8s.io/queue-name: {options.queue}" if options.queue else "",
        "restarts": options.restarts,
        "env": json.dumps(variables),
        "command": literal(train_command(options.arguments)),
    }
    if options.tpu:
        total = num_chips(options.topology)
        values |= {"accelerator": TPUS[options.tpu][0], "topology": options.topology, "slices": options.slices}
        values |= {"chips": min(CHIPS, total), "nodes": max(1, total // CHIPS)}
    else:
        values |= {"nodes": options.nodes, "gpus": options.gpus}
    text = string.Template(Path(__file__).with_name("tpu.yaml" if options.tpu else "gpu.yaml").read_text())
    return text.substitute(values)


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
    if min(getattr(options, name) for name in chosen if name != "topology") < 1:
        parser.error("--nodes, --gpus and --slices: 1 or more expected")
    if options.tpu:
        check_topology(parser, options.topology, options.tpu)


def check_topology(parser: argparse.ArgumentParser, topology: str, tpu: str) -> None:
    one_machine = TPUS[tpu][1]
    sizes = rf"[1-9]\d*(x[1-9]\d*){{{one_machine.count('x')}}}"
    if not re.fullmatch(sizes, topology):
        parser.error(f"--topology: {topology!r} given, such as {one_machine} expected for {tpu}")
    if num_chips(topology) > CHIPS and num_chips(topology) % CHIPS:
        parser.error(f"--topology: {topology!r} given, a multiple of {CHIPS} chips expected, those of a machine")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name", help="name of the JobSet")
    add(
        "--image",
        required=True,
        help="image of infra/Dockerfile.gpu or Dockerfile.tpu, in a registry that the cluster reads",
    )
    add("--namespace", default="default")
    add("--nodes", type=int, help="machines with GPUs (default: 1)")
    add("--gpus", type=int, help="GPUs of each machine (default: 8)")
    add("--tpu", choices=TPUS, help="a TPU instead of GPUs")
    add("--topology", help="with --tpu: chips of a slice, such as 2x2x4 or 4x4 for 16 (default: one machine)")
    add("--slices", type=int, help="with --tpu: number of slices (default: 1)")
    add("--queue", help="Kueue's LocalQueue")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the run")
    add("--restarts", type=int, default=100, help="how often all pods start again at most")
    add("--dry_run", action="store_true", help="print the manifest, apply nothing")
    options = parser.parse_args(words[:at])
    options.arguments = words[at + 1 :]
    if not options.arguments:
        parser.error("give the arguments of jaxlm train after --")
    if any("\n" in word for word in options.arguments):
        parser.error("the arguments of jaxlm train: a line break cannot be passed on")
    if not NAME.fullmatch(options.name):
        parser.error(f"name: {options.name!r} given, lower-case letters, digits and - expected, 42 at most")
    complete(parser, options)
    if wrong := [value for value in options.env if not re.match(r"[A-Za-z_]\w*=", value)]:
        parser.error(f"--env: {wrong[0]!r} given, NAME=VALUE expected")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    text = manifest(options)
    if options.dry_run:
        print(text, end="")
        return 0
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True)
    except FileNotFoundError:
        print("infra: kubectl is not installed, or not on PATH", file=sys.stderr)
        return 2
    label = f"jobset.sigs.k8s.io/jobset-name={options.name}"
    for what in (f"logs -f --prefix -l {label}", f"get jobset {options.name}", f"delete jobset {options.name}"):
        print(f"infra: kubectl -n {shlex.quote(options.namespace)} {what}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
