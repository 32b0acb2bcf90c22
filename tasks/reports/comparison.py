"""Runs compared: their held-out samples paired by prompt and sampling seed, and what cannot be compared and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_core.errors import InputError
from tasks.reports.compared_runs import (
    ComparedRun,
    compared_curves,
    describe_run,
    differing_settings,
    provenances,
)
from tasks.reports.groups import MEDIUM, Group, read_stages, show_groups
from tasks.reports.images import TargetReader
from tasks.reports.pairing import PairedDifference, Scores, paired_difference
from tasks.reports.run_page import Curve
from tasks.reports.samples import Row, Samples
from tasks.reports.text import counted
from tasks.runs.layout import EVALUATIONS, GUARDRAILS, OTHER_EVALUATIONS, REWARDS, ROLLOUTS, stage_folder
from tasks.runs.lookup import spans
from tasks.runs.read_run import read_evaluation, read_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.reference import ArtifactRef

MAX_PROMPTS, MAX_SAMPLES = 60, 4
"""Prompts that are shown next to one another, and samples of each run."""


@dataclass(frozen=True)
class HeldoutSamples:
    """The held-out samples of one policy version of a run.

    Attributes:
        version: policy version.
        table: the samples.
        labels: name of each score by what determines its values.
    """

    version: int
    table: Samples
    labels: Mapping[str, str]

    @property
    def prompts(self) -> dict[str, set[int]]:
        """The sampling seeds of each prompt."""
        seeds: dict[str, set[int]] = {}
        for row in self.table.rows:
            seeds.setdefault(row["prompt_id"], set()).add(row["seed"])
        return seeds

    def scores(self, key: str) -> Scores:
        """Return the scores of this origin; samples without one are left out."""
        label = self.labels[key]
        found: dict[str, dict[int, float]] = {}
        for row in self.table.rows:
            value = row["reward"] if label == "reward" else row["breakdown"][label]
            if value is not None:
                found.setdefault(row["prompt_id"], {})[row["seed"]] = value
        return found


@dataclass(frozen=True)
class Pairing:
    """A run compared with the first one on held-out prompts.

    Attributes:
        label: of the run.
        prompts: number of prompts that both have.
        same_seeds: whether all of them were sampled with the same seeds.
        differences: of each common score, by its name in the first run.
    """

    label: str
    prompts: int
    same_seeds: bool
    differences: Mapping[str, PairedDifference]


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first of them.

    Attributes:
        runs: in the order in which they were named.
        settings: value by run of each setting that differs, by its path.
        curves: metrics with a series per run.
        versions: policy version whose held-out samples are compared, by run; None without any.
        pairings: of the runs that have held-out prompts in common with the first.
        measure: name of the score that `prompts` shows as reward; None without a common one.
        prompts: groups of a prompt by run, as many as MAX_PROMPTS, the largest differences first.
        total: number of prompts that all these runs have.
        omissions: what cannot be compared and why, as sentences.
    """

    runs: Sequence[ComparedRun]
    settings: Mapping[str, Sequence[str | None]]
    curves: Sequence[Curve]
    versions: Mapping[str, int | None]
    pairings: Sequence[Pairing]
    measure: str | None
    prompts: Sequence[Mapping[str, Group]]
    total: int
    omissions: Sequence[str]


def compare_runs(
    readers: Mapping[str, RunReader], fetched: Path, targets: TargetReader, versions: Mapping[str, int]
) -> Comparison:
    """Compare runs with the first.

    Args:
        readers: the runs by their labels.
        fetched: folder below which remote files are copied.
        targets: reads the target images.
        versions: policy version to compare, by label; without one the last that was evaluated.

    Raises:
        InputError: a version was not evaluated.
    """
    places = {label: fetched / str(number) for number, label in enumerate(readers)}
    runs = [describe_run(label, reader, read_run(reader), places[label]) for label, reader in readers.items()]
    candidates = [list(_evaluations(run, versions.get(run.label), places[run.label])) for run in runs]
    chosen = _choose_evaluations(candidates)
    compared = {run.label: each for run, each in zip(runs, chosen, strict=True) if each is not None}
    curves, omissions = compared_curves(runs)
    pairings, reasons = _pair(runs, compared)
    measure, prompts, total = _side_by_side(compared, pairings, targets)
    return Comparison(
        runs=runs,
        settings=differing_settings(runs),
        curves=curves,
        versions={run.label: each.version if each else None for run, each in zip(runs, chosen, strict=True)},
        pairings=pairings,
        measure=measure,
        prompts=prompts,
        total=total,
        omissions=[*reasons, *omissions],
    )


