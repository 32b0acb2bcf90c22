"""The ways to train a denoising model at equal images: the tiny Stable Diffusion 3 by each of them, over seeds.

python -m tests.bench.methods FILE [METHOD...] [--seeds 0,1,2] [--iterations 100]

A run is some minutes of one core. Each adds a line to FILE, which a later call goes on with; then the table of all is
printed: held-out reward before, best and last, how far the velocity is from the reference's at the end, CPU seconds.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import torch

from configs.loader import read_config
from configs.schema import RunConfig
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.losses.velocity_matching import mean_square
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.records import GroupRequest
from grpo_core.update.velocity_update import ForwardProcess
from tasks.models.resident import ModelSpec, load_policy
from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table
from tasks.runs.frames import open_run

_STEPS = {"learning_rate": 1e-3, "minibatch_size": 36, "micro_batch_size": 36, "timesteps_per_image": 4}
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("tiny_sd3", {}),
    "nft, no pull": ("tiny_sd3_nft", {}),
    "nft": ("tiny_sd3_nft", {**_STEPS, "algorithm": "nft", "kl_coef": 0.4}),
    "awm": ("tiny_sd3_nft", {**_STEPS, "algorithm": "awm", "kl_coef": 0.3}),
    "v_grpo": ("tiny_sd3_nft", {**_STEPS, "algorithm": "v_grpo", "kl_coef": 0.4}),
    "ram": ("tiny_sd3_nft", {**_STEPS, "algorithm": "ram", "reward_multiplier": 1.0, "kl_coef": 1.0}),
}
"""Name -> the shipped configuration, and what stands in place of its update; pulls settle in two dimensions."""
PROMPTS, IMAGES = 8, 4


def configured(method: str, seed: int, iterations: int, root: str) -> RunConfig:
    """The configuration of a run."""
    name, update = METHODS[method]
    changes = [f"update={json.dumps(update)}"] if update else []
    given = {"run.seed": seed, "run.name": "run", "run.iterations": iterations, "storage.root": root}
    return read_config(CHECKOUT / "configs" / f"{name}.yaml", [*changes, *(f"{k}={v}" for k, v in given.items())])


def train_once(method: str, seed: int, iterations: int) -> dict[str, Any]:
    """Train, and return the line of the run."""
    from flows.training.train import train

    with tempfile.TemporaryDirectory() as root:
        config, begun = configured(method, seed, iterations, root), time.process_time()
        asyncio.run(train(config))
        seconds = time.process_time() - begun
        means = open_run(f"{root}/run").heldout().group_by("policy_version").agg(pl.col("reward").mean())
        moved = distance(Path(root, "run", "policies", f"{iterations:06d}", "denoising"))
    curve = means.sort("policy_version")["reward"].to_list()
    return {"method": method, "seed": seed, "heldout": curve, "distance": moved, "seconds": seconds}


@torch.no_grad()
def distance(weights: Path) -> float:
    """Mean square of the velocity's distance from the reference's, at images of the policy that are noised again."""
    config = read_config(CHECKOUT / "configs" / "tiny_sd3_nft.yaml")
    settings = policy_family(config.policy.kind).settings(config.rollout.model_dump())
    spec = ModelSpec(section=config.policy, digest="", adapter_seed=0, references={"denoising": "device"})
    policy = load_policy(spec, settings, torch.device("cpu"))
    component: Any = policy.components["denoising"]
    component.load_weights(weights)
    lines = (CHECKOUT / "data" / "prompts" / "shapes_heldout.jsonl").read_text().splitlines()[:PROMPTS]
    seeds = tuple(range(IMAGES))
    requests = [
        GroupRequest(
            prompt=json.loads(line)["prompt"],
            sample_ids=tuple(f"{number}.{seed}" for seed in seeds),
            seeds=seeds,
            noise_seeds=seeds,
            step_seeds=seeds,
            window_start=settings.num_inference_steps,
        )
        for number, line in enumerate(lines)
    ]
    groups = list(collect_rollouts(policy, requests, prompts_per_batch=PROMPTS))
    rows = join_groups(groups, torch.zeros(PROMPTS * IMAGES), "denoising")
    process = ForwardProcess(component, rows, None, seed=0)
    found = []
    for part in process.microbatches(range(len(rows)), 0, PROMPTS * IMAGES):
        actions, _ = process.noised(part, 0)
        velocity = component.velocities(actions)
        with component.trained.reference():
            found.append(mean_square(velocity - component.velocities(actions)))
    return float(torch.cat(found).mean())


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Means over the seeds of each method, with the range of its last held-out reward."""
    rows = []
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        if not own:
            continue
        curves = [run["heldout"] for run in own]
        last = [curve[-1] for curve in curves]
        means = [statistics.fmean(each) for each in ([c[0] for c in curves], [max(c) for c in curves], last)]
        spread = f"{means[2]:.3f} ({min(last):.3f} to {max(last):.3f})"
        moved, seconds = (statistics.fmean(run[name] for run in own) for name in ("distance", "seconds"))
        shown = (*(f"{each:.3f}" for each in means[:2]), spread, f"{moved:.3f}", f"{seconds:.0f}")
        rows.append((method, str(len(own)), *shown))
    return list(markdown_table(("method", "seeds", "before", "best", "last", "distance", "CPU seconds"), rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--iterations", type=int, default=100)
    asked = parser.parse_args()
    runs = [json.loads(line) for line in asked.file.read_text().splitlines()] if asked.file.exists() else []
    for seed in map(int, asked.seeds.split(",")):
        for method in asked.methods or METHODS:
            if not any((run["method"], run["seed"]) == (method, seed) for run in runs):
                runs.append(train_once(method, seed, asked.iterations))
                with asked.file.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
