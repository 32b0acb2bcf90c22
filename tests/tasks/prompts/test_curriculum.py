"""Which prompts are drawn: shares, coverage, weights worked by hand, and one answer for one place."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.prompts import CurriculumSection
from tasks.prompts import curriculum
from tasks.prompts.curriculum import (
    DrawnPrompt,
    PromptSet,
    choose_sets,
    difficulty_weight,
    draw_prompts,
    read_statistics,
)
from tasks.prompts.read import Prompt
from tasks.prompts.targets import TargetReference
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.schemas import ADVANTAGES
from tests.tasks.advantages.test_compute_advantages import commit_rows

SEEDS = st.integers(0, 2**63 - 1)


class TestChooseSets:
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=6), SEEDS, st.integers(0, 400), st.integers(1, 60))
    def test_any_part_is_cut_from_the_same_stream(self, weights: list[int], seed: int, first: int, count: int) -> None:
        stream = choose_sets(weights, seed=seed, first=0, count=first + count)
        assert choose_sets(weights, seed=seed, first=first, count=count) == stream[first:]
        served = [0] * len(weights)
        for chosen, before in stream:
            assert before == served[chosen]
            served[chosen] += 1

    def test_an_iteration_draws_its_own_places_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, drawn = curriculum._raw, list[int]()

        def counted(seed: int, size: int, **after: int) -> Any:
            drawn.append(size)
            return real(seed, size, **after)

        monkeypatch.setattr(curriculum, "_raw", counted)
        parts = [choose_sets([0.7, 0.3], seed=11, first=100 * number, count=100) for number in range(50)]
        assert sum(drawn) == 50 * 100
        # One that continues from the middle, in a process of its own, counts those before once.
        curriculum._latest.cache_clear()
        assert choose_sets([0.7, 0.3], seed=11, first=4900, count=100) == parts[-1]

    def test_does_not_change_between_releases(self) -> None:
        # raw = numpy.random.PCG64(numpy.random.SeedSequence(derive_seed(7, "sets"))).random_raw(12), and of each
        # (raw >> 11) / 2**53 the first of .5, .8 and 1 that is larger.
        places = choose_sets([5.0, 3.0, 2.0], seed=7, first=0, count=12)
        assert "".join("abc"[chosen] for chosen, _ in places) == "aabaabaabbab"


UNIFORM = CurriculumSection()
DIFFICULTY = CurriculumSection(kind="difficulty")


def prompt_set(size: int, name: str = "default", weight: float = 1.0) -> PromptSet:
    prompts = tuple(Prompt(f"{index:016x}", f"{name} {index}", {}) for index in range(size))
    targets = tuple(
        TargetReference(f"{name}{index}.png", f"{index:064d}") if index % 2 else None for index in range(size)
    )
    return PromptSet(name, weight, prompts, targets)


def drawn(sets: Sequence[PromptSet], iteration: int = 1, count: int = 5, **options: Any) -> tuple[DrawnPrompt, ...]:
    usual = {"seed": 0, "sampling_round": 1, "curriculum": UNIFORM, "statistics": None}
    return draw_prompts(sets, iteration=iteration, count=count, **{**usual, **options})


def stream(sets: Sequence[PromptSet], seed: int, count: int, iterations: int) -> list[DrawnPrompt]:
    return [each for number in range(1, iterations + 1) for each in drawn(sets, number, count, seed=seed)]


def names(prompts: Sequence[DrawnPrompt]) -> list[str]:
    return [each.prompt.text for each in prompts]


def require_passes(texts: Sequence[str], size: int) -> None:
    """Assert that no prompt of a set of this size comes again before all have come."""
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        assert len(set(part)) == len(part)


class TestUniform:
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=3), SEEDS, st.integers(1, 30), st.integers(1, 6))
    def test_each_set_has_its_own_passes(self, sizes: list[int], seed: int, count: int, iterations: int) -> None:
        sets = [prompt_set(size, f"set{place}", 0.5**place) for place, size in enumerate(sizes)]
        prompts = stream(sets, seed, count, iterations)
        for each in sets:
            require_passes(names([one for one in prompts if one.dataset == each.name]), len(each.prompts))

    @given(st.lists(st.integers(1, 7), min_size=1, max_size=3), SEEDS, st.integers(1, 9), st.integers(1, 9))
    def test_another_count_cuts_the_same_stream(self, sizes: list[int], seed: int, one: int, other: int) -> None:
        sets = [prompt_set(size, f"set{size}{place}", 1.0 + place) for place, size in enumerate(sizes)]
        assert stream(sets, seed, one, other) == stream(sets, seed, other, one)

    def test_does_not_change_between_releases(self) -> None:
        # For pass p: keys = numpy.random.PCG64(derive_seed(7, "prompts", p)).random_raw(5).tolist(), then
        # sorted(range(5), key=keys.__getitem__); a finished run cannot be done again once this changes.
        assert names(stream([prompt_set(5)], 7, 5, 2)) == [
            f"default {index}" for index in (4, 2, 3, 0, 1, 2, 1, 0, 3, 4)
        ]

    def test_prompts_come_with_their_set_and_target_and_a_set_alone_has_any_name(self) -> None:
        ids = [each.prompt.prompt_id for each in stream([prompt_set(9)], 3, 4, 5)]
        assert [each.prompt.prompt_id for each in stream([prompt_set(9, "other", 0.3)], 3, 4, 5)] == ids
        for each in drawn([prompt_set(4, "a"), prompt_set(6, "b")], count=20):
            name, index = each.prompt.text.split()
            assert each.dataset == name
            assert each.target == (prompt_set(6, name).targets[int(index)])

    def test_a_set_keeps_its_order_when_another_gets_more_weight(self) -> None:
        few, many = (
            [one for one in stream([prompt_set(5, "a"), prompt_set(5, "b", w)], 0, 10, 3) if one.dataset == "a"]
            for w in (4.0, 1.0)
        )
        assert len(few) < len(many)
        assert many[: len(few)] == few


class TestWeight:
    def test_worked_by_hand(self) -> None:
        curriculum = CurriculumSection(kind="difficulty", target=0.5, width=0.25, floor=0.1)
        assert difficulty_weight(0.5, curriculum) == 1.0
        # One width off: 0.1 + 0.9 exp(-1/2) = 0.1 + 0.9 x 0.60653066; two: 0.1 + 0.9 x 0.13533528.
        assert difficulty_weight(0.75, curriculum) == pytest.approx(0.645877594, abs=1e-9)
        assert difficulty_weight(0.25, curriculum) == pytest.approx(0.645877594, abs=1e-9)
        assert difficulty_weight(1.0, curriculum) == pytest.approx(0.221801755, abs=1e-9)
        assert difficulty_weight(None, curriculum) == 1.0


class TestDifficulty:
    @given(st.integers(1, 9), SEEDS, st.integers(1, 25), st.integers(1, 3))
    def test_no_prompt_again_before_all_are_drawn(self, size: int, seed: int, count: int, number: int) -> None:
        means = {("default", f"{index:016x}"): 0.1 * index for index in range(size)}
        options = {"seed": seed, "sampling_round": number, "curriculum": DIFFICULTY, "statistics": means}
        require_passes(names(drawn([prompt_set(size)], count=count, **options)), size)

    def test_chances_are_the_weights(self) -> None:
        # Two prompts of weight 1 (on target, and never seen) and one of weight 0.221801755, two widths off.
        means = {("default", f"{0:016x}"): 0.5, ("default", f"{2:016x}"): 1.0}
        sets, total = [prompt_set(3)], 2.221801755
        rounds = [names(drawn(sets, n, 2, curriculum=DIFFICULTY, statistics=means)) for n in range(1, 3001)]
        first = Counter(texts[0] for texts in rounds)
        # Expected 1350.3 and 299.5, standard deviations 27.3 and 16.4; 4.5 of them either side.
        assert abs(first["default 0"] - 3000 / total) < 123
        assert abs(first["default 1"] - 3000 / total) < 123
        assert abs(first["default 2"] - 3000 * 0.221801755 / total) < 74
        # Without replacement: prompt 2 is left out when both others are drawn, each after the other.
        left_out = sum("default 2" not in texts for texts in rounds)
        assert left_out == pytest.approx(3000 * 2 * (1 / total) * (1 / (total - 1)), abs=4.5 * 3000**0.5 / 2)


class TestLaterRounds:
    @pytest.mark.parametrize("curriculum", [UNIFORM, DIFFICULTY])
    def test_what_was_drawn_comes_last(self, curriculum: CurriculumSection) -> None:
        sets = [prompt_set(8)]
        first = drawn(sets, 3, 5, curriculum=curriculum)
        avoided = frozenset((each.dataset, each.prompt.prompt_id) for each in first)
        others = drawn(sets, 3, 3, sampling_round=2, curriculum=curriculum, avoided=avoided)
        assert set(names(others)).isdisjoint(names(first))
        assert len(set(names(others))) == 3
        again = drawn(sets, 3, 6, sampling_round=2, curriculum=curriculum, avoided=avoided)
        assert set(names(again[:3])).isdisjoint(names(first))
        assert set(names(again[3:])) <= set(names(first))

    def test_a_single_prompt_is_of_each_set_by_its_weight(self) -> None:
        sets = [prompt_set(1, "a", 1.0), prompt_set(1, "b", 3.0)]
        times = Counter(drawn(sets, count=1, seed=seed, sampling_round=2)[0].dataset for seed in range(3000))
        # 750 are expected, with a standard deviation of 23.7; 4.5 of them either side.
        assert times["a"] == pytest.approx(750, abs=107)


@pytest.mark.parametrize("curriculum", [UNIFORM, DIFFICULTY])
def test_sets_iterations_rounds_and_seeds_have_orders_of_their_own(curriculum: CurriculumSection) -> None:
    sets = [prompt_set(30, "a"), prompt_set(30, "b")]
    orders = {tuple(prompt.text for prompt in each.prompts) for each in sets}
    for iteration, number, seed in itertools.product((1, 2), (1, 2), (0, 1)):
        prompts = drawn(sets, iteration, 60, seed=seed, sampling_round=number, curriculum=curriculum)
        assert prompts == drawn(sets, iteration, 60, seed=seed, sampling_round=number, curriculum=curriculum)
        orders |= {tuple(one.prompt.text for one in prompts if one.dataset == name) for name in "ab"}
    # By number alone, so that both sets in one order would count once.
    assert len({tuple(text.split()[1] for text in order) for order in orders}) == 1 + 16


@pytest.mark.parametrize(
    ("size", "iteration", "number", "count"), [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]
)
def test_refuses_what_draws_nothing(size: int, iteration: int, number: int, count: int) -> None:
    with pytest.raises(ValueError, match="draw_prompts: got"):
        drawn([prompt_set(size)], iteration, count, sampling_round=number)


Group = tuple[str, str, str, float | None]
"""Dataset, prompt_id, group_id and mean."""


def keep(
    store: ArtifactStore, folder: str, groups: Sequence[Group], streams: Sequence[str] = ("tokens", "tokens")
) -> ArtifactRef:
    """Write a row per group and stream, with the group's mean in the first stream, and 9 more in later ones."""
    rows = [group for group in groups for _ in streams]
    names = ("dataset", "prompt_id", "group_id")
    columns: dict[str, Sequence[object]] = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    columns["stream"] = list(streams) * len(groups)
    columns["group_mean"] = [
        None if mean is None else mean + (9 if stream != streams[0] else 0)
        for (*_, mean), stream in zip(rows, columns["stream"], strict=True)
    ]
    return commit_rows(store, folder, ADVANTAGES, columns)


