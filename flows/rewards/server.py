"""Serve the project's rewards over the protocol of docs/remote_rewards.md.

A request counts for the limit once it has arrived whole, in a file; a child process then answers it, which is ended
when the time limit passes or the client leaves.
"""

import asyncio
import hmac
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from configs.scoring import RewardSection
from flows.http_server import address_of, listening, local_hosts_only, run_server
from flows.rewards.answers import Answer, RequestLimits, answer_payload, build_rewards, describe_reward
from grpo_core.errors import InputError, raise_all
from grpo_core.rewards.remote import wire
from grpo_core.services import LOOPBACK, read_token
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcess
from tasks.execution.errors import LostStageError, StageTimeoutError

SECONDS_TO_SCORE = 60.0
"""Time limit of a request; `timeout_s` of the reward `remote` has the same default."""

BYTES_PER_SECOND = 100_000
"""Of the body of a request, which has a second more to arrive for each of them."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerLimits:
    """What requests may cost.

    Attributes:
        timeout: seconds that the scoring of a request may take.
        concurrency: requests scored at a time, each in a process that keeps the rewards' models loaded.
        max_requests: requests that have arrived and are not answered; further ones are refused with status 429.
        seconds_to_arrive: for the body of a request, beside its bytes.
    """

    timeout: float = SECONDS_TO_SCORE
    concurrency: int = 2
    max_requests: int = 16
    max_body_bytes: int = 256 * 1024 * 1024
    seconds_to_arrive: float = 10.0
    content: RequestLimits = field(default_factory=RequestLimits)


@dataclass(eq=False)
class RewardService:
    """Answers the requests of a server, which name rewards by their labels and, with a token, have to bear it."""

    rewards: tuple[RewardSection, ...]
    token: str | None = None
    _: KW_ONLY
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        self._described = [describe_reward(name, reward) for name, reward in build_rewards(self.rewards).items()]
        self._children = [
            ChildProcess(child_command("flows.rewards.answers:answering_handler"))
            for _ in range(self.limits.concurrency)
        ]
        self._idle = list(self._children)
        self._threads = ThreadPoolExecutor(self.limits.concurrency, thread_name_prefix="answers")
        self._free = anyio.Semaphore(self.limits.concurrency)
        self._pending = 0

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def describe(self, request: Request) -> JSONResponse:
        """Answer GET /v1/describe."""
        self._check_token(request)
        rewards = [reward.model_dump() for reward in self._described]
        return JSONResponse({"protocol": wire.PROTOCOL, "rewards": rewards})

    async def score(self, request: Request) -> JSONResponse:
        """Answer POST /v1/score."""
        self._check_token(request)
        # A page in a browser can post plain text to any address, but JSON only with the server's consent.
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "send Content-Type: application/json")
        with tempfile.NamedTemporaryFile(prefix="grpo-request-") as body:
            await self._receive(request, body)
            if self._pending >= self.limits.max_requests:
                raise HTTPException(429, f"{self._pending} requests are waiting already", {"Retry-After": "1"})
            self._pending += 1
            try:
                answer = await _unless_client_leaves(request, self._answer(Path(body.name)))
            finally:
                self._pending -= 1
        # Nobody reads the answer to a client that has left.
        status, content = answer or (499, {"error": "the client has left"})
        return JSONResponse(content, status)

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            reason = "this server requires a bearer token, and the request has none or another"
            raise HTTPException(401, reason)

    async def _receive(self, request: Request, file: Any) -> None:
        """Write the body to a file: however many arrive at the same time, none is in memory."""
        limits, received = self.limits, 0
        declared = request.headers.get("Content-Length", "0")
        too_large = HTTPException(413, f"the request is larger than {limits.max_body_bytes} bytes")
        if not (declared.isascii() and declared.isdigit()) or int(declared) > limits.max_body_bytes:
            raise too_large
        begun = anyio.current_time()
        try:
            with anyio.fail_after(limits.seconds_to_arrive) as scope:
                async for part in request.stream():
                    received += len(part)
                    if received > limits.max_body_bytes:
                        raise too_large
                    file.write(part)
                    scope.deadline = begun + limits.seconds_to_arrive + received / BYTES_PER_SECOND
        except TimeoutError as error:
            reason = f"it did not arrive within {limits.seconds_to_arrive:g} s and 1 s per {BYTES_PER_SECOND} B"
            raise HTTPException(408, reason) from error
        file.flush()

    async def _answer(self, body: Path) -> Answer:
        """Have a child answer the request in a file; the child is ended when this is cancelled."""
        payload, timeout = answer_payload(self.rewards, self.limits.content, body), self.limits.timeout
        async with self._free:
            child = self._idle.pop()
            future = self._threads.submit(child.request, "answer", payload, timeout, _ServerLog())
            try:
                status, content = await asyncio.wrap_future(future)
            except StageTimeoutError:
                reason = f"it was not scored within {timeout:g} s, the time limit of this server (--timeout)"
                return 504, {"error": f"{reason}; send fewer or smaller samples"}
            except LostStageError as error:
                _LOGGER.error("a scoring process ended: %s", error)
                return 500, {"error": str(error).partition("\n")[0]}
            except Exception as error:
                _LOGGER.exception("a request could not be answered")
                return 500, {"error": f"{type(error).__name__}; the server's log says more"}
            else:
                return status, content
            finally:
                with anyio.CancelScope(shield=True):
                    # It may still be starting: then there is nothing to end yet.
                    while not future.done():
                        await anyio.to_thread.run_sync(child.end)
                        await anyio.sleep(0.02)
                self._idle.append(child)


class _ServerLog:
    """Writes what a child says to the server's log."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Rewards report no progress."""

    def log(self, line: str) -> None:
        """Write a line."""
        _LOGGER.error(line)


