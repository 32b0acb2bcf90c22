"""Sampling rounds of samples without content, with any groups of drafts and renderings, and scores of them."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import torch

from configs.scoring import AdvantagesSection, RewardSection
from grpo_core.advantages.compute import compute_advantages
from grpo_core.rollouts.streams import Stream
from tasks.advantages.compute_advantages import compute_advantages_task, zero_metrics
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import write_table
from tasks.storage.schemas import REWARDS, SCHEMA_VERSION, TEXT_ROLLOUTS, rollout_schema
from tests.tasks.stage_calls import table_of

UNEVEN = (5, *[1] * 11)
"""Twelve drafts, the first of them rendered five times."""


def places_of(renderings: Sequence[int]) -> list[tuple[int, int]]:
    return [(draft, index) for draft, count in enumerate(renderings) for index in range(count)]


def sample_ids(renderings: Sequence[int], groups: int = 1) -> list[str]:
    return [f"g{group}.s{draft:02d}.r{index:02d}" for group in range(groups) for draft, index in places_of(renderings)]


def made_round(
    store: ArtifactStore,
    scores: Mapping[str, Sequence[float | None]],
    renderings: Sequence[int],
    streams: Sequence[Stream] = ("tokens", "denoising"),
    *,
    datasets: Sequence[str] = ("default",),
    folder: str = "iteration_000001",
) -> SamplingRound:
    """Write rollouts with a group for each dataset, and the scores of each reward."""
    names, places = sample_ids(renderings, len(datasets)), places_of(renderings) * len(datasets)
    columns = {
        "sample_id": names,
        "group_id": [name.partition(".")[0] for name in names],
        "prompt_id": [f"prompt{name.partition('.')[0]}" for name in names],
        "dataset": [dataset for dataset in datasets for _ in range(len(names) // len(datasets))],
        "columns": ["{}"] * len(names),
        "token_sample": [draft for draft, _ in places],
        "image_number": [index for _, index in places],
    }
    rollouts = commit_rows(store, f"{folder}/rollouts", rollout_schema("image", streams), columns)
    return SamplingRound(rollouts, {label: made_scores(store, label, names, each) for label, each in scores.items()})


def made_texts(store: ArtifactStore, scores: Mapping[str, Sequence[float | None]], groups: int) -> SamplingRound:
    count = len(next(iter(scores.values()))) // groups
    names = [f"g{group}.s{index:02d}" for group in range(groups) for index in range(count)]
    columns = {
        "sample_id": names,
        "group_id": [name.partition(".")[0] for name in names],
        "dataset": ["default"] * len(names),
        "columns": ["{}"] * len(names),
    }
    rollouts = commit_rows(store, "iteration_000001/rollouts", TEXT_ROLLOUTS, columns)
    return SamplingRound(rollouts, {label: made_scores(store, label, names, each) for label, each in scores.items()})


def made_scores(store: ArtifactStore, label: str, names: Sequence[str], values: Sequence[float | None]) -> ArtifactRef:
    columns = {"sample_id": names, "reward": [label] * len(names), "value": values}
    return commit_rows(store, f"iteration_000001/rewards/{label}", REWARDS, columns, "scores.parquet")


def commit_rows(
    store: ArtifactStore,
    folder: str,
    schema: pa.Schema,
    columns: Mapping[str, Sequence[object]],
    name: str = "part-00000.parquet",
) -> ArtifactRef:
    """Write an artifact of one table; what is not among the columns is null."""
    rows = len(next(iter(columns.values())))
    with store.staging() as staged:
        filled = {each: columns.get(each, [None] * rows) for each in schema.names}
        digest = write_table(staged / name, schema, filled)
        return commit_artifact(
            store, staged, folder, digest=digest, schema_version=SCHEMA_VERSION, rows=rows, seconds=0.0, metrics={}
        )


BOTH: tuple[Stream, ...] = ("tokens", "denoising")
LIKENESS, BRIGHTNESS = (RewardSection(reward=name, name=name) for name in ("ssim", "psnr"))


def compute(
    rounds: Sequence[SamplingRound],
    streams: tuple[Stream, ...] = BOTH,
    mix: tuple[RewardSection, ...] = (LIKENESS,),
    earlier: ArtifactRef | None = None,
    folder: str = "iteration_000001",
    **settings: Any,
) -> ArtifactRef:
    section = AdvantagesSection(**settings)
    return compute_advantages_task.fn(tuple(rounds), streams, mix, section, folder, "iteration 1", earlier)


def rows_of(table: pl.DataFrame, stream: Stream) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in table.filter(stream=stream).iter_rows(named=True)}


def standardised(values: Sequence[float], eps: float = 1e-4) -> list[float]:
    return [(value - fmean(values)) / (stdev(values) + eps) for value in values]


def test_drafts_are_compared_for_the_tokens_and_renderings_for_the_denoising(store: ArtifactStore) -> None:
    """The renderings' mean is 3, which is the first draft's reward among those of the others."""
    scored = made_round(store, {"ssim": [1.0, 2.0, 3.0, 4.0, 5.0, *range(11)]}, UNEVEN)
    reference = compute([scored])
    table = table_of(store, reference)
    tokens, denoising = rows_of(table, "tokens"), rows_of(table, "denoising")
    names = sample_ids(UNEVEN)
    assert list(tokens) == [names[0], *names[5:]]
    assert list(denoising) == names[:5]
    assert [row["reward"] for row in tokens.values()] == [3.0, *map(float, range(11))]
    assert [row["reward"] for row in denoising.values()] == [1.0, 2.0, 3.0, 4.0, 5.0]
    expected = standardised([3.0, *map(float, range(11))])
    assert [row["advantage"] for row in tokens.values()] == pytest.approx(expected, abs=1e-6)
    expected = standardised([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [row["advantage"] for row in denoising.values()] == pytest.approx(expected, abs=1e-6)
    assert {row["group_mean"] for row in denoising.values()} == {3.0}
    assert [row["group_mean"] for row in tokens.values()] == pytest.approx([58 / 12] * 12)
    assert reference.rows == table.height == 17
    assert reference.metrics["reward"] == pytest.approx(58 / 12)
    assert reference.metrics["denoising/reward"] == 3.0
    assert reference.metrics["denoising/reward_std_within_groups"] == pytest.approx(2.5**0.5)
    assert (reference.metrics["groups_kept"], reference.metrics["denoising/groups_kept"]) == (1.0, 1.0)


def test_each_stream_has_its_own_rewards(store: ArtifactStore) -> None:
    """The same scores, each reward for one stream: neither sees the other's."""
    likeness = [*[0.5] * 5, *(0.1 * index for index in range(11))]
    brightness = [0.2, 0.4, 0.6, 0.8, 1.0, *[0.0] * 11]
    scored = made_round(store, {"ssim": likeness, "psnr": brightness}, UNEVEN)
    mix = (
        LIKENESS.model_copy(update={"streams": ("tokens",)}),
        BRIGHTNESS.model_copy(update={"streams": ("denoising",), "weight": 2.0}),
    )
    table = table_of(store, compute([scored], mix=mix))
    tokens, denoising = rows_of(table, "tokens"), rows_of(table, "denoising")
    assert [row["reward"] for row in tokens.values()] == pytest.approx([0.5, *(0.1 * index for index in range(11))])
    assert [row["reward"] for row in denoising.values()] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert {entry["reward"] for row in tokens.values() for entry in row["reward_breakdown"]} == {"ssim"}
    assert {entry["reward"] for row in denoising.values() for entry in row["reward_breakdown"]} == {"psnr"}
    expected = standardised([0.4, 0.8, 1.2, 1.6, 2.0])
    assert [row["advantage"] for row in denoising.values()] == pytest.approx(expected, abs=1e-6)


