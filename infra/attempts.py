"""What launchers share: the command of a run, what its exit codes mean (docs/reference/exit-codes.md), and when to retry."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

DONE, RETRY, STOP = "done", "retry", "stop"
CONNECTION_LOST = 255  # of ssh
HANG = 75  # EX_TEMPFAIL: no step was done for too long, and the run ended itself
_STOP = (130, 141)  # of those over 128


def say(message: str) -> None:
    print(f"infra: {message}", flush=True)


def outcome_of(code: int) -> str:
    """done, retry or stop for the exit code of one process: a shell's (137) or `subprocess`'s (-9).

    143 means saved after SIGTERM, 75 that the run ended itself because it hung. Other codes over 128 mean that a signal
    killed the process, or that the connection to its machine was lost. The newest checkpoint is complete in any case.
    """
    code = 128 - code if code < 0 else code
    if code == 0:
        return DONE
    return RETRY if code == HANG or (code > 128 and code not in _STOP) else STOP


def outcome_of_run(codes: Iterable[int]) -> str:
    """done, retry or stop for the exit codes of all processes of a run.

    When a process is lost, the others end with 1. So a 1 stops only a run that lost no process. A configuration error (2) or
    Ctrl-C always stops it.
    """
    codes = list(codes)
    outcomes = {outcome_of(code) for code in codes}
    if STOP in outcomes and (RETRY not in outcomes or any(outcome_of(c) == STOP and c != 1 for c in codes)):
        return STOP
    return RETRY if RETRY in outcomes else DONE


def config_path(arguments: Sequence[str]) -> str | None:
    """The configuration among the arguments of `jaxlm train`, in either form: `--config_path X` or `--config_path=X`."""
    for number, word in enumerate(arguments):
        if word == "--config_path":
            return next(iter(arguments[number + 1 :]), None)
        if word.startswith("--config_path="):
            return word.partition("=")[2]
    return None


def train_command(arguments: Sequence[str], variables: Sequence[str] = ()) -> list[str]:
    """The words that every launcher runs. Args: arguments: of `jaxlm train`; variables: NAME=VALUE."""
    return [*(["env", *variables] if variables else []), "python", "-m", "jaxlm.train", *arguments]


@dataclass
class Backoff:
    """Waits longer after each consecutive failure, and gives up after too many.

    Attributes:
        limit: consecutive failures after which there is another attempt.
        first_s: seconds to wait after the first failure; doubled after each further one, up to `longest_s`.
        healthy_s: an attempt that ran longer than this many seconds did not fail at the start: counting begins again.
    """

    limit: int
    first_s: float = 30.0
    longest_s: float = 900.0
    healthy_s: float = 1800.0
    failures: int = field(default=0, init=False)

    def wait(self, ran_s: float = 0.0) -> bool:
        """Waits until the next attempt may begin. Returns False at once if none is left."""
        self.failures = 1 if ran_s > self.healthy_s else self.failures + 1
        if self.failures > self.limit:
            return False
        seconds = min(self.longest_s, self.first_s * 2 ** (self.failures - 1))
        say(f"trying again in {seconds:.0f} s ({self.failures} of {self.limit})")
        time.sleep(seconds)
        return True
