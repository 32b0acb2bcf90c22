"""Which prompts an iteration draws: every one equally often, or by how hard they have proved to be."""

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from configs.sections import CurriculumSection
from grpo_core.seeds import derive_seed
from tasks.prompts.mixture import sampled_sets, scheduled_sets
from tasks.prompts.read import Prompt
from tasks.prompts.targets import TargetReference
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

PromptKey = tuple[str, str]
"""Name of the prompt set and prompt_id: two sets may hold the same prompt."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file.

    Attributes:
        name: of the dataset.
        weight: share of an iteration's prompts, against the other sets.
        prompts: in the order of the file.
        targets: one a prompt; None where a prompt has none.
    """

    name: str
    weight: float
    prompts: tuple[Prompt, ...]
    targets: tuple[TargetReference | None, ...]


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt with the set that it comes from; drawn twice, it makes two groups."""

    dataset: str
    prompt: Prompt
    target: TargetReference | None


@dataclass(frozen=True)
class GroupStatistics:
    """What the groups of one prompt have earned.

    Attributes:
        mean: mean over its groups of the groups' mean rewards.
        groups: how many had a reward.
    """

    mean: float
    groups: int


@dataclass(frozen=True)
class PromptStatistics:
    """How hard the prompts have proved to be.

    Attributes:
        by_prompt: of the prompts that have been seen.
    """

    by_prompt: Mapping[PromptKey, GroupStatistics]


def read_statistics(store: ArtifactStore, advantages: Sequence[ArtifactRef]) -> PromptStatistics:
    """Statistics of stored groups; groups without any reward say nothing.

    Args:
        store: where the artifacts are.
        advantages: tables of the iterations that count, in any order.
    """
    means: dict[PromptKey, dict[str, float]] = {}
    columns = ["dataset", "prompt_id", "group_id", "group_mean"]
    with tempfile.TemporaryDirectory() as fetched:
        for number, reference in enumerate(advantages):
            files = sorted(store.local_files(reference, Path(fetched) / str(number)).glob("*.parquet"))
            groups = pl.read_parquet(files, columns=columns).drop_nulls().unique()
            for dataset, prompt_id, group_id, mean in groups.select(columns).iter_rows():
                means.setdefault((dataset, prompt_id), {})[group_id] = mean
    # fsum: the order of the tables shall not show in the last bit, which could change a draw.
    return PromptStatistics(
        {
            key: GroupStatistics(math.fsum(of_groups.values()) / len(of_groups), len(of_groups))
            for key, of_groups in sorted(means.items())
        }
    )


def difficulty_weight(mean: float | None, curriculum: CurriculumSection) -> float:
    """How much a prompt is wanted, between curriculum.floor and 1.

    A group teaches most where its rewards spread, which is neither where all siblings fail nor where all succeed: the
    weight is a bell around the target, floor + (1 - floor) exp(-((mean - target) / width)^2 / 2).

    Args:
        mean: of the prompt's group rewards; None for a prompt that was never seen, which is wanted most.
        curriculum: target, width and floor.
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
    """Draw the prompts of one sampling round; several sets share its places by their weights.

    The first round, uniform: an endless stream goes through each set again and again, each pass in its own shuffled
    order; so every prompt of a set is drawn equally often, to within one, after any number of iterations, an iteration
    needs nothing of the ones before it, and another count cuts the same stream. By difficulty: sampled by
    :func:`difficulty_weight` without replacement. A later round is sampled likewise, by weight 1 when uniform, with
    seeds of its own.

    Args:
        sets: with at least one prompt each; their order matters, and that of their prompts.
        seed: the run's seed.
        iteration: from 1.
        sampling_round: from 1; later rounds replace groups that taught nothing.
        count: prompts wanted; may exceed the number of prompts.
        curriculum: uniform or by difficulty.
        statistics: how hard prompts have proved to be; without them all count as never seen.
        avoided: prompts that come last, where they can: those of earlier rounds of the iteration.

    Raises:
        ValueError: no prompts, or iteration, sampling_round or count below 1.
    """
    _require_something(sets, iteration, sampling_round, count)
    shares = [each.weight for each in sets]
    if sampling_round == 1:
        places = scheduled_sets(shares, first=(iteration - 1) * count, count=count)
    else:
        places = sampled_sets(shares, count=count, seed=derive_seed(seed, "redraw", iteration, sampling_round))
    if sampling_round == 1 and curriculum.kind == "uniform":
        return _in_passes(sets, places, seed)
    drawn = []
    for index, each in enumerate(sets):
        wanted = sum(chosen == index for chosen, _ in places)
        weights = [_weight(each, prompt, curriculum, statistics) for prompt in each.prompts]
        late = [(each.name, prompt.prompt_id) in avoided for prompt in each.prompts]
        place = derive_seed(seed, "curriculum", each.name, iteration, sampling_round)
        drawn.append(iter(_sampled(weights, late, wanted, place)))
    return tuple(_drawn(sets[index], next(drawn[index])) for index, _ in places)


