"""A run that meets a fault every few seconds ends with the parameters of an undisturbed run, and its ledger adds up."""

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxlm.engine.checkpoint.manifest import find_checkpoints
from jaxlm.observe.ledger import account, read_lines
from tests.end_to_end.commands import Workplace
from tests.end_to_end.soak_faults import DISK, FULL, STALLED

MODULE = "tests.end_to_end.soak_faults"
TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)  # after and before the process handles signals


@dataclass(frozen=True)
class Soak:
    """A run and its faults.

    Attributes:
        words: the command line.
        every_s: seconds between faults; the disk recovers after a third of them.
        environment: of `soak_faults`.
    """

    place: Workplace
    words: tuple[str, ...]
    every_s: float
    environment: dict[str, str]

    def start(self) -> Any:
        return self.place.start(*self.words, module=MODULE, **self.environment)

    def run_disturbed(self) -> list[str]:
        """Runs to the end. Returns the faults that it met."""
        faults = itertools.cycle((self.kill, self.terminate, self.fill_disk, self.corrupt, self.stall_disk))
        met, process = [], self.start()
        output = self.until_next_fault(process)
        while process.returncode is None:
            fault = next(faults)
            process = fault(process)
            met.append(fault.__name__)
            output = self.until_next_fault(process)
        assert process.returncode == 0, output
        return met

    def until_next_fault(self, process: Any) -> str:
        """Lets the process run for a while. Returns its errors, if it has ended."""
        begin = time.monotonic()
        while time.monotonic() < begin + self.every_s:
            if process.poll() is not None:
                return process.communicate()[1]
            time.sleep(0.05)
        return ""

    def kill(self, process: Any) -> Any:
        process.kill()
        process.communicate()
        return self.start()

    def terminate(self, process: Any) -> Any:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=500)
        assert process.returncode in (0, *TERMINATED), err
        return self.start()

    def corrupt(self, process: Any) -> Any:
        """Changes a byte of the newest checkpoint's arrays while the process is away."""
        process.kill()
        process.communicate()
        newest = find_checkpoints(self.place.folder / "checkpoints" / "run")[-1]
        largest = max((newest / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        return self.start()

    def fill_disk(self, process: Any) -> Any:
        return self.while_disk_is(FULL, process)

    def stall_disk(self, process: Any) -> Any:
        return self.while_disk_is(STALLED, process)

    def while_disk_is(self, state: str, process: Any) -> Any:
        file = self.place.folder / DISK
        file.write_text(state)
        end = time.monotonic() + self.every_s / 3
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        file.unlink()
        return process


def small(workplace) -> Iterator[Soak]:
    """160 steps of 0.15 s, a fault every 4 s."""
    environment = {"JAXLM_TEST_PACE": "0.15", "JAXLM_TEST_POISON": "30,31,100", "JAXLM_TEST_BATCH": "16"}
    words = ("--config_path", "run.yaml", "--trainer.num_train_steps", "160", "--trainer.steps_per_eval", "100")
    for _ in range(2):
        place = workplace()
        place.write()
        yield Soak(place, (*words, *SKIPPING, "--trainer.checkpointer.save_interval", "1s"), 4.0, environment)


def half_an_hour(workplace) -> Iterator[Soak]:
    """The quickstart's model, compiled as users compile it, a fault every 90 s."""
    environment = {"JAXLM_TEST_PACE": "0", "JAXLM_TEST_POISON": "300,301,3000", "JAXLM_TEST_BATCH": "8"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    steps = ("--config_path", "jaxlm:quickstart.yaml", "--trainer.id", "run", "--trainer.num_train_steps", "12000")
    keep = ("--trainer.checkpointer.keep", "[{every: 100}]")
    for _ in range(2):
        words = (
            *steps,
            *keep,
            *SKIPPING,
            "--trainer.checkpointer.save_interval",
            "5s",
            "--trainer.steps_per_eval",
            "6000",
        )
        yield Soak(workplace(), (*words, "--trainer.log_dir", "logs"), 90.0, environment)


SKIPPING = ("--optimizer.skip_bad_steps", "24")


@pytest.mark.parametrize(
    ("made", "goodput_above"),
    [pytest.param(small, None, marks=pytest.mark.soak), pytest.param(half_an_hour, 0.9, marks=pytest.mark.soak)],
)
def test_a_run_that_meets_every_fault_ends_like_one_that_meets_none(workplace, made, goodput_above):
    clean, disturbed = made(workplace)
    undisturbed = None if goodput_above else clean.start()  # goodput is measured with nothing beside the run
    met = disturbed.run_disturbed()
    undisturbed = undisturbed or clean.start()
    _, err = undisturbed.communicate(timeout=7200)
    assert undisturbed.returncode == 0, err
    assert {"kill", "terminate", "fill_disk", "corrupt", "stall_disk"} <= set(met), met
    assert disturbed.place.losses() == clean.place.losses()
    last = find_checkpoints(clean.place.folder / "checkpoints" / "run")[-1].name
    assert disturbed.place.digest(last) == clean.place.digest(last)
    check_ledger(disturbed.place.folder / "logs" / "run", goodput_above)


def check_ledger(folder: Path, goodput_above: float | None) -> None:
    lines = read_lines(folder)
    goodput = account(lines)
    assert goodput is not None
    ended = lines[-1]["started_unix_s"] + lines[-1]["elapsed_s"]
    wall_s = ended - lines[0]["started_unix_s"]
    assert goodput.wall_s == pytest.approx(wall_s, rel=0.005)
    assert sum(goodput.seconds.values()) == pytest.approx(wall_s, rel=0.005)
    assert goodput_above is None or goodput.fraction >= goodput_above
