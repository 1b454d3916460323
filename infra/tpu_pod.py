"""Cloud TPU machines for one run, through gcloud: create, set up, run on all workers, watch, start again, delete.

    python infra/tpu_pod.py babysit mine --zone us-central2-b --type v4-32 --spot -- --config_path mine.yaml

What follows `--` are the arguments of `jaxlm train`. The configuration is checked before a machine is created. `--dry_run`
checks it too, and prints the gcloud commands instead of running them.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path

from attempts import CONNECTION_LOST, DONE, RETRY, STOP, Backoff, config_path, outcome_of, outcome_of_run, say
from preflight import check_configuration
from tpu_nodes import NAME, READY, TYPE, GcloudError, Pod, num_devices

CHECKOUT = Path(__file__).resolve().parents[1]
RECONNECTIONS = 5  # in a row, to a machine that is up
CONNECTED_S = 180  # a connection that lasted longer was not a failure to connect
WAIT_FOR_OTHERS_S = 300  # after a worker has ended; the others notice it within trainer.distributed.heartbeat_timeout


class Watch:
    """Runs an attempt on all workers, each through its own ssh. Prints and stores their output."""

    def __init__(self, pod: Pod, attempt: str):
        self._pod, self._attempt = pod, attempt
        self._logs = Path(pod.options.log_dir) / pod.name / attempt
        self._logs.mkdir(parents=True, exist_ok=True)
        self._processes: dict[str, subprocess.Popen] = {}
        self._ending = threading.Event()

    def run(self) -> dict[str, int]:
        """The exit code of each worker. A worker that still runs some time after another has failed counts as lost.

        Raises whatever keeps this machine from following a worker: `GcloudError`, or `OSError` if the disk is full.
        """
        workers = self._pod.workers()
        say(f"running on {len(workers)} workers; their output is in {self._logs}/")
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            follows = {f"{node}:{number}": pool.submit(self._follow, node, number) for node, number in workers}
            try:
                self._wait_for(set(follows.values()))
            finally:
                self._ending.set()
                for process in list(self._processes.values()):
                    end(process)
        return {name: follow.result() for name, follow in follows.items()}

    def _wait_for(self, running: set[Future[int]]) -> None:
        """Waits until all workers have ended, but only for a while once one has failed. Raises a worker's error at once."""
        deadline = None
        while running and (deadline is None or time.monotonic() < deadline):
            ended, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            codes = [follow.result() for follow in ended]
            if any(codes) and deadline is None:
                deadline = time.monotonic() + self._pod.options.wait_for_others_s

    def _follow(self, node: str, number: int) -> int:
        """Follows a worker until its run has ended or its machine is gone, across lost connections."""
        name, lost = f"{node}:{number}", 0
        while True:
            began = time.monotonic()
            code, problem = self._connect(node, number)
            why = f": {problem}" if problem else ""
            if code is not None or self._ending.is_set():
                return CONNECTION_LOST if code is None else code
            lost = 1 if time.monotonic() - began > self._pod.options.connected_s else lost + 1
            state = self._state_of(node)
            if state != READY or lost == RECONNECTIONS:
                say(f"{name}: given up; its machine is {state}{why}")
                return CONNECTION_LOST
            say(f"{name}: connection lost; its machine is {READY}, connecting again{why}")
            if self._ending.wait(self._pod.options.poll_s * lost):
                return CONNECTION_LOST

    def _state_of(self, node: str) -> str:
        """The state of a machine. While gcloud cannot tell, for example without network, waits and asks again."""
        said = ""
        while True:
            try:
                return self._pod.describe("tpu-vm", node)["state"]
            except GcloudError as error:
                if error.permanent or self._ending.is_set():
                    raise
                if str(error) != said:
                    said = str(error)
                    say(f"{node}: gcloud cannot reach it from here; waiting while its run goes on: {error}")
                self._ending.wait(self._pod.options.poll_s)

    def _connect(self, node: str, number: int) -> tuple[int | None, str]:
        """The run's exit code, None if the connection was lost first, and the last line that gcloud or ssh printed."""
        path = self._logs / f"{node}-{number}.log"
        with path.open("ab") as log, path.with_suffix(".ssh.log").open("a+b") as messages:
            messages.seek(0, os.SEEK_END)
            before = messages.tell()
            command = self._pod.run_command(node, str(number), self._attempt, log.seek(0, os.SEEK_END) + 1)
            pipes = {"stdout": subprocess.PIPE, "stderr": messages, "stdin": subprocess.DEVNULL}
            with subprocess.Popen(command, start_new_session=True, **pipes) as process:
                self._processes[f"{node}:{number}"] = process
                if self._ending.is_set():
                    end(process)
                try:
                    for line in process.stdout or ():
                        log.write(line)
                        log.flush()
                        print(f"[{node}:{number}] {line.decode(errors='replace')}", end="", flush=True)
                except BaseException:
                    end(process)  # the `with` waits for it
                    raise
            messages.seek(before)
            said = messages.read().decode(errors="replace").strip()
        # gcloud's own exit code does not help: without network it is 1, like that of a run that failed.
        code = re.search(rf"^{re.escape(self._attempt)} ended with (\d+)\s*$", said, re.MULTILINE)
        return int(code[1]) if code else None, said.rpartition("\n")[2]


