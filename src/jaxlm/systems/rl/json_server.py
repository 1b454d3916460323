"""A client of inference servers (vLLM, SGLang): JSON over HTTP, with timeouts, and retries while a server is not ready."""

import json
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, Seconds
from jaxlm.core.safe_io import largest

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

_CHECK_PATH = "/v1/models"  # both kinds of server have it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_CONNECT_S = 10.0  # a machine that is down answers nothing at all
_CHECK_TIMEOUT_S = 10.0
_NO_ACCESS = (401, 403)
_BUSY = (408, 425, 429)  # and 500 and above: the same request may succeed later
_NOT_READY = (*_BUSY, 502, 503, 504)  # what a server, or a proxy before it, answers while it starts
_MESSAGE_BYTES = 1 << 20
_SHOWN = 300  # characters of a server's message


@dataclass(frozen=True)
class ServerConfig:
    """Sets how to reach an inference server.

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


class JsonServer:
    """Sends requests to one server, and follows no redirect: the API key is for this server. Several threads may use it."""

    def __init__(self, config: ServerConfig, *, first_pause_s: float = _FIRST_PAUSE_S):
        self._config = config
        self._url = config.url.rstrip("/").removesuffix("/v1")
        self._first_pause_s = first_pause_s
        import httpx2

        limits = httpx2.Limits(max_keepalive_connections=0)  # a server may close one that is kept just as it is used
        timeout = httpx2.Timeout(config.timeout_s, connect=min(config.timeout_s, _CONNECT_S), pool=None)
        self._client = httpx2.Client(limits=limits, timeout=timeout, follow_redirects=False)

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
                if error.code in _NO_ACCESS or error.code < 400:  # a redirect
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

    def _attempt(self, path: str, body: Mapping[str, Any] | None, take: Callable[["httpx2.Response"], T]) -> T:
        """Sends one request. Returns what `take` makes of the answer."""
        import httpx2

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._config.api_key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self._config.api_key_variable]}"
        content, method = (None, "GET") if body is None else (json.dumps(body).encode(), "POST")
        try:
            with self._client.stream(method, self._url + path, content=content, headers=headers) as answer:
                if answer.is_success:
                    return take(answer)
                code = answer.status_code
                message = self._read(answer, _MESSAGE_BYTES).decode(errors="replace").strip()[:_SHOWN]
        except (httpx2.InvalidURL, httpx2.LocalProtocolError, ValueError) as error:
            # Neither the message of LocalProtocolError, which has the API key, nor a traceback that has it.
            reason = error if not isinstance(error, httpx2.LocalProtocolError) else "no header can have this API key"
            raise ConfigError(
                f"the server at {self._url}{path} cannot be asked: {reason}. Correct url or key"
            ) from None
        except httpx2.ConnectTimeout as error:
            raise _NotReadyError("no connection: timed out") from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise ConfigError(
                f"the server at {self._url}{path} gave no answer: timed out after timeout_s: {self._config.timeout_s:g}."
                " Look at what it does, or raise timeout_s"
            ) from error
        except httpx2.TransportError as error:  # no connection, or one that was closed
            raise _NotReadyError(str(error) or type(error).__name__) from error
        if code >= 500 or code in _BUSY:
            raise _NotReadyError(f"status {code} {message}".strip(), code)
        advice = (
            f": it redirects to {to}. Set url to the server itself" if (to := answer.headers.get("Location")) else ""
        )
        raise RefusedError(code, f"the server at {self._url}{path} refuses the request: {code} {message}{advice}")

    def _json(self, answer: "httpx2.Response") -> Any:
        content = self._read(answer, largest())
        try:
            return json.loads(content) if content.strip() else None
        except (ValueError, RecursionError) as error:
            raise _NotReadyError(f"the answer is no JSON: {content[:_SHOWN].decode(errors='replace')}") from error

    def _read(self, answer: "httpx2.Response", limit: int) -> bytes:
        """The whole answer. The timeout is for each of its pieces, so their sum is limited here, and so is their size."""
        deadline, content = time.monotonic() + self._config.timeout_s, bytearray()
        for piece in answer.iter_raw():
            content += piece
            if len(content) > limit:
                raise RefusedError(answer.status_code, f"the answer of {answer.url} has more than {limit:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        return bytes(content)
