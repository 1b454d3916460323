"""Starts the members of a scaling study, each as the command `jaxlm train`: here one after another, or on a Ray cluster.

A member that was stopped resumes from its newest checkpoint, as every run does.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence

from jaxlm.core.errors import ConfigError, counted
from jaxlm.session.scaling.members import Member, MemberRayConfig

Log = Callable[[str], None]
_CONNECT_S = 10
_RETRIES = 5  # of a member whose machine is lost
# Becomes a command that the kernel kills together with its parent (1 is PR_SET_PDEATHSIG), so that a run never trains twice.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_SHOWN = 300  # characters of an error of Ray


def train_here(members: Sequence[Member]) -> Generator[tuple[Member, int], None, None]:
    """Trains members one after another. Yields each with its exit code."""
    for member in members:
        yield member, run_command(command_of(member))


def train_on_ray(
    members: Sequence[Member], config: MemberRayConfig, log: Log
) -> Generator[tuple[Member, int], None, None]:
    """Trains members on a Ray cluster, as many at a time as have room. Yields each with its exit code as it ends.

    Raises:
        ConfigError: the cluster cannot be reached or started, or has no machine with room for a member.
    """
    import ray
    import ray.exceptions

    address = config.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address is not None:
            _check_listens(address)
        ray.init(address=address or "local", include_dashboard=False if address is None else None)
    except (OSError, RuntimeError, ValueError) as error:
        what = "a cluster cannot be started" if address is None else f"'{address}' cannot be reached"
        raise ConfigError(
            f"scaling.ray.address: {what} ({str(error)[:_SHOWN]}). Start one with `ray start --head`, or remove scaling.ray"
        ) from error
    try:
        _check_room(ray.nodes(), config)
        task = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_retries=_RETRIES)(_run_in)
        running = {task.remote(command_of(member), os.getcwd()): member for member in members}
        log(f"ray: {counted(len(members), 'member')} on {counted(len(ray.nodes()), 'machine')}")
        while running:
            (ended, *_), _ = ray.wait(list(running), num_returns=1)
            member = running.pop(ended)
            try:
                yield member, ray.get(ended)
            except ray.exceptions.RayError as error:
                log(f"{member.name}: {type(error).__name__}: {str(error)[:_SHOWN]}")
                yield member, 1
    finally:
        ray.shutdown()  # ends what still runs


def _check_listens(address: str) -> None:
    """Raises `OSError` soon if nothing listens at the address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _check_room(nodes: Sequence[dict], config: MemberRayConfig) -> None:
    """Raises `ConfigError` if no machine is large enough: Ray itself would wait for one forever."""
    sizes = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(size.get("CPU", 0) >= config.cpus and size.get("GPU", 0) >= config.gpus for size in sizes):
        has = "; ".join(f"{size.get('CPU', 0):g} cores and {size.get('GPU', 0):g} GPUs" for size in sizes)
        raise ConfigError(
            f"scaling.ray: {config.cpus} cores and {config.gpus} GPUs for each member, but the machines have {has}. Lower"
            " cpus or gpus"
        )


def command_of(member: Member) -> list[str]:
    """Returns the command that trains a member."""
    return [sys.executable, "-m", "jaxlm.train", "--config_path", str(member.config_path)]


def _run_in(command: Sequence[str], folder: str) -> int:
    os.chdir(folder)
    return run_command(command)


def run_command(command: Sequence[str]) -> int:
    """Runs a command to its end and returns its exit code. SIGTERM and Ctrl-C are passed on, so that it saves and ends."""
    # A session of its own: a terminal would send Ctrl-C to both, and a run takes a second one as an order to end at once.
    bound = [sys.executable, "-c", _WITH_PARENT, *command] if sys.platform == "linux" else command
    process = subprocess.Popen(bound, start_new_session=True)
    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda received, _: process.send_signal(received))
    except ValueError:  # not the main thread, in a Ray worker: it is killed with its child
        pass
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
    return code if code >= 0 else 128 - code
