"""Requests to a service that may be slow, busy or gone: time-outs, and attempts with growing pauses."""

import email.utils
import functools
import json
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult, urlsplit

from grpo_core.errors import InputError
from grpo_core.rewards.remote.deadline import Watch
from grpo_core.rewards.settings import check_integer, check_positive

if TYPE_CHECKING:
    import httpx
    import tenacity

MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 300.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Not the module's shared generator, whose state belongs to the training.
_JITTER = random.Random()


class ServiceFailure(Exception):
    """A service gave no answer in all attempts; the message names no address.

    Args:
        reason: what went wrong the last time.
        retry_after_s: how long the service asked to be left alone; None where it did not.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        self.reason, self.retry_after_s = reason, retry_after_s
        super().__init__(reason)

    def __reduce__(self) -> tuple[type["ServiceFailure"], tuple[str, float | None]]:
        return type(self), (self.reason, self.retry_after_s)


@dataclass(frozen=True)
class Service:
    """Where a service is and how patiently it is asked.

    Attributes:
        reward: the reward that asks, for messages.
        url: http or https, without a trailing slash.
        timeout_s: of one attempt, in seconds, from connecting to the last byte.
        attempts: in all, the first included.
        backoff_s: pause before the second attempt; it doubles with each further one, up to MAX_PAUSE_S, and is cut by
            up to half at random. A ``Retry-After`` of the service counts instead where it is longer.
        token_env: environment variable that holds a bearer token; None to send none.
    """

    reward: str
    url: str
    timeout_s: float = 60.0
    attempts: int = 5
    backoff_s: float = 0.5
    token_env: str | None = None

    def check(self) -> None:
        """Refuse settings that will not do.

        Raises:
            InputError: the first of them.
        """
        _check_url(f"rewards.{self.reward}.url", self.url)
        check_positive(f"rewards.{self.reward}.timeout_s", self.timeout_s, "seconds")
        check_integer(f"rewards.{self.reward}.attempts", self.attempts, 1, 100)
        check_positive(f"rewards.{self.reward}.backoff_s", self.backoff_s, "seconds")
        if self.token_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(self.token_env)):
            hint = "Set the name of the environment variable that holds the token, not the token."
            # The value may be the token itself.
            raise InputError(f"rewards.{self.reward}.token_env", "something else than a name", hint)

    def token(self) -> str | None:
        """The bearer token.

        Raises:
            InputError: the variable is not set.
        """
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not re.fullmatch(r"[!-~]+", token):
            state = "holds something else than a token" if token else "is not set"
            hint = f"This environment variable {state}. Set it to the token where the rewards are computed."
            raise InputError(f"rewards.{self.reward}.token_env", self.token_env, hint)
        return token

    def get(self, path: str) -> object:
        """The JSON that a GET of this path answers; failures as with :meth:`post`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: bytes) -> object:
        """The JSON that a POST of this JSON answers.

        Raises:
            ServiceFailure: no connection, no answer in time, status 429 or 5xx, in every attempt.
            InputError: another status than 200, an answer that is no JSON: these do not go away by waiting.
        """
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: bytes | None) -> object:
        import httpx
        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=self._pause,
            retry=tenacity.retry_if_exception_type(ServiceFailure),
            reraise=True,
        )
        # A proxy of the environment cannot reach this machine's own loopback.
        trust_env = urlsplit(self.url).hostname not in _LOOPBACK
        try:
            with httpx.Client(
                timeout=self.timeout_s,
                trust_env=trust_env,
                headers=self._headers(),
                verify=_certificates(),
                # The watch over an attempt's time sees a connection when it is made.
                limits=httpx.Limits(max_keepalive_connections=0),
            ) as client:
                return retrying(self._attempt, client, method, self.url + path, body)
        except ServiceFailure as failure:
            tries = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
            raise ServiceFailure(f"{failure.reason}, after {tries}") from failure

    def _headers(self) -> dict[str, str]:
        token = self.token()
        return {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})

    def _pause(self, state: "tenacity.RetryCallState") -> float:
        failure = state.outcome.exception() if state.outcome is not None else None
        requested = failure.retry_after_s if isinstance(failure, ServiceFailure) else None
        own = min(self.backoff_s * 2.0 ** (state.attempt_number - 1), MAX_PAUSE_S) * _JITTER.uniform(0.5, 1.0)
        return max(own, min(requested or 0.0, MAX_RETRY_AFTER_S))

    def _attempt(self, client: "httpx.Client", method: str, url: str, body: bytes | None) -> object:
        import httpx

        late = ServiceFailure(f"the service did not answer within {self.timeout_s:g} s")
        with Watch(self.timeout_s) as watch:
            try:
                with client.stream(method, url, content=body, extensions={"trace": watch.trace}) as response:
                    content = self._read(response, url)
            except (httpx.TransportError, httpx.DecodingError) as error:
                if watch.passed or isinstance(error, httpx.TimeoutException):
                    raise late from error
                raise ServiceFailure(f"the service could not be reached ({type(error).__name__})") from error
        if watch.passed:
            # An answer of no declared length looks whole wherever it was cut off.
            raise late
        if response.status_code == 429 or response.status_code >= 500:
            wait_s = _retry_after(response.headers.get("Retry-After"))
            raise ServiceFailure(f"the service answered with status {response.status_code}", wait_s)
        if response.status_code != 200:
            raise self._refused(url, response.status_code, content)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            hint = f"The answer is no JSON. Set `url` to a service of the kind that rewards.{self.reward} asks."
            raise InputError(f"{method} {url}", self._without_token(_start(content)), hint) from error

    def _read(self, response: "httpx.Response", url: str) -> bytes:
        content = bytearray()
        for part in response.iter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise InputError(url, f"over {MAX_ANSWER_BYTES} bytes", "No answer is that long. Correct `url`.")
        return bytes(content)

    def _refused(self, url: str, status: int, content: bytes) -> InputError:
        hints = {
            401: "Set `token_env` to the environment variable that holds a token which the service knows.",
            403: "Set `token_env` to the environment variable that holds a token which may do this.",
            404: "Correct `url`, and the name that is asked for there.",
            413: "Send less at once: a smaller `batch_size`.",
        }
        hint = hints.get(status, "Correct the reward's settings, or what is sent.")
        said = self._without_token(_message(content))
        return InputError(url, f"status {status}", f"The service says: {said}. {hint}")

    def _without_token(self, said: str) -> str:
        """What a service says, for people and logs; some repeat the token that they were sent."""
        token = self.token()
        return said if token is None else said.replace(token, "***")


