"""Checks of the engine that samples rollouts: whether its servers can sample this policy, and how to start one."""

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.rollouts import TextRolloutSection, VllmSection
from configs.schema import RunConfig
from flows.preflight.model import source_of
from flows.preflight.prompts import PromptFiles
from grpo_core.errors import InputError
from grpo_core.policies.engines.settings import refuse_adapters as refuse_vllm_adapters
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.settings import LoraSettings
from grpo_core.rollouts.images import SourceImage
from grpo_core.services import Service, ServiceError, read_token, run_awaitable
from tasks.models.initial import model_digest, training_choices
from tasks.prompts.read import Prompt
from tasks.runs.stored_policies import adapter_version
from tasks.storage.artifacts.store import open_store
from tasks.storage.files import is_local, nearest_existing

if TYPE_CHECKING:
    from grpo_core.policies.engines.vllm_requests import ServedPrompt

PLACE = "rollout.vllm"
_LONGEST = 16
"""Prompts whose ids are counted, those with the most letters."""
_LARGEST = 4
"""And those with the most pixels."""


def check_engine(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report servers that cannot sample this policy; where workers of a pool sample, they reach the servers."""
    section = vllm_section(config)
    if section is None or config.placement.rollouts.pool:
        return
    if section.words:
        if shutil.which(section.words[0]) is None:
            hint = "There is no such program here. vLLM is installed in an environment of its own: docs/operations.md."
            yield InputError(f"{PLACE}.command", section.words[0], hint)
        return
    with _reader(config) as reader:
        # What is wrong with the model is reported with it.
        if reader is None:
            return
        for url in section.urls:
            try:
                yield from _server_problems(config, section, url, prompts, reader)
            except InputError as error:
                yield from error.errors
            except ServiceError as failure:
                start = f"Start a server there: {_shown_command(config, section, reader, url)}"
                hint = f"{failure}. {start}".replace("the service", "It", 1)
                yield InputError(f"{PLACE}.url", url, hint)


@dataclass(frozen=True)
class _Reader:
    """The policy without weights, which reads prompts while servers sample, and the settings of its adapters."""

    policy: Any
    lora: LoraSettings


@contextmanager
def _reader(config: RunConfig) -> Iterator[_Reader | None]:
    """Give the policy without weights; None if it cannot be built."""
    import torch

    store, version = open_store(config.storage, config.run.name), adapter_version(config)
    with ExitStack() as stack:
        try:
            choices = stack.enter_context(training_choices(config.policy, store, version))
            lora = choices["tokens"].lora
            assert lora is not None, "full weights have been refused"
            policy = policy_family(config.policy.kind).policy_class()
            meta = torch.device("meta")
            loaded = policy.load(
                source_of(config), config.rollout, choices, dtype=torch.float32, device=meta, autocast=None
            )
            found = _Reader(loaded, lora)
        except InputError:
            found = None
        yield found


def vllm_section(config: RunConfig) -> VllmSection | None:
    """Return the servers that sample the run's rollouts; None if another engine does."""
    rollout = config.rollout
    return rollout.vllm if isinstance(rollout, TextRolloutSection) and rollout.engine == "vllm" else None


def engine_notes(config: RunConfig) -> tuple[str, ...]:
    """Return how a fitting server is started; nothing without the engine vllm, or where the model cannot be read."""
    section = vllm_section(config)
    if section is None:
        return ()
    with _reader(config) as reader:
        if reader is None:
            return ()
        return (f"a fitting server: {_shown_command(config, section, reader, next(iter(section.urls), None))}",)


def _shown_command(config: RunConfig, section: VllmSection, reader: _Reader, url: str | None) -> str:
    """Return the command that starts a server for a run, with its environment variables, for a shell."""
    from tasks.rollouts.vllm import fitting_command

    command = fitting_command(section.words or ("vllm", "serve"), section, config.policy, reader.policy)
    port = Service(url, 1.0, None, PLACE).port if url is not None else None
    place = ("--port", str(port)) if port is not None else ()
    return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {shlex.join((*command, *place))}"


def _server_problems(
    config: RunConfig, section: VllmSection, url: str, prompts: PromptFiles, reader: _Reader
) -> Iterator[InputError]:
    from grpo_core.policies.engines.vllm_checks import Needs, server_problems, unservable_modules, write_zero_adapter
    from grpo_core.policies.engines.vllm_server import Adapter, adapter_name, find_server

    token = read_token(f"{PLACE}.token_env", section.token_env)
    server = run_awaitable(find_server(Service(url, section.timeout_s, token, PLACE)))
    if (error := _other_model(config, url, server.root)) is not None:
        yield error
        return
    trained = reader.policy.trained
    refuse_vllm_adapters(reader.lora)
    if ends := unservable_modules(trained):
        hint = f"vLLM has no adapters for {', '.join(ends)}; name other layers."
        yield InputError("policy.lora.targets", reader.lora.targets, hint)
        return
    with tempfile.TemporaryDirectory(prefix=".grpo-adapter-", dir=_seen_by_servers(config, section)) as folder:
        Path(folder).chmod(0o755)
        write_zero_adapter(trained, Path(folder))
        zeros = Adapter(adapter_name(config.run.name, "0" * 64), folder)
        context, tried = _longest(config, prompts, reader.policy)
        top_k, at_most = getattr(config.rollout, "top_k", 0), reader.policy.context.at_most
        needs = Needs(context, top_k, zeros, *tried, at_most=at_most)
        yield from run_awaitable(server_problems(server, needs))


def _other_model(config: RunConfig, url: str, root: str) -> InputError | None:
    """Return an error if a server's model is another one, as far as its folder or hub name tells."""
    policy = config.policy
    if Path(root).is_dir():
        same = model_digest(root) == model_digest(policy.model, policy.revision)
    else:
        names = (root, policy.model)
        same = root == policy.model or any(Path(name).is_absolute() or name.count("/") != 1 for name in names)
    if same:
        return None
    return InputError(
        f"{PLACE}.url", url, f"It serves {root}, and policy.model is {policy.model}; correct one of them."
    )


def _seen_by_servers(config: RunConfig, section: VllmSection) -> str:
    """Return a folder that is where adapters of the run will be."""
    if section.adapter_folder is not None:
        folder = Path(section.adapter_folder).expanduser()
    else:
        store = open_store(config.storage, config.run.name)
        if not is_local(store.filesystem):
            hint = "A server reads no bucket: give a folder that this machine and the server see under one path."
            raise InputError(f"{PLACE}.adapter_folder", None, hint)
        folder = Path(store.path())
    return str(nearest_existing(folder.absolute()))


def _longest(config: RunConfig, prompts: PromptFiles, policy: Any) -> tuple[int, tuple["ServedPrompt", ...]]:
    """Return how many ids the longest prompt and its completion have, and the prompt with the most pixels, if any."""
    from grpo_core.policies.engines.vllm_requests import served_prompts

    rollout = config.rollout
    assert isinstance(rollout, TextRolloutSection), "engines sample texts"
    given = {prompt for part in ("data", "evaluate") for each in prompts.usable(part) for prompt in each.prompts}
    by_length = sorted(given, key=lambda prompt: (len(prompt.text), prompt.prompt_id))
    by_pixels = sorted(by_length, key=_pixels)[-_LARGEST:]
    tried = [*by_length[-_LONGEST:], *by_pixels]
    if not tried:
        return rollout.max_completion_length + 1, ()
    sources = tuple(tuple(SourceImage.of(each.load()) for each in prompt.sources) for prompt in tried)
    encoded = policy.encode([prompt.text for prompt in tried], sources, for_engine=True)
    context = int(encoded.lengths.max()) + rollout.max_completion_length
    last = len(tried) - 1
    return context, (served_prompts(encoded, [last], sources[-1:])[last],) if sources[-1] else ()


def _pixels(prompt: Prompt) -> int:
    return sum(source.size.pixels for source in prompt.sources)
