"""Requests to a service that may be slow, busy or gone: time limits, and retries with growing pauses."""

import dataclasses
import email.utils
import functools
import json
import os
import random
import re
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar
from urllib.parse import urlsplit

import anyio
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from grpo_core.addresses import hide_secrets
from grpo_core.errors import InputError
from grpo_core.rewards.functions import run_awaitable
from grpo_core.rewards.reward import STRICT, Positive, Reward, ScoringError, problems_of

if TYPE_CHECKING:
    import httpx
    import tenacity

PREFLIGHT_TIMEOUT_S = 5.0
MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 300.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Not the shared generator, whose state belongs to the training.
_JITTER = random.Random()


def _check_url(url: str) -> str:
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


def _check_token_env(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # The value may be the token.
        hint = "Set the name of the environment variable with the token, not the token."
        raise InputError("", "not the name of a variable", hint)
    return name


@dataclass(frozen=True, config=STRICT)
class ServiceReward(Reward):
    """A reward that a service computes.

    Attributes:
        url: http or https.
        timeout_s: of one attempt, in seconds, from connecting to the last byte.
        attempts: for each request, the first included.
        backoff_s: pause before the second attempt; it doubles with each further one, up to MAX_PAUSE_S, and is cut by
            up to half at random. A longer ``Retry-After`` of the service counts instead.
        concurrency: requests at a time.
        token_env: environment variable with a bearer token; None to send none.
    """

    url: Annotated[str, AfterValidator(_check_url)] = ""
    timeout_s: Positive = 60.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    backoff_s: Positive = 0.5
    concurrency: Annotated[int, Field(ge=1, le=256)] = 2
    token_env: Annotated[str, AfterValidator(_check_token_env)] | None = None

    free_settings: ClassVar[frozenset[str]] = frozenset(
        {"url", "timeout_s", "attempts", "backoff_s", "concurrency", "token_env"}
    )

    @property
    def address(self) -> str:
        """The URL without a trailing slash."""
        return self.url.rstrip("/")

    def preflight(self) -> Sequence[str]:
        """Report a service that does not answer at once, or does not fit the settings."""
        try:
            return problems_of(dataclasses.replace(self, attempts=1, timeout_s=PREFLIGHT_TIMEOUT_S).check_service)
        except ScoringError as failure:
            hint = f"{failure}. Start the service there, or correct the address."
            return [str(InputError(f"rewards.{self.name}.url", self.url, hint))]

    @abstractmethod
    def check_service(self) -> None:
        """Ask the service whether it has what the settings name.

        Raises:
            ScoringError: it does not answer.
            InputError: it has no such reward or model, or another version of it.
        """

    def request(self, path: str, body: bytes | None = None) -> object:
        """Return the JSON answer to a POST of this JSON, or to a GET where there is none.

        Raises:
            ScoringError: no connection, no answer in time, status 429 or 5xx, in every attempt.
            InputError: another status than 200 (its value is ``status N``), or an answer that is not JSON.
        """
        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=self._pause,
            retry=tenacity.retry_if_exception_type(ScoringError),
            reraise=True,
        )
        try:
            return retrying(lambda: run_awaitable(self._attempt(self.address + path, body)))
        except ScoringError as failure:
            tries = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
            raise ScoringError(f"{failure}, after {tries}") from failure

    def _pause(self, state: "tenacity.RetryCallState") -> float:
        failure = state.outcome.exception() if state.outcome is not None else None
        requested = failure.retry_after_s if isinstance(failure, ScoringError) else None
        own = min(self.backoff_s * 2.0 ** (state.attempt_number - 1), MAX_PAUSE_S) * _JITTER.uniform(0.5, 1.0)
        return max(own, min(requested or 0.0, MAX_RETRY_AFTER_S))

    async def _attempt(self, url: str, body: bytes | None) -> object:
        import httpx

        token, method = self._token(), "GET" if body is None else "POST"
        # httpx's time limit restarts with every byte.
        client = httpx.AsyncClient(
            timeout=None,
            # A proxy of the environment cannot reach this machine's loopback.
            trust_env=urlsplit(self.url).hostname not in LOOPBACK,
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            verify=_certificates(),
        )
        try:
            with anyio.fail_after(self.timeout_s):
                async with client, client.stream(method, url, content=body) as response:
                    content = await self._read(response, url)
        except TimeoutError as error:
            raise ScoringError(f"the service did not answer within {self.timeout_s:g} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise ScoringError(f"the service could not be reached ({type(error).__name__})") from error
        if response.status_code == 429 or response.status_code >= 500:
            wait_s = _retry_after(response.headers.get("Retry-After", ""))
            # A time limit names itself; other messages differ from one attempt to the next.
            said = f" ({self._without_token(_message(content))})" if response.status_code == 504 else ""
            raise ScoringError(f"the service answered with status {response.status_code}{said}", wait_s)
        if response.status_code != 200:
            raise self._refused(url, response.status_code, content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            hint = f"The answer is not JSON. Set `url` to a service that rewards.{self.name} can use."
            raise InputError(f"{method} {url}", self._without_token(_start(content)), hint) from error

    async def _read(self, response: "httpx.Response", url: str) -> bytes:
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise InputError(url, f"over {MAX_ANSWER_BYTES} bytes", "No answer is that long. Correct `url`.")
        return bytes(content)

    def _token(self) -> str | None:
        return read_token(f"rewards.{self.name}.token_env", self.token_env)

    def _refused(self, url: str, status: int, content: bytes) -> InputError:
        hints = {
            401: "Set `token_env` to the environment variable with a token that the service accepts.",
            403: "Set `token_env` to the environment variable with a token that has this permission.",
            404: "Correct `url`, and the name that is requested there.",
            413: "Send less per request: a smaller `batch_size`.",
        }
        hint = hints.get(status, "Correct the reward's settings, or the request.")
        said = self._without_token(_message(content))
        return InputError(url, f"status {status}", f"The service says: {said}. {hint}")

    def _without_token(self, said: str) -> str:
        """Remove the token from a service's message: some repeat what they were sent."""
        token = self._token()
        return said if token is None else said.replace(token, "***")


def read_token(place: str, token_env: str | None) -> str | None:
    """Read a bearer token from the environment; None where no variable is named.

    Raises:
        InputError: the variable is not set, or contains something else.
    """
    if token_env is None:
        return None
    token = os.environ.get(token_env, "").strip()
    if not re.fullmatch(r"[!-~]+", token):
        state = "is not a token" if token else "is not set"
        hint = f"This environment variable {state}. Set it to the token where the rewards are computed."
        raise InputError(place, token_env, hint)
    return token


def ask_side_by_side(ask: Callable[[_Item], _Result], items: Sequence[_Item], concurrency: int) -> list[_Result]:
    """Ask for each item, at most `concurrency` at a time, and return the answers in order.

    An exception is raised here, and ends those that have not begun.
    """
    if concurrency == 1:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(concurrency) as pool:
        # An iterator of results that ends early cancels what has not begun.
        return list(pool.map(ask, items))


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