def test_a_group_without_spread_in_one_stream_can_have_it_in_the_other(store: ArtifactStore) -> None:
    """Equal drafts whose first is rendered unequally."""
    scored = made_round(store, {"ssim": [1.0, 3.0, 2.0, 2.0]}, (2, 1, 1))
    reference = compute([scored], constant_groups="redraw")
    table = table_of(store, reference)
    assert [row["advantage"] for row in rows_of(table, "tokens").values()] == [None] * 3
    assert [row["dropped"] for row in rows_of(table, "tokens").values()] == [True] * 3
    assert [row["advantage"] for row in rows_of(table, "denoising").values()] == pytest.approx(standardised([1.0, 3.0]))
    assert (reference.metrics["groups_kept"], reference.metrics["denoising/groups_kept"]) == (0.0, 1.0)


def test_rewards_of_other_datasets_are_left_out_of_each_stream(store: ArtifactStore) -> None:
    """The second group's dataset has the second reward alone; its first is null for each of its samples."""
    first, second = [1.0, 3.0, 5.0, None, None, None], [0.0, 0.0, 0.0, 2.0, 4.0, 9.0]
    scored = made_round(store, {"ssim": first, "psnr": second}, (2, 1), datasets=("faces", "signs"))
    mix = (LIKENESS.model_copy(update={"datasets": ("faces",)}), BRIGHTNESS.model_copy(update={"datasets": ("signs",)}))
    reference = compute([scored], mix=mix, scale="none")
    table = table_of(store, reference)
    assert [row["reward"] for row in rows_of(table, "tokens").values()] == [2.0, 5.0, 3.0, 9.0]
    assert [row["advantage"] for row in rows_of(table, "denoising").values()] == [-1.0, 1.0, -1.0, 1.0]
    assert reference.metrics["datasets/signs/reward"] == 6.0
    assert reference.metrics["denoising/datasets/faces/reward"] == 2.0


