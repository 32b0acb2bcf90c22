"""The key of a stage's result: changed by everything that determines the result, and by nothing else."""

from typing import Any

import pytest

from configs.placement import PlacementSection
from configs.rollouts import GlmImageRolloutSection as Rollout
from configs.scoring import AdvantagesSection, RewardSection
from configs.sections import LoraSection, PolicySection, QuantizationSection
from configs.training import UpdateSection as Update
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.models.resident import ModelSpec
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt
from tasks.rewards.score_rewards import score_reward_task
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.update.update_policy import update_policy_task
from tests.tasks.stage_calls import round_of

PROMPTS = tuple(
    DrawnPrompt("default", Prompt(f"id{place}", f"a {colour} circle", {"colour": colour}), None)
    for place, colour in enumerate(("red", "blue"))
)


def artifact(digest: str = "d", **changes: object) -> ArtifactRef:
    values = {"uri": "run/x/y", "sha256": "s", "digest": digest, "schema_version": 1, "rows": 4, "seconds": 1.0}
    return ArtifactRef.model_validate({**values, "metrics": {}, **changes})


def plan(**changes: Any) -> object:
    return round_of(PROMPTS, **changes)


def model(**changes: Any) -> ModelSpec:
    values = {"section": PolicySection(model="folder", dtype="float32"), "digest": "m", "adapter_seed": 1}
    return ModelSpec.model_validate({**values, "references": {"tokens": "device"}, **changes})


def draw(rollouts: str, scores: str) -> SamplingRound:
    return SamplingRound(artifact(rollouts), dict.fromkeys(("ssim", "psnr"), artifact(scores)))


RUNNING = (RewardSection(reward="ssim", normalize="running"), RewardSection(reward="psnr"))
MOMENTS = {"running/ssim/count": 4.0, "running/ssim/mean": 0.5, "running/ssim/squares": 0.1}
NF4 = QuantizationSection(kind="nf4")
POLICY = PolicyRef(version=1, digest="p", checkpoint=artifact("c"))
INPUTS: dict[str, dict[str, Any]] = {
    "rollouts": {
        "policy": POLICY,
        "plan": plan(),
        "model": model(),
        "rollout": Rollout(height=64, width=64),
        "with_reference": False,
        "placement": PlacementSection(),
    },
    "rewards": {
        "rollouts": artifact(),
        "section": RewardSection(reward="psnr"),
        "folder": "iteration_000001/rewards",
        "title": "iteration 1",
        "placement": PlacementSection(),
        "earlier": (),
    },
    "advantages": {
        "rounds": (draw("r", "s"),),
        "streams": ("tokens",),
        "mix": (RewardSection(reward="ssim"), RewardSection(reward="psnr")),
        "advantages": AdvantagesSection(),
        "folder": "iteration_000001",
        "title": "iteration 1",
        "earlier": None,
    },
    "update": {
        "policy": POLICY,
        "rollouts": (artifact("r"),),
        "advantages": artifact("a"),
        "max_staleness": 0,
        "model": model(),
        "updates": {"tokens": Update()},
        "seed": 0,
        "title": "iteration 1",
        "placement": PlacementSection(),
    },
}
TASKS = {
    "rollouts": collect_rollouts_task,
    "rewards": score_reward_task,
    "advantages": compute_advantages_task,
    "update": update_policy_task,
}


def key(stage: str, **changes: object) -> str:
    policy = TASKS[stage].cache_policy
    return policy.compute_key(None, {**INPUTS[stage], **changes}, {})


