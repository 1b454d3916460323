"""The shell scripts: syntax, style, arguments, and exit codes, with stand-ins for the programs that they call."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import attempts
import pytest
import yaml

from tests.infra.test_attempts import OF_RUNS

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
SCRIPTS = [*sorted(INFRA.glob("*.sh")), INFRA / "slurm.sbatch"]
SKY = yaml.safe_load((INFRA / "sky.yaml").read_text())


def program_of(name: str) -> str:
    """A program on PATH or beside the interpreter; skips the test if there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed (pip install -e '.[infra-test]')")
    return found


def stand_in(folder: Path, **programs: str) -> dict[str, str]:
    """An environment with shell scripts on PATH, before all others."""
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_syntax_and_style(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert path.read_text().startswith("#!/usr/bin/env bash\n#")
    result = subprocess.run([program_of("shellcheck"), str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("part", ["setup", "run"])
def test_syntax_and_style_of_skypilot(part, tmp_path):
    path = tmp_path / "part.sh"
    path.write_text(SKY[part])
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    # The environment's script is not here; the arguments are words.
    command = [program_of("shellcheck"), "--shell=bash", "--exclude=SC1090,SC1091", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_dockerfiles(kind):
    path = INFRA / f"Dockerfile.{kind}"
    copied = [word for line in re.findall(r"^COPY (.*)$", path.read_text(), re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    extras = re.search(r"'\.\[(.*)\]'", path.read_text())[1].split(",")
    assert extras == [kind, "gs", "hf"]
    result = subprocess.run([program_of("hadolint"), str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("local.sh", (), "give the arguments of jaxlm train after --"),
        ("local.sh", ("--processes", "0", "--", "x"), "--processes: '0' given, a number from 1 to 4096 expected"),
        ("local.sh", ("--gpus", "all", "--", "x"), "--gpus: 'all' given, a number from 0 to 1024 expected"),
        ("local.sh", ("--gpus", "08", "--", "x"), "--gpus: '08' given, a number"),
        ("local.sh", ("--gpus", "9" * 20, "--", "x"), f"--gpus: '{'9' * 20}' given, a number"),
        ("local.sh", ("--port", "65536", "--", "x"), "--port: '65536' given, a number from 1 to 65535 expected"),
        ("local.sh", ("--retries",), "--retries: a value is missing"),
        (
            "local.sh",
            ("--config_path", "x"),
            "--config_path: unknown option. The arguments of jaxlm train come after --",
        ),
        ("wheelhouse.sh", ("--extras", "x;y"), "--extras: 'x;y' given, names such as gpu,gs expected"),
        ("wheelhouse.sh", ("--python", "python9"), "--python: 'python9' is not on PATH"),
    ],
)
def test_invalid_arguments_are_refused(script, words, message):
    result = subprocess.run([str(INFRA / script), *words], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_help(path):
    result = subprocess.run(["bash", str(path), "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: ")


# Stand-ins: each start of a process takes the next code of the file `codes`; `kill` dies by SIGKILL.
NEXT = """code=$(head -n 1 "$HOME/codes"); sed -i 1d "$HOME/codes"; echo "$*" >> "$HOME/calls"
[ "$code" = kill ] && kill -KILL $$
exit "$code\""""


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [
        ("0", 0, 1),
        ("2", 2, 1),
        ("1", 1, 1),
        ("143 0", 0, 2),
        ("kill 0", 0, 2),
        ("143 kill 143", 143, 3),
        ("130", 130, 1),
        ("75 0", 0, 2),
        ("127", 127, 1),
    ],
)
def test_local_starts_again(tmp_path, codes, code, starts):
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    environment = stand_in(tmp_path, python=NEXT)
    command = [str(INFRA / "local.sh"), "--no_check", "--processes", "1", "--retries", "2", "--wait_s", "0", "--"]
    command += ["--config_path", "my file.yaml"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["-m jaxlm.train --config_path my file.yaml"] * starts


@pytest.mark.parametrize(("codes", "outcome"), OF_RUNS, ids=str)
def test_local_decides_like_the_other_launchers(tmp_path, codes, outcome):
    """The last argument is the number of the process, except for a process alone."""
    lines = [f"[ ${{@: -1}} = {number} ] && code={code}" for number, code in enumerate(codes)]
    exits = '[ "$code" -ge 0 ] || kill "$code" $$\nexit "$code"'
    command = [str(INFRA / "local.sh"), "--no_check", "--processes", str(len(codes)), "--port", "1", "--retries", "1"]
    environment = stand_in(tmp_path, python="\n".join([*lines, 'echo x >> "$HOME/calls"', exits]))
    result = subprocess.run([*command, "--wait_s", "0", "--", "x"], env=environment, cwd=tmp_path, capture_output=True)
    starts = (tmp_path / "calls").read_text().count("x") // len(codes)
    assert starts == (2 if outcome == "retry" else 1)
    assert (result.returncode == 0) == (outcome == "done")


def test_local_ends_processes_that_wait_for_one_that_has_failed(tmp_path):
    """Process 1 fails before it connects. Process 0 would wait for it for trainer.distributed.initialization_timeout."""
    trains = '[ "${@: -1}" = 1 ] && { touch "$HOME/failed"; exit 1; }\nexec sleep 600'
    command = [
        str(INFRA / "local.sh"),
        "--no_check",
        "--processes",
        "2",
        "--port",
        "1",
        "--retries",
        "1",
        "--others_s",
        "0",
        "--",
        "x",
    ]
    environment = stand_in(tmp_path, python=trains)
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, "the 143 of process 0 does not count"
    assert "a process ended with 1; ending those that still wait for it: 0" in result.stderr
    assert "starting again" not in result.stderr


def test_local_finds_a_free_port(tmp_path):
    """Outside of the range of outgoing connections."""
    python = f'[ "$1" = -c ] && exec {sys.executable} "$@"\necho "${{@: -5:1}}"'
    command = [str(INFRA / "local.sh"), "--no_check", "--processes", "2", "--", "x"]
    result = subprocess.run(
        command, env=stand_in(tmp_path, python=python), cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    ports = {int(line.rpartition(":")[2]) for line in result.stdout.splitlines()}
    assert len(ports) == 1, result.stdout
    assert ports <= set(range(12_000, 32_000))


def test_local_waits_and_a_signal_ends_that(tmp_path):
    command = [
        str(INFRA / "local.sh"),
        "--no_check",
        "--processes",
        "1",
        "--retries",
        "1",
        "--wait_s",
        "600",
        "--",
        "x",
    ]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    environment = stand_in(tmp_path, python="exit 75")
    with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as process:
        assert "starting again in 600 s" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_local_passes_signals_on_and_waits(tmp_path, number, code):
    trains = 'trap "sleep 0.2; echo saved; exit %d" TERM INT; echo ready; while true; do sleep 0.05; done' % code  # noqa: UP031
    command = [str(INFRA / "local.sh"), "--no_check", "--processes", "2", "--port", "1", "--retries", "2", "--", "x"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=stand_in(tmp_path, python=trains), cwd=tmp_path, **pipes) as process:
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(number)
        lines += process.stdout.read().splitlines()
    assert process.returncode == code
    assert sum("saved" in line for line in lines) == 2


def slurm(folder: Path, restarts: int = 0, **programs: str) -> tuple[int, str, list[str]]:
    """Runs the batch script as a job of its own. Returns its code, its output, and what was requeued."""
    requeued = 'echo "$*" >> "$HOME/requeued"'
    environment = stand_in(folder, **({"scontrol": requeued} | programs))
    environment |= {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "JAXLM_SETUP": "export READY=yes"}
    command = ["bash", str(INFRA / "slurm.sbatch"), "--config_path", "my file.yaml"]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    path = folder / "requeued"
    return result.returncode, result.stdout + result.stderr, path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (0, 0, []),
        (1, 0, []),
        (2, 0, []),
        (130, 0, []),
        (143, 0, ["requeue 7"]),
        (137, 3, ["requeue 7"]),
        (75, 0, ["requeue 7"]),
        (134, 0, ["requeue 7"]),
        (127, 0, []),
        (143, 100, []),
    ],
)
def test_slurm_requeues_by_exit_code(tmp_path, code, restarts, requeued):
    (tmp_path / "codes").write_text(f"{code}\n")
    ended, out, found = slurm(tmp_path, restarts, srun=NEXT)
    assert (ended, found) == (code, requeued), out
    (call,) = (tmp_path / "calls").read_text().splitlines()
    # Nonzero, --kill-on-bad-exit kills slower tasks at once: 137 instead of their code.
    assert call == "--kill-on-bad-exit=0 --wait=300 --label python -m jaxlm.train --config_path my file.yaml"


def test_slurm_signal_before_the_time_limit(tmp_path):
    """SLURM signals the batch script alone; it lets the tasks save, then requeues."""
    srun = """echo $$ > "$HOME/step"; trap 'echo saved; exit 143' TERM
kill -TERM $PPID; while true; do sleep 0.05; done"""
    code, out, requeued = slurm(
        tmp_path, srun=srun, scancel='[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat "$HOME/step")'
    )
    assert (code, requeued) == (143, ["requeue 7"]), out
    assert "saved" in out


def test_slurm_tasks_that_end_while_the_signal_arrives(tmp_path):
    """The code of a child is lost in bash if it ends while a signal interrupts `wait`: here, in 4 of 10 cases."""
    for number in (1, 2, 3):
        code, out, requeued = slurm(tmp_path, srun="sleep 0.1; kill -TERM $PPID; exit 143", scancel="true")
        assert (code, requeued) == (143, ["requeue 7"] * number), out


@pytest.mark.parametrize(("extras", "nodes"), [("gpu,gs", 4), ("gpu,gs", 1), ("tpu,gs", 4)])
def test_skypilot_runs_the_command_of_each_node(tmp_path, extras, nodes):
    (tmp_path / "jaxlm-venv/bin").mkdir(parents=True)
    (tmp_path / "jaxlm-venv/bin/activate").touch()
    python = f'[ "$1" = -c ] && exec {sys.executable} "$@"\nprintf "%s\\n" "$@"'
    environment = stand_in(tmp_path, python=python) | {
        "ARGUMENTS": "--config_path 'my file.yaml' --x $(touch\\ pasted);>pasted",
        "EXTRAS": extras,
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"[: 8 if nodes == 1 else None],
        "SKYPILOT_NODE_RANK": "2",
    }
    result = subprocess.run(["bash", "-c", SKY["run"]], env=environment, capture_output=True, text=True, cwd=tmp_path)
    words = ["-m", "jaxlm.train", "--config_path", "my file.yaml", "--x", "$(touch pasted);>pasted"]
    if (extras, nodes) == ("gpu,gs", 4):
        words += shlex.split(
            "--trainer.distributed.coordinator_address 10.0.0.1:8476 --trainer.distributed.num_processes 4"
        )
        words += ["--trainer.distributed.process_id", "2"]
    assert result.stdout.splitlines() == words, result.stderr
    assert not (tmp_path / "pasted").exists()


def test_skypilot_recovers_from_what_is_tried_again():
    codes = SKY["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {attempts.outcome_of(code) for code in codes} == {"retry"}
    assert {75, 143, 137, 134} == {*codes}


def test_skypilot_accepts_its_file(monkeypatch):
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml(str(INFRA / "sky.yaml"))
    assert task.run == SKY["run"]
