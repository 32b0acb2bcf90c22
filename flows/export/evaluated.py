"""How the exported version was evaluated and verified: the card evaluation.json, and both parts of README.md."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from flows.export.plan import ExportPlan
from tasks.metrics import HELDOUT
from tasks.reports.report import Report, Table
from tasks.reports.text import counted, number, reward_origin
from tasks.runs.layout import StoredEvaluation, evaluation_folder
from tasks.runs.lookup import read_description
from tasks.runs.reader import RunReader
from tasks.runs.stored import find_evaluation
from tasks.runs.stored_policies import choose_policy, last_version
from tasks.storage.artifacts.store import LINEAGE
from tasks.verification.card import recorded_machines, shortcomings, verification_report
from tasks.verification.evaluation_card import (
    EVALUATION_FILE,
    IMAGES_FOLDER,
    CardScore,
    EvaluationCard,
    describe_datasets,
    evaluation_facts,
    settings_of,
)
from tasks.verification.measured_evaluation import MeasuredEvaluation
from tasks.verification.records import Machine


def evaluation_card(plan: ExportPlan, weights: Mapping[str, str], folder: Path) -> EvaluationCard | None:
    """Return how the version was evaluated on the run's held-out prompts; None where it was not.

    Args:
        weights: sha256 of the exported files by name.
        folder: of the export, into which the images of the prompts are written.
    """
    done = find_evaluation(plan.store, evaluation_folder(plan.policy.version), plan.config, plan.policy)
    if done is None:
        return None
    measured, before = MeasuredEvaluation(plan.store, done), _evaluated_first(plan)
    first = () if before is None else MeasuredEvaluation(plan.store, before).scores
    prompts = measured.prompts()
    files = {each.name: PurePosixPath(each.prompts).name for each in plan.config.evaluate.sets}
    missing = () if plan.target_folders is None else measured.write_images(folder / IMAGES_FOLDER, plan.target_folders)
    described, machines = read_description(plan.store), recorded_machines(RunReader(plan.store))
    return EvaluationCard(
        run=plan.store.run,
        version=plan.policy.version,
        policy_digest=plan.policy.digest,
        weights=dict(weights),
        merged=plan.base is not None,
        # Of a run that started from an adapter it covers that too, which the export does not need.
        base_digest=(plan.base_digest or None) if plan.config.policy.adapter is None else None,
        settings=settings_of(plan.config),
        machine=machines[-1] if machines else Machine(code=None, processor=None, versions={}),
        fingerprints=described.get("identity", {}).get("code", {}),
        datasets=describe_datasets(prompts, files),
        prompts=() if plan.target_folders is None else prompts,
        samples=measured.samples,
        scores=measured.scores,
        before=tuple(each.model_copy(update={"values": ()}) for each in first),
        without_prompts=plan.target_folders is None,
        missing=missing,
    )


def _evaluated_first(plan: ExportPlan) -> StoredEvaluation | None:
    """Return the evaluation of the policy that training started from; None where it is not stored."""
    version = plan.origin.first_version
    # The policy of a replay's source is not in this run, which itself makes none of this version.
    initial = None if version else choose_policy(plan.store, 0, plan.base_digest)[0].averaged
    return find_evaluation(plan.store, evaluation_folder(version), plan.config, initial)


def evaluation_report(plan: ExportPlan, card: EvaluationCard | None) -> Report:
    """Return the held-out scores of the policy that training started from and of the version, and how they were made.

    The interval is over prompts.
    """
    version, run = plan.policy.version, plan.store.run
    if card is None:
        note = f"Version {version} was not evaluated on held-out prompts: run grpo evaluate {run}@{version}."
        return Report("", tables=[Table("", [], note=note)])
    origin, start = reward_origin(HELDOUT, plan.origin.rescoring), plan.origin.started_from
    before = {(each.label, each.role): each for each in card.before}
    rows = [
        {
            "": f"{each.title}{origin}" if each.role == "mix" else each.title,
            "before": _with_interval(before.get((each.label, each.role))),
            f"version {version}": _with_interval(each),
        }
        for each in card.scores
    ]
    of_start = f" Before is {start}." if start is not None else ""
    meaning = f"Means over {counted(len(card.samples), 'sample')}, with 95 % intervals over prompts.{of_start}"
    return Report("", evaluation_facts(card, plan.config), [Table("", rows, note=meaning)], notes=[_repeatable(card)])


def _with_interval(score: CardScore | None) -> str:
    if score is None or score.low is None:
        return number(None if score is None else score.mean)
    return f"{number(score.mean)} ({number(score.low)} to {number(score.high)})"


def _repeatable(card: EvaluationCard) -> str:
    if card.without_prompts:
        return f"{EVALUATION_FILE} has every setting and score, and not the prompts: nobody can repeat it from here."
    if card.missing:
        images = counted(len(card.missing), "image")
        return f"{EVALUATION_FILE} lacks {images}, not found at the export: it cannot be repeated from here."
    repeats = "grpo evaluate FOLDER --card, with the path of this folder, repeats it"
    return f"{repeats}; {EVALUATION_FILE} has its settings, prompts and scores."


def verification_section(plan: ExportPlan) -> Report:
    """Return what the run's stored verification found, first what speaks against it; or how to make one."""
    if plan.verification is None:
        return Report("", notes=[f"Not verified: grpo verify {plan.store.run} computes its stages again."])
    lineage = read_description(plan.store).get(LINEAGE)
    last = last_version(plan.store)
    return verification_report(plan.verification, shortcomings(plan.verification, plan.policy, lineage, last))
