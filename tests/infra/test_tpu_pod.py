"""`infra/tpu_pod.py` with a stand-in for gcloud that runs the workers' commands and plays preemptions and refusals."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tpu_nodes
import tpu_pod

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra" / "tpu_pod.py"
FAST = ("--no_check", "--backoff_s", "0.01", "--poll_s", "0.05", "--wait_for_others_s", "100")
# Shell commands of the training script. What the script does next happens only when the others are so far.
ALL_BEGUN = (
    'touch "$FAKE/begun-$NODE-$WORKER"; while [ "$(ls "$FAKE" | grep -c ^begun-)" -lt {number} ]; do sleep 0.05; done'
)
# Worker 1 of the last node changes the state of a machine, in one step: it can be killed at any time from then on.
LOST = '[ "$WORKER" = 1 ] && printf {state} > "$FAKE/lost" && mv "$FAKE/lost" "$FAKE/state/mine"'
DROP = 'touch "$FAKE/drop"; while [ -e "$FAKE/drop" ]; do sleep 0.05; done'


@dataclass(frozen=True)
class Cloud:
    """A folder with a stand-in for gcloud on PATH."""

    folder: Path

    def start(
        self, command: str, *words: str, train: tuple[str, ...] = ("--config_path", "mine.yaml")
    ) -> subprocess.Popen:
        arguments = [
            sys.executable,
            str(SCRIPT),
            command,
            "mine",
            "--zone",
            "z",
            "--install",
            "jaxlm==1",
            *FAST,
            *words,
        ]
        if command in ("babysit", "run"):
            arguments += ["--", *train]
        environment = os.environ | {"FAKE": str(self.folder), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(arguments, cwd=self.folder, env=environment, **pipes)

    def run(self, command: str, *words: str, **options) -> tuple[int, str]:
        process = self.start(command, *words, **options)
        out, _ = process.communicate(timeout=500)
        return process.returncode, out

    def plan(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def calls(self, verb: str) -> list[list[str]]:
        calls = [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        return [call for call in calls if call[3] == verb]

    def log(self, worker: str) -> list[str]:
        """The stored output of a worker, attempt by attempt."""
        return [path.read_text() for path in sorted((self.folder / "logs/infra/mine").glob(f"*/{worker}.log"))]

    @property
    def machines(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "state").iterdir())


@pytest.fixture
def cloud(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gcloud"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).with_name("fake_gcloud.py")} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "mine.yaml").write_text("model: {}\n")
    return Cloud(tmp_path)


@pytest.mark.slow
def test_a_run_to_its_end(cloud):
    cloud.plan(train='echo "worker $WORKER trains in $PWD"')
    code, out = cloud.run("babysit", "--env", "VARIABLE=its value")
    assert code == 0, out
    for worker in (0, 1):
        assert f"[mine:{worker}] worker {worker} trains in {cloud.folder}/home/mine-{worker}/jaxlm" in out
        (log,) = cloud.log(f"mine-{worker}")
        assert log.splitlines()[0] == "python -m jaxlm.train --config_path mine.yaml VARIABLE=its value"
    assert "infra: done: mine:0 ended with 0, mine:1 ended with 0" in out
    assert "no machine is left of mine" in out
    assert cloud.machines == []
    assert [call[4:6] for call in cloud.calls("scp")] == [["--recurse", "mine.yaml"]]


@pytest.mark.slow
def test_a_preempted_slice_is_created_again(cloud):
    """The machine disappears under one worker; the other one ends with 1, because it lost a process."""
    lost = LOST.format(state="PREEMPTED")
    cloud.plan(
        train=f'if [ "$ATTEMPT" = 1 ]; then {ALL_BEGUN.format(number=2)}\n[ "$WORKER" = 0 ] && exit 1\n'
        f'{lost}; sleep 600; fi\necho "attempt $ATTEMPT"'
    )
    code, out = cloud.run("babysit", "--spot")
    assert code == 0, out
    assert "mine is PREEMPTED; deleting it, to create it again" in out
    assert len(cloud.calls("create")) == 2
    assert len(cloud.calls("delete")) == 2
    assert "attempt 2" in cloud.log("mine-1")[1]
    assert cloud.machines == []


@pytest.mark.slow
def test_a_preempted_slice_of_two(cloud):
    lost = LOST.format(state="SUSPENDED") + ' && rm "$FAKE/state/$NODE"'
    cloud.plan(
        train=f'if [ "$ATTEMPT" = 1 ]; then {ALL_BEGUN.format(number=4)}\n[ "$NODE" = mine-0 ] && exit 1\n'
        f"{lost}; sleep 600; fi"
    )
    code, out = cloud.run("babysit", "--slices", "2", "--spot", "--type", "v5p-16")
    assert code == 0, out
    assert "mine is SUSPENDED; deleting it, to create it again" in out
    assert [call[2] for call in cloud.calls("create")] == ["queued-resources"] * 2
    assert "[mine-1:1] python -m jaxlm.train" in out
    assert cloud.machines == []


@pytest.mark.slow
def test_a_refused_creation_is_tried_again(cloud):
    cloud.plan(train="true", create="There is no more capacity in the zone\n" * 2)
    code, out = cloud.run("babysit")
    assert code == 0, out
    assert out.count("There is no more capacity") == 2
    assert "trying again in 0 s (2 of 20)" in out
    assert len(cloud.calls("create")) == 3


def test_babysit_gives_up_after_its_retries(cloud):
    cloud.plan(train="true", create="There is no more capacity in the zone\n" * 9)
    code, out = cloud.run("babysit", "--retries", "2")
    assert code == 1
    assert "giving up after 3 attempts" in out
    assert len(cloud.calls("create")) == 3


def test_what_gcloud_would_refuse_again_is_not_repeated(cloud):
    cloud.plan(train="true", create="PERMISSION_DENIED: Permission 'tpu.nodes.create' denied\n")
    code, out = cloud.run("babysit")
    assert code == 1
    assert len(cloud.calls("create")) == 1
    assert "PERMISSION_DENIED" in out


@pytest.mark.slow
@pytest.mark.parametrize("code", [1, 2])
def test_a_run_that_must_stop_is_not_repeated(cloud, code):
    cloud.plan(train=f'echo "error: as the message says"; exit {code}')
    ended, out = cloud.run("babysit")
    assert ended == code
    assert f"infra: stop: mine:0 ended with {code}" in out
    assert "[mine:0] error: as the message says" in out
    assert len(cloud.calls("create")) == 1
    assert cloud.machines == []


@pytest.mark.slow
def test_a_run_that_saved_after_sigterm_goes_on_on_the_same_machine(cloud):
    cloud.plan(train='[ "$ATTEMPT" = 1 ] && exit 143\ntrue')
    code, out = cloud.run("babysit")
    assert code == 0, out
    assert "retry: mine:0 ended with 143" in out
    assert len(cloud.calls("create")) == 1


@pytest.mark.slow
def test_a_lost_connection_does_not_start_the_run_twice(cloud):
    cloud.plan(train=f'echo first\n[ "$WORKER" = 0 ] && {{ {DROP}; }}\necho "last of attempt $ATTEMPT"')
    code, out = cloud.run("babysit")
    assert code == 0, out
    assert out.count("mine:0: connection lost; its machine is READY, connecting again") == 1
    (log,) = cloud.log("mine-0")
    assert log.splitlines()[1:] == ["first", "last of attempt 1"]


@pytest.mark.slow
def test_a_run_goes_on_while_the_network_is_down(cloud):
    """Worker 0 makes this machine lose its connection and its network, for longer than several looks."""
    asked = 'while [ "$(wc -l < "$FAKE/offline")" -lt 4 ]; do sleep 0.05; done'
    lost = f'touch "$FAKE/offline" "$FAKE/drop"; {asked}; rm "$FAKE/offline"'
    cloud.plan(train=f'[ "$WORKER$ATTEMPT" = 01 ] && {{ echo first; {lost}; }}\necho "last of attempt $ATTEMPT"')
    code, out = cloud.run("babysit")
    assert code == 0, out
    assert "mine: gcloud cannot reach it from here; waiting while its run goes on:" in out
    assert "Network is unreachable" in out
    assert cloud.log("mine-0")[0].splitlines()[1:] == ["first", "last of attempt 1"]
    assert len(cloud.log("mine-0")) == 1


@pytest.mark.slow
def test_an_exit_code_of_gcloud_is_not_that_of_the_run(cloud):
    """Without network, gcloud ends with 1, before there is an ssh: like a run that failed."""
    cloud.plan(train='sleep 0.5; echo "last of attempt $ATTEMPT"', connect="gcloud crashed (ConnectionError)\n" * 2)
    code, out = cloud.run("babysit")
    assert code == 0, out
    assert out.count("connecting again: ERROR: gcloud crashed (ConnectionError)") == 2
    assert cloud.log("mine-0")[0].splitlines()[1:] == ["last of attempt 1"]


@pytest.mark.slow
def test_many_lost_connections_in_a_long_run_lose_no_output(cloud):
    """Lines with and without an end, carriage returns, and bytes that are no text, with a message of ssh per connection."""
    line = rf'printf "%s\r\xff half" "$n"; {DROP}; echo " of $n"'
    cloud.plan(train=f'[ "$WORKER" = 0 ] && for n in 1 2 3 4 5 6 7; do {line}; done\necho "last of attempt $ATTEMPT"')
    code, out = cloud.run("babysit", "--connected_s", "0")
    assert code == 0, out
    assert out.count("connection lost; its machine is READY") == 7
    (path,) = (cloud.folder / "logs/infra/mine").glob("*/mine-0.log")
    _, _, stored = path.read_bytes().partition(b"\n")
    assert stored == b"".join(b"%d\r\xff half of %d\n" % (n, n) for n in range(1, 8)) + b"last of attempt 1\n"
    assert path.with_suffix(".ssh.log").read_text().count("Permanently added") == 8


@pytest.mark.slow
def test_a_machine_that_cannot_be_connected_to_is_given_up(cloud):
    cloud.plan(train='[ "$WORKER$ATTEMPT" = 11 ] && sleep 9\ntrue', connect="Permission denied (publickey).\n" * 5)
    code, out = cloud.run("babysit", "--wait_for_others_s", "0.1")
    assert code == 0, out
    assert "mine:0: given up; its machine is READY: ERROR: Permission denied (publickey)." in out
    assert "retry: mine:0 ended with 255" in out


@pytest.mark.slow
def test_what_is_left_is_said_after_an_error_of_this_machine(cloud):
    """The disk becomes full."""
    replaced = f'ln -sf /dev/full "$FAKE"/logs/infra/mine/*/mine-0.log; {DROP}; echo more'
    cloud.plan(train=f'[ "$WORKER" = 0 ] && {{ echo first; {replaced}; }}')
    code, out = cloud.run("babysit")
    assert code == 1, out
    assert "No space left on device" in out
    assert "mine (1 x v4-8, z) is left, state READY, and costs money. To delete it:" in out


def test_a_run_that_was_killed_before_it_wrote_its_exit_code(tmp_path):
    """Its shell had opened the file."""
    python = tmp_path / "jaxlm" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\n: > "$HOME/jaxlm/run/code"; kill -KILL $PPID\n')
    python.chmod(0o755)
    options = argparse.Namespace(zone="z", project=None, internal_ips=False, env=[], arguments=["x"])
    script = tpu_nodes.Pod(options).run_command("mine", "0", "now")[-2].partition("=")[2]
    result = subprocess.run(
        shlex.split(script), env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.stderr.splitlines()[-1] == "now ended with 137"


def test_an_answer_that_is_not_json_is_a_temporary_error(monkeypatch):
    monkeypatch.setattr(tpu_nodes, "call", lambda _: "<html>")
    pod = tpu_nodes.Pod(argparse.Namespace(name="mine", zone="z", project=None))
    with pytest.raises(tpu_nodes.GcloudError, match="not JSON") as found:
        pod.describe("tpu-vm", "mine")
    assert not found.value.permanent


@pytest.mark.slow
@pytest.mark.parametrize("last", ["[mine:0] begun", "[mine:1] begun"])
def test_ctrl_c_says_what_is_left_and_the_same_command_follows_the_run(cloud, last):
    """Also when the interruption ends the connection to worker 0 before its run has a session of its own."""
    setsid = cloud.folder / "bin" / "setsid"
    setsid.write_text(f'#!/bin/sh\n[ "$WORKER" = 0 ] && sleep 0.5\nexec {shutil.which("setsid")} "$@"\n')
    setsid.chmod(0o755)
    cloud.plan(
        train='echo "begun"; while [ ! -e "$FAKE/finish" ]; do sleep 0.05; done; echo "finished attempt $ATTEMPT"'
    )
    process = cloud.start("babysit", "--type", "v4-32")
    for line in process.stdout:
        if last in line:
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 130
    assert "mine (1 x v4-32, z) is left, state READY, and costs money. To delete it:" in out
    assert f"python {SCRIPT} delete mine --zone z" in out
    assert cloud.machines == ["mine"]
    cloud.plan(finish="")
    code, out = cloud.run("babysit", "--type", "v4-32")
    assert code == 0, out
    assert "finished attempt 1" in out
    assert [text.count("begun") for text in cloud.log("mine-0")] == [1]
    assert cloud.machines == []


@pytest.mark.slow
def test_a_machine_that_cannot_be_deleted_is_named(cloud):
    cloud.plan(train="true", delete="Internal error\n" * 9)
    code, out = cloud.run("babysit")
    assert code == 1
    assert "deletion 3 of 3 failed" in out
    assert "is left, state READY, and costs money. To delete it:" in out
    cloud.plan(delete="Internal error\n")
    code, out = cloud.run("delete")
    assert code == 0, out
    assert "no machine is left" in out


@pytest.mark.slow
def test_machines_are_kept_on_request_and_named(cloud):
    cloud.plan(train="true")
    assert cloud.run("create")[0] == 0
    code, out = cloud.run("status")
    assert (code, "mine (1 x v4-8, z): READY" in out) == (0, True)
    code, out = cloud.run("run")
    assert code == 0
    assert "is left, state READY" in out
    code, out = cloud.run("babysit", "--keep")
    assert code == 0
    assert "is left, state READY" in out
    assert len(cloud.calls("create")) == 1
    assert cloud.run("delete")[0] == 0
    assert "mine (1 x v4-8, z): absent" in cloud.run("status")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slices", "0"), "--slices: 0 given, 1 to 999 expected"),
        (("--slices", "1000"), "--slices: 1000 given, 1 to 999 expected"),
        (("--retries", "-1"), "--retries: -1 given, 0 or more expected"),
        (("--type", "v4 32"), "--type: 'v4 32' given, such as v4-32"),
        (("--spot", "--reserved"), "--spot and --reserved given: choose one"),
        (("--env", "1=2"), "--env: '1=2' given, NAME=VALUE expected"),
        (("--send", "absent.yaml"), "--send: absent.yaml does not exist"),
        (("--install", "absent.whl"), "--install: absent.whl does not exist"),
    ],
)
def test_mistakes_are_found_before_anything_costs_money(cloud, in_process, words, message):
    start = ("babysit", "mine", "--zone", "z", "--install", "jaxlm==1", *FAST)
    result = in_process(tpu_pod.main, *start, *words, "--", "--config_path", "mine.yaml")
    assert (result.code, message in result.err) == (2, True), result.err
    assert not (cloud.folder / "calls").exists()


@pytest.mark.parametrize("name", ["Mine", "1st", "mine_1", "-x", "mine-", "m" * 60])
def test_invalid_tpu_names_are_refused(in_process, name):
    result = in_process(tpu_pod.main, "status", name, "--zone", "z")
    assert (result.code, "name: " in result.err or "required" in result.err) == (2, True), result.err


@pytest.mark.slow
def test_the_configuration_is_checked_before_a_machine_is_created(cloud):
    (cloud.folder / "mine.yaml").write_text("trainer: {train_batch_size: 17}\nmodel: {hidden_dim: 64, num_heads: 4}\n")
    words = ("babysit", "mine", "--zone", "z", "--type", "v4-32", "--install", "jaxlm==1")
    environment = os.environ | {"FAKE": str(cloud.folder), "PATH": f"{cloud.folder / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), *words, "--", "--config_path", "mine.yaml"]
    result = subprocess.run(command, env=environment, cwd=cloud.folder, capture_output=True, text=True)
    assert result.returncode == 2
    assert "17 sequences do not divide evenly over the 16 devices" in result.stderr
    assert "nothing was started" in result.stderr
    assert not (cloud.folder / "calls").exists()


@pytest.mark.parametrize("train", [("--config_path", "{}"), ("--config_path={}",)], ids=["two words", "one word"])
def test_the_configuration_is_copied_to_the_machines(cloud, in_process, train):
    path = str(cloud.folder / "mine.yaml")
    words = ("babysit", "mine", "--zone", "z", "--install", "jaxlm==1", "--no_check", "--dry_run")
    result = in_process(tpu_pod.main, *words, "--", *(word.format(path) for word in train))
    assert f"scp --recurse {path} mine:jaxlm/" in result.out
    assert re.search(r"jaxlm\.train --config_path[ =]mine\.yaml' ", result.out)


@pytest.mark.slow
def test_a_failed_installation_stops_at_once_and_leaves_no_machine(cloud):
    cloud.plan(train="true", install="ERROR: No matching distribution\njaxlm could not be installed on w0\n")
    code, out = cloud.run("babysit")
    assert code == 1
    assert "No matching distribution" in out
    assert len(cloud.calls("create")) == len(cloud.calls("delete")) == 1
    assert cloud.machines == []


def test_without_gcloud(cloud):
    (cloud.folder / "bin" / "gcloud").unlink()
    environment = os.environ | {"PATH": str(cloud.folder / "bin")}
    command = [sys.executable, str(SCRIPT), "status", "mine", "--zone", "z"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, "gcloud is not installed" in result.stdout) == (2, True)
