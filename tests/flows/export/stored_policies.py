"""Runs with policies that load: the shipped models with disturbed weights, stored through the real store."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from configs.loader import read_config
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tasks.models.initial import model_digest, weights_digest
from tasks.runs.lookup import write_description
from tasks.runs.trust import remember, uses_of
from tasks.storage.schemas import SCHEMA_VERSION
from tests.flows.conftest import TINY, TINY_TEXT
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.tasks.reports.made_runs import RunMaker
from tests.tiny_policies import MODEL as IMAGE_MODEL
from tests.tiny_policies import TEXT_MODEL

SHIPPED: Mapping[type, tuple[Path, Path]] = {
    CausalLMPolicy: (TEXT_MODEL, TINY_TEXT),
    GlmImagePolicy: (IMAGE_MODEL, TINY),
    DiffusersPolicy: (IMAGE_MODEL.with_name("tiny-sd3"), TINY.with_name("tiny_sd3.yaml")),
}
"""Model and configuration of each kind of policy."""


HALVES = (
    *("policy.train=[tokens, denoising]", "rollout.images_per_sample=2", "rollout.sde_window_range=[0, 3]"),
    *("rollout.num_inference_steps=4", "rollout.guidance_scale=1.5", "update={}"),
)
"""Settings of a run that trains both halves of the image model."""


def both_halves() -> GlmImagePolicy:
    """The image model with a disturbed adapter on each half, with the sampler of HALVES."""
    settings = GlmImageSettings(height=64, width=64, num_inference_steps=4, guidance_scale=1.5)
    choice = TrainingChoice(LoraSettings(4, 8.0))
    policy = GlmImagePolicy.load(str(IMAGE_MODEL), settings, {"tokens": choice, "denoising": choice})
    for component in policy.components.values():
        disturb(component.trainable_parameters(), 0.05)
    return policy


def save_components(policy: Policy, folder: Path, copy: str = "") -> None:
    """Write the trained weights of every component as a version has them, or as a copy of those."""
    for stream, component in policy.components.items():
        own = folder / stream / copy
        own.mkdir(parents=True, exist_ok=True)
        component.save_weights(own)


def store_run(
    root: Path,
    name: str,
    policy: Policy,
    rewards: Mapping[int, float],
    *,
    lora: bool = True,
    average: Policy | None = None,
    settings: Sequence[str] = (),
) -> RunMaker:
    """Store these weights as versions 1 and 2, and evaluations of versions with these mean rewards less 0.5."""
    model, file = SHIPPED[type(policy)]
    texts = isinstance(policy, CausalLMPolicy)
    chosen = "{rank: 4, alpha: 8.0}" if lora else "null"
    overrides = [f"policy.model={model}", f"policy.lora={chosen}"]
    overrides += ["rollout.num_inference_steps=2"] if isinstance(policy, GlmImagePolicy) else []
    config = read_config(file, [f"run.name={name}", *overrides, *settings])
    labels = tuple(section.label for section in config.rewards)
    maker = RunMaker(root, name, modality="text" if texts else "image", labels=labels)
    described = {"name": name, "model_digest": model_digest(str(model)), "schema_version": SCHEMA_VERSION}
    content = yaml.safe_dump(config.model_dump(mode="json")).encode()
    write_description(maker.store, described, content)
    # As the training that made it would have done.
    remember(uses_of(config))
    digests = {0: described["model_digest"]}
    for version in (1, 2):
        with maker.store.staging() as staged:
            save_components(policy, staged)
            if average is not None:
                save_components(average, staged, "ema")
            digests[version] = weights_digest(staged)
            state = {"policy_version": version, "policy_digest": digests[version]}
            (staged / "training_state.json").write_text(json.dumps(state))
            maker.commit(staged, f"policies/{version:06d}", 1.0, {})
    for version, shift in rewards.items():
        maker.policy = (version, str(digests[version]))
        maker.evaluation(version, shift=shift)
    return maker
