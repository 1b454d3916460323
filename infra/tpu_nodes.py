"""The machines of Cloud TPU slices: their gcloud commands, their states, their creation and deletion."""

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attempts import say, train_command

READY, ABSENT = "READY", "absent"
# States of nodes and queued resources that end by themselves. In any other state but READY: delete, and create again.
TRANSIENT = {"CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "STOPPING", "DELETING"} | {
    *("ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES", "SUSPENDING")
}
# Errors of gcloud that a retry does not cure. "No capacity" and "quota" are not among them.
PERMANENT = re.compile(
    r"PERMISSION_DENIED|INVALID_ARGUMENT|UNAUTHENTICATED|Reauthentication|do not currently have an active"
    r"|jaxlm could not be installed"
)
# What gcloud accepts; of several slices, "-0", "-1", ... are appended.
NAME = re.compile(r"[a-z]([-a-z0-9]{0,57}[a-z0-9])?")
TYPE = re.compile(r"([a-z]+[0-9]+[a-z]*)-([1-9][0-9]{0,5})")
CORES = ("v4", "v5p")  # a type counts two cores a chip, of which JAX makes one device
MAX_DELETIONS = 3
KEEP_ALIVE = ("--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oServerAliveCountMax=4")

# Scripts of the workers. Values never become part of them: they are arguments.
SET_UP = """set -e
cd "$HOME/jaxlm"
stamp=$1 python=$2
shift 2
[ "$(cat installed 2>/dev/null)" = "$stamp" ] && exit 0
trap 'echo "jaxlm could not be installed on $(hostname)" >&2' ERR
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --clear --python "$python" venv
python3 -m uv pip install --quiet --python venv/bin/python "$@"
echo "$stamp" > installed
"""
# The run does not depend on this connection. A second connection with the same attempt only follows its output.
# The exit code of the run goes to stderr with the attempt's name, because the exit code of ssh or gcloud may be their own.
RUN = """cd "$HOME/jaxlm" && mkdir -p run
attempt=$1 byte=$2
shift 2
if [ "$(cat run/attempt 2>/dev/null)" != "$attempt" ]; then
  [ -s run/pid ] && kill -KILL -- "-$(cat run/pid)" 2>/dev/null
  rm -f run/code run/pid
  : > run/log
  byte=1
  # The run itself writes these files, in a session of its own: what has no session yet ends with this connection.
  run='echo $$ > run/pid; echo "$0" > run/attempt; "$@"; echo $? > run/code'
  PATH="$HOME/jaxlm/venv/bin:$PATH" setsid nohup bash -c "$run" "$attempt" "$@" >> run/log 2>&1 < /dev/null &
  while kill -0 $! 2>/dev/null && [ "$(cat run/attempt 2>/dev/null)" != "$attempt" ]; do sleep 0.05; done
fi
tail -c "+$byte" -s 0.2 -f --pid="$(cat run/pid)" run/log
code=$(cat run/code 2>/dev/null)  # empty, too, if the run was killed just before it wrote it
echo "$attempt ended with ${code:-137}" >&2
"""


def num_devices(kind: str) -> int:
    """The devices that JAX finds in a slice, such as 16 for v4-32 and v5litepod-16; 0 for an unknown type."""
    match = TYPE.fullmatch(kind)
    if match is None or match[1] not in ("v2", "v3", "v4", "v5litepod", "v5p", "v6e"):
        return 0
    return int(match[2]) // (2 if match[1] in CORES else 1)


class GcloudError(Exception):
    """gcloud failed.

    Attributes:
        permanent: whether a retry would fail too.
    """

    def __init__(self, command: Sequence[str], code: int, message: str):
        super().__init__(f"`{shlex.join(command)}` ended with {code}:\n{message.strip()}")
        self.permanent = code == 2 or PERMANENT.search(message) is not None  # 2: gcloud does not accept its arguments


