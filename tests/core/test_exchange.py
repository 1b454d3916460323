"""Exchanges between processes about things that come again, such as saves."""

import threading
from types import SimpleNamespace

from jaxlm.core import exchange
from tests.processes import Service, together

JOINED = b" and ".join


def test_a_process_that_leaves_an_exchange_takes_part_in_the_next(monkeypatch):
    """What it says about the next thing must not count for the one that it has left: half a checkpoint would be complete."""
    service, own = Service(), threading.local()
    monkeypatch.setattr(exchange, "coordination", lambda: own.state)

    def process(index):
        own.state = SimpleNamespace(client=service, process_id=index, num_processes=2)
        first = exchange.exchange_about("saves", 0)
        heard = [first.conclude(b"begin of %d" % index, JOINED)]
        if index:  # the other process would wait here, until its watchdog ends it
            second = exchange.exchange_about("saves", 1)
            heard.append(second.conclude(b"begin of the second", JOINED))
        else:
            waiting = threading.Thread(target=lambda: first.conclude(b"end", JOINED), daemon=True)
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive(), "it took the second save's message for one of the first"
            heard.append(exchange.exchange_about("saves", 1).conclude(b"my begin", JOINED))
        return heard

    one, other = together(lambda: process(0), lambda: process(1), service=service)
    assert one == other == [b"begin of 0 and begin of 1", b"my begin and begin of the second"]


def test_what_all_have_read_is_deleted(monkeypatch):
    service, own = Service(), threading.local()
    monkeypatch.setattr(exchange, "coordination", lambda: own.state)

    def process(index):
        own.state = SimpleNamespace(client=service, process_id=index, num_processes=2)
        for number in range(4):
            exchange.exchange_about("saves", number).conclude(b"x", JOINED)

    assert together(lambda: process(0), lambda: process(1), service=service) == [None, None]
    assert {key.split("/")[2] for key in service.values} == {"2", "3"}
