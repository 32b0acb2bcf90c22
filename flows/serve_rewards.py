"""Serve the project's rewards over the protocol of docs/remote_rewards.md."""

import hashlib
import hmac
import json
import logging
import math
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from grpo_core.errors import InputError, raise_all
from grpo_core.rewards.remote import wire
from grpo_core.rewards.remote.http import LOOPBACK, read_token
from grpo_core.rewards.reward import Reward, ScoringBatch, provenance_of, score_samples

MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_REQUEST_PIXELS = 16 * wire.MAX_PIXELS
"""Pixels of all images of a request together: 256 of 1024x1024."""

MAX_REQUESTS = 16
"""Requests that are processed at a time; further ones are refused with status 429."""

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class RewardService:
    """Answers the requests of a server.

    Attributes:
        rewards: the rewards by their names in requests.
        token: the bearer token of every request; None to require none.
        concurrency: batches scored at a time, each in a thread.
        max_requests: requests that are processed at a time.
        max_body_bytes: largest body of a request.
        max_pixels: pixels of all images of a request together, which its bytes do not bound.

    Raises:
        InputError: a weight file is missing or not the right one.
    """

    rewards: Mapping[str, Reward]
    token: str | None = None
    _: KW_ONLY
    concurrency: int = 2
    max_requests: int = MAX_REQUESTS
    max_body_bytes: int = MAX_BODY_BYTES
    max_pixels: int = MAX_REQUEST_PIXELS

    def __post_init__(self) -> None:
        self._described = {name: describe_reward(name, reward) for name, reward in self.rewards.items()}
        self._threads = anyio.CapacityLimiter(self.concurrency)
        self._pending = 0

    async def describe(self, request: Request) -> JSONResponse:
        """Answer GET /v1/describe."""
        self._check_token(request)
        rewards = [reward.model_dump() for reward in self._described.values()]
        return JSONResponse({"protocol": wire.PROTOCOL, "rewards": rewards})

    async def score(self, request: Request) -> JSONResponse:
        """Answer POST /v1/score."""
        if self._pending >= self.max_requests:
            raise HTTPException(429, f"{self._pending} requests are waiting already", {"Retry-After": "1"})
        self._pending += 1
        try:
            self._check_token(request)
            body = await self._body(request)
            # An answer that no client waits for must not occupy a thread.
            content = await anyio.to_thread.run_sync(self._answer, body, limiter=self._threads, abandon_on_cancel=True)
            return JSONResponse(content)
        except HTTPException:
            raise
        except Exception as error:
            _LOGGER.exception("a batch could not be scored")
            raise HTTPException(500, f"the reward raised {type(error).__name__}; the server's log says more") from error
        finally:
            self._pending -= 1

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise HTTPException(401, "this server requires a bearer token, and the request has none or another")

    async def _body(self, request: Request) -> bytes:
        # A page in a browser can post plain text to any address, but JSON only with the server's consent.
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "send Content-Type: application/json")
        declared = request.headers.get("Content-Length", "0")
        content = bytearray()
        too_large = HTTPException(413, f"the request is larger than {self.max_body_bytes} bytes")
        if not declared.isdigit() or int(declared) > self.max_body_bytes:
            raise too_large
        async for part in request.stream():
            content += part
            if len(content) > self.max_body_bytes:
                raise too_large
        return bytes(content)

    def _answer(self, body: bytes) -> dict[str, object]:
        try:
            requested = wire.ScoreRequest.model_validate_json(body)
        except ValidationError as error:
            raise HTTPException(422, wire.first_error(error)) from error
        if requested.reward not in self.rewards:
            raise HTTPException(
                404, f"no reward {requested.reward!r}; this server has {', '.join(sorted(self.rewards))}"
            )
        reward, described = self.rewards[requested.reward], self._described[requested.reward]
        try:
            pixels = wire.declared_pixels(requested)
            if pixels > self.max_pixels:
                raise HTTPException(413, f"the images have {pixels} pixels together, more than {self.max_pixels}")
            batch = wire.read_batch(requested)
            _refuse_unfit(reward, batch)
            scores = score_samples(reward, batch)
        except InputError as error:
            raise HTTPException(422, str(error)) from error
        return wire.write_answer(described, batch.sample_ids, scores)


def describe_reward(name: str, reward: Reward) -> wire.RewardDescription:
    """Describe a reward; the version follows from everything in its provenance.

    Raises:
        InputError: a weight file is missing or not the right one.
    """
    provenance = provenance_of(reward)
    canonical = json.dumps(provenance, sort_keys=True, allow_nan=False)
    return wire.RewardDescription(
        name=name,
        version=f"{reward.version}+{hashlib.sha256(canonical.encode()).hexdigest()[:16]}",
        media=list(reward.media),
        needs_target=reward.needs_target,
        needs_group=reward.needs_group,
        needs_column=reward.needs_column,
        min_side=reward.min_side,
        max_aspect=None if math.isinf(reward.max_aspect) else reward.max_aspect,
        provenance=provenance,
    )


def create_app(rewards: Mapping[str, Reward], token: str | None = None, **limits: int) -> FastAPI:
    """Make the application of a :class:`RewardService` with these limits."""
    service = RewardService(rewards, token, **limits)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers={HTTPException: _refuse})
    app.add_route(wire.DESCRIBE_PATH, service.describe, methods=["GET"])
    app.add_route(wire.SCORE_PATH, service.score, methods=["POST"])
    return app


def serve(
    rewards: Mapping[str, Reward],
    host: str = "127.0.0.1",
    port: int = 8600,
    token_env: str | None = None,
    *,
    concurrency: int = 2,
    report_progress: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C; batches that are being scored are finished, for up to ten seconds.

    Args:
        host: address to listen on; one that other machines can reach requires a token.
        port: 0 for any that is free.
        token_env: environment variable with the token; None to require none.
        report_progress: called with one line, the server's address, when requests are accepted.

    Raises:
        InputError: rewards that are not ready, each problem with its hint; a required token is missing; an address
            that cannot be listened on.
    """
    raise_all(
        InputError(f"rewards.{name}", "not ready", p) for name, reward in rewards.items() for p in reward.preflight()
    )
    if token_env is None and host not in LOOPBACK:
        hint = "Other machines can reach this address. Name the environment variable of a token, or use 127.0.0.1."
        raise InputError("host", host, hint)
    token = read_token("--token-env", token_env)
    app = create_app(rewards, token, concurrency=concurrency)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=10, lifespan="off")
    with _listening(host, port) as listener:
        report_progress(f"serving {', '.join(rewards)} on {_address(listener)}")
        _run(uvicorn.Server(config), listener)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise InputError("host and port", f"{host}:{port}", f"Choose others: {error}.") from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    # When uvicorn has ended it raises the signal that ended it once more, for the previous handlers.
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _refuse_unfit(reward: Reward, batch: ScoringBatch) -> None:
    kind = "text" if batch.completions else "image"
    if kind not in reward.media:
        raise HTTPException(422, f"this reward scores {' and '.join(reward.media)}s, and these samples are {kind}s")
    if reward.needs_group and not batch.group_ids:
        raise HTTPException(422, "this reward compares siblings, and these samples come without group_id")


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that is refused, in the protocol's form."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
