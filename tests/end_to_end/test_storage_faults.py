"""Storage that misbehaves while the real command trains: nothing is lost, and training goes on."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pytest

from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.manifest import verify
from tests.end_to_end.commands import Finished, Workplace, digest_of_arrays, end_of
from tests.end_to_end.flaky_proxy import FlakyProxy, flaky_proxy
from tests.gcs import BUCKET
from tests.s3 import S3_BUCKET, s3_server

PACE_S = 0.3
RUN = ("--config_path", "run.yaml")
OFTEN = ("--trainer.checkpointer.save_interval", "0.5s")
FAULTY = "tests.end_to_end.storage_faults"


def faulty(fault: str, pace_s: float = PACE_S) -> dict[str, str]:
    return {"module": FAULTY, "JAXLM_TEST_FAULT": fault, "JAXLM_TEST_PACE": str(pace_s)}


@pytest.fixture
def place(workplace) -> Workplace:
    made = workplace()
    made.write()
    return made


def check_like(uninterrupted, place: Workplace, result: Finished) -> None:
    """The run has ended like one on a good disk, and has left nothing behind."""
    assert result.code == 0, result.err
    assert (place.losses(), place.digest("step-24")) == (uninterrupted.losses, uninterrupted.digest)
    check_folder(place)


def check_folder(place: Workplace) -> None:
    """All of the checkpoints are finished and undamaged, and nothing else is there."""
    for name in place.checkpoints():
        assert name.removeprefix("step-").isdecimal(), place.checkpoints()
        verify(place.folder / "checkpoints/run" / name)


def metrics(place: Workplace) -> list[dict[str, float]]:
    return [record for record in place.records() if "train/loss" in record]


def failures(result: Finished) -> list[str]:
    return [line for line in result.out.splitlines() if "was not saved" in line]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_random_errors_cost_neither_a_checkpoint_nor_a_step(uninterrupted, place, seed):
    result = place.run(*RUN, *OFTEN, **faulty(f"errors:{seed}"))
    check_like(uninterrupted, place, result)
    assert failures(result)
    assert metrics(place)[-1]["throughput/failed_saves"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("enospc", "No space left on device"),
        # Also on one of two processes, below.
        pytest.param("large_files", "File too large", marks=pytest.mark.soak),
        pytest.param("erofs", "Read-only file system", marks=pytest.mark.soak),
    ],
)
def test_a_disk_that_recovers_costs_no_checkpoint_of_a_rule(uninterrupted, place, fault, reason):
    result = place.run(*RUN, *OFTEN, **faulty(fault))
    check_like(uninterrupted, place, result)
    lines = failures(result)
    assert lines
    # A save that has begun before the fault may find a file that it could not finish.
    assert all("was not saved" in line for line in lines), lines
    assert any(reason in line for line in lines), lines
    assert "the newest finished checkpoint is step-" in lines[0]
    assert "Training goes on. The next try is in 0.5 s" in lines[0]
    assert "checkpoints are saved again: step-" in result.out
    # Steps 10 and 15 were due while nothing could be written. One checkpoint, kept for good, stands for both.
    kept = {int(name.removeprefix("step-")) for name in place.checkpoints()}
    assert {5, 20, 24} <= kept
    assert not {10, 15} & kept
    assert "kept for good, because a permanent one is missing" in result.out
    found = metrics(place)
    assert found[-1]["throughput/failed_saves"] == len(lines)
    assert max(record["throughput/time_since_save"] for record in found) > 2.5


@pytest.mark.soak
def test_a_stall_costs_no_step(uninterrupted, place):
    keep = ("--trainer.checkpointer.keep", "[]")
    result = place.run(*RUN, *OFTEN, *keep, **faulty("stall:3:100"))
    check_like(uninterrupted, place, result)
    assert not failures(result)
    assert "no step was done during the save" not in result.out


@pytest.mark.soak
def test_saves_that_fail_for_too_long_end_the_run(uninterrupted, place):
    result = place.run(*RUN, *OFTEN, "--trainer.checkpointer.retry_for", "1s", **faulty("enospc"))
    assert result.code == 1
    assert "error: cannot save a checkpoint to" in result.err
    assert "Free up disk space and run the same command again" in result.err
    assert "Traceback" not in result.err
    check_like(uninterrupted, place, place.run(*RUN))


def run_folder(place: Workplace) -> Path:
    return place.folder / "checkpoints/run"


def go(place: Workplace) -> None:
    """Lets a run with the fault `none` go on after step 7."""
    (place.folder / "go").touch()


def wait_until(holds: Callable[[], object], process) -> None:
    """Waits until something holds while a process runs."""
    while not holds():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def has_failed_to_save(place: Workplace) -> bool:
    return "was not saved" in (place.folder / "logs/run/train.log").read_text()


def exchange(one: Path, other: Path) -> None:
    """Exchanges the names of a file and a folder. No other process sees neither of them."""
    here, is_exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = [os.fsencode(path.absolute()) for path in (one, other)]
    if ctypes.CDLL(None, use_errno=True).renameat2(here, names[0], here, names[1], is_exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


@pytest.mark.soak
@pytest.mark.parametrize("end", ["recovers", pytest.param("killed", marks=pytest.mark.soak)])
def test_an_outage_of_the_disk(uninterrupted, place, end):
    """The folder is out of reach, for the C++ code too: a file is in its place. Killed then, the run resumes later."""
    process = place.start(*RUN, *OFTEN, **faulty("none"))
    wait_until(lambda: "step-5" in place.checkpoints(), process)
    away = run_folder(place).with_name("away")
    away.write_text("")
    exchange(run_folder(place), away)
    go(place)
    wait_until(lambda: has_failed_to_save(place), process)
    if end == "killed":
        process.send_signal(signal.SIGKILL)
        process.communicate()
    exchange(run_folder(place), away)
    if end == "killed":
        check_like(uninterrupted, place, place.run(*RUN))
        return
    result = end_of(process)
    check_like(uninterrupted, place, result)
    assert "Not a directory" in failures(result)[0]


@pytest.mark.soak
def test_a_folder_that_is_deleted_is_made_again(uninterrupted, place):
    process = place.start(*RUN, *OFTEN, **faulty("none"))
    wait_until(lambda: "step-5" in place.checkpoints(), process)
    run_folder(place).rename(run_folder(place).with_name("away"))  # at once, also if a save is in progress
    go(place)
    check_like(uninterrupted, place, end_of(process))
    assert "step-5" not in place.checkpoints()


@pytest.mark.slow
@pytest.mark.parametrize("process", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_failure_on_one_of_two_processes_is_known_to_both(two_processes, workplace, process):
    """Neither waits for the other, and both try again at the same step."""
    place = workplace()
    place.write()
    ends = place.run_all(2, *RUN, *OFTEN, **faulty(f"process:{process}"))
    assert [one.code for one in ends] == [0, 0], ends
    assert (place.losses(), place.digest("step-24")) == (two_processes.losses, two_processes.digest)
    check_folder(place)
    lines = failures(ends[0])
    assert lines
    assert all("File too large" in line for line in lines), lines
    assert all(("process 1: " in line) == (process == 1) for line in lines), lines
    assert "checkpoints are saved again" in ends[0].out
    assert {"step-5", "step-20", "step-24"} <= set(place.checkpoints())


def in_bucket(place: Workplace, url: str) -> tuple[str, ...]:
    return (*RUN, "--trainer.checkpointer.base_path", url, *OFTEN)


def names_in(folder: BucketFolder) -> list[str]:
    """The names of all that is in a folder, finished or not."""
    return sorted(
        {path.partition(f"{folder.location.partition('://')[2]}/")[2].split("/")[0] for path in all_files(folder)}
    )


def all_files(folder: BucketFolder) -> list[str]:
    fs, root = fsspec.core.url_to_fs(folder.location)
    fs.invalidate_cache()
    return fs.find(root)


@pytest.mark.soak
def test_uploads_that_fail_are_made_up_for(uninterrupted, place):
    """Of a store that checkpoints are staged for. Every permanent one arrives, and nothing else stays in either folder."""
    url = f"file://{place.folder}/store"
    result = place.finish(*in_bucket(place, url), **faulty("unreachable"))
    assert place.losses() == uninterrupted.losses
    assert all("the upload failed (OSError: [Errno 5] Input/output error" in line for line in failures(result))
    assert "checkpoints are saved again" in result.out
    folder = BucketFolder(f"{url}/run")
    assert names_in(folder) == sorted(folder.names())
    assert {"step-5", "step-10", "step-15", "step-20", "step-24"} <= set(folder.names())
    for name in folder.names():
        verify(place.folder / "store/run" / name)
    assert digest_of_arrays(f"{place.folder}/store/run/step-24") == uninterrupted.digest
    (staging,) = (place.folder / "cache/checkpoints").glob("run-*/")
    assert [path.name for path in staging.iterdir()] == ["step-24"]


OUTAGES = {
    "unavailable": lambda proxy: proxy.answer(503),
    "too many requests": lambda proxy: proxy.answer(429),
    "forbidden": lambda proxy: proxy.answer(403),
    "closed": FlakyProxy.close_connections,
    "stalls": lambda proxy: proxy.stall(2.0),
}


def with_outage(
    place: Workplace,
    url: str,
    environment: dict[str, str],
    pointers: Sequence[str],
    outage: str,
) -> str:
    """Trains with checkpoints at a URL whose server is out of order for a while. Returns the output.

    Args:
        pointers: the environment variables that hold the address of the server.
        outage: a key of `OUTAGES`. Most are repeated by the clients; the server recovers once that has cost something.
    """
    with flaky_proxy(environment[pointers[0]]) as proxy:
        there = environment | dict.fromkeys(pointers, proxy.address)
        process = place.start(*in_bucket(place, url), **faulty("none"), **there)
        folder = BucketFolder(f"{url}/run")
        wait_until(lambda: "step-5" in folder.names(), process)
        OUTAGES[outage](proxy)
        go(place)
        wait_until(lambda: has_failed_to_save(place) if outage == "forbidden" else proxy.num_faults >= 3, process)
        proxy.recover()
        result = end_of(process)
    assert result.code == 0, result.err
    assert proxy.num_faults
    return result.out


@pytest.mark.soak
@pytest.mark.parametrize("outage", ["forbidden", *(name for name in OUTAGES if name != "forbidden")])
def test_an_outage_of_a_bucket(uninterrupted, place, gcs, outage):
    url = f"gs://{BUCKET}/outage-{outage.replace(' ', '-')}"
    pointers = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    out = with_outage(place, url, gcs, pointers, outage)
    assert place.losses() == uninterrupted.losses
    folder, checkpoints = BucketFolder(f"{url}/run"), BucketFolder(f"{url}/run").checkpoints()
    for checkpoint in checkpoints:
        checkpoint.verify()
    assert names_in(folder) == sorted(checkpoint.name for checkpoint in checkpoints)
    assert {"step-5", "step-24"} <= set(names_in(folder))
    assert digest_of_arrays(f"{url}/run/step-24") == uninterrupted.digest
    if outage == "forbidden":  # the others are repeated by gcsfs and TensorStore
        assert "was not saved" in out
        assert "checkpoints are saved again" in out


@pytest.mark.soak
@pytest.mark.parametrize("outage", ["closed", *(name for name in OUTAGES if name != "closed")])
def test_an_outage_of_a_store_that_checkpoints_are_uploaded_to(uninterrupted, place, monkeypatch, outage):
    with s3_server(monkeypatch) as environment:
        url = f"s3://{S3_BUCKET}/outage"
        out = with_outage(place, url, environment, ["AWS_ENDPOINT_URL"], outage)
        assert place.losses() == uninterrupted.losses
        folder = BucketFolder(f"{url}/run")
        assert names_in(folder) == sorted(folder.names())
        assert {"step-5", "step-10", "step-15", "step-20", "step-24"} <= set(folder.names())
        for name in folder.names():
            folder.download(name, place.folder / "downloaded")  # verifies it
    assert digest_of_arrays(f"{place.folder}/downloaded/step-24") == uninterrupted.digest
    if outage == "forbidden":
        assert "the upload failed" in out


@pytest.mark.slow
@pytest.mark.parametrize("store", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_an_error_of_the_training_costs_no_checkpoint_that_is_being_written(place, store):
    """What a save needs, its log files and its lease, is closed only once it is finished."""
    url = f"file://{place.folder}/store"
    where = ("--trainer.checkpointer.base_path", url) if store else ()
    # The first evaluation, after step 9, has no such metric. The save before it takes longer than the steps until then.
    no_such_metric = (
        "--trainer.until",
        "{metric: eval/none/loss, patience: 1}",
        "--trainer.checkpointer.keep",
        "[{every: 8}]",
    )
    result = place.run(*RUN, *where, *no_such_metric, **faulty("stall:20:2", 0.05))
    assert result.code == 2, result.err
    assert "eval/none/loss" in result.err
    assert "was not saved" not in result.out
    names = BucketFolder(f"{url}/run").names() if store else place.checkpoints()
    assert names == ["step-8"]
