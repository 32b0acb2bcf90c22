"""vLLM's server in its own environment, and runs that it samples for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from tasks.rollouts.vllm_server import VllmServer
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Runs, Start
from tests.flows.engines.served import (
    ADAPTERS,
    PYTHON,
    RANK,
    build_qwen,
    build_qwen_vision,
    float32_options,
    server_words,
)

SECONDS_TO_START = 900.0
LENGTH = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip those where the environment is not there."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("engines")
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="`make test-engines` makes .venv-engines with vLLM"))


class Servers:
    """Servers in fp32, of which one runs at a time: that which was asked for last."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._server, self._model, self._store = VllmServer(), model, ArtifactStore(str(folder), "server")

    def url(
        self,
        *options: str,
        model: Path | None = None,
        adapters: bool = True,
        logprobs: str = "processed_logprobs",
        context: int = 128,
    ) -> str:
        """The address of a server with these options, which is started unless it runs; by default over the texts'."""
        served = float32_options(model or self._model, context, logprobs)
        words = (*served, *(ADAPTERS if adapters else ()), *options)
        return self._server.ensure_running(server_words(*words), self._store, SECONDS_TO_START)

    def close(self) -> None:
        """End the one that runs."""
        self._server.close()


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(model, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that sorts letters with slips."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    build_qwen(folder, hidden=128, layers=2, intermediate=256, steps=300)
    return folder


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL that boxes shapes now and then."""
    folder = tmp_path_factory.mktemp("model") / "qwen3-vl"
    build_qwen_vision(folder, steps=60)
    return folder


@pytest.fixture(scope="session")
def trained(
    server: None, model: Path, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Runs, Start]:
    """A finished run that no test changes."""
    runs = Runs(tmp_path_factory.mktemp("trained"))
    return runs, runs.start_text(**settings(model, {"url": servers.url()}, run__iterations=3))


def save_other_adapter(model: Path, folder: Path) -> None:
    """An adapter of the rank of these runs that no run has trained."""
    base = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(base, config).save_pretrained(folder)


def settings(model: Path, vllm: dict[str, object], **changes: object) -> dict[str, object]:
    """A small training of texts with adapters, whose rollouts these servers sample."""
    return {
        "run__iterations": 2,
        "policy__model": str(model),
        "policy__lora": {"rank": RANK},
        "rollout__engine": "vllm",
        "rollout__vllm": vllm,
        "rollout__prompts_per_iteration": 4,
        "rollout__group_size": 4,
        "rollout__max_completion_length": LENGTH,
        "update__minibatch_size": 16,
        "update__micro_batch_size": 16,
        "update__learning_rate": 1e-2,
        "evaluate__every": 2,
        "evaluate__limit": 2,
        "evaluate__samples_per_prompt": 2,
        **changes,
    }


def started_server(*options: str) -> dict[str, object]:
    """rollout.vllm of a server that the run starts."""
    return {"command": server_words(*options), "timeout_s": SECONDS_TO_START}
