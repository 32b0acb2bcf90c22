"""The tiny text model trained here and by TRL's GRPOTrainer: same model, prompts, reward and settings, three seeds.

`python -m tests.bench.learning_curves` writes docs/learning_curves.png and prints a table. The two draw their samples
from other random streams, so their curves agree in distribution, not point by point.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import polars as pl
import torch

from configs.loader import read_config
from configs.schema import RunConfig
from flows.training.train import train
from tests.bench.text_iteration import build_trainer

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "tiny_text.yaml"
FIGURE = REPOSITORY / "docs" / "learning_curves.png"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        rewards: mean training reward of each iteration.
    """

    rewards: tuple[float, ...]


def configured(seed: int, root: str) -> RunConfig:
    """The shipped configuration without its evaluation."""
    overrides = [f"run.seed={seed}", f"run.name=seed{seed}", f"storage.root={root}", "evaluate.prompts=null"]
    return read_config(CONFIG, overrides)


def train_here(seed: int) -> Curve:
    """One run, its rewards from its own tables."""
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(train(configured(seed, root)))
        table = pl.read_parquet(f"{root}/seed{seed}/iteration_*/metrics.parquet").sort("iteration")
        rewards = table.filter(pl.col("metric") == "reward")["value"].to_list()
    return Curve(tuple(rewards))


def train_with_trl(seed: int) -> Curve:
    """TRL's trainer at the settings of the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = configured(seed, folder)
        trainer = build_trainer(config, folder, config.run.iterations)
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    return Curve(tuple(float(step["reward"]) for step in steps))


def draw(ours: Sequence[Curve], theirs: Sequence[Curve]) -> None:
    """Each seed as a thin line, their mean as a thick one."""
    figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=150)
    for curves, name, colour in ((ours, "this project", "#0b6e4f"), (theirs, "TRL 1.16 GRPOTrainer", "#c8553d")):
        places = range(1, len(curves[0].rewards) + 1)
        for curve in curves:
            axes.plot(places, curve.rewards, color=colour, linewidth=0.8, alpha=0.35)
        means = [statistics.fmean(values) for values in zip(*(curve.rewards for curve in curves), strict=True)]
        axes.plot(places, means, color=colour, linewidth=2.2, label=name)
    axes.set(xlabel="iteration", ylabel="mean training reward", title=f"tiny text model, {len(ours)} seeds each")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(FIGURE)


def main() -> None:
    """Train in turn, write the figure and print the table."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    ours, theirs = [], []
    for seed in SEEDS:
        ours.append(train_here(seed))
        theirs.append(train_with_trl(seed))
        print(f"seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    draw(ours, theirs)
    print("| | first 3 iterations | last 5 iterations, by seed |")
    print("|---|---|---|")
    for name, curves in (("this project", ours), ("TRL 1.16", theirs)):
        first = statistics.fmean(reward for curve in curves for reward in curve.rewards[:3])
        last = ", ".join(f"{statistics.fmean(curve.rewards[-5:]):.3f}" for curve in curves)
        print(f"| {name} | {first:.3f} | {last} |")


if __name__ == "__main__":
    main()
