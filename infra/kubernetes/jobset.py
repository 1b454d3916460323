"""A run as a JobSet on Kubernetes: fills in gpu.yaml or tpu.yaml, and hands it to kubectl.

    python infra/kubernetes/jobset.py mine --image registry/jaxlm:1 --nodes 4 --gpus 8 -- --config_path /config/mine.yaml
    python infra/kubernetes/jobset.py mine --image registry/jaxlm:1 --tpu v5p --topology 4x4x4 --slices 2 -- --config_path ...

What follows `--` are the arguments of `jaxlm train`. `--dry_run` prints the manifest instead of applying it. The cluster
needs the JobSet controller; for `--queue`, also Kueue. All other things are kubectl's: get, logs, delete.
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

# GKE's names of accelerators, and chips per machine of slices with several machines.
TPUS = {
    "v4": ("tpu-v4-podslice", 4),
    "v5e": ("tpu-v5-lite-podslice", 4),
    "v5p": ("tpu-v5p-slice", 4),
    "v6e": ("tpu-v6e-slice", 4),
}
NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


def manifest(options: argparse.Namespace) -> str:
    """The YAML of the JobSet."""
    # Kubernetes replaces $(NAME) in arguments; $$ stands for a $.
    command = train_command(options.arguments).replace("$(", "$$(")
    variables = [dict(zip(("name", "value"), value.split("=", 1), strict=True)) for value in options.env]
    values = {
        "name": options.name,
        "namespace": options.namespace,
        "image": options.image,
        "queue": f", kueue.x-k8s.io/queue-name: {options.queue}" if options.queue else "",
        "restarts": options.restarts,
        "nodes": options.nodes,
        "gpus": options.gpus,
        "env": json.dumps(variables),
    }
    template = "gpu.yaml"
    if options.tpu:
        accelerator, chips = TPUS[options.tpu]
        total = math.prod(map(int, options.topology.split("x")))
        values |= {"accelerator": accelerator, "topology": options.topology, "slices": options.slices}
        values |= {"chips": min(chips, total), "nodes": max(1, total // chips)}
        template = "tpu.yaml"
    text = string.Template(Path(__file__).with_name(template).read_text())
    return text.substitute(values, command=command)


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
    add("--nodes", type=int, default=1, help="machines with GPUs")
    add("--gpus", type=int, default=8, help="GPUs of each machine")
    add("--tpu", choices=TPUS, help="a TPU instead of GPUs")
    add("--topology", default="2x2x1", help="chips of a slice, such as 2x2x4 for 16")
    add("--slices", type=int, default=1)
    add("--queue", help="Kueue's LocalQueue")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the run")
    add("--restarts", type=int, default=100, help="times that all pods start again at most")
    add("--dry_run", action="store_true", help="print the manifest, apply nothing")
    options = parser.parse_args(words[:at])
    options.arguments = words[at + 1 :]
    if not options.arguments:
        parser.error("give the arguments of jaxlm train after --")
    if any("\n" in word for word in options.arguments):
        parser.error("the arguments of jaxlm train: a line break cannot be passed on")
    if not NAME.fullmatch(options.name):
        parser.error(f"name: {options.name!r} given, lower-case letters, digits and - expected, 42 at most")
    if min(options.nodes, options.gpus, options.slices) < 1:
        parser.error("--nodes, --gpus and --slices: 1 or more expected")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", options.topology):
        parser.error(f"--topology: {options.topology!r} given, such as 2x2x4 expected")
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
