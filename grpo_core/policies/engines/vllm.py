"""vLLM servers as an engine: a request per row with the row's own seed.

A server may die, hang or cut an answer: rows without a usable answer are requested again with the same seeds, from
another server where there is one. What a server would refuse again is an error at once.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from jaxtyping import Int
from torch import Tensor

from grpo_core.actions import Sources
from grpo_core.awaitables import run_awaitable
from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.prompts import EncodedPrompts
from grpo_core.policies.causal_lm.sampling_scoring import SamplingRule
from grpo_core.policies.engines.engine import Completion, as_sampled_tokens, end_of, prompt_ids_of
from grpo_core.policies.engines.settings import Progress
from grpo_core.policies.engines.vllm_server import PLACE, Adapter, Server, UnknownAdapterError, completions
from grpo_core.records import SampledTokens
from grpo_core.services import ServiceError, pause_s

ATTEMPTS = 5
BACKOFF_S = 0.5
_LOWEST = -9000.0
"""vLLM returns -9999 in place of minus infinity."""
TIES = 16
"""Ids beyond top_k that are asked for: those as likely as the last of them are kept too."""
_IMPOSSIBLE = 25.0
"""Nats: what happens by chance once in 7e10 iterations."""


class EngineError(ServiceError):
    """Servers gave no usable answer for some rows, in every attempt; another start of the stage may succeed."""


class _UnusableAnswerError(Exception):
    """An answer that cannot be stored; the same request may get another one."""


@dataclass(frozen=True)
class _Row:
    """One completion to be sampled: its number, its prompt's number and ids, and its seed."""

    place: int
    prompt: int
    ids: list[int]
    seed: int


