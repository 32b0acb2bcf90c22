"""Who samples: the policy itself or vLLM's server, in time and in what is learned.

`make figures ONLY=engines` trains a small Qwen3 with adapters by `engine: policy` and by `engine: vllm` with three
seeds each. The two draw their samples from other random streams, so their curves agree in distribution, not point by
point.

Both need the environment that `make test-engines` makes.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import psutil
import torch

from data.recipes.text import prompt_of
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.engines.vllm import VllmEngine
from grpo_core.policies.engines.vllm_server import find_server
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.seeds import derive_seed
from grpo_core.services import Service, run_awaitable
from tasks.metrics import SECONDS
from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table
from tasks.rollouts.vllm_server import VllmServer
from tasks.runs.layout import ADVANTAGES, REWARDS, ROLLOUTS, UPDATE
from tasks.storage.artifacts.store import ArtifactStore
from tests.bench.page import Row
from tests.bench.text_iteration import CONFIG, SEEDS, draw
from tests.flows.engines.served import ADAPTERS, RANK, build_qwen, float32_options, server_words

SECONDS_TO_START = 1800.0


@contextmanager
def running_server(model: Path, context: int = 128) -> Iterator[str]:
    """The address of a server over a model."""
    server = VllmServer()
    with tempfile.TemporaryDirectory() as folder:
        try:
            words = server_words(
                *float32_options(model, context), *ADAPTERS, VLLM_CPU_KVCACHE_SPACE="2", OMP_NUM_THREADS="1"
            )
            yield server.ensure_running(words, ArtifactStore(folder, "server"), SECONDS_TO_START)
        finally:
            server.close()


SIZES = {"4.5 M": (256, 6, 704), "60 M": (768, 8, 2304)}
CELLS = {
    "4.5 M": ((16, 64, 8), (64, 64, 8), (64, 64, 1), (256, 64, 8), (64, 512, 8)),
    "60 M": ((16, 64, 8), (64, 64, 8)),
}
"""Rows, the tokens of each, and how many rows have the same prompt."""
LARGE_CELLS = {
    "4.5 M": ((16, 512, 8), (256, 512, 8)),
    "60 M": ((16, 512, 8), (256, 64, 8), (64, 512, 8), (256, 512, 8)),
}
"""The same where a round takes minutes."""
LETTERS = 96
"""Of a prompt, a token each."""
ROUNDS = 2


def measure() -> Iterator[Row]:
    """Sampling by vLLM's server beside the policy's own, in CPU seconds of all processes.

    A random Qwen3 in fp32, one thread each, prompts of about 100 tokens, and rows that all have their full length; in
    groups of 8 siblings of one prompt, or each row with a prompt of its own. The two take turns; of the rounds the
    first does not count.
    """
    yield from _compared(CELLS, rounds=ROUNDS)


def measure_large() -> Iterator[Row]:
    """Sampling by vLLM's server beside the policy's own where that takes minutes, in CPU seconds of all processes.

    As `engines`, in one round.
    """
    yield from _compared(LARGE_CELLS, rounds=None)


def _compared(cells: Mapping[str, Sequence[tuple[int, int, int]]], rounds: int | None) -> Iterator[Row]:
    torch.set_num_threads(1)
    for name, (hidden, layers, intermediate) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            build_qwen(model, hidden=hidden, layers=layers, intermediate=intermediate)
            with running_server(model, context=1024) as url:
                sides = Sides(model, url)
                for rows, length, siblings in cells[name]:
                    yield from sides.compared(name, rows, length, siblings, rounds)


class Sides:
    """One model, sampled by the policy and by a server."""

    def __init__(self, model: Path, url: str) -> None:
        settings, choice = CausalLMSettings(), TrainingChoice(lora=None)
        cpu = torch.device("cpu")
        self.policy = CausalLMPolicy.load(str(model), settings, {"tokens": choice}, dtype=torch.float32, device=cpu)
        # Rows that end early would make the sides unequal.
        self.policy.forbidden = torch.tensor(self.policy.ends)
        self.server = run_awaitable(find_server(Service(url, SECONDS_TO_START, None, "url")))
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def compared(self, model: str, rows: int, length: int, siblings: int, rounds: int | None) -> Iterator[Row]:
        """The seconds of each side for the same prompts, and of vLLM's the part of this process.

        Args:
            rounds: how often, after one that does not count; None for a single one.
        """
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

        sides: dict[str, Callable[[], None]] = {"policy": sample, "vLLM": by_vllm}
        spent: dict[str, list[float]] = {name: [] for name in sides}
        here: list[float] = []
        for number in range(1 if rounds is None else rounds + 1):
            for name, action in sides.items():
                before = self._cpu_seconds()
                action()
                after = self._cpu_seconds()
                if number or rounds is None:
                    spent[name].append(sum(after) - sum(before))
                    if name == "vLLM":
                        here.append(after[0] - before[0])
        grouped = f"{siblings} of each prompt" if siblings > 1 else "each its prompt"
        what = f"{model}, {rows} rows of {length} tokens, {grouped}"
        served = tuple(spent["vLLM"])
        yield Row(what=what, unit="CPU s", ours=tuple(spent["policy"]), peer="vLLM", theirs=served)
        requests = f"requests and answers, {what}"
        yield Row(what=requests, unit="CPU s", ours=tuple(here), peer="vLLM in all", theirs=served)

    def _cpu_seconds(self) -> list[float]:
        """User and system time of this process, and of each of the server's."""
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]


