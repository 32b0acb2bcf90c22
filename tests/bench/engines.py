"""The policy's own sampling and vLLM's server, in time and in what is learned.

`make figures ONLY=engines` trains a small Qwen3 with adapters by `engine: policy` and by `engine: vllm` with three
seeds each, in the environment that `make test-engines` makes. The two draw their samples from other random streams, so
their rewards agree in distribution, not point by point.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tasks.metrics import SECONDS
from tasks.reports.text import markdown_table
from tasks.rollouts.vllm_server import VllmServer
from tasks.runs.layout import ADVANTAGES, REWARDS, ROLLOUTS, UPDATE
from tasks.storage.artifacts.store import ArtifactStore
from tests.bench.curves import SEEDS, draw, first_and_last, metric_of
from tests.flows.engines.served import ADAPTERS, RANK, build_qwen, float32_options, server_words

SECONDS_TO_START = 1800.0
ITERATIONS = 30
NAMES = ("engine: policy", "engine: vllm")
DIFFERENCE = "sampling/sampling_logp_difference/max"
SHARES = (ROLLOUTS, REWARDS, ADVANTAGES, UPDATE)
STAGES = tuple(f"{SECONDS}{stage}" for stage in SHARES)


@contextmanager
def running_server(model: Path) -> Iterator[str]:
    """The address of a server over a model."""
    server = VllmServer()
    with tempfile.TemporaryDirectory() as folder:
        try:
            words = server_words(
                *float32_options(model, 128), *ADAPTERS, VLLM_CPU_KVCACHE_SPACE="2", OMP_NUM_THREADS="1"
            )
            yield server.ensure_running(words, ArtifactStore(folder, "server"), SECONDS_TO_START)
        finally:
            server.close()


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
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    train("configs/tiny_text.yaml", overrides=overrides, progress=False)
    return {name: metric_of(f"{root}/{engine}-{seed}", name) for name in ("reward", DIFFERENCE, *STAGES)}


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
    draw(policy, vllm, "Qwen3 of 0.4 M with LoRA", "engine_curves.png", NAMES)
    headings = ("", "first 3 iterations", "last 5, by seed", "largest difference of log-probs", *SHARES)
    return list(
        markdown_table(headings, [_cells(each, runs[engine]) for engine, each in zip(runs, NAMES, strict=True)])
    )


def _cells(name: str, runs: Sequence[Mapping[str, Sequence[float]]]) -> tuple[str, ...]:
    """The rewards of an engine's runs, the largest difference, and the share of each stage in the median seconds."""
    seconds = [statistics.median(value for run in runs for value in run[stage]) for stage in STAGES]
    shares = [f"{each:.2f} s, {each / sum(seconds):.0%}" for each in seconds]
    difference = max(max(run[DIFFERENCE]) for run in runs)
    return name, *first_and_last([run["reward"] for run in runs]), f"{difference:.1e}", *shares
