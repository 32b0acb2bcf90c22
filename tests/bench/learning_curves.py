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
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from configs.loader import read_config
from configs.schema import TextRunConfig
from flows.training.train import train
from grpo_core.rewards.reward import ScoringBatch
from grpo_core.rewards.text.answer import AnswerReward
from tasks.prompts.read import read_prompts

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


def configured(seed: int, root: str) -> TextRunConfig:
    """The shipped configuration without its evaluation."""
    overrides = [f"run.seed={seed}", f"run.name=seed{seed}", f"storage.root={root}", "evaluate.prompts=null"]
    config = read_config(CONFIG, overrides)
    assert isinstance(config, TextRunConfig)
    return config


def train_here(seed: int) -> Curve:
    """One run, its rewards from its own tables."""
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(train(configured(seed, root)))
        table = pl.read_parquet(f"{root}/seed{seed}/iteration_*/metrics.parquet").sort("iteration")
        rewards = table.filter(pl.col("metric") == "reward")["value"].to_list()
    return Curve(tuple(rewards))


def answer_reward(
    prompts: list[object], completions: list[list[dict[str, str]]], answer: list[str], **others: object
) -> list[float]:
    """The same reward behind TRL's signature."""
    batch = ScoringBatch(
        sample_ids=[str(place) for place in range(len(answer))],
        prompts=[str(prompt) for prompt in prompts],
        completions=[messages[0]["content"] for messages in completions],
        columns={"answer": answer},
    )
    return [float(score.value or 0.0) for score in AnswerReward().score(batch)]


def train_with_trl(seed: int) -> Curve:
    """TRL's trainer at the settings of the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = configured(seed, folder)
        rollout, update = config.rollout, config.update
        assert config.data.prompts is not None
        rows = [
            {"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.columns["answer"]}
            for prompt in read_prompts(config.data.prompts).prompts
        ]
        settings = GRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=config.run.iterations,
            per_device_train_batch_size=config.rows_per_iteration,
            num_generations=rollout.group_size,
            max_completion_length=rollout.max_completion_length,
            temperature=rollout.temperature,
            learning_rate=update.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=update.betas[0],
            adam_beta2=update.betas[1],
            adam_epsilon=update.eps,
            weight_decay=update.weight_decay,
            max_grad_norm=update.max_grad_norm,
            loss_type=update.loss,
            epsilon=update.clip_range,
            beta=update.kl_coef,
            scale_rewards=config.advantages.scale,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(config.policy.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(config.policy.model),
            reward_funcs=answer_reward,
            train_dataset=Dataset.from_list(rows),
            args=settings,
        )
        trainer.remove_callback(PrinterCallback)
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
