"""A vLLM server over HTTP: what it serves, and the adapters that it has loaded."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from grpo_core.errors import InputError
from grpo_core.services import RefusedRequestError, Service, ServiceError

PLACE = "rollout.vllm"
LOAD_TIMEOUT_S = 300.0
_FORBIDDEN, _NOT_FOUND, _SERVER_ERROR = 403, 404, 500
_TOKEN_REFUSED = (401, _FORBIDDEN)
_SCALE_OUT = "--enable-scale-out"


@dataclass(frozen=True)
class Adapter:
    """A stored adapter: its folder, as a server sees it, and a name with its digest, so that no other answers to it."""

    name: str
    path: str


def adapter_name(run: str, digest: str) -> str:
    """Return the name under which a run's adapter with this digest is loaded."""
    return f"grpo-{run}-{digest}"


@dataclass
class Server:
    """One vLLM server, and the adapters that this process has loaded there.

    Attributes:
        root: the folder or hub name that the base model was loaded from.
        context: ids of a prompt and its completion together, at most.
        loaded: names of adapters, the one used last at the end.
        uses: how many stages use each now.
    """

    service: Service
    model: str
    root: str
    context: int
    version: str
    loaded: list[str] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def address(self) -> str:
        """The server, for messages."""
        return self.service.address

    def refused(self, hint: str) -> InputError:
        """Return the error of a server that cannot be used."""
        return InputError(f"{PLACE}.url", self.address, hint)

    async def load(self, adapter: Adapter, client: httpx.AsyncClient) -> None:
        """Have an adapter loaded, and those unloaded that no stage uses, except the one used last."""
        async with self._lock:
            unused = [name for name in self.loaded if not self.uses[name] and name != adapter.name]
            for name in unused[:-1]:
                await self.unload(name, client)
            if adapter.name in self.loaded:
                self.loaded.remove(adapter.name)
            elif (path := (await _loaded_adapters(self.service, client)).get(adapter.name)) != adapter.path:
                # In place, what was computed with the previous weights would stay in the prefix cache.
                if path is not None:
                    await self.unload(adapter.name, client)
                await self._load(adapter, client)
            self.loaded.append(adapter.name)

    async def unload_all(self) -> None:
        """Unload the adapters that this process has loaded."""
        async with self.service.client() as client, self._lock:
            for name in tuple(self.loaded):
                await self.unload(name, client)

    async def _load(self, adapter: Adapter, client: httpx.AsyncClient) -> None:
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path}, client)
        except RefusedRequestError as refusal:
            raise self._refused_adapter(adapter, refusal.status, refusal.message) from refusal
        except ServiceError as failure:
            # A server that is alive answers so for an adapter that it cannot use.
            if not failure.said:
                raise
            await self.service.request("/health", client=client, read=bytes.decode)
            raise self._refused_adapter(adapter, _SERVER_ERROR, failure.said) from failure

    def _refused_adapter(self, adapter: Adapter, status: int, message: str) -> InputError:
        hint = (
            f"It does not load {adapter.path}: {message.partition(', please check')[0]}. Give a folder that both see "
            f"as {PLACE}.adapter_folder; and it needs a --max-lora-rank of at least policy.lora.rank."
        )
        if status == _NOT_FOUND and "adapter" not in message.lower():
            hint = (
                f"It loads no adapters while it runs ({message}): start it with --enable-lora and the environment "
                "variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            )
        return _refused(self.service, status, hint)

    async def unload(self, name: str, client: httpx.AsyncClient) -> None:
        """Unload an adapter, if it is loaded."""
        if name in self.loaded:
            self.loaded.remove(name)
        try:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, client)
        except RefusedRequestError as refusal:
            # Another process, or the server's own restart, has unloaded it.
            if refusal.status != _NOT_FOUND:
                raise self.refused(f"It unloads no adapter: {refusal}.") from refusal

    async def _post(self, path: str, body: Mapping[str, Any], client: httpx.AsyncClient) -> object:
        service = replace(self.service, timeout_s=LOAD_TIMEOUT_S)
        return await service.request(path, json.dumps(body).encode(), client, read=bytes.decode)


async def find_server(service: Service) -> Server:
    """Ask a server what it serves; ServiceError without an answer, InputError if it refuses, or is no vLLM."""
    async with service.client() as client:
        version, cards = await _asked(service, "/version", client), await _cards(service, client)
    base = next((card for card in cards if not card.get("parent")), {})
    name, context = base.get("id"), base.get("max_model_len")
    number = version.get("version") if isinstance(version, dict) else None
    if not isinstance(name, str) or not isinstance(context, int) or not isinstance(number, str):
        raise InputError(f"{PLACE}.url", service.address, "It answers, but not as a vLLM server does; correct it.")
    return Server(service, name, str(base.get("root")), context, number)


async def _loaded_adapters(service: Service, client: httpx.AsyncClient) -> dict[str, str]:
    cards = await _cards(service, client)
    return {str(card.get("id")): str(card.get("root")) for card in cards if card.get("parent")}


async def _cards(service: Service, client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await _asked(service, "/v1/models", client)
    cards = answer.get("data") if isinstance(answer, dict) else None
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


async def _asked(service: Service, path: str, client: httpx.AsyncClient) -> object:
    try:
        return await service.request(path, client=client)
    except RefusedRequestError as refusal:
        hint = f"It answers {path} with status {refusal.status}: it is no vLLM server, or too old."
        raise _refused(service, refusal.status, hint) from refusal


def _refused(service: Service, status: int, hint: str) -> InputError:
    if status in _TOKEN_REFUSED:
        hint = "Name the environment variable with the server's --api-key."
        return InputError(f"{PLACE}.token_env", service.address, hint)
    return InputError(f"{PLACE}.url", service.address, hint)


class UnknownAdapterError(ServiceError):
    """A server has not loaded the adapter that a request names."""


async def post(server: Server, path: str, body: Mapping[str, Any], client: httpx.AsyncClient) -> object:
    """Return the answer to a request for tokens, whose body names a model; InputError if the server refuses it."""
    try:
        return await server.service.request(path, json.dumps(body).encode(), client)
    except RefusedRequestError as refusal:
        if refusal.status == _NOT_FOUND and body["model"] != server.model:
            raise UnknownAdapterError(f"the adapter {body['model']} is not loaded") from refusal
        if refusal.status == _FORBIDDEN and _SCALE_OUT in refusal.message:
            raise server.refused(f"Prompts have images: start it with {_SCALE_OUT}.") from refusal
        hint = f"It refuses a request (status {refusal.status}): {refusal.message}."
        raise _refused(server.service, refusal.status, hint) from refusal
