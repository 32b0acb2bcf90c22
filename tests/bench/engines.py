"""Who samples: the policy itself, transformers' continuous batching and vLLM's server, in time and in what is learned.

`python -m tests.bench.engines` trains a small Qwen3 with adapters by `engine: policy` and by `engine: vllm` with three
seeds each, writes docs/engine_curves.png and prints a table. The two draw their samples from other random streams, so
their curves agree in distribution, not point by point.

Both need the environment that `make test-engines` makes.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.tiny_text import TinyTextRecipe, build_tokenizer, prompt_of, save_tiny_text_model, train_model
from grpo_core.awaitables import run_awaitable
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.engines import continuous_batching
from grpo_core.policies.engines.vllm import VllmEngine
from grpo_core.policies.engines.vllm_server import find_server
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.seeds import derive_seed
from grpo_core.services import Service
from tasks.process import CHECKOUT
from tasks.rollouts.vllm_server import VllmServer
from tasks.storage.artifacts.store import ArtifactStore
from tests.bench.page import Row
from tests.bench.text_iteration import CONFIG, SEEDS, draw

PYTHON = CHECKOUT / ".venv-engines" / "bin" / "python"
SECONDS_TO_START = 1800.0
RANK = 8


def build_qwen(folder: Path, *, hidden: int, layers: int, intermediate: int, steps: int = 0) -> None:
    """Write a Qwen3 with heads of 32 dimensions, which vLLM's kernels for CPUs compute, and the tiny tokenizer.

    Args:
        steps: of the tiny text model's supervised training; 0: random weights.
    """
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    if steps:
        train_model(model, tokenizer, TinyTextRecipe(steps=steps, learning_rate=2e-3))
    save_tiny_text_model(model.eval(), tokenizer, folder)


def server_words(model: str, context: int) -> list[str]:
    """The command of a server in fp32 on the CPU that loads adapters of RANK."""
    variables = ("VLLM_CPU_KVCACHE_SPACE=2", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1")
    program = (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")
    options = {
        "--model": model,
        "--dtype": "float32",
        "--max-model-len": context,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
        "--max-lora-rank": RANK,
        "--max-loras": 3,
    }
    pairs = [part for name, value in options.items() for part in (name, str(value))]
    return ["env", *variables, *program, "--enable-lora", *pairs]


@contextmanager
def running_server(model: Path, context: int = 128) -> Iterator[str]:
    """The address of a server over a model."""
    server = VllmServer()
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield server.ensure_running(
                server_words(str(model), context), ArtifactStore(folder, "server"), SECONDS_TO_START
            )
        finally:
            server.close()


SIZES = (("4.5 M", (256, 6, 704)), ("60 M", (768, 8, 2304)))
CELLS = tuple((rows, length) for length in (64, 512) for rows in (16, 64, 256))
"""Rows, and the tokens of each."""
SIBLINGS = 8
LETTERS = 96
"""Of a prompt, a token each."""
ROUNDS = 3


def measure(sizes: Sequence[tuple[str, tuple[int, int, int]]] = SIZES, cells: Any = CELLS) -> Iterator[Row]:
    """Sampling by vLLM's server and by continuous batching beside the policy's own, in CPU seconds of all processes.

    A random Qwen3 in fp32, one thread each, prompts of about 100 tokens, and rows that all have their full length; in
    groups of 8 siblings of one prompt, and each row with a prompt of its own. The three take turns; of the rounds the
    first does not count.
    """
    torch.set_num_threads(1)
    for name, (hidden, layers, intermediate) in sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            build_qwen(model, hidden=hidden, layers=layers, intermediate=intermediate)
            with running_server(model, context=1024) as url:
                sides = Sides(model, url)
                for rows, length in cells:
                    for siblings in (SIBLINGS, 1):
                        yield from sides.compared(name, rows, length, siblings)


class Sides:
    """One model, sampled by the policy, by continuous batching, and by a server."""

    def __init__(self, model: Path, url: str) -> None:
        settings, choice = CausalLMSettings(), TrainingChoice(lora=None)
        cpu = torch.device("cpu")
        self.policy = CausalLMPolicy.load(str(model), settings, {"tokens": choice}, dtype=torch.float32, device=cpu)
        # Rows that end early would make the sides unequal.
        self.policy.forbidden = torch.tensor(self.policy.ends)
        self.server = run_awaitable(find_server(Service(url, SECONDS_TO_START, None, "url")))
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def compared(self, model: str, rows: int, length: int, siblings: int) -> Iterator[Row]:
        """The seconds of each side for the same prompts, and of vLLM's the part of this process."""
        self.policy.sample_with(CausalLMSettings(max_completion_length=length))
        words = [f"{number:03d}" + "ab" * (LETTERS // 2) for number in range(rows // siblings)]
        seeds = [derive_seed(0, "tokens", row) for row in range(rows)]

        def sample() -> None:
            sampled = self.policy.sample_tokens([prompt_of(word) for word in words], siblings, seeds)
            assert int(sampled.actions.loss_mask.sum()) == rows * length, "every row has its full length"

        def by_vllm() -> None:
            self.policy.engine = VllmEngine(lambda: [self.server], None, rows)
            sample()
            self.policy.engine = None

        def by_batching() -> None:
            with continuous_batching.sampling(self.policy, "float32", lambda done: None):
                sample()

        kept: list[list[tuple[float, float]]] = [[], [], []]
        for counted in (False, *[True] * ROUNDS):
            for action, seconds in zip((sample, by_batching, by_vllm), kept, strict=True):
                before = self._cpu_seconds()
                action()
                after = self._cpu_seconds()
                if counted:
                    seconds.append((sum(after) - sum(before), after[0] - before[0]))
        own, batching, vllm = (tuple(total for total, _ in seconds) for seconds in kept)
        grouped = f"{siblings} of each prompt" if siblings > 1 else "each its prompt"
        what = f"{model}, {rows} rows of {length} tokens, {grouped}"
        yield Row(what=what, unit="CPU s", ours=own, peer="vLLM", theirs=vllm)
        yield Row(what=what, unit="CPU s", ours=own, peer="continuous batching", theirs=batching)
        here = tuple(mine for _, mine in kept[2])
        yield Row(what=f"requests and answers, {what}", unit="CPU s", ours=here, peer="vLLM in all", theirs=vllm)

    def _cpu_seconds(self) -> list[float]:
        """User and system time of this process, and of each of the server's."""
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]


FIGURE = CHECKOUT / "docs" / "engine_curves.png"
ITERATIONS = 30


def rewards_of(engine: str, seed: int, model: Path, root: str, url: str) -> tuple[list[float], float]:
    """The mean training reward of each iteration of a run, and the largest difference of its log-probs in nats."""
    from flows.commands import train

    settings = {
        "run.name": f"{engine}-{seed}",
        "run.seed": seed,
        "run.iterations": ITERATIONS,
        "storage.root": root,
        "policy.model": str(model),
        "policy.lora": {"rank": RANK},
        "rollout.engine": engine,
        "rollout.prompts_per_iteration": 16,
        "rollout.prompts_per_batch": 16,
        "rollout.max_completion_length": 16,
        "update.minibatch_size": 128,
        "update.micro_batch_size": 64,
        "update.learning_rate": 1e-3,
        "evaluate.prompts": None,
    }
    if engine == "vllm":
        settings["rollout.vllm"] = {"url": url}
    train(CONFIG, overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()], progress=False)
    table = pl.read_parquet(f"{root}/{engine}-{seed}/iteration_*/metrics.parquet").sort("iteration")
    values = {name: table.filter(pl.col("metric") == name)["value"] for name in ("reward", DIFFERENCE)}
    return values["reward"].to_list(), max(values[DIFFERENCE].to_list())