def end(process: subprocess.Popen) -> None:
    """Ends gcloud and its ssh, but not what they started on the worker."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def attempts(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Names of attempts, first that of the attempt of the same command that an interrupted `babysit` left running, if any."""
    current = folder / "attempt"
    folder.mkdir(parents=True, exist_ok=True)
    command = hashlib.sha256(repr((options.arguments, options.env)).encode()).hexdigest()[:8]
    while True:
        name = current.read_text(errors="replace") if current.exists() else ""
        if not re.fullmatch(rf"[0-9-]+-{command}", name):
            name = f"{datetime.now():%Y%m%d-%H%M%S-%f}-{command}"
            current.write_text(name)
        yield name
        current.unlink(missing_ok=True)


def babysit(pod: Pod, *, create: bool, limit: int) -> int:
    """Starts attempts until the run is done, must stop, or has failed too often in a row. Returns the exit code."""
    backoff = Backoff(limit, pod.options.backoff_s)
    names = attempts(Path(pod.options.log_dir) / pod.name, pod.options)
    name = next(names)
    while True:
        ran_s, codes = 0.0, {}
        try:
            if create:
                pod.bring_up()
                pod.set_up()
            began = time.monotonic()
            codes = Watch(pod, name).run()
            ran_s = time.monotonic() - began
            outcome = outcome_of_run(codes.values()) if codes else RETRY
            say(f"{outcome}: " + ", ".join(f"{worker} ended with {code}" for worker, code in codes.items()))
            name = next(names)
        except GcloudError as error:
            say(str(error))
            outcome = STOP if error.permanent else RETRY
        if outcome == DONE:
            return 0
        if outcome == STOP:
            return max((code for code in codes.values() if outcome_of(code) == STOP), default=1)
        if not backoff.wait(ran_s):
            say(f"giving up after {limit + 1} attempts")
            return max(codes.values(), default=1)


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {
        "babysit": "create, set up, run, start again when preempted; delete at the end",
        "create": "create and set up, then leave the machines running",
        "run": "run once on machines that exist",
        "status": "the state of the machines",
        "delete": "delete the machines",
    }
    parser.add_argument("command", choices=commands, help="; ".join(f"{k}: {v}" for k, v in commands.items()))
    parser.add_argument("name", help="name of the TPU; slices are NAME-0, NAME-1, ...")
    add = parser.add_argument
    add("--zone", required=True)
    add("--project", help="default: gcloud's")
    add("--type", help="accelerator type of a slice, such as v4-32 or v5p-128", default="v4-8")
    add("--version", help="software of the machines", default="tpu-ubuntu2204-base")
    add("--slices", type=int, default=1, help="more than 1: one queued resource of several nodes")
    add("--queued", action="store_true", help="wait in the queue for capacity (a queued resource)")
    add("--spot", action="store_true", help="cheaper, may be preempted")
    add("--reserved", action="store_true", help="from your reservation")
    add("--internal_ips", action="store_true", help="machines without external addresses")
    add(
        "--gcloud_flag",
        action="append",
        default=[],
        help="another flag of gcloud's create, such as --gcloud_flag=--network=mine",
    )
    add(
        "--install",
        default=str(CHECKOUT),
        help="a checkout, which is built into a wheel; a wheel; or a requirement for pip (default: this checkout)",
    )
    add("--python", default="3.12", help="version of Python on the workers")
    add("--send", action="append", default=[], help="a file or folder to copy to the workers")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the run")
    add("--log_dir", default="logs/infra", help="where the workers' output is stored")
    add("--retries", type=int, default=20, help="consecutive failures before babysit gives up")
    add("--backoff_s", type=float, default=30.0, help="wait after the first failure; doubles up to 15 minutes")
    add("--poll_s", type=float, default=20.0, help="seconds between two checks of a machine's state")
    add("--connected_s", type=float, default=CONNECTED_S, help=argparse.SUPPRESS)
    add("--wait_for_others_s", type=float, default=WAIT_FOR_OTHERS_S, help=argparse.SUPPRESS)
    add("--keep", action="store_true", help="babysit: do not delete the machines at the end")
    add("--no_check", action="store_true", help="do not check the configuration before the start")
    add("--dry_run", action="store_true", help="check the configuration and print the gcloud commands, run nothing")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, train: Sequence[str]) -> None:
    if not NAME.fullmatch(options.name):
        parser.error(
            f"name: {options.name!r} given, a lower-case letter, then lower-case letters, digits and - expected"
        )
    if not TYPE.fullmatch(options.type):
        parser.error(f"--type: {options.type!r} given, such as v4-32, v5litepod-16, v5p-128 or v6e-8 expected")
    if options.type.startswith("tpu7x"):
        parser.error(
            f"--type: {options.type!r} given, but the Cloud TPU API does not serve TPU7x. On GKE:"
            " python infra/kubernetes/jobset.py NAME --tpu tpu7x --topology 2x2x1 ..."
        )
    if not 1 <= options.slices <= 999:
        parser.error(f"--slices: {options.slices} given, 1 to 999 expected")
    if options.retries < 0:
        parser.error(f"--retries: {options.retries} given, 0 or more expected")
    if options.spot and options.reserved:
        parser.error("--spot and --reserved given: choose one")
    if wrong := [value for value in options.env if not re.match(r"[A-Za-z_]\w*=", value)]:
        parser.error(f"--env: {wrong[0]!r} given, NAME=VALUE expected")
    if (options.command in ("babysit", "run")) == (not train):
        parser.error(
            f"{options.command}: " + ("give the arguments of jaxlm train after --" if not train else "no -- here")
        )
    if missing := [path for path in options.send if not Path(path).exists()]:
        parser.error(f"--send: {missing[0]} does not exist")
    if options.install.endswith(".whl") and not Path(options.install).is_file():
        parser.error(f"--install: {options.install} does not exist")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    words, train = words[:at], words[at + 1 :]
    parser = parser_of_options()
    options = parser.parse_args(words)
    check_options(parser, options, train)
    options.train_arguments = train
    constraints = Path(options.install) / "constraints.txt"
    options.constraints = constraints if constraints.is_file() else None
    path = config_path(train)
    if path is not None and Path(path).is_file() and path not in options.send:
        options.send.append(path)
    options.arguments = [where_the_run_starts(word, path) for word in train] if path in options.send else train
    return options


