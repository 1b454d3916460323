"""What a process tells the others of its run when it fails, with a stand-in for jax's coordination service."""

import json
import threading
from types import SimpleNamespace

import jax
import pytest

from jaxlm.engine import peers
from jaxlm.engine.peers import PeerWatch, is_lost_peer


class Service:
    def __init__(self):
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self.values and not allow_overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


def test_only_the_first_failure_is_announced(monkeypatch):
    """One thread tells why the run ends. Then a collective of the main thread fails, because others have ended."""
    monkeypatch.setattr(peers, "_NOTICE_S", 0.0)
    monkeypatch.setattr(PeerWatch, "_watch", lambda self: None)
    exits = []
    monkeypatch.setattr(PeerWatch, "_exit", lambda self, code: exits.append(code))
    service = Service()
    watch = PeerWatch(service, 1, 4, timeout_s=5)
    watch.fail(1, "no heartbeat of process 2")
    watch.fail(1, "Gloo AllGather failed: Connection closed by peer")
    watch.stop()
    assert json.loads(service.values["jaxlm/failed/1"]) == {"code": 1, "message": "no heartbeat of process 2"}
    assert exits == [1, 1]


def test_a_process_that_is_killed_before_its_first_heartbeat_is_lost(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(PeerWatch, "_watch_service", lambda self: None)
    codes, ended = [], threading.Event()
    monkeypatch.setattr(PeerWatch, "fail", lambda self, code, message: (codes.append(code), self.stop(), ended.set()))
    service = Service()
    service.values["jaxlm/alive/1"] = "finished"
    PeerWatch(service, 0, 3, timeout_s=0.05)
    assert ended.wait(60)
    assert codes == [1]
    assert capsys.readouterr().err == "error: no heartbeat of process 2 for 0 s: killed, stopped, or disconnected\n"


@pytest.mark.parametrize(
    ("seconds", "noticed"),
    [([0, 1, 3601, 3602], False), ([0, 1, 2, 3, 4, 5], False), ([0, 1, 2, 3, 4, 5, 6], True)],
)
def test_a_process_that_was_paused_listens_before_it_says_that_no_one_answers(monkeypatch, seconds, noticed):
    """Args: seconds: when it looks. After a pause of an hour, the answer may be there already."""
    monkeypatch.setattr(PeerWatch, "_watch", lambda self: None)
    watch = PeerWatch(Service(), 1, 2, timeout_s=5)
    watch.stop()
    times, waits, exits = iter(seconds), iter([False] * (len(seconds) - 1) + [True]), []
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(peers, "os", SimpleNamespace(_exit=exits.append))
    monkeypatch.setattr(watch, "_ended", SimpleNamespace(wait=lambda _: next(waits)))
    watch._watch_service()
    assert exits == [1] * noticed


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        # What fails while an array is fetched, as before the first step.
        (ValueError("UNKNOWN: Gloo AllGather failed: [external/gloo/pair.cc:547] Connection closed by peer"), True),
        (ValueError("UNAVAILABLE: failed to connect to all addresses"), True),
        (ValueError("data.x: 'Gloo' given"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
    ],
)
def test_an_exchange_that_fails_because_a_process_is_gone(monkeypatch, error, expected):
    monkeypatch.setattr(peers, "_watches", [object()])
    assert is_lost_peer(error) == expected
    monkeypatch.setattr(peers, "_watches", [])
    assert not is_lost_peer(error)