def test_a_pipeline_without_tokens_compares_every_sample_of_a_prompt(store: ArtifactStore) -> None:
    """Its metrics have the plain names, since it has one stream."""
    values = [1.0, 2.0, 4.0, 5.0, 7.0, 6.0]
    scored = made_round(store, {"ssim": values}, (3,), ("denoising",), datasets=("a", "a"))
    reference = compute([scored], ("denoising",))
    table = table_of(store, reference)
    assert table["stream"].to_list() == ["denoising"] * 6
    assert table["reward"].to_list() == values
    expected = [*standardised(values[:3]), *standardised(values[3:])]
    assert table["advantage"].to_list() == pytest.approx(expected, abs=1e-6)
    assert not [name for name in reference.metrics if name.startswith("denoising/")]


def test_previews_are_compared_with_full_images_by_their_ranks_in_each_group(store: ArtifactStore) -> None:
    ranks, full = [1.0, 2.0, 7.0, 8.0], [*(4.0, 3.0, 2.0, 1.0), *(4.0, 1.0, 2.0, 3.0), *(1.0,) * 4]
    names = sample_ids((4,), 3)
    columns = {
        "sample_id": names,
        "group_id": [name.partition(".")[0] for name in names],
        "dataset": ["default"] * 12,
        "columns": ["{}"] * 12,
        "token_sample": [0] * 12,
        "preview_rank": ranks * 3,
        "preview_count": [8] * 12,
    }
    schema = rollout_schema("image", ["denoising"], with_previews=True)
    rollouts = commit_rows(store, "iteration_000001/rollouts", schema, columns)
    scored = SamplingRound(rollouts, {"ssim": made_scores(store, "ssim", names, full)})
    metrics = compute([scored], ("denoising",)).metrics
    # Spearman .2 over the kept ones, whose ranks have a variance of 9.25 where those of all eight have 5.25.
    lower = 0.2 / (9.25 / 5.25 * (1 - 0.2**2) + 0.2**2) ** 0.5
    assert metrics["previews/rank_correlation_min"] == pytest.approx(lower)
    assert metrics["previews/rank_correlation"] == pytest.approx((1 + lower) / 2)


