"""Updates to be carried out over stored rollouts of the shipped tiny models, with advantages as a test wants them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from configs.placement import PlacementSection
from configs.rollouts import GlmImageRolloutSection, TextRolloutSection, VisionRolloutSection
from configs.sections import LoraSection, PolicySection
from configs.training import AnyUpdateSection, MismatchSection, UpdateSection
from grpo_core.policies.trained.settings import Reference
from grpo_core.rollouts.streams import Stream
from grpo_core.update.process_group import SINGLE_PROCESS
from tasks.models.initial import model_digest
from tasks.models.resident import ModelSpec
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.rollouts.plan import GroupPlan, RolloutPlan
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, current_store, described
from tasks.storage.schemas import ADVANTAGES, SCHEMA_VERSION
from tasks.update.component import carry_out
from tasks.update.job import Member, SharedJob, UpdateJob, UpdateOutcome
from tasks.update.process import take_part
from tasks.update.update_policy import update_policy_task
from tests.processes import in_processes
from tests.tasks.advantages.test_compute_advantages import commit_rows
from tests.tiny_policies import MODEL as IMAGE_MODEL
from tests.tiny_policies import TEXT_MODEL, VISION_MODEL

# Minibatches of four and of three rows, a row at a time: one process of two has one microbatch more to do.
UPDATE = UpdateSection(
    learning_rate=2e-4,
    # AdamW's step is learning_rate * g / (|g| + eps), so a gradient that is rounded otherwise by d moves a weight by up
    # to learning_rate * d / eps, most where it is zero in exact arithmetic, as those of the biases of attention keys
    # are. Summed in another order the gradients here differ by up to 5e-8: 1e-7 a step, which the bounds of 1e-6 on
    # four steps allow. Most gradients are near eps, so the second moments still count.
    eps=1e-4,
    epochs=2,
    minibatch_size=4,
    micro_batch_size=1,
    kl_coef=0.05,
    entropy_coef=0.01,
    # So that one set of rollouts serves several versions.
    mismatch=MismatchSection(mode="truncate"),
)
ADVANTAGE_OF = (1.0, -1.0, 0.5, None, -0.5, 1.5, -1.5, 0.25)
"""Of eight samples; the one without is left out."""


def groups_of(prompts: Sequence[str], datasets: Sequence[str] = ("default",)) -> tuple[GroupPlan, ...]:
    """Plan a group per prompt; the datasets alternate."""
    return tuple(
        GroupPlan(
            group_id=f"g{place}",
            prompt_id=f"p{place}",
            dataset=datasets[place % len(datasets)],
            prompt=prompt,
            columns={"n": place},
            target_uri=None,
            target_sha256=None,
        )
        for place, prompt in enumerate(prompts)
    )


@dataclass(frozen=True)
class Modality:
    """A tiny model and how it is sampled."""

    policy: PolicySection
    rollout: GlmImageRolloutSection | TextRolloutSection
    prompts: tuple[str, str]
    images_of_samples: tuple[int, ...] = (1, 1, 1, 1)
    window_start: int | None = None
    shared_noise: bool = True

    def spec(self) -> ModelSpec:
        reference: Reference = "none" if self.policy.lora else "device"
        return ModelSpec(
            section=self.policy,
            digest=model_digest(self.policy.model),
            adapter_seed=3,
            references=dict.fromkeys(self.policy.streams, reference),
        )

    def collect(self, policy: PolicyRef | None = None) -> ArtifactRef:
        policy = policy or PolicyRef(version=0, digest=self.spec().digest)
        plan = RolloutPlan(
            folder=f"iteration_{policy.version + 1:06d}",
            title="an iteration",
            iteration=policy.version + 1,
            seed=11,
            group_size=sum(self.images_of_samples),
            shared_noise=self.shared_noise,
            groups=groups_of(self.prompts),
            images_of_samples=self.images_of_samples if set(self.images_of_samples) != {1} else (),
            window_start=self.window_start,
        )
        return collect_rollouts_task.fn(policy, plan, self.spec(), self.rollout, False, PlacementSection(devices="cpu"))


IMAGES = Modality(
    PolicySection(model=str(IMAGE_MODEL), dtype="float32", lora=LoraSection(rank=2, alpha=4.0)),
    GlmImageRolloutSection(height=32, width=32, num_inference_steps=1, guidance_scale=1.0),
    ("a red circle", "a blue cross on a green background"),
)
TEXTS = Modality(
    PolicySection(kind="causal_lm", model=str(TEXT_MODEL), dtype="float32", lora=None),
    TextRolloutSection(max_completion_length=12),
    ("sort the letters of banana", "sort the letters of it, please"),
)
ABOUT_IMAGES = Modality(
    PolicySection(kind="vision_lm", model=str(VISION_MODEL), dtype="float32", lora=None),
    VisionRolloutSection(max_completion_length=6),
    ("where is the red circle?", "where is the blue square?"),
)
# One draft of four is rendered three times.
JOINT = Modality(
    PolicySection(
        model=str(IMAGE_MODEL), dtype="float32", lora=LoraSection(rank=2, alpha=4.0), train=("tokens", "denoising")
    ),
    GlmImageRolloutSection(
        height=32, width=32, num_inference_steps=4, guidance_scale=1.5, sde_window_range=(0, 3), group_size=4
    ),
    IMAGES.prompts,
    images_of_samples=(3, 1, 1, 1),
    window_start=1,
)
JOINT_ADVANTAGES: Mapping[tuple[str, Stream], float] = {
    **{
        (f"g{group}.s{draft:02d}.r00", "tokens"): value
        for group in range(2)
        for draft, value in enumerate((1.0, -1.0, 0.5, -0.5))
    },
    **{
        (f"g{group}.s00.r{rendering:02d}", "denoising"): value
        for group in range(2)
        for rendering, value in enumerate((1.25, -1.0, -0.25))
    },
}
"""Tokens are compared over drafts, denoising over the renderings of the first draft."""


def changed(modality: Modality, **policy: Any) -> Modality:
    return replace(modality, policy=modality.policy.model_copy(update=policy))


def advantages_of(rollouts: ArtifactRef, values: Sequence[float | None] = ADVANTAGE_OF) -> ArtifactRef:
    """A table of these advantages of tokens, one a sample."""
    names = [f"g{index // 4}.s{index % 4:02d}" for index in range(len(values))]
    return advantages_table(rollouts, {(name, "tokens"): value for name, value in zip(names, values, strict=True)})


def trained_advantages(modality: Modality, rollouts: ArtifactRef) -> ArtifactRef:
    if modality.window_start is None:
        return advantages_of(rollouts)
    streams = modality.policy.streams
    return advantages_table(rollouts, {key: value for key, value in JOINT_ADVANTAGES.items() if key[1] in streams})


def advantages_table(rollouts: ArtifactRef, values: Mapping[tuple[str, Stream], float | None]) -> ArtifactRef:
    columns = {
        "sample_id": [name for name, _ in values],
        "stream": [stream for _, stream in values],
        "reward": [0.5] * len(values),
        "advantage": list(values.values()),
    }
    return commit_rows(current_store(), f"{rollouts.folder.removesuffix('rollouts')}advantages", ADVANTAGES, columns)


def job_of(
    modality: Modality,
    rollouts: ArtifactRef,
    advantages: ArtifactRef,
    *,
    policy: PolicyRef | None = None,
    update: UpdateSection | Mapping[Stream, AnyUpdateSection] = UPDATE,
    **placement: Any,
) -> UpdateJob:
    """An update of a version, of the model as it is given by default; all components alike by default."""
    spec = modality.spec()
    updates = update if isinstance(update, Mapping) else dict.fromkeys(modality.policy.streams, update)
    return UpdateJob(
        policy=policy or PolicyRef(version=0, digest=spec.digest),
        rollouts=(rollouts,),
        advantages=advantages,
        model=spec,
        updates=updates,
        seed=11,
        max_staleness=5,
        placement=PlacementSection(**{"devices": "cpu", **placement}),
    )


def alone(job: UpdateJob, folder: Path) -> UpdateOutcome:
    folder.mkdir()
    outcome = carry_out(job, folder, SINGLE_PROCESS, None)
    assert outcome is not None
    return outcome


def committed(job: UpdateJob) -> PolicyRef:
    return update_policy_task.fn(**dict(job), title="iteration 1")


def together(job: UpdateJob, folder: Path) -> UpdateOutcome:
    """The update in one process per device, through the function that the devices' processes run."""
    store = current_store()
    folder.mkdir()
    shared = SharedJob(job=job, storage=described(store), run=store.run, staged=str(folder))
    outcome = folder.with_name(f"{folder.name}-outcome.json")
    in_processes(len(job.placement.devices), _take_part, shared.model_dump_json(), outcome)
    return UpdateOutcome.model_validate_json(outcome.read_text())


