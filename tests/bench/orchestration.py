"""What an iteration costs beside its stages: Prefect, commits and records, reports; early and late, small and large."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import polars as pl

from tasks.metrics import STEP_TIME, WALL_TIME
from tasks.process import CHECKOUT, environment
from tests.bench.page import Row
from tests.flows.server.grpo_ui import grpo_ui

AT_MOST = 0.2
SPANS = ((2, 10), (45, 55), (90, 100))
"""First and last iterations of the rows; the first iteration of a run loads the model."""

REWARDS, PROMPTS, GROUP_SIZE, TOKENS = (1, 4), (2, 20, 200), 2, 4
ITERATIONS_OF_SIZES = 12


def measure() -> Iterator[Row]:
    """Train with as little work of the model as there can be, on a temporary server and on a lasting one."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        variables: dict[str, Mapping[str, str]] = {"temporary": {"PREFECT_HOME": f"{folder}/prefect"}}
        for prompts in PROMPTS:
            run = Path(folder, f"prompts-{prompts}")
            seconds = _seconds(run, variables["temporary"], ITERATIONS_OF_SIZES, prompts=prompts)
            what = f"no stage's, {prompts * GROUP_SIZE} rows in {prompts} groups, an iteration"
            yield Row(what=what, unit="s", ours=seconds[1:], at_most=AT_MOST)
        ui = servers.enter_context(grpo_ui(Path(folder, "server"), {}))
        variables["lasting"] = {"PREFECT_HOME": f"{folder}/client", "PREFECT_API_URL": ui.api_url}
        for (server, chosen), rewards in product(variables.items(), REWARDS):
            run = Path(folder, f"{server}-{rewards}")
            seconds = _seconds(run, chosen, SPANS[-1][1], rewards=rewards)
            for first, last in SPANS:
                counted = "1 reward" if rewards == 1 else f"{rewards} rewards"
                what = f"no stage's, {counted}, {server} server, iterations {first} to {last}"
                yield Row(what=what, unit="s", ours=seconds[first - 1 : last], at_most=AT_MOST)


def _seconds(
    root: Path, variables: Mapping[str, str], iterations: int, *, prompts: int = PROMPTS[0], rewards: int = 1
) -> tuple[float, ...]:
    """Train in a process and a folder of its own; for each iteration, its seconds without those of its stages."""
    rows = prompts * GROUP_SIZE
    settings = {
        "run.name": "bench",
        "run.iterations": iterations,
        "storage.root": root,
        "rollout.prompts_per_iteration": prompts,
        "rollout.prompts_per_batch": prompts,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_completion_length": TOKENS,
        "rewards": json.dumps([{"reward": "answer", "name": f"answer-{number}"} for number in range(rewards)]),
        "update.minibatch_size": rows,
        "update.micro_batch_size": rows,
        "evaluate.prompts": "null",
    }
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "flows.command_line.main", "train", "configs/tiny_text.yaml", *chosen]
    own = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **variables)
    ended = subprocess.run(command, cwd=CHECKOUT, env=own, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    table = pl.read_parquet(root / "bench" / "iteration_*" / "metrics.parquet")
    measured = table.pivot("metric", index="iteration", values="value").sort("iteration")
    return tuple((measured[WALL_TIME] - measured[STEP_TIME]).to_list())
