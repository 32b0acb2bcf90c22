"""The tiny vision model beside TRL's GRPOTrainer: learning curves of finding shapes in drawn images.

`make figures ONLY=grounding` trains it here and in TRL with the same model, prompts, images, rewards and three seeds,
and writes docs/grounding_curves.png and the table of docs/performance.md, with what can be reached without the image;
`grounding_two` does the same with two shapes in each image. The two draw their samples from other random streams, so
their curves agree in distribution, not point by point.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
from datasets import Features, Value, load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback, logging
from trl import GRPOTrainer

from configs.loader import read_config
from configs.schema import RunConfig
from data.recipes.grounding import PROMPT_FILES, best_constant_box, iou_of, split_scenes
from data.recipes.vision import TinyVisionRecipe, measure_saved
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.samples import ScoringBatch
from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table
from tests.bench.text_iteration import SEEDS, draw, trl_settings

CONFIG = CHECKOUT / "configs" / "tiny_grounding.yaml"
FIGURES = {1: CHECKOUT / "docs" / "grounding_curves.png", 2: CHECKOUT / "docs" / "grounding_two_curves.png"}
RECIPE = TinyVisionRecipe()
HEADINGS = (
    "",
    "mean reward, first 3 iterations",
    "last 5, seeds 0, 1, 2",
    "held-out IoU before",
    "after 100 iterations",
    "CPU seconds",
)


class Curve(NamedTuple):
    """The mean training reward of each iteration, held-out IoU before and after, CPU seconds."""

    rewards: list[float]
    heldout: tuple[float, float]
    seconds: float


def configured(shapes: int, seed: int, root: str) -> RunConfig:
    """The shipped configuration, with the prompts of this many shapes in an image."""
    train, heldout = (f"data/prompts/{name}" for name in PROMPT_FILES[shapes])
    overrides = [f"data.prompts={train}", f"evaluate.prompts={heldout}", f"storage.root={root}"]
    return read_config(CONFIG, [*overrides, f"run.seed={seed}", f"run.name=seed{seed}"])


def train_here(shapes: int, seed: int) -> Curve:
    """Train through the real flow and read the run's own tables."""
    from flows.training.train import train

    with tempfile.TemporaryDirectory() as root:
        begun = time.process_time()
        asyncio.run(train(configured(shapes, seed, root)))
        seconds = time.process_time() - begun
        table = pl.read_parquet(f"{root}/seed{seed}/iteration_*/metrics.parquet").sort("iteration")
        rewards = table.filter(pl.col("metric") == "reward")["value"].to_list()
        evaluations = f"{root}/seed{seed}/evaluations"
        before, after = (
            statistics.fmean(pl.read_parquet(f"{evaluations}/{version:06d}/rewards/box_iou/scores.parquet")["value"])
            for version in (0, len(rewards))
        )
        return Curve(rewards, (before, after), seconds)


def train_with_trl(shapes: int, seed: int) -> Curve:
    """Train with TRL's trainer at the settings of the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = configured(shapes, seed, folder)
        trainer = build_trainer(config, shapes, folder, config.run.iterations)
        before = heldout_iou(trainer, config, shapes)
        begun = time.process_time()
        trainer.train()
        seconds = time.process_time() - begun
        rewards = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
        return Curve(rewards, (before, heldout_iou(trainer, config, shapes)), seconds)


def build_trainer(config: RunConfig, shapes: int, folder: str, steps: int) -> Any:
    """TRL's trainer with the configuration's model, prompts, images, rewards and settings."""
    logging.disable_progress_bar()
    train, _ = PROMPT_FILES[shapes]
    rows = load_dataset(
        "parquet", data_files=str(CHECKOUT / "data" / "prompts" / train), split="train", cache_dir=folder
    )
    features = {"prompt": [{"role": Value("string"), "content": [{"type": Value("string"), "text": Value("string")}]}]}

    def as_messages(row: dict[str, str]) -> dict[str, object]:
        text, _, rest = row["prompt"].partition("<image>")
        assert not rest, "the image comes last"
        return {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "text": None}]}]
        }

    rewards = [build_reward(each.reward, each.settings) for each in config.rewards]

    def scored(reward: Any) -> Any:
        def score(completions: Any, box: Any, **others: Any) -> list[float]:
            batch = ScoringBatch(
                sample_ids=[str(place) for place in range(len(box))],
                prompts=[""] * len(box),
                completions=[messages[0]["content"] for messages in completions],
                columns={"box": box},
                source_images=[[image] for image in others["image"]],
            )
            return [float(each.value or 0.0) for each in reward.score(batch)]

        score.__name__ = reward.name
        return score

    rows = rows.map(as_messages, features=Features(rows.features | features))
    trainer = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(config.policy.model, dtype=torch.float32),
        processing_class=AutoProcessor.from_pretrained(config.policy.model),
        reward_funcs=[scored(reward) for reward in rewards],
        train_dataset=rows,
        args=trl_settings(config, folder, steps, reward_weights=[each.weight for each in config.rewards]),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def heldout_iou(trainer: Any, config: RunConfig, shapes: int) -> float:
    """The mean IoU of samples about the held-out images."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
        size = config.evaluate.samples_per_prompt
        return measure_saved(Path(folder), RECIPE, shapes, 1.0, group_size=size).reward


def table(name: str) -> list[str]:
    """Train in turn, write the figure and return the table, with what is reached without the image."""
    torch.set_num_threads(1)
    shapes = 2 if name == "grounding_two" else 1
    ours, theirs = [], []
    for seed in SEEDS:
        ours.append(train_here(shapes, seed))
        theirs.append(train_with_trl(shapes, seed))
    what = "where is the shape?" if shapes == 1 else "where is the shape, of two?"
    draw([curve.rewards for curve in ours], [curve.rewards for curve in theirs], what, FIGURES[shapes])
    seen, unseen = split_scenes(RECIPE.seed, train=RECIPE.train_prompts, heldout=RECIPE.heldout_prompts, shapes=shapes)
    constant = best_constant_box(seen)
    constant_iou = statistics.fmean(iou_of(constant, scene.box) for scene in unseen)
    wrong = measure_saved(CHECKOUT / "data" / "models" / "tiny-vision", RECIPE, shapes, 1.0, shift=1)
    rows = [row_of(who, curves) for who, curves in (("this project", ours), ("TRL 1.16", theirs))]
    without = f"the best box that is the same for all images {constant_iou:.3f}, wrong images"
    return [
        *markdown_table(HEADINGS, rows),
        "",
        f"Held-out IoU of the model before training: {without} {wrong.reward:.3f}.",
    ]


def row_of(name: str, curves: Sequence[Curve]) -> tuple[str, ...]:
    """One line of the table."""
    first = statistics.fmean(reward for curve in curves for reward in curve.rewards[:3])
    last = ", ".join(f"{statistics.fmean(curve.rewards[-5:]):.3f}" for curve in curves)
    before = statistics.fmean(curve.heldout[0] for curve in curves)
    after = ", ".join(f"{curve.heldout[1]:.3f}" for curve in curves)
    seconds = ", ".join(f"{curve.seconds:.0f}" for curve in curves)
    return name, f"{first:.3f}", last, f"{before:.3f}", after, seconds
