"""Requests to a service that may be slow, busy or gone: addresses, tokens, time limits, retries with growing pauses.

Rewards that a server computes and engines that sample on one use the same requests, and wait for them on one loop.
"""

import asyncio
import atexit
import email.utils
import functools
import json
import os
import random
import re
import ssl
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import anyio

from grpo_core.errors import InputError, hide_secrets

if TYPE_CHECKING:
    import httpx

MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 300.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOO_MANY_REQUESTS, _SERVER_ERROR, _GATEWAY_TIMEOUT, _OK = 429, 500, 504, 200

_Result = TypeVar("_Result")

# Not the shared generator, whose state belongs to the training.
_JITTER = random.Random()


class ServiceError(RuntimeError):
    """A service did not answer, or was busy; another attempt may succeed.

    `retry_after_s` is the waiting time it requested; `said` the message of an answer 5xx, without the sent token.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None, said: str = "") -> None:
        self.retry_after_s, self.said = retry_after_s, said
        super().__init__(reason)


class RefusedRequestError(Exception):
    """A service answered with another HTTP status than 200, and would again; its message is without the sent token."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(f"status {status}: {message}")


def check_url(url: str) -> str:
    """Return an http or https address; InputError if it is none, or has a password."""
    try:
        parts = urlsplit(url)
        # What httpx refuses: port 0, a host that is no name, white space and control characters.
        sound = parts.port != 0 and (parts.hostname or "").encode("idna") and not re.search(r"[\s\x00-\x1f\x7f]", url)
    except ValueError:
        sound = False
    if not sound or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise InputError("", url, "Set an address such as http://127.0.0.1:8600.")
    if parts.username is not None or parts.password is not None:
        hint = "Put the secret into an environment variable and set `token_env` to its name."
        raise InputError("", hide_secrets(url), hint)
    return url


def check_token_env(name: str) -> str:
    """Return the name of an environment variable; InputError if it is none."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # The value may be the token.
        hint = "Set the name of the environment variable with the token, not the token."
        raise InputError("", "not the name of a variable", hint)
    return name


def read_token(place: str, token_env: str | None) -> str | None:
    """Read a bearer token from the environment, None without a variable's name; InputError if it has no token."""
    if token_env is None:
        return None
    token = os.environ.get(token_env, "").strip()
    if not re.fullmatch(r"[!-~]+", token):
        state = "is not a token" if token else "is not set"
        hint = f"This environment variable {state}. Set it to the token where the requests are sent."
        raise InputError(place, token_env, hint)
    return token


def pause_s(attempt: int, backoff_s: float, retry_after_s: float | None = None) -> float:
    """Return the pause after an attempt (from 1), in seconds: doubling, less up to half, or as the service requests."""
    own = min(backoff_s * 2.0 ** (attempt - 1), MAX_PAUSE_S) * _JITTER.uniform(0.5, 1.0)
    return max(own, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def run_awaitable(awaitable: Awaitable[_Result]) -> _Result:
    """Wait for the result from code that is not asynchronous; its exceptions are raised here, an interrupt cancels it.

    One loop serves the whole process, as in TRL's trainer: a client that a user's module keeps open belongs to the
    loop that it was first used on. RuntimeError on the loop's own thread, which would wait for itself.
    """

    async def wait() -> _Result:
        try:
            return await awaitable
        except SystemExit as error:
            # It would end the loop, and every caller would wait for ever.
            raise RuntimeError(f"it called sys.exit({error.code!r})").with_traceback(error.__traceback__) from error

    with _STARTING:
        # A forked process inherits the loop, but not the thread that runs it.
        loop, thread = _running_loop(os.getpid())
    if threading.current_thread() is thread:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise RuntimeError("a coroutine waits for another one that it should await")
    future = asyncio.run_coroutine_threadsafe(wait(), loop)
    try:
        return future.result()
    finally:
        future.cancel()


_STARTING = threading.Lock()


@functools.lru_cache(maxsize=1)
def _running_loop(process: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"awaitables of process {process}", daemon=True)
    thread.start()
    atexit.register(_stop, loop, thread, process)
    return loop, thread


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=1.0)
    if not loop.is_running():
        loop.close()


