"""What a vLLM server is asked for a row, and what it answers, with images in the prompt or without.

A prompt of ids goes to `/v1/completions`. One with images goes to `/inference/v1/generate`, which a server has with
`--enable-scale-out`: it gets the ids with one mark for each image, and the images; it returns the ids that it read.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.written import SamplingRule
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.engines.vllm_server import Server, post
from grpo_core.rollouts.actions import Sources
from grpo_core.rollouts.images import SourceImage, encode_png

_LOWEST = -9000.0
"""vLLM returns -9999 in place of minus infinity."""
TIES = 16
"""Ids beyond top_k that are asked for: those as likely as the last of them are kept too."""


class UnusableAnswerError(Exception):
    """An answer that cannot be stored; the same request may get another one."""


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt: its ids, those with one mark for each image, and these as data URLs."""

    ids: list[int]
    marked: list[int]
    images: tuple[str, ...] = ()


def prompt_ids_of(encoded: EncodedPrompts) -> list[list[int]]:
    """Return the ids of each prompt without its padding."""
    pairs = zip(encoded.input_ids, encoded.attention_mask.bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def served_prompts(encoded: EncodedPrompts, rows: Sequence[int], sources: Sources | None) -> dict[int, ServedPrompt]:
    """Return the encoded prompts by their numbers, of which `rows` has that of each row's."""
    ids = prompt_ids_of(encoded)
    marked = encoded.marked or ids
    images = dict(zip(rows, sources, strict=True)) if sources is not None else {}
    urls = {image: _data_url(image) for image in {each for some in images.values() for each in some}}
    return {
        number: ServedPrompt(ids[number], marked[number], tuple(urls[image] for image in images.get(number, ())))
        for number in set(rows)
    }


def _data_url(image: SourceImage) -> str:
    # As the policy reads it: a server would turn and blend the file in its own way.
    return f"data:image/png;base64,{base64.b64encode(encode_png(image.open())).decode()}"


@dataclass(frozen=True)
class Request:
    """One row as a server is asked for it, from the base or an adapter.

    `sampling` has all of vLLM's parameters that matter; nothing is left to the server's or its model's defaults.
    """

    model: str
    prompt: ServedPrompt
    sampling: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Where the server takes it."""
        return "/inference/v1/generate" if self.prompt.images else "/v1/completions"

    @property
    def stops(self) -> bool:
        """Whether the server ends the row at a stop text."""
        return "stop" in self.sampling

    def without_stops(self) -> "Request":
        """Return it for a row that the server has ended before the policy would."""
        return replace(self, sampling={name: value for name, value in self.sampling.items() if name != "stop"})

    @property
    def body(self) -> dict[str, Any]:
        """The request as JSON."""
        if self.prompt.images:
            parts = [{"type": "image_url", "url": url} for url in self.prompt.images]
            asked = {"token_ids": self.prompt.marked, "content_parts": parts, "sampling_params": dict(self.sampling)}
        else:
            asked = {"prompt": self.prompt.ids, "add_special_tokens": False, "return_tokens_as_token_ids": True}
            asked |= self.sampling
        return {"model": self.model, "return_token_ids": True, **asked}


def request_of(model: str, prompt: ServedPrompt, seed: int, rule: SamplingRule) -> Request:
    """Return the request of a row."""
    top_k = rule.truncation.top_k
    sampling: dict[str, Any] = {
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
    }
    if rule.stops:
        # Special tokens are part of the text that stop texts are looked for in.
        sampling |= {"stop": list(rule.stops.texts), "skip_special_tokens": False}
    if never := rule.never_sampled:
        # The lowest that is allowed: e^-100 of what it was stays.
        sampling["logit_bias"] = dict.fromkeys(map(str, never), -100.0)
    return Request(model, prompt, sampling)


@dataclass(frozen=True)
class Answer:
    """What a server said to a request, from either path, and why it ended.

    Log-probs are None where they are no number; `likeliest` are those of the likeliest ids at each place, if asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    likeliest: tuple[Mapping[int, float], ...]
    reason: str


async def ask(server: Server, request: Request, client: httpx.AsyncClient) -> Answer:
    """Return the answer to a request; ServiceError if there is none now, UnusableAnswerError if parts are missing.

    InputError if the server refuses the request, or answers for another model or to another prompt.
    """
    answer: Any = await post(server, request.path, request.body, client)
    try:
        choice = answer["choices"][0]
        logprobs, read = choice["logprobs"], choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        if request.prompt.images:
            content = logprobs["content"]
            sampled = [each["logprob"] for each in content]
            likeliest = [{top["token_id"]: top["logprob"] for top in each["top_logprobs"]} for each in content]
        else:
            sampled = logprobs["token_logprobs"]
            named = logprobs.get("top_logprobs") or []
            likeliest = [{int(name.removeprefix("token_id:")): value for name, value in each.items()} for each in named]
        found = Answer(tuple(choice["token_ids"]), tuple(sampled), tuple(likeliest), choice["finish_reason"])
        model = answer["model"]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UnusableAnswerError(f"an answer is incomplete ({type(error).__name__}: {error})") from error
    if model != request.model:
        raise server.refused(f"It was asked for {request.model} and answered for {model}.")
    if read != request.prompt.ids:
        raise server.refused(
            f"It read {len(read or ())} ids of a prompt of {len(request.prompt.ids)}, or other ones: it truncates "
            "prompts, or has another tokenizer or processor. Start it as grpo doctor prints."
        )
    return found


@dataclass(frozen=True)
class Completion:
    """The ids that an engine returned for a row, that which ended it included, with their log-probs.

    `support` has the ids that each could have been, ascending; None without truncation.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    support: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "one log-prob per token"


def end_of(rule: SamplingRule, token_ids: Sequence[int]) -> int | None:
    """Return how many of these ids a completion has by the rule, with the one that ends it; None: it goes on."""
    ends = set(rule.ends)
    for count, token in enumerate(token_ids, start=1):
        if token in ends or (rule.stops and rule.stops.completed(token_ids[:count])):
            return count
    return None


def completion_of(answer: Answer, request: Request, rule: SamplingRule) -> Completion | None:
    """Return the completion of an answer; None: a stop text ended it that its ids do not complete by the rule.

    UnusableAnswerError for missing numbers; InputError if top_k kept more ids than were asked for.
    """
    ids = answer.ids
    if not ids or len(ids) != len(answer.logprobs):
        raise UnusableAnswerError(f"an answer has {len(ids)} tokens and {len(answer.logprobs)} log-probs")
    sampled = [value for value in answer.logprobs if value is not None and value > _LOWEST]
    if len(sampled) < len(ids):
        raise UnusableAnswerError("a log-prob of an answer is not finite")
    length = end_of(rule, ids)
    if length is None and answer.reason != "length" and request.stops:
        return None
    if length is None and len(ids) < rule.max_tokens:
        raise UnusableAnswerError(f"an answer ends after {len(ids)} tokens with {answer.reason}")
    return Completion(ids, tuple(sampled), _support(answer, rule) if rule.truncation.top_k else None)


def _support(answer: Answer, rule: SamplingRule) -> tuple[tuple[int, ...], ...]:
    """Return the ids that top-k kept, of those that were asked for: the others have no probability."""
    kept = []
    for options in answer.likeliest:
        ids = sorted(token for token, value in options.items() if value > _LOWEST)
        if len(ids) >= rule.truncation.top_k + TIES:
            hint = f"More than {TIES} ids are as likely as the last of them, and were kept; raise it, or set it to 0."
            raise InputError("rollout.top_k", rule.truncation.top_k, hint)
        kept.append(tuple(ids))
    return tuple(kept)
