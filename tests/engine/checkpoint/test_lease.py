"""Leases on folders in stores: one holder at a time, and a crash never strands one."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import fsspec
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint import lease as leases
from jaxlm.engine.checkpoint.lease import Holder, Lease, LeaseLostError
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.staging import StagedFolder
from jaxlm.observe.log_file import LogStore
from tests.gcs import BUCKET
from tests.session.test_object_store import bucket  # noqa: F401 - a fixture

INTERVAL_S = 0.2


@pytest.fixture(params=["memory", "gcs", "bucket"])
def url(request, monkeypatch):
    monkeypatch.setattr(leases, "INTERVAL_S", INTERVAL_S)
    if request.param == "memory":
        found = "memory://leases"
    else:
        where = request.getfixturevalue(request.param)
        found = f"gs://{BUCKET}" if request.param == "gcs" else where
    found += "/run"
    yield found
    fs, path = fsspec.core.url_to_fs(found)
    if fs.exists(path):
        fs.rm(path, recursive=True)


@pytest.fixture
def patient(monkeypatch):
    """The thread that sends heartbeats may not run for seconds on a busy machine."""
    monkeypatch.setattr(leases, "_LOST_AFTER", 500.0)


def objects(url: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(name.rpartition("/")[2] for name in fs.find(path)) if fs.exists(path) else []


def leave(url: str, holder: Holder, number: int = 1) -> None:
    """The lease of a process that was killed."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{path}/lease-{number}.json", holder.to_json(token="t", beat=7))


def of_dead_process() -> Holder:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return replace(Holder.this_process(), pid=ended.pid)


@pytest.mark.slow
def test_a_second_start_is_refused_until_the_first_has_ended(url, patient):
    said = []
    with Lease(url, print).held() as check_lease:
        assert objects(url) == ["lease-1.json"]
        with pytest.raises(
            ConfigError, match=r"already being trained \(process \d+ on .+ since 20.+ UTC\): both would save to"
        ):
            Lease(url, said.append).held().__enter__()
        assert "watching" in said[0]
        check_lease()
    assert objects(url) == []
    with Lease(url, print).held():
        pass


@pytest.mark.slow
def test_only_one_of_simultaneous_starts_gets_the_lease(url, patient):
    entered, refused, leave_now = [], [], threading.Event()

    def start() -> None:
        try:
            with Lease(url, lambda _: None).held():
                entered.append(1)
                leave_now.wait(100)
        except ConfigError:
            refused.append(1)
            if len(refused) == 3:
                leave_now.set()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert (len(entered), len(refused)) == (1, 3)


def test_the_lease_of_a_process_that_ended_on_this_machine_is_taken_at_once(url, monkeypatch):
    monkeypatch.setattr(leases, "INTERVAL_S", 10.0)
    leave(url, of_dead_process())
    said, began = [], time.monotonic()
    with Lease(url, said.append).held():
        assert time.monotonic() - began < 2.5 * 10
        assert objects(url) == ["lease-2.json"]
    assert "which has ended: taken over" in said[-1]
    assert objects(url) == []


@pytest.mark.parametrize("url", ["memory"], indirect=True)
@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot": "other", "machine": "other"}, {"pids": "other"}])
def test_what_may_be_another_machine_is_watched_first(url, elsewhere):
    leave(url, replace(of_dead_process(), **elsewhere))
    said, began = [], time.monotonic()
    with Lease(url, said.append).held():
        assert time.monotonic() - began > 2.5 * INTERVAL_S
    assert "no heartbeat" in said[-1]