@dataclass(frozen=True)
class Service:
    """A service at an address without a trailing slash; `user` names who uses it, such as `rewards.judge`.

    Attributes:
        timeout_s: of one request, in seconds, from connecting to the last byte.
        token: bearer token; None to send none.
    """

    address: str
    timeout_s: float
    token: str | None = field(repr=False)
    user: str

    @property
    def port(self) -> int | None:
        """The port of the address; None if it has none."""
        return urlsplit(self.address).port

    def client(self, connections: int = 100) -> "httpx.AsyncClient":
        """Return a client with room for this many connections."""
        import httpx

        return httpx.AsyncClient(
            # httpx's time limit restarts with every byte.
            timeout=None,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            # A proxy of the environment cannot reach this machine's loopback.
            trust_env=urlsplit(self.address).hostname not in LOOPBACK,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {self.token}"} if self.token else {}),
            verify=_certificates(),
        )

    async def request(
        self,
        path: str,
        body: bytes | None = None,
        client: "httpx.AsyncClient | None" = None,
        read: Callable[[bytes], object] = json.loads,
    ) -> object:
        """Return the JSON answer to one POST of this JSON, or to a GET where there is none.

        Args:
            client: of `client`; None: one for this request.
            read: of an answer that is not JSON.

        Raises:
            ServiceError: no connection, no answer in time, status 429 or 5xx.
            RefusedRequestError: another status than 200.
            InputError: an answer that is not JSON, or far too long, or a certificate that is not trusted.
        """
        method, url = "GET" if body is None else "POST", self.address + path
        status, headers, content = await self._answer(method, url, body, client)
        if status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR:
            # A time limit names itself; other messages differ from one attempt to the next.
            said = self._without_token(_message(content))
            reason = f"the service answered with status {status}"
            reason += f" ({said})" if status == _GATEWAY_TIMEOUT else ""
            raise ServiceError(reason, _retry_after(headers.get("Retry-After", "")), said)
        if status != _OK:
            raise RefusedRequestError(status, self._without_token(_message(content)))
        try:
            return read(content)
        except (ValueError, RecursionError) as error:
            hint = f"The answer is not JSON. Set `url` to a service that {self.user} can use."
            raise InputError(f"{method} {url}", self._without_token(_start(content)), hint) from error

    async def _answer(
        self, method: str, url: str, body: bytes | None, client: "httpx.AsyncClient | None"
    ) -> tuple[int, Mapping[str, str], bytes]:
        import httpx

        own = client or self.client()
        try:
            with anyio.fail_after(self.timeout_s):
                async with own.stream(method, url, content=body) as response:
                    return response.status_code, response.headers, await _read(response, url)
        except TimeoutError as error:
            raise ServiceError(f"the service did not answer within {self.timeout_s:g} s") from error
        except httpx.TransportError as error:
            if (reason := _untrusted(error)) is not None:
                hint = (
                    f"Its certificate is not trusted ({reason}). Correct the address, or set the environment variable "
                    "SSL_CERT_FILE to a file with the certificate of its authority."
                )
                raise InputError(f"{self.user}.url", self.address, hint) from error
            raise ServiceError(f"the service could not be reached ({type(error).__name__})") from error
        finally:
            if client is None:
                await own.aclose()

    def _without_token(self, said: str) -> str:
        """Remove the token from a service's message: some repeat what they were sent."""
        return said if self.token is None else said.replace(self.token, "***")


async def _read(response: "httpx.Response", url: str) -> bytes:
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        _refuse_longer(len(content), url)
    return _unpacked(bytes(content), response.headers.get("Content-Encoding", "").strip().lower(), url)


def _refuse_longer(length: int, url: str) -> None:
    if length > MAX_ANSWER_BYTES:
        raise InputError(url, f"over {MAX_ANSWER_BYTES} bytes", "No answer is that long. Correct `url`.")


def _unpacked(content: bytes, encoding: str, url: str) -> bytes:
    """Unpack an answer, at most up to the limit: it was asked for as it is, and some servers pack it all the same."""
    if encoding in ("", "identity"):
        return content
    if encoding not in ("gzip", "x-gzip", "deflate"):
        hint = "It was asked for unpacked, and only gzip or deflate are read. Set the service up so."
        raise InputError(url, f"Content-Encoding {encoding[:80]}", hint)
    # Of deflate some servers leave out the header.
    raw = encoding == "deflate" and content[:1] and content[0] & 15 != zlib.DEFLATED
    try:
        unpacked = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32).decompress(
            content, MAX_ANSWER_BYTES + 1
        )
    except zlib.error as error:
        raise ServiceError(f"the service's answer cannot be unpacked ({error})") from error
    _refuse_longer(len(unpacked), url)
    return unpacked


def _untrusted(error: BaseException | None) -> str | None:
    """Return why a certificate was refused, if that is the cause of an error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


@functools.lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """Read the trusted certificates once: that takes longer than most answers."""
    import httpx

    return httpx.create_ssl_context()


def _retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, section 10.2.3)."""
    if re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _message(content: bytes) -> str:
    """Return the message in the body of a refusal, without the JSON around it."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return _start(content) or "nothing"
    while isinstance(said, Mapping):
        said = next((said[key] for key in ("error", "detail", "message") if key in said), str(dict(said)))
    return str(said)[:300]


def _start(content: bytes) -> str:
    return " ".join(content[:300].decode(errors="replace").split())