@dataclass
class VllmEngine:
    """An Engine that asks vLLM servers.

    Attributes:
        servers: returns those that are to be asked; one that this process started is started again if it has ended.
        adapter: that they answer with; None: their base model.
        concurrency: rows that a server is asked for at a time.
        on_progress: called with the number of rows that are sampled.
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
        """Sample one completion per row, all rows at a time.

        Raises:
            EngineError: some rows have no usable answer after several attempts.
            InputError: a server refuses a request, or answers for another model, prompt or adapter, or with one seed
                for all rows.
        """
        ids, numbers = prompt_ids_of(encoded), rows.tolist()
        requested = [
            _Row(place, number, ids[number], seed)
            for place, (number, seed) in enumerate(zip(numbers, seeds, strict=True))
        ]
        found = self._complete(requested, rule)
        completions = [found[each.place] for each in requested]
        if surprise_of_copies(numbers, completions) > _IMPOSSIBLE:
            named = ", ".join(server.address for server in self.servers())
            hint = (
                "All rows of a prompt have the same tokens, although each was asked for with its own seed: something "
                "between this machine and the server replaces the seeds, or returns kept answers."
            )
            raise InputError(f"{PLACE}.url", named, hint)
        return as_sampled_tokens(completions, prompts, encoded.lengths[rows], rule, sources)

    def _complete(self, requested: Sequence[_Row], rule: SamplingRule) -> dict[int, Completion]:
        """Return the completion of every row by its place."""
        found: dict[int, Completion] = {}
        asked: Sequence[Server] = ()
        reasons: list[str] = []
        for attempt in range(1, ATTEMPTS + 1):
            missing = [row for row in requested if row.place not in found]
            asked = self.servers()
            try:
                reasons = run_awaitable(self._attempt(missing, asked, rule, found, attempt))
            except ExceptionGroup as failures:
                raise _first(failures) from failures
            if len(found) == len(requested):
                return found
        named = ", ".join(server.address for server in asked)
        why = Counter(reasons).most_common(1)[0][0]
        raise EngineError(
            f"vLLM at {named}: {len(requested) - len(found)} of {len(requested)} rows have no answer after {ATTEMPTS} "
            f"attempts; {why}"
        )

    async def _attempt(
        self,
        missing: Sequence[_Row],
        servers: Sequence[Server],
        rule: SamplingRule,
        found: dict[int, Completion],
        attempt: int,
    ) -> list[str]:
        """Ask for the missing rows once, and return why some are still missing; rows of a prompt go to one server."""
        if attempt > 1:
            await asyncio.sleep(pause_s(attempt - 1, BACKOFF_S))
        prompts = {number: place for place, number in enumerate(dict.fromkeys(row.prompt for row in missing))}
        reasons: list[str] = []

        async def ask(index: int, server: Server) -> None:
            # After a failure the next server is asked.
            own = [row for row in missing if (prompts[row.prompt] + attempt - 1) % len(servers) == index]
            if own:
                reasons.extend(await self._ask_server(server, own, rule, found))

        async with asyncio.TaskGroup() as group:
            for index, server in enumerate(servers):
                group.create_task(ask(index, server))
        return reasons

    async def _ask_server(
        self, server: Server, rows: Sequence[_Row], rule: SamplingRule, found: dict[int, Completion]
    ) -> list[str]:
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
                        found[row.place] = await self._ask(server, row, rule, client)
                    except (ServiceError, _UnusableAnswerError) as failure:
                        reasons.append(str(failure))
                    else:
                        self.on_progress(len(found))

            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(ask(row))
        return reasons

    async def _ask(self, server: Server, row: _Row, rule: SamplingRule, client: httpx.AsyncClient) -> Completion:
        name = server.model if self.adapter is None else self.adapter.name
        body = request_body(name, row.ids, row.seed, rule)
        completion, is_whole = _read(await self._post(server, body, client), body, rule)
        if not is_whole:
            # The server's text has a stop text that the row's ids do not complete by our rule: let it go on.
            del body["stop"]
            completion, _ = _read(await self._post(server, body, client), body, rule)
        return completion

    async def _post(self, server: Server, body: Mapping[str, Any], client: httpx.AsyncClient) -> object:
        try:
            return await completions(server, body, client)
        except UnknownAdapterError:
            # A server that was started again has none, and another process may have unloaded it.
            if body["model"] in server.loaded:
                server.loaded.remove(body["model"])
            raise


def surprise_of_copies(prompts: Sequence[int], completions: Sequence[Completion]) -> float:
    """Return minus the log of the probability, in nats, that rows of the same prompt are all equal; 0 if some differ.

    Args:
        prompts: the number of each row's prompt.
        completions: of the rows.
    """
    first: dict[int, Completion] = {}
    surprise = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        if first.setdefault(prompt, completion).token_ids != completion.token_ids:
            return 0.0
        surprise -= sum(completion.logprobs) if first[prompt] is not completion else 0.0
    return surprise


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of tasks that were cancelled together."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


def request_body(model: str, prompt_ids: list[int], seed: int, rule: SamplingRule) -> dict[str, Any]:
    """Return the request of a row; nothing is left to the defaults of the server or of its model."""
    top_k = rule.truncation.top_k
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": rule.max_tokens,
        "min_tokens": 0,
        "seed": seed,
        "temperature": rule.temperature,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": top_k,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": top_k + TIES if top_k else 0,
        "stop_token_ids": list(rule.ends),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
    }
    if rule.stops:
        body["stop"] = list(rule.stops.texts)
    if never := rule.never_sampled:
        # The lowest that is allowed: e^-100 of what it was stays.
        body["logit_bias"] = dict.fromkeys(map(str, never), -100.0)
    return body


def _read(answer: Any, body: Mapping[str, Any], rule: SamplingRule) -> tuple[Completion, bool]:
    """Return the completion of an answer, and whether it ends by the rule or at its full length.

    Raises:
        _UnusableAnswerError: tokens or log-probs are missing or not finite.
        InputError: it is the answer of another model, or to another prompt.
    """
    try:
        choice = answer["choices"][0]
        ids, reason = tuple(choice["token_ids"]), choice["finish_reason"]
        logprobs = choice["logprobs"]
        sampled, likeliest = logprobs["token_logprobs"], logprobs.get("top_logprobs")
        model, read = answer["model"], choice.get("prompt_token_ids")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _UnusableAnswerError(f"an answer is incomplete ({type(error).__name__}: {error})") from error
    if model != body["model"]:
        hint = f"It was asked for {body['model']}: something between this machine and the server changes requests."
        raise InputError(f"{PLACE}.url", model, hint)
    if read != body["prompt"]:
        hint = (
            f"The server read {None if read is None else len(read)} ids of a prompt of {len(body['prompt'])}, or other "
            "ones: it truncates prompts, or is too old to return what it read."
        )
        raise InputError(f"{PLACE}.url", model, hint)
    if not ids or len(ids) != len(sampled):
        raise _UnusableAnswerError(f"an answer has {len(ids)} tokens and {len(sampled)} log-probs")
    if any(value is None or not value > _LOWEST for value in sampled):
        raise _UnusableAnswerError("a log-prob of an answer is not finite")
    if max(ids) >= rule.vocabulary:
        hint = f"It sampled the id {max(ids)}, and ids of this model end at {rule.vocabulary - 1}."
        raise InputError(f"{PLACE}.url", model, hint)
    length = end_of(rule, ids)
    if length is None and reason != "length" and "stop" in body:
        return Completion((), ()), False
    if length is None and len(ids) < rule.max_tokens:
        raise _UnusableAnswerError(f"an answer ends after {len(ids)} tokens with {reason}")
    support = _support(likeliest, rule) if rule.truncation.top_k else None
    return Completion(ids, tuple(sampled), support), True


def _support(likeliest: Sequence[Mapping[str, float]], rule: SamplingRule) -> tuple[tuple[int, ...], ...]:
    """Return the ids that top-k kept, of those that were asked for: the others have no probability."""
    kept = []
    for options in likeliest:
        ids = sorted(int(name.removeprefix("token_id:")) for name, value in options.items() if value > _LOWEST)
        if len(ids) >= rule.truncation.top_k + TIES:
            hint = f"More than {TIES} ids are as likely as the last of them, and were kept; raise it, or set it to 0."
            raise InputError("rollout.top_k", rule.truncation.top_k, hint)
        kept.append(tuple(ids))
    return tuple(kept)
