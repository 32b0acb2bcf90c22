"""vLLM's server in its own environment, and a model that its CPU kernels can compute."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.tiny_text import TinyTextRecipe, build_tokenizer, save_tiny_text_model, train_model
from tasks.rollouts.vllm_server import VllmServer
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import REPOSITORY, Runs, Start

PYTHON = REPOSITORY / ".venv-engines" / "bin" / "python"
SECONDS_TO_START = 900.0
RANK = 8
LENGTH = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip those where the environment is not there."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("engines")
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="`make test-engines` makes .venv-engines with vLLM"))


def server_words(*options: str, **variables: str) -> list[str]:
    """The program of a server, as rollout.vllm.command: what a machine without a GPU needs, and these options."""
    given = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables}
    program = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    return ["env", *(f"{name}={value}" for name, value in given.items()), *program, *options]


class Servers:
    """Servers over one model in fp32, of which one runs at a time: that which was asked for last."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._server, self._model, self._store = VllmServer(), model, ArtifactStore(str(folder), "server")

    def url(
        self, *options: str, adapters: bool = True, logprobs: str = "processed_logprobs", context: int = 128
    ) -> str:
        """The address of a server with these options, which is started unless it runs."""
        given = {"--model": self._model, "--dtype": "float32", "--max-model-len": context, "--max-logprobs": -1}
        lora = {"--max-lora-rank": RANK, "--max-loras": 3} if adapters else {}
        pairs = {**given, "--logprobs-mode": logprobs, **lora}
        words = [part for name, value in pairs.items() for part in (name, str(value))]
        words += ["--enable-lora"] * adapters
        return self._server.ensure_running(server_words(*words, *options), self._store, SECONDS_TO_START)

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
    """A Qwen3 with heads of 32 dimensions that sorts letters with slips; vLLM on the CPU refuses heads of 24."""
    folder, recipe = tmp_path_factory.mktemp("model") / "qwen3", TinyTextRecipe(steps=300, learning_rate=2e-3)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = Qwen3ForCausalLM(config)
    train_model(built, tokenizer, recipe)
    save_tiny_text_model(built.eval(), tokenizer, folder)
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
