"""A run on the nodes of a Ray cluster: one process per node. If one is lost, all start again together.

    python infra/ray_job.py --address 10.0.0.1:6379 --nodes 4 --gpus 8 -- --config_path /shared/mine.yaml

What follows `--` are the arguments of `jaxlm train`, which must be installed on the nodes. `--dry_run` prints the command of
each node instead of running it. Ray can run this script too: `ray job submit -- python infra/ray_job.py ...`.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from attempts import CONNECTION_LOST, DONE, STOP, Backoff, outcome_of, outcome_of_run, say, train_command
from preflight import check_configuration

ADDRESS = "--trainer.distributed.coordinator_address"


def command_of(options: argparse.Namespace, address: str, number: int) -> list[str]:
    """The command of one node. TPU nodes find each other, and a single process needs no coordinator."""
    distributed = []
    if options.nodes > 1 and not options.tpu:
        distributed = [ADDRESS, address, "--trainer.distributed.num_processes", str(options.nodes)]
        distributed += ["--trainer.distributed.process_id", str(number)]
    return train_command([*options.arguments, *distributed], options.env)


class Node:
    """An actor that runs the command on its node. If Ray kills the actor, the command is killed too."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def free_address(self) -> str:
        """`host:port` that this node can listen on.

        The port is below those of outgoing connections, one of which could otherwise take it before process 0 does, and above
        those of Ray's workers.
        """
        import ray

        while True:
            port = random.randint(20_000, 31_999)
            with socket.socket() as free, contextlib.suppress(OSError):  # another program has it
                free.bind(("", port))
                return f"{ray.util.get_node_ip_address()}:{port}"

    def start(self, command: Sequence[str], folder: str) -> None:
        """Starts the command in a folder. Its output is the actor's, which Ray prints with the node's address."""
        # The kernel kills it together with the actor's process, so that two attempts never run at the same time.
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        self._process = subprocess.Popen(command, cwd=folder, start_new_session=True)

    def code(self) -> int | None:
        """The exit code; None while the command runs."""
        assert self._process is not None
        return self._process.poll()

    def end(self) -> None:
        """Asks the command to save and end."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)


class Attempt:
    """Actors on different nodes of the cluster, and the run that they start."""

    def __init__(self, options: argparse.Namespace):
        import ray

        self._options = options
        resources = {"CPU": options.cpus} | ({"GPU": options.gpus} if options.gpus else {})
        resources |= {"TPU": options.tpu} if options.tpu else {}
        strategy = "PACK" if options.share_nodes else "STRICT_SPREAD"
        self._group = ray.util.placement_group([resources] * options.nodes, strategy=strategy)
        self._actors = []

    def start(self) -> None:
        """Waits for the nodes, then starts the command on each."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        o = self._options
        say(f"waiting for {o.nodes} nodes")
        ray.get(self._group.ready(), timeout=o.wait_s)
        for number in range(o.nodes):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            resources = {"TPU": o.tpu} if o.tpu else {}
            actor = ray.remote(Node).options(
                scheduling_strategy=place, num_cpus=o.cpus, num_gpus=o.gpus, resources=resources, max_restarts=0
            )
            self._actors.append(actor.remote())
        address = ray.get(self._actors[0].free_address.remote(), timeout=o.wait_s)
        starts = [
            actor.start.remote(command_of(o, address, number), o.folder) for number, actor in enumerate(self._actors)
        ]
        ray.get(starts, timeout=o.wait_s)
        say(f"running on {o.nodes} nodes; the coordinator is {address}")

    def codes(self) -> list[int]:
        """Waits for the exit codes. A node that still runs some time after another has failed counts as lost."""
        import ray

        deadline = None
        codes: dict[int, int] = {}
        while len(codes) < len(self._actors):
            for number, actor in enumerate(self._actors):
                if number in codes:
                    continue
                try:
                    code = ray.get(actor.code.remote(), timeout=60)
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                    say(f"node {number} is lost: {str(error).splitlines()[0]}")
                    code = CONNECTION_LOST
                if code is not None:
                    codes[number] = code
            if deadline is None and any(codes.values()):
                deadline = time.monotonic() + self._options.wait_for_others_s
            if deadline is not None and time.monotonic() > deadline:
                return [codes.get(number, CONNECTION_LOST) for number in range(len(self._actors))]
            time.sleep(0.2)
        return [codes[number] for number in range(len(self._actors))]

    def end(self, *, save: bool) -> None:
        """Ends what still runs, and frees the nodes."""
        import ray

        if save:
            say("saving: the run ends after its current step")
            for actor in self._actors:
                actor.end.remote()
            with contextlib.suppress(Exception):  # whatever goes wrong, the nodes are given back
                self.codes()
        for actor in self._actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)


