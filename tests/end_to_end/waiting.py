"""An evaluation that lets a run go on only once the file `go` is in its working folder, so that no test comes too late."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxlm.evals.base import Eval, EvalConfig

LONGEST_S = 600.0  # if the test has failed, the run must still end
EVALS = '\nevals: [{type: loss}, {type: "tests.end_to_end.waiting:WaitConfig"}]\n'


def wait_for(holds: Callable[[], object]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + LONGEST_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)


def wait_for_go(folder: Path) -> None:
    """Waits for the file `go` in a folder."""
    wait_for((folder / "go").exists)


@dataclass(frozen=True)
class WaitConfig(EvalConfig):
    def open(self, ctx):
        return Wait(Path.cwd())


@dataclass(frozen=True)
class Wait(Eval):
    folder: Path

    def run(self, model):
        wait_for_go(self.folder)
        return {}
