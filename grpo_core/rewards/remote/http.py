"""Rewards that a service computes: the settings of its requests, retries, and several requests side by side."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Positive, Reward, problems_of
from grpo_core.rewards.scoring_batch import ScoringError
from grpo_core.services import (
    RefusedRequestError,
    Service,
    ServiceError,
    check_token_env,
    check_url,
    pause_s,
    read_token,
    run_awaitable,
)
from grpo_core.uses import Uses

if TYPE_CHECKING:
    import httpx
    import tenacity

PREFLIGHT_TIMEOUT_S = 5.0
Request = Callable[..., object]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, config=STRICT)
class ServiceReward(Reward):
    """A reward that a service computes.

    Attributes:
        url: http or https.
        timeout_s: of one attempt, in seconds, from connecting to the last byte.
        attempts: for each request, the first included.
        backoff_s: pause before the second attempt; it doubles with each further one, up to 30 seconds, less up to half
            at random, or lasts as long as a ``Retry-After``.
        concurrency: requests at a time.
        token_env: environment variable with a bearer token; None to send none.
    """

    url: Annotated[str, AfterValidator(check_url), Uses.ADDRESS] = ""
    timeout_s: Positive = 60.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    backoff_s: Positive = 0.5
    concurrency: Annotated[int, Field(ge=1, le=256)] = 2
    token_env: Annotated[str, AfterValidator(check_token_env), Uses.VARIABLE] | None = None

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
        """Ask the service whether it has what the settings name; ScoringError without an answer, InputError if not."""

    @contextmanager
    def connected(self) -> Iterator[Request]:
        """Yield a function that sends a request to a path: a POST of a JSON, or a GET without one; it returns the JSON.

        Requests of the block share connections, which take longer to open than many answers. The function raises
        ScoringError without an answer in any attempt; InputError for another status (its value), or no JSON.
        """
        user = f"rewards.{self.name}"
        service = Service(self.address, self.timeout_s, read_token(f"{user}.token_env", self.token_env), user)
        client = service.client(self.concurrency)
        try:
            yield lambda path, body=None: self._request(service, client, path, body)
        finally:
            run_awaitable(client.aclose())

    def _request(self, service: Service, client: "httpx.AsyncClient", path: str, body: bytes | None) -> object:
        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=self._pause,
            retry=tenacity.retry_if_exception_type(ServiceError),
            reraise=True,
        )
        try:
            return retrying(lambda: run_awaitable(service.request(path, body, client)))
        except ServiceError as failure:
            tries = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
            raise ScoringError(f"{failure}, after {tries}") from failure
        except RefusedRequestError as refusal:
            raise _refused(self.address + path, refusal) from refusal

    def _pause(self, state: "tenacity.RetryCallState") -> float:
        failure = state.outcome.exception() if state.outcome is not None else None
        requested = failure.retry_after_s if isinstance(failure, ServiceError) else None
        return pause_s(state.attempt_number, self.backoff_s, requested)


_HINTS = {
    401: "Set `token_env` to the environment variable with a token that the service accepts.",
    403: "Set `token_env` to the environment variable with a token that has this permission.",
    404: "Correct `url`, and the name that is requested there.",
    413: "Send less per request: a smaller `batch_size`.",
}


def _refused(url: str, refusal: RefusedRequestError) -> InputError:
    hint = _HINTS.get(refusal.status, "Correct the reward's settings, or the request.")
    return InputError(url, f"status {refusal.status}", f"The service says: {refusal.message}. {hint}")


def ask_side_by_side(ask: Callable[[_Item], _Result], items: Sequence[_Item], concurrency: int) -> list[_Result]:
    """Ask for each item, at most `concurrency` at a time; return the answers in order. An exception ends the rest."""
    if concurrency == 1:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(concurrency) as pool:
        # An iterator of results that ends early cancels what has not begun.
        return list(pool.map(ask, items))
