"""Checks of the engine that samples rollouts: whether its servers can sample this policy, and how to start one."""

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from configs.schema import RunConfig
from configs.sections import TextRolloutSection, VllmSection
from flows.preflight.model import source_of
from flows.preflight.prompts import PromptFiles
from grpo_core.awaitables import run_awaitable
from grpo_core.errors import InputError
from grpo_core.policies.engines.settings import EngineDtype, server_command
from grpo_core.policies.engines.settings import refuse_adapters as refuse_vllm_adapters
from grpo_core.services import Service, ServiceError, read_token
from tasks.models.initial import model_digest, training_choices
from tasks.runs.stored import adapter_version
from tasks.storage.artifacts.store import open_store
from tasks.storage.files import is_local, nearest_existing

PLACE = "rollout.vllm"
_LONGEST = 16
"""Prompts whose ids are counted, those with the most letters."""


def check_engine(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report servers that cannot sample this policy; where workers of a pool sample, they reach the servers."""
    section = vllm_section(config)
    if section is None or config.placement.rollouts.pool:
        return
    if section.words:
        if shutil.which(section.words[0]) is None:
            hint = "There is no such program here. vLLM is installed in an environment of its own: docs/engines.md."
            yield InputError(f"{PLACE}.command", section.words[0], hint)
        return
    for url in section.urls:
        try:
            yield from _server_problems(config, section, url, prompts)
        except InputError as error:
            yield from error.errors
        except ServiceError as failure:
            hint = f"{failure}. Start a server there: {fitting_command(config, url)}".replace("the service", "It", 1)
            yield InputError(f"{PLACE}.url", url, hint)


def vllm_section(config: RunConfig) -> VllmSection | None:
    """Return the servers that sample the run's rollouts; None if another engine does."""
    rollout = config.rollout
    return rollout.vllm if isinstance(rollout, TextRolloutSection) and rollout.engine == "vllm" else None


def engine_notes(config: RunConfig) -> tuple[str, ...]:
    """Return how a fitting server is started; nothing without the engine vllm."""
    section = vllm_section(config)
    return () if section is None else (f"a fitting server: {fitting_command(config, next(iter(section.urls), None))}",)


def fitting_command(config: RunConfig, url: str | None) -> str:
    """Return the command that starts a server for a run, with its environment variables, for a shell."""
    section, policy = vllm_section(config), config.policy
    assert section is not None, "the run has servers"
    dtype: EngineDtype = section.dtype or policy.dtype
    words = section.words or ("vllm", "serve")
    rank = policy.lora.rank if policy.lora is not None else None
    command = server_command(words, policy.model, dtype, revision=policy.revision, rank=rank, context=None)
    port = Service(url, 1.0, None, PLACE).port if url is not None else None
    place = ("--port", str(port)) if port is not None else ()
    return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {shlex.join((*command, *place))}"


def _server_problems(config: RunConfig, section: VllmSection, url: str, prompts: PromptFiles) -> Iterator[InputError]:
    from grpo_core.policies.causal_lm.loading import build_on_meta, read_config
    from grpo_core.policies.engines.vllm_checks import Needs, server_problems, unservable_modules, write_zero_adapter
    from grpo_core.policies.engines.vllm_server import Adapter, adapter_name, find_server

    token = read_token(f"{PLACE}.token_env", section.token_env)
    service = Service(url, section.timeout_s, token, PLACE)
    server = run_awaitable(find_server(service))
    if (error := _other_model(config, url, server.root)) is not None:
        yield error
        return
    store, version = open_store(config.storage, config.run.name), adapter_version(config)
    with (
        training_choices(config.policy, store, version) as choices,
        tempfile.TemporaryDirectory(prefix=".grpo-adapter-", dir=_seen_by_servers(config, section)) as folder,
    ):
        choice = choices["tokens"]
        assert choice.lora is not None, "full weights have been refused"
        refuse_vllm_adapters(choice.lora)
        trained = build_on_meta(source_of(config), read_config(source_of(config)), choice)
        if ends := unservable_modules(trained):
            hint = f"vLLM has no adapters for {', '.join(ends)}; name other layers."
            yield InputError("policy.lora.targets", choice.lora.targets, hint)
            return
        Path(folder).chmod(0o755)
        write_zero_adapter(trained, Path(folder))
        zeros = Adapter(adapter_name(config.run.name, "0" * 64), folder)
        needs = Needs(_longest(config, prompts), getattr(config.rollout, "top_k", 0), config.run.name, zeros)
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


def _longest(config: RunConfig, prompts: PromptFiles) -> int:
    """Return how many ids the longest prompt and its completion have."""
    from grpo_core.policies.causal_lm.loading import load_tokenizer
    from grpo_core.policies.causal_lm.prompts import prompt_ids

    rollout = config.rollout
    assert isinstance(rollout, TextRolloutSection), "engines sample texts"
    texts = {prompt.text for part in ("data", "evaluate") for each in prompts.usable(part) for prompt in each.prompts}
    tokenizer = load_tokenizer(source_of(config))
    counts = [len(prompt_ids(tokenizer, rollout, text)) for text in sorted(texts, key=len)[-_LONGEST:]]
    return max(counts, default=1) + rollout.max_completion_length
