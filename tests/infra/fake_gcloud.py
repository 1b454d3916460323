"""A stand-in for gcloud. It keeps states of TPUs in $FAKE, records its calls, and runs what ssh would run, in a folder per
worker. Several run at the same time, and each may be killed at any moment: files that another process reads are renamed into
their places, and may be gone when they are read.

$FAKE/train is a shell script that stands for the training run: $NODE, $WORKER and $ATTEMPT (from 1) say which one it is.
$FAKE/create and $FAKE/delete, if they exist, have a line per call: an error message, or nothing for success; $FAKE/connect
has one per connection to worker 0. If $FAKE/install exists, every installation prints it and fails. If $FAKE/drop appears,
the connection to worker 0 is lost once, and its run goes on. While $FAKE/offline exists, this machine has no network, and
each call adds a line to it. Each connection prints a message to stderr, as ssh does.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

FAKE = Path(os.environ["FAKE"])
LOST = 255  # the exit code of an ssh that has lost its connection
TERMINATED = {signal.SIGTERM}
TRAINS = """#!/bin/bash
ATTEMPT=$(( $(cat "$HOME/attempts" 2>/dev/null || echo 0) + 1 ))
echo $ATTEMPT > "$HOME/attempts.$$" && mv "$HOME/attempts.$$" "$HOME/attempts"
export ATTEMPT
echo "python $* VARIABLE=$VARIABLE"
exec bash "$FAKE/train"
"""


def fail(message: str, code: int = 1) -> None:
    print(f"ERROR: {message}", file=sys.stderr)
    sys.exit(code)


def is_offline() -> bool:
    try:
        calls = os.open(FAKE / "offline", os.O_WRONLY | os.O_APPEND)  # not created: the run may have just deleted it
    except FileNotFoundError:
        return False
    os.write(calls, b"\n")
    os.close(calls)
    return True


def write(path: Path, text: str) -> None:
    """Replaces a file in one step."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def planned_failure(verb: str) -> None:
    """Fails as the next line of $FAKE/VERB says."""
    path = FAKE / verb
    lines = path.read_text().splitlines() if path.exists() else []
    if lines:
        write(path, "".join(f"{line}\n" for line in lines[1:]))
        if lines[0]:
            fail(lines[0])


def state(name: str) -> Path:
    return FAKE / "state" / name


def state_now(name: str) -> str | None:
    """None if there is no such machine."""
    try:
        return state(name).read_text()
    except FileNotFoundError:
        return None


def describe(group: str, name: str) -> None:
    now = state_now(name)
    if now is None:
        fail(f"NOT_FOUND: Resource '{name}' was not found")
    if group == "queued-resources":
        print(json.dumps({"state": {"state": now}}))
    else:
        print(json.dumps({"state": now, "networkEndpoints": [{"ipAddress": f"10.0.0.{n}"} for n in range(2)]}))


def create(group: str, name: str, flags: dict[str, str]) -> None:
    planned_failure("create")
    nodes = [f"{name}-{n}" for n in range(int(flags["node-count"]))] if "node-count" in flags else [name]
    for node in nodes:
        write(state(node), "READY")
    if group == "queued-resources" and nodes != [name]:
        write(state(name), "ACTIVE")


def delete(name: str) -> None:
    planned_failure("delete")
    for path in [state(name), *state(name).parent.glob(f"{name}-*")]:
        path.unlink(missing_ok=True)


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(group, signal.SIGKILL)


def ssh(node: str, worker: str, command: str) -> None:
    """Runs the command with a home of its own. Loses the connection and the run when the node is not READY any more."""
    for number in ("0", "1") if worker == "all" else (worker,):
        home = FAKE / "home" / f"{node}-{number}"
        home.mkdir(parents=True, exist_ok=True)
        if "uv pip install" in command:  # not run; the interpreter of its environment is the stand-in's
            if (FAKE / "install").exists():
                fail((FAKE / "install").read_text())
            install(home / "jaxlm" / "venv" / "bin" / "python")
            continue
        if number == "0" and worker != "all":
            planned_failure("connect")
        print("Warning: Permanently added 'tpu' (ED25519) to the list of known hosts.", file=sys.stderr, flush=True)
        code = connect(node, number, command, home)
        if code:
            sys.exit(code)


def install(python: Path) -> None:
    python.parent.mkdir(parents=True, exist_ok=True)
    if not python.exists():  # a run of an earlier attempt may be reading it
        python.write_text(TRAINS)
        python.chmod(0o755)


def connect(node: str, number: str, command: str, home: Path) -> int:
    """The exit code of ssh."""
    environment = os.environ | {"HOME": str(home), "NODE": node, "WORKER": number}
    # A signal that comes before the handler is set would end this program and leave its ssh behind. Pending ones are not
    # inherited, the mask is.
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATED)
    with subprocess.Popen(
        shlex.split(command),
        env=environment,
        cwd=home,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATED),
    ) as process:

        def end(*_: object) -> None:
            kill(process.pid)  # gcloud's ssh is in its process group and gets its signals
            sys.exit(LOST)

        signal.signal(signal.SIGTERM, end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATED)
        while process.poll() is None:
            time.sleep(0.02)
            is_dropped = number == "0" and (FAKE / "drop").exists()
            is_ready = state_now(node) == "READY"
            if is_ready and not is_dropped:
                continue
            pid = home / "jaxlm" / "run" / "pid"
            if not is_ready and pid.exists():
                kill(int(pid.read_text()))
            kill(process.pid)
            process.wait()
            if is_dropped:  # last: then the run goes on, and may end before anything else happens here
                (FAKE / "drop").unlink()
            return LOST
    return process.returncode


def main() -> None:
    with (FAKE / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    (FAKE / "state").mkdir(exist_ok=True)
    if is_offline():
        fail("gcloud crashed (ConnectionError): Failed to establish a new connection: Network is unreachable")
    group, verb, *words = sys.argv[3:]
    names = [word for word in words if not word.startswith("--")]
    flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    if "zone" not in flags:
        fail("argument --zone: Must be specified.", 2)
    if verb == "describe":
        describe(group, names[0])
    elif verb == "create":
        create(group, names[0], flags)
    elif verb == "delete":
        delete(names[0])
    elif verb == "ssh":
        ssh(names[0], flags["worker"], flags["command"])


if __name__ == "__main__":
    main()
