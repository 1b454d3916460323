"""A client of inference servers (vLLM, SGLang): JSON over HTTP, with timeouts, and retries while a server is not ready."""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, Seconds

T = TypeVar("T")

_CHECK_PATH = "/v1/models"  # both kinds of server have it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_CONNECT_S = 10.0  # a machine that is down answers nothing at all
_CHECK_TIMEOUT_S = 10.0
_NO_ACCESS = (401, 403)
_BUSY = (408, 425, 429)  # and 500 and above: the same request may succeed later
_NOT_READY = (*_BUSY, 502, 503, 504)  # what a server, or a proxy before it, answers while it starts
_CHUNK_BYTES = 1 << 20
_SHOWN = 300  # characters of a server's message


@dataclass(frozen=True)
class ServerConfig:
    """How to reach an inference server.

    Attributes:
        url: its address, such as `http://localhost:8000`.
        api_key_variable: environment variable with the API key to send; null sends none.
        timeout_s: maximum seconds to wait for one answer. A request that was not answered by then is not repeated.
        num_retries: how often a request is repeated that found no server, a busy one, or one that closed the connection.
            The pauses are 1, 2, 4 and up to 30 seconds.
    """

    url: str
    api_key_variable: str | None = None
    timeout_s: Seconds = 600.0
    num_retries: NonNegativeInt = 5

    def check(self, key: str) -> None:
        """Raises `ConfigError` if the address or the API key cannot work. Args: key: of this section, for messages."""
        if not _is_address(self.url):
            raise ConfigError(f"{key}.url: '{self.url}' given, an address such as http://localhost:8000 expected")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise ConfigError(
                f"{key}.api_key_variable: '{self.api_key_variable}' given, but this environment variable is not set. Set it"
                " to the API key"
            )


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets, or a port that is not a number
        return False


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says about an error, as far as it says it."""
    try:
        with error:
            return error.read(_CHUNK_BYTES).decode(errors="replace").strip()[:_SHOWN]
    except (OSError, http.client.HTTPException):
        return ""


class _NotReadyError(Exception):
    """The request failed in a way that the next attempt may not. Attributes: code: the status; None without an answer."""

    def __init__(self, message: str, code: int | None = None):
        super().__init__(message)
        self.code = code


class RefusedError(ConfigError):
    """The server refuses a request. Attributes: code: the status."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class _Connection(http.client.HTTPConnection):
    """Connects soon or not at all; then there is time for the answer."""

    def connect(self) -> None:
        _connect(self, super().connect)


class _SecureConnection(http.client.HTTPSConnection):
    """The same over TLS."""

    def connect(self) -> None:
        _connect(self, super().connect)


def _connect(connection: http.client.HTTPConnection, connect: Callable[[], None]) -> None:
    answer_s = connection.timeout or _CONNECT_S
    connection.timeout = min(answer_s, _CONNECT_S)
    connect()
    connection.sock.settimeout(answer_s)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req)


class JsonServer:
    """Sends requests to one server. Several threads may use it."""

    def __init__(self, config: ServerConfig, *, first_pause_s: float = _FIRST_PAUSE_S):
        self._config = config
        self._url = config.url.rstrip("/").removesuffix("/v1")
        self._first_pause_s = first_pause_s
        self._opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler)

    def check_reachable(self, *, wait: bool = True) -> None:
        """Raises `ConfigError` if no server answers, it is not ready, or it refuses the API key.

        The server may not know the request: small servers often answer only `POST`.

        Args:
            wait: until a server is ready, as for every request. Otherwise it is asked once, and must answer soon.
        """
        if not wait:
            soon = replace(self._config, num_retries=0, timeout_s=min(self._config.timeout_s, _CHECK_TIMEOUT_S))
            JsonServer(soon).check_reachable()
            return

        def ask() -> None:
            try:
                self._attempt(_CHECK_PATH, None, lambda answer: None)
            except RefusedError as error:
                if error.code in _NO_ACCESS:
                    raise
            except _NotReadyError as error:
                if error.code is None or error.code in _NOT_READY:
                    raise

        self._repeated(_CHECK_PATH, ask)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends a JSON object, and returns the JSON answer.

        Raises:
            ConfigError: the server refuses the request, or no attempt was answered.
        """
        return self._repeated(path, lambda: self._attempt(path, body, self._json))

    def _repeated(self, path: str, attempt: Callable[[], T]) -> T:
        pause, begin, problem = self._first_pause_s, time.monotonic(), None
        for number in range(self._config.num_retries + 1):
            try:
                return attempt()
            except _NotReadyError as error:
                problem = error
            if number < self._config.num_retries:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise ConfigError(
            f"the server at {self._url}{path} gave no answer: {problem}. {self._config.num_retries + 1} attempts in"
            f" {time.monotonic() - begin:.0f} s. Start it, or correct url, timeout_s or num_retries"
        )

    def _attempt(self, path: str, body: Mapping[str, Any] | None, take: Callable[[http.client.HTTPResponse], T]) -> T:
        """Sends one request. Returns what `take` makes of the answer."""
        headers = {"Content-Type": "application/json"}
        if self._config.api_key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self._config.api_key_variable]}"
        content, method = (None, "GET") if body is None else (json.dumps(body).encode(), "POST")
        request = urllib.request.Request(self._url + path, content, headers, method=method)
        try:
            with self._opener.open(request, timeout=self._config.timeout_s) as answer:
                return take(answer)
        except urllib.error.HTTPError as error:
            message = _message(error)
            if error.code >= 500 or error.code in _BUSY:
                raise _NotReadyError(f"status {error.code} {message}".strip(), error.code) from error
            refused = f"the server at {self._url}{path} refuses the request: {error.code} {message}"
            raise RefusedError(error.code, refused) from error
        except TimeoutError as error:  # not while it connected, which is a `URLError`
            raise ConfigError(
                f"the server at {self._url}{path} gave no answer: timed out after timeout_s: {self._config.timeout_s:g}."
                " Look at what it does, or raise timeout_s"
            ) from error
        except (OSError, http.client.HTTPException) as error:  # no connection, or one that was closed
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise _NotReadyError(str(reason) or type(reason).__name__) from error
        except ValueError as error:  # of the name of the machine, or of headers that are no HTTP
            raise ConfigError(
                f"the server at {self._url}{path} cannot be asked: {error}. Correct url, or look at what answers there"
            ) from error

    def _json(self, answer: http.client.HTTPResponse) -> Any:
        content = self._read(answer)
        try:
            return json.loads(content) if content.strip() else None
        except (ValueError, RecursionError) as error:
            raise _NotReadyError(f"the answer is no JSON: {content[:_SHOWN].decode(errors='replace')}") from error

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        """The whole answer. The timeout of a socket is for each of its pieces, so their sum is limited here."""
        deadline, pieces = time.monotonic() + self._config.timeout_s, []
        while piece := answer.read1(_CHUNK_BYTES):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise TimeoutError
        content = b"".join(pieces)
        expected = answer.getheader("Content-Length")
        if expected is not None and len(content) < int(expected):
            raise http.client.IncompleteRead(content, int(expected) - len(content))
        return content