WHAT, NAMES = "Qwen3 of 0.4 M with LoRA", ("engine: policy", "engine: vllm")
DIFFERENCE = "sampling/sampling_logp_difference/max"


def main() -> None:
    """Train in turn, write the figure and print the table."""
    torch.set_num_threads(1)
    curves: dict[str, list[list[float]]] = {"policy": [], "vllm": []}
    differences: dict[str, float] = dict.fromkeys(curves, 0.0)
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        build_qwen(model, hidden=128, layers=2, intermediate=256, steps=400)
        with running_server(model) as url:
            for seed in SEEDS:
                for engine in curves:
                    begun = time.perf_counter()
                    rewards, difference = rewards_of(engine, seed, model, root, url)
                    curves[engine].append(rewards)
                    differences[engine] = max(differences[engine], difference)
                    print(f"{engine}, seed {seed}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    draw(curves["policy"], curves["vllm"], what=WHAT, to=FIGURE, names=NAMES)
    print("| | first 3 iterations | last 5 iterations, by seed | largest difference of log-probs |")
    print("|---|---|---|---|")
    for engine, name in zip(curves, NAMES, strict=True):
        first = statistics.fmean(reward for curve in curves[engine] for reward in curve[:3])
        last = ", ".join(f"{statistics.fmean(curve[-5:]):.3f}" for curve in curves[engine])
        print(f"| {name} | {first:.3f} | {last} | {differences[engine]:.1e} |")


if __name__ == "__main__":
    main()
