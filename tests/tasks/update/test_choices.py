"""peft's choices and the moving average: through the parity gate, to disk, and on from there to the same policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.sections import LoraSection, PlacementSection
from configs.training import ParitySection, UpdateSection
from tasks.execution.resources import resource, run_resources
from tasks.models.resident import ResidentPolicy
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.update.job import UpdateOutcome
from tests.tasks.update.update_jobs import (
    IMAGES,
    TEXTS,
    UPDATE,
    Modality,
    advantages_of,
    alone,
    changed,
    commit,
    job_of,
)

# An order of magnitude below the default: fp32 on the tiny models differs by 7e-6 nats at most.
STRICT = UPDATE.model_copy(update={"parity": ParitySection(max_difference=5e-5, mean_difference=5e-6)})
SLOW = pytest.mark.slow
TEXT_CHOICES: dict[str, dict[str, Any]] = {
    "rslora, dora, a whole module": {"use_rslora": True, "use_dora": True, "modules_to_save": ("norm",)},
    "olora": {"init_lora_weights": "olora"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa, dora": {"init_lora_weights": "pissa", "use_dora": True},
}
IMAGE_CHOICES: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "whole modules": {"modules_to_save": ("lm_head", "norm")},
}
CHOICES = [
    *(pytest.param(TEXTS, values, id=name) for name, values in list(TEXT_CHOICES.items())[:1]),
    *(pytest.param(TEXTS, values, id=name, marks=SLOW) for name, values in list(TEXT_CHOICES.items())[1:]),
    *(pytest.param(IMAGES, values, id=f"images, {name}", marks=SLOW) for name, values in IMAGE_CHOICES.items()),
]


def updated_twice(
    modality: Modality, update: UpdateSection, store: ArtifactStore, folder: Path
) -> tuple[PolicyRef, UpdateOutcome, UpdateOutcome]:
    """Make two versions, each from its own rollouts, and the second once more in a process that begins with it."""
    with run_resources():
        rollouts = modality.collect()
        job = job_of(modality, rollouts, advantages_of(rollouts), update=update)
        policy = commit(store, job, folder / "first", alone(job, folder / "first"))
        rollouts = modality.collect(policy)
        job = job_of(modality, rollouts, advantages_of(rollouts), policy=policy, update=update)
        second = alone(job, folder / "second")
    with run_resources():
        return policy, second, alone(job, folder / "again")


@pytest.mark.parametrize(("modality", "choice"), CHOICES)
def test_a_choice_of_peft_passes_the_gate_and_resumes(
    modality: Modality, choice: dict[str, Any], store: ArtifactStore, tmp_path: Path
) -> None:
    adapted = changed(modality, lora=LoraSection(rank=4, alpha=8.0, **choice))
    policy, second, again = updated_twice(adapted, STRICT, store, tmp_path)
    assert policy.checkpoint is not None
    # The first step is taken on unchanged weights, which are those of the reference.
    assert policy.checkpoint.metrics["kl"] < second.metrics["kl"]
    assert again == second
    assert second.policy.digest != policy.digest


@pytest.mark.parametrize("modality", [TEXTS, IMAGES], ids=["texts", "images"])
def test_another_attention_passes_the_gate(modality: Modality, store: ArtifactStore, tmp_path: Path) -> None:
    eager = changed(modality, attn_implementation="eager")
    rollouts = eager.collect()
    alone(job_of(eager, rollouts, advantages_of(rollouts), update=STRICT), tmp_path / "eager")
    policy = resource(ResidentPolicy).at(
        PolicyRef(version=0, digest=eager.spec().digest), eager.spec(), eager.rollout, PlacementSection(device="cpu")
    )
    assert {
        module.config._attn_implementation
        for name, module in policy.components["tokens"].trained.model.named_modules()
        if name.endswith("self_attn")
    } == {"eager"}


def test_a_moving_average_is_kept_with_the_version_and_can_be_its_weights(store: ArtifactStore, tmp_path: Path) -> None:
    update = STRICT.model_copy(update={"ema": 0.75, "epochs": 1, "minibatch_size": None})
    policy, second, again = updated_twice(TEXTS, update, store, tmp_path)
    assert again == second
    start = load_file(Path(TEXTS.policy.model) / "model.safetensors")
    before = start
    for name in ("first", "second"):
        folder = Path(store.path("policies/000001")) if name == "first" else tmp_path / name
        own = folder / "tokens"
        new, average = load_file(own / "model.safetensors"), load_file(own / "ema" / "model.safetensors")
        for key, value in average.items():
            assert torch.equal(value, 0.25 * new[key] + 0.75 * before[key]), key
        before = average
    placement = PlacementSection(device="cpu")
    averaged = resource(ResidentPolicy).at(policy.averaged, TEXTS.spec(), TEXTS.rollout, placement)
    first = load_file(Path(store.path("policies/000001")) / "tokens" / "ema" / "model.safetensors")
    parameters = averaged.components["tokens"].trainable_parameters()
    assert all(torch.equal(first[name], parameters[name].detach()) for name in first.keys() & parameters.keys())
    assert policy.averaged.digest == policy.copies["ema"] != policy.digest