def _evaluations(run: ComparedRun, wanted: int | None, fetched: Path) -> Iterator[HeldoutSamples]:
    """Read the evaluation of a version, or the last, of the run's own prompts, then those by `grpo evaluate` of others.

    Raises:
        InputError: the wanted version was not evaluated.
    """
    reader, missing = run.reader, wanted is not None
    for of in (None, *reader.names(OTHER_EVALUATIONS)):
        folder = EVALUATIONS if of is None else f"{OTHER_EVALUATIONS}/{of}"
        versions = [wanted] if wanted is not None else reversed(reader.evaluations(folder))
        views = (read_evaluation(reader, version, of) for version in versions)
        view = next((view for view in views if view is not None), None)
        if view is not None:
            missing = False
            yield _read_evaluation(run, of, view, fetched)
    if missing:
        known = f"Evaluated are policies {spans(reader.evaluations())} of {reader.store.run}"
        raise InputError(
            "RUN", run.label, f"{known}; name one of these, or run `grpo evaluate` with --policy {wanted}."
        )


def _read_evaluation(run: ComparedRun, name: str | None, view: EvaluationView, fetched: Path) -> HeldoutSamples:
    guardrails = _guardrails(run.reader, stage_folder(view.stages[ROLLOUTS][0].folder))
    # A guardrail may have the label of a reward.
    by_label = {part.folder.rsplit("/", 1)[-1]: part for part in (*view.stages.get(REWARDS, ()), *guardrails)}
    scores = tuple(by_label.values())
    table = read_stages(run.reader, {**view.stages, REWARDS: scores}, fetched)
    labels = {}
    if name is None and run.mix is not None:
        # The mix of another evaluation may have been changed by --set.
        labels[run.mix] = "reward"
    origins = provenances(run.reader, scores, fetched)
    for label, origin in origins.items():
        if origin is not None:
            # A reward may be in a mix several times, for other prompts each time.
            several = list(origins.values()).count(origin) > 1
            labels[f"{origin} {label}" if several else origin] = label
    return HeldoutSamples(view.version, table, labels)


def _guardrails(reader: RunReader, evaluation: str) -> Iterator[ArtifactRef]:
    for label in reader.artifact_names(f"{evaluation}/{GUARDRAILS}"):
        found = reader.find(f"{evaluation}/{GUARDRAILS}/{label}")
        if found is not None and reader.verify(found):
            yield found.reference


def _choose_evaluations(candidates: Sequence[Sequence[HeldoutSamples]]) -> list[HeldoutSamples | None]:
    """Choose the evaluations that share the most prompts and seeds with one of the first run; its own where equal."""
    first, *others = candidates
    if not first:
        return [None, *(next(iter(each), None) for each in others)]

    def shared(chosen: Sequence[HeldoutSamples | None]) -> tuple[int, int]:
        counts = [_shared(chosen[0], each) for each in chosen[1:] if chosen[0] and each]
        return sum(prompts for prompts, _ in counts), sum(seeds for _, seeds in counts)

    choices: list[list[HeldoutSamples | None]] = [
        [base, *(max(each, key=partial(_shared, base), default=None) for each in others)] for base in first
    ]
    return max(choices, key=shared)


def _shared(first: HeldoutSamples, second: HeldoutSamples) -> tuple[int, int]:
    """Count the prompts and the sampling seeds that two evaluations share."""
    common = _common_seeds(first, second)
    return len(common), sum(len(one & other) for one, other in common)


def _common_seeds(first: HeldoutSamples, second: HeldoutSamples) -> list[tuple[set[int], set[int]]]:
    """Return the seeds on both sides of each prompt that two evaluations share."""
    one, other = first.prompts, second.prompts
    return [(seeds, other[prompt]) for prompt, seeds in one.items() if prompt in other]