def run(options: argparse.Namespace) -> int:
    """Starts attempts until the run is done, must stop, or has failed too often in a row. Returns the exit code."""
    import ray

    backoff = Backoff(options.retries, options.backoff_s)
    while True:
        attempt = Attempt(options)
        codes, began = [], None
        try:
            attempt.start()
            began = time.monotonic()  # waiting for the nodes does not count as running
            codes = attempt.codes()
        except ray.exceptions.RayError as error:
            say(f"the nodes are not available: {type(error).__name__}: {str(error).splitlines()[0]}")
        except KeyboardInterrupt:
            attempt.end(save=True)
            say("interrupted; the same command resumes the run")
            return 130
        attempt.end(save=False)
        outcome = outcome_of_run(codes or [CONNECTION_LOST])
        say(f"{outcome}: the nodes ended with {codes}")
        if outcome == DONE:
            return 0
        if outcome == STOP:
            return max(code for code in codes if outcome_of(code) == STOP)
        if not backoff.wait(0.0 if began is None else time.monotonic() - began):
            say(f"giving up after {options.retries + 1} attempts")
            return 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--address", default="auto", help="host:port of a running cluster; `local` starts one here (default: auto)")
    add("--nodes", type=int, default=1, help="number of nodes, with one process each")
    add("--cpus", type=float, default=1, help="cores of each node that Ray reserves")
    add("--gpus", type=int, default=0, help="GPUs of each node")
    add("--tpu", type=int, default=0, help="TPU chips of each node")
    add("--share_nodes", action="store_true", help="allow several processes on a node")
    add("--folder", default=os.getcwd(), help="where the run starts, on each node (default: this folder)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the run")
    add("--retries", type=int, default=20, help="consecutive failures before it gives up")
    add("--backoff_s", type=float, default=30.0, help="wait after the first failure; doubles up to 15 minutes")
    add("--wait_s", type=float, default=3600.0, help="time to wait for the nodes in each attempt")
    add("--wait_for_others_s", type=float, default=300.0, help=argparse.SUPPRESS)
    add("--no_check", action="store_true", help="do not check the configuration before the start")
    add(
        "--dry_run", action="store_true", help="check the configuration and print the command of each node, run nothing"
    )
    options = parser.parse_args(words[:at])
    options.arguments = words[at + 1 :]
    if not options.arguments:
        parser.error("give the arguments of jaxlm train after --")
    if options.nodes < 1:
        parser.error(f"--nodes: {options.nodes} given, 1 or more expected")
    if options.gpus and options.tpu:
        parser.error("--gpus and --tpu given: choose one")
    if wrong := [value for value in options.env if not re.match(r"[A-Za-z_]\w*=", value)]:
        parser.error(f"--env: {wrong[0]!r} given, NAME=VALUE expected")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.no_check:
        devices, platform = options.nodes * (options.gpus or options.tpu), "tpu" if options.tpu else "gpu"
        code = check_configuration(options.arguments, devices=devices, slices=options.nodes, platform=platform)
        if code:
            return code
    if options.dry_run:
        needs = {"CPU": options.cpus, "GPU": options.gpus, "TPU": options.tpu}
        say(f"{options.nodes} nodes, each with {json.dumps({k: v for k, v in needs.items() if v})}")
        for number in range(options.nodes):
            print(shlex.join(command_of(options, "HOST:PORT", number)))
        return 0
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        ray.init(address=options.address, include_dashboard=False if options.address == "local" else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        say(f"--address: {options.address!r} cannot be reached ({error}). Start a cluster with `ray start --head`")
        return 2
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return run(options)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