def ask_side_by_side(ask: Callable[[_Item], _Result], items: Sequence[_Item], concurrency: int) -> list[_Result]:
    """The answers in the order of the items, at most `concurrency` asked for at a time.

    What one raises is raised here; those that have not begun by then are not asked for.
    """
    if concurrency == 1 or len(items) <= 1:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(min(concurrency, len(items))) as pool:
        answers = [pool.submit(ask, item) for item in items]
        try:
            return [answer.result() for answer in answers]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@functools.lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """Those that servers are checked against; reading them takes longer than most answers."""
    import httpx

    return httpx.create_ssl_context()


def _check_url(place: str, url: object) -> None:
    parts = _split(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(place, url, "Set an address such as http://127.0.0.1:8600.")
    if parts.username is not None or parts.password is not None:
        hint = "Put the secret into an environment variable and set `token_env` to its name."
        raise InputError(place, f"{parts.scheme}://...@{parts.hostname}", hint)


def _split(url: str) -> SplitResult | None:
    """The parts of an address that the client would take; None of another."""
    try:
        parts = urlsplit(url)
        sound = parts.port != 0 and (parts.hostname or "").encode("idna") and not re.search(r"[\s\x00-\x1f\x7f]", url)
    except ValueError:
        return None
    return parts if sound else None


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as such or as a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _message(content: bytes) -> str:
    """What the body of a refusal says, without the JSON around it."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return _start(content) or "nothing"
    while isinstance(said, Mapping):
        said = next((said[key] for key in ("error", "detail", "message") if key in said), str(dict(said)))
    return str(said)[:300]


def _start(content: bytes) -> str:
    return " ".join(content[:300].decode(errors="replace").split())