class TestReadStatistics:
    def test_means_of_groups_in_the_first_stream_over_iterations(self, store: ArtifactStore) -> None:
        groups: list[Group] = [("a", "p", "i1.p0", 0.25), ("a", "p", "i1.p1", 0.25), ("a", "q", "i1.p2", 0.5)]
        # A group without a reward says nothing.
        groups += [("a", "q", "i1.p3", None), ("a", "r", "i1.p4", None)]
        first = keep(store, "iteration_000001/advantages", groups)
        second = keep(store, "iteration_000002/advantages", [("a", "p", "i2.p0", 1.0), ("b", "p", "i2.p1", 3.0)])
        found = read_statistics(store, [first, second])
        # Two groups of one prompt and one mean are two groups: (0.25 + 0.25 + 1) / 3.
        assert found == {("a", "p"): 0.5, ("a", "q"): 0.5, ("b", "p"): 3.0}
        assert read_statistics(store, [second])[("a", "p")] == 1.0
        assert read_statistics(store, []) == {}
        both = keep(store, "iteration_000001/advantages", [("a", "p", "g0", 0.5)], ("tokens", "denoising"))
        assert read_statistics(store, [both]) == {("a", "p"): 0.5}
        alone = keep(store, "iteration_000002/advantages", [("a", "p", "g1", 0.25)], ("denoising",))
        assert read_statistics(store, [alone]) == {("a", "p"): 0.25}

    def test_order_of_the_tables_does_not_show_in_the_last_bit(self, store: ArtifactStore) -> None:
        means = [0.1, 0.7, 1e-9, -0.3, 1e3, 0.2]
        tables = [
            keep(store, f"iteration_{n:06d}/advantages", [("a", "p", f"g{n}", mean)]) for n, mean in enumerate(means)
        ]
        forward, backward = read_statistics(store, tables), read_statistics(store, tables[::-1])
        assert forward == backward
        assert sum(means) != sum(means[::-1])
        assert forward[("a", "p")] == math.fsum(means) / 6


