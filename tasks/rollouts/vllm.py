"""Rollouts by vLLM servers: which ones, the adapter of a policy version as they see it, a policy without weights.

The adapter's name has the digest of its weights: what a server has computed or kept for another version cannot be taken
for this one's.
"""

import asyncio
import contextlib
import json
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.rollouts import TextRolloutSection, VllmSection
from configs.sections import PolicySection
from grpo_core.errors import InputError
from grpo_core.policies.engines.settings import EngineRecord, Progress, server_command
from grpo_core.policies.engines.vllm import VllmEngine
from grpo_core.policies.engines.vllm_server import PLACE, Adapter, Server, adapter_name, find_server
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained.settings import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from grpo_core.services import Service, ServiceError, read_token, run_awaitable
from tasks.execution.resources import resource
from tasks.models.initial import component_folder, fetched_adapter, weights_folder
from tasks.models.resident import ModelSpec, load_untried
from tasks.rollouts.vllm_server import VllmServer
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.files import is_local

SECONDS_TO_UNLOAD = 20.0  # for all adapters of a server, at the end of a run


class VllmServers:
    """The servers that this process asks, by address, with what it has loaded there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, Server] = {}
        self._copies: Counter[Path] = Counter()  # of adapters, made by this process, and how many stages use each

    @contextmanager
    def copied(self, folder: Path, target: Path) -> Iterator[Path]:
        """Give a copy of an adapter where servers read it; it is removed once no server of this process has it loaded.

        A copy that another process has made stays.
        """
        with self._lock:
            if _copied(folder, target) or target in self._copies:
                self._copies[target] += 1
        try:
            yield target
        finally:
            with self._lock:
                if target in self._copies:
                    self._copies[target] -= 1
            self._remove_copies()

    def _remove_copies(self) -> None:
        with self._lock:
            loaded = {name for server in self._servers.values() for name in server.loaded}
            for copy in [each for each, uses in self._copies.items() if not uses and each.name not in loaded]:
                shutil.rmtree(copy, ignore_errors=True)
                del self._copies[copy]

    def of(self, section: VllmSection, command: Sequence[str] = ()) -> Sequence[Server]:
        """Return the servers of a configuration, or the one that the run starts with this complete command.

        ServiceError or LostStageError if one does not answer, InputError if they cannot serve, or not the same.
        """
        token = read_token(f"{PLACE}.token_env", section.token_env)
        urls = section.urls
        if command:
            urls = (resource(VllmServer).ensure_running(command, current_store(), section.timeout_s),)
        # Two that each find one would not know of the adapters that the other has loaded.
        with self._lock:
            for url in urls:
                if url not in self._servers:
                    self._servers[url] = run_awaitable(find_server(Service(url, section.timeout_s, token, PLACE)))
            servers = [self._servers[url] for url in urls]
        if len({(each.model, each.version) for each in servers}) > 1:
            found = ", ".join(f"{each.address} {each.model} on vLLM {each.version}" for each in servers)
            raise InputError(
                f"{PLACE}.url", list(section.urls), f"They have to serve one model on one version: {found}."
            )
        return servers

    def close(self) -> None:
        """Unload what this process has loaded, and remove its copies, also those of servers that do not answer."""
        for server in self._servers.values():
            # It may have ended before this process, or answer nobody any more.
            with contextlib.suppress(ServiceError, TimeoutError):
                run_awaitable(asyncio.wait_for(server.unload_all(), SECONDS_TO_UNLOAD))
            server.loaded.clear()
        self._remove_copies()


class PoliciesWithoutWeights:
    """The policies that read prompts while servers sample, one for each of the stages that overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[ModelSpec, Any]] = []

    @contextmanager
    def borrow(self, model: ModelSpec, rollout: TextRolloutSection) -> Iterator[Any]:
        """Lend a policy with these sampling settings, which no other stage has; it is loaded if none is idle."""
        with self._lock:
            self._idle = [each for each in self._idle if each[0] == model]
            _, reader = self._idle.pop() if self._idle else (model, load_untried(model, rollout, torch.device("meta")))
        reader.sample_with(rollout)
        try:
            yield reader
        finally:
            with self._lock:
                self._idle.append((model, reader))


