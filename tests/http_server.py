"""An HTTP server of the test process that answers JSON requests, or fails as servers do."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn(ThreadingHTTPServer):
    """Answers `POST path` (and `GET path`, without a body) with `answers[path](body)`, but first with `faults`, one for each
    request.

    A fault is a status, `close` (no answer), `cut` (half an answer), `text` (no JSON), or an event to wait for.
    """

    daemon_threads = True

    def __init__(self, *, answers_get: bool = True):
        super().__init__(("127.0.0.1", 0), _Handler if answers_get else _PostHandler)
        self.answers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Any] = []
        self.location: str | None = None  # of what answers with a status that redirects
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that has given up is no error."""


class _PostHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
        with self.server.lock:
            self.server.requests.append((self.path, body))
            self.server.headers.append(dict(self.headers))
            fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, threading.Event):
            fault.wait()
        if fault == "close":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._send(fault, b'{"message": "as told"}')
            return
        answer = self.server.answers.get(self.path)
        if answer is None:
            self._send(404, b'{"detail": "Not Found"}')
            return
        content = b"<html>" if fault == "text" else json.dumps(answer(body)).encode()
        self._send(200, content[: len(content) // 2] if fault == "cut" else content, len(content))
        self.close_connection = fault == "cut"

    def _send(self, status: int, content: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if self.server.location is not None:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        """Prints nothing."""


class _Handler(_PostHandler):
    def do_GET(self):
        self.do_POST()


@contextlib.contextmanager
def serving(*, answers_get: bool = True) -> Iterator[StandIn]:
    """A server while the block runs. Args: answers_get: otherwise it knows only POST, as many small servers do."""
    server = StandIn(answers_get=answers_get)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
