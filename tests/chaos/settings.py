"""The small runs that are killed: every kind of stage, three iterations, held-out prompts in between."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from tests.flows.conftest import SMALL, TINY, TINY_SD3_NFT, TINY_TEXT, Runs

_FOLDER = Path(__file__).resolve().parent
IMAGES = {
    **SMALL,
    "run.iterations": 3,
    "evaluate.prompts": str(_FOLDER / "heldout.jsonl"),
    "evaluate.targets": "data/targets",
    "evaluate.target_column": "target",
    "evaluate.every": 2,
    "evaluate.samples_per_prompt": 1,
    "guardrails.rewards": [{"reward": "jpeg"}],
}
BOTH_STREAMS = {
    **IMAGES,
    "policy.train": ["tokens", "denoising"],
    "rollout.images_per_sample": 2,
    "rollout.num_inference_steps": 3,
    "rollout.sde_window_size": 1,
    "rollout.sde_window_range": [0, 2],
    "rollout.sde_window": "random",
    "update": {
        "tokens": {"learning_rate": 2e-3, "minibatch_size": 2, "micro_batch_size": 2, "kl_coef": 0.01},
        "denoising": {"minibatch_size": 2, "kl_coef": 0.1},
    },
}
OFFLOADED = {
    **BOTH_STREAMS,
    "policy.offload": "components",
    "update": {
        stream: {**update, "offload_optimizer": True}
        for stream, update in cast(Mapping[str, Mapping[str, object]], BOTH_STREAMS["update"]).items()
    },
}
NFT = {
    "run.iterations": 3,
    "rollout.prompts_per_iteration": 2,
    "rollout.prompts_per_batch": 2,
    "rollout.group_size": 2,
    "rollout.num_inference_steps": 3,
    "update.minibatch_size": 2,
    "update.micro_batch_size": 2,
    "update.timesteps_per_image": 2,
    "update.kl_coef": 1e-4,
    "evaluate.prompts": str(_FOLDER / "heldout.jsonl"),
    "evaluate.every": 2,
    "evaluate.samples_per_prompt": 1,
}
PREVIEWED = {**NFT, "run.iterations": 2, "rollout.previews": {"per_prompt": 5, "steps": 1}}
TEXT = {
    "run.iterations": 3,
    "rollout.prompts_per_iteration": 2,
    "rollout.group_size": 2,
    "rollout.max_completion_length": 6,
    "update.minibatch_size": 2,
    "update.micro_batch_size": 2,
    "evaluate.prompts": str(_FOLDER / "heldout_text.jsonl"),
    "evaluate.every": 2,
    "evaluate.samples_per_prompt": 1,
}
QUANTIZED = {
    **TEXT,
    "policy.lora": {"rank": 4, "alpha": 8.0},
    "policy.quantization": {"kind": "nf4", "double_quant": True},
    "update.kl_coef": 0.05,
}


# Rollouts, advantages and updates are done in a child process, which outlives no kill.
SUPERVISED = {**IMAGES, **{f"placement.{stage}.timeout": 300.0 for stage in ("rollouts", "advantages", "update")}}


def _training(file: Path, settings: Mapping[str, object], runs: Runs, run: str) -> list[str]:
    """The arguments of `grpo train` for a run of this name in a storage root."""
    values = {**settings, "storage.root": str(runs.root), "run.name": run}
    overrides = [part for name, value in values.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return ["train", str(file), *overrides, "--json"]


images = partial(_training, TINY, IMAGES)
both_streams = partial(_training, TINY, BOTH_STREAMS)
offloaded = partial(_training, TINY, OFFLOADED)
nft = partial(_training, TINY_SD3_NFT, NFT)
previewed = partial(_training, TINY_SD3_NFT, PREVIEWED)
text = partial(_training, TINY_TEXT, TEXT)
quantized = partial(_training, TINY_TEXT, QUANTIZED)
ahead = partial(_training, TINY, {**IMAGES, "run.staleness": 1})
supervised = partial(_training, TINY, SUPERVISED)
small_images = partial(_training, TINY, SMALL)


def on_pool(pool: str) -> Callable[[Runs, str], list[str]]:
    """A training with rollouts and scores in two shards, and updates, by the workers of a pool."""
    placed = {
        **IMAGES,
        "placement.rollouts.pool": pool,
        "placement.rollouts.shards": 2,
        "placement.rewards.pool": pool,
        "placement.update.pool": pool,
        # A stage may lose more workers here than in a bad month.
        "placement.retries.tries": 21,
        "placement.retries.delay": 0.1,
    }
    return partial(_training, TINY, placed)