def test_a_machine_that_was_started_again_has_ended_its_processes():
    here = Holder.this_process()
    assert replace(here, machine="m", boot="before").has_ended() is (here.machine == "m")
    if here.machine:
        assert replace(here, boot="before").has_ended()
    assert replace(here, started="1").has_ended()  # the number of the process is used again
    assert not here.has_ended()
    assert Holder.from_json(here.to_json(beat=1)) == here
    assert Holder.from_json(b"\x00 nonsense") is None
    assert Holder.from_json(b"[" * 100_000) is None
    assert Holder.from_json(json.dumps({"holder": {"pid": 1}}).encode()) is None


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_paused_process_finds_out_before_it_saves_and_undoes_nothing(url, monkeypatch):
    paused, goes_on, renewed = Lease(url, print), threading.Event(), threading.Event()
    renew = paused._renew
    # Its heartbeats stop before the first one.
    monkeypatch.setattr(paused, "_renew", lambda: (goes_on.wait(200), renew(), renewed.set()))
    holding = paused.held()
    check_lease = holding.__enter__()
    # Another machine, so that its process cannot be looked up.
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{path}/lease-1.json", replace(Holder.this_process(), host="other").to_json(token="t", beat=7))
    with Lease(url, print).held() as other_holds:
        goes_on.set()
        assert renewed.wait(200)  # its thread has found the other one
        assert objects(url) == ["lease-2.json"]
        with pytest.raises(LeaseLostError, match=r"another start of this run has taken .* since 20"):
            check_lease()
        holding.__exit__(None, None, None)
        other_holds()
        assert objects(url) == ["lease-2.json"]
    assert objects(url) == []


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_process_that_was_paused_while_it_took_the_lease_leaves_the_next_one_alone(url, monkeypatch):
    leave(url, of_dead_process())
    paused = Lease(url, print)
    newest = paused._newest

    def pausing() -> int:
        found = newest()
        if found == 2:  # its own, which is now taken over
            leave(url, Holder.this_process(), 3)
        return found

    monkeypatch.setattr(paused, "_newest", pausing)
    with paused.held() as check_lease, pytest.raises(LeaseLostError, match="another start of this run has taken"):
        check_lease()
    assert objects(url) == ["lease-3.json"]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_in_a_store_that_cannot_create_exclusively_the_last_of_two_starts_holds(url, monkeypatch):
    first, last = Lease(url, print), Lease(url, print)
    fs, path = fsspec.core.url_to_fs(url)
    pipe = type(fs).pipe_file

    def piping(self, path, value, mode="overwrite", **kwargs):
        if mode == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        pipe(self, path, value, **kwargs)

    monkeypatch.setattr(type(fs), "pipe_file", piping)
    with first.held() as check_lease:
        check_lease()
        fs.pipe_file(f"{path}/lease-1.json", last._content())  # it saw no lease either
        with pytest.raises(LeaseLostError, match="another start of this run has taken"):
            check_lease()
        time.sleep(3 * INTERVAL_S)
    assert fs.cat_file(f"{path}/lease-1.json") == last._content()


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_store_that_fails_for_a_while_costs_no_lease(url, monkeypatch):
    holding = Lease(url, print)
    fails = lambda: 1 / 0  # noqa: E731
    with holding.held() as check_lease:
        with monkeypatch.context() as patch:
            patch.setattr(holding, "_numbers", fails)
            time.sleep(2 * INTERVAL_S)
            check_lease()
        before, end = holding._beat, time.monotonic() + 100
        while holding._beat == before and time.monotonic() < end:
            time.sleep(INTERVAL_S)
        assert holding._beat > before
        check_lease()


def refuse_locks(monkeypatch, number: int) -> None:
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(leases, "INTERVAL_S", INTERVAL_S)


PLACES = {
    "checkpoints": lambda folder: LocalFolder(folder / "run").locked(print),
    "staged": lambda folder: StagedFolder("memory://leases/staged", folder).locked(print),
    "logs": lambda folder: LogStore(None, folder / "run", print).locked(),
}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_lease_takes_the_place_of_locks_that_a_file_system_does_not_have(tmp_path, monkeypatch, patient, number):
    refuse_locks(monkeypatch, number)
    holding = PLACES["checkpoints"]
    with holding(tmp_path) as check_lease:
        check_lease()
        with pytest.raises(ConfigError, match=r"already being trained .*both would save"), holding(tmp_path):
            pass
    with holding(tmp_path):
        pass
    assert not list((tmp_path / ".run.lock.lease").iterdir())


@pytest.mark.parametrize("holding", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_lock_that_fails_for_another_reason_is_not_passed(tmp_path, monkeypatch, holding, number):
    check_failing_lock(tmp_path, monkeypatch, holding, number)


def check_failing_lock(tmp_path, monkeypatch, holding, number):
    refuse_locks(monkeypatch, number)
    with (
        pytest.raises(ConfigError, match=rf"{tmp_path}/.+ cannot be locked \({os.strerror(number)}\)"),
        holding(tmp_path),
    ):
        pass
    (tmp_path / ".run.lock").touch()
    with pytest.raises(ConfigError, match="cannot be locked"):
        LocalFolder(tmp_path / "run").check_free()


@pytest.mark.parametrize("holding", PLACES.values(), ids=PLACES)
def test_every_place_that_holds_a_lease_learns_that_it_has_lost_it(tmp_path, monkeypatch, patient, holding):
    check_lost_lease(tmp_path, monkeypatch, holding)


def check_lost_lease(tmp_path, monkeypatch, holding):
    refuse_locks(monkeypatch, errno.ENOSYS)
    with holding(tmp_path) as check_lease:
        check_lease()
        (taken,) = tmp_path.rglob("lease-1.json")
        taken.with_name("lease-2.json").write_bytes(
            replace(Holder.this_process(), host="other").to_json(token="t", beat=1)
        )
        with pytest.raises(LeaseLostError, match=r"another start of this run has taken .*process .* on other"):
            check_lease()


def test_a_disk_that_cannot_hold_the_lease_is_named_with_its_key(tmp_path, monkeypatch):
    refuse_locks(monkeypatch, errno.ENOSYS)
    (tmp_path / ".run.logs.lock.lease").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.log_dir: .* cannot be written"), PLACES["logs"](tmp_path):
        pass
