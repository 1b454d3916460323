"""Notices of Google Compute Engine, from a stand-in for its metadata server."""

import time

import pytest

from jaxlm.engine import preemption
from jaxlm.engine.preemption import PREEMPTED, StopRequest, metadata_host, watch_notices
from jaxlm.engine.sync import Interrupted
from tests.metadata_server import metadata_server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(preemption, "_AFTER_ANSWER_S", 0.02)
    monkeypatch.setattr(preemption, "_LONGEST_PAUSE_S", 0.1)
    with metadata_server() as metadata:
        yield metadata


def until(holds, timeout_s: float = 100.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"preempted": "TRUE"}, "Google Compute Engine preempts this machine"),
        ({"maintenanceEvent": "TERMINATE_ON_HOST_MAINTENANCE"}, "will stop this machine for maintenance of its host"),
    ],
)
def test_a_notice_requests_a_stop_at_once(server, capfd, change, reason):
    request = StopRequest()
    with watch_notices(request, server.host):
        assert until(lambda: server.num_asked >= 2)
        time.sleep(0.1)
        assert request.signal == 0
        assert server.num_asked == 2  # the second one waits for a change
        server.set(**change)
        assert until(lambda: request.signal == PREEMPTED)
    assert f"{reason}: saving after the steps that are under way, then stopping" in capfd.readouterr().err
    assert Interrupted(request.signal).exit_code == 143  # which launchers start again


def test_a_live_migration_stops_nothing(server, capfd):
    request = StopRequest()
    with watch_notices(request, server.host):
        assert until(lambda: server.num_asked >= 2)
        for event in ("MIGRATE_ON_HOST_MAINTENANCE", "NONE"):
            asked = server.num_asked
            server.set(maintenanceEvent=event)
            assert until(lambda asked=asked: server.num_asked > asked)
    assert request.signal == 0
    assert capfd.readouterr().err == ""


def test_a_notice_from_before_the_start_stops_nothing_but_a_later_one_does(server, capfd):
    """An hour's notice would otherwise let a run that begins again on the same machine do one step at a time."""
    server.set(maintenanceEvent="TERMINATE_ON_HOST_MAINTENANCE")
    request = StopRequest()
    with watch_notices(request, server.host):
        assert until(lambda: server.num_asked >= 2)
        server.set(attributes={})
        assert until(lambda: server.num_asked >= 3)
        assert request.signal == 0
        server.set(preempted="TRUE")
        assert until(lambda: request.signal == PREEMPTED)
    assert "since before this start: the run goes on until the machine stops" in capfd.readouterr().err


@pytest.mark.parametrize("behavior", ["503", "nonsense", "nested", "hangs"])
def test_a_server_that_fails_is_asked_again_and_nothing_is_said(server, capfd, monkeypatch, behavior):
    if behavior == "hangs":
        monkeypatch.setattr(preemption, "_ANSWER_S", 0.5)
    server.behavior = behavior
    request = StopRequest()
    with watch_notices(request, server.host):
        assert until(lambda: server.num_asked >= 2)
        assert request.signal == 0
        monkeypatch.setattr(preemption, "_ANSWER_S", 10.0)
        server.behavior = "good"
        asked = server.num_asked
        assert until(lambda: server.num_asked >= asked + 2)
        server.set(preempted="TRUE")
        assert until(lambda: request.signal == PREEMPTED)
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_disappears_stops_nothing(monkeypatch, capfd):
    monkeypatch.setattr(preemption, "_LONGEST_PAUSE_S", 0.1)
    with metadata_server() as server:
        host = server.host
    request = StopRequest()
    with watch_notices(request, host):
        time.sleep(0.3)
    assert request.signal == 0
    assert capfd.readouterr().err == ""


def test_the_server_is_found_without_a_network(tmp_path, monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    for name, host in {
        "Google Compute Engine\n": "metadata.google.internal",
        "Google\n": "metadata.google.internal",
        "Standard PC (Q35 + ICH9, 2009)\n": None,
        None: None,
    }.items():
        monkeypatch.setattr(preemption, "_PRODUCT_NAME", path := tmp_path / str(name).split()[0])
        if name is not None:
            path.write_text(name)
        assert metadata_host() == host
    monkeypatch.setenv("GCE_METADATA_HOST", "169.254.169.254")
    assert metadata_host() == "169.254.169.254"
