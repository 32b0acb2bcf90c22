"""A run of each kind, small and finished, to be copied and damaged; and a verification of one."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.loader import read_config
from configs.validation import validated
from flows.requests import VerifyRequest
from flows.training.train import train
from flows.verification.verify import verify
from tasks.verification.records import VerificationReport
from tests.flows.conftest import REPOSITORY, heard_of
from tests.flows.verification.planting import EVALUATED

_SMALL: dict[str, object] = {
    "run.iterations": EVALUATED,
    "rollout.prompts_per_iteration": 2,
    "rollout.group_size": 4,
    "evaluate.limit": 1,
    "evaluate.samples_per_prompt": 2,
    "evaluate.every": 2,
}
_IMAGES: dict[str, object] = {
    **_SMALL,
    "rollout.height": 32,
    "rollout.width": 32,
    "rollout.num_inference_steps": 3,
}
_MINIBATCHES: dict[str, object] = {"update.minibatch_size": 4, "update.micro_batch_size": 4}
_REWARD = """
def _length(completion):
    return len(completion)


def brevity(completions, **columns):
    return [1 / (1 + _length(each)) for each in completions]
"""

Settings = dict[str, object]


def verified(root: Path, run: str, **options: Any) -> VerificationReport:
    """What a verification of a run finds; its user's code is trusted."""
    request = validated(VerifyRequest, {"run": run, "root": str(root), "trust_code": True, **options})
    return heard_of(lambda: asyncio.run(verify(request)))[0]


def trained(root: Path, name: str, *settings: Settings) -> Path:
    """Train a shipped configuration, with changes by their dotted keys, and return the folder of the run."""
    changed: Settings = {"storage.root": str(root), "run.name": name}
    for each in settings:
        changed |= each
    overrides = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
    heard_of(lambda: asyncio.run(train(read_config(REPOSITORY / "configs" / f"{name}.yaml", overrides))))
    return root / name


@pytest.fixture(scope="package")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A person's reward and prompts, outside of any run."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "reward.py").write_text(_REWARD)
    shutil.copy(REPOSITORY / "data" / "prompts" / "letters_train.jsonl", folder / "prompts.jsonl")
    return folder


@pytest.fixture(scope="package")
def stored(server: None, own_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a finished run of a shipped configuration, made once; no test changes it."""
    brevity = {"reward": "function", "name": "brevity", "settings": {"function": f"{own_files}/reward.py:brevity"}}
    settings: dict[str, Settings] = {
        "tiny_text": {
            **_SMALL,
            "data.prompts": str(own_files / "prompts.jsonl"),
            "rewards": [{"reward": "answer", "weight": 0.75}, {**brevity, "weight": 0.25}],
            **_MINIBATCHES,
        },
        "tiny_sd3": {**_IMAGES, **_MINIBATCHES, "rollout.sde_window_range": [0, 2], "rewards": [{"reward": "ssim"}]},
        "tiny_edit": {**_IMAGES, **_MINIBATCHES, "rewards": [{"reward": "ssim"}]},
        "tiny_both": {
            **_IMAGES,
            "rollout.group_size": 6,
            "rollout.images_per_sample": 3,
            "rollout.sde_window_size": 1,
            "rollout.sde_window_range": [0, 2],
            "rewards.0.reward": "ssim",
            "update.tokens.minibatch_size": 4,
            "update.tokens.micro_batch_size": 4,
            "update.denoising.minibatch_size": 2,
            "update.denoising.micro_batch_size": 2,
        },
    }
    root, made = tmp_path_factory.mktemp("stored"), {}

    def run_of(name: str) -> Path:
        if name not in made:
            # Runs of one root have the baselines of one another.
            made[name] = trained(root / name, name, settings[name])
        return made[name]

    return run_of