def where_the_run_starts(word: str, path: str) -> str:
    """An argument with the name that the configuration has on the workers: it is copied next to where the run starts."""
    return {path: Path(path).name, f"--config_path={path}": f"--config_path={Path(path).name}"}.get(word, word)


def build_wheel(options: argparse.Namespace) -> list[str]:
    """Builds a wheel of the checkout in `--install`, installs that instead, and returns the command."""
    folder = Path(options.log_dir) / "wheel"
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), options.install]
    if not options.dry_run:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(
                f"infra: no wheel could be built of {options.install}: `{shlex.join(command)}` ended with {error.returncode}"
            )
    options.install = str(next(folder.glob("*.whl"), folder / "jaxlm-VERSION-py3-none-any.whl"))
    return command


def dry_run(pod: Pod) -> None:
    """Prints the gcloud commands of a command."""
    command = pod.options.command
    lines = []
    if command in ("babysit", "create"):
        lines += [build_wheel(pod.options)] if Path(pod.options.install).is_dir() else []
        lines += [pod.create_command()]
    for node in pod.nodes:
        lines += pod.set_up_commands(node) if command in ("babysit", "create") else []
        lines += [pod.run_command(node, "N", "ATTEMPT")] if command in ("babysit", "run") else []
        lines += [pod.gcloud("tpu-vm", "describe", node)] if command == "status" else []
    deletes = command == "delete" or (command == "babysit" and not pod.options.keep)
    for line in [*lines, *([pod.delete_command()] if deletes else [])]:
        print(shlex.join(line))


def carry_out(pod: Pod) -> int:
    """Does what the command says. Returns the exit code."""
    options = pod.options
    if options.command == "status":
        say(f"{pod.whole_name()}: {pod.state()}")
        return 0
    if options.command == "delete":
        pod.delete()
        return 0
    if options.command == "create":
        pod.bring_up()
        pod.set_up()
        return 0
    is_babysitting = options.command == "babysit"
    code = babysit(pod, create=is_babysitting, limit=options.retries if is_babysitting else 0)
    if is_babysitting and not options.keep:
        try:
            pod.delete()
        except GcloudError as error:
            say(str(error))
            return code or 1
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    pod = Pod(options)
    if options.train_arguments and not options.no_check:
        devices = num_devices(options.type) * options.slices
        code = check_configuration(options.train_arguments, devices=devices, slices=options.slices, platform="tpu")
        if code:
            return code
    if options.dry_run:
        dry_run(pod)
        return 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if options.command in ("babysit", "create") and Path(options.install).is_dir():
        build_wheel(options)
    try:
        code = carry_out(pod)
    except FileNotFoundError as error:
        if error.filename != "gcloud":
            pod.say_what_is_left()
            raise
        say("gcloud is not installed, or not on PATH: https://cloud.google.com/sdk/docs/install")
        return 2
    except GcloudError as error:
        say(str(error))
        code = 1
    except KeyboardInterrupt:
        say("interrupted. A run that has begun goes on without this program; the same command follows it again")
        code = 130
    except Exception:  # after any error, the machines that cost money must be named
        pod.say_what_is_left()
        raise
    if code or options.command != "status":
        pod.say_what_is_left()
    return code


if __name__ == "__main__":
    sys.exit(main())
