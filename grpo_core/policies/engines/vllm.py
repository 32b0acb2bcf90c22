"""vLLM servers as an engine: a request for each row, with its own seed.

Rows without a usable answer are requested again with the same seeds, from another server where there is one. What a
server would refuse again is an error at once.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_core.policies.causal_lm.written import SamplingRule
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.engines.settings import Progress
from grpo_core.policies.engines.vllm_requests import (
    Completion,
    Request,
    ServedPrompt,
    UnusableAnswerError,
    ask,
    completion_of,
    end_of,
    request_of,
    served_prompts,
)
from grpo_core.policies.engines.vllm_server import Adapter, Server, UnknownAdapterError
from grpo_core.rollouts.actions import Sources, TokenBatch, TokenSupport
from grpo_core.rollouts.records import SampledTokens
from grpo_core.services import ServiceError, pause_s, run_awaitable

ATTEMPTS = 5
BACKOFF_S = 0.5


class EngineError(ServiceError):
    """Servers gave no usable answer for some rows, in every attempt; another start of the stage may succeed."""


@dataclass(frozen=True)
class _Row:
    """One completion to be sampled: its number, its prompt's number, and its seed."""

    place: int
    prompt: int
    seed: int


@dataclass(frozen=True)
class _Job:
    """What the rows of a call have in common, and the completions that were found, by the numbers of their rows."""

    prompts: Mapping[int, ServedPrompt]
    rule: SamplingRule
    found: dict[int, Completion] = field(default_factory=dict)


@dataclass
class VllmEngine:
    """Samples completions from vLLM servers, as `sample_completions` does from a model.

    `servers` returns those to ask, started again if this process started them and they have ended, for `concurrency`
    rows each at a time. They answer with the adapter, or their base model.
    """

    servers: Callable[[], Sequence[Server]]
    adapter: Adapter | None
    concurrency: int
    on_progress: Progress = lambda rows: None

    def __call__(
        self,
        encoded: EncodedPrompts,
        prompts: tuple[str, ...],
        rows: Int[Tensor, " rows"],
        rule: SamplingRule,
        seeds: Sequence[int],
        sources: Sources | None = None,
    ) -> SampledTokens:
        """Sample one completion per row, each from its own seed, all rows at a time; arguments of `sample_completions`.

        Raises:
            EngineError: some rows have no usable answer after several attempts.
            InputError: a server refuses a request, or answers for another model, prompt or adapter.
        """
        numbers = rows.tolist()
        requested = [_Row(place, *each) for place, each in enumerate(zip(numbers, seeds, strict=True))]
        found = self._complete(_Job(served_prompts(encoded, numbers, sources), rule), requested)
        completions = [found[each.place] for each in requested]
        return as_sampled_tokens(completions, prompts, encoded.lengths[rows], rule, sources)

    def _complete(self, job: _Job, requested: Sequence[_Row]) -> dict[int, Completion]:
        asked: Sequence[Server] = ()
        reasons: list[str] = []
        for attempt in range(1, ATTEMPTS + 1):
            missing = [row for row in requested if row.place not in job.found]
            asked = self.servers()
            try:
                reasons = run_awaitable(self._attempt(job, missing, asked, attempt))
            except ExceptionGroup as failures:
                raise _first(failures) from failures
            if len(job.found) == len(requested):
                return job.found
        named = ", ".join(server.address for server in asked)
        why = Counter(reasons).most_common(1)[0][0]
        raise EngineError(
            f"vLLM at {named}: {len(requested) - len(job.found)} of {len(requested)} rows have no answer after "
            f"{ATTEMPTS} attempts; {why}"
        )

    async def _attempt(self, job: _Job, missing: Sequence[_Row], servers: Sequence[Server], attempt: int) -> list[str]:
        """Ask for the missing rows once, and return why some are still missing; rows of a prompt go to one server."""
        if attempt > 1:
            await asyncio.sleep(pause_s(attempt - 1, BACKOFF_S))
        reasons: list[str] = []

        async def ask(index: int, server: Server) -> None:
            # After a failure the next server is asked.
            own = [row for row in missing if (row.prompt + attempt - 1) % len(servers) == index]
            if own:
                reasons.extend(await self._ask_server(job, server, own))

        async with asyncio.TaskGroup() as group:
            for index, server in enumerate(servers):
                group.create_task(ask(index, server))
        return reasons

    async def _ask_server(self, job: _Job, server: Server, rows: Sequence[_Row]) -> list[str]:
        """Ask one server for rows, and return why some have no answer."""
        reasons: list[str] = []
        limit = asyncio.Semaphore(self.concurrency)
        async with server.service.client(self.concurrency) as client:
            try:
                if self.adapter is not None:
                    await server.load(self.adapter, client)
            except ServiceError as failure:
                return [str(failure)]

            async def ask(row: _Row) -> None:
                async with limit:
                    try:
                        job.found[row.place] = await self._ask(job, server, row, client)
                    except (ServiceError, UnusableAnswerError) as failure:
                        reasons.append(str(failure))
                    else:
                        self.on_progress(len(job.found))

            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(ask(row))
        return reasons

    async def _ask(self, job: _Job, server: Server, row: _Row, client: httpx.AsyncClient) -> Completion:
        name = server.model if self.adapter is None else self.adapter.name
        request = request_of(name, job.prompts[row.prompt], row.seed, job.rule)
        completion = await self._completion(job, server, request, client)
        if completion is None:
            # The server's text has a stop text that the row's ids do not complete by our rule: let it go on.
            completion = await self._completion(job, server, request.without_stops(), client)
        assert completion is not None, "only stop texts end a row early"
        return completion

    async def _completion(
        self, job: _Job, server: Server, request: Request, client: httpx.AsyncClient
    ) -> Completion | None:
        try:
            return completion_of(await ask(server, request, client), request, job.rule)
        except UnknownAdapterError:
            # A server that was started again has none, and another process may have unloaded it.
            if request.model in server.loaded:
                server.loaded.remove(request.model)
            raise


def as_sampled_tokens(
    completions: Sequence[Completion],
    prompts: tuple[str, ...],
    prompt_lengths: Int[Tensor, " rows"],
    rule: SamplingRule,
    sources: Sources | None,
) -> SampledTokens:
    """Return completions as the policy's own sampling does: cut where the rule ends them, padded on the right."""
    ends = [end_of(rule, each.token_ids) for each in completions]
    lengths = torch.tensor([end or len(each.token_ids) for end, each in zip(ends, completions, strict=True)])
    ids = _padded([each.token_ids for each in completions], lengths)
    logprobs = _padded([each.logprobs for each in completions], lengths)
    mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(-1)
    support = None
    if rule.truncation.truncates:
        kept = [(each.support or ())[:length] for each, length in zip(completions, lengths.tolist(), strict=True)]
        counts = _padded([[len(options) for options in row] for row in kept], lengths)
        entries = [token for row in kept for options in row for token in options]
        support = TokenSupport(torch.tensor(entries, dtype=torch.int32), counts)
    tokens = TokenBatch(prompts, ids, mask, rule.temperature, support, sources=sources)
    finished = torch.tensor([end is not None for end in ends])
    return SampledTokens(tokens, logprobs, finished, rule.max_tokens, prompt_lengths.cpu())


def _padded(rows: Sequence[Sequence[float]], lengths: Int[Tensor, " rows"]) -> Shaped[Tensor, "rows time"]:
    cut = [torch.tensor(row[:length]) for row, length in zip(rows, lengths.tolist(), strict=True)]
    return pad_sequence(cut, batch_first=True)


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of tasks that were cancelled together."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