DETERMINING = [
    ("rollouts", {"policy": POLICY.model_copy(update={"digest": "q"})}),
    ("rollouts", {"policy": POLICY.model_copy(update={"version": 2})}),
    ("rollouts", {"model": model(digest="other")}),
    ("rollouts", {"model": model(section=PolicySection(model="folder", dtype="bfloat16"))}),
    ("rollouts", {"model": model(section=PolicySection(model="folder", dtype="float32", lora=LoraSection(alpha=2.0)))}),
    ("rollouts", {"plan": plan(images_of_samples=(2,))}),
    ("rollouts", {"plan": plan(window_start=0)}),
    ("rollouts", {"plan": plan(sampling_round=2)}),
    ("rollouts", {"with_reference": True}),
    ("rollouts", {"rollout": Rollout(height=64, width=64, top_k=5)}),
    ("rollouts", {"with_reference": True, "policy": POLICY.model_copy(update={"copies": {"reference": "other"}})}),
    ("rollouts", {"model": model(section=PolicySection(model="folder", dtype="float32", autocast="bfloat16"))}),
    ("rollouts", {"model": model(section=PolicySection(model="folder", dtype="float32", quantization=NF4))}),
    ("advantages", {"streams": ("denoising",)}),
    ("advantages", {"streams": ("tokens", "denoising")}),
    ("advantages", {"mix": (RewardSection(reward="ssim", streams=("tokens",)), RewardSection(reward="psnr"))}),
    ("rewards", {"rollouts": artifact("other")}),
    ("rewards", {"section": RewardSection(reward="ssim")}),
    ("rewards", {"section": RewardSection(reward="psnr", datasets=("a",))}),
    ("rewards", {"section": RewardSection(reward="psnr", where={"kind": ("sign",)})}),
    ("rewards", {"section": RewardSection(reward="psnr", name="mine")}),
    ("rewards", {"section": RewardSection(reward="psnr", settings={"full_scale_db": 40.0})}),
    ("rewards", {"folder": "rescored/other/iteration_000001/rewards"}),
    ("advantages", {"rounds": (draw("other", "s"),)}),
    ("advantages", {"rounds": (draw("r", "other"),)}),
    ("advantages", {"rounds": (draw("r", "s"), draw("r2", "s2"))}),
    ("advantages", {"folder": "rescored/other/iteration_000001"}),
    ("advantages", {"mix": (RewardSection(reward="ssim", clamp=(0.0, 0.5)), RewardSection(reward="psnr"))}),
    ("advantages", {"mix": (RewardSection(reward="ssim"), RewardSection(reward="psnr", role="gate"))}),
    ("advantages", {"mix": (RewardSection(reward="ssim"), RewardSection(reward="psnr", where={"a": (1,)}))}),
    ("advantages", {"mix": RUNNING, "earlier": artifact("e", metrics=MOMENTS)}),
    ("advantages", {"mix": (RewardSection(reward="ssim", datasets=("a",)), RewardSection(reward="psnr"))}),
    ("advantages", {"mix": (RewardSection(reward="ssim", weight=0.5), RewardSection(reward="psnr"))}),
    ("advantages", {"advantages": AdvantagesSection(scale="none")}),
    ("update", {"policy": POLICY.model_copy(update={"checkpoint": artifact("other")})}),
    ("update", {"rollouts": (artifact("other"),)}),
    ("update", {"rollouts": (artifact("r"), artifact("r2"))}),
    ("update", {"max_staleness": 3}),
    ("update", {"policy": POLICY.model_copy(update={"copies": {"reference": "other"}})}),
    ("update", {"advantages": artifact("other")}),
    ("update", {"updates": {"tokens": Update(learning_rate=2e-5)}}),
    ("update", {"updates": {"tokens": Update(), "denoising": Update()}}),
    ("update", {"updates": {"tokens": Update(old_logprobs="recompute")}}),
    ("update", {"seed": 1}),
    ("update", {"model": model(adapter_seed=2)}),
    ("update", {"model": model(section=PolicySection(model="folder", dtype="float32", lora=LoraSection(rank=2)))}),
]
WITHOUT_EFFECT = [
    ("rollouts", {"placement": PlacementSection(torch_threads=2, devices="cuda")}),
    ("rollouts", {"policy": POLICY.model_copy(update={"checkpoint": artifact("c", uri="other/x/y", seconds=9.0)})}),
    ("rollouts", {"model": model(section=PolicySection(model="moved/folder", dtype="float32"))}),
    ("rollouts", {"rollout": Rollout(height=64, width=64, prompts_per_batch=1, decode_batch_size=3)}),
    ("update", {"updates": {"tokens": Update(micro_batch_size=1, reference={"placement": "cpu"})}}),
    ("update", {"model": model(section=PolicySection(model="folder", dtype="float32", gradient_checkpointing=True))}),
    ("update", {"model": model(references={"tokens": "cpu"})}),
    ("rewards", {"rollouts": artifact(uri="other/x/y", sha256="t", seconds=9.0)}),
    ("rewards", {"placement": PlacementSection(torch_threads=2)}),
    ("rewards", {"section": RewardSection(reward="psnr", role="gate", clamp=(0.0, 1.0))}),
    ("rewards", {"section": RewardSection(reward="psnr", processes=2, batch_size=7, max_failures=0.5)}),
    ("rewards", {"earlier": (artifact("s"),)}),
    (
        "advantages",
        {"rounds": (SamplingRound(artifact("r"), dict.fromkeys(("ssim", "psnr"), artifact("s", uri="o/x/y"))),)},
    ),
    # What is not normalised by it does not depend on what came before.
    ("advantages", {"earlier": artifact("e", metrics=MOMENTS)}),
    ("rollouts", {"policy": POLICY.model_copy(update={"copies": {"reference": "unread"}})}),
    ("update", {"placement": PlacementSection(devices=("cpu", "cpu"))}),
    ("update", {"placement": PlacementSection(torch_threads=2, devices="cuda")}),
    ("update", {"rollouts": (artifact("r", uri="other/x/y", seconds=9.0),)}),
    ("update", {"title": "another title"}),
    ("update", {"model": model(section=PolicySection(model="moved/folder", dtype="float32"))}),
]


@pytest.mark.parametrize(("stage", "change"), DETERMINING)
def test_what_determines_the_result_changes_the_key(stage: str, change: dict[str, object]) -> None:
    assert key(stage, **change) != key(stage)


@pytest.mark.parametrize(("stage", "change"), WITHOUT_EFFECT)
def test_what_does_not_leaves_the_key(stage: str, change: dict[str, object]) -> None:
    assert key(stage, **change) == key(stage)


def test_before_the_first_update_it_counts_whether_there_are_adapters_and_not_which() -> None:
    base = PolicyRef(version=0, digest="m")

    def of(lora: LoraSection | None) -> str:
        section = PolicySection(model="folder", dtype="float32", lora=lora)
        return key("rollouts", policy=base, model=model(section=section))

    assert of(LoraSection(rank=2)) == of(LoraSection(rank=4))
    # They add nothing, and a model with them rounds otherwise.
    assert of(None) != of(LoraSection(rank=2))
