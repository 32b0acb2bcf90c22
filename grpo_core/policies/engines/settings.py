"""The engines by name, what they say of themselves, and how a vLLM server is reached."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Strict

from grpo_core.errors import InputError
from grpo_core.policies.trained.settings import LoraSettings
from grpo_core.services import check_token_env, check_url
from grpo_core.settings import Truncation
from grpo_core.uses import Uses

EngineName = Literal["policy", "vllm"]
EngineDtype = Literal["float32", "bfloat16", "float16"]
_Words = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)] | str

Progress = Callable[[int], None]
"""Called with the number of rows that are sampled."""


@dataclass(frozen=True)
class EngineRecord:
    """Who sampled rows, as it is stored with each of them.

    Attributes:
        engine_version: of its package; None for the policy itself.
        engine_dtype: that it computes in.
        engine_settings: JSON of what else decides its results; None for the policy itself.
        engine_adapter: digest of the adapter that a server answered with; None without one.
    """

    engine: str = "policy"
    engine_version: str | None = None
    engine_dtype: str = "float32"
    engine_settings: str | None = None
    engine_adapter: str | None = None

    def __str__(self) -> str:
        named = " ".join(filter(None, (self.engine, self.engine_version, "in", self.engine_dtype)))
        return named + (f" with adapter {self.engine_adapter[:12]}" if self.engine_adapter else "")


VLLM_MIN_VERSION = (0, 32)
"""The oldest that was tried."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank; a server that is started for a rank gets the next larger one."""


@dataclass(frozen=True)
class VllmSettings:
    """Servers that answer for the policy.

    Attributes:
        url: address of a running server, or several that share the prompts of an iteration.
        command: instead, starts a server that ends with the run, such as `/opt/vllm/bin/vllm serve`; a list where words
            have spaces. Model and options are appended, except those that are given.
        dtype: of the server (its --dtype); decides how near its log-probs have to be.
        token_env: environment variable with the server's --api-key.
        timeout_s: seconds for the answer to one row, and for the start of a server.
        concurrency: rows in flight per server.
        adapter_folder: folder for adapters that the server sees under the same path; None: the run's.
    """

    url: Annotated[_Words | None, Uses.ADDRESS] = None
    command: Annotated[_Words | None, Uses.COMMAND] = None
    dtype: EngineDtype | None = None
    token_env: Annotated[str | None, Uses.VARIABLE] = None
    timeout_s: PositiveFloat = 600.0
    concurrency: PositiveInt = 256
    adapter_folder: Annotated[str | None, Uses.WRITTEN] = None

    def __post_init__(self) -> None:
        if not self.urls and not self.command:
            raise InputError("rollout.vllm.url", None, "Give the address of a server, or a command that starts one.")
        if self.urls and self.command:
            hint = "A server is either there already, or started by its command; leave out one of them."
            raise InputError("rollout.vllm.command", self.command, hint)
        for url in self.urls:
            _checked(check_url, "url", url)
        if len(set(self.urls)) < len(self.urls):
            raise InputError("rollout.vllm.url", list(self.urls), "Give each server once.")
        if self.token_env is not None:
            _checked(check_token_env, "token_env", self.token_env)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses, without trailing slashes and without the path /v1 of OpenAI's clients."""
        given = (self.url,) if isinstance(self.url, str) else self.url or ()
        return tuple(re.sub(r"(/v1)?/*$", "", url) for url in given)

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command; none without one."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command or ()


def server_command(
    words: Sequence[str],
    model: str,
    dtype: str,
    *,
    revision: str | None,
    rank: int | None,
    images: Mapping[str, Any] | None,
    at_most: int | None = None,
) -> tuple[str, ...]:
    """Return the command of a server that fits a policy: these words, and the options that they do not give.

    Args:
        words: the program, such as `vllm serve` or `python -m vllm.entrypoints.openai.api_server`, and options.
        rank: of the adapters that it loads; None: it loads none.
        images: arguments of its processor of images; None: prompts have none.
        at_most: ids that it may read; None: as many as its model can.
    """
    given = {word.partition("=")[0] for word in words}
    options = {"--dtype": dtype, "--logprobs-mode": "processed_logprobs", "--max-logprobs": "-1"}
    if images:
        options["--mm-processor-kwargs"] = json.dumps(images)
    if at_most is not None:
        options["--max-model-len"] = str(at_most)
    if revision is not None:
        options["--revision"] = revision
    if rank is not None:
        options |= {"--max-lora-rank": str(next(size for size in LORA_RANKS if size >= rank)), "--max-loras": "3"}
    command = [*words]
    if "serve" not in words:
        options["--model"] = model
    elif "--model" not in given:
        place = words.index("serve") + 1
        # Without a model vLLM serves one of its own choice.
        command[place:place] = [model] if place == len(words) or words[place].startswith("-") else []
    flags = {"--enable-lora": rank is not None, "--enable-scale-out": images is not None}
    command += [name for name, needed in flags.items() if needed and name not in given]
    for name, value in options.items():
        command += [] if name in given else [name, value]
    return tuple(command)


def _checked(check: Any, field: str, value: str) -> None:
    try:
        check(value)
    except InputError as error:
        raise InputError(f"rollout.vllm.{field}", error.value, error.hint) from None


def refuse_truncation(engine: EngineName, truncation: Truncation) -> None:
    """Raise InputError for cuts whose kept ids the engine does not return: log-probs are over these."""
    if engine == "policy":
        return
    hint = (
        f"The engine {engine} does not return the ids that it kept, and log-probs are over these; "
        "use top_k, or rollout.engine: policy."
    )
    for name, cuts in {"top_p": truncation.top_p < 1, "min_p": truncation.min_p > 0}.items():
        if cuts:
            raise InputError(f"rollout.{name}", getattr(truncation, name), hint)


def refuse_adapters(lora: LoraSettings, place: str = "policy.lora") -> None:
    """Raise InputError for adapters that vLLM does not load."""
    if lora.use_dora:
        raise InputError(f"{place}.use_dora", True, "vLLM does not load DoRA; set it to false.")
    if lora.modules_to_save:
        hint = "vLLM loads low-rank matrices alone; leave it out."
        raise InputError(f"{place}.modules_to_save", list(lora.modules_to_save), hint)
    if lora.init_lora_weights not in (True, "gaussian"):
        hint = "It changes the weights of the base, which the server loads as they are stored; use true or gaussian."
        raise InputError(f"{place}.init_lora_weights", lora.init_lora_weights, hint)
    if lora.rank > LORA_RANKS[-1]:
        raise InputError(f"{place}.rank", lora.rank, f"vLLM loads ranks up to {LORA_RANKS[-1]}; lower it.")