@contextmanager
def sampling(
    policy: PolicyRef, model: ModelSpec, rollout: TextRolloutSection, weights: Any, on_progress: Progress
) -> Iterator[tuple[Policy, EngineRecord]]:
    """Give a policy that samples through the servers with a version's adapter, and has weights if they are given."""
    section = rollout.vllm
    assert section is not None, "the engine has a section"
    servers, without = resource(VllmServers), resource(PoliciesWithoutWeights)
    reader = without.borrow(model, rollout) if weights is None else contextlib.nullcontext(weights)
    with reader as sampler, _served_adapter(policy, model, section) as adapter:
        command = fitting_command(section.words, section, model.section, sampler) if section.words else ()
        first, *_ = asked = servers.of(section, command)
        record = EngineRecord(
            "vllm",
            first.version,
            server_dtype(section, model.section),
            json.dumps({"context": first.context}, sort_keys=True),
            None if adapter is None else policy.digest,
        )
        sampler.engine = VllmEngine(lambda: servers.of(section, command), adapter, section.concurrency, on_progress)
        try:
            with _in_use(asked, adapter):
                yield sampler, record
        finally:
            sampler.engine = None


def fitting_command(words: Sequence[str], section: VllmSection, model: PolicySection, policy: Any) -> tuple[str, ...]:
    """Return the complete command of a server, by its program and options, that fits a policy."""
    return server_command(
        words,
        model.model,
        server_dtype(section, model),
        revision=model.revision,
        # Those of policy.adapter have a rank of their own.
        rank=policy.trained.model.peft_config["default"].r,
        images=policy.image_arguments,
        at_most=policy.context.at_most,
    )


def server_dtype(section: VllmSection, model: PolicySection) -> str:
    """Return the dtype that the servers compute in; by default the policy's."""
    return section.dtype or model.dtype


@contextmanager
def _in_use(servers: Sequence[Server], adapter: Adapter | None) -> Iterator[None]:
    """Keep an adapter loaded inside the context."""
    if adapter is None:
        yield
        return
    for server in servers:
        server.uses[adapter.name] += 1
    try:
        yield
    finally:
        for server in servers:
            server.uses[adapter.name] -= 1


@contextmanager
def _served_adapter(policy: PolicyRef, model: ModelSpec, section: VllmSection) -> Iterator[Adapter | None]:
    """Give the adapter of a version under the path at which servers see it; None for the model as it was given."""
    store = current_store()
    with contextlib.ExitStack() as stack:
        if policy.checkpoint is not None:
            read = stack.enter_context(store.reading())
            folder: Path | None = weights_folder(read(policy.checkpoint), policy, "tokens")
        else:
            initial = stack.enter_context(fetched_adapter(model.section, store, model.adapter))
            own = initial and component_folder(initial, "tokens")
            folder = own if own and own.is_dir() else initial
        if folder is None:
            # New adapters add nothing.
            yield None
            return
        name = adapter_name(store.run, policy.digest)
        if section.adapter_folder is not None:
            target = Path(section.adapter_folder).expanduser() / name
            folder = stack.enter_context(resource(VllmServers).copied(folder, target))
        elif policy.checkpoint is not None and not is_local(store.filesystem):
            hint = "A server reads no bucket: give a folder that this machine and the server see under one path."
            raise InputError(f"{PLACE}.adapter_folder", None, hint)
        # Where a link leads here is not where it leads for a server.
        yield Adapter(name, str(folder.absolute()))


def _copied(folder: Path, target: Path) -> bool:
    """Copy an adapter to where servers read it, complete or not at all, and say whether this call did.

    Its name has its digest.
    """
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{uuid.uuid4().hex}.part")
    partial.mkdir()
    try:
        for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
            shutil.copyfile(folder / name, partial / name)
        partial.rename(target)
    except OSError:
        # Another process may have copied it meanwhile.
        if not target.is_dir():
            raise
        return False
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True
