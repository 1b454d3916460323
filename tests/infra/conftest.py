"""Runs of two processes that launchers start, and an uninterrupted one that they are compared with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.commands import REPOSITORY, Finished, Workplace, make_corpus
from tests.end_to_end.waiting import EVALS
from tests.ports import reserved_port
from tests.xla_flags import flags_for

sys.path[:0] = [str(REPOSITORY / "infra"), str(REPOSITORY / "infra" / "kubernetes")]  # its modules import each other so

NUM_STEPS = 24
ARGUMENTS = ("--config_path", "run.yaml", "--trainer.num_train_steps", str(NUM_STEPS))
LAST = f"step-{NUM_STEPS}"


@dataclass(frozen=True)
class Launched(Workplace):
    """A folder in which a launcher runs `python -m jaxlm.train`."""

    @property
    def environment(self) -> dict[str, str]:
        variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_for(1), "RAY_USAGE_STATS_ENABLED": "0"}
        paths = {"PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"}
        paths |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return os.environ | variables | paths

    def launch(self, *command: str) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, **pipes)

    def result(self) -> tuple[dict[int, str], dict[str, str]]:
        """Losses in hexadecimal, and hashes of all arrays at the end."""
        return self.losses(), self.digest(LAST)

    def training_processes(self) -> list[int]:
        """Process ids of the runs in this folder."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                if (
                    b"jaxlm.train" in words
                    and words[0].endswith(b"python")
                    and (path / "cwd").readlink() == self.folder
                ):
                    pids.append(int(path.name))
            except OSError:
                continue  # it has ended
        return sorted(pids)

    def wait_at(self, step: int) -> None:
        """From now on, the run waits at this step until `go` is called."""
        path = self.folder / "run.yaml"
        path.write_text(path.read_text().replace("steps_per_eval: 1000", f"steps_per_eval: {step}") + EVALS)

    def go(self) -> None:
        """Lets the run go on, and does not stop it any more."""
        (self.folder / "go").touch()

    def wait_for_checkpoint(self, name: str, timeout_s: float = 400) -> None:
        """Waits until a checkpoint is finished, so that a later attempt begins in the middle."""
        end = time.monotonic() + timeout_s
        while name not in self.checkpoints():
            assert time.monotonic() < end, "no checkpoint was saved"
            time.sleep(0.02)

    def kill_one(self) -> None:
        """Kills one process of the run, without a warning."""
        os.kill(self.training_processes()[-1], signal.SIGKILL)


@pytest.fixture
def in_process(capfd) -> Callable[..., Finished]:
    """Runs a launcher's `main` in this process, for commands that start nothing."""

    def run(main: Callable[[Sequence[str]], int], *words: str) -> Finished:
        try:
            code = main(words)
        except SystemExit as end:  # raised by argparse
            code = int(end.code or 0)
        return Finished(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """Creates folders with the small configuration, which saves every 8 steps."""
    shared = tmp_path_factory.mktemp("shared")
    make_corpus(shared / "corpus")

    def make() -> Launched:
        place = Launched(tmp_path_factory.mktemp("work"), shared / "cache", shared / "corpus")
        path = place.write()
        path.write_text(
            path.read_text().replace("every: 5", "every: 8").replace("steps_per_eval: 9", "steps_per_eval: 1000")
        )
        return place

    return make


def pod_commands(folder: Path, nodes: int) -> list[list[str]]:
    """The command of each pod of a JobSet, as its container would run it."""
    import jobset

    manifest = jobset.manifest(jobset.parse(["mine", "--image", "x", "--nodes", str(nodes), "--", *ARGUMENTS]))
    (container,) = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    # A name in the cluster's DNS, and what Kubernetes itself replaces.
    replaced = {"mine-run-0-0.mine:8476": f"127.0.0.1:{reserved_port()}"}
    indices = [{"$(JOB_COMPLETION_INDEX)": str(number)} for number in range(nodes)]
    return [[(replaced | index).get(word, word) for word in container["command"]] for index in indices]


@pytest.fixture(scope="session")
def expected(launched) -> tuple[dict[int, str], dict[str, str]]:
    """The result of an uninterrupted run of two processes: the pods of a JobSet with the index that Kubernetes sets."""
    place = launched()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pods = [
        subprocess.Popen(command, cwd=place.folder, env=place.environment, **pipes)
        for command in pod_commands(place.folder, 2)
    ]
    for pod in pods:
        out, _ = pod.communicate(timeout=300)
        assert pod.returncode == 0, out
    losses, digest = place.result()
    assert sorted(losses) == list(range(1, NUM_STEPS + 1))
    return losses, digest
