"""Select the prompts of an iteration: equally often or by measured difficulty, from several sets by their weights."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from configs.prompts import CurriculumSection
from grpo_core.rollouts.streams import ImageSize
from grpo_core.seeds import derive_seed
from tasks.prompts.read import Prompt
from tasks.prompts.targets import TargetReference
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

PromptKey = tuple[str, str]  # name of the prompt set and prompt_id: two sets may contain the same prompt


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file."""

    name: str
    weight: float  # share of the prompts on average, relative to the other sets
    prompts: tuple[Prompt, ...]  # in the order of the file
    targets: tuple[TargetReference | None, ...]  # one per prompt; None for a prompt without one
    sizes: tuple[ImageSize, ...] = ()  # of each prompt's images; empty for texts

    def without(self, held: Collection[int]) -> "PromptSet":
        """Return the set without the prompts of these indices."""
        kept = [index for index in range(len(self.prompts)) if index not in held]
        return replace(
            self,
            prompts=tuple(self.prompts[index] for index in kept),
            targets=tuple(self.targets[index] for index in kept),
            sizes=tuple(self.sizes[index] for index in kept if self.sizes),
        )

    def held_out(self, share: float) -> frozenset[int]:
        """Return the indices of a share of the prompts, at least one; the same prompt in several rows is one.

        Which they are follows from the prompts alone, whatever their order, and nearly all stay when others are added.
        """
        digests = [prompt.content_digest for prompt in self.prompts]
        distinct = sorted({*digests})
        chosen = {*distinct[: max(1, round(share * len(distinct)))]}
        return frozenset(index for index, digest in enumerate(digests) if digest in chosen)

    def drawn(self, index: int) -> "DrawnPrompt":
        """Return the prompt of this index with what belongs to it."""
        size = self.sizes[index] if self.sizes else None
        return DrawnPrompt(self.name, self.prompts[index], self.targets[index], size)


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt with its dataset; if drawn twice, it gives two groups. Texts have no size."""

    dataset: str
    prompt: Prompt
    target: TargetReference | None
    size: ImageSize | None = None


PromptStatistics = Mapping[PromptKey, float]
"""Difficulty of the prompts that were sampled before: mean over a prompt's groups of their mean rewards."""


def read_statistics(store: ArtifactStore, advantages: Sequence[ArtifactRef]) -> PromptStatistics:
    """Compute statistics of stored groups, from tables in any order; groups without any reward are ignored."""
    # Imported where they are used: prompts are read and checked before polars is imported.
    import polars as pl

    from tasks.storage.parquet import leading_stream, read_advantages

    means: dict[PromptKey, dict[str, float]] = {}
    columns = ["dataset", "prompt_id", "group_id", "group_mean"]
    with store.reading() as read:
        for reference in advantages:
            files = sorted(read(reference).glob("*.parquet"))
            groups = pl.DataFrame(leading_stream(read_advantages(files, columns))).drop_nulls().unique()
            for dataset, prompt_id, group_id, mean in groups.select(columns).iter_rows():
                means.setdefault((dataset, prompt_id), {})[group_id] = mean
    # fsum: the order of the tables must not change the last bit, which could change the drawn prompts.
    return {key: math.fsum(of_groups.values()) / len(of_groups) for key, of_groups in sorted(means.items())}


def difficulty_weight(mean: float | None, curriculum: CurriculumSection) -> float:
    """Return the sampling weight of a prompt by the mean of its group rewards, between curriculum.floor and 1.

    A group teaches most where its rewards spread, which is neither where all siblings fail nor where all succeed: the
    weight is a bell around the target, floor + (1 - floor) exp(-((mean - target) / width)^2 / 2). A prompt that was
    never sampled (None) has weight 1.
    """
    if mean is None:
        return 1.0
    distance = (mean - curriculum.target) / curriculum.width
    return curriculum.floor + (1 - curriculum.floor) * math.exp(-(distance**2) / 2)