class TestHeldOut:
    def prompts(self, *texts: str) -> PromptSet:
        return PromptSet(
            "all", 1.0, tuple(Prompt(f"id{row}", text, {}) for row, text in enumerate(texts)), (None,) * len(texts)
        )

    @given(st.lists(st.integers(0, 30), min_size=2, max_size=40), st.floats(0.01, 0.99), st.randoms())
    def test_a_prompt_is_on_one_side_whatever_the_order(self, rows: list[int], share: float, shuffle: Any) -> None:
        chosen = self.prompts(*map(str, rows))
        held = chosen.held_out(share)
        away, kept = (
            {each.text for each in chosen.without(part).prompts} for part in (held, {*range(len(rows))} - held)
        )
        assert away.isdisjoint(kept)
        assert len(kept) == max(1, round(share * len({*rows})))
        shuffle.shuffle(rows)
        other = self.prompts(*map(str, rows))
        assert {other.prompts[index].text for index in other.held_out(share)} == kept

    def test_others_that_are_added_move_few(self) -> None:
        texts = [str(number) for number in range(1000)]
        few, many = self.prompts(*texts[:900]), self.prompts(*texts)
        before, after = ({each.prompts[index].text for index in each.held_out(0.2)} for each in (few, many))
        # Those of the lowest digests: of 180 fewer than a tenth give place.
        assert len(before & after) > 160