def _take_part(shared: str, written: Path) -> None:
    outcome = take_part(in_its_place(SharedJob.model_validate_json(shared)))
    if outcome is not None:
        written.write_text(outcome.model_dump_json())


def in_its_place(shared: SharedJob) -> SharedJob:
    """The job for this process, which has joined the others."""
    member = Member(rank=dist.get_rank(), count=dist.get_world_size(), host="", port=0, group="")
    job = shared.job.model_copy(update={"placement": shared.job.placement.on("cpu")})
    return shared.model_copy(update={"job": job, "member": member})


def commit(store: ArtifactStore, job: UpdateJob, staged: Path, outcome: UpdateOutcome) -> PolicyRef:
    checkpoint = commit_artifact(
        store,
        staged,
        f"policies/{job.version:06d}",
        digest=outcome.checkpoint_digest,
        schema_version=SCHEMA_VERSION,
        rows=outcome.rows,
        seconds=0.0,
        metrics=outcome.metrics,
        synced=outcome.synced,
    )
    return outcome.policy.model_copy(update={"checkpoint": checkpoint})


def weights_and_moments(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a version's folder by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder)}|{name}": value for path in files for name, value in load_file(path).items()}


def largest_difference(first: Path, second: Path, part: str = "") -> float:
    """Of two versions' tensors, which have the same names and shapes; `part` is in the names of those compared."""
    ours, theirs = weights_and_moments(first), weights_and_moments(second)
    assert ours.keys() == theirs.keys()
    compared = [name for name in ours if part in name]
    assert compared
    worst = 0.0
    for name in compared:
        assert ours[name].shape == theirs[name].shape, name
        if ours[name].numel():
            worst = max(worst, float((ours[name].double() - theirs[name].double()).abs().max()))
    assert not math.isnan(worst)
    return worst