def draw_prompts(
    sets: Sequence[PromptSet],
    *,
    seed: int,
    iteration: int,
    sampling_round: int,
    count: int,
    curriculum: CurriculumSection,
    statistics: PromptStatistics | None,
    avoided: Collection[PromptKey] = (),
) -> tuple[DrawnPrompt, ...]:
    """Draw the prompts of one sampling round; several sets share the rounds by their weights, on average.

    The first round, uniform: an endless stream goes through each set again and again, each pass in its own shuffled
    order; so every prompt of a set is drawn equally often, to within one, after any number of iterations, an iteration
    does not depend on earlier ones, and another count cuts the same stream. By difficulty: sampled by
    :func:`difficulty_weight` without replacement. A later round is sampled the same way, with weight 1 when uniform,
    and with different seeds.

    Args:
        sampling_round: from 1; later rounds replace groups without spread.
        count: prompts wanted; may exceed the number of prompts.
        statistics: measured difficulty; None: all prompts count as never sampled.
        avoided: prompts to use last if possible: those of earlier rounds of the iteration.
    """
    if not sets or not all(each.prompts for each in sets):
        raise ValueError("draw_prompts: got a set without prompts, or no set. Give each set at least one prompt.")
    if iteration < 1 or sampling_round < 1 or count < 1:
        got = f"iteration={iteration}, sampling_round={sampling_round}, count={count}"
        raise ValueError(f"draw_prompts: got {got}. All start at 1.")
    shares = [each.weight for each in sets]
    if sampling_round == 1:
        places = choose_sets(shares, seed=seed, first=(iteration - 1) * count, count=count)
    else:
        later = derive_seed(seed, "redraw", iteration, sampling_round)
        places = choose_sets(shares, seed=later, first=0, count=count)
    if sampling_round == 1 and curriculum.kind == "uniform":
        return _in_passes(sets, places, seed)
    indices = []
    for index, each in enumerate(sets):
        wanted = sum(chosen == index for chosen, _ in places)
        keys = [(each.name, prompt.prompt_id) for prompt in each.prompts]
        known = {} if curriculum.kind == "uniform" or statistics is None else statistics
        weights = [difficulty_weight(known.get(key), curriculum) for key in keys]
        late = [key in avoided for key in keys]
        place = derive_seed(seed, "curriculum", each.name, iteration, sampling_round)
        indices.append(iter(_sampled(weights, late, wanted, place)))
    return tuple(sets[index].drawn(next(indices[index])) for index, _ in places)


def _in_passes(sets: Sequence[PromptSet], places: Sequence[tuple[int, int]], seed: int) -> tuple[DrawnPrompt, ...]:
    orders: dict[tuple[int, int], list[int]] = {}
    prompts = []
    for index, position in places:
        each = sets[index]
        number, offset = divmod(position, len(each.prompts))
        if (index, number) not in orders:
            # The name of a single set is not in the seed, so that it can change without changing a run.
            named = () if len(sets) == 1 else (each.name,)
            keys = _raw(derive_seed(seed, "prompts", *named, number), len(each.prompts))
            orders[index, number] = [int(place) for place in np.argsort(keys, kind="stable")]
        prompts.append(each.drawn(orders[index, number][offset]))
    return tuple(prompts)


def _raw(seed: int, size: int, *, after: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    # numpy guarantees that the raw stream of a bit generator is stable, but not that of Generator (NEP 19):
    # raw 64-bit keys give the same order on every platform and in every numpy release.
    return np.random.PCG64(np.random.SeedSequence(seed)).advance(after).random_raw(size)


def _sampled(weights: Sequence[float], late: Sequence[bool], count: int, seed: int) -> list[int]:
    """Sample indices by weight without replacement, late ones after all others; start again when all are used."""
    # Efraimidis and Spirakis, 2006, Weighted random sampling with a reservoir, algorithm A: the largest u^(1/w), which
    # are the smallest -ln(u) / w.
    size = len(weights)
    chosen: list[int] = []
    for number in range(-(-count // size)):
        # The middle of one of 2^53 equal parts of (0, 1): so the logarithm is never of 0.
        uniform = [((int(raw) >> 11) + 0.5) * 2.0**-53 for raw in _raw(derive_seed(seed, number), size)]
        keys = [-math.log(u) / weight for u, weight in zip(uniform, weights, strict=True)]
        chosen += sorted(range(size), key=lambda index: (late[index], keys[index]))
    return chosen[:count]


def choose_sets(weights: Sequence[float], *, seed: int, first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return places [first, first + count) of an endless stream of sets by weights: its index and earlier places.

    The set of each place is drawn independently, so that a set's places among any n are binomial: its share of n on
    average. A place depends on the seed and the weights only.
    """
    if len(weights) == 1:
        return tuple((0, place) for place in range(first, first + count))
    latest = _latest(tuple(weights), seed)
    start, before = latest[0] if latest[0][0] <= first else (0, (0,) * len(weights))
    uniform = (_raw(derive_seed(seed, "sets"), first + count - start, after=start) >> np.uint64(11)) * 2.0**-53
    # The last bound is left out: rounded sums must not leave a gap below 1.
    chosen = np.searchsorted(np.cumsum(weights)[:-1] / math.fsum(weights), uniform, side="right")
    served, totals = np.zeros(len(chosen), dtype=np.int64), []
    for index, earlier in enumerate(before):
        own = chosen == index
        totals.append(earlier + int(np.count_nonzero(own)))
        served[own] = np.arange(earlier, totals[-1])
    latest[0] = first + count, tuple(totals)
    wanted = slice(first - start, None)
    return tuple(zip(chosen[wanted].tolist(), served[wanted].tolist(), strict=True))


@lru_cache(maxsize=8)
def _latest(weights: tuple[float, ...], seed: int) -> list[tuple[int, tuple[int, ...]]]:
    """Keep the last place that was asked for, and how often each set was chosen before it: iterations follow it."""
    return [(0, (0,) * len(weights))]