def test_the_digest_covers_the_stream(store: ArtifactStore) -> None:
    """Where every draft is rendered once, both streams have the same numbers."""
    scored = made_round(store, {"ssim": [1.0, 3.0]}, (1, 1), ("tokens",))
    tokens, denoising = (compute([scored], (stream,)) for stream in BOTH)
    assert tokens.digest != denoising.digest


def test_an_evaluation_describes_every_sample_in_both_streams(store: ArtifactStore) -> None:
    """Nothing is rendered twice there, and the held-out reward of each stream's mix is a metric."""
    mix = (
        LIKENESS.model_copy(update={"streams": ("tokens",)}),
        BRIGHTNESS.model_copy(update={"streams": ("denoising",)}),
    )
    scored = made_round(store, {"ssim": [1.0, 2.0], "psnr": [5.0, 8.0]}, (1, 1), ("tokens",))
    reference = compute([scored], mix=mix)
    assert (reference.metrics["reward"], reference.metrics["denoising/reward"]) == (1.5, 6.5)
    assert reference.rows == 4


def test_one_stream_is_what_the_core_computes_to_the_bit_and_in_the_stored_order(store: ArtifactStore) -> None:
    """Texts have no drafts: every sample is its own, as before there were streams."""
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(3, 4, 2, generator=generator, dtype=torch.float64)
    scores = {"ssim": values[..., 0].flatten().tolist(), "psnr": values[..., 1].flatten().tolist()}
    scored, mix = made_texts(store, scores, 3), (LIKENESS, BRIGHTNESS.model_copy(update={"weight": 0.25}))
    reference = compute([scored], ("tokens",), mix)
    table = table_of(store, reference)
    expected = compute_advantages(values, mix, AdvantagesSection())
    assert table["advantage"].to_list() == expected.advantages.double().flatten().tolist()
    assert table["reward"].to_list() == expected.rewards.flatten().tolist()
    assert table["sample_id"].to_list() == [f"g{group}.s{index:02d}" for group in range(3) for index in range(4)]
    assert table["stream"].unique().to_list() == ["tokens"]


def test_moments_of_each_stream_pass_to_the_next_iteration(store: ArtifactStore) -> None:
    """A draft's mean is one observation of the tokens' reward, a rendering one of the denoising's."""
    mix = (LIKENESS.model_copy(update={"normalize": "running"}),)
    scored = made_round(store, {"ssim": [1.0, 3.0, 5.0]}, (2, 1))
    first = compute([scored], mix=mix)
    assert first.metrics["running/ssim/count"] == 2.0
    assert first.metrics["running/ssim/mean"] == 3.5
    assert first.metrics["running/denoising/ssim/count"] == 2.0
    assert first.metrics["running/denoising/ssim/mean"] == 2.0
    second = compute([scored], mix=mix, earlier=first, folder="iteration_000002")
    assert second.metrics["running/ssim/count"] == 4.0
    assert second.metrics["running/denoising/ssim/count"] == 4.0


def test_groups_of_zeros_are_counted_for_each_reward_that_adds() -> None:
    """Of `low`: all clamped to 0, all .5, one 0 alone, 0 beside 1, and nothing at all, which does not count."""
    null = float("nan")
    low = [[-0.3, -2.0, 0.0], [0.5, 0.5, null], [0.0, null, null], [0.0, 1.0, null], [null, null, null]]
    other = [[0.1, 0.2, 0.3]] * 5
    values = torch.tensor([low, other, other, other], dtype=torch.float64).permute(1, 2, 0)
    mix = [
        RewardSection(reward="r2", name="low", clamp=(0.0, 1.0)),
        RewardSection(reward="r2", name="other"),
        RewardSection(reward="r2", name="measured", weight=0.0),
        RewardSection(reward="r2", name="open", role="gate"),
    ]
    result = compute_advantages(values, mix, AdvantagesSection())
    assert zero_metrics(result, mix) == {"rewards/low/frac_all_zero": 0.5, "rewards/other/frac_all_zero": 0.0}
    assert zero_metrics(compute_advantages(values[..., :1], mix[:1], AdvantagesSection()), mix[:1]) == {}
