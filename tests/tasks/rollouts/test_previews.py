"""Previews choose seeds, and what is drawn from these is what an undisturbed group has, to the bit."""

import pytest

from configs.rollouts import KeepSection, PreviewsSection
from tasks.metrics import RANK_CORRELATION, RANK_CORRELATION_MIN
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.rollouts.plan import KeptSeed
from tasks.rollouts.previews import keep_seeds
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.schemas import ADVANTAGES
from tests.tasks.advantages.test_compute_advantages import commit_rows
from tests.tasks.rollouts.both_streams import PLACEMENT, ROLLOUT, plan, policy
from tests.tasks.stage_calls import compare_rounds, score, scores_of, table_of
from tests.tasks.update.update_jobs import JOINT


def test_full_images_of_chosen_seeds_are_those_of_an_undisturbed_group_to_the_bit(store: ArtifactStore) -> None:
    # Rows of another number round otherwise, which is seen in log-probs and not in images.
    plain = ROLLOUT.model_copy(update={"decode_batch_size": 1})
    cheap_images = PreviewsSection(per_prompt=5, steps=2, solver="lms")
    rollout = plain.model_copy(update={"previews": cheap_images, "group_size": 2})
    whole = plan(images_of_samples=(5,), prompts=1).model_copy(update={"folder": "whole"})
    one = plan(images_of_samples=(2,), prompts=1)
    undisturbed = table_of(store, collect_rollouts_task.fn(policy(), whole, JOINT.spec(), plain, False, PLACEMENT))
    previews = one.previews(5)
    cheap = collect_rollouts_task.fn(policy(), previews, JOINT.spec(), rollout.for_previews(), False, PLACEMENT)
    rated = score(cheap, previews.folder)
    advantages = compare_rounds((rated,), previews.folder, streams=("denoising",))
    chosen = keep_seeds(store, one, previews, advantages, rollout.keep)
    values = scores_of(store, rated)["value"]
    best, worst = values.arg_max(), values.arg_min()
    assert [each.sibling for each in chosen.groups[0].kept] == sorted((best, worst))
    drawn = collect_rollouts_task.fn(policy(), chosen, JOINT.spec(), rollout, False, PLACEMENT)
    table = table_of(store, drawn)
    same = ("sample_id", "sibling", "noise_seed", "step_seed", "token_ids", "denoising_logprobs")
    expected = undisturbed[sorted((best, worst))]
    assert table.select(same).equals(expected.select(same))
    assert [image["bytes"] for image in table["image"]] == [image["bytes"] for image in expected["image"]]
    assert set(table_of(store, cheap)["num_inference_steps"]) == {2}
    assert set(table_of(store, cheap)["solver"]) == {"lms"}
    assert "solver" not in table.columns
    assert dict(zip(table["sibling"], table["preview_reward"], strict=True)) == {i: values[i] for i in (best, worst)}
    assert dict(zip(table["sibling"], table["preview_rank"], strict=True)) == {best: 1.0, worst: 5.0}
    assert {*table["preview_count"], *table["preview_steps"]} == {5, 2}
    full = score(drawn)
    agree = scores_of(store, full)["value"].arg_max() == table["preview_reward"].arg_max()
    metrics = compare_rounds((full,), streams=("denoising",)).metrics
    assert metrics[RANK_CORRELATION] == metrics[RANK_CORRELATION_MIN] == pytest.approx(1 if agree else -1)
    assert RANK_CORRELATION not in compare_rounds((rated,), previews.folder, streams=("denoising",)).metrics


def test_previews_without_an_advantage_are_chosen_last_and_equal_ones_by_their_seed(store: ArtifactStore) -> None:
    one = plan(images_of_samples=(3,))
    previews = one.previews(5)
    found = [*(0.5, None, 2.0, 0.5, None), *(1.0,) * 5]
    columns = {
        "sample_id": [name for group in previews.groups for name in previews.sample_ids(group)],
        "stream": ["denoising"] * 10,
        "reward": [None if each is None else each / 10 for each in found],
        "advantage": found,
    }
    advantages = commit_rows(store, "iteration_000001/previews/advantages", ADVANTAGES, columns)
    some, equal = keep_seeds(store, one, previews, advantages, KeepSection(best=1, worst=2)).groups
    assert some.kept == (KeptSeed(0, 0.05, 2.5), KeptSeed(2, 0.2, 1.0), KeptSeed(3, 0.05, 2.5))
    assert [(each.sibling, each.rank) for each in equal.kept] == [(0, 3.0), (3, 3.0), (4, 3.0)]
    fewer = keep_seeds(store, one, previews, advantages, KeepSection(best=2, worst=2)).groups[0].kept
    assert fewer == (KeptSeed(0, 0.05, 2.5), KeptSeed(2, 0.2, 1.0), KeptSeed(3, 0.05, 2.5), KeptSeed(4, None, None))
