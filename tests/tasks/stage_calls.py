"""Prompt files that are read or refused, and the stages as plain functions over one store."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from configs.placement import PlacementSection
from configs.rollouts import GlmImageRolloutSection
from configs.scoring import AdvantagesSection, RewardSection
from configs.sections import LoraSection, PolicySection
from configs.training import UpdateSection
from grpo_core.errors import InputError
from grpo_core.rewards.image_statistics import JpegReward
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rollouts.streams import Stream
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.models.initial import model_digest
from tasks.models.resident import ModelSpec
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt, read_prompts
from tasks.prompts.targets import TargetReference
from tasks.rewards.score_rewards import score_reward_task
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.rollouts.plan import RolloutPlan, plan_round
from tasks.runs.layout import IMAGES, SCORES_FILE, SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.update.update_policy import update_policy_task
from tests.tiny_policies import MODEL

Write = Callable[[str, str | bytes], Path]


def texts(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.text for prompt in prompts]


def read(path: str | Path, **options: Any) -> tuple[Prompt, ...]:
    return read_prompts(path, **options).prompts


def parquet_bytes(rows: Any) -> bytes:
    buffer = io.BytesIO()
    pl.DataFrame(rows).write_parquet(buffer)
    return buffer.getvalue()


def refusal(path: str | Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read_prompts(path, **options)
    return caught.value


ROLLOUT = GlmImageRolloutSection(height=32, width=32, num_inference_steps=1, guidance_scale=1.0)
PLACEMENT = PlacementSection(devices="cpu")
MIX = (RewardSection(reward="jpeg", settings={"direction": "compressible"}),)
UPDATE = UpdateSection(learning_rate=1e-3, minibatch_size=2)
SECTION = PolicySection(model=str(MODEL), dtype="float32", lora=LoraSection(rank=2, alpha=4.0))


def spec() -> ModelSpec:
    return ModelSpec(section=SECTION, digest=model_digest(str(MODEL)), adapter_seed=3, references={"tokens": "none"})


def base() -> PolicyRef:
    return PolicyRef(version=0, digest=spec().digest)


def png(shade: int = 0, size: tuple[int, int] = (6, 4), mode: str = "RGB", kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, shade if mode not in ("RGB", "CMYK") else (shade,) * len(mode)).save(buffer, kind, **options)
    return buffer.getvalue()


def round_of(prompts: Sequence[DrawnPrompt], **changes: Any) -> RolloutPlan:
    """The plan of the first round of the first iteration, with these changes."""
    usual = {"seed": 11, "iteration": 1, "sampling_round": 1, "images_of_samples": (1, 1)}
    return plan_round(prompts, **{**usual, "shared_noise": True, "window_start": None, **changes})


def plan(
    iteration: int = 1,
    sampling_round: int = 1,
    datasets: tuple[str, str] = ("default", "default"),
    targets: tuple[TargetReference | None, TargetReference | None] = (None, None),
) -> RolloutPlan:
    texts = ("a red circle", "a blue cross")
    prompts = [
        DrawnPrompt(dataset, Prompt(f"id{i}", text, {"note": i}), target)
        for i, (dataset, text, target) in enumerate(zip(datasets, texts, targets, strict=True))
    ]
    return round_of(prompts, iteration=iteration, sampling_round=sampling_round)


def collect(
    policy: PolicyRef, planned: RolloutPlan, rollout: GlmImageRolloutSection = ROLLOUT, *, with_reference: bool = False
) -> ArtifactRef:
    return collect_rollouts_task.fn(policy, planned, spec(), rollout, with_reference, PLACEMENT)


def score(
    rollouts: ArtifactRef,
    folder: str = "iteration_000001",
    mix: tuple[RewardSection, ...] = MIX,
    *,
    targets: tuple[str, ...] = (),
) -> SamplingRound:
    place = f"{folder}/rewards"
    scored = {
        section.label: score_reward_task.fn(rollouts, section, place, "iteration 1", PLACEMENT, folders=targets)
        for section in mix
    }
    return SamplingRound(rollouts, scored)


def compare(scored: SamplingRound, **settings: Any) -> ArtifactRef:
    return compare_rounds((scored,), **settings)


def scores_of(store: ArtifactStore, scored: SamplingRound, label: str = "jpeg") -> pl.DataFrame:
    return pl.read_parquet(store.local_files(scored.rewards[label]) / SCORES_FILE)


def compare_rounds(
    rounds: tuple[SamplingRound, ...],
    folder: str = "iteration_000001",
    mix: tuple[RewardSection, ...] = MIX,
    streams: tuple[Stream, ...] = ("tokens",),
    **settings: Any,
) -> ArtifactRef:
    return compute_advantages_task.fn(rounds, streams, mix, AdvantagesSection(**settings), folder, "iteration 1")


def update(
    policy: PolicyRef,
    rollouts: ArtifactRef | tuple[ArtifactRef, ...],
    advantages: ArtifactRef,
    section: UpdateSection = UPDATE,
    max_staleness: int = 0,
) -> PolicyRef:
    drawn = rollouts if isinstance(rollouts, tuple) else (rollouts,)
    return update_policy_task.fn(
        policy, drawn, advantages, spec(), {"tokens": section}, 11, max_staleness, "iteration 1", PLACEMENT
    )


def content(store: ArtifactStore, reference: ArtifactRef) -> dict[str, bytes]:
    folder = store.local_files(reference)
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def scoring(values: Callable[[str], float | None]) -> Callable[[JpegReward, ScoringBatch], Sequence[Score]]:
    def score(self: JpegReward, batch: ScoringBatch) -> Sequence[Score]:
        return [Score(value, value) for value in map(values, batch.sample_ids)]

    return score


def table_of(store: ArtifactStore, reference: ArtifactRef) -> pl.DataFrame:
    """The artifact's rows, those of rollouts with their images."""
    files = sorted(store.local_files(reference).glob("*.parquet"))
    images = [path for path in files if path.match(IMAGES)]
    table = pl.read_parquet([path for path in files if path not in images])
    if not images:
        return table
    return table.join(pl.read_parquet(images).drop("prompt"), on="sample_id", how="left", maintain_order="left")
