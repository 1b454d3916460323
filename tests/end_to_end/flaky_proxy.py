"""A proxy in front of a local object store, which answers with errors, stalls, or closes connections for a while."""

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_CLOSE = "close"


class FlakyProxy:
    """Passes requests on to a server.

    Attributes:
        address: its URL.
        num_faults: number of requests that it has not passed on at once.
    """

    def __init__(self, backend: str):
        self.num_faults = 0
        self._mode: int | float | str | None = None
        self._backend = urlsplit(backend).netloc
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, status: int) -> None:
        """From now on, answers with this status."""
        self._mode = status

    def stall(self, seconds: float) -> None:
        """From now on, waits before each request."""
        self._mode = float(seconds)

    def close_connections(self) -> None:
        """From now on, closes connections without an answer."""
        self._mode = _CLOSE

    def recover(self) -> None:
        """From now on, passes on each request at once."""
        self._mode = None

    def stop(self) -> None:
        """Ends the proxy."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                mode = proxy._mode
                proxy.num_faults += mode is not None
                if mode == _CLOSE:
                    self.close_connection = True
                elif isinstance(mode, int):
                    self._reply(mode, {}, b"")
                else:
                    time.sleep(mode or 0.0)
                    self._reply(*proxy._ask(self, body))

            do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_GET

            def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                sent = {"Content-Length": str(len(body))}  # a HEAD request's is that of the body that is not sent
                sent |= {n: v for n, v in headers.items() if n.lower() not in ("transfer-encoding", "connection")}
                for name, value in sent.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _ask(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._backend, timeout=60)
        with contextlib.closing(connection):
            connection.request(request.command, request.path, body, dict(request.headers.items()))
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()


@contextlib.contextmanager
def flaky_proxy(backend: str) -> Iterator[FlakyProxy]:
    """Runs a proxy while the context is open."""
    proxy = FlakyProxy(backend)
    try:
        yield proxy
    finally:
        proxy.stop()