def call(command: Sequence[str]) -> str:
    """Runs gcloud and returns what it prints. Raises `GcloudError`."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise GcloudError(command, done.returncode, done.stderr)
    return done.stdout


@dataclass(frozen=True)
class Pod:
    """One or more slices of a type, each a node of one or more workers. Several slices are one queued resource."""

    options: argparse.Namespace

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def queued(self) -> bool:
        return self.options.queued or self.options.slices > 1

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}-{n}" for n in range(self.options.slices)] if self.options.slices > 1 else [self.name]

    def gcloud(self, group: str, verb: str, *words: str) -> list[str]:
        project = [f"--project={self.options.project}"] if self.options.project else []
        return ["gcloud", "compute", "tpus", group, verb, *words, f"--zone={self.options.zone}", *project]

    def create_command(self) -> list[str]:
        o = self.options
        kinds = {"spot": o.spot, "reserved": o.reserved, "internal-ips": o.internal_ips}
        more = [*(f"--{kind}" for kind, chosen in kinds.items() if chosen), *o.gcloud_flag]
        if not self.queued:
            return self.gcloud(
                "tpu-vm", "create", o.name, f"--accelerator-type={o.type}", f"--version={o.version}", *more
            )
        count = [f"--node-count={o.slices}", f"--node-prefix={o.name}"] if o.slices > 1 else [f"--node-id={o.name}"]
        what = (f"--accelerator-type={o.type}", f"--runtime-version={o.version}")
        return self.gcloud("queued-resources", "create", o.name, *what, *count, *more)

    def delete_command(self) -> list[str]:
        if self.queued:
            return self.gcloud("queued-resources", "delete", self.name, "--force", "--quiet")
        return self.gcloud("tpu-vm", "delete", self.name, "--quiet")

    def ssh_command(self, node: str, worker: str, script: str, *arguments: str) -> list[str]:
        internal = ["--internal-ip"] if self.options.internal_ips else []
        where = (f"--worker={worker}", *internal, *KEEP_ALIVE)
        return self.gcloud(
            "tpu-vm", "ssh", node, *where, f"--command={shlex.join(['bash', '-c', script, 'jaxlm', *arguments])}"
        )

    def set_up_commands(self, node: str) -> list[list[str]]:
        """Commands that copy the run's files to all workers of a node, and install jaxlm if they do not have this version."""
        o = self.options
        package, files, constraints = o.install, list(o.send), []
        if o.install.endswith(".whl"):
            files.append(o.install)
            package = f"./{Path(o.install).name}[tpu,gs]"
        if (
            o.constraints is not None
        ):  # of the checkout that the wheel was built of: the versions that it was tested with
            files.append(str(o.constraints))
            constraints = ["-c", o.constraints.name]
        content = Path(o.install).read_bytes() if Path(o.install).is_file() else b""
        stamp = hashlib.sha256(repr((constraints, package, o.python)).encode() + content).hexdigest()[:16]
        internal = ["--internal-ip"] if o.internal_ips else []
        copy = self.gcloud("tpu-vm", "scp", "--recurse", *files, f"{node}:jaxlm/", "--worker=all", *internal)
        make = self.ssh_command(node, "all", "mkdir -p jaxlm")
        install = self.ssh_command(node, "all", SET_UP, stamp, o.python, *constraints, package)
        return [make, *([copy] if files else []), install]

    def run_command(self, node: str, worker: str, attempt: str, byte: int = 1) -> list[str]:
        """Starts the run on a worker, or follows its output from a byte, counted from 1."""
        command = train_command(self.options.arguments, self.options.env)
        return self.ssh_command(node, worker, RUN, attempt, str(byte), *command)

    def describe(self, group: str, name: str) -> dict:
        command = self.gcloud(group, "describe", name, "--format=json")
        try:
            return json.loads(call(command))
        except ValueError as error:
            raise GcloudError(command, 0, f"its output is not JSON: {error}") from error
        except GcloudError as error:
            if "NOT_FOUND" in str(error) or "was not found" in str(error):
                return {"state": ABSENT}
            raise

    def state(self) -> str:
        """READY if all nodes are ready; otherwise the state of the first that is not."""
        if self.queued:
            state = self.describe("queued-resources", self.name)["state"]
            state = state if isinstance(state, str) else state["state"]
            if state != "ACTIVE":
                return state
        states = [self.describe("tpu-vm", node)["state"] for node in self.nodes]
        return next((state for state in states if state != READY), READY)

    def workers(self) -> list[tuple[str, int]]:
        """Node and number of each worker."""
        addresses = {node: self.describe("tpu-vm", node).get("networkEndpoints", ()) for node in self.nodes}
        return [(node, number) for node, endpoints in addresses.items() for number in range(len(endpoints))]

    def wait_while(self, transient: set[str]) -> str:
        """Waits until the state is none of `transient`, and returns it."""
        said = ""
        while (state := self.state()) in transient:
            if state != said:
                say(f"{self.name} is {state}; waiting")
                said = state
            time.sleep(self.options.poll_s)
        return state

    def bring_up(self) -> None:
        """Creates the nodes if they do not exist, or were preempted or are broken."""
        state = self.wait_while(TRANSIENT)
        if state not in (READY, ABSENT):
            say(f"{self.name} is {state}; deleting it, to create it again")
            self.delete()
            state = ABSENT
        if state == ABSENT:
            say(f"creating {self.name} ({self.options.slices} x {self.options.type} in {self.options.zone})")
            call(self.create_command())
        if (state := self.wait_while(TRANSIENT)) != READY:
            raise GcloudError(self.create_command(), 0, f"{self.name} is {state} instead of {READY}")

    def set_up(self) -> None:
        for node in self.nodes:
            say(f"setting up {node}")
            for command in self.set_up_commands(node):
                call(command)

    def delete(self) -> None:
        """Deletes the nodes, and makes sure that none is left. Raises `GcloudError` if some remain."""
        for tries in range(1, MAX_DELETIONS + 1):
            problem = ""
            try:
                call(self.delete_command())
            except GcloudError as error:
                problem = str(error)
            if (state := self.wait_while({"DELETING", "SUSPENDING", "STOPPING"})) == ABSENT:
                return
            problem = problem or f"{self.name} is {state} after its deletion"
            say(f"deletion {tries} of {MAX_DELETIONS} failed: {problem}")
            time.sleep(self.options.poll_s)
        raise GcloudError(self.delete_command(), 0, f"{self.name} could not be deleted")

    def whole_name(self) -> str:
        return f"{self.name} ({self.options.slices} x {self.options.type}, {self.options.zone})"

    def how_to_delete(self) -> str:
        o = self.options
        more = [*(["--project", o.project] if o.project else []), *(["--queued"] if o.queued else [])]
        more += ["--slices", str(o.slices)] if o.slices > 1 else []
        return shlex.join(["python", sys.argv[0], "delete", self.name, "--zone", o.zone, *more])

    def say_what_is_left(self) -> None:
        """Names the machines that exist, or may exist, and how to delete them."""
        try:
            if (state := self.state()) == ABSENT:
                return say(f"no machine is left of {self.whole_name()}")
        except Exception:  # the warning about machines that cost money must appear after any error
            state = "unknown"
        say(f"{self.whole_name()} is left, state {state}, and costs money. To delete it:\n  {self.how_to_delete()}")
