"""A local emulator of Google Cloud Storage for gcsfs and TensorStore."""

import contextlib
import dataclasses
import http.server
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest

from tests.ports import reserved_port

BUCKET = "bucket"
_HANDLING = threading.RLock()  # a batch of requests calls other handlers


@dataclasses.dataclass(frozen=True)
class Emulator:
    """`environment`: the variables that point to it. `empty()`: removes what earlier tests have written."""

    environment: dict[str, str]
    empty: Callable[[], None]


@contextlib.contextmanager
def gcs_server() -> Iterator[Emulator]:
    """Runs the server and sets the environment variables that point to it in this process.

    Call it once per process: TensorStore reads its variable only once.
    """
    address = f"http://127.0.0.1:{reserved_port()}"
    environment = {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator has no such buckets
    }
    os.environ |= environment  # gcsfs reads the last one when it is imported
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it logs missing objects as errors
    # Its own server reads one request at a time, so a client that is stopped while it sends one would stop all others.
    threading_server = types.SimpleNamespace(HTTPServer=http.server.ThreadingHTTPServer)
    for _, handlers in emulator.HANDLERS:
        handlers.update({method: with_generations(handle) for method, handle in handlers.items()})
    server = emulator.create_server("127.0.0.1", int(address.rpartition(":")[2]), in_memory=True, default_bucket=BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "server", threading_server)
        server.start()
    # gcsfs sends two requests at once, and drops the second connection when the first is answered.
    server._api._httpd.handle_error = lambda *_: None

    def empty() -> None:
        with _HANDLING:
            server.wipe(keep_buckets=True)
        sys.modules["gcsfs"].GCSFileSystem.clear_instance_cache()

    try:
        yield Emulator(environment, empty)
    finally:
        server.stop()


def with_generations(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Features that TensorStore needs and the emulator lacks: generation numbers and preconditions on them.

    https://cloud.google.com/storage/docs/request-preconditions
    """

    def handling(request: Any, response: Any, storage: Any, *args: Any) -> None:
        request.data  # noqa: B018 # reads the body, which may take long
        with _HANDLING:
            handling_alone(request, response, storage, *args)

    def handling_alone(request: Any, response: Any, storage: Any, *args: Any) -> None:
        asked = {name: values[0] for name, values in request.query.items()}
        name = request.params.get("object_id") or asked.get("name") or _name_in_body(request)
        if asked.get("ifGenerationMatch", number := generation(storage, request, name)) != number:
            response.status = HTTPStatus.PRECONDITION_FAILED
        elif asked.get("ifGenerationNotMatch") == number:
            response.status = HTTPStatus.NOT_MODIFIED
        else:
            handle(request, response, storage, *args)
            if asked.get("alt") == "media" and number != "0":
                response["x-goog-generation"] = number

    return handling


def _name_in_body(request: Any) -> str | None:
    """That of an object whose metadata and content are uploaded together."""
    return request.data["meta"].get("name") if isinstance(request.data, dict) and "meta" in request.data else None


def generation(storage: Any, request: Any, name: str | None) -> str:
    """The current generation number of an object; "0" if it does not exist."""
    from gcp_storage_emulator.exceptions import NotFound

    try:
        return storage.get_file_obj(request.params["bucket_name"], name)["generation"] if name else "0"
    except NotFound:
        return "0"