def _require_something(sets: Sequence[PromptSet], iteration: int, sampling_round: int, count: int) -> None:
    if not sets or not all(each.prompts for each in sets):
        raise ValueError("draw_prompts: got a set without prompts, or no set. Read at least one prompt before drawing.")
    if iteration < 1 or sampling_round < 1 or count < 1:
        got = f"iteration={iteration}, sampling_round={sampling_round}, count={count}"
        raise ValueError(f"draw_prompts: got {got}. All start at 1.")


def _drawn(source: PromptSet, index: int) -> DrawnPrompt:
    return DrawnPrompt(source.name, source.prompts[index], source.targets[index])


def _in_passes(sets: Sequence[PromptSet], places: Sequence[tuple[int, int]], seed: int) -> tuple[DrawnPrompt, ...]:
    orders: dict[tuple[int, int], list[int]] = {}
    drawn = []
    for index, position in places:
        each = sets[index]
        number, offset = divmod(position, len(each.prompts))
        if (index, number) not in orders:
            # A set alone has no need of a name, which may then be changed or given without changing a run.
            named = () if len(sets) == 1 else (each.name,)
            keys = _raw(derive_seed(seed, "prompts", *named, number), len(each.prompts))
            orders[index, number] = [int(place) for place in np.argsort(keys, kind="stable")]
        drawn.append(_drawn(each, orders[index, number][offset]))
    return tuple(drawn)


def _raw(seed: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    # numpy promises the raw stream of a bit generator to stay as it is, but not what Generator makes of it (NEP 19):
    # raw 64-bit keys give the same order on every platform and in every numpy release.
    return np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)


def _weight(
    source: PromptSet, prompt: Prompt, curriculum: CurriculumSection, statistics: PromptStatistics | None
) -> float:
    if curriculum.kind == "uniform" or statistics is None:
        return 1.0
    seen = statistics.by_prompt.get((source.name, prompt.prompt_id))
    return difficulty_weight(seen.mean if seen else None, curriculum)


def _sampled(weights: Sequence[float], late: Sequence[bool], count: int, seed: int) -> list[int]:
    """Indices sampled by weight without replacement, those that are late after all others; again from the start when
    all are taken.

    Efraimidis and Spirakis, 2006, Weighted random sampling with a reservoir, algorithm A: the largest u^(1/w), which
    are the smallest -ln(u) / w.
    """
    size = len(weights)
    chosen: list[int] = []
    for number in range(-(-count // size)):
        # The middle of one of 2^53 equal parts of (0, 1): a logarithm of 0 cannot come up.
        uniform = [((int(raw) >> 11) + 0.5) * 2.0**-53 for raw in _raw(derive_seed(seed, number), size)]
        keys = [-math.log(u) / weight for u, weight in zip(uniform, weights, strict=True)]
        chosen += sorted(range(size), key=lambda index: (late[index], keys[index]))
    return chosen[:count]
