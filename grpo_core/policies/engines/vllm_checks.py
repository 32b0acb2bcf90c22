"""Whether a vLLM server can sample a policy, tried with two requests and an adapter that adds nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from grpo_core.errors import InputError
from grpo_core.policies.engines.settings import VLLM_MIN_VERSION
from grpo_core.policies.engines.vllm_requests import TIES, Request, ServedPrompt, UnusableAnswerError, ask
from grpo_core.policies.engines.vllm_server import Adapter, Server
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import ADAPTER_FILE

_CERTAIN = 1e-3
_TEXT = ServedPrompt([1, 2, 3], [1, 2, 3])


@dataclass(frozen=True)
class Needs:
    """What a policy needs of a server.

    Attributes:
        context: ids of the longest prompt and a completion of full length.
        adapter: that adds nothing, of the rank that is trained; None: none is loaded.
        prompt: that it is tried with, one with images where any has them.
        at_most: ids that it may be able to read; None: any number.
    """

    context: int
    top_k: int
    adapter: Adapter | None
    prompt: ServedPrompt = _TEXT
    at_most: int | None = field(default=None, kw_only=True)


def write_zero_adapter(trained: TrainedModel, folder: Path) -> None:
    """Write an adapter with the settings of a policy's (also on the meta device) and zeros for its first layer."""
    from peft import get_peft_model_state_dict

    model: Any = trained.model
    state = get_peft_model_state_dict(model)
    first = {name: value for name, value in state.items() if re.search(r"\.0\.", name)} or state
    zeros = {name: torch.zeros(value.shape, dtype=torch.float32) for name, value in first.items()}
    save_file(zeros, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = model.peft_config["default"]
    trains, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = trains


def unservable_modules(trained: TrainedModel) -> list[str]:
    """Return the names of adapted modules that vLLM has no adapters for: embeddings and the output head."""
    model: Any = trained.model.get_base_model()  # type: ignore[operator]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [
        name
        for name, module in model.named_modules()
        if any(module is end for end in ends) and hasattr(module, "lora_A")
    ]


async def server_problems(server: Server, needs: Needs) -> list[InputError]:
    """Return what keeps a server from sampling a policy; ServiceError if it does not answer."""
    problems = [server.refused(hint) for hint in _described(server, needs)]
    async with server.service.client() as client:
        for require in (_require_processed, _require_adapter):
            try:
                await require(server, needs, client)
            except InputError as error:
                problems.append(error)
    return problems


def _described(server: Server, needs: Needs) -> Iterator[str]:
    if tuple(int(part) for part in re.findall(r"\d+", server.version)[:2]) < VLLM_MIN_VERSION:
        yield f"It is vLLM {server.version}; this needs {'.'.join(map(str, VLLM_MIN_VERSION))} or later."
    if needs.at_most is not None and server.context > needs.at_most:
        # vLLM takes LongRoPE's long factors for all rows, short ones too.
        yield f"It reads {server.context} ids: start it with --max-model-len {needs.at_most}."
    if server.context < needs.context:
        yield (
            f"It reads {server.context} ids, and the longest prompt with its completion has {needs.context}: start it "
            "with a larger --max-model-len, or lower rollout.max_completion_length."
        )


async def _require_processed(server: Server, needs: Needs, client: httpx.AsyncClient) -> None:
    """Refuse a server that reads another prompt, or whose log-probs are not of the distribution that it samples from.

    Of one id that can be sampled the log-prob is 0, whatever the model; before the truncation it is that of the logits.
    """
    wanted = needs.top_k + TIES if needs.top_k else 0
    sampling = {"max_tokens": 4, "temperature": 1.0, "top_k": 1, "seed": 0, "ignore_eos": True, "logprobs": wanted}
    try:
        answer = await ask(server, Request(server.model, needs.prompt, sampling), client)
    except UnusableAnswerError as error:
        raise server.refused(f"It does not return log-probs as vLLM does ({error}).") from error
    if any(value is None or abs(value) > _CERTAIN for value in answer.logprobs):
        raise server.refused(
            "Its log-probs are not those of the distribution that it samples from: start it with --logprobs-mode "
            "processed_logprobs."
        )


async def _require_adapter(server: Server, needs: Needs, client: httpx.AsyncClient) -> None:
    if needs.adapter is not None:
        await server.load(needs.adapter, client)
        await server.unload(needs.adapter.name, client)
