"""Runs compared: their held-out samples paired by prompt and sampling seed, and what cannot be compared and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import InputError
from tasks.reports.compared_runs import (
    ComparedRun,
    PairedDifference,
    Scores,
    compared_curves,
    describe_run,
    differing_settings,
    paired_difference,
    provenances,
)
from tasks.reports.curves import Curve
from tasks.reports.groups import MEDIUM, Group, Row, Samples, read_stages, show_groups
from tasks.reports.images import PromptImages
from tasks.reports.text import counted
from tasks.runs.layout import EVALUATIONS, GUARDRAILS, OTHER_EVALUATIONS, REWARDS, ROLLOUTS, stage_folder
from tasks.runs.lookup import spans
from tasks.runs.read_run import read_evaluation, read_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.files import scratch_folder

MAX_PROMPTS, MAX_SAMPLES = 60, 4  # prompts that are shown next to one another, and samples of each run


@dataclass(frozen=True)
class HeldoutSamples:
    """The held-out samples of one policy version of a run; `labels` names each score by what determines it."""

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
class Comparison:
    """Runs compared with the first of them."""

    runs: Sequence[ComparedRun]
    settings: Mapping[str, Sequence[str | None]]  # value by run of each setting that differs, by its path
    curves: Sequence[Curve]  # metrics with a series per run
    versions: Mapping[str, int | None]  # policy version whose held-out samples are compared, by run; None without any
    differences: Sequence[PairedDifference]  # of each score that a run has in common with the first, score by score
    measure: str | None  # name of the score that `prompts` shows as reward; None without a common one
    # Groups of a prompt by run, as many as MAX_PROMPTS, the largest differences first.
    prompts: Sequence[Mapping[str, Group]]
    total: int  # number of prompts that all these runs have
    omissions: Sequence[str]  # what cannot be compared and why, as sentences
    # Sentences, if the runs are compared at different policy versions that nobody named.
    unequal_versions: Sequence[str]
    warnings: Sequence[str]  # damaged and missing files, as sentences

    @property
    def common_reward(self) -> float | None:
        """The highest held-out reward that all runs have reached; None where it means different things in them."""
        first, best = self.runs[0], [max(run.view.heldout_rewards.values(), default=None) for run in self.runs]
        alike = all(run.mix == first.mix and run.evaluated_on == first.evaluated_on for run in self.runs)
        known = [each for each in best if each is not None]
        return min(known) if alike and first.mix is not None and len(known) == len(best) else None


def compare_runs(
    readers: Mapping[str, RunReader], versions: Mapping[str, int], evaluation: str | None = None
) -> Comparison:
    """Compare runs, by their labels, with the first; nothing in them is changed.

    Compared are these versions, by label, or the last that was evaluated; and an evaluation by `grpo evaluate` of the
    runs that have it, or those of the run's own prompts. InputError if a version was not evaluated, or no run has it.
    """
    images_of = PromptImages(MEDIUM, *(reader.store for reader in readers.values()))
    with scratch_folder() as fetched:
        places = {label: fetched / str(number) for number, label in enumerate(readers)}
        runs = [describe_run(label, reader, read_run(reader), places[label]) for label, reader in readers.items()]
        named = dict.fromkeys(each for reader in readers.values() for each in reader.names(OTHER_EVALUATIONS))
        if evaluation not in (None, *named):
            made = f"They have {', '.join(named)}; name one of these." if named else "`grpo evaluate RUN` makes one."
            raise InputError("--evaluation", evaluation, f"None of the runs has an evaluation of this name. {made}")
        chosen = {run.label: _evaluation(run, versions.get(run.label), evaluation, places[run.label]) for run in runs}
        compared = {label: each for label, each in chosen.items() if each is not None}
        curves, omissions = compared_curves(runs)
        paired, reasons = _pair(runs, compared)
        measure, prompts, total = _side_by_side(compared, paired, images_of)
    scores = dict.fromkeys(each.score for differences in paired.values() for each in differences)
    damages = [f"{label}: {each.place}: {each.reason}" for label, reader in readers.items() for each in reader.damages]
    return Comparison(
        runs=runs,
        settings=differing_settings(runs),
        curves=curves,
        versions={label: each.version if each else None for label, each in chosen.items()},
        differences=[
            each for score in scores for differences in paired.values() for each in differences if each.score == score
        ],
        measure=measure,
        prompts=prompts,
        total=total,
        omissions=[*reasons, *omissions],
        unequal_versions=list(_unequal_versions(runs, compared, versions, evaluation)),
        warnings=[*damages, *images_of.warnings()],
    )


def _evaluation(run: ComparedRun, wanted: int | None, name: str | None, fetched: Path) -> HeldoutSamples | None:
    """Read the evaluation of a version, or else the last; None for a run without any."""
    reader = run.reader
    own, evaluated = _evaluated(reader, name)
    if wanted is None:
        tried = [(own, version) for version in evaluated[::-1]]
    else:
        # A version without the evaluation of this name has that of the run's own prompts.
        tried = [(each, wanted) for each in dict.fromkeys([own, None])]
    for place, version in tried:
        if (view := read_evaluation(reader, version, place)) is not None:
            return _read_evaluation(run, place, view, fetched)
    if wanted is None:
        return None
    others = [each for each in reader.names(OTHER_EVALUATIONS) if wanted in _evaluated(reader, each)[1]]
    run_it = f"run `grpo evaluate {reader.store.run}@{wanted}`, and add --evaluation with the name that it prints"
    usual = spans(_evaluated(reader, None)[1]) or "none"
    hint = f"Its training evaluated versions {usual}; {f'add --evaluation {others[0]}' if others else run_it}."
    raise InputError("RUN", run.label, hint)


def _evaluated(reader: RunReader, name: str | None) -> tuple[str | None, Sequence[int]]:
    """Return this name if the run has an evaluation of it, else None for its own prompts; and its versions."""
    own = name if name in reader.names(OTHER_EVALUATIONS) else None
    return own, reader.evaluations(EVALUATIONS if own is None else f"{OTHER_EVALUATIONS}/{own}")


def _unequal_versions(
    runs: Sequence[ComparedRun],
    compared: Mapping[str, HeldoutSamples],
    named: Mapping[str, int],
    evaluation: str | None,
) -> Iterator[str]:
    chosen = {run.label: run for run in runs if run.label in compared and run.label not in named}
    versions = {label: compared[label].version for label in chosen}
    if len(set(versions.values())) < 2:
        return
    last = ", ".join(f"{version} of {label}" for label, version in versions.items())
    yield f"the last evaluated policies are not of the same version: {last}"
    common = set.intersection(*(set(_evaluated(run.reader, evaluation)[1]) for run in chosen.values()))
    # Version 0 is the same model in both.
    if common - {0}:
        yield f"to compare equal ones: grpo compare {' '.join(f'{label}@{max(common)}' for label in chosen)}"


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


def _common_seeds(first: HeldoutSamples, second: HeldoutSamples) -> list[tuple[set[int], set[int]]]:
    """Return the seeds on both sides of each prompt that two evaluations share."""
    one, other = first.prompts, second.prompts
    return [(seeds, other[prompt]) for prompt, seeds in one.items() if prompt in other]


def _pair(
    runs: Sequence[ComparedRun], compared: Mapping[str, HeldoutSamples]
) -> tuple[dict[str, list[PairedDifference]], list[str]]:
    """Return the differences of each run from the first, and which runs cannot be compared in full, and why."""
    first, *others = runs
    base = compared.get(first.label)
    if base is None:
        return {}, [f"{first.label} has no stored evaluation, so nothing is paired with it; {_evaluate(first.label)}"]
    paired: dict[str, list[PairedDifference]] = {}
    reasons = []
    for run in others:
        side = compared.get(run.label)
        if side is None:
            reasons.append(f"{run.label} has no stored evaluation, so it is not paired; {_evaluate(run.label)}")
        elif run.view.noun != first.view.noun:
            nouns = f"{run.label} samples {run.view.noun}s and {first.label} {first.view.noun}s"
            reasons.append(f"{nouns}: nothing is paired")
        elif not (common := _common_seeds(base, side)):
            none = f"{run.label} has no held-out prompt in common with {first.label}, so nothing is paired"
            reasons.append(f"{none}; {_evaluate(run.label)} with the prompts of {first.label}, for --evaluation")
        else:
            same_seeds = all(one == other for one, other in common)
            paired[run.label] = _differences(run.label, base, side, same_seeds=same_seeds)
            reasons += _incomplete(first.label, base, run.label, side, len(common), same_seeds=same_seeds)
    return paired, reasons


def _evaluate(label: str) -> str:
    return f"`grpo evaluate {label} --prompts FILE` makes one"


def _differences(
    label: str, first: HeldoutSamples, second: HeldoutSamples, *, same_seeds: bool
) -> list[PairedDifference]:
    found = [
        paired_difference(first.scores(key), second.scores(key), run=label, score=name, same_seeds=same_seeds)
        for key, name in first.labels.items()
        if key in second.labels
    ]
    # A single reward of weight 1 is the combined reward.
    distinct = {tuple(each.by_prompt.values()): each for each in reversed(found) if each is not None}
    return list(distinct.values())[::-1]


def _incomplete(
    base: str, first: HeldoutSamples, label: str, second: HeldoutSamples, common: int, *, same_seeds: bool
) -> Iterator[str]:
    """Say which prompts and seeds two paired runs do not share; `common` prompts they do."""
    left_out = (len(first.prompts) - common, len(second.prompts) - common)
    if any(left_out):
        text = f"{counted(left_out[0], 'prompt')} of {base} and {left_out[1]} of {label}"
        yield f"{label}: {counted(common, 'held-out prompt')} in common; left out are {text}"
    if not same_seeds:
        other = f"{label}: some held-out samples have other seeds than those of {base} (evaluate.seed, "
        yield f"{other}samples_per_prompt, or the order of the prompts); prompts without a common seed compare by means"


def _side_by_side(
    compared: Mapping[str, HeldoutSamples],
    differences: Mapping[str, Sequence[PairedDifference]],
    images_of: PromptImages,
) -> tuple[str | None, list[dict[str, Group]], int]:
    """Return the shown score, by run the samples of the prompts that differ most in it, and how many are common."""
    if not differences:
        return None, [], 0
    paired = {label: compared[label] for label in (next(iter(compared)), *differences)}
    base, *others = paired.values()
    prompts, *rest = (each.prompts for each in paired.values())
    common = [prompt for prompt in prompts if all(prompt in each for each in rest)]
    # The combined reward comes first.
    key = next((key for key in base.labels if all(key in each.labels for each in others)), None)
    if key is None:
        return None, [], len(common)
    measure = base.labels[key]
    measured = [each.by_prompt for known in differences.values() for each in known if each.score == measure]
    moved = {prompt: max((abs(each.get(prompt, 0.0)) for each in measured), default=0.0) for prompt in common}
    chosen = sorted(common, key=lambda prompt: -moved[prompt])[:MAX_PROMPTS]
    shown: dict[str, dict[str, Group]] = {prompt: {} for prompt in chosen}
    for label, side in paired.items():
        own = side.labels[key]
        by_prompt: dict[str, list[Row]] = {prompt: [] for prompt in chosen}
        for row in sorted(side.table.rows, key=lambda row: row["sample_id"]):
            if row["prompt_id"] in by_prompt and len(by_prompt[row["prompt_id"]]) < MAX_SAMPLES:
                by_prompt[row["prompt_id"]].append(row)
        groups = show_groups(side.table, list(by_prompt.values()), images_of, MEDIUM)
        for prompt, group in zip(chosen, groups, strict=True):
            for row in group.samples:
                row["reward"] = row["reward"] if own == "reward" else row["breakdown"][own]
            shown[prompt][label] = group
    return measure, list(shown.values()), len(common)