FIGURE = CHECKOUT / "docs" / "engine_curves.png"
ITERATIONS = 30


def metrics_of(engine: str, seed: int, model: Path, root: str, url: str) -> dict[str, list[float]]:
    """Train a run; the metrics of its iterations that the table and the figure show, by name."""
    from flows import train

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
    return {name: table.filter(pl.col("metric") == name)["value"].to_list() for name in ("reward", DIFFERENCE, *STAGES)}


WHAT, NAMES = "Qwen3 of 0.4 M with LoRA", ("engine: policy", "engine: vllm")
DIFFERENCE = "sampling/sampling_logp_difference/max"
SHARES = (ROLLOUTS, REWARDS, ADVANTAGES, UPDATE)
STAGES = tuple(f"{SECONDS}{stage}" for stage in SHARES)


def table(name: str) -> list[str]:
    """Train in turn, draw docs/engine_curves.png, and return the table."""
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, list[float]]]] = {"policy": [], "vllm": []}
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        build_qwen(model, hidden=128, layers=2, intermediate=256, steps=400)
        with running_server(model) as url:
            for seed in SEEDS:
                for engine, done in runs.items():
                    begun = time.perf_counter()
                    done.append(metrics_of(engine, seed, model, root, url))
                    print(f"{engine}, seed {seed}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    policy, vllm = ([each["reward"] for each in done] for done in runs.values())
    draw(policy, vllm, what=WHAT, to=FIGURE, names=NAMES)
    headings = ("", "first 3 iterations", "last 5, by seed", "largest difference of log-probs", *SHARES)
    return list(
        markdown_table(headings, [_cells(each, runs[engine]) for engine, each in zip(runs, NAMES, strict=True)])
    )


def _cells(name: str, runs: Sequence[Mapping[str, Sequence[float]]]) -> tuple[str, ...]:
    """The rewards of an engine's runs, the largest difference, and the share of each stage in the median seconds."""
    first = statistics.fmean(reward for run in runs for reward in run["reward"][:3])
    last = ", ".join(f"{statistics.fmean(run['reward'][-5:]):.3f}" for run in runs)
    seconds = [statistics.median(value for run in runs for value in run[stage]) for stage in STAGES]
    shares = [f"{each:.2f} s, {each / sum(seconds):.0%}" for each in seconds]
    return name, f"{first:.3f}", last, f"{max(max(run[DIFFERENCE]) for run in runs):.1e}", *shares