async def _unless_client_leaves(request: Request, answer: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Wait for the answer; cancel it and return None when the client closes its connection."""
    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_client_leaves(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def _client_leaves(request: Request) -> None:
    # The body has been read, so that this is the next thing that a client can do.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    rewards: Sequence[RewardSection], token: str | None = None, limits: ServerLimits | None = None
) -> FastAPI:
    """Make the application of a :class:`RewardService`; its processes end with its lifespan."""
    service = RewardService(tuple(rewards), token, limits=limits or ServerLimits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    handlers: Any = {HTTPException: _refuse}
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers, lifespan=lifespan)
    if token is None:
        # A page of another site whose name leads here may neither ask nor read.
        app.user_middleware.append(local_hosts_only())
    app.add_route(wire.DESCRIBE_PATH, service.describe, methods=["GET"])
    app.add_route(wire.SCORE_PATH, service.score, methods=["POST"])
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def serve(
    rewards: Sequence[RewardSection],
    host: str = "127.0.0.1",
    port: int = 8600,
    token_env: str | None = None,
    *,
    limits: ServerLimits | None = None,
    report_progress: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C; batches that are being scored are finished, for up to ten seconds.

    Args:
        rewards: as in a configuration's `rewards:`; their weights do not count.
        host: address to listen on; one that other machines can reach requires a token.
        port: 0 for any that is free.
        token_env: environment variable with the token; None to require none.
        report_progress: called with one line, the server's address, when requests are accepted.

    Raises:
        InputError: rewards that are not ready, a missing token, or an address that cannot be listened on.
    """
    built = build_rewards(tuple(rewards))
    raise_all(
        InputError(f"rewards.{name}", "not ready", p) for name, reward in built.items() for p in reward.preflight()
    )
    if token_env is None and host not in LOOPBACK:
        hint = "Other machines can reach this address. Name the environment variable of a token, or use 127.0.0.1."
        raise InputError("host", host, hint)
    limits = limits or ServerLimits()
    app = create_app(rewards, read_token("--token-env", token_env), limits)
    try:
        listener = listening(host, port)
    except (OSError, OverflowError) as error:
        raise InputError("host and port", f"{host}:{port}", f"Choose others: {error}.") from error
    with listener:
        address = address_of(listener)
        report_progress(f"serving {', '.join(built)} on {address}, at most {limits.timeout:g} s per request")
        run_server(app, listener)
