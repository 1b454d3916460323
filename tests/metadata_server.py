"""A stand-in for the metadata server of Google Compute Engine, with `wait_for_change`.

https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

QUIET = {"preempted": "FALSE", "maintenanceEvent": "NONE", "id": 1, "attributes": {"startup-script": "a\nb"}}


class Metadata:
    """What the server knows, and how it behaves.

    Attributes:
        behavior: "good", or the status or text of a wrong answer, or "hangs".
        num_asked: requests so far.
    """

    def __init__(self, host: str = ""):
        self.host = host
        self.behavior = "good"
        self.num_asked = 0
        self._instance = dict(QUIET)
        self._version = 1
        self._changed = threading.Condition()

    def set(self, **values: str) -> None:
        with self._changed:
            self._instance |= values
            self._version += 1
            self._changed.notify_all()

    def answer(self, asked: dict[str, list[str]]) -> tuple[int, bytes]:
        with self._changed:
            if "wait_for_change" in asked:
                seen = asked["last_etag"][0]
                self._changed.wait_for(lambda: str(self._version) != seen, timeout=float(asked["timeout_sec"][0]))
            return self._version, json.dumps(self._instance).encode()


@contextlib.contextmanager
def metadata_server() -> Iterator[Metadata]:
    """Runs the server. A PUT with JSON changes what it knows."""
    metadata = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            metadata.num_asked += 1
            if metadata.behavior == "hangs":
                time.sleep(600)
            if metadata.behavior == "503":
                self._send(503, b"try again", "1")
                return
            if metadata.behavior == "nonsense":
                self._send(200, b'["\xff', "1")
                return
            if metadata.behavior == "nested":
                self._send(200, b"[" * 100_000, "1")
                return
            place = urlsplit(self.path)
            if self.headers["Metadata-Flavor"] != "Google" or place.path != "/computeMetadata/v1/instance/":
                self._send(403, b"", "1")
                return
            version, body = metadata.answer(parse_qs(place.query))
            self._send(200, body, str(version))

        def do_PUT(self) -> None:
            metadata.set(**json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send(200, b"", "")

        def _send(self, status: int, body: bytes, etag: str) -> None:
            with contextlib.suppress(OSError):  # nobody waits any more
                self.send_response(status)
                for name, value in {
                    "Metadata-Flavor": "Google",
                    "ETag": etag,
                    "Content-Length": str(len(body)),
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    metadata.host = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield metadata
    finally:
        server.shutdown()
        server.server_close()
