"""What Prefect, storage and reports add to an iteration, beside the same calls into grpo_core in a plain loop.

`make bench`. Both sides run in one process on the same model, prompts and seeds, in turn; figures are medians.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from prefect import flow
from rich.console import Console
from rich.table import Table

from configs.loader import read_config
from configs.schema import RunConfig
from flows.pipeline.run import Run, open_run
from flows.pipeline.stages import recording
from flows.training.history import TrainingHistory
from flows.training.prefetch import prefetching
from flows.training.train import train_iteration
from grpo_core.advantages import compute_advantages
from grpo_core.collect import collect_rollouts
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.records import TokenBatch, TrainingRows
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import ScoringBatch
from grpo_core.seeds import derive_seed
from grpo_core.update import update_policy
from tasks.prompts.targets import TargetReference, load_target
from tasks.rollouts.plan import RolloutPlan

LIMIT_SECONDS = 0.3


@dataclass
class Timings:
    """Seconds of each iteration on either side."""

    plain: list[float] = field(default_factory=list)
    staged: list[float] = field(default_factory=list)

    def added(self) -> list[float]:
        """What the stages cost more, iteration by iteration."""
        return [staged - plain for plain, staged in zip(self.plain, self.staged, strict=True)]


class PlainLoop:
    """The algorithm without stages: everything stays in memory and nothing is kept."""

    def __init__(self, config: RunConfig, run: Run) -> None:
        """Load a policy of its own."""
        dtype: torch.dtype = getattr(torch, config.policy.dtype)
        family = run.model.family
        self.config = config
        self.policy = family.load(
            config.policy.model,
            config.rollout,
            run.model.choice(),
            dtype=dtype,
            device=torch.device("cpu"),
            autocast=None,
        )
        self.optimizer = PolicyOptimizer(self.policy.trainable_parameters(), config.update)

    def iterate(self, plan: RolloutPlan) -> None:
        """One iteration."""
        config = self.config
        requests = [plan.request(group) for group in plan.groups]
        groups = list(collect_rollouts(self.policy, requests, prompts_per_batch=config.rollout.prompts_per_batch))
        rewards = [build_reward(section.reward, section.settings) for section in config.rewards]
        values = []
        for group, planned in zip(groups, plan.groups, strict=True):
            assert planned.target_uri is not None
            assert planned.target_sha256 is not None
            count = len(group.outputs)
            target = load_target(TargetReference(planned.target_uri, planned.target_sha256))
            batch = ScoringBatch(group.request.sample_ids, [planned.prompt] * count, group.outputs, [target] * count)
            values.append([[score.value for score in reward.score(batch)] for reward in rewards])
        scores = torch.tensor(values, dtype=torch.float64).transpose(1, 2)
        advantages = compute_advantages(scores, config.rewards, config.advantages)
        rows = TrainingRows(
            sample_ids=tuple(name for request in requests for name in request.sample_ids),
            tokens=TokenBatch(
                tuple(request.prompt for request in requests for _ in request.sample_ids),
                torch.cat([group.tokens.token_ids for group in groups]),
                torch.cat([group.tokens.loss_mask for group in groups]),
                config.rollout.temperature,
            ),
            rollout_logprobs=torch.cat([group.rollout_logprobs for group in groups]),
            advantages=advantages.advantages.flatten(),
            finished=torch.cat([group.finished for group in groups]),
            on_policy=torch.ones(config.rows_per_iteration, dtype=torch.bool),
            max_length=self.policy.max_length,
        )
        update_policy(
            self.policy,
            self.optimizer,
            rows,
            config.update,
            seed=derive_seed(0, plan.folder),
            parity=config.update.parity.tolerance(in_fp32=config.policy.in_fp32),
        )


@flow(name="bench", validate_parameters=False)
async def compare(config: RunConfig) -> Timings:
    """Alternate the two, one iteration each."""
    with open_run(config) as run:
        plain, policy, history, timings = PlainLoop(config, run), run.base_policy, TrainingHistory(), Timings()
        async with recording(run.store, run.lock):
            with prefetching(run, history, policy) as groups:
                for iteration in range(1, config.run.iterations + 1):
                    begun = time.perf_counter()
                    plain.iterate(run.plan(iteration, 1, config.rollout.prompts_per_iteration))
                    between = time.perf_counter()
                    policy = await train_iteration(run, policy, iteration, groups, history)
                    timings.plain.append(between - begun)
                    timings.staged.append(time.perf_counter() - between)
    return timings


def measure(iterations: int, overrides: Sequence[str]) -> Timings:
    """Run the comparison in a folder of its own; the first iteration warms up and does not count."""
    with tempfile.TemporaryDirectory() as root:
        settings = [f"storage.root={root}", f"run.iterations={iterations + 1}", "evaluate.prompts=null", *overrides]
        top = Path(__file__).resolve().parent.parent.parent
        timings = asyncio.run(compare(read_config(top / "configs" / "tiny.yaml", settings)))
    return Timings(timings.plain[1:], timings.staged[1:])


def main() -> None:
    """Print the table; exit 1 when an iteration costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    iterations = parser.parse_args().iterations
    table = Table(title=f"seconds an iteration, medians of {iterations}", title_justify="left")
    for column in ("iteration", "plain loop", "staged", "added", "added, quartiles"):
        table.add_column(column, justify="left" if column == "iteration" else "right")
    worst = 0.0
    sizes = {
        "4 images": ["rollout.prompts_per_iteration=2", "rollout.group_size=2", "update.minibatch_size=4"],
        "tiny.yaml as shipped": [],
    }
    for name, overrides in sizes.items():
        timings = measure(iterations, overrides)
        added = timings.added()
        low, _, high = statistics.quantiles(added, n=4)
        worst = max(worst, statistics.median(added))
        figures = (statistics.median(timings.plain), statistics.median(timings.staged), statistics.median(added))
        table.add_row(name, *(f"{figure:.3f}" for figure in figures), f"{low:.3f} to {high:.3f}")
    Console(width=100).print(table)
    if worst > LIMIT_SECONDS:
        raise SystemExit(f"an iteration costs {worst:.3f} s more than the plain loop; the limit is {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
