"""A stand-in for gcloud. It keeps states of TPUs in $FAKE, records its calls, and runs what ssh would run, in a folder per
worker.

$FAKE/train is a shell script that stands for the training run: $NODE, $WORKER and $ATTEMPT (from 1) say which one it is.
$FAKE/create and $FAKE/delete, if they exist, have a line per call: an error message, or nothing for success; $FAKE/connect
has one per connection to worker 0. If $FAKE/drop appears, the connection to worker 0 is lost once, and its run goes on.
While $FAKE/offline exists, this machine has no network, and each call adds a line to it. Each connection prints a message to
stderr, as ssh does.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

FAKE = Path(os.environ["FAKE"])
TRAINS = """#!/bin/bash
ATTEMPT=$(( $(cat "$HOME/attempts" 2>/dev/null || echo 0) + 1 ))
echo $ATTEMPT > "$HOME/attempts"
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


def planned_failure(verb: str) -> None:
    """Fails as the next line of $FAKE/VERB says."""
    path = FAKE / verb
    lines = path.read_text().splitlines() if path.exists() else []
    if lines:
        path.write_text("".join(f"{line}\n" for line in lines[1:]))
        if lines[0]:
            fail(lines[0])


def state(name: str) -> Path:
    return FAKE / "state" / name


def describe(group: str, name: str) -> None:
    if not state(name).exists():
        fail(f"NOT_FOUND: Resource '{name}' was not found")
    now = state(name).read_text()
    if group == "queued-resources":
        print(json.dumps({"state": {"state": now}}))
    else:
        print(json.dumps({"state": now, "networkEndpoints": [{"ipAddress": f"10.0.0.{n}"} for n in range(2)]}))


def create(group: str, name: str, flags: dict[str, str]) -> None:
    planned_failure("create")
    nodes = [f"{name}-{n}" for n in range(int(flags["node-count"]))] if "node-count" in flags else [name]
    for node in nodes:
        state(node).write_text("READY")
    if group == "queued-resources" and nodes != [name]:
        state(name).write_text("ACTIVE")


def delete(name: str) -> None:
    planned_failure("delete")
    for path in [state(name), *state(name).parent.glob(f"{name}-*")]:
        path.unlink(missing_ok=True)


def ssh(node: str, worker: str, command: str) -> None:
    """Runs the command with a home of its own. Loses the connection and the run when the node is not READY any more."""
    for number in ("0", "1") if worker == "all" else (worker,):
        home = FAKE / "home" / f"{node}-{number}"
        home.mkdir(parents=True, exist_ok=True)
        if "uv pip install" in command:  # not run; the interpreter of its environment is the stand-in's
            python = home / "jaxlm" / "venv" / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.write_text(TRAINS)
            python.chmod(0o755)
            continue
        if number == "0" and worker != "all":
            planned_failure("connect")
        print("Warning: Permanently added 'tpu' (ED25519) to the list of known hosts.", file=sys.stderr, flush=True)
        environment = os.environ | {"HOME": str(home), "NODE": node, "WORKER": number}
        with subprocess.Popen(shlex.split(command), env=environment, cwd=home, start_new_session=True) as process:

            def end(*_: object, ssh: int = process.pid) -> None:
                os.killpg(ssh, signal.SIGKILL)  # gcloud's ssh is in its process group and gets its signals
                sys.exit(255)

            signal.signal(signal.SIGTERM, end)
            while process.poll() is None:
                time.sleep(0.02)
                if worker == "0" and (FAKE / "drop").exists():
                    (FAKE / "drop").unlink()
                    os.killpg(process.pid, signal.SIGKILL)
                    sys.exit(255)
                if not state(node).exists() or state(node).read_text() != "READY":
                    pid = home / "jaxlm" / "run" / "pid"
                    if pid.exists():
                        os.killpg(int(pid.read_text()), signal.SIGKILL)
                    os.killpg(process.pid, signal.SIGKILL)
                    sys.exit(255)
        if process.returncode:
            sys.exit(process.returncode)


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
