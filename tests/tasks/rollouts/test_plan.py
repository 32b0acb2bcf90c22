"""Names and seeds of samples: unique, stable, and a function of the place alone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_core.collect import sampled_at_once
from grpo_core.rollouts.records import GroupRequest
from grpo_core.rollouts.streams import ImageSize
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt
from tasks.prompts.source_images import SourceReference
from tasks.prompts.targets import TargetReference
from tasks.rollouts.plan import KeptSeed, RolloutPlan, plan_evaluation
from tests.tasks.stage_calls import round_of

PROMPTS = tuple(
    DrawnPrompt(
        "shapes" if i < 3 else "signs",
        Prompt(f"id{i}", f"prompt {i}", {"n": i}),
        TargetReference(f"{i}.png", f"{i:064d}") if i % 2 else None,
    )
    for i in range(5)
)


def iteration(number: int = 1, *, count: int = 3, **changes: Any) -> RolloutPlan:
    return round_of([PROMPTS[place % 5] for place in range(count)], iteration=number, **changes)


def seeds(plan: RolloutPlan) -> list[int]:
    return [seed for group in plan.groups for seed in plan.request(group).seeds]


def names(plan: RolloutPlan) -> list[str]:
    return [name for group in plan.groups for name in plan.request(group).sample_ids]


def test_names_say_iteration_occurrence_and_sibling_and_are_unique() -> None:
    assert names(iteration(7, count=2)) == [
        "i000007.p0000.s00",
        "i000007.p0000.s01",
        "i000007.p0001.s00",
        "i000007.p0001.s01",
    ]
    assert iteration(7).folder == "iteration_000007"
    assert names(iteration(7, sampling_round=2, count=1)) == ["i000007.d02.p0000.s00", "i000007.d02.p0000.s01"]
    assert iteration(7, sampling_round=2).folder == "iteration_000007/round_02"
    plans = [
        iteration(number, sampling_round=later, count=7, images_of_samples=(1, 1, 1, 1))
        for number in range(1, 6)
        for later in (1, 2, 3)
    ]
    all_names = [name for plan in plans for name in names(plan)]
    all_seeds = [seed for plan in plans for seed in seeds(plan)]
    assert len(set(all_names)) == len(set(all_seeds)) == 5 * 3 * 7 * 4


def test_seeds_depend_on_the_place_alone() -> None:
    few, many = iteration(3, images_of_samples=(1, 1)), iteration(3, images_of_samples=(1, 1, 1, 1))
    for small, large in zip(few.groups, many.groups, strict=True):
        assert many.request(large).seeds[:2] == few.request(small).seeds
    assert set(seeds(iteration(3, seed=1))).isdisjoint(seeds(iteration(3, seed=0)))


def test_siblings_share_the_noise_or_not() -> None:
    shared, own = iteration(), iteration(shared_noise=False)
    for group in shared.groups:
        assert len(set(shared.request(group).noise_seeds)) == 1
        assert len(set(own.request(group).noise_seeds)) == 2
    first = {shared.request(group).noise_seeds[0] for group in shared.groups}
    assert len(first) == len(shared.groups)


def requested(images_of_samples: tuple[int, ...], **changes: Any) -> GroupRequest:
    plan = iteration(images_of_samples=images_of_samples, count=1, window_start=2, **changes)
    return plan.request(plan.groups[0])


def test_renderings_of_a_draft_have_its_tokens_and_steps_of_their_own() -> None:
    uneven = requested((3, 1, 1), shared_noise=False)
    assert [name.removeprefix("i000001.p0000.") for name in uneven.sample_ids] == [
        "s00.r00",
        "s00.r01",
        "s00.r02",
        "s01.r00",
        "s02.r00",
    ]
    drafts = requested((1, 1, 1))
    assert uneven.seeds == tuple(drafts.seeds[draft] for draft in (0, 0, 0, 1, 2))
    assert len(set(uneven.step_seeds)) == len(set(uneven.noise_seeds)) == 5
    assert set(uneven.step_seeds).isdisjoint({*uneven.seeds, *uneven.noise_seeds})
    assert uneven.window_start == 2
    shared = requested((3, 1, 1))
    assert len(set(shared.noise_seeds)) == 1
    assert shared.step_seeds == uneven.step_seeds


def test_all_samples_of_one_draft_are_its_renderings() -> None:
    """A pipeline without tokens, whose samples have the names that those of several drafts have."""
    one = requested((4,), shared_noise=False)
    assert one.sample_ids == requested((1, 1, 1, 1)).sample_ids
    assert len(set(one.seeds)) == 1
    assert [len(set(seeds)) for seeds in (one.step_seeds, one.noise_seeds)] == [4, 4]
    assert iteration(images_of_samples=(4,)).places == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_chosen_seeds_are_those_of_the_whole_group() -> None:
    many = iteration(images_of_samples=(6,), shared_noise=False, window_start=1)
    plan = iteration(images_of_samples=(2,), shared_noise=False, window_start=1)
    group = plan.groups[0]
    previews = plan.previews(6)
    assert (previews.folder, previews.title) == ("iteration_000001/previews", "iteration 1, previews")
    cheap, whole = previews.request(group), many.request(group)
    assert (cheap.noise_seeds, cheap.sample_ids) == (whole.noise_seeds, whole.sample_ids)
    assert (cheap.step_seeds, cheap.window_start) == ((), None)
    chosen = group.model_copy(update={"kept": (KeptSeed(1, 0.5, 6.0), KeptSeed(4, None, None))})
    found = plan.request(chosen)
    for name in ("sample_ids", "seeds", "noise_seeds", "step_seeds"):
        assert getattr(found, name) == tuple(getattr(whole, name)[sibling] for sibling in (1, 4))
    kept = plan.model_copy(update={"groups": (chosen,)})
    assert RolloutPlan.model_validate_json(kept.model_dump_json()) == kept
    assert "kept" not in group.model_dump(), "plans without previews keep their digests"


def test_without_a_window_there_is_no_noise_and_a_plan_arrives_elsewhere_as_it_is() -> None:
    plan = iteration()
    request = plan.request(plan.groups[0])
    assert (request.step_seeds, request.window_start) == ((), None)
    for plan in (iteration(), iteration(images_of_samples=(2, 1), window_start=0)):
        assert RolloutPlan.model_validate_json(plan.model_dump_json()) == plan


def test_renderings_that_are_not_the_samples_are_refused() -> None:
    values = iteration(images_of_samples=(2, 1)).model_dump()
    with pytest.raises(ValidationError):
        RolloutPlan.model_validate({**values, "group_size": 4})


def test_prompts_come_with_their_columns_and_targets() -> None:
    for group in iteration(count=5).groups:
        index = int(group.prompt_id.removeprefix("id"))
        assert group.prompt == f"prompt {index}"
        assert group.columns == {"n": index}
        assert group.dataset == ("shapes" if index < 3 else "signs")
        assert group.target_uri == (f"{index}.png" if index % 2 else None)
        assert group.target_sha256 == (f"{index:064d}" if index % 2 else None)


def test_evaluations_of_two_versions_differ_in_their_place_only() -> None:
    first, second = (
        plan_evaluation(PROMPTS, seed=5, version=v, samples_per_prompt=3, shared_noise=True) for v in (0, 12)
    )
    assert (first.folder, second.folder) == ("evaluations/000000", "evaluations/000012")
    assert first.groups == second.groups
    assert seeds(first) == seeds(second)
    assert names(first)[:4] == ["heldout.p0000.s00", "heldout.p0000.s01", "heldout.p0000.s02", "heldout.p0001.s00"]


SIZES = (ImageSize(64, 64), ImageSize(32, 64), ImageSize(64, 32))


@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_groups_of_one_size_are_sampled_together(
    sizes: list[ImageSize], prompts_per_batch: int, data: st.DataObject
) -> None:
    """Names and seeds are those of the order in which the prompts were drawn."""
    drawn = [replace(PROMPTS[place % 5], size=size) for place, size in enumerate(sizes)]
    plain = [replace(prompt, size=None) for prompt in drawn]
    plan, unsized = round_of(drawn), round_of(plain)
    groups = {group.group_id: group for group in plan.groups}
    assert [groups[group.group_id].model_copy(update={"size": None}) for group in unsized.groups] == [*unsized.groups]
    assert [groups[group.group_id].size for group in unsized.groups] == sizes
    batches = list(sampled_at_once(plan.groups, prompts_per_batch))
    assert all(len({group.size for group in batch}) == 1 for batch in batches)
    assert len(batches) == sum(-(-sizes.count(size) // prompts_per_batch) for size in {*sizes})
    pixels = [batch[0].size.pixels for batch in batches if batch[0].size]
    assert pixels == sorted(pixels, reverse=True)
    first = data.draw(st.integers(0, len(batches)))
    last = data.draw(st.integers(first, len(batches)))
    part = [group for batch in batches[first:last] for group in batch]
    assert list(sampled_at_once(part, prompts_per_batch)) == [list(batch) for batch in batches[first:last]]


def test_prompts_with_equally_many_images_are_sampled_together() -> None:
    def with_images(drawn: DrawnPrompt, count: int) -> DrawnPrompt:
        read = tuple(SourceReference(f"{place:064d}", SIZES[0], "row 1", "1.png", bytes) for place in range(count))
        return replace(drawn, size=SIZES[0], prompt=replace(drawn.prompt, sources=read))

    drawn = [with_images(prompt, count) for prompt, count in zip(PROMPTS, (0, 2, 1, 0, 1), strict=True)]
    drawn.append(replace(drawn[1], size=SIZES[1]))
    plan = plan_evaluation(drawn, seed=5, version=0, samples_per_prompt=1, shared_noise=True)
    batches = [[(group.size, len(group.sources)) for group in batch] for batch in sampled_at_once(plan.groups, 4)]
    large, small = SIZES[:2]
    assert batches == [[(large, 2)], [(large, 1)] * 2, [(large, 0)] * 2, [(small, 2)]]
