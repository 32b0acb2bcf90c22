"""Names and seeds of samples: unique, stable, and a function of the place alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.collect import sampled_at_once
from grpo_core.image_size import ImageSize
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt
from tasks.prompts.targets import TargetReference
from tasks.rollouts.plan import RolloutPlan, plan_evaluation, plan_round

PROMPTS = tuple(
    DrawnPrompt(
        "shapes" if i < 3 else "signs",
        Prompt(f"id{i}", f"prompt {i}", {"n": i}),
        TargetReference(f"{i}.png", f"{i:064d}") if i % 2 else None,
    )
    for i in range(5)
)


def iteration(
    number: int = 1, *, sampling_round: int = 1, seed: int = 0, count: int = 3, group_size: int = 2, noise: bool = True
) -> RolloutPlan:
    chosen = [PROMPTS[place % 5] for place in range(count)]
    return plan_round(
        chosen, seed=seed, iteration=number, sampling_round=sampling_round, group_size=group_size, shared_noise=noise
    )


def seeds(plan: RolloutPlan) -> list[int]:
    return [seed for group in plan.groups for seed in plan.request(group).seeds]


def names(plan: RolloutPlan) -> list[str]:
    return [name for group in plan.groups for name in plan.request(group).sample_ids]


def test_names_say_iteration_occurrence_and_sibling() -> None:
    assert names(iteration(7, count=2)) == [
        "i000007.p0000.s00",
        "i000007.p0000.s01",
        "i000007.p0001.s00",
        "i000007.p0001.s01",
    ]
    assert iteration(7).folder == "iteration_000007"
    assert names(iteration(7, sampling_round=2, count=1)) == ["i000007.d02.p0000.s00", "i000007.d02.p0000.s01"]
    assert iteration(7, sampling_round=2).folder == "iteration_000007/round_02"


def test_every_sample_of_a_run_has_a_unique_name_and_seed() -> None:
    plans = [
        iteration(number, sampling_round=later, count=7, group_size=4) for number in range(1, 6) for later in (1, 2, 3)
    ]
    all_names = [name for plan in plans for name in names(plan)]
    all_seeds = [seed for plan in plans for seed in seeds(plan)]
    assert len(set(all_names)) == len(set(all_seeds)) == 5 * 3 * 7 * 4


def test_seeds_depend_on_the_place_alone() -> None:
    few, many = iteration(3, group_size=2), iteration(3, group_size=4)
    for small, large in zip(few.groups, many.groups, strict=True):
        assert many.request(large).seeds[:2] == few.request(small).seeds
    assert set(seeds(iteration(3, seed=1))).isdisjoint(seeds(iteration(3, seed=0)))


def test_siblings_share_the_noise_or_not() -> None:
    shared, own = iteration(), iteration(noise=False)
    for group in shared.groups:
        assert len(set(shared.request(group).noise_seeds)) == 1
        assert len(set(own.request(group).noise_seeds)) == 2
    first = {shared.request(group).noise_seeds[0] for group in shared.groups}
    assert len(first) == len(shared.groups)


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
def test_groups_of_one_size_are_sampled_together_also_by_a_shard(
    sizes: list[ImageSize], prompts_per_batch: int, data: st.DataObject
) -> None:
    """Names and seeds are those of the order in which the prompts were drawn."""
    drawn = [replace(PROMPTS[place % 5], size=size) for place, size in enumerate(sizes)]
    plain = [replace(prompt, size=None) for prompt in drawn]
    plan, unsized = (
        plan_round(each, seed=0, iteration=1, sampling_round=1, group_size=2, shared_noise=True)
        for each in (drawn, plain)
    )
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
