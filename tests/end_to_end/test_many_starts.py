"""Many starts of one run at once, on one host and on several, with kills: one trains, as if it had been alone."""

import functools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.end_to_end.commands import Workplace, digest_of_arrays
from tests.gcs import BUCKET
from tests.s3 import S3_BUCKET, s3_server

STEPS = 40
ATTEMPTS = 24
INTERVAL_S = 2.0  # of a lease
STEP_S = 0.1
HOSTS = ("near", "far", "here", "there")
CLOCKS_S = (0, 3600, -3600, 0)
FAULTS = ("none", "SIGKILL", "SIGTERM", "SIGSTOP")
REFUSED = r"already being trained \(process (\d+) on (\w+) since .+ UTC\)"


class Study:
    """One store, in which each attempt trains a run of its own.

    Attributes:
        is_disk: whether a paused process keeps the run, because the kernel locks its folder.
    """

    def __init__(self, place: Workplace, base: str, environment: dict[str, str], *, is_disk: bool):
        self.place, self.base, self.environment, self.is_disk = place, base, environment, is_disk

    def start(self, run_id: str, host: int) -> Any:
        name = HOSTS[host]
        logs = "logs" if self.is_disk else f"logs-{name}"  # hosts that share a bucket share no disk
        cache = f"{self.base}/cache-{run_id}"  # which all of them build
        where = {"--trainer.checkpointer.base_path": f"{self.base}/runs", "--trainer.log_dir": logs}
        if self.base.startswith("s3"):
            where["--trainer.checkpointer.staging_dir"] = f"staging-{name}"
        options = {**where, "--trainer.id": run_id, "--data.cache_dir": cache}
        return self.place.start(
            "--config_path",
            "run.yaml",
            *(word for pair in options.items() for word in pair),
            module="tests.end_to_end.elsewhere",
            JAXLM_TEST_GOES_ON=str(self._goes_on(run_id)),
            JAXLM_TEST_HOST=f"{name}:{CLOCKS_S[host]}:{INTERVAL_S}:{STEP_S}",
            **self.environment,
        )

    def go_on(self, run_id: str) -> None:
        """The run may end: until then, all starts find it in training."""
        self._goes_on(run_id).touch()

    def _goes_on(self, run_id: str) -> Path:
        return self.place.folder / f"go-{run_id}"

    def losses(self, run_id: str) -> dict[int, set[str]]:
        """Step -> all losses logged for it. No log has a step twice, or in another order."""
        found: dict[int, set[str]] = {}
        for path in sorted(self.place.folder.glob(f"logs*/{run_id}/metrics.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            own = [(record["step"], record["train/loss"]) for record in records if "train/loss" in record]
            steps = [step for step, _ in own]
            assert steps == sorted(set(steps)), (path, steps)
            for step, loss in own:
                found.setdefault(step, set()).add(float(loss).hex())
        return found

    def digest(self, run_id: str) -> dict[str, str]:
        url = f"{self.base}/runs/{run_id}/step-{STEPS}"
        if not url.startswith("s3"):
            return digest_of_arrays(url)
        copy = self.place.folder / "copies" / run_id  # Orbax does not read s3://
        fsspec.filesystem("s3").get(url, str(copy), recursive=True)
        return digest_of_arrays(str(copy))

    def saved(self, run_id: str) -> int:
        """The newest step of the run."""
        fs, path = fsspec.core.url_to_fs(f"{self.base}/runs/{run_id}")
        fs.invalidate_cache()
        names = fs.glob(f"{path}/step-*/checksums.json") + fs.glob(f"{path}/step-*/run/cursor.json")
        return max((int(match[1]) for name in names if (match := re.search(r"/step-(\d+)/", str(name)))), default=0)

    def content(self, run_id: str) -> dict[str, bytes]:
        """All files of the run on the disk but the log."""
        folders = [self.place.folder / "logs" / run_id, Path(self.base, "runs", run_id)]
        files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files if path.name != "train.log"}


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as environment:
        yield environment


@pytest.fixture(params=["disk", "gcs", "s3"])
def study(request, workplace) -> Study:
    place = workplace()
    path = place.write(num_steps=STEPS)
    path.write_text(path.read_text().replace("{every: 5}", "{every: 4}"))
    if request.param == "disk":
        return Study(place, str(place.folder), {}, is_disk=True)
    if request.param == "gcs":
        return Study(place, f"gs://{BUCKET}/starts", request.getfixturevalue("gcs"), is_disk=False)
    return Study(place, f"s3://{S3_BUCKET}/starts", request.getfixturevalue("s3"), is_disk=False)


def until(holds: Callable[[], object], timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def refused(processes: list[tuple[Any, int]]) -> tuple[Any, int]:
    """Waits until one is left; the others were refused, with its name."""
    until(lambda: sum(process.poll() is None for process, _ in processes) <= 1)
    left = [pair for pair in processes if pair[0].poll() is None]
    assert len(left) == 1, [process.communicate() for process, _ in processes]
    for process, _ in processes:
        if process is not left[0][0]:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 2, (out, err)
            said = re.search(REFUSED, err)
            assert said, err
            assert (int(said[1]), said[2]) == (left[0][0].pid, HOSTS[left[0][1]])
            assert "Traceback" not in err
    return left[0]


def ends(process: Any, code: int) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, (process.returncode, out, err)
    return out


@pytest.mark.soak
def test_only_one_of_many_starts_trains_under_any_fault(study):
    study.go_on("whole")
    ends(study.start("whole", 0), 0)
    expected, arrays = study.losses("whole"), study.digest("whole")
    assert list(expected) == list(range(1, STEPS + 1))
    chance = random.Random(29)
    for attempt in range(int(os.environ.get("JAXLM_TEST_ATTEMPTS", ATTEMPTS))):
        began = time.monotonic()
        run_id, fault, several = f"x{attempt}", FAULTS[attempt % 4], bool(attempt // 4 % 2)
        hosts = [number if several else 0 for number in range(chance.choice([2, 4]))]
        processes = []
        for host in hosts:
            processes.append((study.start(run_id, host), host))
            time.sleep(chance.choice([0, 0, chance.uniform(0, 3)]))
        holder, host = refused(processes)
        least = chance.randint(4, 12)
        until(functools.partial(_has_saved, study, run_id, least))
        go_on = _disturb(study, run_id, holder, host, fault, several)
        took = time.monotonic()
        if go_on is not None:
            ends(go_on, 0)
        assert study.losses(run_id) == expected
        assert study.digest(run_id) == arrays
        print(
            f"{attempt}: {len(hosts)} starts on {len(set(hosts))} host(s), {fault}:"
            f" {took - began:.0f} s + {time.monotonic() - took:.0f} s",
            flush=True,
        )


def _has_saved(study: Study, run_id: str, least: int) -> bool:
    return study.saved(run_id) >= least


def _disturb(study: Study, run_id: str, holder: Any, host: int, fault: str, several: bool) -> Any:
    """Does something to the process that trains. Returns the one that goes on."""
    other = 1 - host if several and host < 2 else host
    if fault != "none":
        holder.send_signal(getattr(signal, fault))
    study.go_on(run_id)
    if fault == "none":
        return holder
    if fault in ("SIGKILL", "SIGTERM"):
        ends(holder, -signal.SIGKILL if fault == "SIGKILL" else 143)
        return study.start(run_id, other)
    try:
        before = study.content(run_id) if study.is_disk else {}
        second = study.start(run_id, other)
        if study.is_disk or other == host:  # the kernel's lock on the disk, or on the logs of the host
            _, err = second.communicate(timeout=300)
            assert second.returncode == 2, err
            assert "already being trained" in err
            if study.is_disk:
                assert study.content(run_id) == before
        else:
            ends(second, 0)
    finally:
        holder.send_signal(signal.SIGCONT)
    if study.is_disk or other == host:
        return holder
    _, err = holder.communicate(timeout=300)
    assert holder.returncode == 1, err
    assert "another start of this run has taken" in err
    return None
