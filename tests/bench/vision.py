"""An iteration of a vision-language model beside TRL's GRPOTrainer, and the memory of both."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from configs.loader import read_config
from configs.schema import RunConfig
from tests.bench.grounding import CONFIG, build_trainer
from tests.bench.page import ROUNDS, STEPS, Row, Timings
from tests.bench.text_iteration import timed_steps

PROMPTS, GROUP_SIZE, LENGTH, MICROBATCH = 8, 8, 32, 32
PIXELS = 224 * 224
WHAT = f"iteration of a tiny Qwen2.5-VL, {PROMPTS * GROUP_SIZE} rows of {LENGTH} tokens about images of 64"


def build_model(folder: Path) -> None:
    """Write a Qwen2.5-VL of random weights whose processor scales every image to 224 x 224."""
    from tests.grpo_core.policies.vision_lm.tiny_families import make_model

    model, processor = make_model("qwen2_5_vl")
    processor.image_processor.size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@cache
def configured(model: str, root: str, *, frozen: bool) -> RunConfig:
    """The configuration of both sides: one optimizer step an iteration, no held-out prompts, hardly any learning."""
    settings = {
        "run.name": f"frozen-{frozen}",
        "run.iterations": ROUNDS * (STEPS + 1),
        "storage.root": root,
        "policy.model": model,
        "policy.freeze_vision": str(frozen).lower(),
        "rollout.prompts_per_iteration": PROMPTS,
        "rollout.prompts_per_batch": PROMPTS,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_completion_length": LENGTH,
        "update.learning_rate": 1e-6,
        "update.minibatch_size": PROMPTS * GROUP_SIZE,
        "update.micro_batch_size": MICROBATCH,
        "evaluate.prompts": "null",
    }
    return read_config(CONFIG, [f"{key}={value}" for key, value in settings.items()])


def measure() -> Iterator[Row]:
    """An iteration of a vision-language model through the real flow, beside TRL's trainer.

    TRL runs in a process of its own while the flow waits in its `on_iteration` hook. It trains all weights; here the
    image encoder is trained too, or frozen, so that an image is looked at once.
    """
    for frozen in (False, True):
        timings = _timed(frozen)
        what = f"{WHAT}, image encoder {'frozen' if frozen else 'trained'}"
        ours, theirs = tuple(timings.iterations), tuple(timings.steps)
        yield Row(what=what, unit="s", ours=ours, peer="TRL GRPOTrainer step", theirs=theirs, at_most=1.0)


def _timed(frozen: bool) -> Timings:
    from flows import train

    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as peers:
        model, root = f"{folder}/model", f"{folder}/runs"
        build_model(Path(model))

        def run_peer() -> None:
            timings.steps += peers.submit(_trl_steps, model, root, frozen).result()

        timings = Timings(run_peer)
        train(configured(model, root, frozen=frozen), on_iteration=timings, progress=False)
    return timings


def _trl_steps(model: str, root: str, frozen: bool) -> list[float]:
    torch.set_num_threads(1)
    config = configured(model, root, frozen=frozen)
    with tempfile.TemporaryDirectory() as folder:
        return timed_steps(build_trainer(config, 1, folder, STEPS + 1))
