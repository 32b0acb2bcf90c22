"""Learning curves of tiny models here and in TRL, for docs/performance.md.

`make figures ONLY=tiny_text` trains the tiny text model here and in TRL with the same model, prompts, rewards and three
seeds, `grounding` the tiny vision model on images with one shape, `grounding_two` with two. The two sides draw their
samples from other random streams, so their curves agree in distribution, not point by point.
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

from configs.loader import read_config
from configs.schema import RunConfig
from data.recipes.grounding import PROMPT_FILES, best_constant_box, iou_of, split_scenes
from data.recipes.vision import TinyVisionRecipe, measure_saved
from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table
from tests.bench.trl_trainer import build_trainer

SEEDS = (0, 1, 2)
RECIPE = TinyVisionRecipe()


class Compared(NamedTuple):
    """What is trained on both sides: a shipped configuration, its title, its figure, and shapes in an image, or 0."""

    file: str
    title: str
    figure: str
    shapes: int


COMPARED = {
    "tiny_text": Compared("tiny_text.yaml", "tiny text model", "learning_curves.png", 0),
    "grounding": Compared("tiny_grounding.yaml", "where is the shape?", "grounding_curves.png", 1),
    "grounding_two": Compared("tiny_grounding.yaml", "where is the shape, of two?", "grounding_two_curves.png", 2),
}


class Curve(NamedTuple):
    """The mean training reward of each iteration, CPU seconds, and held-out IoU before and after where it is taken."""

    rewards: list[float]
    seconds: float
    heldout: tuple[float, float] | None


def configured(what: Compared, seed: int, root: str) -> RunConfig:
    """The shipped configuration with the prompts of this many shapes; one of texts without its evaluation."""
    prompts = ["evaluate.prompts=null"]
    if what.shapes:
        train, heldout = (f"data/prompts/{name}" for name in PROMPT_FILES[what.shapes])
        prompts = [f"data.prompts={train}", f"evaluate.prompts={heldout}"]
    overrides = [*prompts, f"storage.root={root}", f"run.seed={seed}", f"run.name=seed{seed}"]
    return read_config(CHECKOUT / "configs" / what.file, overrides)


def train_here(what: Compared, seed: int) -> Curve:
    """Train through the real flow and read the run's own tables."""
    from flows.training.train import train

    with tempfile.TemporaryDirectory() as root:
        begun = time.process_time()
        asyncio.run(train(configured(what, seed, root)))
        seconds = time.process_time() - begun
        rewards = metric_of(f"{root}/seed{seed}", "reward")
        scores = f"{root}/seed{seed}/evaluations/{{:06d}}/rewards/box_iou/scores.parquet"
        files = [scores.format(version) for version in (0, len(rewards)) if what.shapes]
        heldout = [statistics.fmean(pl.read_parquet(file)["value"]) for file in files]
    return Curve(rewards, seconds, (heldout[0], heldout[1]) if heldout else None)


def metric_of(run: str, name: str) -> list[float]:
    """A metric of each iteration of a run, from its tables."""
    table = pl.read_parquet(f"{run}/iteration_*/metrics.parquet").sort("iteration")
    return table.filter(pl.col("metric") == name)["value"].to_list()


def train_with_trl(what: Compared, seed: int) -> Curve:
    """Train with TRL's trainer at the settings of the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        config = configured(what, seed, folder)
        trainer = build_trainer(config, folder, config.run.iterations)
        before = _heldout_iou(trainer, config, what.shapes) if what.shapes else None
        begun = time.process_time()
        trainer.train()
        seconds = time.process_time() - begun
        rewards = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
        heldout = None if before is None else (before, _heldout_iou(trainer, config, what.shapes))
    return Curve(rewards, seconds, heldout)


def _heldout_iou(trainer: Any, config: RunConfig, shapes: int) -> float:
    """The mean IoU of samples about the held-out images."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
        size = config.evaluate.samples_per_prompt
        return measure_saved(Path(folder), RECIPE, shapes, 1.0, group_size=size).reward


def draw(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    title: str,
    file: str,
    names: tuple[str, str] = ("this project", "TRL 1.16 GRPOTrainer"),
) -> None:
    """Plot the rewards of each seed as a thin line and their mean as a thick one, into a file of docs/."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=150)
    for curves, name, colour in ((ours, names[0], "#0b6e4f"), (theirs, names[1], "#c8553d")):
        places = range(1, len(curves[0]) + 1)
        for curve in curves:
            axes.plot(places, curve, color=colour, linewidth=0.8, alpha=0.35)
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(places, means, color=colour, linewidth=2.2, label=name)
    axes.set(xlabel="iteration", ylabel="mean training reward", title=f"{title}, {len(ours)} seeds each")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(CHECKOUT / "docs" / file)
    plt.close(figure)


def first_and_last(curves: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Format the mean of the first three iterations over all seeds, and of the last five by seed."""
    first = statistics.fmean(reward for curve in curves for reward in curve[:3])
    return f"{first:.3f}", ", ".join(f"{statistics.fmean(curve[-5:]):.3f}" for curve in curves)


def table(name: str) -> list[str]:
    """Train in turn, write the figure and return the table; of images with what is reached without them."""
    torch.set_num_threads(1)
    what, ours, theirs = COMPARED[name], [], []
    for seed in SEEDS:
        ours.append(train_here(what, seed))
        theirs.append(train_with_trl(what, seed))
    draw([curve.rewards for curve in ours], [curve.rewards for curve in theirs], what.title, what.figure)
    headings = ["", "mean reward, first 3 iterations", "last 5, seeds 0, 1, 2"]
    if what.shapes:
        headings += ["held-out IoU before", "after 100 iterations", "CPU seconds"]
    rows = [_row_of(who, curves) for who, curves in (("this project", ours), ("TRL 1.16", theirs))]
    return [*markdown_table(headings, rows), *(_without_the_image(what.shapes) if what.shapes else ())]


def _row_of(name: str, curves: Sequence[Curve]) -> tuple[str, ...]:
    cells = (name, *first_and_last([curve.rewards for curve in curves]))
    if not (heldout := [curve.heldout for curve in curves if curve.heldout]):
        return cells
    before = statistics.fmean(each[0] for each in heldout)
    after = ", ".join(f"{each[1]:.3f}" for each in heldout)
    return (*cells, f"{before:.3f}", after, ", ".join(f"{curve.seconds:.0f}" for curve in curves))


def _without_the_image(shapes: int) -> list[str]:
    seen, unseen = split_scenes(RECIPE.seed, train=RECIPE.train_prompts, heldout=RECIPE.heldout_prompts, shapes=shapes)
    constant = best_constant_box(seen)
    constant_iou = statistics.fmean(iou_of(constant, scene.box) for scene in unseen)
    wrong = measure_saved(CHECKOUT / "data" / "models" / "tiny-vision", RECIPE, shapes, 1.0, shift=1)
    without = f"the best box that is the same for all images {constant_iou:.3f}, wrong images {wrong.reward:.3f}"
    return ["", f"Held-out IoU of the model before training: {without}."]