def _pair(runs: Sequence[ComparedRun], compared: Mapping[str, HeldoutSamples]) -> tuple[list[Pairing], list[str]]:
    """Compare every run with the first; the second value says which cannot be, or only in part, and why."""
    first, *others = runs
    base = compared.get(first.label)
    if base is None:
        return [], [f"{first.label} has no stored evaluation, so nothing is paired with it; {_evaluate(first.label)}"]
    pairings, reasons = [], []
    for run in others:
        side = compared.get(run.label)
        if side is None:
            reasons.append(f"{run.label} has no stored evaluation, so it is not paired; {_evaluate(run.label)}")
        elif run.view.noun != first.view.noun:
            nouns = f"{run.label} samples {run.view.noun}s and {first.label} {first.view.noun}s"
            reasons.append(f"{nouns}: nothing is paired")
        elif not _common_seeds(base, side):
            reasons.append(
                f"{run.label} has no held-out prompt in common with {first.label}, so nothing is paired; "
                f"`grpo evaluate {run.label} --prompts FILE` with the prompts of {first.label} makes them comparable"
            )
        else:
            pairings.append(_paired(run.label, base, side))
            reasons += _incomplete(first.label, base, pairings[-1], side)
    return pairings, reasons


def _evaluate(label: str) -> str:
    return f"`grpo evaluate {label} --prompts FILE` makes one"


def _paired(label: str, first: HeldoutSamples, second: HeldoutSamples) -> Pairing:
    known = [(key, name) for key, name in first.labels.items() if key in second.labels]
    found = [(name, paired_difference(first.scores(key), second.scores(key))) for key, name in known]
    # A single reward of weight 1 is the combined reward.
    distinct = {tuple(each.by_prompt.values()): (name, each) for name, each in reversed(found) if each is not None}
    common = _common_seeds(first, second)
    same_seeds = all(one == other for one, other in common)
    return Pairing(label, len(common), same_seeds, dict(reversed(distinct.values())))


def _incomplete(base: str, first: HeldoutSamples, pairing: Pairing, second: HeldoutSamples) -> Iterator[str]:
    """Say which prompts and seeds two paired runs do not share."""
    left_out = (len(first.prompts) - pairing.prompts, len(second.prompts) - pairing.prompts)
    if any(left_out):
        text = f"{counted(left_out[0], 'prompt')} of {base} and {left_out[1]} of {pairing.label}"
        yield f"{pairing.label}: {counted(pairing.prompts, 'held-out prompt')} in common; left out are {text}"
    if not pairing.same_seeds:
        yield (
            f"{pairing.label}: some held-out samples have other seeds than those of {base} (evaluate.seed, "
            "samples_per_prompt, or the order of the prompts); without a common seed a prompt's means are compared"
        )


def _side_by_side(
    compared: Mapping[str, HeldoutSamples], pairings: Sequence[Pairing], targets: TargetReader
) -> tuple[str | None, list[dict[str, Group]], int]:
    """Read the samples of the prompts that differ most in the first score that all paired runs have.

    Returns:
        The score's name, None without one; groups by run of each prompt, with that score as the samples' reward; and
        the number of prompts that all paired runs have.
    """
    if not pairings:
        return None, [], 0
    paired = {label: compared[label] for label in (next(iter(compared)), *(each.label for each in pairings))}
    base, *others = paired.values()
    prompts, *rest = (each.prompts for each in paired.values())
    common = [prompt for prompt in prompts if all(prompt in each for each in rest)]
    # The combined reward comes first.
    key = next((key for key in base.labels if all(key in each.labels for each in others)), None)
    if key is None:
        return None, [], len(common)
    measure = base.labels[key]
    moved = {
        prompt: max(abs(each.differences[measure].by_prompt.get(prompt, 0.0)) for each in pairings) for prompt in common
    }
    chosen = sorted(common, key=lambda prompt: -moved[prompt])[:MAX_PROMPTS]
    shown: dict[str, dict[str, Group]] = {prompt: {} for prompt in chosen}
    for label, side in paired.items():
        own = side.labels[key]
        by_prompt: dict[str, list[Row]] = {prompt: [] for prompt in chosen}
        for row in sorted(side.table.rows, key=lambda row: row["sample_id"]):
            if row["prompt_id"] in by_prompt and len(by_prompt[row["prompt_id"]]) < MAX_SAMPLES:
                by_prompt[row["prompt_id"]].append(row)
        groups = show_groups(side.table, list(by_prompt.values()), targets, MEDIUM)
        for prompt, group in zip(chosen, groups, strict=True):
            for row in group.samples:
                row["reward"] = row["reward"] if own == "reward" else row["breakdown"][own]
            shown[prompt][label] = group
    return measure, list(shown.values()), len(common)
